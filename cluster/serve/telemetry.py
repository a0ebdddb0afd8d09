"""Logs and traces: with `log_format: json`, every record of `outrider` is a line of JSON.

A record with `extra={"request_id": ...}` keeps it as a field. The edge then also writes a line per
completion. Outputs are never logged, prompts only on request (`access.log_prompts`).
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
_prompts.setLevel(logging.INFO)  # whoever asks for prompts gets them, whatever else is logged
_KNOWN = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}


class JsonFormatter(logging.Formatter):
    """One JSON object a record: time, level, logger, message, and the record's extra fields."""

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
    """Sets up this process's logger of `outrider`; for `text`, only where it has no handler."""
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
    """One record of a prompt; `holder` is the name of the key that sent it."""
    fields = {"request_id": request.id}
    _prompts.info("request %s of %r: %r", request.id, holder, text, extra=fields)


def log_completion(request: Request, output: Assembler, reason: str, elapsed_s: float) -> None:
    """One record of a completion that has ended: numbers, and neither prompt nor text."""
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
    """Where the OpenTelemetry spans of one HTTP edge go; off without an OTLP endpoint.

    The library is the optional extra `otel`; nothing here imports it before it is needed.

    Args:
        provider: where spans go, an OpenTelemetry `TracerProvider`.
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
        """For a completion by `model`; the caller's trace is `traceparent` and `tracestate`."""
        context = self._propagator.extract(dict(headers))
        return CompletionSpans(self.tracer, context, request, model)

    def shutdown(self) -> None:
        """Sends what is left."""
        self.provider.shutdown()


class CompletionSpans:
    """The spans of one completion, made once it has ended.

    One span, `llm_request`, under the caller's (W3C `traceparent`), and below it `queue`, `prefill`
    and `decode`, from times measured on this host and durations measured by the engine: no clocks
    need to agree.
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
        """The first tokens have arrived."""
        if self._first_ns is None:
            self._first_ns, self._times = time.time_ns(), times

    def end(self, output: Assembler, reason: str) -> None:
        """The completion has ended, for `reason`: its spans are recorded."""
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
