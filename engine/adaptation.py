"""Online adaptation: trains the serving head on what the target emits.

Texts of finished requests are kept in memory. A training round runs the command `train adapt` in a
separate process. That process recomputes the target's states, trains a copy of the head, and
measures both heads on held-out texts. If more tokens per draft are accepted from the copy, the copy
replaces the head by an ordinary drafter change (`swap.py`). If its live drafts are then accepted
less often than before, the former head is restored. A failure costs only its round. Outputs do not
change, because drafts are verified as before.

Liu et al. 2023, Online Speculative Decoding, arXiv:2310.07177.
"""

from __future__ import annotations

import json
import logging
import math
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..config import SECTIONS, EngineConfig, OnlineAdaptationConfig
from ..config.files import write_whole
from ..config.speculation import SHARED_KEYS
from ..drafters.registry import METHODS
from ..errors import EngineDeadError, InvalidRequestError, OutriderError
from ..scheduler.types import Delta, IntArray, Request
from .checkpoints import continuing
from .weights import DrafterChange

if TYPE_CHECKING:
    from .swap import Changing

log = logging.getLogger(__name__)
ACTIONS = ("run", "pause", "resume")
_LOOK_S = 0.5  # between checks for work
_POLL_S = 0.1  # between polls of the training process
_END_S = 5.0  # grace period of the training process
_NUM_SHOWN = 16  # rounds kept for statistics
_MAX_EVALUATED = 64  # windows that both heads are evaluated on
_MAX_PASSES = 4  # over the texts in a round; more would overfit a small set
_MAX_LIVE = 1024  # requests whose live acceptance is kept
_LEAST_LIVE = 8  # requests needed to compare two heads
_MARGIN = 2.0  # a head is worse if its mean is lower by this many standard errors
_LIVE = ("training", "trial")

# The training process runs this program. It exits once its standard input is closed, and therefore
# with the engine, which holds that open.
_PROGRAM = """
import os, runpy, sys, threading
os.nice(int(sys.argv[1]))
def end():
    os.read(0, 1)
    os._exit(1)
threading.Thread(target=end, daemon=True).start()
sys.argv[:2] = []
runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
"""


def may_use(config: OnlineAdaptationConfig, request: Request) -> bool:
    """Returns True if a request's text may be used for training.

    By default, only requests without a tenant are used; with `tenants`, only those of the named
    tenants. Isolated requests are excluded because they must not influence others, and requests
    with a LoRA adapter because their text is not the target's own.
    """
    if request.speculation.isolated or request.adapter or request.pools:
        return False
    return request.tenant in (config.tenants or ("",))


@dataclass(frozen=True, slots=True)
class Sample:
    """The tokens of one request."""

    prompt: IntArray  # [num_prompt]
    output: tuple[int, ...]

    @property
    def num_tokens(self) -> int:
        return len(self.prompt) + len(self.output)

    def line(self) -> bytes:
        """Returns a line of a training file; only the output tokens have weight."""
        tokens = [*self.prompt.tolist(), *self.output]
        weights = [0] * len(self.prompt) + [1] * len(self.output)
        return json.dumps({"tokens": tokens, "weights": weights}).encode() + b"\n"


class Samples:
    """The newest texts. A share of them is held out, evenly over time. Thread-safe."""

    def __init__(self, config: OnlineAdaptationConfig) -> None:
        self._config = config
        self._lock = threading.Lock()
        self._kept = {False: deque[Sample](), True: deque[Sample]()}  # keyed by `is_heldout`
        self._num_tokens = {False: 0, True: 0}
        self.num_samples = 0  # ever added
        self.num_output = 0  # output tokens ever added

    def add(self, sample: Sample) -> None:
        """Adds a text; drops the oldest of its set while the set has too many tokens."""
        share = self._config.heldout
        with self._lock:
            is_heldout = int((self.num_samples + 1) * share) > int(self.num_samples * share)
            self.num_samples += 1
            self.num_output += len(sample.output)
            kept = self._kept[is_heldout]
            kept.append(sample)
            self._num_tokens[is_heldout] += sample.num_tokens
            limit = self._config.max_tokens * (share if is_heldout else 1 - share)
            while self._num_tokens[is_heldout] > limit and len(kept) > 1:
                self._num_tokens[is_heldout] -= kept.popleft().num_tokens

    def taken(self) -> tuple[list[Sample], list[Sample]]:
        """Returns the texts to train on and the held-out texts."""
        with self._lock:
            return list(self._kept[False]), list(self._kept[True])

    def stats(self) -> dict[str, int]:
        """Returns counts as plain values."""
        with self._lock:
            return {
                "num_samples": self.num_samples,
                "num_output_tokens": self.num_output,
                "num_kept": len(self._kept[False]),
                "num_heldout": len(self._kept[True]),
                "num_kept_tokens": sum(self._num_tokens.values()),
            }


@dataclass(slots=True)
class Round:
    """A training round and its result."""

    number: int
    outcome: str = "training"  # then "trial" while the adapted head is observed; at the end "kept"
    # (the former head stays), "swapped", "rolled back", "failed" or "cancelled"
    reason: str = ""
    num_samples: int = 0
    num_tokens: int = 0  # output tokens that were trained on
    # Accepted tokens per draft on held-out texts.
    accepted_before: float | None = None
    accepted_after: float | None = None
    # Accepted tokens per live draft, over requests that began and ended with the head.
    live_before: float | None = None
    live_after: float | None = None
    folder: str = ""  # folder of the adapted head, if it was served
    seconds: float = 0.0


Era = tuple[int, int]
"""Numbers of weight updates and of drafter changes; they identify one head of one target."""


@dataclass(frozen=True, slots=True)
class _Present:
    """The serving head."""

    name: str
    section: dict[str, Any]  # includes the folder that is served
    target: str  # folder
    era: Era

    def is_still(self, later: _Present | None) -> bool:
        """Returns True if `later` is the same head of the same target."""
        return later is not None and later.era == self.era


# Per request: number of drafts, number of accepted tokens.
Live = Sequence[tuple[int, int]]


@dataclass(slots=True)
class _Trial:
    """An adapted head on trial: it serves until enough of its drafts are verified."""

    round: Round
    present: _Present
    former: dict[str, Any]  # section of the previous head
    before: Live  # live drafts of the previous head


@dataclass(eq=False, repr=False)
class Adaptation:
    """The rounds of one engine.

    `begin` and `observe` run in the engine's thread, `_run` in a thread of its own; the other
    methods may run in any thread.
    """

    engine: Changing
    config: OnlineAdaptationConfig
    engine_config: EngineConfig
    samples: Samples = field(init=False)
    rounds: deque[Round] = field(default_factory=lambda: deque(maxlen=_NUM_SHOWN))
    # By request id: its era, the request (None if its text may not be used), and its output.
    _running: dict[str, tuple[Era, Request | None, list[int]]] = field(default_factory=dict)
    _live: dict[Era, deque[tuple[int, int]]] = field(default_factory=dict)  # of the last era only
    _outcomes: Counter[str] = field(default_factory=Counter)
    _made: list[Path] = field(default_factory=list)  # folders of served heads, oldest first
    _num_excluded: int = 0
    _num_begun: int = 0
    _num_learnt: int = 0  # `samples.num_output` when the last round began
    _next_at: float = 0.0
    _is_paused: bool = False
    _trial: _Trial | None = None
    _asked: Future[Round] | None = None
    _lock: threading.Lock = field(default_factory=threading.Lock)  # guards `_asked`
    _woken: threading.Event = field(default_factory=threading.Event)
    _closed: threading.Event = field(default_factory=threading.Event)
    _thread: threading.Thread = field(init=False)

    def __post_init__(self) -> None:
        self.samples = Samples(self.config)
        self._thread = threading.Thread(target=self._run, name="outrider-adapt", daemon=True)

    @classmethod
    def of(cls, config: EngineConfig, engine: Changing) -> Adaptation | None:
        """Starts adaptation for an engine whose loop runs; None if the configuration has none."""
        section = config.online_adaptation
        if section is None:
            return None
        made = cls(engine, section, config)
        made._thread.start()
        return made

    @property
    def era(self) -> Era:
        """The era of requests that begin now."""
        return self.engine._num_updates, self.engine._parts.num_changes

    def begin(self, request: Request) -> None:
        """Registers an added request."""
        is_usable = may_use(self.config, request)
        self._num_excluded += not is_usable
        emitted = list(map(int, request.emitted)) if is_usable else []
        self._running[request.id] = self.era, request if is_usable else None, emitted

    def observe(self, deltas: Sequence[Delta]) -> None:
        """Records the deltas of a step."""
        for delta in deltas:
            known = self._running.get(delta.request_id)
            if known is None:
                continue
            era, request, output = known
            if request is not None:
                output += delta.token_ids
            if delta.finish_reason is None:
                continue
            del self._running[delta.request_id]
            usage = delta.usage
            if usage is not None and usage.num_drafts and era == self.era:
                if era not in self._live:
                    self._live = {era: deque(maxlen=_MAX_LIVE)}
                self._live[era].append((usage.num_drafts, usage.num_accepted_tokens))
            if request is not None and delta.finish_reason != "error" and len(output) > 1:
                self.samples.add(Sample(request.prompt, tuple(output)))

    def ask(self, action: str) -> Future[Round] | None:
        """Pauses rounds, resumes them, or begins one as soon as no other is running.

        Args:
            action: "run", "pause" (which cancels the current round) or "resume".

        Returns:
            For "run", a future of the round, set once its head serves or is dropped; otherwise
            None.

        Raises:
            InvalidRequestError: the action is unknown, or no round can begin.
        """
        if action not in ACTIONS:
            allowed = ", ".join(map(repr, ACTIONS))
            raise InvalidRequestError.at("action", f"expected one of {allowed}, got {action!r}")
        asked = None
        if action == "run":
            reason = self._hindrance()
            if reason:
                raise InvalidRequestError.at("action", f"no round can begin: {reason}")
            with self._lock:
                asked = self._asked = self._asked or Future()
        else:
            self._is_paused = action == "pause"
        self._woken.set()
        return asked

    def stats(self) -> dict[str, Any]:
        """Returns plain values for `Engine.stats()`."""
        rounds = [asdict(each) for each in self.rounds]
        live = rounds[-1]["outcome"] if rounds else ""
        state = live if live in _LIVE else "paused" if self._is_paused else "collecting"
        return {
            "state": state,
            "reason": self._hindrance(),
            **self.samples.stats(),
            "num_new_tokens": self.samples.num_output - self._num_learnt,
            "num_excluded": self._num_excluded,
            "num_rounds": self._num_begun,
            "outcomes": dict(self._outcomes),
            "rounds": rounds,
        }

    def shutdown(self) -> None:
        """Ends the current round and waits for the thread."""
        self._closed.set()
        self._woken.set()
        if self._thread.is_alive():
            self._thread.join(timeout=2 * _END_S)

    def _hindrance(self) -> str:
        """Returns why no round can begin; empty if one can."""
        if self._is_paused:
            return "it is paused"
        if self.engine.is_sleeping:
            return "the engine sleeps"
        if self.engine.weights().get("sent") is not None:
            return "a trainer has sent the target's weights, which are in no folder"
        if self._present() is None:
            return f"no head of {', '.join(continuing())} is served"
        if not all(self.samples.taken()):
            return "there are not enough texts"
        return ""

    def _present(self) -> _Present | None:
        """Returns the head to train; None unless exactly one such head is served."""
        try:
            described, weights = self.engine.drafters(), self.engine.weights()
        except KeyError:  # a drafter change is under way
            return None
        whole = described["speculative_config"]
        members = whole.get("members", [whole])
        found = [
            (drafter["name"], member)
            for drafter, member in zip(described["drafters"], members, strict=False)
            if METHODS[SECTIONS[member["decoding_type"]]].continues
        ]
        if len(found) != 1:
            return None
        name, member = found[0]
        section = {key: value for key, value in member.items() if key not in SHARED_KEYS}
        era = weights["num_updates"], described["num_changes"]
        return _Present(name, section, weights["model"], era)

    def _run(self) -> None:
        """Runs in the thread: checks the trial and begins rounds."""
        while not self._closed.is_set():
            self._woken.wait(_LOOK_S)
            self._woken.clear()
            try:
                self.engine.check()
                self._look_after_trial()
                if self._asked is not None or self._is_due:
                    self._end_trial("swapped", "another round has begun")
                    self._answer(self._train)
            except EngineDeadError:
                break
            except OutriderError as error:
                log.warning("online adaptation: %s", error.message)
            except Exception:
                log.exception("online adaptation has failed, and goes on")
        if self._asked is not None:
            self._asked.set_exception(EngineDeadError("the engine has been shut down"))

    def _answer(self, train: Callable[[], None]) -> None:
        """Calls `train`, then resolves the future of `ask`."""
        asked = self._asked
        try:
            train()
        finally:
            if asked is not None:
                with self._lock:
                    self._asked = None
                asked.set_result(self.rounds[-1])

    def _drafts_of(self, era: Era) -> Live:
        """Returns the live drafts recorded in an era."""
        return list(self._live.get(era, ()))

    @property
    def _is_due(self) -> bool:
        """True if a round begins without being asked for."""
        is_full = self.samples.num_output - self._num_learnt >= self.config.min_tokens
        ready = self.config.automatic and is_full and time.monotonic() >= self._next_at
        return ready and self._trial is None and not self._hindrance()

    def _train(self) -> None:
        """Runs one round."""
        self._num_begun += 1
        self._num_learnt = self.samples.num_output
        found, begun = Round(self._num_begun), time.monotonic()
        self.rounds.append(found)
        try:
            present = self._present()
            if present is None:
                raise _GivenUpError("cancelled", "the head is gone")
            with tempfile.TemporaryDirectory(prefix="outrider-adapt-") as private:
                made = self._made_head(found, present, Path(private))
            if made is not None:
                self._serve(found, present, made)
        except _GivenUpError as given_up:
            found.outcome, found.reason = given_up.outcome, given_up.reason
        except (OutriderError, OSError) as error:
            found.outcome, found.reason = "failed", getattr(error, "message", str(error))
        except BaseException:
            found.outcome = "failed"
            raise
        finally:
            found.seconds = round(time.monotonic() - begun, 3)
            self._next_at = time.monotonic() + self.config.interval_s
            if found.outcome != "trial":
                self._outcomes[found.outcome] += 1
            log.info("online adaptation, round %d: %s %s", found.number, found.outcome,
                     found.reason)  # fmt: skip

    def _made_head(self, found: Round, present: _Present, private: Path) -> Path | None:
        """Trains a head and returns its folder; None if it is not better than the present one.

        Args:
            private: folder for the texts, which the caller deletes.

        Raises:
            _GivenUpError: the process failed or was stopped.
        """
        learnt, heldout = self.samples.taken()
        found.num_samples = len(learnt)
        found.num_tokens = sum(len(each.output) for each in learnt)
        for name, texts in (("texts", learnt), ("heldout", heldout)):
            write_whole(private / f"{name}.jsonl", (each.line() for each in texts))
        head = json.dumps({"speculative_config": present.section}).encode()
        write_whole(private / "head.json", [head])
        out = private / "head"
        passes = _MAX_PASSES * sum(each.num_tokens for each in learnt)
        steps = min(self.config.steps, 1 + passes // (self.config.batch * self.config.window))
        self._await(self._command(present, private, out, steps), private, present)
        rows = map(json.loads, (out / "log.jsonl").read_text(encoding="utf-8").splitlines())
        scores = [row["heldout"]["text"]["acceptance"] for row in rows if "heldout" in row]
        found.accepted_before, found.accepted_after = (
            sum(each) for each in (scores[0], scores[-1])
        )
        if not found.accepted_after >= found.accepted_before + self.config.min_gain:
            found.outcome = "kept"
            return None
        shutil.rmtree(out / "training")
        return _placed(out, Path(self.config.folder))

    def _command(self, present: _Present, private: Path, out: Path, steps: int) -> list[str]:
        """Returns the command line of the training process."""
        config, engine = self.config, self.engine_config
        depth = min(present.section.get("max_draft_len") or 4, 16)
        options: dict[str, Any] = {
            "config": private / "head.json",
            "input": private / "texts.jsonl",
            "heldout-file": private / "heldout.jsonl",
            "window": min(config.window, self.engine.info.max_model_len),
            "steps": steps,
            "batch": config.batch,
            "warmup": min(20, max(1, steps // 5)),
            "eval-every": steps,
            "eval-windows": _MAX_EVALUATED,
            "num-passes": min(depth, 5),
            "max-draft-len": depth,
            "threads": config.threads,
            "device": config.device,
            "dtype": engine.dtype if engine.dtype != "float16" else "auto",
            "seed": self._num_begun,
            "adam-lr": config.adam_lr,
            "muon-lr": config.muon_lr,
        }
        package = __name__.partition(".")[0]
        words = ["train", "adapt", present.target, str(out)]
        words += [f"--{key}={value}" for key, value in options.items() if value is not None]
        words += ["--trust-remote-code"] if engine.trust_remote_code else []
        words += ["--allow-pickle"] if engine.allow_pickle else []
        return [sys.executable, "-c", _PROGRAM, str(config.niceness), package, *words]

    def _await(self, command: list[str], private: Path, present: _Present) -> None:
        """Runs the training process to its end.

        Raises:
            _GivenUpError: it failed, took too long or was stopped, or the head or the target
                changed.
        """
        config, output = self.config, private / "output.txt"
        path = os.pathsep.join([str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")])
        threads = {"OMP_NUM_THREADS": str(config.threads)}
        environment = {**os.environ, **threads, "PYTHONPATH": path.rstrip(os.pathsep)}
        if config.device == "cpu":
            environment["CUDA_VISIBLE_DEVICES"] = ""
        elif config.cuda_visible_devices is not None:
            environment["CUDA_VISIBLE_DEVICES"] = config.cuda_visible_devices
        until = time.monotonic() + config.round_timeout_s
        with (
            output.open("wb") as written,
            subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=written,
                stderr=written,
                env=environment,
                start_new_session=True,
            ) as process,
        ):
            try:
                while process.poll() is None:
                    if time.monotonic() > until:
                        reason = f"it took longer than {config.round_timeout_s:g} s"
                        raise _GivenUpError("failed", f"{reason} (round_timeout_s)")
                    is_over = self._closed.wait(_POLL_S) or self.engine.is_sleeping
                    if is_over or self._is_paused:
                        raise _GivenUpError("cancelled", "it was stopped")
                    if not present.is_still(self._present()):
                        raise _GivenUpError("cancelled", "weights or drafters have changed")
            finally:
                _end(process)
        if process.returncode:
            lines = output.read_text(encoding="utf-8", errors="replace").split("\n")
            last = next((line for line in reversed(lines) if line.strip()), "")
            raise _GivenUpError(
                "failed", f"the process has ended with {process.returncode}: {last[:400]}"
            )

    def _serve(self, found: Round, present: _Present, folder: Path) -> None:
        """Replaces the present head by the adapted one.

        Raises:
            OutriderError: the adapted head cannot serve; the present one continues.
        """
        before = self._drafts_of(present.era)
        section = {**present.section, "speculative_model": str(folder)}
        try:
            if not present.is_still(self._present()):
                raise _GivenUpError("cancelled", "weights or drafters have changed")
            self.engine.change_drafters(DrafterChange(section, present.name))
        except BaseException:
            shutil.rmtree(folder, ignore_errors=True)
            raise
        _point(Path(self.config.folder) / "current", folder)
        found.folder = str(folder)
        self._made.append(folder)
        while len(self._made) > self.config.num_kept:
            shutil.rmtree(self._made.pop(0), ignore_errors=True)
        now = self._present()
        if now is None or not self.config.trial_drafts or len(before) < _LEAST_LIVE:
            found.outcome = "swapped"
            return
        found.outcome, found.live_before = "trial", mean(before)
        self._trial = _Trial(found, now, present.section, before)

    def _look_after_trial(self) -> None:
        """Restores the former head if live drafts of the adapted one are accepted less often."""
        trial = self._trial
        if trial is None:
            return
        present = self._present()
        if present is None or not trial.present.is_still(present):
            self._end_trial("swapped", "weights or drafters have changed")
            return
        now = self._drafts_of(present.era)
        num_drafts = sum(count for count, _ in now)
        if num_drafts < self.config.trial_drafts or len(now) < _LEAST_LIVE:
            return
        trial.round.live_after = mean(now)
        if not is_worse(trial.before, now):
            self._end_trial("swapped", "")
            return
        try:
            self.engine.change_drafters(DrafterChange(trial.former, present.name))
        except OutriderError as error:
            self._end_trial("swapped", f"it is worse, and cannot go: {error.message}")
            return
        former = trial.former.get("speculative_model")
        if former is not None:
            _point(Path(self.config.folder) / "current", Path(former).absolute())
        self._end_trial("rolled back", "live drafts were accepted less often")
        with suppress(ValueError):
            self._made.remove(Path(trial.round.folder))
        shutil.rmtree(trial.round.folder, ignore_errors=True)

    def _end_trial(self, outcome: str, reason: str) -> None:
        trial, self._trial = self._trial, None
        if trial is not None:
            trial.round.outcome, trial.round.reason = outcome, reason
            self._outcomes[outcome] += 1


class _GivenUpError(Exception):
    """Ends a round without an adapted head."""

    def __init__(self, outcome: str, reason: str) -> None:
        super().__init__(reason)
        self.outcome, self.reason = outcome, reason


def mean(live: Live) -> float:
    """Returns accepted tokens per draft."""
    return sum(accepted for _, accepted in live) / sum(count for count, _ in live)


def is_worse(before: Live, now: Live) -> bool:
    """Returns True if the second head is accepted less often by more than chance explains."""
    return mean(now) < mean(before) - _MARGIN * math.sqrt(_variance(before) + _variance(now))


def _variance(live: Live) -> float:
    """Variance of `mean`, a ratio of sums over requests; drafts of one request are dependent."""
    at, count = mean(live), len(live)
    residuals = sum((accepted - at * drafts) ** 2 for drafts, accepted in live)
    return residuals * count / (count - 1) / sum(drafts for drafts, _ in live) ** 2


def _placed(made: Path, folder: Path) -> Path:
    """Copies a head to the next free number in `folder`, which several engines may share."""
    numbers = [path.name.removeprefix("head-") for path in folder.glob("head-*")]
    number = max((int(each) for each in numbers if each.isdecimal()), default=0)
    while True:
        number += 1
        place = folder / f"head-{number:04}"
        with suppress(FileExistsError):
            place.mkdir()
            shutil.copytree(made, place, dirs_exist_ok=True)
            return place


def _point(link: Path, folder: Path) -> None:
    """Atomically points a symbolic link to another folder."""
    partial = link.with_name(f"{link.name}.{os.getpid()}.partial")
    with suppress(OSError):
        partial.unlink(missing_ok=True)
        partial.symlink_to(folder, target_is_directory=True)
        os.replace(partial, link)


def _end(process: subprocess.Popen[bytes]) -> None:
    """Terminates a process that is still running, and kills it if it does not end."""
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(_END_S)
        except subprocess.TimeoutExpired:
            process.kill()
