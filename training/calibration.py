"""Measures how well a head drafts for its target, and which static tree to draft with.

The target continues prompts greedily. Then every point of that text is a separate sequence whose
next tokens are known, over the same KV blocks, and the head drafts for all of them in a few steps,
with the code used for serving. Drafted tokens that match the known tokens are those that greedy
decoding would have accepted; chains are teacher-forced.

Source of the tree search: Medusa (Cai et al. 2024, arXiv:2401.10774, appendix C), also Sequoia's
(Chen et al. 2024, arXiv:2402.12374) for acceptance that is independent of the token.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Unpack

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..config import HeadConfig, PARDConfig
from ..config.heads import Choice
from ..drafters.vocabulary import mask_token
from ..errors import CheckpointError, ConfigError
from ..scheduler import tree
from ..scheduler.types import (
    Draft,
    FloatArray,
    IntArray,
    JoinedDrafts,
    NextDrafts,
    SamplingRows,
    StepInput,
    Verdict,
    ints,
    starts_of,
)
from ..workers.attention import KVCache
from ..workers.collective import Collective
from ..workers.head import HeadService
from ..workers.model.checkpoint.hub import Trust
from ..workers.model.paged import PagedModel
from ..workers.model.target import load_model
from ..workers.seats import lay_out

BLOCK_SIZE = 16
_STEP_TOKENS = 2048
_STEP_POINTS = 64


class TeacherForcedHead(HeadService):
    """A head whose draws are the next tokens of known texts, at every level of a chain.

    The probability that the head gave each is recorded: it distinguishes two readings of a head on
    far less text than accepted tokens do. Heads that draft trees of ranks do not draw and record
    nothing.
    """

    def __init__(
        self,
        config: HeadConfig,
        model: PagedModel,
        path: Path,
        max_num_seqs: int,
        *,
        allow_pickle: bool = False,
    ) -> None:
        whole = config.model_copy(update={"p_min": 0.0})
        super().__init__(whole, model, path, max_num_seqs, allow_pickle=allow_pickle)
        self.drop_program()  # `draw` is overridden, so no program may draw
        self._texts: Sequence[IntArray] = ()
        self._chances: list[Tensor] = []  # per level, [num_rows]
        self._hits: list[Tensor] = []  # per level, [num_rows]

    def set_texts(self, texts: Sequence[IntArray]) -> None:
        """Sets the texts of the sequences of the next step."""
        self._texts, self._chances, self._hits = texts, [], []

    def recorded(self) -> tuple[FloatArray, NDArray[np.bool_]] | None:
        """Chance of the true token, and whether it was the likeliest: [num_rows, depth] each."""
        if not self._chances:
            return None
        chances, hits = torch.stack(self._chances, 1), torch.stack(self._hits, 1)
        return chances.cpu().numpy(), hits.cpu().numpy()

    def draw(
        self, logits: Tensor, sampling: SamplingRows, seqs: NDArray[np.int64], positions: IntArray,
        ids: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        tokens = ints([self._texts[seq][at] for seq, at in zip(seqs, positions, strict=True)])
        truth = torch.from_numpy(tokens).to(logits.device, torch.int64)
        if ids is None:
            ids = torch.arange(logits.shape[1], device=logits.device)
        columns = ids == truth[:, None]  # all False for a token outside the head's vocabulary
        chances = (logits.float().softmax(1) * columns).sum(1)
        hits = ids[logits.argmax(1)] == truth
        for level in range(len(seqs) // len(self._texts)):  # by level, for each sequence
            of_level = slice(level, None, len(seqs) // len(self._texts))
            self._chances.append(chances[of_level])
            self._hits.append(hits[of_level])
        return truth


@dataclass(frozen=True, slots=True)
class Walk:
    """One draft along the target's own text."""

    ranks: tuple[int, ...]  # ranks of the true siblings, level by level, until none is true
    num_nodes: int
    expected: float  # of a chain: mean accepted tokens if it were sampled; else len(ranks)


@dataclass(frozen=True, slots=True)
class Measured:
    """A head's results at all points."""

    walks: tuple[Walk, ...]
    capture: tuple[int, ...]  # target layers whose inputs the head reads

    @property
    def lengths(self) -> IntArray:  # [num_walks]
        """Number of accepted tokens per walk."""
        return ints([len(walk.ranks) for walk in self.walks])

    @property
    def tokens_per_step(self) -> float:
        """Mean number of accepted tokens, plus the bonus token."""
        return 1.0 + float(self.lengths.mean())

    @property
    def error(self) -> float:
        """Standard error of `tokens_per_step`."""
        return float(self.lengths.std() / np.sqrt(len(self.walks)))

    @property
    def expected(self) -> float:
        """`tokens_per_step` if drafts were sampled from the head; free of sampling noise."""
        return 1.0 + float(np.mean([walk.expected for walk in self.walks]))

    def gain_over(self, other: Measured) -> tuple[float, float]:
        """Returns how much more this expects at the same points, and the standard error."""
        pairs = zip(self.walks, other.walks, strict=True)
        gains = np.array([one.expected - two.expected for one, two in pairs])
        return float(gains.mean()), float(gains.std() / np.sqrt(len(gains)))

    def acceptance(self, num_levels: int) -> list[float]:
        """Returns, for each d, the probability that the first d + 1 drafted tokens are accepted."""
        return [float((self.lengths > level).mean()) for level in range(num_levels)]


class Calibrator:
    """A target and text that it has generated; `measure` evaluates one head after the other.

    Args:
        prompts: each of at least one token.
        num_new_tokens: number of tokens by which the target continues each prompt.

    Raises:
        CheckpointError: the target cannot be loaded, or has recurrent layers.
        ConfigError: a text would be longer than the target's context; names `max_tokens`.
    """

    def __init__(
        self,
        path: Path,
        prompts: Sequence[IntArray],
        num_new_tokens: int,
        *,
        device: torch.device,
        dtype: torch.dtype | None = None,
        **trust: Unpack[Trust],
    ) -> None:
        self.path = path
        self._loading: dict[str, Any] = {
            "dtype": dtype,
            "device": device,
            "collective": Collective.single(),
            **trust,
        }
        self.model = load_model(path, **self._loading)
        if self.model.keeps_states:  # points of a text share its blocks, not its states
            raise CheckpointError(f"{str(path)!r} has recurrent layers, which are not calibrated")
        self._draft_model: tuple[Path, PagedModel] | None = None  # the last draft model
        self._prompt_lens = [len(prompt) for prompt in prompts]
        longest, most = max(self._prompt_lens) + num_new_tokens, self.model.info.max_model_len
        if longest > most:
            raise ConfigError.at(
                "max_tokens",
                f"{num_new_tokens} more than a prompt's {longest - num_new_tokens} tokens exceed "
                f"the target's context of {most}",
            )
        self._width = -(-longest // BLOCK_SIZE)
        self.texts = self._continued(prompts, num_new_tokens)

    def rope_theta(self) -> float | None:
        """The target's rotary base, if it has one."""
        config: Any = self.model.module.config
        parameters = getattr(config.get_text_config(), "rope_parameters", None) or {}
        theta = parameters.get("rope_theta")
        return None if theta is None else float(theta)

    def measure(self, section: HeadConfig | PARDConfig, num_points: int) -> Measured:
        """Measures the head or draft model of `section` at about `num_points` evenly spread points.

        Raises:
            CheckpointError, ConfigError: raised while loading it.
            RuntimeError: the head failed while it drafted.
        """
        if isinstance(section, PARDConfig):
            return self._measure_masks(section, num_points)
        service = TeacherForcedHead(
            section, self.model, self.path, _STEP_POINTS,
            allow_pickle=self._loading.get("allow_pickle", False),
        )  # fmt: skip
        cache = self._new_cache(service)
        # Texts without their last token, which no point has computed.
        for begin, texts in _portions([text[:-1] for text in self.texts]):
            step = self._step(begin, texts, np.zeros(len(texts), dtype=np.int32))
            self._draft(service, cache, step, Verdict.empty(step.step, step.num_seqs))
        depth = section.draft_len
        points = self._points(num_points, depth)
        walks: list[Walk] = []
        for start in range(0, len(points), _STEP_POINTS):
            walks += self._walks(service, cache, points[start : start + _STEP_POINTS], section)
        return Measured(tuple(walks), service.head.capture)

    def _measure_masks(self, section: PARDConfig, num_points: int) -> Measured:
        """Measures a draft model with masks; every point is a sequence computed from its start."""
        folder, depth = Path(section.speculative_model), section.draft_len
        if self._draft_model is None or self._draft_model[0] != folder:
            self._draft_model = folder, load_model(folder, **self._loading)
        model = self._draft_model[1]
        size, wanted = model.info.vocab_size, self.model.info.vocab_size
        if size != wanted:
            raise ConfigError.at(
                "speculative_config.speculative_model",
                f"{str(folder)!r} has a vocabulary of {size} tokens, the target one of {wanted}",
            )
        mask, points = mask_token(section, size), self._points(num_points, depth)
        num_seqs = max(1, _STEP_TOKENS // (self._width * BLOCK_SIZE))
        cache = model.new_cache(num_seqs * self._width, BLOCK_SIZE, ())
        walks: list[Walk] = []
        for begin in range(0, len(points), num_seqs):
            part = points[begin : begin + num_seqs]
            num_masks = np.full(len(part), depth - 1, dtype=np.int32)
            masks = np.full(num_masks.sum(), mask, dtype=np.int32)
            step = self._step(
                list(range(len(part))),
                [self.texts[text][:known] for text, known in part],
                np.zeros(len(part), dtype=np.int32),
                samples=True,
                num_nodes=depth - 1,
                drafts=JoinedDrafts(masks, num_masks) if len(masks) else None,
            )
            with torch.inference_mode():
                logits = model.forward(step, cache).float()
            truth = np.stack([self.texts[text][known : known + depth] for text, known in part])
            rows = torch.from_numpy(truth.reshape(-1, 1)).to(logits.device, torch.int64)
            chances = logits.softmax(1).gather(1, rows).view(len(part), depth).cpu().numpy()
            hits = (logits.argmax(1)[:, None] == rows).view(len(part), depth).cpu().numpy()
            walks += [_forced_walk(*each) for each in zip(chances, hits, strict=True)]
        return Measured(tuple(walks), ())

    def _walks(
        self,
        service: TeacherForcedHead,
        cache: KVCache,
        points: list[tuple[int, int]],  # text, and the number of its known tokens
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
        """Returns the prompts with the target's greedy continuations."""
        cache = self._new_cache(None)
        texts = [ints(prompt) for prompt in prompts]

        def extend(rows: list[int], chunks: list[IntArray], contexts: IntArray) -> None:
            logits = self.model.forward(self._step(rows, chunks, contexts, samples=True), cache)
            for row, token in zip(rows, logits.argmax(1).tolist(), strict=True):
                texts[row] = np.append(texts[row], np.int32(token))

        for rows, portion in _portions(list(texts)):
            extend(rows, portion, np.zeros(len(rows), dtype=np.int32))
        for _ in range(num_new_tokens - 1):
            contexts = ints([len(text) - 1 for text in texts])
            extend(list(range(len(texts))), [text[-1:] for text in texts], contexts)
        return texts

    def _points(self, num_points: int, depth: int) -> list[tuple[int, int]]:
        """Returns evenly spread points of generated text that have `depth` known next tokens."""
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
        rows: list[int],  # texts; sequences of one text share its blocks
        chunks: list[IntArray],
        contexts: IntArray,  # [num_seqs]
        *,
        samples: bool = False,
        num_nodes: int = 0,
        drafts: JoinedDrafts | None = None,
    ) -> StepInput:
        count = len(rows)
        samples = samples or num_nodes > 0
        ends = contexts + ints([len(chunk) for chunk in chunks])
        following = [-1 if samples else int(self.texts[r][e]) for r, e in zip(rows, ends)]
        tables = ints(rows)[:, None] * self._width + np.arange(self._width, dtype=np.int32)
        return lay_out(
            token_ids=np.concatenate(chunks),
            query_start=starts_of([len(c) for c in chunks]),
            context_lens=contexts,
            block_tables=tables.astype(np.int32),
            samples=np.full(count, samples),
            max_nodes=np.full(count, num_nodes, dtype=np.int32),
            sampling=_greedy(count),
            next_tokens=ints(following),
            drafts=drafts,
            block_size=BLOCK_SIZE,
        )


def _portions(texts: list[IntArray]) -> list[tuple[list[int], list[IntArray]]]:
    """Splits texts into groups that fit into a step."""
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
    """Returns how many tokens of `truth` the tree of sequence `index` contains."""
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
    """Returns the walk of a teacher-forced chain."""
    length = len(hits) if hits.all() else int(hits.argmin())
    return Walk((0,) * length, len(hits), float(chances.cumprod().sum()))


def _greedy(count: int) -> SamplingRows:
    zeros, off = np.zeros(count, dtype=np.float32), np.zeros(count, dtype=np.int32)
    ones, seeds = np.ones(count, dtype=np.float32), np.zeros(count, dtype=np.int64)
    return SamplingRows(zeros, off, ones, zeros, seeds, off, off - 1)


RankTable = NDArray[np.float64]  # [num_levels, num_ranks]


@dataclass(frozen=True, slots=True)
class SearchedTree:
    """A static tree and its expected yield."""

    choices: tuple[Choice, ...]  # rank paths, parents first, otherwise the likeliest first
    tokens_per_step: float  # expected value, including the bonus token


def rank_table(
    walks: Iterable[Sequence[int]],  # per sample, the true rank at each level, until there is none
    num_levels: int,
    num_ranks: int,
) -> RankTable:
    """Returns how often rank r of level d was the target's token if the levels above were right."""
    taken = np.zeros((num_levels, num_ranks))
    reached = np.zeros(num_levels)
    for ranks in walks:
        reached[: min(len(ranks) + 1, num_levels)] += 1
        for level, rank in enumerate(ranks):
            taken[level, rank] += 1
    return taken / np.maximum(reached, 1)[:, None]


def search_tree(table: RankTable, num_nodes: int) -> SearchedTree:
    """Returns the tree of at most `num_nodes` nodes with the most expected tokens per step.

    A node's probability of acceptance is the product of the table's values along its path. A
    child's never exceeds its parent's, so taking the likeliest nodes one by one is optimal. Nodes
    that were never right are left out, so the tree may have fewer.
    """
    heap: list[tuple[float, Choice]] = []

    def offer(path: Choice, above: float) -> None:
        chance = above * float(table[len(path) - 1, path[-1]])
        if chance > 0:
            heapq.heappush(heap, (-chance, path))

    chosen: list[Choice] = []
    expected = 1.0
    for rank in range(table.shape[1]):
        offer((rank,), 1.0)
    while heap and len(chosen) < num_nodes:
        negative, path = heapq.heappop(heap)
        chosen.append(path)
        expected -= negative
        if len(path) < len(table):
            for rank in range(table.shape[1]):
                offer((*path, rank), -negative)
    return SearchedTree(tuple(chosen), expected)


def tokens_per_step(walks: Iterable[Sequence[int]], choices: Iterable[Choice]) -> float:
    """Returns the tokens per step of the tree of `choices` on these samples, with bonus tokens."""
    nodes = set(choices)
    lengths = []
    for ranks in walks:
        length = 0
        while length < len(ranks) and tuple(ranks[: length + 1]) in nodes:
            length += 1
        lengths.append(1 + length)
    return float(np.mean(lengths)) if lengths else 1.0


def wide_tree(num_levels: int, max_nodes: int, max_width: int) -> tuple[Choice, ...]:
    """Returns a full tree for measuring ranks: as wide as allowed, and wider near the root."""
    widths = [1] * num_levels
    open_levels = set(range(num_levels))
    while open_levels:
        level = min(open_levels, key=lambda place: (widths[place] * (place + 1), place))
        wider = [*widths[:level], widths[level] + 1, *widths[level + 1 :]]
        if wider[level] <= max_width and np.cumprod(wider).sum() <= max_nodes:
            widths = wider
        else:
            open_levels.discard(level)
    paths: list[Choice] = [()]
    nodes: list[Choice] = []
    for width in widths:
        paths = [(*path, rank) for path in paths for rank in range(width)]
        nodes += paths
    return tuple(nodes)
