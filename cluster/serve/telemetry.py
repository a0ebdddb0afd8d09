"""Logs and traces. With `log_format: json`, every record of `outrider` is a line of JSON.

`extra={"request_id": ...}` becomes a field of the record. With JSON, an ingress also logs every
completion. Outputs are never logged; prompts are logged only on request (`access.log_prompts`).
"""

from __future__ import annotations

import json
import logging
import sys
import time
from dataclasses import asdict
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Literal

from starlette.datastructures import Headers

from ...engine.outputs import Assembler
from ...errors import ConfigError
from ...scheduler.types import Request, RequestTimes

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.trace import Tracer


LogFormat = Literal["text", "json"]
ROOT = "outrider"
_TEXT = "%(asctime)s %(levelname)s %(name)s: %(message)s"
_completions = logging.getLogger("outrider.completions")
_prompts = logging.getLogger("outrider.prompts")
_prompts.setLevel(logging.INFO)  # prompts are logged on request, whatever else is logged
_KNOWN = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}


class JsonFormatter(logging.Formatter):
    """Formats a record as a JSON object: time, level, logger, message and extra fields."""

    def format(self, record: logging.LogRecord) -> str:
        moment = datetime.fromtimestamp(record.created, UTC)
        line: dict[str, Any] = {
            "time": moment.isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        line.update({name: value for name, value in vars(record).items() if name not in _KNOWN})
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False, default=str)


def configure_logging(log_format: LogFormat) -> None:
    """Sets up the process's logger of `outrider`; for `text`, only if it has no handler."""
    logger = logging.getLogger(ROOT)
    if log_format == "text":
        if not logger.hasHandlers():
            plain = logging.StreamHandler(sys.stderr)
            plain.setFormatter(logging.Formatter(_TEXT))
            logger.addHandler(plain)
        return
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter())
    logger.handlers = [handler]
    logger.propagate = False
    logger.setLevel(logging.INFO)


def log_prompt(request: Request, holder: str, text: str) -> None:
    """Logs a prompt; `holder` is the name of the key that sent it."""
    fields = {"request_id": request.id}
    _prompts.info("request %s of %r: %r", request.id, holder, text, extra=fields)


def log_completion(request: Request, output: Assembler, reason: str, elapsed_s: float) -> None:
    """Logs counts of a completion that has ended, but neither prompt nor text."""
    if not _completions.isEnabledFor(logging.INFO):
        return
    fields = {
        "request_id": request.id,
        "finish_reason": reason,
        "elapsed_s": round(elapsed_s, 6),
        "num_prompt_tokens": len(request.prompt),
        "num_cached_tokens": output.num_cached_tokens,
        "num_output_tokens": len(output.token_ids),
        "speculation": asdict(output.speculation),
    }
    _completions.info("completion ended: %s", reason, extra=fields)


_ERRORS = ("error", "abort")


class Tracing:
    """Sends the OpenTelemetry spans of one ingress; unused without an OTLP endpoint.

    The library is the optional extra `otel`, which is imported only when needed.

    Args:
        provider: an OpenTelemetry `TracerProvider`.
    """

    def __init__(self, provider: TracerProvider) -> None:
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        self.provider = provider
        self.tracer = provider.get_tracer("outrider")
        self._propagator = TraceContextTextMapPropagator()

    @classmethod
    def to(cls, endpoint: str) -> Tracing:
        """Sends spans to an OTLP endpoint over HTTP, in batches, from a thread.

        Raises:
            ConfigError: the extra `otel` is not installed.
        """
        try:
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
            from opentelemetry.sdk.resources import Resource
            from opentelemetry.sdk.trace import TracerProvider
            from opentelemetry.sdk.trace.export import BatchSpanProcessor
        except ImportError as error:
            raise ConfigError.at(
                "serve.otlp_endpoint", f"{error.name} is not installed; install outrider[otel]"
            ) from None
        provider = TracerProvider(resource=Resource.create({"service.name": "outrider"}))
        provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint)))
        return cls(provider)

    def begin(self, headers: Headers, request: Request, model: str) -> CompletionSpans:
        """Starts the spans of a completion, below the trace in `traceparent` and `tracestate`."""
        context = self._propagator.extract(dict(headers))
        return CompletionSpans(self.tracer, context, request, model)

    def shutdown(self) -> None:
        """Sends the remaining spans."""
        self.provider.shutdown()


class CompletionSpans:
    """The spans of one completion, created when it has ended.

    The span `llm_request` is below the caller's (W3C `traceparent`) and has the children `queue`,
    `prefill` and `decode`. They are computed from times measured on this host and durations
    measured by the engine, so clocks need not be synchronised.
    """

    def __init__(self, tracer: Tracer, context: Any, request: Request, model: str) -> None:
        self._tracer = tracer
        self._context = context
        self._request = request
        self._model = model
        self._start_ns = time.time_ns()
        self._first_ns: int | None = None
        self._times: RequestTimes | None = None

    def first(self, times: RequestTimes) -> None:
        """Records the arrival of the first tokens."""
        if self._first_ns is None:
            self._first_ns, self._times = time.time_ns(), times

    def end(self, output: Assembler, reason: str) -> None:
        """Records the spans when the completion has ended for `reason`."""
        from opentelemetry.trace import SpanKind, Status, StatusCode, set_span_in_context

        root = self._tracer.start_span(
            "llm_request",
            context=self._context,
            kind=SpanKind.SERVER,
            start_time=self._start_ns,
            attributes={
                "gen_ai.request.id": self._request.id,
                "gen_ai.response.model": self._model,
                "gen_ai.usage.input_tokens": len(self._request.prompt),
                "gen_ai.usage.output_tokens": len(output.token_ids),
                "gen_ai.response.finish_reasons": [reason],
                "outrider.cached_tokens": output.num_cached_tokens,
            },
        )

        def child(name: str, start_ns: int, end_ns: int, **attributes: Any) -> None:
            span = self._tracer.start_span(
                name,
                context=set_span_in_context(root),
                start_time=start_ns,
                attributes={
                    f"outrider.speculation.{key}": each for key, each in attributes.items()
                },
            )
            span.end(max(start_ns, end_ns))

        if reason in _ERRORS:
            root.set_status(Status(StatusCode.ERROR, reason))
        if self._first_ns is not None and self._times is not None:
            seated_ns = self._first_ns - int(self._times.prefill_s * 1e9)
            queued_ns = max(self._start_ns, seated_ns - int(self._times.queue_s * 1e9))
            seated_ns = max(queued_ns, seated_ns)
            root.set_attribute("gen_ai.latency.time_in_queue", self._times.queue_s)
            first_s = (self._first_ns - self._start_ns) / 1e9
            root.set_attribute("gen_ai.latency.time_to_first_token", first_s)
            child("queue", queued_ns, seated_ns)
            child("prefill", seated_ns, self._first_ns)
            usage = output.speculation
            figures = {**asdict(usage), "mean_accepted_len": usage.mean_accepted_len}
            child("decode", self._first_ns, time.time_ns(), **figures)
        root.end()
