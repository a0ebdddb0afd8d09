"""Compose: several drafters as one, by precedence or merged into one token tree.

*Precedence* is llama.cpp's rule: per request, the first member with a draft wins, and members
without a model come before those with one. *Merge* is SpecInfer's (Miao et al. 2023,
arXiv:2305.09781): the drafts of all members are merged into one tree by common prefixes, in order
of priority, within the node budget.

Members need no special support: each is guarded and counted separately and observes a verdict on
its own nodes. A merged tree has deterministic nodes only, which every rule verifies.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from ..config import ComposeConfig
from ..errors import ConfigError
from ..scheduler import tree
from ..scheduler.types import Batch, Draft, DraftProbs, IntArray, Request, Verdict, ints
from .drafting import Drafting
from .protocol import Drafter, Needs


@dataclass(frozen=True, slots=True)
class Member:
    """A drafter and the settings of its section that `Compose` uses."""

    drafter: Drafter
    max_draft_len: int
    has_model: bool


class Compose(Drafter):
    """Calls its members in order and combines their drafts.

    Raises:
        ConfigError: the rule needs the distributions of a member whose nodes are merged.
    """

    name = "compose"

    def __init__(self, config: ComposeConfig, members: Sequence[Member], vocab_size: int) -> None:
        self._merge = config.mode == "merge"
        self.needs = _needs(members, config)
        if not (self._merge or config.keep_order):
            members = sorted(members, key=lambda member: member.has_model)
        names = _unique([member.drafter.name for member in members])
        self.members = [
            Drafting(member.drafter, vocab_size, name)
            for member, name in zip(members, names, strict=True)
        ]
        self._max_draft_lens = [member.max_draft_len for member in members]
        self._step = 0  # the step of the next two
        self._drafted: list[list[Draft]] = []  # [member][row]
        self._window_owner: list[int | None] = []  # [row], member whose window is in the tree

    def open(self, requests: Sequence[Request]) -> None:
        for member in self.members:
            member.open(requests)

    def propose(self, batch: Batch, budgets: IntArray) -> list[Draft]:
        joints = [_Joint(budget) for budget in budgets.tolist()]
        self._step, self._drafted = batch.step, []
        for index, member in enumerate(self.members):
            left = budgets
            if not self._merge:
                left = ints([0 if joint.num_guesses else joint.room for joint in joints])
            drafts = member.propose(batch, np.minimum(left, self._max_draft_lens[index]))
            self._drafted.append(drafts)
            for joint, draft in zip(joints, drafts, strict=True):
                if draft.num_nodes:
                    joint.add(index, member.name, draft)
        self._window_owner = [joint.window_owner for joint in joints]
        return [joint.draft(keep_probs=not self._merge) for joint in joints]

    def observe(self, batch: Batch, verdict: Verdict) -> None:
        for index, member in enumerate(self.members):
            drafts: Sequence[Draft] = [tree.EMPTY] * batch.num_seqs
            has_window = [False] * batch.num_seqs
            if batch.step == self._step:
                drafts = self._drafted[index]
                has_window = [owner == index for owner in self._window_owner]
            member.observe(batch, own_verdict(verdict, drafts, has_window))

    def close(self, request_ids: Sequence[str]) -> None:
        for member in self.members:
            member.close(request_ids)

    def shutdown(self) -> None:
        for member in self.members:
            member.shutdown()


class _Joint:
    """One row's tree under construction: guesses merged by prefix, and one member's window."""

    def __init__(self, budget: int) -> None:
        self._trie = tree.Trie(budget)
        self.window_owner: int | None = None
        self._window: list[tuple[int, int, bool]] = []  # token, parent, parent is in the window
        self._sources: list[str] = []
        self._origins: list[str] = []  # [num_guesses]
        self._only: Draft | None = None  # set while the tree is exactly one member's draft
        self._probs: DraftProbs | None = None  # of the guesses, if all are one member's

    @property
    def num_guesses(self) -> int:
        return len(self._trie.tokens)

    @property
    def room(self) -> int:
        return self._trie.room

    def add(self, member: int, name: str, draft: Draft) -> None:
        """Adds the nodes that fit: a guess needs its parent, a window all of its cells."""
        tokens, parents = draft.tokens.tolist(), draft.parents.tolist()
        places: list[int | None] = []  # [num_guesses], node in the tree; None: not added
        before, first = self.room, not self.num_guesses
        for token, parent in zip(tokens[: draft.num_guesses], parents, strict=False):
            above = -1 if parent < 0 else places[parent]
            place = None if above is None else self._trie.place(above, token)
            places.append(place)
        whole = None not in places
        if draft.num_guesses:
            self._probs = draft.probs if first and whole else None
        if draft.num_window and whole and not self._window and draft.num_window <= self.room:
            self._add_window(tokens, parents, draft.num_guesses, places)
            self.window_owner = member
        elif draft.num_window:
            whole = False
        self._origins += [name] * (self.num_guesses - len(self._origins))
        if self.room < before:
            self._only = draft if whole and not self._sources else None
            self._sources.append(name)

    def draft(self, *, keep_probs: bool) -> Draft:
        """The tree; distributions are kept only if one member made all guesses."""
        if self._only is not None and (keep_probs or self._only.probs is None):
            return self._only
        if not self.num_guesses and not self._window:
            return tree.EMPTY
        first = self.num_guesses
        cells = [token for token, _, _ in self._window]
        above = [parent + first if inside else parent for _, parent, inside in self._window]
        return Draft(
            ints(self._trie.tokens + cells),
            ints(self._trie.parents + above),
            self._padded(len(cells)) if keep_probs else None,
            "+".join(self._sources),
            len(cells),
            origins=tuple(self._origins),
        )

    def _padded(self, num_cells: int) -> DraftProbs | None:
        """The guesses' distributions, followed by zeros for the window's cells."""
        if self._probs is None:
            return None
        rows = ((0, num_cells), (0, 0))
        guesses = slice(0, self.num_guesses)
        return DraftProbs(
            np.pad(self._probs.ids[guesses], rows), np.pad(self._probs.probs[guesses], rows)
        )

    def _add_window(
        self, tokens: list[int], parents: list[int], first: int, places: list[int | None]
    ) -> None:
        for token, parent in zip(tokens[first:], parents[first:], strict=True):
            inside = parent >= first
            above = parent - first if inside else -1 if parent < 0 else places[parent]
            assert above is not None, "a window is added only with all of its guesses"
            self._window.append((token, above, inside))
        self._trie.room -= len(tokens) - first


def own_verdict(verdict: Verdict, drafts: Sequence[Draft], has_window: Sequence[bool]) -> Verdict:
    """`verdict` for one member's `drafts`: same emitted tokens, path in the member's own nodes.

    A member's nodes are closed under parents, so its accepted path is the prefix of the accepted
    tokens that its own tree contains, no matter which member's nodes were verified. A truncated or
    unused draft is counted in the same way.
    """
    path: list[int] = []
    path_start = [0]
    ends = verdict.path_start.tolist()
    window: list[IntArray] = []
    window_start = [0]
    for row, draft in enumerate(drafts):
        num_accepted = ends[row + 1] - ends[row]
        if num_accepted and draft.num_guesses:
            path += tree.follow(draft, verdict.tokens(row)[:num_accepted].tolist())
        path_start.append(len(path))
        if has_window[row]:
            window.append(verdict.window_tokens(row))
        window_start.append(window_start[-1] + (len(window[-1]) if has_window[row] else 0))
    found = verdict.window is not None
    return replace(
        verdict,
        path=ints(path),
        path_start=ints(path_start),
        window=np.concatenate([ints([]), *window]) if found else None,
        window_start=ints(window_start) if found else None,
    )


def _needs(members: Sequence[Member], config: ComposeConfig) -> Needs:
    """The combined needs of all members."""
    field, merge = "speculative_config.members", config.mode == "merge"
    sampled = [index for index, each in enumerate(members) if each.drafter.needs.probabilities]
    if merge and sampled and config.wants_draft_probs:
        index = sampled[0]
        raise ConfigError.at(
            f"{field}.{index}",
            f"under verification {config.verification!r} the member "
            f"{members[index].drafter.name!r} draws its nodes from distributions, which are not "
            "valid in a merged tree; use verification 'coupled', or mode 'precedence'",
        )
    trees = merge or any(member.drafter.needs.shape == "tree" for member in members)
    return Needs(shape="tree" if trees else "chain", probabilities=bool(sampled))


def _unique(names: list[str]) -> list[str]:
    """Names, with a number appended to repeated ones."""
    return [
        name if index == names.index(name) else f"{name}-{names[: index + 1].count(name)}"
        for index, name in enumerate(names)
    ]
