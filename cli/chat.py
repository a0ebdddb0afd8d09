"""`outrider chat`: a conversation with a running server or with a model loaded here.

Works at a terminal and with piped stdin, one message a line. `/stats`, `/reset` and `/exit` are
commands; Ctrl-C ends the answer, a second one the conversation. What a model thinks goes to stderr,
dimmed, and is no part of the conversation.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated

import typer

from ..engine.chat.reader import Content, Event, Reasoning
from ..errors import ConfigError, OutriderError
from .console import aside, err, fail, note, write
from .files import stdin_lines
from .options import EngineOptions, SamplingOptions
from .running_server import RunningServer, drafter_lines
from .session import prepare

if TYPE_CHECKING:
    from ..cluster.backend import LLM
    from ..engine.chat.reader import Parser

Message = dict[str, str]
Piece = tuple[str, bool]  # text, and whether it is reasoning
_HELP = "/stats shows the drafters' figures, /reset forgets the conversation, /exit ends it."


@dataclass(frozen=True)
class Local:
    """A model in this process, or in Ray actors that this process started."""

    llm: LLM
    sampling: SamplingOptions
    raw: bool  # no chat template: the conversation's text is the prompt
    adapter: str | None = None

    def answer(self, messages: list[Message]) -> Iterator[Piece]:
        frontend = self.llm.frontend
        parser: Parser | None = None
        if self.raw:
            prompt = frontend.text_prompt("".join(message["content"] for message in messages))
        else:
            prompt = frontend.chat_prompt(messages)
            parser = frontend.chat.parser(prompt.text or "", ())
        num_shown = 0
        ready = {"prompt": prompt.text, "prompt_token_ids": prompt.token_ids}
        from ..engine.frontend import RequestOptions

        options = RequestOptions(shown_ids=frontend.chat.shown_ids if parser else frozenset())
        params = self.sampling.params()
        for output in self.llm.stream(ready, params, lora_request=self.adapter, options=options):
            text = output.outputs[0].text
            if len(text) > num_shown:
                yield from _read(parser, text[num_shown:])
                num_shown = len(text)
        if parser is not None:
            yield from _pieces(parser.finish())

    def stats(self) -> Iterable[str]:
        return drafter_lines(self.llm.stats()["drafters"])


@dataclass
class Conversation:
    """The messages so far, and who answers: with text and whether it is reasoning, in pieces."""

    answer: Callable[[list[Message]], Iterator[Piece]]
    stats: Callable[[], Iterable[str]]
    system: str | None
    shows_reasoning: bool = True
    messages: list[Message] = field(default_factory=list)

    def reset(self) -> None:
        """Forgets everything but the system message."""
        self.messages = [{"role": "system", "content": self.system}] if self.system else []

    def say(self, text: str) -> None:
        """One turn; an answer that failed or was stopped leaves no trace in the conversation."""
        self.messages.append({"role": "user", "content": text})
        pieces: list[str] = []
        thinks = False
        try:
            for piece, is_reasoning in self.answer(self.messages):
                if is_reasoning:
                    thinks = True
                    if self.shows_reasoning:
                        aside(piece)
                    continue
                if thinks and not pieces and self.shows_reasoning:
                    aside("\n\n")
                pieces.append(piece)
                write(piece)
        except BaseException:
            self.messages.pop()
            raise
        finally:
            if pieces:
                write("\n")
            elif thinks and self.shows_reasoning:
                aside("\n")
        self.messages.append({"role": "assistant", "content": "".join(pieces)})


def chat(
    engine: EngineOptions,
    sampling: SamplingOptions,
    url: Annotated[
        str | None, typer.Option("--url", help="A running server's; default: load the model here.")
    ] = None,
    api_key: Annotated[
        str | None,
        typer.Option(help="The server's key.", envvar="OUTRIDER_API_KEY", show_envvar=True),
    ] = None,
    system: Annotated[str | None, typer.Option(help="System message.")] = None,
    raw: Annotated[
        bool, typer.Option("--raw", help="No chat template: continue the text (base models).")
    ] = False,
    hide_reasoning: Annotated[
        bool, typer.Option("--hide-reasoning", help="Do not show what the model thinks.")
    ] = False,
    adapter: Annotated[
        str | None, typer.Option(help="One of --lora-modules; of a server: --model.")
    ] = None,
) -> None:
    """Talks with a model, several turns, streaming."""
    sampling.params()
    with ExitStack() as stack:
        answer, stats = _partner(engine, sampling, url, api_key, raw, adapter, stack)
        talk = Conversation(answer, stats, system, shows_reasoning=not hide_reasoning)
        talk.reset()
        interactive = sys.stdin.isatty()
        if interactive:
            note(_HELP)
        for line in _lines(interactive):
            if line == "/exit":
                return
            if line == "/reset":
                talk.reset()
                note("The conversation is forgotten.")
            elif line == "/stats":
                for each in list(talk.stats()) or ["No drafts so far."]:
                    note(each)
            elif line.startswith("/") and len(line.split()) == 1:
                note(f"{line}: unknown command. {_HELP}")
            elif line:
                _turn(talk, line, interactive)


def _partner(
    engine: EngineOptions,
    sampling: SamplingOptions,
    url: str | None,
    api_key: str | None,
    raw: bool,
    adapter: str | None,
    stack: ExitStack,
) -> tuple[Callable[[list[Message]], Iterator[Piece]], Callable[[], Iterable[str]]]:
    """How to get an answer, and the statistics."""
    if url is not None:
        if raw:
            raise ConfigError.at("raw", "only for a model loaded here, not with --url")
        if adapter is not None:
            raise ConfigError.at("adapter", "of a server, --model names it")
        server = RunningServer(url, api_key=api_key)
        stack.callback(server.close)
        models = server.models()
        name = engine.served_model_name or engine.model or models[0]
        given = sampling.given()
        return (lambda messages: server.chat(name, messages, **given)), server.stats_lines
    config = engine.resolve()
    prepare(config, stack, adapter=adapter)
    from ..cluster.backend import LLM

    with err().status("Loading the model..."):
        llm = stack.enter_context(LLM.from_config(config))
    local = Local(llm, sampling, raw, adapter)
    return local.answer, local.stats


def _read(parser: Parser | None, text: str) -> Iterator[Piece]:
    """What `text` adds to the answer; without a parser all of it is content."""
    if parser is None:
        yield text, False
    else:
        yield from _pieces(parser.push(text))


def _pieces(events: Iterable[Event]) -> Iterator[Piece]:
    for event in events:
        if isinstance(event, (Content, Reasoning)):
            yield event.text, isinstance(event, Reasoning)


def _turn(talk: Conversation, text: str, interactive: bool) -> None:
    """One turn; at a terminal a failed or stopped answer does not end the conversation."""
    try:
        talk.say(text)
    except OutriderError as error:
        if not interactive:
            raise
        fail(error)
    except KeyboardInterrupt:
        if not interactive:
            raise
        note("Stopped; this turn is forgotten.")


def _lines(interactive: bool) -> Iterator[str]:
    """The lines of the user; ends with the input, or with Ctrl-C at the prompt."""
    if not interactive:
        yield from (line.strip() for line in stdin_lines())
        return
    import readline  # noqa: F401 - gives `input` editing and history

    while True:
        try:
            yield input("> ").strip()
        except (EOFError, KeyboardInterrupt):
            write("\n")
            return
