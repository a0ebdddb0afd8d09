"""`outrider chat`: a conversation with a running server, or with a model loaded in this process.

It works at a terminal and with piped stdin, with one message per line. `/stats`, `/reset` and
`/exit` are commands. Ctrl-C ends the answer; a second Ctrl-C ends the conversation. Reasoning goes
to stderr, dimmed, and is not part of the conversation. At a terminal, drafted tokens have their
drafter's colour, and a line after each answer counts them.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from pydantic import Field

from ..engine.chat.reader import Content, Event, Reasoning
from ..errors import ConfigError, OutriderError
from .console import Origins, aside, err, fail, note, out, stdin_lines, write
from .options import EngineOptions, Options, SamplingOptions
from .running_server import Piece, RunningServer, drafter_lines
from .session import loaded

if TYPE_CHECKING:
    from ..cluster.backend import LLM
    from ..engine.chat.reader import Parser

Message = dict[str, str]
_HELP = "/stats shows the drafters' figures, /reset forgets the conversation, /exit ends it."


@dataclass(frozen=True)
class Local:
    """A model in this process, or in Ray actors started by this process."""

    llm: LLM
    sampling: SamplingOptions
    raw: bool  # no chat template: the text of the conversation is the prompt
    adapter: str | None = None
    traces: bool = False  # whether pieces include the steps that produced them

    def answer(self, messages: list[Message]) -> Iterator[Piece]:
        frontend = self.llm.frontend
        parser: Parser | None = None
        if self.raw:
            prompt = frontend.text_prompt("".join(message["content"] for message in messages))
        else:
            prompt = frontend.chat_prompt(messages)
            parser = frontend.chat.parser(prompt.text or "", ())
        num_shown = num_steps = 0
        from ..engine.frontend import RequestOptions
        from ..scheduler.types import SpeculationOptions

        options = RequestOptions(
            speculation=SpeculationOptions(trace=self.traces),
            shown_ids=frontend.chat.shown_ids if parser else frozenset(),
        )
        params = self.sampling.params()
        for output in self.llm.stream(prompt, params, lora_request=self.adapter, options=options):
            text, steps = output.outputs[0].text, output.outputs[0].speculation_trace or ()
            if len(steps) > num_steps:
                yield Piece("", trace=steps[num_steps:])
                num_steps = len(steps)
            if len(text) > num_shown:
                yield from _read(parser, text[num_shown:])
                num_shown = len(text)
        if parser is not None:
            yield from _pieces(parser.finish())

    def stats(self) -> Iterable[str]:
        return drafter_lines(self.llm.stats()["drafters"])


class Painter:
    """Prints an answer with drafted tokens in their drafter's colour, and counts them."""

    def __init__(self) -> None:
        self._origins = Origins()
        self.begin()

    def begin(self) -> None:
        """Resets the counts for a new answer."""
        self._waiting: list[tuple[str, str]] = []  # texts and origins of unprinted tokens
        self._num_tokens = self._num_steps = self._num_drafted = self._num_accepted = 0
        self._begun_s = time.perf_counter()

    def take(self, trace: Sequence[dict[str, Any]]) -> None:
        """Records steps, before or together with their text."""
        for step in trace:
            self._num_steps += 1
            self._num_tokens += len(step["tokens"])
            self._num_drafted += len(step["draft"])
            self._num_accepted += sum(guess["accepted"] for guess in step["draft"])
            self._waiting += [(token["text"], token["origin"]) for token in step["tokens"]]

    def runs(self, text: str) -> list[tuple[str, str]]:
        """Splits `text` by origin; tokens before it that a parser left out are dropped."""
        at = "".join(part for part, _ in self._waiting).find(text)
        if at < 0:
            return [(text, "target")]
        found, end = [], at + len(text)
        for index, (part, origin) in enumerate(self._waiting):
            if shown := part[max(at, 0) : max(end, 0)]:
                found.append((shown, origin))
            if len(part) > end:
                self._waiting[: index + 1] = [(part[max(end, 0) :], origin)]
                return found
            at, end = at - len(part), end - len(part)
        self._waiting.clear()
        return found

    def show(self, text: str) -> None:
        """Prints a piece of text."""
        from rich.text import Text

        parts = [(part, self._style(origin)) for part, origin in self.runs(text)]
        out().print(Text.assemble(*parts), end="", soft_wrap=True)

    def note(self) -> None:
        """Prints a line with the answer's counts and the meaning of the colours."""
        from rich.text import Text

        if not self._num_steps:
            return
        line = Text(style="dim")
        seconds = time.perf_counter() - self._begun_s
        line.append(
            f"{self._num_tokens} tokens in {self._num_steps} steps, "
            f"{self._num_tokens / max(seconds, 1e-9):.1f} tokens/s; "
            f"accepted {self._num_accepted} of {self._num_drafted} drafted"
        )
        for origin, style in self._origins.styles.items():
            line.append(f"  {origin}", style=style)
        err().print(line, soft_wrap=True)

    def _style(self, origin: str) -> str:
        return "" if origin == "target" else self._origins.style(origin)


@dataclass
class Conversation:
    """The messages so far, and the functions that answer and return statistics."""

    answer: Callable[[list[Message]], Iterator[Piece]]
    stats: Callable[[], Iterable[str]]
    system: str | None
    shows_reasoning: bool = True
    painter: Painter | None = None
    messages: list[Message] = field(default_factory=list)

    def reset(self) -> None:
        """Drops all messages except the system message."""
        self.messages = [{"role": "system", "content": self.system}] if self.system else []

    def say(self, text: str) -> None:
        """Performs one turn; an answer that failed or was stopped is not added to the messages."""
        self.messages.append({"role": "user", "content": text})
        pieces: list[str] = []
        thinks = False
        if self.painter is not None:
            self.painter.begin()
        try:
            for piece in self.answer(self.messages):
                thinks = thinks or piece.is_reasoning
                if self._show(piece, thinks and not pieces):
                    pieces.append(piece.text)
        except BaseException:
            self.messages.pop()
            raise
        finally:
            if pieces:
                write("\n")
            elif thinks and self.shows_reasoning:
                aside("\n")
        if self.painter is not None:
            self.painter.note()
        self.messages.append({"role": "assistant", "content": "".join(pieces)})

    def _show(self, piece: Piece, is_after_thought: bool) -> bool:
        """Prints a piece; returns True if it is part of the answer's content."""
        if self.painter is not None:
            self.painter.take(piece.trace)
        if not piece.text:
            return False
        if piece.is_reasoning:
            if self.painter is not None:
                self.painter.runs(piece.text)
            if self.shows_reasoning:
                aside(piece.text)
            return False
        if is_after_thought and self.shows_reasoning:
            aside("\n\n")
        show = write if self.painter is None else self.painter.show
        show(piece.text)
        return True


class ChatOptions(Options):
    """The source of answers, and what is shown."""

    url: str | None = Field(None, description="A running server's; default: load the model here.")
    api_key: str | None = Field(
        None,
        description="The server's key.",
        json_schema_extra={"envvar": "OUTRIDER_API_KEY", "show_envvar": True},
    )
    system: str | None = Field(None, description="System message.")
    raw: bool = Field(False, description="No chat template: continue the text (base models).")
    hide_reasoning: bool = Field(False, description="Do not show what the model thinks.")
    adapter: str | None = None
    """Name of one of --lora-modules; for a server, use --model."""
    origins: bool | None = None
    """Colour tokens by drafter and count them; default: at a terminal."""


def chat(engine: EngineOptions, sampling: SamplingOptions, options: ChatOptions) -> None:
    """Chats with a model in several turns, streaming the answers."""
    sampling.params()
    interactive = sys.stdin.isatty()
    painter = Painter() if (interactive if options.origins is None else options.origins) else None
    with ExitStack() as stack:
        shows = painter is not None
        answer, stats = _partner(engine, sampling, options, stack, shows)
        talk = Conversation(answer, stats, options.system, not options.hide_reasoning, painter)
        talk.reset()
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
    options: ChatOptions,
    stack: ExitStack,
    traces: bool,
) -> tuple[Callable[[list[Message]], Iterator[Piece]], Callable[[], Iterable[str]]]:
    """Returns the functions that answer (with steps if `traces`) and that return statistics."""
    raw, adapter = options.raw, options.adapter
    if options.url is not None:
        if raw:
            raise ConfigError.at("raw", "only for a model loaded here, not with --url")
        if adapter is not None:
            raise ConfigError.at("adapter", "of a server, --model names it")
        for key in engine.given():
            if key not in ("model", "served_model_name"):
                raise ConfigError.at(key, "only for a model loaded here, not with --url")
        server = RunningServer(options.url, api_key=options.api_key)
        stack.callback(server.close)
        models = server.models()
        name = engine.served_model_name or engine.model or models[0]
        if name not in models:
            key = "model" if engine.served_model_name is None else "served_model_name"
            raise ConfigError.at(key, f"{server.url} serves {', '.join(models)}, not {name!r}")
        given: dict[str, Any] = sampling.given()
        if traces and server.traces(name):
            given["speculation"] = {"trace": True}
        return (lambda messages: server.chat(name, messages, **given)), server.stats_lines
    local = Local(loaded(engine.resolve(), stack, adapter), sampling, raw, adapter, traces)
    return local.answer, local.stats


def _read(parser: Parser | None, text: str) -> Iterator[Piece]:
    """Yields the pieces that `text` adds; without a parser, all of it is content."""
    if parser is None:
        yield Piece(text)
    else:
        yield from _pieces(parser.push(text))


def _pieces(events: Iterable[Event]) -> Iterator[Piece]:
    for event in events:
        if isinstance(event, (Content, Reasoning)):
            yield Piece(event.text, isinstance(event, Reasoning))


def _turn(talk: Conversation, text: str, interactive: bool) -> None:
    """Performs one turn; at a terminal, a failed or stopped answer ends only the turn."""
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
    """Yields the user's lines; ends with the input, or with Ctrl-C at the prompt."""
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
