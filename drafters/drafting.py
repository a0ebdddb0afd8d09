"""The one place that calls drafters: it counts, times and validates, and it never raises.

A drafter that raises loses its tokens for that step. A malformed or oversized draft is dropped
alone. Nodes deeper than the request can still emit are removed. Every fault is counted; the first
of its kind is logged with its traceback. The loop holds one `Drafting`, `Compose` one per member.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Final

import numpy as np

from ..config import SpeculationBase
from ..scheduler import tree
from ..scheduler.plan import Batch
from ..scheduler.types import Draft, IntArray, Request, Verdict
from . import validate
from .colocated import Colocated
from .gate import AcceptanceGate
from .protocol import Composite, Drafter, DrafterStats, DraftFault, Health, Reporting

log = logging.getLogger(__name__)

_FAILED: Final = object()  # result of a call that raised
_MAX_FAULT_CHARS: Final = 300
_MAX_LOGGED: Final = 32  # kinds of fault that are logged per drafter


class Drafting:
    """One drafter behind the methods of `Drafter` and the loop's protocol (`scheduler/loop.py`).

    Args:
        vocab_size: of the target; drafts with other tokens are dropped.
        name: in statistics; the drafter's own by default.
        section: the engine's; its acceptance limits decide when drafting stops for good.
        ranks_draft: whether the target's ranks keep what a head in them drafts.
    """

    def __init__(
        self,
        drafter: Drafter,
        vocab_size: int,
        name: str | None = None,
        section: SpeculationBase | None = None,
        *,
        ranks_draft: bool = False,
    ) -> None:
        self.drafter = drafter
        self.name = name or drafter.name
        self.stats = DrafterStats()
        self._no_guess = replace(tree.EMPTY, source=self.name)
        self._gate = AcceptanceGate(section) if section and section.acceptance_window else None
        self._vocab_size = vocab_size
        self._colocated = drafter if ranks_draft and isinstance(drafter, Colocated) else None
        self._last_fault = ""
        self._step = 0  # the step of the next two
        self._drafted: list[Draft] = []
        self._kept: dict[int, IntArray] = {}  # row -> nodes left, where some were too deep
        self._logged: set[tuple[str, type[BaseException]]] = set()  # kinds of fault

    def open(self, requests: Sequence[Request]) -> None:
        start = time.perf_counter()
        self.stats.num_calls[0] += len(requests)
        self._attempt("open", lambda: self.drafter.open(requests))
        self.stats.begin_ms += _ms_since(start)

    @property
    def proposes_trees(self) -> bool:
        """Whether a draft may be more than a chain."""
        return self.drafter.needs.shape == "tree"

    def all_stats(self) -> dict[str, DrafterStats]:
        """Statistics by drafter."""
        if isinstance(self.drafter, Composite):
            return self.drafter.all_stats()
        return {self.name: self.stats}

    def all_health(self) -> dict[str, dict[str, str]]:
        """`state`, its `reason`, and the `last_fault` if there was one, by drafter.

        A gate of the whole composition stops all of its members.
        """
        closed = self._gate.reason if self._gate is not None else ""
        if isinstance(self.drafter, Composite):
            found = self.drafter.all_health()
            if closed:
                for member in found.values():
                    member.update(state="disabled", reason=closed)
            return found
        health = self.drafter.health() if isinstance(self.drafter, Reporting) else Health()
        if closed:
            health = Health("disabled", closed)
        return {
            self.name: {
                "state": health.state,
                "reason": health.reason,
                "last_fault": self._last_fault,
            }
        }

    @property
    def is_idle(self) -> bool:
        """Whether nothing is ever proposed."""
        return not self.drafter.needs.proposes

    def propose(self, batch: Batch, budgets: IntArray | None = None) -> list[Draft]:
        """One draft per row, of at most `budgets[row]` nodes (None: `batch.max_nodes`).

        An empty draft of a row that had a budget carries the drafter's name, so that a request's
        statistics name it although it proposed nothing.
        """
        self._step, self._drafted = batch.step, [tree.EMPTY] * batch.num_seqs
        self._kept.clear()
        budgets = batch.max_nodes if budgets is None else budgets
        if self._gate is not None and not self._gate.is_open:
            return self._drafted
        depths: IntArray | None = batch.max_depth
        if self.drafter.needs.shape == "chain":
            budgets, depths = np.minimum(budgets, batch.max_depth), None
        asked = int((budgets > 0).sum())
        if asked == 0:
            return self._drafted
        start = time.perf_counter()
        self.stats.num_calls[1] += asked
        drafts = self._attempt("propose", lambda: self.drafter.propose(batch, budgets))
        if drafts is not _FAILED:
            drafts = self._attempt("propose", lambda: self._checked(drafts, budgets))
        if drafts is not _FAILED:
            self._drafted = self._pruned(drafts, depths)
            self._count_drafted()
        self.stats.gen_ms += _ms_since(start)
        if self._gate is not None:
            self._gate.proposed(batch, self._drafted)
        return [
            self._no_guess if draft is tree.EMPTY and budget else draft
            for draft, budget in zip(self._drafted, (budgets > 0).tolist(), strict=True)
        ]

    @property
    def ranks_draft(self) -> bool:
        """Whether steps may be planned with the drafts that the target's ranks keep."""
        return self._colocated is not None and (self._gate is None or self._gate.is_open)

    def drafted(self, batch: Batch) -> list[Draft]:
        """The drafts of a step that was planned with them, from the verdict before it."""
        assert self._colocated is not None, "such a step is planned only if the ranks draft"
        self._step, self._drafted = batch.step, self._colocated.drafted(batch)
        self._kept.clear()
        self.stats.num_calls[1] += int((batch.max_nodes > 0).sum())
        self._count_drafted()
        if self._gate is not None:
            self._gate.proposed(batch, self._drafted)
        return self._drafted

    def _count_drafted(self) -> None:
        counts = [draft.num_guesses for draft in self._drafted if draft is not tree.EMPTY]
        self.stats.num_gen_drafts += sum([count > 0 for count in counts])
        self.stats.num_gen_tokens += sum(counts)

    def observe(self, batch: Batch, verdict: Verdict) -> None:
        start = time.perf_counter()
        if self._gate is not None:
            self._gate.observe(batch, verdict)
        if batch.step == self._step:
            ends = verdict.path_start.tolist()
            for row, draft in enumerate(self._drafted):
                if draft is not tree.EMPTY and draft.num_guesses:
                    self.stats.num_calls[2] += 1
                    self.stats.count_accepted(ends[row + 1] - ends[row])
            verdict = self._as_drafted(verdict)
        self._attempt("observe", lambda: self.drafter.observe(batch, verdict))
        self.stats.acc_ms += _ms_since(start)

    def close(self, request_ids: Sequence[str]) -> None:
        if self._gate is not None:
            self._gate.close(request_ids)
        self._attempt("close", lambda: self.drafter.close(request_ids))

    def shutdown(self) -> None:
        self._attempt("shutdown", self.drafter.shutdown)

    def _attempt(self, verb: str, call: Callable[[], Any]) -> Any:
        """The call's result; if it raised, the drafts of a `DraftFault` or `_FAILED`."""
        try:
            return call()
        except Exception as error:
            self.stats.faults += 1
            self._last_fault = f"{verb}: {error.__cause__ or error}"[:_MAX_FAULT_CHARS]
            kind = (verb, type(error.__cause__ or error))
            is_new = kind not in self._logged and len(self._logged) < _MAX_LOGGED
            if is_new:
                self._logged.add(kind)
            level = logging.ERROR if is_new else logging.DEBUG
            log.log(
                level,
                "drafter %s failed in %s; its drafts are lost",
                self.name,
                verb,
                exc_info=True,
            )
            left = error.drafts if isinstance(error, DraftFault) else None
            return _FAILED if left is None else left

    def _checked(self, drafts: Any, budgets: IntArray) -> list[Draft]:
        """`drafts`, if all are valid.

        Raises:
            DraftFault: some are invalid; it carries the valid ones.
        """
        if not isinstance(drafts, (list, tuple)):
            raise TypeError(
                f"propose must return a list with one draft per row, `EMPTY` for no guess, got "
                f"{drafts!r}"
            )
        if len(drafts) != len(budgets):
            raise ValueError(f"{len(drafts)} drafts for {len(budgets)} rows")
        checked = list(drafts)
        if validate.all_chains(checked, budgets, self._vocab_size):
            return checked
        first = ""
        for row, draft in enumerate(drafts):
            reason = validate.problem(draft, int(budgets[row]), self._vocab_size)
            if reason is not None:
                checked[row] = tree.EMPTY
                first = first or f"row {row}: {reason}"
        if first:
            raise DraftFault(first, checked)
        return checked

    def _pruned(self, drafts: list[Draft], max_depth: IntArray | None) -> list[Draft]:
        """`drafts` without guesses deeper than the request can still emit."""
        if max_depth is None:
            return drafts
        pruned: list[Draft] = []
        for row, (draft, depth) in enumerate(zip(drafts, max_depth.tolist(), strict=True)):
            left, kept = tree.prune(draft, depth)
            pruned.append(left)
            if kept is not None:
                self._kept[row] = kept
        return pruned

    def _as_drafted(self, verdict: Verdict) -> Verdict:
        """`verdict` with the drafter's own node numbers."""
        if not self._kept:
            return verdict
        path = verdict.path.copy()
        for row, kept in self._kept.items():
            nodes = slice(verdict.path_start[row], verdict.path_start[row + 1])
            path[nodes] = kept[path[nodes]]
        return replace(verdict, path=path)


def _ms_since(start: float) -> float:
    return (time.perf_counter() - start) * 1e3
