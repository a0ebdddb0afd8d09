"""Members of a drafter group: draft models that several engines of a cluster share.

Every member is a `DraftTarget`, with its own record of what it has computed. A request drafts with
one member, which caches its keys and values, for as long as that member is up; then with another
one, which computes them again. While fewer requests run than members are up, idle members prepare
further outcomes of the same requests.
"""

from __future__ import annotations

import hashlib
import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from ..config import DraftTargetConfig
from ..errors import OutriderError, WorkerError
from ..scheduler import tree
from ..scheduler.sequence import TokenBuffer
from ..scheduler.timer import Clock
from ..scheduler.types import Batch, Draft, IntArray, Request, Verdict
from .draft_target import DraftTarget
from .protocol import (
    CacheCounts,
    Drafter,
    DraftFault,
    DraftMembers,
    DraftModel,
    DraftWait,
    Health,
    LinkCounts,
)

log = logging.getLogger(__name__)
_PREFIX_TOKENS = 64  # that decide the member, with `drafter_routing: prefix`


@dataclass(slots=True)
class _Routed:
    """A request and the members that draft for it."""

    request: Request
    tokens: TokenBuffer
    members: list[str] = field(default_factory=list)  # the first drafts, the others prepare


@dataclass(slots=True)
class _Share:
    """A member's part of a step."""

    drafter: DraftTarget
    budgets: IntArray  # [num_seqs], 0 for rows without work
    missed: IntArray  # [num_seqs], nodes to draw now
    places: dict[str, tuple[int, int]] = field(default_factory=dict)  # as in `finish`
    fault: Exception | None = None

    def attempt(self, verb: Callable[..., None], *arguments: Any) -> None:
        """Calls a method, unless an earlier one has failed."""
        if self.fault is None:
            try:
                verb(*arguments)
            except (WorkerError, TimeoutError) as error:
                self.fault = error


class Members(Drafter):
    """Divides the requests of an engine among the members that are up.

    Args:
        name: name of the kind of drafter.
        make: builds the drafter of a member's model.
    """

    takes_min_prob = True

    def __init__(
        self,
        config: DraftTargetConfig,
        members: DraftMembers,
        name: str,
        make: Callable[[DraftModel], DraftTarget],
    ) -> None:
        self._group, self._routing = config.drafter_group, config.drafter_routing
        self._wait = DraftWait(config.draft_timeout_s)
        self.clock: Clock = time.monotonic  # also of its drafters; a simulation sets its own
        self._has_cache = config.speculation_cache is not None
        self._source, self._make = members, make
        self._drafters: dict[str, DraftTarget] = {}
        self._routes: dict[str, _Routed] = {}
        self._num_routed = 0
        self._refusal = ""  # why no drafter could be built for a member
        self.name, self.needs = name, DraftTarget.needs
        self.cache_counts = CacheCounts() if self._has_cache else None
        self.link_counts = LinkCounts()
        self._take_changes()

    def open(self, requests: Sequence[Request]) -> None:
        for request in requests:
            tokens = TokenBuffer(request.prompt, request.emitted)
            self._routes[request.id] = _Routed(request, tokens)
        self._source.num_requests = len(self._routes)

    def begin_anew(self) -> None:
        if self._has_cache:
            self.cache_counts = CacheCounts()
        self.link_counts = LinkCounts()
        errors = []
        for drafter in self._drafters.values():
            try:
                drafter.begin_anew()
            except (WorkerError, TimeoutError) as error:
                errors.append(error)
            finally:
                drafter.share_counts(self.cache_counts, self.link_counts)
        if errors:
            raise DraftFault("; ".join(map(str, errors))) from errors[0]

    def propose(self, batch: Batch, budgets: IntArray) -> list[Draft]:
        self._take_changes()
        up = [name for name, drafter in self._drafters.items() if drafter.is_up()]
        drafts = [tree.EMPTY] * batch.num_seqs
        if not up:
            return drafts
        wanted = np.flatnonzero(budgets > 0).tolist()
        for row in wanted:
            self._route(self._routes[batch.request_ids[row]], up)
        if self._has_cache:
            self._spread([self._routes[batch.request_ids[row]] for row in wanted], up)
        faults = self._propose(batch, budgets, wanted, drafts)
        if faults:
            raise DraftFault("; ".join(map(str, faults)), drafts) from faults[0]
        return drafts

    def _propose(
        self,
        batch: Batch,
        budgets: IntArray,
        rows: list[int],
        drafts: list[Draft],  # output
    ) -> list[Exception]:
        """Lets all members draft at once, within the time of a single drafter."""
        deadline_s = self.clock() + self._wait.seconds
        shares = [
            share
            for name, drafter in self._drafters.items()
            if (share := self._share(name, drafter, batch, budgets, rows)) is not None
        ]
        for share in shares:
            share.drafter.clock, share.drafter.deadline_s = self.clock, deadline_s
            share.attempt(self._gather, share, batch, drafts)
        for share in shares:
            # Drafts found by a helper are not drawn.
            found = [row for row in rows if drafts[row].num_nodes]
            share.missed[found] = 0
            share.attempt(share.drafter.ask, batch, share.missed)
        for share in shares:
            share.attempt(share.drafter.take, batch, drafts)
        for share in shares:
            share.attempt(share.drafter.finish, batch, share.budgets, drafts, share.places)
        return [share.fault for share in shares if share.fault is not None]

    def _share(
        self, name: str, drafter: DraftTarget, batch: Batch, budgets: IntArray, rows: list[int]
    ) -> _Share | None:
        """Returns a member's part of a step; None if there is none."""
        share = _Share(drafter, np.zeros_like(budgets), np.zeros_like(budgets))
        for row in rows:
            request_id = batch.request_ids[row]
            members = self._routes[request_id].members
            if name not in members:
                continue
            share.budgets[row] = budgets[row]
            if len(members) > 1:
                share.places[request_id] = members.index(name), len(members)
        return share if share.budgets.any() else None

    @staticmethod
    def _gather(share: _Share, batch: Batch, drafts: list[Draft]) -> None:
        helped = [name for name, (place, _) in share.places.items() if place]
        share.missed = share.drafter.gather(batch, share.budgets, drafts, helped)

    def observe(self, batch: Batch, verdict: Verdict) -> None:
        for row, request_id in enumerate(batch.request_ids):
            route = self._routes.get(request_id)
            if route is not None:
                route.tokens.extend(verdict.tokens(row))
        for drafter in self._drafters.values():
            drafter.observe(batch, verdict)

    def close(self, request_ids: Sequence[str]) -> None:
        for request_id in request_ids:
            self._routes.pop(request_id, None)
        self._source.num_requests = len(self._routes)
        for drafter in self._drafters.values():
            drafter.close(request_ids)

    def shutdown(self) -> None:
        self._source.shutdown()
        while self._drafters:
            self._drafters.popitem()[1].shutdown()

    def health(self) -> Health:
        found = [drafter.health() for drafter in list(self._drafters.values())]
        active = sum(each.state == "active" for each in found)
        if not found or not self._source.num_members:
            why, is_zero = self._refusal or self._source.reason, not self._source.num_members
            rests = "it is scaled to zero" if is_zero else "its members join with the next draft"
            group = f"drafter group {self._group!r}"
            return Health("down" if why else "idle", f"{group}: {why or rests}")
        if active:
            reason = next((each.reason for each in found if each.state != "active"), "")
            return Health("active", f"{active} of {len(found)} members; {reason}" if reason else "")
        return found[0]

    def _take_changes(self) -> None:
        """Starts to use members that have joined; moves requests of members that have left."""
        for name, model in self._source.changes():
            gone = self._drafters.pop(name, None)
            if gone is not None:
                # In another thread: the engine's steps do not wait for it.
                threading.Thread(target=gone.shutdown, daemon=True).start()
                for route in self._routes.values():
                    if name in route.members:
                        route.members.remove(name)
            if model is not None:
                self._join_group(name, model)
            log.info("drafter group %s: %s %s", self._group, name, "joins" if model else "left")

    def _join_group(self, name: str, model: DraftModel) -> None:
        try:
            drafter = self._make(model)
        except OutriderError as error:  # the group's model differs from that at the start
            self._refusal = error.message
            log.warning("drafter group %s: %s", self._group, error.message)
            threading.Thread(target=model.shutdown, daemon=True).start()
            return
        self._refusal = ""
        drafter.wait = self._wait
        assert self.link_counts is not None, "members are separate"
        drafter.share_counts(self.cache_counts, self.link_counts)
        self._drafters[name] = drafter

    def _route(self, route: _Routed, up: list[str]) -> None:
        """Assigns a member to a request without one that is up."""
        if route.members and route.members[0] in up:
            return
        for name in route.members:
            self._leave(route, name)
        route.members = []
        self._join(route, self._chosen(route, up))

    def _chosen(self, route: _Routed, up: list[str]) -> str:
        self._num_routed += 1
        if self._routing == "round_robin":
            return up[self._num_routed % len(up)]
        if self._routing == "prefix":  # rendezvous hashing: few requests move with a member
            begin = route.tokens.view[:_PREFIX_TOKENS].tobytes() + route.request.tenant.encode()
            return max(up, key=lambda name: hashlib.sha256(begin + name.encode()).digest())
        share = 1 + len(self._routes) / len(up)
        loads = {name: self._drafters[name].load * share for name in up}
        for each in self._routes.values():
            for name in each.members[:1]:
                if name in loads:
                    loads[name] += 1
        return min(up, key=lambda name: loads[name])

    def _spread(self, routes: list[_Routed], up: list[str]) -> None:
        """Lets members without requests prepare more outcomes of running requests."""
        owners = {route.members[0] for route in routes}
        idle = [name for name in up if name not in owners]
        for index, route in enumerate(routes):
            helpers = idle[index :: len(routes)]
            for name in [each for each in route.members[1:] if each not in helpers]:
                self._leave(route, name)
                route.members.remove(name)
            for name in helpers:
                if name not in route.members:
                    self._join(route, name)

    def _join(self, route: _Routed, name: str) -> None:
        emitted = route.tokens.view[len(route.request.prompt) :].copy()
        self._drafters[name].open([replace(route.request, emitted=emitted)])
        route.members.append(name)

    def _leave(self, route: _Routed, name: str) -> None:
        if name in self._drafters:
            self._drafters[name].close([route.request.id])
