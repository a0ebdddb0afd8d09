"""The engine: one scheduler loop in its own thread, over one target and its drafter.

`LLM` and the Serve deployment both hold one. Requests are added from any thread; deltas are sent to
each request's sink, one call per sink and step. The loop never blocks on a sink.
"""

from __future__ import annotations

import logging
import os
import platform
import queue
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from functools import partial
from typing import Any, Protocol

from ..config import EngineConfig
from ..config.section import seconds_to_measure
from ..config.strict import tag
from ..drafters.drafting import Drafting, WithPredictions
from ..drafters.registry import build_parts
from ..errors import (
    EngineDeadError,
    InternalError,
    InvalidRequestError,
    OutriderError,
    ResourcesError,
    StepMemoryError,
    WorkerDiedError,
    WorkerError,
)
from ..scheduler.loop import Loop, OverlapLoop
from ..scheduler.scheduler import Scheduler, shrink_after
from ..scheduler.timer import StepRecord, TraceLog
from ..scheduler.types import Delta, Request
from ..workers.group import GroupTarget
from ..workers.spec import ModelReport
from .adaptation import Adaptation
from .host import Backend, EngineHost, local_backend
from .known_lengths import KnownLengths, MadeUpDrafts, measure
from .preflight import check_room, check_trees
from .statistics import LATE_S, SYNTHETIC_WARNING, EngineInfo, Recoveries, StatisticsLog, statistics
from .structured.constraints import Compiler
from .structured.drafting import ConstrainedDrafting
from .swap import IDLE_S, Changing, Parts, Swap, facts_of

log = logging.getLogger(__name__)
_BROKEN_AFTER = 3  # failed steps in a row after which a lone rank is replaced


class Sink(Protocol):
    """Where a request's deltas go."""

    def deliver(self, deltas: list[Delta]) -> None:
        """All of a step's deltas for this sink; must not block."""


class Engine(Changing):
    """Use `Engine.start`; then `submit`, `abort`, `stats`, `shutdown` from any thread."""

    adaptation: Adaptation | None = None  # until the loop runs

    def __init__(
        self,
        config: EngineConfig,
        host: EngineHost,
        loop: Loop,
        parts: Parts,
        drafting: WithPredictions,
        structured: ConstrainedDrafting,
        report: ModelReport,
        lengths: KnownLengths,
    ) -> None:
        super().__init__(parts)
        self._config = config
        self._host = host
        self._loop = loop
        self._drafting = drafting
        self._structured = structured
        self._inbox: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._sinks: dict[str, Sink] = {}  # of requests that have not ended
        self._recoveries = Recoveries(config.max_restarts, config.restart_window_s)
        self._failure: OutriderError | None = None
        self._closed = threading.Event()
        self._num_failed_steps = 0
        self._num_failed_in_a_row = 0
        self._traced: list[TraceLog] = []
        self._max_traced_steps = 0  # nothing is recorded
        self._log = StatisticsLog(config.stats_interval_s)
        self._lengths = lengths
        self.info = EngineInfo(
            model_name=config.model_name,
            max_model_len=loop.scheduler.max_model_len,
            vocab_size=report.vocab_size,
            eos_token_ids=report.eos_token_ids,
            forward=report.forward,
            forward_reason=report.forward_reason,
            all_reduce=host.target_group.reports[0].all_reduce,
            operations=report.operations,
            synthetic_acceptance_rate=config.speculative_config.synthetic_acceptance_rate,
            **facts_of(parts.drafting, host),
        )
        if config.speculative_config.is_synthetic:
            log.warning(SYNTHETIC_WARNING, self.info.synthetic_acceptance_rate)
        loop.take_in = partial(self._drain, block=False)
        repair = self._repair  # called from other threads, run in the loop's
        host.target_group.on_death.append(lambda reason: self._inbox.put(partial(repair, reason)))
        self._thread = threading.Thread(target=self._run, name="outrider-loop", daemon=True)
        self._thread.start()
        self.adaptation = Adaptation.of(config, self)

    @classmethod
    def start(cls, config: EngineConfig, backend: Backend | None = None) -> Engine:
        """Loads the target and its drafter on `backend` (None: this process); starts the loop.

        Raises:
            ConfigError, CheckpointError, ResourcesError: what is wrong, by field.
        """
        backend = backend or local_backend(config)
        config = backend.placed(config)
        host = EngineHost(config, backend)
        try:
            target = GroupTarget(host.target_group, config.step_timeout_s)
            max_model_len = target.report.max_model_len
            if config.max_model_len is None:
                max_model_len = min(max_model_len, target.num_blocks * config.block_size)
            check_room(target.num_blocks, config.block_size, max_model_len)
            report, section = target.report, host.config.speculative_config
            (drafter, made), in_ranks = build_parts(section, host, {}), target.ranks_draft
            drafting = Drafting(drafter, report.vocab_size, section=section, ranks_draft=in_ranks)
            if drafting.proposes_trees:
                check_trees(config, report.operations)
            overlaps = config.overlap_scheduling and host.target_group.is_concurrent
            make_scheduler = partial(
                Scheduler,
                config,
                target.num_blocks,
                max_model_len,
                tree_drafts=drafting.proposes_trees,
                # Other stages do not see what is emitted.
                ranks_append=overlaps and config.pipeline_parallel_size == 1,
                keeps_states=target.keeps_states,
                num_groups=host.target_group.spec.num_groups if overlaps else 1,
            )
            scheduler, kind = make_scheduler(), OverlapLoop if overlaps else Loop
            lengths = KnownLengths(config, report, scheduler.budget)
            if scheduler.budget.knowledge() is not None and not lengths.recall():
                _measure(
                    config, drafting, kind(make_scheduler(), target, drafting), scheduler, host
                )
            drafting.shorten = scheduler.budget.shorten
            compiler = Compiler(config, report.vocab_size, tuple(report.eos_token_ids))
            predicted = WithPredictions(drafting, report.vocab_size)
            structured = ConstrainedDrafting(predicted, compiler, lambda: scheduler.budget.longest)
            loop = kind(scheduler, target, structured)
            parts = Parts(drafting, made)
            return cls(config, host, loop, parts, predicted, structured, report, lengths)
        except BaseException:
            host.shutdown()
            raise

    def submit(self, request: Request, sink: Sink) -> None:
        """Queues a request; its deltas go to `sink` until one has a finish reason.

        Raises:
            InvalidRequestError, OverloadedError, EngineDeadError.
        """
        self.submit_all([request], sink)

    def submit_all(self, requests: Sequence[Request], sink: Sink) -> None:
        """Queues several requests before the same step, or none of them (raises as `submit`)."""
        outcome: queue.SimpleQueue[OutriderError | None] = queue.SimpleQueue()
        self.post(requests, sink, outcome.put)
        error = outcome.get()
        if error is not None:
            raise error

    def post(
        self, requests: Sequence[Request], sink: Sink, done: Callable[[OutriderError | None], None]
    ) -> None:
        """As `submit_all`, but does not wait for the step under way to end.

        Args:
            done: called, mostly in the loop's thread, with why the requests are refused, or None.

        Raises:
            InvalidRequestError: a grammar does not compile, or no drafter can do as is asked.
        """
        for request in requests:
            self._check_min_prob(request)
        constraints = self._structured.compiled(requests)

        def add() -> None:
            self._structured.expect(constraints)
            done(self._add_all(requests, sink))

        self._inbox.put(add)
        if self._failure is not None:  # the loop has ended, or is about to
            self._refuse_waiting()

    def _check_min_prob(self, request: Request) -> None:
        """Refuses a wish that no drafter of this request could fulfil; one that began goes on."""
        wish = request.speculation
        if wish.min_prob is None or len(request.emitted):
            return
        drafters = [each for each in self._drafting.parts if not each.is_idle]
        asked = [each for each in drafters if wish.drafters is None or each.name in wish.drafters]
        if not any(each.drafter.takes_min_prob for each in asked):
            names = ", ".join(each.name for each in asked) or "none"
            raise InvalidRequestError.at(
                "speculation.min_prob",
                f"only drafters with probabilities take it (draft models, heads, Suffix); asked "
                f"here: {names}",
            )

    def abort(self, request_id: str) -> None:
        """Ends a request, if it still runs; its sink gets a last delta."""
        self._inbox.put(lambda: self._deliver(self._end(request_id)))

    def reset_prefix_cache(self) -> None:
        """Forgets the stored prefixes before the next step; running requests keep their blocks."""
        self.check()
        self._inbox.put(self._loop.scheduler.pool.clear_cache)

    def check(self) -> None:
        """Raises `EngineDeadError` if the loop is not running."""
        if self._failure is not None:
            raise EngineDeadError(f"the engine is down: {self._failure.message}")
        if not self._thread.is_alive():
            raise EngineDeadError("the engine has been shut down")

    def stats(self) -> dict[str, Any]:
        """Counts and times as plain values."""
        return {
            **statistics(self.info, self._loop, self._drafting),
            "device_step": asdict(self._host.device_step),
            "num_failed_steps": self._num_failed_steps,
            **self._recoveries.stats(),
            "loading": self._host.target_group.loading or None,
            "workers": self._host.workers(),
            "world_size": len(self._host.target_group.reports),
            "paused": self.is_paused,
            "sleeping": sorted(self._asleep),
            "weights": self.weights(),
            "online_adaptation": None if self.adaptation is None else self.adaptation.stats(),
            "trace": {
                "recording": self._records_trace,
                "num_steps": sum(log.num_steps for log in self._traced),
                "num_requests": sum(log.num_requests for log in self._traced),
            },
        }

    def adapt(self, action: str, timeout_s: float | None = 0.0) -> dict[str, Any]:
        """As `Adaptation.ask`, and waits so long for the round (None: to its end); its `stats`.

        Raises:
            InvalidRequestError: as there, or the configuration has no `online_adaptation`.
        """
        if self.adaptation is None:
            raise InvalidRequestError.at("online_adaptation", "it is off: there is no such section")
        asked = self.adaptation.ask(action)
        if asked is not None:
            with suppress(TimeoutError):
                asked.result(timeout_s)
        return self.adaptation.stats()

    def record_steps(self, sink: Callable[[StepRecord], None] | None) -> None:
        """Calls `sink` after every step from now on, in the loop's thread; None: no longer."""
        self._loop.timer.on_step = sink

    def record_trace(self, max_steps: int) -> None:
        """Begins a trace for `outrider simulate`, which drops the one before; 0: ends it.

        Another drafter begins another run.

        Args:
            max_steps: after which nothing more is recorded.
        """
        self.check()
        self._max_traced_steps = max_steps
        if max_steps:
            self._traced = []
        self._begin_run()

    def trace(self) -> dict[str, Any]:
        """The trace: `runs`, with numbers of tokens and times, and neither text nor names; and the
        `machine`."""
        device = self._host.target_group.reports[0].device
        machine = {"num_cores": len(os.sched_getaffinity(0)), "architecture": platform.machine()}
        if not device.startswith("cpu"):
            machine["gpu"] = device
        return {"machine": machine, "runs": [log.run() for log in self._traced if log.num_steps]}

    @property
    def _records_trace(self) -> bool:
        """Whether the next step will be in the trace."""
        log = self._traced[-1] if self._traced else None
        return log is not None and log is self._loop.timer.on_step and not log.is_full

    def _begin_run(self) -> None:
        """Records on for the drafter that serves, where a trace is recorded."""
        left = self._max_traced_steps - sum(log.num_steps for log in self._traced)
        log: TraceLog | None = None
        if self._max_traced_steps and left > 0:
            name = tag(type(self._config.speculative_config)) or ""
            log = TraceLog(self.info.model_name, name, left, self._loop.scheduler.clock)
            self._traced.append(log)
        self._loop.timer.on_step = log
        self._loop.scheduler.timer.on_end = None if log is None else log.end

    def _perform_swap(self, swap: Swap) -> None:
        super()._perform_swap(swap)
        if self._max_traced_steps:
            self._begin_run()

    def reconfigure(self, speculative: dict[str, Any]) -> None:
        """As `DraftBudget.reconfigure`, without a restart."""
        self._loop.scheduler.budget.reconfigure(speculative)

    def shutdown(self) -> None:
        """Ends the loop and the workers; running requests end with an error."""
        if not self._closed.is_set():
            if self.adaptation is not None:
                self.adaptation.shutdown()
            self._closed.set()
            self._inbox.put(None)
            self._thread.join(timeout=10.0)
            if not self._thread.is_alive():
                self._lengths.keep(self._loop.scheduler.budget)
            self._drafting.shutdown()
            self._host.shutdown()

    def _run(self) -> None:
        """The loop's thread: messages first, then a step; sleeps when there is nothing to do."""
        try:
            while not self._closed.is_set():
                self._drain(block=not self._can_step)
                self._deliver(self._loop.abort_expired())
                self._perform_changes()
                if self._can_step and not self._closed.is_set():
                    self._step(self._loop.step)
                self._log.write(self.info, self._drafting)
            self._fail_all(EngineDeadError("the engine has been shut down"))
        except OutriderError as error:
            log.error("the engine is down: %s", error.message)
            self._fail_all(error)
        except Exception as error:
            log.exception("the engine is down")
            self._fail_all(EngineDeadError(f"{type(error).__name__}: {error}"))

    @property
    def _can_step(self) -> bool:
        if self.is_paused or self._asleep:
            return False
        return self._loop.is_busy if self._changes else self._loop.has_work

    def _perform_changes(self) -> None:
        """Performs what waits for a moment without a step, unless requests have to end first."""
        while self._changes and not self._closed.is_set():
            change = self._changes[0]
            if change.mode == "abort":
                for request_id in list(self._sinks):
                    self._deliver(self._end(request_id))
            stands = self.is_paused or bool(self._asleep)
            if change.mode == "wait" and self._loop.is_busy and not stands:
                self._loop.scheduler.admits_new = False
                return
            while self._loop.has_posted:
                self._step(self._loop.settle)
            self._changes.popleft()
            error: OutriderError | None = None
            try:
                change.perform()
            except OutriderError as failure:
                error = failure
            except Exception as failure:
                log.exception("a change failed")
                error = _fault(failure)
            change.done(error)
            if isinstance(error, EngineDeadError):
                raise error
        self._loop.scheduler.admits_new = True

    def _step(self, advance: Callable[[], list[Delta]]) -> None:
        try:
            deltas = advance()
            if self.weight_version:
                deltas = [replace(delta, weight_version=self.weight_version) for delta in deltas]
            self._deliver(deltas)
            for request_id, error in self._structured.failures().items():
                self._deliver(self._loop.abort(request_id, "error", error.message, error.field))
            self._num_failed_in_a_row = 0
        except WorkerDiedError as error:
            for request_id in self._loop.scheduler.accuse():
                reason = f"its steps ended the workers twice, so it is refused: {error.message}"
                self._deliver(self._loop.abort(request_id, "error", reason))
            self._recover(error)
        except StepMemoryError as error:
            self._shrink(error)
        except WorkerError as error:
            # The step's requests fail. Several ranks are stuck in a collective now; a lone one is
            # sound, unless it fails again and again (a GPU whose context is lost does).
            self._num_failed_steps += 1
            self._num_failed_in_a_row += 1
            log.error("a step failed: %s", error.message)
            message = f"the step of this request failed: {error.message.strip().splitlines()[-1]}"
            steps = list(self._loop.scheduler.in_flight)
            assert steps, "a step that was not planned cannot fail"
            for request_id in steps[0].request_ids:
                self._deliver(self._loop.abort(request_id, "error", message))
            broken = self._num_failed_in_a_row >= _BROKEN_AFTER
            if broken or self._config.num_ranks > 1:
                self._recover(error)
            else:
                self._loop.drop()
                if len(steps[0].plan.kv_moves) or len(steps) > 1:
                    # They may not have run, also those of blocks that others hold or will find.
                    self._loop.scheduler.requeue_all()

    def _shrink(self, error: StepMemoryError) -> None:
        """The step's requests run again in smaller steps; several ranks need a restart first."""
        message = error.message.strip().splitlines()[-1]
        for request_id in shrink_after(self._loop.scheduler):
            reason = f"there is not enough memory for one token of this request: {message}"
            self._deliver(self._loop.abort(request_id, "error", reason))
        if self._config.num_ranks > 1:
            self._recover(error, counts=False)
        else:
            self._loop.drop()

    def _repair(self, reason: str) -> None:
        """Replaces lost workers at once: no request has to meet them."""
        if self._asleep:  # they are replaced as it wakes up
            return
        if not self._host.target_group.alive and self._recoveries.reason is None:
            self._recover(WorkerDiedError(reason))

    def _recover(self, error: WorkerError, *, counts: bool = True) -> None:
        """Starts new workers; every request continues from its tokens.

        Where the cluster has no place for them (a node is gone and its successor not there yet),
        requests wait, and may be aborted, for as long as `restart_window_s`.

        Raises:
            EngineDeadError: it happened too often, or there was no place for too long.
        """
        self._recoveries.begin(error.message)
        self._tell_lack()
        late = threading.Timer(LATE_S, self._tell_lack)
        late.daemon = True
        late.start()
        try:
            self._replace_workers(error, counts=counts)
        finally:
            late.cancel()
        if self._sent == "served":
            self.lose_weights()
        self._tell_lack()
        if self._closed.is_set():  # `shutdown` did not wait for the restart
            self._host.shutdown()

    def _replace_workers(self, error: WorkerError, *, counts: bool) -> None:
        """Returns once there are new ones, or the engine is closed (raises as `_recover`)."""
        self._loop.drop()
        self._loop.scheduler.requeue_all()
        until = time.monotonic() + self._config.restart_window_s
        if counts:
            self._recoveries.count(error)
        log.warning("workers are restarted, requests will be replayed: %s", error.message)
        while not self._closed.is_set():
            try:
                self._host.target_group.restart()
                break
            except WorkerError as again:  # it counts, and is tried again
                self._recoveries.count(again)
                log.warning("workers are restarted once more: %s", again.message)
            except ResourcesError as lacking:
                if time.monotonic() > until:
                    raise EngineDeadError(
                        f"no place for the workers within {self._config.restart_window_s:.0f} s "
                        f"(restart_window_s): {lacking.message}"
                    ) from None
                log.warning("requests wait for a place for the workers: %s", lacking.message)
            self._drain(block=False)
        self._recoveries.end()

    @property
    def lacks_workers(self) -> bool:
        return self._recoveries.is_late

    @property
    def is_recovering(self) -> bool:
        return self._recoveries.reason is not None

    def _tell_lack(self) -> None:
        for callback in self.on_lack:
            callback()

    def _deliver(self, deltas: list[Delta]) -> None:
        """One call per sink; a request's last delta ends its entry."""
        if self.adaptation is not None:
            self.adaptation.observe(deltas)
        by_sink: dict[int, tuple[Sink, list[Delta]]] = {}
        for delta in deltas:
            sink = self._sinks.get(delta.request_id)
            if sink is not None:
                found = by_sink.get(id(sink))
                if found is None:
                    by_sink[id(sink)] = found = sink, []
                found[1].append(delta)
                if delta.finish_reason:
                    del self._sinks[delta.request_id]
        for sink, batch in by_sink.values():
            try:
                sink.deliver(batch)
            except Exception:
                log.exception("a sink failed; what was meant for it is lost")

    def _add_all(self, requests: Sequence[Request], sink: Sink) -> OutriderError | None:
        """Queues all requests, or none of them; returns the error.

        An unexpected exception costs these requests and no other.
        """
        if self._failure is not None:
            return EngineDeadError(f"the engine is down: {self._failure.message}")
        added: list[str] = []
        failure: OutriderError | None = None
        for request in requests:
            try:
                self._loop.add(request)
            except OutriderError as error:
                failure = error
                break
            except Exception as error:
                log.exception(
                    "request %s was not added", request.id, extra={"request_id": request.id}
                )
                added.append(request.id)  # it may be there in part
                failure = _fault(error)
                break
            added.append(request.id)
            self._sinks[request.id] = sink
            if self.adaptation is not None:
                self.adaptation.begin(request)
        if failure is not None:
            for request_id in added:
                self._end(request_id)
                self._sinks.pop(request_id, None)
        return failure

    def _end(self, request_id: str) -> list[Delta]:
        """Ends a request if it still runs; its last deltas."""
        try:
            return self._loop.abort(request_id)
        except Exception as error:
            log.exception("request %s was not ended", request_id, extra={"request_id": request_id})
            return [Delta(request_id, (), finish_reason="error", error=_fault(error).message)]

    def _drain(self, *, block: bool) -> None:
        """Runs every message that waits; an idle loop waits for the first."""
        try:
            while True:
                message = self._inbox.get(block=block, timeout=IDLE_S)
                if message is None:
                    return
                try:
                    message()
                except OutriderError:  # the engine cannot go on
                    raise
                except Exception:
                    log.exception("a message failed; what it asked for was not done")
                block = False
        except queue.Empty:
            if block:
                self._loop.scheduler.check()
                self._lengths.keep(self._loop.scheduler.budget)

    def _fail_all(self, error: OutriderError) -> None:
        self._failure = error
        self._deliver(
            [Delta(id, (), finish_reason="error", error=error.message) for id in self._sinks]
        )
        self._refuse_waiting()

    def _refuse_waiting(self) -> None:
        """Messages that came as the loop ended: their requests are refused."""
        with suppress(queue.Empty):
            while True:
                message = self._inbox.get_nowait()
                if message is not None:
                    message()


def _measure(
    config: EngineConfig, drafting: Drafting, loop: Loop, scheduler: Scheduler, host: EngineHost
) -> None:
    """Teaches the budget of `scheduler` what steps cost, by steps of `loop`, which then ends."""
    seconds = seconds_to_measure()
    if not seconds:
        return
    section, vocab_size = host.config.speculative_config, host.vocab_size
    computes = len(section.sections) == 1 and section.has_model
    if not computes:  # look-ups would find nothing, and keep what they see
        loop.drafting = MadeUpDrafts(vocab_size, trees=drafting.proposes_trees)
    try:
        costs = measure(loop, vocab_size, config.max_num_seqs, seconds)
        for lesson in costs.steps:
            scheduler.budget.teach(lesson)
        scheduler.budget.teach_opening(costs.opening_ms)
    except WorkerError as error:
        log.warning("what steps cost is assumed: a step to measure it failed: %s", error.message)
        if config.num_ranks > 1 or not host.target_group.alive:
            host.target_group.restart()
    if computes:
        drafting.begin_anew()


def _fault(error: Exception) -> InternalError:
    return InternalError(f"the server failed to handle this request: {type(error).__name__}")
