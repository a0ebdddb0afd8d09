"""Compose: several drafters as one, by precedence or merged into one token tree.

*Precedence* is llama.cpp's rule: per request, the first member with a draft wins, and members
without a model come before those with one. *Merge* is SpecInfer's (Miao et al. 2023,
arXiv:2305.09781): the drafts of all members are merged into one tree by common prefixes, in order
of priority, within the node budget. *Extend* is precedence, followed by a look-up that continues
the draft of a model, as TensorRT-LLM's suffix automaton does for its heads: it looks up what
follows the context and the model's chain (of a tree, the path of first children). *Choose* assigns
each request to one member, by the tokens per second that the members' requests have emitted.

In all modes except *choose*, members that do not pay rest (`Worth`).

Members need no special support: each is guarded and counted separately and observes a verdict on
its own nodes. A merged tree has deterministic nodes only, which every rule verifies.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np
from numpy.typing import NDArray

from ..config import ComposeConfig
from ..errors import ConfigError
from ..scheduler import tree
from ..scheduler.types import Batch, Draft, DraftProbs, IntArray, Request, Verdict, ints
from .drafting import Drafting, own_verdict, remember
from .protocol import Drafter, Needs

log = logging.getLogger(__name__)
_FORGET: Final = 0.998  # discount per request: some 500 requests count
_SPREAD: Final = 0.25  # standard deviation of a request's speed, relative to the best member's


class Choice:
    """Chooses a member for a request that names none: a bandit over tokens per second.

    Discounted UCB1 (Garivier and Moulines 2011, arXiv:0805.3415): a request goes to the member with
    the largest sum of measured speed and uncertainty. The time of a step is divided among its rows,
    and a member's drafting time among its requests; steps with prompts are left out.

    Args:
        clock: returns seconds.
    """

    def __init__(self, num_members: int, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self.num_requests = np.zeros(num_members)  # these three: [num_members], discounted
        self._tokens = np.zeros(num_members)
        self._seconds = np.zeros(num_members)
        self._member: dict[str, int] = {}  # by request
        self._since: float | None = None  # end of the last step; None: the engine was idle

    @property
    def speeds(self) -> NDArray[np.float64]:  # [num_members]
        """Returns tokens per second of each member's requests; 0: not measured yet."""
        return np.divide(self._tokens, self._seconds, where=self._seconds > 0, out=0 * self._tokens)

    def open(self, request_id: str) -> int:
        """Returns the member that drafts for this request."""
        for counted in (self.num_requests, self._tokens, self._seconds):
            counted *= _FORGET
        speeds, member = self.speeds, int(self.num_requests.argmin())
        if speeds.all():
            unsure = np.sqrt(2 * np.log1p(self.num_requests.sum()) / self.num_requests)
            member = int((speeds / speeds.max() + _SPREAD * unsure).argmax())
        self.num_requests[member] += 1
        self._member[request_id] = member
        return member

    def count(
        self, batch: Batch, verdict: Verdict, num_nodes: IntArray, draft_s: Sequence[float]
    ) -> None:
        """Records a step's emitted tokens and times.

        Args:
            num_nodes: [num_seqs], of the drafts that were verified.
            draft_s: [num_members], seconds that each member drafted for it.
        """
        now, since = self._clock(), self._since
        self._since = now
        if since is None or batch.num_tokens != batch.num_seqs:
            return
        members = np.array([self._member.get(each, -1) for each in batch.request_ids])
        rows, shared = 1 + num_nodes, max(now - since - sum(draft_s), 0.0)
        for member in np.unique(members[members >= 0]).tolist():
            own = members == member
            self._tokens[member] += verdict.num_emitted[own].sum()
            self._seconds[member] += draft_s[member] + shared * rows[own].sum() / rows.sum()

    def close(self, request_id: str) -> None:
        self._member.pop(request_id, None)
        if not self._member:
            self._since = None


_KEPT: Final = 0.99  # discount per step: some 100 steps count
_JUDGED, _TRIAL = 128, 36  # steps until a member is judged: usually, and in a trial
_CATCH_UP = 4  # first steps of a trial, in which the member computes what it has missed
_REST, _LONGEST_REST = 256, 8192  # steps of a rest, which doubles after each failed trial
_MARGIN: Final = 1.03  # a member rests if steps would be faster without it by this factor


class Worth:
    """Decides which members pay, by the tokens and the time that each adds to a step.

    Without a member, a step would emit fewer tokens, namely those that only the member has guessed.
    It would also take less time, namely the member's drafting and its rows. With precedence, later
    members would draft instead, as well as they do when they are asked. A member rests if steps
    would be faster without it, and is tried again from time to time. Whether the last member pays
    is left to the budget (`scheduler/draft_lengths.py`).

    Args:
        in_turn: whether members are asked in order until one has a draft (precedence).
    """

    def __init__(self, num_members: int, *, in_turn: bool) -> None:
        self._in_turn = in_turn
        self._open: set[str] = set()
        self._since: float | None = None  # end of the last step; None: the engine was idle
        # Discounted sums by member, over steps in which it did not rest: tokens and seconds of the
        # steps, its own share of both, rows in which it was asked, rows taken from later members.
        self._sums = np.zeros((num_members, 6))
        self._sizes = np.zeros(5)  # sums of a regression of seconds on rows
        self.rests = [False] * num_members
        self._left = [_JUDGED] * num_members  # steps until each is judged or tried again
        self._pauses = [_REST] * num_members
        self._unmeasured = 0  # upcoming steps in which a member catches up

    def open(self, request_ids: Sequence[str]) -> None:
        self._open.update(request_ids)

    def close(self, request_ids: Sequence[str]) -> None:
        self._open.difference_update(request_ids)
        if not self._open:
            self._since = None

    def count(
        self,
        batch: Batch,
        num_emitted: int,
        added: IntArray,  # [num_members], accepted tokens that no other member has guessed
        nodes: IntArray,  # [num_members], of drafts
        rows: NDArray[np.int64],  # [2, num_members], in which each was asked, and drafted
        draft_s: Sequence[float],  # [num_members]
    ) -> list[int]:
        """Records a step; returns the members whose rest begins or ends."""
        now, since = time.perf_counter(), self._since
        self._since = now
        if since is None or batch.num_tokens != batch.num_seqs or not rows[0].any():
            return []
        if self._unmeasured:
            self._unmeasured -= 1
        else:
            elapsed, own_s = now - since, np.array(draft_s)
            size, forward_s = batch.num_seqs + int(nodes.sum()), elapsed - float(own_s.sum())
            self._sizes = _KEPT * self._sizes + [1, size, forward_s, size**2, size * forward_s]
            own_s += self._row_s * nodes
            whole = np.full((len(nodes), 2), [num_emitted, elapsed])
            new, ran = np.column_stack([whole, added, own_s, *rows]), ~np.array(self.rests)
            self._sums[ran] = _KEPT * self._sums[ran] + new[ran]
        self._left = [left - 1 for left in self._left]
        return [index for index, left in enumerate(self._left) if left <= 0 and self._turn(index)]

    def loss(self, index: int) -> float:
        """Returns the ratio of speeds without and with a member; above 1, it does not pay."""
        tokens, seconds, added, own_s, _, num_taken = self._sums[index].tolist()
        for later in range(index + 1, len(self._sums)) if self._in_turn else ():
            *_, others, others_s, asked, _ = self._sums[later].tolist()
            if asked > 0 and not self.rests[later]:
                added -= num_taken * others / asked
                own_s -= num_taken * others_s / asked
                break
        return (tokens - added) * seconds / max(tokens * (seconds - own_s), 1e-9)

    @property
    def _row_s(self) -> float:
        """Returns seconds per additional row, by regression; at most a row's share of the step."""
        count, size, seconds, squares, products = self._sizes.tolist()
        spread = count * squares - size * size
        slope = (count * products - size * seconds) / spread if spread > 1e-6 else 0.0
        return min(max(slope, 0.0), max(seconds, 0.0) / max(size, 1.0))

    def _turn(self, index: int) -> bool:
        """Judges a member or ends its rest; returns whether that changed its state."""
        if self.rests[index]:
            self.rests[index], self._left[index], self._unmeasured = False, _TRIAL, _CATCH_UP
            self._sums[index] = 0.0
            return True
        self._left[index] = _JUDGED
        if self.rests.count(False) == 1 or self.loss(index) < _MARGIN:
            self._pauses[index] = _REST
            return False
        self.rests[index], self._left[index] = True, self._pauses[index]
        self._pauses[index] = min(2 * self._pauses[index], _LONGEST_REST)
        return True


@dataclass(frozen=True, slots=True)
class Member:
    """A drafter and the settings of its section that `Compose` uses."""

    drafter: Drafter
    max_draft_len: int
    has_model: bool
    continues: bool = False  # whether it can continue another member's draft


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
        self._has_model = [member.has_model for member in members]
        self._continuing = [
            index
            for index, member in enumerate(members)
            if config.mode == "extend" and member.continues
        ]
        self._chosen: dict[str, frozenset[str]] = {}  # by request: the only members to be asked
        self._steps: dict[int, _Drafted] = {}  # those in flight
        self._choice = Choice(len(members)) if config.mode == "choose" else None
        self._worth: Worth | None = None
        if config.adapts and self._choice is None:
            self._worth = Worth(len(members), in_turn=not self._merge)

    def open(self, requests: Sequence[Request]) -> None:
        for request in requests:
            wish = request.speculation
            if wish.min_prob is not None:  # only members that respect it may draft
                able = {each.name for each in self.members if each.drafter.takes_min_prob}
                self._chosen[request.id] = frozenset(able.intersection(wish.drafters or able))
            elif wish.drafters is not None:
                self._chosen[request.id] = frozenset(wish.drafters)
            elif self._choice is not None and wish.enabled:
                member = self.members[self._choice.open(request.id)]
                member.stats.num_chosen += 1
                self._chosen[request.id] = frozenset([member.name])
        for member in self.members:
            member.open(requests)
        if self._worth is not None:
            self._worth.open([request.id for request in requests])

    def propose(self, batch: Batch, budgets: IntArray) -> list[Draft]:
        joints = [_Joint(budget) for budget in budgets.tolist()]
        drafted = _Drafted()
        remember(self._steps, batch.step, drafted)
        for index, member in enumerate(self.members):
            left = budgets
            if not self._merge:
                left = ints([0 if joint.num_guesses else joint.room for joint in joints])
            start = time.perf_counter()
            allowed = self._allowed(index, batch, left)
            drafts = member.propose(batch, allowed)
            drafted.asked.append(int((allowed > 0).sum()))
            drafted.drafts.append(drafts)
            drafted.seconds.append(time.perf_counter() - start)
            for joint, draft in zip(joints, drafts, strict=True):
                if draft.num_nodes:
                    joint.add(index, member.name, draft)
        for index in self._continuing:
            start = time.perf_counter()
            self._extend(index, batch, joints, drafted)
            drafted.seconds[index] += time.perf_counter() - start
        drafted.window_owner = [joint.window_owner for joint in joints]
        return [joint.draft(keep_probs=not self._merge) for joint in joints]

    def observe(self, batch: Batch, verdict: Verdict) -> None:
        drafted = self._steps.pop(batch.step, None)
        if self._choice is not None:
            self._measure(self._choice, batch, verdict, drafted or _Drafted())
        depths = np.zeros((len(self.members), batch.num_seqs), np.int32)  # accepted
        for index, member in enumerate(self.members):
            drafts: Sequence[Draft] = [tree.EMPTY] * batch.num_seqs
            has_window = [False] * batch.num_seqs
            extended: Sequence[list[int]] = ()
            if drafted is not None:
                drafts, extended = drafted.drafts[index], drafted.extended.get(index, ())
                has_window = [owner == index for owner in drafted.window_owner]
            own = own_verdict(verdict, drafts, has_window, extended)
            depths[index] = np.diff(own.path_start)
            member.observe(batch, own)
        if self._worth is not None and drafted is not None:
            self._weigh(self._worth, batch, verdict, drafted, depths)

    def close(self, request_ids: Sequence[str]) -> None:
        for request_id in request_ids:
            self._chosen.pop(request_id, None)
            if self._choice is not None:
                self._choice.close(request_id)
        if self._worth is not None:
            self._worth.close(request_ids)
        for member in self.members:
            member.close(request_ids)

    def _weigh(
        self,
        worth: Worth,
        batch: Batch,
        verdict: Verdict,
        drafted: _Drafted,
        depths: IntArray,  # [num_members, num_seqs], accepted tokens
    ) -> None:
        """Lets members that do not pay rest."""
        if self._merge:  # without a member, the next deepest path would be accepted
            *_, second, best = np.sort(np.vstack([np.zeros_like(depths), depths]), axis=0)
            depths = np.maximum(depths - np.where(depths == best, second, best), 0)
        nodes = ints([[draft.num_nodes for draft in drafts] for drafts in drafted.drafts])
        took = nodes > 0
        for index, chains in drafted.extended.items():  # continued drafts replace nobody's
            took[index] &= [not chain for chain in chains]
        rows = np.array([drafted.asked, took.sum(1)])
        total, added = int(verdict.num_emitted.sum()), depths.sum(1, dtype=np.int32)
        for index in worth.count(batch, total, added, nodes.sum(1), rows, drafted.seconds):
            member, is_idle = self.members[index], worth.rests[index]
            faster = f"{worth.loss(index) - 1:.0%}"
            member.rests = f"steps are {faster} faster without its drafts" if is_idle else ""
            log.info("drafter %s: %s", member.name, member.rests or "it is tried again")

    def _measure(self, choice: Choice, batch: Batch, verdict: Verdict, drafted: _Drafted) -> None:
        num_nodes = np.zeros(batch.num_seqs, np.int32)
        for drafts in drafted.drafts:
            num_nodes += ints([draft.num_nodes for draft in drafts])
        choice.count(batch, verdict, num_nodes, drafted.seconds or [0.0] * len(self.members))
        for member, speed in zip(self.members, choice.speeds.tolist(), strict=True):
            member.stats.tokens_per_s = speed

    def _extend(
        self, index: int, batch: Batch, joints: Sequence[_Joint], drafted: _Drafted
    ) -> None:
        """Lets a member continue the drafts of models that no member has continued yet."""
        member, chains = self.members[index], [list[int]()] * batch.num_seqs
        for row, joint in enumerate(joints):
            if joint.room and joint.only_member >= 0 and self._has_model[joint.only_member]:
                chains[row] = joint.first_path()
        left = ints([joint.room if chain else 0 for joint, chain in zip(joints, chains)])
        if not left.any():
            return
        drafts = member.extend(batch, chains, self._allowed(index, batch, left))
        drafted.extended[index] = chains
        for row, draft in enumerate(drafts):
            if draft.num_nodes:
                drafted.drafts[index][row] = draft
                joints[row].add(index, member.name, draft, after=chains[row])
            else:
                chains[row] = []

    def _allowed(self, index: int, batch: Batch, left: IntArray) -> IntArray:  # [num_seqs]
        """Returns the number of the remaining nodes that a member may draft."""
        if self.members[index].rests:  # except for requests that name it
            left = np.where([each in self._chosen for each in batch.request_ids], left, np.int32(0))
        if self._chosen:
            name = self.members[index].name
            left = np.where(self._is_chosen(name, batch), left, np.int32(0))
        return np.minimum(left, self._max_draft_lens[index])

    def _is_chosen(self, name: str, batch: Batch) -> list[bool]:
        """Returns whether each row's request lets that member draft."""
        chosen = [self._chosen.get(request_id) for request_id in batch.request_ids]
        return [names is None or name in names for names in chosen]

    def shutdown(self) -> None:
        for member in self.members:
            member.shutdown()


@dataclass(slots=True)
class _Drafted:
    """The drafts of a step."""

    drafts: list[list[Draft]] = field(default_factory=list)  # [member][row]
    asked: list[int] = field(default_factory=list)  # [member], rows
    seconds: list[float] = field(default_factory=list)  # [member], drafting time
    # By member: [row], the tokens that its draft follows.
    extended: dict[int, list[list[int]]] = field(default_factory=dict)
    # [row], member whose window is in the tree.
    window_owner: list[int | None] = field(default_factory=list)


class _Joint:
    """One row's tree under construction: guesses merged by prefix, and one member's window."""

    def __init__(self, budget: int) -> None:
        self._trie = tree.Trie(budget)
        self.window_owner: int | None = None
        self._window: list[tuple[int, int, bool]] = []  # token, parent, parent is in the window
        self._sources: list[str] = []
        self.only_member = -1  # the whole draft's, without a window; -1: none, or several
        self._origins: list[str] = []  # [num_guesses]
        self._only: Draft | None = None  # set while the tree is exactly one member's draft
        self._probs: DraftProbs | None = None  # of the guesses, if all are one member's

    @property
    def num_guesses(self) -> int:
        return len(self._trie.tokens)

    @property
    def room(self) -> int:
        return self._trie.room

    def first_path(self) -> list[int]:
        """Returns the tokens from the root down, along first children."""
        path, at, parents = list[int](), -1, self._trie.parents
        while at in parents[at + 1 :]:
            at = parents.index(at, at + 1)
            path.append(self._trie.tokens[at])
        return path

    def add(self, member: int, name: str, draft: Draft, after: Sequence[int] = ()) -> None:
        """Adds the nodes that fit: a guess needs its parent, a window all of its cells.

        Args:
            after: tokens of the path at whose end the draft begins; it is in the tree.
        """
        root = -1
        for token in after:
            place = self._trie.place(root, token)
            assert place is not None, (after, self._trie.tokens)
            root = place
        tokens, parents = draft.tokens.tolist(), draft.parents.tolist()
        places: list[int | None] = []  # [num_guesses], node in the tree; None: not added
        before, first = self.room, not self.num_guesses
        for token, parent in zip(tokens[: draft.num_guesses], parents, strict=False):
            above = root if parent < 0 else places[parent]
            place = None if above is None else self._trie.place(above, token)
            places.append(place)
        whole = None not in places
        if draft.num_guesses and not after:
            self._probs = draft.probs if first and whole else None
        if draft.num_window and whole and not self._window and draft.num_window <= self.room:
            self._add_window(tokens, parents, draft.num_guesses, places)
            self.window_owner = member
        elif draft.num_window:
            whole = False
        self._origins += [name] * (self.num_guesses - len(self._origins))
        if self.room < before:
            self._only = draft if whole and not self._sources else None
            self.only_member = member if self._only and not draft.num_window else -1
            self._sources.append(name)

    def draft(self, *, keep_probs: bool) -> Draft:
        """Returns the tree.

        Distributions are kept only if one member made all guesses, except those that continue its
        draft.
        """
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
            self._padded(first + len(cells)) if keep_probs else None,
            "+".join(self._sources),
            len(cells),
            origins=tuple(self._origins),
        )

    def _padded(self, num_nodes: int) -> DraftProbs | None:
        """Returns the guesses' distributions, followed by zeros for tokens that were not drawn."""
        if self._probs is None:
            return None
        ids, probs = self._probs.ids[:num_nodes], self._probs.probs[:num_nodes]
        rows = ((0, num_nodes - len(ids)), (0, 0))
        return DraftProbs(np.pad(ids, rows), np.pad(probs, rows))

    def _add_window(
        self, tokens: list[int], parents: list[int], first: int, places: list[int | None]
    ) -> None:
        for token, parent in zip(tokens[first:], parents[first:], strict=True):
            inside = parent >= first
            above = parent - first if inside else -1 if parent < 0 else places[parent]
            assert above is not None, "a window is added only with all of its guesses"
            self._window.append((token, above, inside))
        self._trie.room -= len(tokens) - first


def _needs(members: Sequence[Member], config: ComposeConfig) -> Needs:
    """Returns the combined needs of all members."""
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
    """Returns the names, with a number appended to repeated ones."""
    return [
        name if index == names.index(name) else f"{name}-{names[: index + 1].count(name)}"
        for index, name in enumerate(names)
    ]
