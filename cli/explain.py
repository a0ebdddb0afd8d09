"""`outrider explain`: shows how a drafter performs on a prompt, step by step."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from itertools import accumulate, compress, pairwise
from operator import mul
from statistics import median
from typing import TYPE_CHECKING, Annotated, Any
from unicodedata import category

import typer

from .console import Origins, err, grid, out, read_stdin, table
from .options import EngineOptions, SamplingOptions
from .session import Adapter, loaded

if TYPE_CHECKING:
    from rich.text import Text
    from rich.tree import Tree

    from ..cluster.backend import LLM
    from ..engine.outputs import RequestOutput
    from ..scheduler.sampling import SamplingParams

Trace = Sequence[dict[str, Any]]  # `CompletionOutput.speculation_trace`
_UNSEEN = ("Cc", "Zs", "Zl", "Zp")


def explain(
    engine: EngineOptions,
    sampling: SamplingOptions,
    prompt: Annotated[str, typer.Argument(metavar="PROMPT", help="- reads stdin.")],
    compare: Annotated[
        bool, typer.Option("--compare/--no-compare", help="Time plain decoding, too.")
    ] = True,
    tree: Annotated[
        bool, typer.Option("--tree", help="Draw the draft of each step, branch by branch.")
    ] = False,
    adapter: Adapter = None,
) -> None:
    """Shows each step's draft: the proposed tokens, their drafters, and what the target accepted.

    Each line is a step: accepted tokens by origin, the target's own token, and in brackets the
    rejected alternatives, separated by bars. With --tree, the draft is drawn below. Figures follow,
    and the step costs by which draft lengths are chosen.
    """
    params = sampling.params()
    config = engine.resolve()
    text = read_stdin() if prompt == "-" else prompt
    with ExitStack() as stack:
        llm = loaded(config, stack, adapter, prompts=[text], max_tokens=params.max_tokens)
        # Plain decoding comes second, so that a look-up does not find the text that it generated.
        output, step_s = _timed(llm, text, params, adapter, enabled=True)
        plain_s = _timed(llm, text, params, adapter, enabled=False)[1] if compare else None
        adaptive = llm.stats()["speculation"]["adaptive"]
    completion = output.outputs[0]
    trace = completion.speculation_trace or []
    origins = Origins()
    for step in trace:
        out().print(_line(step, origins), soft_wrap=True)
        if tree and step["draft"]:
            out().print(_tree(step["draft"], origins), soft_wrap=True)
    _show(trace, len(completion.token_ids), step_s, plain_s)
    if adaptive:
        _show_costs(adaptive["step_ms"])


def _timed(
    llm: LLM, prompt: str, params: SamplingParams, adapter: str | None, *, enabled: bool
) -> tuple[RequestOutput, float | None]:
    """Returns the output and the median time of its steps except the first, in seconds, or None."""
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
    """Returns, by depth d, the acceptance rate of steps that accepted d guesses and had another."""
    tried, accepted = Counter[int](), Counter[int]()
    for step in trace:
        draft = step["draft"]
        depths: list[int] = []
        on_path: list[bool] = []
        num_accepted = sum(guess["accepted"] for guess in draft)
        for guess in draft:  # parents come first
            parent = guess["parent"]
            depths.append(0 if parent < 0 else depths[parent] + 1)
            on_path.append(parent < 0 or draft[parent]["accepted"])
        reached = set(compress(depths, on_path))
        tried.update(reached)
        accepted.update(reached & {*range(num_accepted)})
    return [accepted[depth] / tried[depth] for depth in range(len(tried))]


def expected_tokens(acceptance: Sequence[float]) -> float:
    """Returns a full draft's tokens per step: 1 + sum over k of the product of the first k rates.

    For a constant rate a and n depths, this is (1 - a^(n + 1)) / (1 - a) (arXiv:2211.17192,
    equation 1).
    """
    return sum(accumulate(acceptance, mul, initial=1.0))


def _line(step: dict[str, Any], origins: Origins) -> Text:
    from rich.text import Text

    line = Text(f"{step['step'] + 1:4d}  ", style="dim")
    for token in step["tokens"]:
        style = origins.style(token["origin"])
        style += "" if token["origin"] == "target" else " underline"
        line.append(_visible(token["text"]), style=style)
    if rejected := list(_rejected(step["draft"])):
        line.append("  [" + "|".join(rejected) + "]", style="dim")
    if names := list(dict.fromkeys(guess["origin"] for guess in step["draft"])):
        line.append("  ")
        for name in names:
            line.append(f" {name}", style=origins.style(name))
    return line


def _tree(draft: Sequence[dict[str, Any]], origins: Origins) -> Tree:
    """Returns the draft as a tree in which accepted tokens have a mark."""
    from rich.text import Text
    from rich.tree import Tree

    root = Tree(Text("      draft", style="dim"))
    nodes: list[Tree] = []
    for guess in draft:  # parents come first
        style = origins.style(guess["origin"]) + (" underline" if guess["accepted"] else " dim")
        text = _visible(guess["text"])
        label = Text(text if text.strip() else f'"{text}"', style=style)
        label.append(" \u2713" if guess["accepted"] else "", style="dim")
        parent = root if guess["parent"] < 0 else nodes[guess["parent"]]
        nodes.append(parent.add(label))
    return root


def _rejected(draft: Sequence[dict[str, Any]]) -> Iterator[str]:
    """Yields the texts of rejected branches, from where they leave the accepted path."""
    parents = {guess["parent"] for guess in draft}
    for node, guess in enumerate(draft):
        if guess["accepted"] or node in parents:
            continue  # accepted, or not a leaf
        text, at = "", node
        while at >= 0 and not draft[at]["accepted"]:
            text, at = _visible(draft[at]["text"]) + text, draft[at]["parent"]
        yield text


def _visible(text: str) -> str:
    """Escapes white space other than spaces, and control characters, to keep one line."""
    return "".join(
        repr(each)[1:-1] if category(each) in _UNSEEN and each != " " else each for each in text
    )


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


def _show_costs(step_ms: dict[str, dict[str, float]]) -> None:
    """Prints the step costs by which the engine chooses draft lengths."""
    lengths = list(next(iter(step_ms.values())))
    rows = [(size, *(f"{ms:.2f}" for ms in costs.values())) for size, costs in step_ms.items()]
    names = ("requests", *(f"{each} nodes" for each in lengths))
    err().print(grid("Milliseconds of a step by the drafts of its requests", names, rows))
