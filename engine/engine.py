"""The engine: one scheduler loop in its own thread, over one target and its drafter.

`LLM` and the Serve deployment each own one. Requests may be added from any thread. Each request has
a sink for its deltas, which is called once per step. The loop never blocks on a sink.
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
_BROKEN_AFTER = 3  # a single rank is restarted after this many failed steps in a row


class Sink(Protocol):
    """Receives the deltas of requests."""

    def deliver(self, deltas: list[Delta]) -> None:
        """Takes all deltas of a step for this sink; must not block."""


class Engine(Changing):
    """Create it with `Engine.start`; the public methods may be called from any thread."""

    adaptation: Adaptation | None = None  # set once the loop runs

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
        self._sinks: dict[str, Sink] = {}  # by id of a request that has not ended
        self._recoveries = Recoveries(config.max_restarts, config.restart_window_s)
        self._failure: OutriderError | None = None
        self._closed = threading.Event()
        self._num_failed_steps = 0
        self._num_failed_in_a_row = 0
        self._traced: list[TraceLog] = []
        self._max_traced_steps = 0  # 0: nothing is recorded
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
        """Loads the target and its drafter on `backend` (None: this process) and starts the loop.

        Raises:
            ConfigError, CheckpointError, ResourcesError: the message names the field.
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
                # Only the last stage sees what is emitted.
                ranks_append=overlaps and config.pipeline_parallel_size == 1,
                keeps_states=target.keeps_states,
                num_groups=host.target_group.spec.num_groups if overlaps else 1,
            )
            scheduler, kind = make_scheduler(), OverlapLoop if overlaps else Loop
            scheduler.budget.let_ranks_choose(target.ranks_choose)
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
        """Queues several requests before the same step, or none of them; raises as `submit`."""
        outcome: queue.SimpleQueue[OutriderError | None] = queue.SimpleQueue()
        self.post(requests, sink, outcome.put)
        error = outcome.get()
        if error is not None:
            raise error

    def post(
        self, requests: Sequence[Request], sink: Sink, done: Callable[[OutriderError | None], None]
    ) -> None:
        """Like `submit_all`, but does not wait for the current step to end.

        Args:
            done: called with the error that refused the requests, or None; usually in the loop's
                thread.

        Raises:
            InvalidRequestError: a grammar does not compile, or no drafter supports `min_prob`.
        """
        for request in requests:
            self._check_min_prob(request)
        constraints = self._structured.compiled(requests)

        def add() -> None:
            self._structured.expect(constraints)
            done(self._add_all(requests, sink))

        self._inbox.put(add)
        if self._failure is not None:  # the loop has ended or is about to end
            self._refuse_waiting()

    def _check_min_prob(self, request: Request) -> None:
        """Rejects a `min_prob` that no drafter of a new request supports."""
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
        """Ends a request if it is running; its sink gets a last delta."""
        self._inbox.put(lambda: self._deliver(self._end(request_id)))

    def reset_prefix_cache(self) -> None:
        """Drops cached prefixes before the next step; running requests keep their blocks."""
        self.check()
        self._inbox.put(self._loop.scheduler.pool.clear_cache)

    def check(self) -> None:
        """Raises `EngineDeadError` if the loop is not running."""
        if self._failure is not None:
            raise EngineDeadError(f"the engine is down: {self._failure.message}")
        if not self._thread.is_alive():
            raise EngineDeadError("the engine has been shut down")

    def stats(self) -> dict[str, Any]:
        """Returns counts and times as plain values."""
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
        """Calls `Adaptation.ask`, waits for the round up to `timeout_s` (None: to its end), and
        returns the statistics of adaptation.

        Raises:
            InvalidRequestError: as in `Adaptation.ask`, or there is no section `online_adaptation`.
        """
        if self.adaptation is None:
            raise InvalidRequestError.at("online_adaptation", "it is off: there is no such section")
        asked = self.adaptation.ask(action)
        if asked is not None:
            with suppress(TimeoutError):
                asked.result(timeout_s)
        return self.adaptation.stats()

    def record_steps(self, sink: Callable[[StepRecord], None] | None) -> None:
        """Has `sink` called after every step, in the loop's thread; None removes it."""
        self._loop.timer.on_step = sink

    def record_trace(self, max_steps: int) -> None:
        """Starts a trace for `outrider simulate` and drops the previous one; 0 ends recording.

        A change of drafters starts another run of the trace.

        Args:
            max_steps: number of steps after which recording stops.
        """
        self.check()
        self._max_traced_steps = max_steps
        if max_steps:
            self._traced = []
        self._begin_run()

    def trace(self) -> dict[str, Any]:
        """Returns the trace: the `machine`, and `runs` with token counts and times.

        It contains neither text nor names of requests.
        """
        device = self._host.target_group.reports[0].device
        machine = {"num_cores": len(os.sched_getaffinity(0)), "architecture": platform.machine()}
        if not device.startswith("cpu"):
            machine["gpu"] = device
        return {"machine": machine, "runs": [log.run() for log in self._traced if log.num_steps]}

    @property
    def _records_trace(self) -> bool:
        """True if the next step will be recorded."""
        log = self._traced[-1] if self._traced else None
        return log is not None and log is self._loop.timer.on_step and not log.is_full

    def _begin_run(self) -> None:
        """Starts a run of the trace for the current drafter, if a trace is being recorded."""
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
        """Changes the draft budget without a restart; see `DraftBudget.reconfigure`."""
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
        """Runs the loop: handles messages, then steps; sleeps when there is nothing to do."""
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
        """Performs queued changes between steps, unless requests have to end first."""
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
            # The requests of the step fail. With several ranks, the others are stuck in a
            # collective. A single rank can continue, unless it keeps failing (as a GPU does whose
            # context is lost).
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
                    # The moves may not have run, including those of blocks that other requests
                    # share or will find.
                    self._loop.scheduler.requeue_all()

    def _shrink(self, error: StepMemoryError) -> None:
        """Runs the step's requests again in smaller steps; several ranks are restarted first."""
        message = error.message.strip().splitlines()[-1]
        for request_id in shrink_after(self._loop.scheduler):
            reason = f"there is not enough memory for one token of this request: {message}"
            self._deliver(self._loop.abort(request_id, "error", reason))
        if self._config.num_ranks > 1:
            self._recover(error, counts=False)
        else:
            self._loop.drop()

    def _repair(self, reason: str) -> None:
        """Replaces lost workers at once, before a request needs them."""
        if self._asleep:  # they are replaced on wake-up
            return
        if not self._host.target_group.alive and self._recoveries.reason is None:
            self._recover(WorkerDiedError(reason))

    def _recover(self, error: WorkerError, *, counts: bool = True) -> None:
        """Starts new workers; every request continues from its tokens.

        If the cluster has no place for the workers (a node is gone and not yet replaced), requests
        wait for up to `restart_window_s`. They can be aborted meanwhile.

        Raises:
            EngineDeadError: there were too many restarts, or there was no place for too long.
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
        """Returns once new workers run or the engine is closed; raises as `_recover`."""
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
            except WorkerError as again:  # counts as a restart, and is retried
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
        """Calls each sink once; a request's last delta removes its sink."""
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
        """Queues all requests or none of them; returns the error.

        An unexpected exception fails only these requests.
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
                added.append(request.id)  # it may have been added in part
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
        """Ends a request if it is running; returns its last deltas."""
        try:
            return self._loop.abort(request_id)
        except Exception as error:
            log.exception("request %s was not ended", request_id, extra={"request_id": request_id})
            return [Delta(request_id, (), finish_reason="error", error=_fault(error).message)]

    def _drain(self, *, block: bool) -> None:
        """Runs all queued messages; an idle loop blocks until the first."""
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
        """Handles messages that arrived as the loop ended; their requests are refused."""
        with suppress(queue.Empty):
            while True:
                message = self._inbox.get_nowait()
                if message is not None:
                    message()


def _measure(
    config: EngineConfig, drafting: Drafting, loop: Loop, scheduler: Scheduler, host: EngineHost
) -> None:
    """Measures steps of `loop` and records their costs in the budget of `scheduler`.

    `loop` is not used afterwards.
    """
    seconds = seconds_to_measure()
    if not seconds:
        return
    section, vocab_size = host.config.speculative_config, host.vocab_size
    computes = len(section.sections) == 1 and section.has_model
    if not computes:  # look-ups would find nothing in made-up text, and would keep it
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
