"""Online adaptation: the head that drafts goes on learning from what the target emits.

Texts of requests that end are kept in memory. A round of training is one run of the command
`train adapt` in a process of its own: it computes the target's states anew, trains a copy of the
head, and measures both heads on texts that were held out. Where the copy's drafts are accepted for
longer, it takes the head's place as any other drafter does (`swap.py`), and where live drafts are
then accepted less often than before, the former head comes back. Whatever fails costs the round.
No output changes: what is drafted is verified as before.

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
_LOOK_S = 0.5  # between looks at what there is to do
_POLL_S = 0.1  # between looks at a process that trains
_END_S = 5.0  # that this process has to end
_NUM_SHOWN = 16  # rounds in statistics
_MAX_EVALUATED = 64  # windows that both heads are measured on
_MAX_PASSES = 4  # over the texts in a round, so that few of them are not learnt by heart
_MAX_LIVE = 1024  # requests whose live drafts are remembered
_LEAST_LIVE = 8  # requests that two heads are compared by
_MARGIN = 2.0  # standard errors by which a live head has to be worse to go
_LIVE = ("training", "trial")

# The program of the process: it ends with the engine's, which holds its standard input open.
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
    """Whether a request's text may be learnt from.

    By default only those without a tenant may; with `tenants`, those of the named ones alone.
    Isolated requests leave nothing to others, and texts of LoRA adapters are not the target's.
    """
    if request.speculation.isolated or request.adapter or request.pools:
        return False
    return request.tenant in (config.tenants or ("",))


@dataclass(frozen=True, slots=True)
class Sample:
    """One request's text."""

    prompt: IntArray  # [num_prompt]
    output: tuple[int, ...]

    @property
    def num_tokens(self) -> int:
        return len(self.prompt) + len(self.output)

    def line(self) -> bytes:
        """As a line of a file to train on: the output alone is learnt from."""
        tokens = [*self.prompt.tolist(), *self.output]
        weights = [0] * len(self.prompt) + [1] * len(self.output)
        return json.dumps({"tokens": tokens, "weights": weights}).encode() + b"\n"


class Samples:
    """The newest texts; a share of them is held out, evenly over time. For several threads."""

    def __init__(self, config: OnlineAdaptationConfig) -> None:
        self._config = config
        self._lock = threading.Lock()
        self._kept = {False: deque[Sample](), True: deque[Sample]()}  # by whether they are held out
        self._num_tokens = {False: 0, True: 0}
        self.num_samples = 0  # ever
        self.num_output = 0  # their output tokens, ever

    def add(self, sample: Sample) -> None:
        """Takes a text in; the oldest of its kind go where there are too many tokens."""
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
        """The texts to learn from, and those that are held out."""
        with self._lock:
            return list(self._kept[False]), list(self._kept[True])

    def stats(self) -> dict[str, int]:
        """Plain values."""
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
    """One round of training, and what became of its head."""

    number: int
    outcome: str = "training"  # then "kept" (the former head), "swapped", "rolled back", "failed",
    # "cancelled"; "trial": it serves, and is looked at
    reason: str = ""
    num_samples: int = 0
    num_tokens: int = 0  # output tokens that were learnt from
    # Tokens of a draft that the target accepts on texts that were held out.
    accepted_before: float | None = None
    accepted_after: float | None = None
    # The same of live drafts, over requests that began and ended with the head.
    live_before: float | None = None
    live_after: float | None = None
    folder: str = ""  # of the adapted head, where it was served
    seconds: float = 0.0


Era = tuple[int, int]
"""Updates of weights and changes of drafters: one head that drafts for one target."""


@dataclass(frozen=True, slots=True)
class _Present:
    """The head that serves."""

    name: str
    section: dict[str, Any]  # with the folder that is served
    target: str  # folder
    era: Era

    def is_still(self, later: _Present | None) -> bool:
        """Whether `later` is the same, of the same target."""
        return later is not None and later.era == self.era


# Of requests: drafts, and their tokens that were accepted.
Live = Sequence[tuple[int, int]]


@dataclass(slots=True)
class _Trial:
    """An adapted head that serves, until enough of its drafts were verified."""

    round: Round
    present: _Present
    former: dict[str, Any]  # section of the head before
    before: Live  # of that head


@dataclass(eq=False, repr=False)
class Adaptation:
    """The rounds of one engine. `begin` and `observe` run in the engine's thread, `_run` in one of
    its own, the rest anywhere."""

    engine: Changing
    config: OnlineAdaptationConfig
    engine_config: EngineConfig
    samples: Samples = field(init=False)
    rounds: deque[Round] = field(default_factory=lambda: deque(maxlen=_NUM_SHOWN))
    # By request: its era, and where its text may be used, the request and its output.
    _running: dict[str, tuple[Era, Request | None, list[int]]] = field(default_factory=dict)
    _live: dict[Era, deque[tuple[int, int]]] = field(default_factory=dict)  # of the last era alone
    _outcomes: Counter[str] = field(default_factory=Counter)
    _made: list[Path] = field(default_factory=list)  # folders of served heads, oldest first
    _num_excluded: int = 0
    _num_begun: int = 0
    _num_learnt: int = 0  # `samples.num_output` as the last round began
    _next_at: float = 0.0
    _is_paused: bool = False
    _trial: _Trial | None = None
    _asked: Future[Round] | None = None
    _lock: threading.Lock = field(default_factory=threading.Lock)  # of `_asked`
    _woken: threading.Event = field(default_factory=threading.Event)
    _closed: threading.Event = field(default_factory=threading.Event)
    _thread: threading.Thread = field(init=False)

    def __post_init__(self) -> None:
        self.samples = Samples(self.config)
        self._thread = threading.Thread(target=self._run, name="outrider-adapt", daemon=True)

    @classmethod
    def of(cls, config: EngineConfig, engine: Changing) -> Adaptation | None:
        """Of an engine whose loop runs; None: its configuration asks for none."""
        section = config.online_adaptation
        if section is None:
            return None
        made = cls(engine, section, config)
        made._thread.start()
        return made

    @property
    def era(self) -> Era:
        """Of requests that begin now."""
        return self.engine._num_updates, self.engine._parts.num_changes

    def begin(self, request: Request) -> None:
        """A request was added."""
        is_usable = may_use(self.config, request)
        self._num_excluded += not is_usable
        emitted = list(map(int, request.emitted)) if is_usable else []
        self._running[request.id] = self.era, request if is_usable else None, emitted

    def observe(self, deltas: Sequence[Delta]) -> None:
        """Takes in what a step emitted."""
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
        """Pauses rounds, resumes them, or begins one as soon as none is under way.

        Args:
            action: "run", "pause" (which cancels the round under way) or "resume".

        Returns:
            Of "run": what becomes of the round once its head serves or is dropped.

        Raises:
            InvalidRequestError: the action is unknown, or there is nothing to train or to learn
                from.
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
        """Plain values for `Engine.stats()`."""
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
        """Ends the round under way, and returns once none is."""
        self._closed.set()
        self._woken.set()
        if self._thread.is_alive():
            self._thread.join(timeout=2 * _END_S)

    def _hindrance(self) -> str:
        """Why no round can begin; empty if one can."""
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
        """The head that is trained; None: none is served."""
        try:
            described, weights = self.engine.drafters(), self.engine.weights()
        except KeyError:  # they are being changed
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
        """The thread: looks after the trial, and begins rounds."""
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
        """Trains, and tells whoever has asked."""
        asked = self._asked
        try:
            train()
        finally:
            if asked is not None:
                with self._lock:
                    self._asked = None
                asked.set_result(self.rounds[-1])

    def _drafts_of(self, era: Era) -> Live:
        """Live drafts of the head and the target of an era."""
        return list(self._live.get(era, ()))

    @property
    def _is_due(self) -> bool:
        """Whether a round begins by itself."""
        is_full = self.samples.num_output - self._num_learnt >= self.config.min_tokens
        ready = self.config.automatic and is_full and time.monotonic() >= self._next_at
        return ready and self._trial is None and not self._hindrance()

    def _train(self) -> None:
        """One round."""
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
        """A folder with the adapted head; None: the present one is as good.

        Args:
            private: folder for the texts, which are gone afterwards.

        Raises:
            _GivenUpError: the process failed or was ended.
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
        """What the process runs."""
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
        """Runs the process to its end.

        Raises:
            _GivenUpError: it failed, took too long, or what it trains for is gone.
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
        """Puts the adapted head into the present one's place.

        Raises:
            OutriderError: it cannot serve; the present one does.
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
        """Takes an adapted head back whose live drafts are accepted less often than before."""
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
    """A round ends without a head."""

    def __init__(self, outcome: str, reason: str) -> None:
        super().__init__(reason)
        self.outcome, self.reason = outcome, reason


def mean(live: Live) -> float:
    """Accepted tokens of a draft."""
    return sum(accepted for _, accepted in live) / sum(count for count, _ in live)


def is_worse(before: Live, now: Live) -> bool:
    """Whether the second of two heads is accepted less often, by more than chance explains."""
    return mean(now) < mean(before) - _MARGIN * math.sqrt(_variance(before) + _variance(now))


def _variance(live: Live) -> float:
    """Of `mean`, a ratio of two sums over requests, whose drafts depend on one another."""
    at, count = mean(live), len(live)
    residuals = sum((accepted - at * drafts) ** 2 for drafts, accepted in live)
    return residuals * count / (count - 1) / sum(drafts for drafts, _ in live) ** 2


def _placed(made: Path, folder: Path) -> Path:
    """Moves a head to the next number in `folder`, which several engines may share."""
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
    """Has a link lead to another folder, in one step."""
    partial = link.with_name(f"{link.name}.{os.getpid()}.partial")
    with suppress(OSError):
        partial.unlink(missing_ok=True)
        partial.symlink_to(folder, target_is_directory=True)
        os.replace(partial, link)


def _end(process: subprocess.Popen[bytes]) -> None:
    """Ends a process that still runs."""
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(_END_S)
        except subprocess.TimeoutExpired:
            process.kill()
