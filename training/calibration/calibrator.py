"""How well a head drafts for its target, measured on the target's own text.

The target continues prompts greedily; then every point of that text is a sequence of its own whose
next tokens are known, over the same KV blocks, and the head drafts for all of them in a few steps,
through the code that serves. A draft is compared with the known tokens: what matches is what greedy
decoding would have accepted. Chains are teacher-forced (`teacher_forcing.py`), which also gives the
probability of each known token. Called by `outrider calibrate`; one process, one device.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ...config import HeadConfig
from ...drafters.heads.protocol import Head
from ...scheduler import joining, tree
from ...scheduler.types import (
    Draft,
    FloatArray,
    IntArray,
    KnownTokens,
    NextDrafts,
    SamplingRows,
    StepInput,
    Verdict,
    ints,
    starts_of,
)
from ...workers.attention import KVCache
from ...workers.collective import Collective
from ...workers.model import load_model
from .teacher_forcing import TeacherForcedHead

BLOCK_SIZE = 16
_STEP_TOKENS = 2048
_STEP_POINTS = 64


@dataclass(frozen=True, slots=True)
class Walk:
    """One draft along the target's own text."""

    ranks: tuple[int, ...]  # of the siblings that fitted, level by level, until none did
    num_nodes: int
    expected: float  # of a chain: tokens accepted in the mean if it were sampled; else len(ranks)


@dataclass(frozen=True, slots=True)
class Measured:
    """What a head did at all points."""

    walks: tuple[Walk, ...]
    capture: tuple[int, ...]  # target layers whose inputs the head reads

    @property
    def tokens_per_step(self) -> float:
        """Mean accepted tokens and the bonus."""
        return 1.0 + float(self._lengths().mean())

    @property
    def error(self) -> float:
        """Standard error of `tokens_per_step`."""
        return float(self._lengths().std() / np.sqrt(len(self.walks)))

    @property
    def expected(self) -> float:
        """`tokens_per_step` if drafts were sampled from the head: no ties, no luck."""
        return 1.0 + float(np.mean([walk.expected for walk in self.walks]))

    def gain_over(self, other: Measured) -> tuple[float, float]:
        """By how much more this expects at the same points, and the standard error of that."""
        pairs = zip(self.walks, other.walks, strict=True)
        gains = np.array([one.expected - two.expected for one, two in pairs])
        return float(gains.mean()), float(gains.std() / np.sqrt(len(gains)))

    def acceptance(self, num_levels: int) -> list[float]:
        """The chance that the first d + 1 drafted tokens are all accepted, for each d."""
        lengths = self._lengths()
        return [float((lengths > level).mean()) for level in range(num_levels)]

    def _lengths(self) -> IntArray:
        return ints([len(walk.ranks) for walk in self.walks])


class Calibrator:
    """A target, and text of its own; `measure` takes one head after the other.

    Args:
        prompts: each of at least one token.
        num_new_tokens: how many tokens the target continues each prompt by.
    """

    def __init__(
        self,
        path: Path,
        prompts: Sequence[IntArray],
        num_new_tokens: int,
        *,
        device: torch.device,
        dtype: torch.dtype | None = None,
        trust_remote_code: bool = False,
        allow_pickle: bool = False,
    ) -> None:
        collective = Collective.single()
        self.path = path
        self.model = load_model(
            path,
            dtype=dtype,
            device=device,
            collective=collective,
            trust_remote_code=trust_remote_code,
            allow_pickle=allow_pickle,
        )
        self._prompt_lens = [len(prompt) for prompt in prompts]
        longest = max(self._prompt_lens) + num_new_tokens
        self._width = -(-longest // BLOCK_SIZE)
        self.texts = self._continued(prompts, num_new_tokens)

    def rope_theta(self) -> float | None:
        """The target's rotary base, if it has one."""
        config: Any = self.model.module.config
        parameters = getattr(config.get_text_config(), "rope_parameters", None) or {}
        theta = parameters.get("rope_theta")
        return None if theta is None else float(theta)

    def measure(self, section: HeadConfig, num_points: int) -> Measured:
        """The head of `section`, at about `num_points` points spread over the text.

        Raises:
            CheckpointError, ConfigError: as loading it does.
            RuntimeError: the head failed while it drafted.
        """
        service = TeacherForcedHead(section, self.model, self.path, _STEP_POINTS)
        cache = self._new_cache(service)
        for begin, texts in self._portions():
            step = self._step(begin, texts, np.zeros(len(texts), dtype=np.int32))
            self._draft(service, cache, step, Verdict.empty(step.step, step.num_seqs))
        depth = section.draft_len
        points = self._points(num_points, depth)
        walks: list[Walk] = []
        for start in range(0, len(points), _STEP_POINTS):
            walks += self._walks(service, cache, points[start : start + _STEP_POINTS], section)
        head: Head = service.head
        return Measured(tuple(walks), head.capture)

    def _walks(
        self,
        service: TeacherForcedHead,
        cache: KVCache,
        points: list[tuple[int, int]],  # text, and how many of its tokens are known
        section: HeadConfig,
    ) -> list[Walk]:
        texts = [self.texts[text][known - 2 : known - 1] for text, known in points]
        rows = [text for text, _ in points]
        contexts = ints([known - 2 for _, known in points])
        step = self._step(rows, texts, contexts, num_nodes=section.max_nodes)
        emitted = ints([self.texts[text][known - 1] for text, known in points])
        none = ints([])
        starts = np.arange(len(points) + 1, dtype=np.int32)
        verdict = Verdict(step.step, emitted, starts, none, np.zeros_like(starts))
        service.set_texts([self.texts[text] for text in rows])
        drafts = self._draft(service, cache, step, verdict)
        recorded = service.recorded()
        if recorded is not None:
            return [_forced_walk(chances, hits) for chances, hits in zip(*recorded, strict=True)]
        return [
            _walk(drafts, index, self.texts[text][known:])
            for index, (text, known) in enumerate(points)
        ]

    def _draft(
        self, service: TeacherForcedHead, cache: KVCache, step: StepInput, verdict: Verdict
    ) -> NextDrafts:
        with torch.inference_mode():
            _, hidden = self.model.forward_capturing(step, cache, service.capture)
            drafts = service.draft(step, verdict, hidden).next_drafts
        assert drafts is not None, "a head always answers"
        if drafts.error:
            raise RuntimeError(f"the head failed: {drafts.error}")
        return drafts

    def _new_cache(self, service: TeacherForcedHead | None) -> KVCache:
        shapes = service.kv_shapes if service else ()
        cache = self.model.new_cache(len(self._prompt_lens) * self._width, BLOCK_SIZE, shapes)
        if service:
            service.attach(cache)
        return cache

    def _continued(self, prompts: Sequence[IntArray], num_new_tokens: int) -> list[IntArray]:
        """Prompts with the target's greedy continuation."""
        cache = self._new_cache(None)
        texts = [ints(prompt) for prompt in prompts]
        for rows, portion in _portions(list(texts)):
            step = self._step(rows, portion, np.zeros(len(rows), dtype=np.int32), samples=True)
            self._append(texts, rows, self.model.forward(step, cache))
        rows = list(range(len(texts)))
        for _ in range(num_new_tokens - 1):
            contexts = ints([len(text) - 1 for text in texts])
            step = self._step(rows, [text[-1:] for text in texts], contexts, samples=True)
            self._append(texts, rows, self.model.forward(step, cache))
        return texts

    def _append(self, texts: list[IntArray], rows: list[int], logits: Tensor) -> None:
        for row, token in zip(rows, logits.argmax(1).tolist(), strict=True):
            texts[row] = np.append(texts[row], np.int32(token))

    def _portions(self) -> list[tuple[list[int], list[IntArray]]]:
        """Texts without their last token, which none of the points has computed."""
        return _portions([text[:-1] for text in self.texts])

    def _points(self, num_points: int, depth: int) -> list[tuple[int, int]]:
        """Evenly spread over what the target wrote, with `depth` known tokens still to come."""
        every = [
            (text, known)
            for text, (tokens, prompt) in enumerate(zip(self.texts, self._prompt_lens, strict=True))
            for known in range(max(2, prompt + 1), len(tokens) - depth + 1)
        ]
        if len(every) <= num_points:
            return every
        return [every[i] for i in np.linspace(0, len(every) - 1, num_points).astype(int)]

    def _step(
        self,
        rows: list[int],  # texts; those of one text share its blocks
        chunks: list[IntArray],
        contexts: IntArray,  # [num_seqs]
        *,
        samples: bool = False,
        num_nodes: int = 0,
    ) -> StepInput:
        count = len(rows)
        samples = samples or num_nodes > 0
        ends = contexts + ints([len(chunk) for chunk in chunks])
        following = [-1 if samples else int(self.texts[r][e]) for r, e in zip(rows, ends)]
        tables = ints(rows)[:, None] * self._width + np.arange(self._width, dtype=np.int32)
        known = KnownTokens(
            step=0,
            token_ids=np.concatenate(chunks),
            query_start=starts_of([len(c) for c in chunks]),
            context_lens=contexts,
            block_tables=tables.astype(np.int32),
            samples=np.full(count, samples),
            max_nodes=np.full(count, num_nodes, dtype=np.int32),
            kv_moves=ints([]).reshape(0, 2),
            sampling=_greedy(count),
            next_tokens=ints(following),
        )
        return joining.join(known, None, BLOCK_SIZE)


def _portions(texts: list[IntArray]) -> list[tuple[list[int], list[IntArray]]]:
    """Texts in groups that a step has room for."""
    portions: list[tuple[list[int], list[IntArray]]] = []
    size = _STEP_TOKENS
    for row, text in enumerate(texts):
        if size + len(text) > _STEP_TOKENS:
            portions.append(([], []))
            size = 0
        portions[-1][0].append(row)
        portions[-1][1].append(text)
        size += len(text)
    return portions


def _walk(drafts: NextDrafts, index: int, truth: IntArray) -> Walk:
    """How many tokens of `truth` the tree of sequence `index` contains."""
    span = slice(drafts.start[index], drafts.start[index + 1])
    draft = Draft(drafts.tokens[span], drafts.parents[span])
    siblings = tree.children(draft.parents)
    ranks = [
        siblings[int(draft.parents[node])].index(node)
        for node in tree.follow(draft, truth.tolist())
    ]
    return Walk(tuple(ranks), draft.num_nodes, float(len(ranks)))


def _forced_walk(
    chances: FloatArray,  # [depth]
    hits: NDArray[np.bool_],  # [depth]
) -> Walk:
    """The walk of a teacher-forced chain."""
    length = len(hits) if hits.all() else int(hits.argmin())
    return Walk((0,) * length, len(hits), float(chances.cumprod().sum()))


def _greedy(count: int) -> SamplingRows:
    zeros, ones = np.zeros(count, dtype=np.float32), np.ones(count, dtype=np.float32)
    off = np.zeros(count, dtype=np.int32)
    seeds = np.zeros(count, dtype=np.int64)
    return SamplingRows(zeros, off, ones, zeros, seeds, off, off - 1)
