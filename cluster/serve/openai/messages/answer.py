"""The answer of `/v1/messages`, whole or as events in Anthropic's order.

message_start; of each block content_block_start, its deltas, content_block_stop; message_delta with
the reason and the usage; message_stop. A block ends where another kind of text begins.
"""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator
from dataclasses import replace
from typing import Any

from .....engine.chat.reader import Arguments, CallBegin, Content, Event, Reasoning
from .....engine.outputs import Chunk
from .....errors import OutriderError
from ..answers import Message, MessageUsage, StopReason
from ..errors import messages_error_body
from ..generation import Generation
from .body import MessagesBody

Fields = dict[str, Any]


class MessageMaker:
    """One message while it is made: the blocks that have ended, and the one that is open."""

    def __init__(self, generation: Generation, body: MessagesBody, message_id: str) -> None:
        self._generation = generation
        self._body = body
        self._id = message_id
        self.job = generation.jobs[0]  # its only completion
        choice = body.tool_choice
        self._parallel = choice is None or not (
            choice.disable_parallel_tool_use or choice.type == "tool"
        )
        self._blocks: list[Fields] = []
        self._open: Fields | None = None
        self._pieces: list[str] = []
        self._space = ""  # between blocks, kept back until text follows it

    def message(self, *, ended: bool) -> Message:
        """The message with the blocks that have ended."""
        reason: StopReason | None = None
        sequence: str | None = None
        if ended:
            reason, sequence = self._stop()
        message: Message = {
            "id": self._id,
            "type": "message",
            "role": "assistant",
            "model": self._generation.model_name,
            "content": list(self._blocks),
            "stop_reason": reason,
            "stop_sequence": sequence,
            "usage": self.usage(),
        }
        if ended and self.job.request.speculation.trace:
            message["speculation_trace"] = self.job.trace()
        return message

    def usage(self) -> MessageUsage:
        """Tokens so far; as Anthropic counts, the input is without what the prefix cache had."""
        usage = self._generation.usage()
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        return {
            "input_tokens": usage["prompt_tokens"] - cached,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": cached,
            "output_tokens": usage["completion_tokens"],
            "speculation": usage["speculation"],
        }

    def delta(self) -> Fields:
        """Why the message ended."""
        reason, sequence = self._stop()
        return {"stop_reason": reason, "stop_sequence": sequence}

    def push(self, chunk: Chunk, *, last: bool) -> list[Fields]:
        """The events that a chunk makes."""
        events: list[Fields] = []
        for event in self.job.read(chunk.text, last=last, parallel=self._parallel):
            events += self._add(event)
        if last and self._space and self._open is None and not self._blocks:
            space = self._space
            events += self._begin({"type": "text", "text": ""})
            events += self._piece("text_delta", "text", space)
        if last:
            events += self._end()
        return events

    def _add(self, event: Event) -> list[Fields]:
        if isinstance(event, CallBegin):
            call_id = event.id or self._generation.frontend.chat.new_id()
            return self._begin({"type": "tool_use", "id": call_id, "name": event.name, "input": {}})
        if isinstance(event, Arguments):
            return self._piece("input_json_delta", "partial_json", event.text)
        kind, text = "thinking" if isinstance(event, Reasoning) else "text", event.text
        events: list[Fields] = []
        if self._open is None or self._open["type"] != kind:
            if isinstance(event, Content):
                text = self._space = self._space + text
                if not text.strip():  # what stands around thinking and calls is no block
                    return []
            empty = {"signature": ""} if kind == "thinking" else {}
            events += self._begin({"type": kind, kind: "", **empty})
        if kind == "thinking" and self._body.hides_thinking:
            return events
        return events + self._piece(f"{kind}_delta", kind, text)

    def _begin(self, block: Fields) -> list[Fields]:
        events = self._end()
        self._open, self._space = block, ""
        index = len(self._blocks)
        return [
            *events,
            {"type": "content_block_start", "index": index, "content_block": dict(block)},
        ]

    def _piece(self, kind: str, name: str, text: str) -> list[Fields]:
        if not text:
            return []
        self._pieces.append(text)
        return [self._block_delta({"type": kind, name: text})]

    def _block_delta(self, delta: Fields) -> Fields:
        return {"type": "content_block_delta", "index": len(self._blocks), "delta": delta}

    def _end(self) -> list[Fields]:
        """Ends the open block, if there is one."""
        block, text = self._open, "".join(self._pieces)
        if block is None:
            return []
        events: list[Fields] = []
        if block["type"] == "tool_use":
            block["input"] = _arguments(text)
        else:
            block[block["type"]] = text
            if block["type"] == "thinking":  # clients wait for one; nothing here is signed
                events.append(self._block_delta({"type": "signature_delta", "signature": ""}))
        events.append({"type": "content_block_stop", "index": len(self._blocks)})
        self._blocks.append(block)
        self._open, self._pieces = None, []
        return events

    def _stop(self) -> tuple[StopReason, str | None]:
        """The reason in Anthropic's words, and the stop sequence that was met."""
        assembler = self.job.assembler
        if assembler.finish_reason == "length":
            return "max_tokens", None
        if any(block["type"] == "tool_use" for block in self._blocks):
            return "tool_use", None
        met = assembler.stop_reason
        return ("stop_sequence", met) if isinstance(met, str) else ("end_turn", None)


def _arguments(text: str) -> Any:
    """A call's arguments; those that `max_tokens` has cut are no object, and come as they are."""
    try:
        return json.loads(text or "{}")
    except ValueError:
        return {"incomplete_json": text}


async def answer(generation: Generation, body: MessagesBody, message_id: str) -> Message:
    """The whole message, once everything is finished."""
    made = MessageMaker(generation, body, message_id)
    assembler = made.job.assembler
    made.push(replace(assembler.chunk(), text=assembler.output().text), last=True)
    return made.message(ended=True)


async def events(
    generation: Generation, body: MessagesBody, message_id: str
) -> AsyncGenerator[Fields, None]:
    """Every event of the message.

    Raises:
        OutriderError: before anything was produced; later, an `error` event ends the stream.
    """
    made, begun = MessageMaker(generation, body, message_id), False
    traced: list[Fields] = []
    async with generation.running() as steps:
        try:
            async for step in steps:
                if not begun:
                    begun = True
                    message = made.message(ended=False)
                    message["usage"]["output_tokens"] = 0
                    yield {"type": "message_start", "message": message}
                traced += step.job.chunk_extras(step.chunk).get("speculation_trace", ())
                for event in made.push(step.chunk, last=step.last):
                    if traced and event["type"] == "content_block_delta":
                        event["speculation_trace"], traced = traced, []
                    yield event
        except OutriderError as error:
            if not begun:
                raise
            yield messages_error_body(error)
            return
    yield {"type": "message_delta", "delta": made.delta(), "usage": made.usage()}
    yield {"type": "message_stop"}
