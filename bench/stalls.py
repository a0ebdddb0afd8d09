"""The longest pause of a stream while a worker is stopped or killed.

    python -m outrider.bench.stalls --hold-s 30
    python -m outrider.bench.stalls --what again-stop --drafter head --kills 10 --hold-s 1
    python -m outrider.bench.stalls --what member-kill member-stop --kills 50

One request streams from the demo target with a separate drafter, on a Ray of this command's own.
What is done to a worker is done with real signals, a while after the first token; every run
reports the longest gap between two deltas, and whether the text is that of an undisturbed run.

`again-kill` and `again-stop` strike the drafter again and again, each time when it has drafted
since, and report as well how long it was until it drafted again.

`member-kill` and `member-stop` strike members of a drafter group, one after the other, while two
engines that draft with it stream all the time. They report gaps, errors and texts of both engines,
and how long members were away.
"""

from __future__ import annotations

import argparse
import logging
import os
import random
import signal
import statistics
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from typing import Any

from .. import LLM, SamplingParams
from ..errors import OutriderError

DEMO = Path(__file__).resolve().parent.parent / "demo" / "models"
PROMPT = "class Stack:\n    def __init__(self):\n"
_BEGIN_AFTER = 20  # deltas
_OF_MEMBERS = ("member-kill", "member-stop")
_AGAIN = ("again-kill", "again-stop")
_SIGNALS = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}
_RECOVERY_S = 300.0


def main() -> None:
    """Prints one line per disturbance."""
    options = _arguments()
    if not set(options.what) <= {*_OF_MEMBERS}:
        _strike_workers(options)
    verbs = [each.partition("-")[2] for each in options.what if each in _OF_MEMBERS]
    if verbs:
        _strike_members(verbs, options)


def _strike_workers(options: argparse.Namespace) -> None:
    speculative = {
        **_SECTIONS[options.drafter],
        "max_draft_len": 4,
        "placement": "separate",
        "adaptive_draft_len": False,  # it drafts whatever that costs
    }
    if options.cache:
        speculative["speculation_cache"] = {"adaptive": False}
    with LLM(str(DEMO / "target"), speculative_config=speculative, dtype="float32") as llm:
        sampling = SamplingParams(max_tokens=options.tokens, temperature=0.0, ignore_eos=True)
        _, expected = _stream(llm, sampling, None)
        for name in options.what:
            if name in _OF_MEMBERS:
                continue
            if name in _AGAIN:
                _strike_again(llm, name.partition("-")[2], sampling, expected, options)
                continue
            worker, _, verb = name.partition("-")
            disturb = partial(_disturb, llm, worker, verb, options.hold_s)
            gap_s, text = _stream(llm, sampling, disturb)
            same = "same text" if text == expected else "OTHER TEXT"
            _say(f"{name:12s} longest gap {gap_s:7.2f} s, {same}")


def _say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


_SECTIONS: dict[str, dict[str, Any]] = {
    "draft model": {"decoding_type": "DraftTarget", "speculative_model": str(DEMO / "draft")},
    "head": {"decoding_type": "Eagle3", "speculative_model": str(DEMO / "eagle3")},
}


def _strike_again(
    llm: LLM, verb: str, sampling: SamplingParams, expected: str, options: argparse.Namespace
) -> None:
    """One strike after the other at the drafter of an engine that streams all the time."""
    streams = _Streams(llm, sampling, expected)
    streams.start()
    gaps, recoveries, rng = list[float](), list[float](), random.Random(options.seed)
    time.sleep(options.pause_s)
    before = [gap for _, gap in list(streams.gaps)[_BEGIN_AFTER:]]
    _say(f"undisturbed: longest gap {max(before):.2f} s, load {os.getloadavg()[0]:.0f}")
    for _ in range(options.kills):
        _until_drafted(llm)
        time.sleep(rng.uniform(0.0, 0.1))
        struck_s = time.monotonic()
        _disturb(llm, "draft", verb, options.hold_s)
        if verb == "stop":
            time.sleep(options.hold_s)
        going_s = time.monotonic()
        _until_drafted(llm)
        recoveries.append(time.monotonic() - going_s)
        gaps.append(streams.longest(struck_s))
    streams.ended.set()
    streams.join()
    for what, found in (("longest gap", gaps), ("drafts again after", recoveries)):
        shown = f"{statistics.median(found):.2f} s in the median, {max(found):.2f} at most"
        _say(f"{options.drafter}, {verb}: {len(found)} times, {what} {shown}")
    _say(f"{streams.num_requests} requests, {streams.num_wrong} with another text")
    for error in streams.errors:
        _say(error)
    if streams.num_wrong or streams.errors:
        raise SystemExit(1)


def _until_drafted(llm: LLM) -> None:
    """Waits for several drafts from now on."""

    def num_drafts() -> int:
        (found,) = llm.stats()["drafters"].values()
        return int(found["num_gen_drafts"])

    before = num_drafts()
    _until(lambda: num_drafts() > before + 2, every_s=0.01)


# -- members of a drafter group


class _Streams(threading.Thread):
    """One request after the other on one engine, until `ended`."""

    def __init__(self, llm: LLM, sampling: SamplingParams, expected: str) -> None:
        super().__init__(daemon=True)
        self.gaps: list[tuple[float, float]] = []  # when a delta came, and seconds since the last
        self.num_requests = self.num_wrong = 0
        self.errors: list[str] = []
        self.ended = threading.Event()
        self._llm, self._sampling, self._expected = llm, sampling, expected

    def run(self) -> None:
        while not self.ended.is_set():
            last, text = time.monotonic(), ""
            try:
                for output in self._llm.stream(PROMPT, self._sampling):
                    now = time.monotonic()
                    self.gaps.append((now, now - last))
                    last, text = now, output.outputs[0].text
            except OutriderError as error:
                self.errors.append(error.message)
                continue
            self.num_requests += 1
            self.num_wrong += text != self._expected

    def longest(self, since_s: float) -> float:
        """Seconds of the longest gap that ended since then."""
        return max((gap for at, gap in list(self.gaps) if at >= since_s), default=0.0)

    @property
    def processes(self) -> list[int]:
        """Of the members that this engine drafts with."""
        found = self._llm.engine._drafting.drafter._drafters.values()  # type: ignore[attr-defined]
        groups = [each._model._group for each in list(found)]
        return [each.reports[0].location.process for each in groups if each.alive]


def _strike_members(verbs: Sequence[str], options: argparse.Namespace) -> None:
    """Two engines draft with two members, which are struck at random, also both at once."""
    import ray

    from ..cluster.drafters import end_group, facts_of, start_group
    from ..config import EngineConfig

    sampling = SamplingParams(max_tokens=options.tokens, temperature=0.0, ignore_eos=True)
    settings: dict[str, Any] = {"dtype": "float32", "resources": {"cpus_per_worker": 0.25}}
    target, section = str(DEMO / "target"), {"decoding_type": "DraftTarget", "max_draft_len": 4}
    with ExitStack() as stack:
        ray.init(
            num_cpus=4, include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR
        )
        stack.callback(ray.shutdown)
        with LLM(target, **settings) as plain:
            _, expected = _stream(plain, sampling, None)
        model = EngineConfig.load({"model": str(DEMO / "draft"), "num_kv_blocks": 512, **settings})
        group = start_group("stalls", model, num_members=2, max_engines=2)
        stack.callback(end_group, group)

        def num_up() -> int:
            return sum(not reason for reason in facts_of(group).members.values())

        _until(lambda: num_up() == 2)
        own = {"speculative_config": {**section, "drafter_group": "stalls"}, **settings}
        streams = [
            _Streams(stack.enter_context(LLM(target, **own)), sampling, expected) for _ in range(2)
        ]
        for each in streams:
            each.start()
        time.sleep(2 * options.pause_s)
        before = [gap for each in streams for _, gap in list(each.gaps)[_BEGIN_AFTER:]]
        _say(f"undisturbed: longest gap {max(before):.2f} s, load {os.getloadavg()[0]:.0f}")
        gaps: dict[str, list[float]] = {verb: [] for verb in verbs}
        num_alone, rng = 0, random.Random(options.seed)
        for number in range(options.kills):
            _until(lambda: bool(streams[0].processes))
            known, verb = streams[0].processes, verbs[number % len(verbs)]
            num_alone += len(known) == 1
            struck_s = time.monotonic()
            with suppress(ProcessLookupError):  # it has died since, of a strike before
                os.kill(rng.choice(known), _SIGNALS[verb])
            time.sleep(rng.uniform(0.5, 1.5) * options.pause_s)
            gaps[verb].append(max(each.longest(struck_s) for each in streams))
            _say(f"{number + 1}: {verb}, {len(known)} up, longest gap {gaps[verb][-1]:.2f} s")
        _until(lambda: num_up() == 2)
        for each in streams:
            each.ended.set()
        for each in streams:
            each.join()
        for verb, found in gaps.items():
            shown = f"{statistics.median(found):.2f} s in the median, {max(found):.2f} at most"
            _say(f"member-{verb}: {len(found)} times, longest gap {shown}")
        requests, wrong = (
            sum(getattr(each, name) for each in streams) for name in ("num_requests", "num_wrong")
        )
        errors = [error for each in streams for error in each.errors]
        _say(f"{requests} requests, {wrong} with another text, {len(errors)} errors")
        _say(f"no other member was up {num_alone} times; load {os.getloadavg()[0]:.0f}")
        for error in errors:
            _say(error)
        if wrong or errors:
            raise SystemExit(1)


def _until(condition: Callable[[], bool], every_s: float = 0.2) -> None:
    deadline = time.monotonic() + _RECOVERY_S
    while not condition():
        if time.monotonic() > deadline:
            raise SystemExit(f"a drafter is not up again after {_RECOVERY_S:.0f} s")
        time.sleep(every_s)


# -- one worker


def _stream(
    llm: LLM, sampling: SamplingParams, disturb: Callable[[], None] | None
) -> tuple[float, str]:
    """The longest gap after the first delta, and the text."""
    last, longest, text = 0.0, 0.0, ""
    for count, output in enumerate(llm.stream(PROMPT, sampling)):
        now = time.monotonic()
        longest = max(longest, now - last if count else 0.0)
        last, text = now, output.outputs[0].text
        if count == _BEGIN_AFTER and disturb is not None:
            disturb()
    return longest, text


def _disturb(llm: Any, worker: str, verb: str, hold_s: float) -> None:
    engine = llm._engine
    group = engine._host.target_group
    if worker == "draft":
        group = engine._drafting.drafter._model._group
    while not group.alive:  # it is being replaced
        time.sleep(0.1)
    process = group.reports[0].location.process
    if verb == "kill":
        os.kill(process, signal.SIGKILL)
        return
    os.kill(process, signal.SIGSTOP)

    def resume() -> None:
        try:
            os.kill(process, signal.SIGCONT)
        except ProcessLookupError:  # it has been replaced
            return

    threading.Timer(hold_s, resume).start()


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m outrider.bench.stalls")
    every = ["target-kill", "target-stop", "draft-kill", "draft-stop"]
    choices = [*every, *_AGAIN, *_OF_MEMBERS]
    parser.add_argument("--what", nargs="+", choices=choices, default=every)
    parser.add_argument("--drafter", choices=_SECTIONS, default="draft model")
    parser.add_argument("--cache", action="store_true", help="it has a speculation cache")
    parser.add_argument("--kills", type=int, default=50, help="strikes, one after the other")
    parser.add_argument("--pause-s", type=float, default=5.0, help="between them, in the mean")
    parser.add_argument("--seed", type=int, default=0, help="of which is struck, and when")
    parser.add_argument("--hold-s", type=float, default=30.0, help="how long a stopped one is held")
    parser.add_argument("--tokens", type=int, default=1500)
    return parser.parse_args()


if __name__ == "__main__":
    main()
