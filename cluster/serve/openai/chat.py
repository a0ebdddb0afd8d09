"""`/v1/chat/completions`: answers conversations."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from ....engine.chat.chat_text import ChatText
from ....engine.chat.lark import Function
from ....engine.chat.reader import Arguments, CallBegin, Content, Reasoning
from ....engine.chat.template import OWN_NAMES
from ....engine.frontend import Frontend, Prompt, RequestOptions
from ....engine.outputs import Chunk
from ....engine.structured.grammar import check_schema
from ....errors import InvalidRequestError
from ....scheduler.sampling import SamplingParams, StructuredOutputs
from ....scheduler.types import TokenLogprobs
from .answers import ChatAnswer, ChatChoice, ChatCompletion
from .generation import Generation, Job, Step, stream_events, token_logprobs
from .protocol import ChatBody, ChatMessage, Conversation


class Answer:
    """Converts one completion's text to a message or to the deltas of a stream."""

    def __init__(self, chat: ChatText, body: ChatBody, job: Job) -> None:
        self._chat = chat
        self._body = body
        self._job = job
        self._has_calls = False

    def push(self, text: str, *, last: bool) -> dict[str, Any]:
        """Returns the delta for `text`; empty if nothing is certain yet."""
        delta: dict[str, Any] = {}
        calls: dict[int, dict[str, Any]] = {}
        for event in self._job.read(text, last=last, parallel=self._body.is_parallel):
            if isinstance(event, Content):
                delta["content"] = delta.get("content", "") + event.text
            elif not isinstance(event, Reasoning):
                self._call(event, calls)
            elif self._body.include_reasoning is not False:
                # The name of vLLM, and the older name of DeepSeek's API.
                thought = delta.get("reasoning", "") + event.text
                delta["reasoning"] = delta["reasoning_content"] = thought
        if calls:
            self._has_calls = True
            delta["tool_calls"] = list(calls.values())
        return delta

    def message(self, text: str) -> ChatAnswer:
        """Returns the message for the whole `text`."""
        delta = self.push(text, last=True)
        for call in delta.get("tool_calls", ()):
            del call["index"]
        content = delta.pop("content", "")
        message: ChatAnswer = {
            "role": "assistant",
            "content": None if delta and not content else content,
            "refusal": None,
        }
        message.update(delta)  # type: ignore[typeddict-item]
        return message

    @property
    def finish_reason(self) -> str | None:
        """The finish reason in OpenAI's terms."""
        reason = self._job.assembler.finish_reason
        return "tool_calls" if self._has_calls and reason == "stop" else reason

    def _call(self, event: CallBegin | Arguments, calls: dict[int, dict[str, Any]]) -> None:
        call = calls.setdefault(event.index, {"index": event.index, "function": {}})
        if isinstance(event, CallBegin):
            call |= {"id": event.id or self._chat.new_id(), "type": "function"}
            call["function"] = {"name": event.name, "arguments": ""}
        else:
            function = call["function"]
            function["arguments"] = function.get("arguments", "") + event.text


def add(generation: Generation, body: ChatBody, request_id: str) -> None:
    """Checks the body and adds its conversation.

    Raises:
        InvalidRequestError: names the field.
    """
    sampling = body.sampling()
    generation.check_count(1, sampling.n)
    frontend = generation.frontend
    chat = frontend.chat
    prompt = rendered(frontend, body, body.messages)
    text, functions = prompt.text or "", body.functions()
    if functions and not chat.has_calls and not body.must_call:
        raise InvalidRequestError.at(
            "tools",
            "no tools are served with this model: its chat template has no format of calls "
            "that is known here; set tool_call_parser in the configuration, or make the model "
            "call one by tool_choice",
        )
    sampling, options = _constrained(chat, body, text, functions, sampling, body.options())
    continued = body.continue_final_message
    asked = body.budget()
    if asked is not None:
        budget = chat.budget(text, *asked, continued=continued)
        sampling = sampling.model_copy(update={"thinking_budget": budget})
    prompt = frontend.truncated(prompt, body.truncate_prompt_tokens, sampling)
    parser_of = partial(chat.parser, text, functions, continued=continued)
    try:
        generation.add(request_id, prompt, sampling, options, "messages", parser_of)
    except InvalidRequestError as error:
        if error.field != "max_tokens" or body.max_completion_tokens is None:
            raise
        name = "max_completion_tokens"
        raise type(error)(error.message.replace("max_tokens", name, 1), field=name) from None


def _constrained(
    chat: ChatText,
    body: ChatBody,
    prompt: str,
    functions: Sequence[Function],
    sampling: SamplingParams,
    options: RequestOptions,
) -> tuple[SamplingParams, RequestOptions]:
    """Returns the request with the grammar of its tools; a grammar starts after the reasoning.

    Raises:
        InvalidRequestError: a schema cannot be enforced, or another field also constrains the text.
    """
    given, text = sampling.structured_outputs, None
    parallel, continued = body.is_parallel, body.continue_final_message
    if body.must_call:
        if given is not None:
            raise InvalidRequestError.at(
                "tool_choice",
                f"{options.structured_field} constrains the text already; use "
                "tool_choice auto, or leave it out",
            )
        _check_schemas(chat, body, functions)
        text = chat.required(functions, prompt, parallel=parallel, continued=continued)
    elif given is not None:
        _check_schemas(chat, body, functions)
        frame = chat.frame(prompt, functions, parallel=parallel, continued=continued)
        if frame is not None and given.frame is None:
            framed = given.model_copy(update={"frame": frame})
            sampling = sampling.model_copy(update={"structured_outputs": framed})
    elif any(function.strict for function in functions):
        bound = [each if each.strict else Function(each.name) for each in functions]
        _check_schemas(chat, body, bound)
        text = chat.strict(bound, prompt, continued=continued)
    if text is None:
        return sampling, options
    try:
        wanted = StructuredOutputs(grammar=text)
    except InvalidRequestError as error:
        message = error.message.split(": ", 1)[-1]
        raise InvalidRequestError.at("tools", f"their grammar: {message}") from None
    options = replace(options, structured_field="tools")
    return sampling.model_copy(update={"structured_outputs": wanted}), options


def _check_schemas(chat: ChatText, body: ChatBody, functions: Sequence[Function]) -> None:
    places = {tool.function.name: index for index, tool in enumerate(body.tools or ())}
    for function in functions:
        field = f"tools.{places[function.name]}.function.parameters"
        check_schema(function.schema, field)
        chat.check_function(function, field)


def rendered(frontend: Frontend, body: Conversation, messages: Sequence[ChatMessage]) -> Prompt:
    """Renders `messages` as a prompt, for an answer or for `/tokenize`.

    Raises:
        InvalidRequestError: names the field.
    """
    for name in body.chat_template_kwargs:
        if name in OWN_NAMES:
            raise InvalidRequestError.at(f"chat_template_kwargs.{name}", "this name is taken")
    continued = body.continue_final_message
    asked = body.add_generation_prompt and "add_generation_prompt" in body.model_fields_set
    if continued and asked:
        raise InvalidRequestError.at(
            "add_generation_prompt", "it cannot be combined with continue_final_message"
        )
    effort = frontend.chat.effort(body.reasoning_effort)
    return frontend.chat_prompt(
        [message.render() for message in messages],
        add_generation_prompt=body.add_generation_prompt and not continued,
        continue_final_message=continued,
        template_kwargs={**effort, **body.chat_template_kwargs},
        add_special_tokens=bool(body.add_special_tokens),
        chat_template=body.chat_template,
        tools=[tool.render() for tool in body.callable_tools()],
        required=[tool.render() for tool in body.required_tools()],
    )


async def answer(generation: Generation, body: ChatBody, request_id: str) -> ChatCompletion:
    """Returns the whole answer, after everything has finished."""
    choices = list[ChatChoice]()
    for job in generation.jobs:
        output, logprobs = job.assembler.output(), None
        made = Answer(generation.frontend.chat, body, job)
        message = made.message(output.text)
        if body.logprobs:
            logprobs = _logprobs(body, job, output.token_ids, job.assembler.logprobs)
        choice: ChatChoice = {
            "index": job.index,
            "message": message,
            "logprobs": logprobs,
            "finish_reason": made.finish_reason,
            "stop_reason": output.stop_reason,
            **job.extras(body),
        }
        choices.append(choice)
    job = generation.jobs[0]
    of_prompt = await job.described(partial(job.prompt_extras, body))
    return {
        **generation.head(request_id),
        "object": "chat.completion",
        "choices": choices,
        "usage": generation.usage(),
        **of_prompt,
    }


def events(
    generation: Generation, body: ChatBody, request_id: str
) -> AsyncGenerator[dict[str, Any], None]:
    """Yields the chunks of the answer: the role, the text, and the finish reason."""
    frontend, answers = generation.frontend, dict[int, Answer]()

    def parts(step: Step) -> Iterator[dict[str, Any]]:
        job, chunk, logprobs = step.job, step.chunk, None
        if job.index not in answers:
            first: dict[str, Any] = {"choices": [_part(job, {"role": "assistant", "content": ""})]}
            if body.return_token_ids and not answers:
                first["prompt_token_ids"] = list(job.prompt.token_ids)
            answers[job.index] = Answer(frontend.chat, body, job)
            if not generation.mark(job).begun:
                generation.begins(job)
                yield first
        reply = answers[job.index]
        delta = reply.push(chunk.text, last=step.last)
        if step.seen:
            delta, chunk = {}, Chunk("", ())
        if body.logprobs and chunk.logprobs:
            logprobs = _logprobs(body, job, chunk.token_ids, chunk.logprobs)
        extras = job.chunk_extras(chunk, with_ids=body.return_token_ids and not step.seen)
        if delta or logprobs is not None or extras:
            part = _part(job, delta or {"content": ""}, logprobs)
            generation.sends(step, text=step.last)
            yield {"choices": [{**part, **extras}]}
        if step.last and not generation.mark(job).ended:
            generation.sends(step, end=True)
            last = _part(job, {})
            last["finish_reason"] = reply.finish_reason
            last["stop_reason"] = job.assembler.stop_reason
            yield {"choices": [last]}

    async def events_of(step: Step) -> Iterator[dict[str, Any]]:
        return parts(step)

    return stream_events(generation, body, request_id, "chat.completion.chunk", events_of)


def _part(
    job: Job, delta: dict[str, Any], logprobs: dict[str, Any] | None = None
) -> dict[str, Any]:
    return {"index": job.index, "delta": delta, "logprobs": logprobs, "finish_reason": None}


def _logprobs(
    body: ChatBody, job: Job, ids: Sequence[int], rows: Sequence[TokenLogprobs]
) -> dict[str, Any]:
    as_ids, top = body.return_tokens_as_token_ids, body.top_logprobs or 0
    content = token_logprobs(job.assembler.vocabulary, ids, rows, top, as_ids=as_ids)
    return {"content": content, "refusal": None}
