"""The answer of `/v1/responses`: the response around its items."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import replace
from itertools import count
from math import inf
from typing import Any

from .....engine.chat.reader import Arguments, CallBegin, Content, Event, Parser, Reasoning
from .....engine.outputs import Chunk
from .....errors import OutriderError
from ..answers import Response, ResponseUsage
from ..errors import error_body
from ..generation import Generation, Job, token_logprobs
from .body import NamedFunction, ResponsesBody, Status

Fields = dict[str, Any]


class TextItem:
    """A message or a reasoning item: one part with a text.

    Args:
        name: what ids are made of.
        index: its place in the output.
    """

    def __init__(self, name: str, index: int, kind: type[Content] | type[Reasoning]) -> None:
        self.kind = kind
        self._is_message = kind is Content
        self._part_type = "output_text" if self._is_message else "reasoning_text"
        prefix = "msg" if self._is_message else "rs"
        self._id = f"{prefix}_{name}" if index == 0 else f"{prefix}_{name}_{index}"
        self._index = index
        self._place: Fields = {"item_id": self._id, "output_index": index}
        self._text: list[str] = []
        self._logprobs: list[Fields] = []

    def item(self, status: str) -> Fields:
        """What it is by now."""
        content = [] if status == "in_progress" else [self._part()]
        if self._is_message:
            head: Fields = {"id": self._id, "type": "message", "role": "assistant"}
        else:
            head = {"id": self._id, "type": "reasoning", "summary": [], "encrypted_content": None}
        return {**head, "status": status, "content": content}

    def begin(self) -> list[Fields]:
        """Its first events."""
        return [
            _event("output_item.added", output_index=self._index, item=self.item("in_progress")),
            _event("content_part.added", **self._place, content_index=0, part=self._part()),
        ]

    def add(self, text: str, logprobs: Sequence[Fields] = ()) -> Fields:
        """The event of another piece; only a message's tokens have log-probabilities."""
        self._text.append(text)
        self._logprobs += logprobs
        fields: Fields = {**self._place, "content_index": 0, "delta": text}
        if self._is_message:
            fields["logprobs"] = list(logprobs)
        return _event(f"{self._part_type}.delta", **fields)

    def end(self, status: str) -> list[Fields]:
        """Its last events."""
        place, part = {**self._place, "content_index": 0}, self._part()
        whole = {name: part[name] for name in ("text", "logprobs") if name in part}
        return [
            _event(f"{self._part_type}.done", **place, **whole),
            _event("content_part.done", **place, part=part),
            _event("output_item.done", output_index=self._index, item=self.item(status)),
        ]

    def _part(self) -> Fields:
        part: Fields = {"type": self._part_type, "text": "".join(self._text)}
        if self._is_message:
            part |= {"annotations": [], "logprobs": list(self._logprobs)}
        return part


class CallItem:
    """A call of a function."""

    def __init__(self, name: str, index: int, call_id: str, function: str) -> None:
        self._id = f"fc_{name}_{index}"
        self._index = index
        self._place: Fields = {"item_id": self._id, "output_index": index}
        self._call_id = call_id
        self._function = function
        self._arguments: list[str] = []

    def item(self, status: str) -> Fields:
        """What it is by now."""
        return {
            "id": self._id,
            "type": "function_call",
            "status": status,
            "call_id": self._call_id,
            "name": self._function,
            "arguments": "" if status == "in_progress" else "".join(self._arguments),
        }

    def begin(self) -> list[Fields]:
        """Its first event."""
        item = self.item("in_progress")
        return [_event("output_item.added", output_index=self._index, item=item)]

    def add(self, text: str) -> Fields:
        """The event of another piece of its arguments."""
        self._arguments.append(text)
        return _event("function_call_arguments.delta", **self._place, delta=text)

    def end(self, status: str) -> list[Fields]:
        """Its last events."""
        whole = {"name": self._function, "arguments": "".join(self._arguments)}
        return [
            _event("function_call_arguments.done", **self._place, **whole),
            _event("output_item.done", output_index=self._index, item=self.item(status)),
        ]


def _event(kind: str, **fields: Any) -> Fields:
    return {"type": f"response.{kind}", **fields}


class TextLogprobs:
    """Log-probabilities of tokens, given out with the text that they belong to.

    Args:
        parser: tells which characters are content; None: all are.
    """

    def __init__(self, parser: Parser | None) -> None:
        self._parser = parser
        self._waiting: list[tuple[int, Fields]] = []  # with the offsets of tokens

    def push(self, offsets: Sequence[int], entries: Sequence[Fields]) -> None:
        """Tokens that have come; no entries: none are wanted."""
        if entries:
            self._waiting += zip(offsets, entries, strict=True)

    def take(self, end: float = inf) -> list[Fields]:
        """Of the tokens before `end` that are content."""
        if self._parser is None:
            count = len(self._waiting)
        else:
            count = sum(offset < end for offset, _ in self._waiting)
        taken, self._waiting = self._waiting[:count], self._waiting[count:]
        return [entry for offset, entry in taken if self._is_content(offset)]

    def _is_content(self, offset: int) -> bool:
        if self._parser is None:
            return True
        spans = self._parser.reader.content
        place = bisect_right(spans, (offset, inf)) - 1
        return place >= 0 and offset < spans[place][1]


class Output:
    """The items so far.

    An item ends where another kind of text begins: reasoning, text for the user, a call. Text comes
    in pieces, which make events; an answer that is not streamed takes it whole.

    Args:
        name: what their ids are made of.
        new_id: makes the ids of calls.
        parallel: whether there may be several calls.
    """

    def __init__(self, name: str, job: Job, new_id: Callable[[], str], *, parallel: bool) -> None:
        self._name = name
        self._job = job
        self._new_id = new_id
        self._parallel = parallel
        self._open: TextItem | CallItem | None = None
        self.items: list[Any] = []  # that have ended
        self.logprobs = TextLogprobs(job.parser)

    def push(self, text: str, status: str | None = None) -> list[Fields]:
        """The events that `text` makes; `status`: it is the last, and the response ends so."""
        events: list[Fields] = []
        last = status is not None
        for event in self._job.read(text, last=last, parallel=self._parallel):
            events += self._add(event)
        if status is not None:
            if self._open is None and not self.items:
                events += self._begin(self._text_item(Content))
            events += self._flush()
            events += self._end(status)
        return events

    def _add(self, event: Event) -> list[Fields]:
        if isinstance(event, Arguments):
            assert isinstance(self._open, CallItem), event
            return [self._open.add(event.text)]
        events: list[Fields] = []
        if isinstance(event, CallBegin):
            events += self._end("completed")
            index = len(self.items)
            call_id = event.id or self._new_id()
            return events + self._begin(CallItem(self._name, index, call_id, event.name))
        if not isinstance(self._open, TextItem) or self._open.kind is not type(event):
            events += self._end("completed")
            events += self._begin(self._text_item(type(event)))
        assert isinstance(self._open, TextItem)
        logprobs = self.logprobs.take(event.end) if isinstance(event, Content) else ()
        return [*events, self._open.add(event.text, logprobs)]

    def _begin(self, item: TextItem | CallItem) -> list[Fields]:
        self._open = item
        return item.begin()

    def _end(self, status: str) -> list[Fields]:
        """Ends the open item, if there is one."""
        if self._open is None:
            return []
        item, self._open = self._open, None
        self.items.append(item.item(status))
        return item.end(status)

    def _flush(self) -> list[Fields]:
        """Tokens without text at the end of a message, such as the one that ended it."""
        if not isinstance(self._open, TextItem) or self._open.kind is not Content:
            return []
        rest = self.logprobs.take()
        return [self._open.add("", rest)] if rest else []

    def _text_item(self, kind: type[Content] | type[Reasoning]) -> TextItem:
        return TextItem(self._name, len(self.items), kind)


_REASONS = {"length": "max_output_tokens"}


class ResponseMaker:
    """One response while it is made: what it and its events have in common."""

    def __init__(self, generation: Generation, body: ResponsesBody, response_id: str) -> None:
        self.generation = generation
        self.body = body
        self.job = generation.jobs[0]  # its only completion
        self._id = response_id
        single = body.parallel_tool_calls is False or isinstance(body.tool_choice, NamedFunction)
        name, new_id = response_id.removeprefix("resp_"), generation.frontend.chat.new_id
        self.output = Output(name, self.job, new_id, parallel=not single)

    @property
    def incomplete(self) -> str | None:
        """Why the text is not whole, if it is not."""
        return _REASONS.get(self.job.assembler.finish_reason or "")

    @property
    def final_status(self) -> Status:
        """The status of a finished response."""
        return "completed" if self.incomplete is None else "incomplete"

    def response(self, status: Status) -> Response:
        """The response object with the items that have ended; settings are those in effect."""
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
            "model": self.generation.frontend.model_name,
            "output": list(self.output.items),
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
        """The events that a chunk makes."""
        if self.body.wants_logprobs:
            vocabulary, top = self.job.assembler.vocabulary, self.body.top_logprobs or 0
            entries = token_logprobs(vocabulary, chunk.token_ids, chunk.logprobs, top)
            self.output.logprobs.push(chunk.offsets, entries)
        return self.output.push(chunk.text, self.final_status if last else None)

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
    """The whole response, once everything is finished."""
    made = ResponseMaker(generation, body, response_id)
    assembler = made.job.assembler
    made.push(replace(assembler.chunk(), text=assembler.output().text), last=True)
    return made.response(made.final_status)


async def events(
    generation: Generation, body: ResponsesBody, response_id: str
) -> AsyncGenerator[Fields, None]:
    """Every event of the response, in OpenAI's order, each with its number in the sequence:
    created, in_progress, the events of each item, completed or incomplete.

    Raises:
        OutriderError: before anything was produced; later, an `error` event ends the stream.
    """
    made, numbers, begun = ResponseMaker(generation, body, response_id), count(), False
    traced: list[dict[str, Any]] = []  # steps whose text has not been sent yet

    def numbered(event: Fields) -> Fields:
        return {"type": event["type"], "sequence_number": next(numbers), **event}

    def lifecycle(kind: str, status: Status) -> Fields:
        return numbered({"type": f"response.{kind}", "response": made.response(status)})

    async with aclosing(generation.chunks()) as steps:
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
