"""`outrider explain`: how a drafter fares on a prompt, step by step."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from itertools import pairwise
from statistics import median
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .console import err, grid, out, table
from .files import read_stdin
from .options import EngineOptions, SamplingOptions
from .session import prepare

if TYPE_CHECKING:
    from rich.text import Text

    from ..cluster.backend import LLM
    from ..engine.outputs import RequestOutput
    from ..scheduler.sampling import SamplingParams

Trace = Sequence[dict[str, Any]]  # `CompletionOutput.speculation_trace`
_COLOURS = ("green", "cyan", "magenta", "yellow", "blue")  # of origins, as they come


def explain(
    engine: EngineOptions,
    sampling: SamplingOptions,
    prompt: Annotated[str, typer.Argument(metavar="PROMPT", help="- reads stdin.")],
    compare: Annotated[
        bool, typer.Option("--compare/--no-compare", help="Time plain decoding, too.")
    ] = True,
    adapter: Annotated[
        str | None, typer.Option(help="One of --lora-modules; default: the target alone.")
    ] = None,
) -> None:
    """Shows the draft of each step: what was proposed, by whom, and what the target accepted.

    A line is a step: accepted tokens by origin, then the target's own, then in brackets what it
    rejected, each alternative behind a bar. Figures follow.
    """
    params = sampling.params()
    config = engine.resolve()
    text = read_stdin() if prompt == "-" else prompt
    from ..cluster.backend import LLM

    with ExitStack() as stack:
        prepare(config, stack, adapter=adapter)
        with err().status("Loading the model..."):
            llm = stack.enter_context(LLM.from_config(config))
        # Plain decoding comes second: a drafter must not find its text where it looks things up.
        output, step_s = _timed(llm, text, params, adapter, enabled=True)
        plain_s = _timed(llm, text, params, adapter, enabled=False)[1] if compare else None
    completion = output.outputs[0]
    trace = completion.speculation_trace or []
    colours: dict[str, str] = {}
    for step in trace:
        out().print(_line(step, colours), soft_wrap=True)
    _show(trace, len(completion.token_ids), step_s, plain_s)


def _timed(
    llm: LLM, prompt: str, params: SamplingParams, adapter: str | None, *, enabled: bool
) -> tuple[RequestOutput, float | None]:
    """The output, and the median time of its steps but the first, in seconds; None: of none."""
    from ..engine.frontend import RequestOptions
    from ..scheduler.types import SpeculationOptions

    options = RequestOptions(speculation=SpeculationOptions(enabled=enabled, trace=True))
    outputs, times = [], []
    for output in llm.stream(prompt, params, lora_request=adapter, options=options):
        outputs.append(output)
        times.append(time.perf_counter())
    gaps = [end - begin for begin, end in pairwise(times)]
    return outputs[-1], median(gaps) if gaps else None


def acceptance_by_depth(trace: Trace) -> list[float]:
    """Of the steps that had a guess behind d accepted ones, the share that accepted another."""
    tried: list[int] = []
    accepted: list[int] = []
    for step in trace:
        draft = step["draft"]
        depths: list[int] = []
        on_path: list[bool] = []
        num_accepted = sum(guess["accepted"] for guess in draft)
        for guess in draft:  # parents come first
            parent = guess["parent"]
            depths.append(0 if parent < 0 else depths[parent] + 1)
            on_path.append(parent < 0 or draft[parent]["accepted"])
        reached = {depth for depth, reachable in zip(depths, on_path, strict=True) if reachable}
        for depth in sorted(reached):
            if depth == len(tried):
                tried.append(0)
                accepted.append(0)
            tried[depth] += 1
            accepted[depth] += depth < num_accepted
    return [hits / count for hits, count in zip(accepted, tried, strict=True)]


def expected_tokens(acceptance: Sequence[float]) -> float:
    """Tokens of a step with a full draft: 1 + sum over k of the product of the first k rates.

    With one rate a at n depths that is (1 - a^(n + 1)) / (1 - a) (arXiv:2211.17192, equation 1).
    """
    total, survival = 1.0, 1.0
    for rate in acceptance:
        survival *= rate
        total += survival
    return total


def _line(step: dict[str, Any], colours: dict[str, str]) -> Text:
    from rich.text import Text

    line = Text(f"{step['step'] + 1:4d}  ", style="dim")
    for token in step["tokens"]:
        is_own = token["origin"] == "target"
        style = "bold" if is_own else f"{_colour(token['origin'], colours)} underline"
        line.append(_visible(token["text"]), style=style)
    if rejected := list(_rejected(step["draft"])):
        line.append("  [" + "|".join(rejected) + "]", style="dim")
    if origins := list(dict.fromkeys(guess["origin"] for guess in step["draft"])):
        line.append("  ")
        for origin in origins:
            line.append(f" {origin}", style=_colour(origin, colours))
    return line


def _colour(origin: str, colours: dict[str, str]) -> str:
    return colours.setdefault(origin, _COLOURS[len(colours) % len(_COLOURS)])


def _rejected(draft: Sequence[dict[str, Any]]) -> Iterator[str]:
    """The texts of branches that were not accepted, from where they leave the accepted path."""
    parents = {guess["parent"] for guess in draft}
    for node, guess in enumerate(draft):
        if guess["accepted"] or node in parents:
            continue  # accepted, or not the end of its branch
        text, at = "", node
        while at >= 0 and not draft[at]["accepted"]:
            text, at = _visible(draft[at]["text"]) + text, draft[at]["parent"]
        yield text


def _visible(text: str) -> str:
    return text.replace("\n", "\\n").replace("\t", "\\t")


def _show(trace: Trace, num_tokens: int, step_s: float | None, plain_s: float | None) -> None:
    rates = acceptance_by_depth(trace)
    if rates:
        each = [(f"guess {depth}", f"{rate:.2f}") for depth, rate in enumerate(rates, start=1)]
        err().print(grid("Acceptance", ("", "of those verified"), each))
    drafted = [step for step in trace if step["draft"]]
    rows: dict[str, Any] = {
        "steps": f"{len(trace)} ({len(drafted)} with a draft)",
        "output tokens": num_tokens,
        "tokens per step": f"{num_tokens / max(1, len(trace)):.2f}",
        "expected with full drafts": f"{expected_tokens(rates):.2f}",
    }
    if step_s is not None:
        rows["time of a step"] = f"{step_s * 1e3:.2f} ms"
    if step_s is not None and plain_s is not None:
        gain = num_tokens / max(1, len(trace)) * plain_s / step_s
        rows["time of a plain step"] = f"{plain_s * 1e3:.2f} ms"
        rows["speed to plain"] = f"{gain:.2f}"
    table("Speculation", rows)
