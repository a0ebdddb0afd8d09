"""How many nodes a request may draft in this step.

`DraftBudget.wishes` is called once per step, and may grant nothing; with `adaptive_draft_len`,
lengths follow what was measured (`draft_lengths.py`). The number of tokens left to emit limits the
useful *depth* of a draft (`Batch.max_depth`). For a chain that is its length; a tree or a lookahead
window has many nodes to a level, and is bounded by the configuration and by the model's positions.
`share_nodes` then divides the rest of the token budget among these requests.
"""

from __future__ import annotations

from collections import Counter, abc, defaultdict
from types import MappingProxyType
from typing import Any

import numpy as np

from ..config import SpeculationBase
from ..errors import ConfigError
from . import tree
from .draft_lengths import DraftLengths, Knowledge, Lately
from .sequence import Sequence, TokenBuffer
from .step_costs import Lesson
from .types import Batch, Draft, Verdict

_NONE_PLANNED: abc.Mapping[str, Lately] = MappingProxyType({})


# What bounds a sequence's nodes for as long as the same ones run: its tokens, what is granted to it
# (None: what is to others), its most nodes by its own wish and the load, and the tokens at which
# only its last is left to be emitted. A bare tuple: others take twice as long to unpack.
_Bound = tuple[Sequence, TokenBuffer, Lately | None, int, int]


def _bound(sequence: Sequence, planned: abc.Mapping[str, Lately], most: int) -> _Bound:
    request = sequence.request
    wish = request.speculation
    if wish.max_draft_len is not None:
        most = min(most, wish.max_draft_len)
    granted = planned.get(request.id)
    return sequence, sequence.tokens, granted, most if wish.enabled else 0, sequence.limit - 1


class DraftBudget:
    """The configured length, narrowed by the request's own wish and by the load.

    Args:
        max_model_len: no node lies beyond, whatever it is below.
        tree_drafts: whether a draft may have several nodes to a level.
    """

    def __init__(self, config: SpeculationBase, max_model_len: int, *, tree_drafts: bool) -> None:
        self._config = config
        self.max_draft_len = config.max_nodes  # nodes of a draft, before load and requests count
        self._max_model_len = max_model_len
        self._tree_drafts = tree_drafts
        self._last: tuple[tuple[int, int], int] = ((-1, -1), 0)  # arguments and `nodes_at`
        self.enabled = True
        # Of the last `wishes`: for whom, which of them `plan` is told, and what bounds each.
        self._asked: list[Sequence] = []
        self._asked_ids: list[str] = []
        self._bounds: list[_Bound] = []
        self._bounds_of: tuple[abc.Mapping[str, Lately], int] | None = None  # grants, nodes
        self.num_kept = -1  # of the last `wishes`, nodes that ranks are to choose; -1: all of them
        self._lengths: DraftLengths | None = None
        if config.adapts and config.max_nodes:
            self._lengths = DraftLengths(
                config.max_nodes,
                tree_drafts=tree_drafts,
                has_model=any(each.has_model for each in config.sections),
                whole=not all(each.shortens for each in config.sections),
            )

    @property
    def longest(self) -> int:
        """Nodes of a draft, whatever speculation is switched to."""
        return self._config.max_nodes

    def reconfigure(self, speculative: abc.Mapping[str, Any]) -> None:
        """Switches speculation: `enabled`, `max_draft_len`; what is left out is as configured.

        Raises:
            ConfigError: an unknown key, a length above the configured one, or no boolean; names
                the field.
        """
        allowed = {"enabled", "max_draft_len"}
        for key in speculative:
            if key not in allowed:
                raise ConfigError.at(key, f"unknown key; allowed: {sorted(allowed)}")
        enabled = speculative.get("enabled", True)
        if not isinstance(enabled, bool):
            raise ConfigError.at("enabled", f"{enabled!r} is not true or false")
        configured = self._config.max_nodes
        length = speculative.get("max_draft_len")
        if length is None:
            length = configured
        if type(length) is not int or not 0 <= length <= configured:
            raise ConfigError.at(
                "max_draft_len", f"{length!r} is not within 0 to the configured {configured}"
            )
        self.enabled, self.max_draft_len = enabled, length

    def let_ranks_choose(self, chooses: bool) -> None:
        """Whether ranks choose which nodes of their own drafts are verified, of a given number.

        Where lengths are fixed, all are.
        """
        if self._lengths is not None:
            self._lengths.ranks_choose = chooses

    def rests(self, num_running: int) -> bool:
        """Once before a step, in place of `wishes`: whether drafters get no node in it."""
        if not (self.enabled and self.max_draft_len) or self._nodes_at(num_running) <= 0:
            return True
        return self._lengths is not None and self._lengths.rests()

    def wishes(self, sequences: abc.Iterable[Sequence], num_running: int) -> dict[Sequence, int]:
        """Nodes that each of `sequences` may draft; those are left out that may have none.

        Where ranks choose, sequences that are granted any may draft as many as they could be
        granted, and `num_kept` is what is granted to all of them together.
        """
        wishes: dict[Sequence, int] = {}
        lengths, self.num_kept = self._lengths, -1
        if not self.enabled:
            return wishes
        sequences = list(sequences)
        if sequences != self._asked:  # mostly they are those of the step before
            self._asked = sequences
            requests = [each.request for each in sequences]
            self._asked_ids = [each.id for each in requests if not each.prediction.size]
            self._bounds_of = None
        planned: abc.Mapping[str, Lately] = _NONE_PLANNED
        if lengths is not None:
            lengths.plan(self._asked_ids)
            if lengths.grants_none:
                return wishes
            planned = lengths.requests
        if (most := self._nodes_at(num_running)) <= 0:
            return wishes
        of_others = most if lengths is None else lengths.granted_first
        known = self._bounds_of
        if known is None or known[0] is not planned or known[1] != most:
            self._bounds_of = planned, most
            self._bounds = [_bound(each, planned, most) for each in sequences]
        max_model_len = self._max_model_len if self._tree_drafts else 0
        chooses, num_kept = lengths is not None and lengths.ranks_choose, 0
        for sequence, tokens, lately, bound, limit in self._bounds:
            nodes = of_others if lately is None else lately.granted
            if not nodes:
                continue
            if nodes > bound:
                nodes = bound
            size = tokens.size
            room = limit - size  # none: nothing that is drafted could be emitted
            if room > 0 and max_model_len:
                room = max_model_len - size
            if nodes > room:
                nodes = room
            if nodes > 0:
                if chooses:
                    num_kept += nodes
                    nodes = bound if bound < room else room
                wishes[sequence] = nodes
        if chooses:
            self.num_kept = num_kept
        return wishes

    def told_wishes(
        self, sequences: abc.Iterable[Sequence], wishes: dict[Sequence, int], *, predicted: bool
    ) -> dict[Sequence, int]:
        """`wishes` of drafters, with the nodes for tokens that no drafter has to guess.

        Those are what clients predict, or else what grammars force, of requests that speculate.
        """
        wishes = dict(wishes)
        for sequence in sequences if self.enabled or not predicted else ():
            request = sequence.request
            grammar, most = request.sampling.structured_outputs, request.speculation.max_draft_len
            is_told = request.prediction.size > 0 if predicted else grammar is not None
            if not is_told or not request.speculation.enabled:
                continue
            if predicted:
                most = _PREDICTED_NODES if most is None else min(most, _PREDICTED_NODES)
            depth = sequence.limit - sequence.tokens.size - 1  # the bonus token is on top
            nodes = min(depth, _FORCED_NODES if most is None else most)
            if nodes > wishes.get(sequence, 0):
                wishes[sequence] = nodes
        return wishes

    def shorten(self, batch: Batch, drafts: list[Draft]) -> list[Draft]:
        """As `DraftLengths.shorten`, where lengths are measured; where ranks choose, as they do."""
        if self._lengths is None or not self.enabled:
            return drafts
        drafts = self._lengths.shorten(batch.request_ids, drafts)
        return drafts if self.num_kept < 0 else likeliest(drafts, self.num_kept)

    def end_step(
        self, batch: Batch, drafts: abc.Sequence[Draft], verdict: Verdict, elapsed_ms: float
    ) -> None:
        """A step was committed, and took so long with all that the engine did for it."""
        if self._lengths is not None and self.enabled and batch.drafter_nodes is None:
            self._lengths.count(batch, drafts, verdict, elapsed_ms)

    def forget(self, request_id: str, num_prompt: int, num_output: int) -> None:
        """As `DraftLengths.forget`, where lengths are measured."""
        self._asked, self._bounds = [], []  # they hold on to it
        if self._lengths is not None:
            self._lengths.forget(request_id, num_prompt, num_output)

    @property
    def num_lessons(self) -> int:
        """About times, by which `knowledge` has grown in this run."""
        return 0 if self._lengths is None else self._lengths.num_lessons

    def follow(self, before: DraftBudget) -> None:
        """Takes the place of `before`, of the same target and other drafters."""
        self.enabled = before.enabled
        if self._lengths is not None and before._lengths is not None:
            self._lengths.follow(before._lengths)

    def teach(self, lesson: Lesson) -> None:
        """As `DraftLengths.teach`, where lengths are measured."""
        if self._lengths is not None:
            self._lengths.teach(lesson)

    def teach_opening(self, ms_per_token: float) -> None:
        """As `DraftLengths.teach_opening`, where lengths are measured."""
        if self._lengths is not None:
            self._lengths.teach_opening(ms_per_token)

    def knowledge(self) -> Knowledge | None:
        """What measured lengths have learned; None where they are not measured."""
        return None if self._lengths is None else self._lengths.knowledge()

    def recall(self, known: Knowledge) -> bool:
        """Begins with what an earlier run learned; whether it fits."""
        return self._lengths is not None and self._lengths.recall(known)

    def stats(self) -> dict[str, Any] | None:
        """What measured lengths are based on; None where they are not measured."""
        return None if self._lengths is None else self._lengths.stats()

    def _nodes_at(self, num_running: int) -> int:
        """The configured length under this load; the same for all requests of a step."""
        key = (num_running, self.max_draft_len)
        if self._last[0] != key:
            self._last = (key, self._config.nodes_at(*key))
        return self._last[1]


_FORCED_NODES = 16  # of a request without a drafter: tokens that its grammar forces
_PREDICTED_NODES = 32  # of a request whose client predicts its text
_STEPS_PER_TURN = 16  # a head drafts a step ahead, so that a share should last longer than one


def likeliest(drafts: list[Draft], num_nodes: int) -> list[Draft]:
    """The nodes of chains that are likeliest to be accepted with all those before them.

    Ranks choose alike (`workers/device_step/draft.py`). As no node is likelier than the one before
    it, what is left are chains. Of nodes alike, those go first that are less deep, then those of
    the first drafts.
    """
    known = {row: each.chances for row, each in enumerate(drafts) if each.chances is not None}
    if sum(map(len, known.values())) <= num_nodes:
        return drafts
    ranked = sorted(
        (-chance, depth, row)
        for row, chances in known.items()
        for depth, chance in enumerate(np.cumprod(chances).tolist())
    )
    counts, left = Counter(row for _, _, row in ranked[:num_nodes]), list(drafts)
    for row in known:
        left[row] = tree.truncate(drafts[row], counts[row])
    return left


def share_nodes(wishes: dict[Sequence, int], left: int, step: int) -> dict[Sequence, int]:
    """At most `left` nodes in all, the better priorities first and evenly within each.

    A row gets fewer than another of its priority only if it wished for fewer, or by one where the
    division leaves a remainder; who is favoured by that changes with the step. The result is in
    the order in which rows are served: in that of `wishes`, a plan's turns, where all are granted.
    """
    if sum(wishes.values()) <= left:
        return dict(wishes)
    classes: dict[int, list[Sequence]] = defaultdict(list)
    for sequence in wishes:
        classes[sequence.request.priority].append(sequence)
    granted: dict[Sequence, int] = {}
    for _, rows in sorted(classes.items()):
        first = step // _STEPS_PER_TURN % len(rows)
        # The smallest wish first: what it leaves of an even share goes to those after it.
        queue = sorted(rows[first:] + rows[:first], key=wishes.__getitem__)
        for num_before, sequence in enumerate(queue):
            share, wish = left // (len(queue) - num_before), wishes[sequence]
            granted[sequence] = share = share if share < wish else wish
            left -= share
    return granted
