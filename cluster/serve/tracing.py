"""OpenTelemetry spans of completions, off unless an OTLP endpoint is configured.

Per completion one span, `llm_request`, under the caller's (W3C `traceparent`), and below it
`queue`, `prefill` and `decode`. The spans are made once a completion has ended, from times measured
on this host and durations measured by the engine, so that no clocks need to agree. The library is
the optional extra `otel`; nothing here imports it before it is needed.
"""

from __future__ import annotations

import time
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from ...engine.outputs import Assembler
from ...errors import ConfigError
from ...scheduler.types import Request, RequestTimes

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider

_ERRORS = ("error", "abort")


class Tracing:
    """Makes the spans of one HTTP edge.

    Args:
        provider: where spans go, an OpenTelemetry `TracerProvider`.
    """

    def __init__(self, provider: TracerProvider) -> None:
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        self.provider = provider
        self._tracer = provider.get_tracer("outrider")
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
            raise ConfigError(
                f"serve.otlp_endpoint: {error.name} is not installed; install outrider[otel]",
                field="serve.otlp_endpoint",
            ) from None
        provider = TracerProvider(resource=Resource.create({"service.name": "outrider"}))
        provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint)))
        return cls(provider)

    def context(self, headers: Headers) -> Any:
        """The caller's trace, from `traceparent` and `tracestate`; empty if there is none."""
        return self._propagator.extract(dict(headers))

    def completion(self, spans: CompletionSpans, output: Assembler, reason: str) -> None:
        """Records one completion that has ended, for `reason`."""
        from opentelemetry.trace import SpanKind, Status, StatusCode

        usage = output.speculation
        attributes: dict[str, Any] = {
            "gen_ai.request.id": spans.request.id,
            "gen_ai.response.model": spans.model,
            "gen_ai.usage.input_tokens": len(spans.request.prompt),
            "gen_ai.usage.output_tokens": len(output.token_ids),
            "gen_ai.response.finish_reasons": [reason],
            "outrider.cached_tokens": output.num_cached_tokens,
        }
        root = self._tracer.start_span(
            "llm_request",
            context=spans.context,
            kind=SpanKind.SERVER,
            start_time=spans.start_ns,
            attributes=attributes,
        )
        if reason in _ERRORS:
            root.set_status(Status(StatusCode.ERROR, reason))
        if spans.first_ns is not None and spans.times is not None:
            seated_ns = spans.first_ns - int(spans.times.prefill_s * 1e9)
            queued_ns = max(spans.start_ns, seated_ns - int(spans.times.queue_s * 1e9))
            seated_ns = max(queued_ns, seated_ns)
            root.set_attribute("gen_ai.latency.time_in_queue", spans.times.queue_s)
            first_s = (spans.first_ns - spans.start_ns) / 1e9
            root.set_attribute("gen_ai.latency.time_to_first_token", first_s)
            self._child(root, "queue", queued_ns, seated_ns)
            self._child(root, "prefill", seated_ns, spans.first_ns)
            decode: dict[str, Any] = {
                "outrider.speculation.drafter": usage.drafter,
                "outrider.speculation.num_steps": usage.num_steps,
                "outrider.speculation.num_drafts": usage.num_drafts,
                "outrider.speculation.num_draft_tokens": usage.num_draft_tokens,
                "outrider.speculation.num_accepted_tokens": usage.num_accepted_tokens,
                "outrider.speculation.mean_accepted_len": usage.mean_accepted_len,
                "outrider.speculation.synthetic": usage.synthetic,
            }
            self._child(root, "decode", spans.first_ns, time.time_ns(), decode)
        root.end()

    def shutdown(self) -> None:
        """Sends what is left."""
        self.provider.shutdown()

    def _child(
        self,
        root: Any,
        name: str,
        start_ns: int,
        end_ns: int,
        attributes: dict[str, Any] | None = None,
    ) -> None:
        from opentelemetry.trace import set_span_in_context

        span = self._tracer.start_span(
            name, context=set_span_in_context(root), start_time=start_ns, attributes=attributes
        )
        span.end(max(start_ns, end_ns))


class CompletionSpans:
    """Times of one completion while it runs."""

    def __init__(self, tracing: Tracing, context: Any, request: Request, model: str) -> None:
        self._tracing = tracing
        self.context = context
        self.request = request
        self.model = model
        self.start_ns = time.time_ns()
        self.first_ns: int | None = None
        self.times: RequestTimes | None = None

    def first(self, times: RequestTimes) -> None:
        """The first tokens have arrived."""
        if self.first_ns is None:
            self.first_ns, self.times = time.time_ns(), times

    def end(self, output: Assembler, reason: str) -> None:
        """The completion has ended, for `reason`."""
        self._tracing.completion(self, output, reason)


_CURRENT: ContextVar[tuple[Tracing, Any] | None] = ContextVar("outrider_tracing", default=None)


def begin_spans(request: Request, model: str) -> CompletionSpans | None:
    """For a completion by `model` of the HTTP request that is answered; None: tracing is off."""
    current = _CURRENT.get()
    return None if current is None else CompletionSpans(*current, request, model)


class TracingMiddleware:
    """Keeps the caller's trace for the completions of an HTTP request."""

    def __init__(self, app: ASGIApp, tracing: Tracing) -> None:
        self._app = app
        self._tracing = tracing

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        context = self._tracing.context(Headers(scope=scope))
        token = _CURRENT.set((self._tracing, context))
        try:
            await self._app(scope, receive, send)
        finally:
            _CURRENT.reset(token)
