"""`/v1/responses`: its body, its answer, its events. Nothing is stored."""

from .answer import answer, events
from .body import ResponsesBody, add

__all__ = ["ResponsesBody", "add", "answer", "events"]
