"""Published figures of vLLM and SGLang, and what a step has to take at least in their settings.

A figure is quoted with its source; nothing of it was measured here. Beside it stand the least time
of the modelled step (`gpu_model.py`) with as many sequences and nodes, and what follows from it:

- tokens a second *at most*: those of the modelled step, if it emits as many tokens as published;
- a step *to plain*: how many steps without drafts one with drafts takes;
- *needs*: the tokens that a modelled step has to emit for the published gain.

Where a source gives no shape of the draft, the row says which one stands for it.
Contexts of MT-bench are taken as 256 tokens, an assumption. Left out are figures of devices that
the model lacks, or that are not clear: those of vLLM in table 5 of arXiv:2503.01840 are of an RTX
3090 by its text and of an A100 by its caption.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from .gpu_model import (
    DEVICES,
    FLOOR_US,
    Loaded,
    Step,
    Target,
    gpu_ops,
    load,
    load_head,
    step_of,
)

_EAGLE3 = "arXiv:2503.01840"
_VLLM, _SGLANG = "github.com/vllm-project/vllm", "github.com/sgl-project/sglang"
_MT_BENCH_LEN = 256


@dataclass(frozen=True, slots=True)
class Draft:
    """What is drafted for a sequence; a chain where there are as many levels as nodes."""

    num_nodes: int
    num_levels: int
    is_stated: bool = True  # by the source

    def __str__(self) -> str:
        if not self.num_nodes:
            return "none"
        if self.num_nodes == self.num_levels:
            return f"chain {self.num_nodes}"
        return f"tree {self.num_nodes}, {self.num_levels} deep"


def _chain(num_nodes: int) -> Draft:
    return Draft(num_nodes, num_nodes)


NONE = _chain(0)


@dataclass(frozen=True, slots=True)
class Published:
    """One figure.

    `emitted` are the tokens of a step and sequence, the bonus token included; `gain` is to the
    same engine without drafts. What a source lacks is None.
    """

    engine: str
    source: str
    model: str  # of `gpu_model.targets`
    device: str  # of `gpu_model.DEVICES`
    batch: int
    draft: Draft
    tokens_per_s: float | None = None  # of all sequences
    emitted: float | None = None
    gain: float | None = None
    context_len: int = _MT_BENCH_LEN
    remark: str = ""

    @property
    def cited(self) -> str:
        """Its source, and the remark."""
        return self.source + f" ({self.remark})" * bool(self.remark)


def _of_8b() -> Iterator[Published]:
    """Llama-3.1-8B-Instruct in bfloat16 on one H100, MT-bench, greedy."""
    at = ("Llama-3.1-8B", "H100")
    unknown = Draft(32, 4, is_stated=False)
    table4 = f"{_EAGLE3}, table 4"
    yield Published("SGLang", table4, *at, 1, NONE, 158.34, 1.0)
    yield Published(
        "SGLang, EAGLE-2", table4, *at, 1, unknown, 244.10, gain=244.10 / 158.34,
        remark="a head with the target's vocabulary",
    )  # fmt: skip
    yield Published("SGLang, EAGLE-3", table4, *at, 1, unknown, 373.25, gain=373.25 / 158.34)
    for num_levels, tokens_per_s, emitted in ((5, 361.70, 4.68), (8, 378.57, 5.39)):
        yield Published(
            "SGLang, EAGLE-3", f"{_SGLANG}/pull/4247", *at, 1,
            Draft(63, num_levels, is_stated=False), tokens_per_s, emitted,
            remark="an H100 by github.com/hemingkx/Spec-Bench/issues/22; 63 nodes as for 70B",
        )  # fmt: skip
    offline = f"{_VLLM}/pull/16937"
    yield Published("vLLM V1", offline, *at, 1, NONE, 133.0, 1.0, remark="prompts included")
    yield Published(
        "vLLM V1, EAGLE-3", offline, *at, 1, _chain(2), 220.21, 2.36, 1.65,
        remark="prompts included; tokens a step by issue 20780",
    )  # fmt: skip
    online, plain_ms = f"{_VLLM}/issues/20780", 7.07
    unnamed = "time a token; the device is not stated"
    yield Published("vLLM V1", online, *at, 1, NONE, 1e3 / plain_ms, 1.0, remark=unnamed)
    for num_nodes, token_ms, emitted in (
        (2, 4.32, 2.36), (3, 4.09, 2.79), (4, 4.05, 3.08), (7, 4.29, 3.54),
    ):  # fmt: skip
        yield Published(
            "vLLM V1, EAGLE-3", online, *at, 1, _chain(num_nodes), 1e3 / token_ms, emitted,
            plain_ms / token_ms, remark=unnamed,
        )  # fmt: skip
    gains = {
        2: 1.81, 4: 1.82, 8: 1.62, 16: 1.48, 24: 1.39, 32: 1.32, 48: 1.38, 56: 1.34, 64: 1.38,
    }  # fmt: skip
    for batch, gain in gains.items():
        yield Published(
            "SGLang 0.4.4, EAGLE-3", f"{_EAGLE3}, table 3", *at, batch, _chain(3), gain=gain
        )


def _of_70b() -> Iterator[Published]:
    """Llama-3.3-70B-Instruct in float16 on eight H100, MT-bench, greedy."""
    at = (f"{_SGLANG}/pull/4716", "Llama-3.1-70B", "H100", 1)
    yield Published("SGLang", *at, NONE, 88.61, 1.0)
    yield Published("SGLang, EAGLE-3", *at, Draft(63, 8), 234.54, 5.88, 234.54 / 88.61)


def _of_deepseek() -> Iterator[Published]:
    """DeepSeek-V3 and models of its shape, in fp8 on eight H200."""
    at = ("DeepSeek-V3", "H200")
    sweep = {8: 12.8, 16: 17.2, 32: 25.6, 64: 34.6}
    for batch, token_ms in sweep.items():
        yield Published(
            "SGLang 0.5.7", "github.com/SemiAnalysisAI/InferenceX/issues/870", *at, batch, NONE,
            1e3 * batch / token_ms, 1.0, context_len=1024 + 512,
            remark="R1-0528, mean time a token of 1024 after 1024",
        )  # fmt: skip
    yield Published(
        "vLLM", f"{_VLLM}/pull/28992", *at, 16, NONE, 16000 / 23.38, 1.0,
        context_len=2 + 50, remark="V3.1, before this change, 100 tokens after 2, prompts included",
    )  # fmt: skip
    for batch, gain in ((1, 1.8), (32, 1.5)):
        yield Published(
            "SGLang, MTP", "SGLang's documentation of DeepSeek V3", *at, batch,
            Draft(3, 3, is_stated=False), gain=gain, context_len=1024,
            remark="the default chain; the model's head is dense",
        )  # fmt: skip


FIGURES = (*_of_8b(), *_of_70b(), *_of_deepseek())


# -- beside the model


@dataclass(frozen=True, slots=True)
class Beside:
    """A figure and the modelled step in its setting."""

    published: Published
    num_launches: int
    step_ms: float  # at least, with the floor of a launch
    plain_ms: float

    @property
    def most_per_s(self) -> float | None:
        """Tokens a second of the modelled step."""
        emitted = self.published.emitted
        return emitted and 1e3 * self.published.batch * emitted / self.step_ms

    @property
    def share(self) -> float | None:
        """Of the modelled tokens a second that the published ones are."""
        most, found = self.most_per_s, self.published.tokens_per_s
        return found / most if found and most else None

    @property
    def to_plain(self) -> float:
        """Modelled steps without drafts in the time of one with them."""
        return self.step_ms / self.plain_ms

    @property
    def published_to_plain(self) -> float | None:
        """The same of the published engine."""
        emitted, gain = self.published.emitted, self.published.gain
        return emitted / gain if emitted and gain else None

    @property
    def needs(self) -> float | None:
        """Tokens that a modelled step has to emit for the published gain."""
        return self.published.gain and self.published.gain * self.to_plain

    def row(self) -> dict[str, Any]:
        """As JSON."""
        figure, draft = self.published, self.published.draft
        return {
            "model": figure.model,
            "device": figure.device,
            "engine": figure.engine,
            "source": figure.source,
            "remark": figure.remark,
            "batch": figure.batch,
            "context_len": figure.context_len,
            "draft": str(draft),
            "draft_stated": draft.is_stated,
            "published": {
                "tokens_per_s": figure.tokens_per_s,
                "emitted": figure.emitted,
                "gain": figure.gain,
                "to_plain": self.published_to_plain,
            },
            "launches": self.num_launches,
            "step_ms": self.step_ms,
            "tokens_per_s": self.most_per_s,
            "share": self.share,
            "to_plain": self.to_plain,
            "needs": self.needs,
        }


def beside(
    targets: tuple[Target, ...], show: Callable[[str], None], floor_us: float = FLOOR_US
) -> Iterator[Beside]:
    """The figures of `targets`, each beside its modelled step; `show` is told what comes next."""
    ops = gpu_ops()
    for target in targets:
        figures = [each for each in FIGURES if each.model == target.name]
        if figures:
            show(f"{target.name}, published settings...")
            steps = _Steps(target, load(target, ops), ops)
            yield from (steps.beside(each, floor_us) for each in figures)


class _Steps:
    """Modelled steps of one target."""

    def __init__(self, target: Target, loaded: Loaded, ops: Any) -> None:
        self._target, self._loaded, self._ops = target, loaded, ops
        self._made: dict[tuple[Draft, int, int], Step] = {}

    def beside(self, figure: Published, floor_us: float) -> Beside:
        device = DEVICES[figure.device]
        step = self._step(figure.draft, figure.batch, figure.context_len)
        plain = self._step(NONE, figure.batch, figure.context_len)
        times = (each.milliseconds(device, floor_us) for each in (step, plain))
        return Beside(figure, len(step.operations), *times)

    def _step(self, draft: Draft, batch: int, context_len: int) -> Step:
        key = (draft, batch, context_len)
        if key not in self._made:
            given, size = (self._target, self._loaded, self._ops), (draft.num_nodes, batch)
            head = load_head(*given, *size, draft.num_levels) if draft.num_nodes else None
            self._made[key] = step_of(self._loaded, head, batch, draft.num_nodes, context_len)
        return self._made[key]


COLUMNS = (
    "model", "batch", "draft", "engine", "launches", "tokens/s", "at most", "share",
    "tokens a step", "to plain", "at least", "gain", "needs", "source",
)  # fmt: skip


def table(found: Sequence[Beside]) -> tuple[list[tuple[str, ...]], list[str]]:
    """The rows' text, and lines to go below them: sources by number, and what columns say."""
    sources = list(dict.fromkeys(each.published.cited for each in found))
    rows = [(*_cells(each), str(sources.index(each.published.cited) + 1)) for each in found]
    lines = [f"{number}: {source}" for number, source in enumerate(sources, 1)]
    return rows, [*lines, _LEGEND] if rows else []


_LEGEND = (
    "tokens/s, at most: published, and of the modelled step if it emits as many tokens; share: of "
    "the latter that the former is. To plain, at least: steps without drafts in the time of one "
    "with them, published and modelled. Needs: tokens that a modelled step has to emit for the "
    "published gain. ?: the source gives no shape."
)


def _cells(each: Beside) -> tuple[str, ...]:
    figure = each.published
    drafts = figure.draft.num_nodes > 0
    return (
        f"{figure.model}, {figure.device}",
        str(figure.batch),
        f"{figure.draft}" + "?" * (not figure.draft.is_stated),
        figure.engine,
        str(each.num_launches),
        _text(figure.tokens_per_s, 1),
        _text(each.most_per_s, 1),
        _text(each.share),
        _text(figure.emitted),
        _text(each.published_to_plain),
        _text(each.to_plain if drafts else None),
        _text(figure.gain),
        _text(each.needs),
    )


def _text(value: float | None, digits: int = 2) -> str:
    return "-" if value is None else f"{value:.{digits}f}"
