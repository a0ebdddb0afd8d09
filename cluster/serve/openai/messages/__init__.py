"""`/v1/messages`, Anthropic's API: its body, its answer, its events. Nothing is stored."""

from .answer import answer, events
from .body import CountBody, MessagesBody, add, counted

__all__ = ["CountBody", "MessagesBody", "add", "answer", "counted", "events"]
