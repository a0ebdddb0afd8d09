"""The answer of `/v1/responses`: the response and its output items."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import AsyncGenerator, Sequence
from itertools import count
from math import inf
from typing import Any

from .....engine.chat.reader import Arguments, CallBegin, Content, Event, Parser, Reasoning
from .....engine.outputs import Chunk
from .....errors import OutriderError
from ..answers import Response, ResponseUsage
from ..errors import error_body
from ..generation import Generation, token_logprobs
from .body import NamedFunction, ResponsesBody, Status

Fields = dict[str, Any]


class Item:
    """An item of the output: its current state and its events.

    Args:
        item_id: its id.
        index: its index in the output.
        head: fields that do not change.
    """

    def __init__(self, item_id: str, index: int, **head: Any) -> None:
        self._head = {"id": item_id, **head}
        self._index = index
        self._place: Fields = {"item_id": item_id, "output_index": index}
        self._pieces: list[str] = []

    @property
    def text(self) -> str:
        """The text so far."""
        return "".join(self._pieces)

    def item(self, status: str) -> Fields:
        """Returns the item's current state."""
        return {**self._head, "status": status, **self._body(status)}

    def begin(self) -> list[Fields]:
        """Returns its first events."""
        item = self.item("in_progress")
        return [_event("output_item.added", output_index=self._index, item=item)]

    def end(self, status: str) -> list[Fields]:
        """Returns its last events."""
        return [_event("output_item.done", output_index=self._index, item=self.item(status))]

    def _body(self, status: str) -> Fields:
        raise NotImplementedError


class TextItem(Item):
    """A message or reasoning item, which has one part with text.

    Args:
        name: part of the ids.
    """

    def __init__(self, name: str, index: int, kind: type[Content] | type[Reasoning]) -> None:
        self.kind = kind
        self._is_message = kind is Content
        suffix = name if index == 0 else f"{name}_{index}"
        if self._is_message:
            super().__init__(f"msg_{suffix}", index, type="message", role="assistant")
        else:
            empty: Fields = {"summary": [], "encrypted_content": None}
            super().__init__(f"rs_{suffix}", index, type="reasoning", **empty)
        self._part_type = "output_text" if self._is_message else "reasoning_text"
        self._place["content_index"] = 0
        self._logprobs: list[Fields] = []

    def begin(self) -> list[Fields]:
        added = _event("content_part.added", **self._place, part=self._part())
        return [*super().begin(), added]

    def add(self, text: str, logprobs: Sequence[Fields] = ()) -> Fields:
        """Adds a piece and returns its event; only tokens of messages have log-probabilities."""
        self._pieces.append(text)
        self._logprobs += logprobs
        of_tokens = {"logprobs": list(logprobs)} if self._is_message else {}
        return _event(f"{self._part_type}.delta", **self._place, delta=text, **of_tokens)

    def end(self, status: str) -> list[Fields]:
        part = self._part()
        whole = {name: part[name] for name in ("text", "logprobs") if name in part}
        return [
            _event(f"{self._part_type}.done", **self._place, **whole),
            _event("content_part.done", **self._place, part=part),
            *super().end(status),
        ]

    def _body(self, status: str) -> Fields:
        return {"content": [] if status == "in_progress" else [self._part()]}

    def _part(self) -> Fields:
        part: Fields = {"type": self._part_type, "text": self.text}
        if self._is_message:
            part |= {"annotations": [], "logprobs": list(self._logprobs)}
        return part


class CallItem(Item):
    """A call of a function."""

    def __init__(self, name: str, index: int, call_id: str, function: str) -> None:
        head = {"type": "function_call", "call_id": call_id, "name": function}
        super().__init__(f"fc_{name}_{index}", index, **head)

    def add(self, text: str) -> Fields:
        """Adds a piece of the arguments and returns its event."""
        self._pieces.append(text)
        return _event("function_call_arguments.delta", **self._place, delta=text)

    def end(self, status: str) -> list[Fields]:
        whole = {"name": self._head["name"], "arguments": self.text}
        done = _event("function_call_arguments.done", **self._place, **whole)
        return [done, *super().end(status)]

    def _body(self, status: str) -> Fields:
        return {"arguments": "" if status == "in_progress" else self.text}


def _event(kind: str, **fields: Any) -> Fields:
    return {"type": f"response.{kind}", **fields}


class TextLogprobs:
    """Holds log-probabilities of tokens until their text is emitted.

    Args:
        parser: determines which characters are content; None: all.
    """

    def __init__(self, parser: Parser | None) -> None:
        self._parser = parser
        self._waiting: list[tuple[int, Fields]] = []  # each with its token's offset

    def push(self, offsets: Sequence[int], entries: Sequence[Fields]) -> None:
        """Adds tokens that have arrived; without entries, none are wanted."""
        if entries:
            self._waiting += zip(offsets, entries, strict=True)

    def take(self, end: float = inf) -> list[Fields]:
        """Removes the tokens before `end`; returns the entries of those that are content."""
        if self._parser is None:
            taken, self._waiting = self._waiting, []
            return [entry for _, entry in taken]
        count = sum(offset < end for offset, _ in self._waiting)
        taken, self._waiting = self._waiting[:count], self._waiting[count:]
        spans = self._parser.reader.content
        before = [bisect_right(spans, (offset, inf)) - 1 for offset, _ in taken]
        return [
            entry
            for (offset, entry), place in zip(taken, before, strict=True)
            if place >= 0 and offset < spans[place][1]
        ]


class ResponseMaker:
    """Builds one response from chunks: its items, and the fields shared by its events.

    An item ends when another kind of text begins: reasoning, text for the user, or a call. A
    streamed response is built from pieces of text, each of which makes events; other responses are
    built from the whole text.
    """

    def __init__(self, generation: Generation, body: ResponsesBody, response_id: str) -> None:
        self.generation = generation
        self.body = body
        self.job = generation.jobs[0]  # its only completion
        self._id = response_id
        self._name = response_id.removeprefix("resp_")  # part of the ids of items
        single = body.parallel_tool_calls is False or isinstance(body.tool_choice, NamedFunction)
        self._parallel = not single
        self._open: TextItem | CallItem | None = None
        self._items: list[Any] = []  # finished items
        self._logprobs = TextLogprobs(self.job.parser)

    @property
    def incomplete(self) -> str | None:
        """Why the text is incomplete; None if it is complete."""
        is_cut = self.job.assembler.finish_reason == "length"
        return "max_output_tokens" if is_cut else None

    @property
    def final_status(self) -> Status:
        """The status of a finished response."""
        return "completed" if self.incomplete is None else "incomplete"

    def response(self, status: Status) -> Response:
        """Returns the response object with the finished items and the settings in effect."""
        body, sampling = self.body, self.job.request.sampling
        effort = body.reasoning.effort if body.reasoning is not None else None
        choice = body.tool_choice
        ended = status != "in_progress"
        reason = self.incomplete if ended else None
        named = choice.model_dump() if isinstance(choice, NamedFunction) else choice or "auto"
        response: Response = {
            "id": self._id,
            "object": "response",
            "created_at": self.generation.created_at,
            "status": status,
            "background": False,
            "error": None,
            "incomplete_details": None if reason is None else {"reason": reason},
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "max_tool_calls": None,
            "metadata": body.metadata or {},
            "model": self.generation.model_name,
            "output": list(self._items),
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "previous_response_id": None,
            "prompt_cache_key": body.prompt_cache_key,
            "reasoning": {"effort": effort, "summary": None},
            "safety_identifier": body.safety_identifier,
            "service_tier": "default",
            "store": False,
            "temperature": sampling.temperature,
            "text": {"format": self._format(), "verbosity": "medium"},
            "tool_choice": named,
            "tools": [tool.shown() for tool in body.tools or ()],
            "top_logprobs": body.top_logprobs or 0,
            "top_p": sampling.top_p,
            "truncation": "disabled",
            "usage": self._usage() if ended else None,
            "user": body.user,
        }
        if ended and self.job.request.speculation.trace:
            response["speculation_trace"] = self.job.trace()
        return response

    def push(self, chunk: Chunk, *, last: bool) -> list[Fields]:
        """Returns the events of a chunk."""
        if self.body.wants_logprobs:
            vocabulary, top = self.job.assembler.vocabulary, self.body.top_logprobs or 0
            entries = token_logprobs(vocabulary, chunk.token_ids, chunk.logprobs, top)
            self._logprobs.push(chunk.offsets, entries)
        events: list[Fields] = []
        for event in self.job.read(chunk.text, last=last, parallel=self._parallel):
            events += self._add(event)
        if last:
            if self._open is None and not self._items:
                events += self._begin(self._text_item(Content))
            events += self._flush()
            events += self._end(self.final_status)
        return events

    def _add(self, event: Event) -> list[Fields]:
        if isinstance(event, Arguments):
            assert isinstance(self._open, CallItem), event
            return [self._open.add(event.text)]
        events: list[Fields] = []
        if isinstance(event, CallBegin):
            events += self._end("completed")
            call_id = event.id or self.generation.frontend.chat.new_id()
            return events + self._begin(CallItem(self._name, len(self._items), call_id, event.name))
        if not isinstance(self._open, TextItem) or self._open.kind is not type(event):
            events += self._end("completed")
            events += self._begin(self._text_item(type(event)))
        assert isinstance(self._open, TextItem)
        logprobs = self._logprobs.take(event.end) if isinstance(event, Content) else ()
        return [*events, self._open.add(event.text, logprobs)]

    def _begin(self, item: TextItem | CallItem) -> list[Fields]:
        self._open = item
        return item.begin()

    def _end(self, status: str) -> list[Fields]:
        """Ends the open item, if there is one."""
        if self._open is None:
            return []
        item, self._open = self._open, None
        self._items.append(item.item(status))
        return item.end(status)

    def _flush(self) -> list[Fields]:
        """Returns events for tokens without text at the end of a message, such as the end token."""
        if not isinstance(self._open, TextItem) or self._open.kind is not Content:
            return []
        rest = self._logprobs.take()
        return [self._open.add("", rest)] if rest else []

    def _text_item(self, kind: type[Content] | type[Reasoning]) -> TextItem:
        return TextItem(self._name, len(self._items), kind)

    def _format(self) -> dict[str, Any]:
        wanted = self.body.text.format if self.body.text is not None else None
        if wanted is None:
            return {"type": "text"}
        shown = wanted.model_dump(by_alias=True, exclude_none=True)
        if wanted.type == "json_schema":
            shown = {"name": "schema", "strict": True, **shown}
        return shown

    def _usage(self) -> ResponseUsage:
        usage = self.generation.usage()
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        reasoning = usage["completion_tokens_details"]["reasoning_tokens"]
        return {
            "input_tokens": usage["prompt_tokens"],
            "input_tokens_details": {"cached_tokens": cached, "cache_write_tokens": 0},
            "output_tokens": usage["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": reasoning},
            "total_tokens": usage["total_tokens"],
            "speculation": usage["speculation"],
        }


async def answer(generation: Generation, body: ResponsesBody, response_id: str) -> Response:
    """Returns the whole response, after everything has finished."""
    made = ResponseMaker(generation, body, response_id)
    made.push(made.job.assembler.chunk(), last=True)
    return made.response(made.final_status)


async def events(
    generation: Generation, body: ResponsesBody, response_id: str
) -> AsyncGenerator[Fields, None]:
    """Yields every event of the response with its sequence number, in OpenAI's order.

    The order is: created, in_progress, the events of each item, completed or incomplete.

    Raises:
        OutriderError: only before the first event; later errors become an `error` event, which ends
            the stream.
    """
    made, numbers, begun = ResponseMaker(generation, body, response_id), count(), False
    traced: list[dict[str, Any]] = []  # steps whose text has not been sent yet

    def numbered(event: Fields) -> Fields:
        return {"type": event["type"], "sequence_number": next(numbers), **event}

    def lifecycle(kind: str, status: Status) -> Fields:
        return numbered({"type": f"response.{kind}", "response": made.response(status)})

    async with generation.running() as steps:
        try:
            async for step in steps:
                if not begun:
                    begun = True
                    yield lifecycle("created", "in_progress")
                    yield lifecycle("in_progress", "in_progress")
                found = made.push(step.chunk, last=step.last)
                traced += step.job.chunk_extras(step.chunk).get("speculation_trace", ())
                deltas = [event for event in found if "delta" in event]
                if traced and deltas:
                    deltas[-1]["speculation_trace"], traced = traced, []
                for event in found:
                    yield numbered(event)
        except OutriderError as error:
            if not begun:
                raise
            shown = error_body(error)["error"]
            code = shown["code"] or shown["type"]
            place = {"message": shown["message"], "param": shown["param"]}
            yield numbered({"type": "error", "code": code, **place})
            return
    yield lifecycle(made.final_status, made.final_status)
