"""`/v1/responses`: its body, answer and events. Nothing is stored."""

from .answer import answer, events
from .body import ResponsesBody, add

__all__ = ["ResponsesBody", "add", "answer", "events"]
