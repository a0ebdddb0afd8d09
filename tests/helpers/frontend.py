"""A tokenizer of 300 tokens, and an engine without a model: both are quick and deterministic."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from outrider.config import EngineConfig, NoSpeculation
from outrider.engine.engine import Engine
from outrider.engine.weights import DrafterChange
from outrider.errors import CheckpointError, EngineDeadError, InvalidRequestError, OutriderError
from outrider.scheduler.types import (
    Delta,
    Logprobs,
    Request,
    RequestTimes,
    SpeculationUsage,
    StepTrace,
    TokenLogprobs,
    ints,
)
from outrider.workers.spec import SentWeights, TrainerLink

CHAT_TEMPLATE = (
    "{% for m in messages %}{{ '<' + m.role + '>' + m.content + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<assistant>' }}{% endif %}"
)
EOS = 299
WRONG = ord("<") - 33  # a guess of the fake engine that is never accepted
VOCAB_SIZE = 304  # padded, as real checkpoints are


@pytest.fixture(scope="session")
def tokenizer_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Byte-level BPE: 256 bytes, 40 merges, three special tokens."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=297,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(
        ["the cat sat on the mat and the other cat sat too "] * 20, trainer
    )
    size = tokenizer.get_vocab_size()
    fillers = [f"<|filler{index}|>" for index in range(EOS - size)]
    tokenizer.add_special_tokens([*fillers, "<|eos|>"])
    assert tokenizer.token_to_id("<|eos|>") == EOS
    path = tmp_path_factory.mktemp("tokenizer")
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|eos|>")
    fast.chat_template = CHAT_TEMPLATE
    fast.save_pretrained(path)
    (path / "config.json").write_text(json.dumps({"model_type": "llama", "vocab_size": VOCAB_SIZE}))
    return path


@pytest.fixture(scope="session")
def tokenizer(tokenizer_path: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(tokenizer_path, local_files_only=True)


@pytest.fixture(scope="session")
def config(tokenizer_path: Path) -> EngineConfig:
    return EngineConfig.load(
        {"model": str(tokenizer_path), "served_model_name": "tiny", "executor": "local"}
    )


@pytest.fixture(scope="session")
def limits() -> Any:
    return SimpleNamespace(
        model_name="tiny",
        max_model_len=256,
        vocab_size=VOCAB_SIZE,
        eos_token_ids=(EOS,),
        drafter="fake",
        drafters=("fake", "other"),
    )


class FakeEngine:
    """Answers every request with the same script, `num_per_step` tokens a step.

    `gate` holds the steps back while it is cleared; it closes by itself after `free_steps` steps.
    """

    def __init__(self, info: Any, script: list[int], num_per_step: int = 3) -> None:
        self.info = info
        self.script = script
        self.num_per_step = num_per_step
        self.gate = threading.Event()
        self.gate.set()
        self.free_steps: int | None = None
        self.submitted: list[Request] = []
        self.aborted: list[str] = []
        self.dead = False
        self.error: str | None = None
        self.refuse: Exception | None = None
        self.pause_s = 0.0
        self.num_resets = 0  # of the prefix cache
        self.updates: list[tuple[str, str, str]] = []  # of weights
        self.weight_versions: list[str] = []  # of these, and of those sent
        self.pauses: list[str] = []
        self.adaptation: dict[str, Any] | None = None
        self.wishes: list[str] = []  # of online adaptation
        self.traced_steps: list[int] = []
        self.runs: list[dict[str, Any]] = []  # of its trace
        self.changes: list[DrafterChange] = []
        self.on_lack: list[Callable[[], None]] = []
        self.lacks_weights = self.lacks_workers = self.is_recovering = False
        self.links: list[TrainerLink] = []  # to a trainer
        self.staged_s = 0.0  # since the last were staged
        self.sent: list[tuple[str, str]] = []  # by a trainer: what became of which
        self.sleeps: list[tuple[Any, ...]] = []
        self.served_adapters: dict[str, str] = {}
        self.speculative: dict[str, Any] | None = None
        self.refuse_drafters: dict[str, Any] | None = None
        self.logprob: Callable[[Request], float] = lambda request: -0.5
        self._running: dict[str, tuple[Request, Any, list[int], int]] = {}
        self._lock = threading.RLock()
        self._wake = threading.Event()
        self._closed = False
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def submit(self, request: Request, sink: Any) -> None:
        self.check()
        if self.refuse is not None:
            raise self.refuse
        with self._lock:
            self.submitted.append(request)
            self._running[request.id] = (request, sink, [*request.emitted.tolist()], 0)
        self._wake.set()

    def submit_all(self, requests: list[Request], sink: Any) -> None:
        for request in requests:
            self.submit(request, sink)

    def post(self, requests: list[Request], sink: Any, done: Callable[[Any], None]) -> None:
        with self._lock:  # no step before `done`
            try:
                self.submit_all(requests, sink)
            except OutriderError as error:
                done(error)
            else:
                done(None)

    def abort(self, request_id: str) -> None:
        with self._lock:
            self.aborted.append(request_id)
            entry = self._running.pop(request_id, None)
        if entry is not None:
            usage = SpeculationUsage("fake", entry[3], entry[3], 3 * entry[3], 2 * entry[3])
            entry[1].deliver([Delta(request_id, (), finish_reason="abort", usage=usage)])

    def stats(self) -> dict[str, Any]:
        return {
            "running": len(self._running),
            "waiting": 0,
            "world_size": 2,
            "paused": bool(self.pauses),
            "sleeping": bool(self.sleeps) and self.sleeps[-1][0] > 0,
            "kv": {"num_blocks": 8, "num_free_blocks": 8 - len(self._running), "block_size": 16},
            "requests": {"num_finished": len(self.submitted) - len(self._running)},
            "steps": {"num_steps": 7},
            "online_adaptation": self.adaptation,
            "drafters": {
                "fake": {
                    "num_calls": [1, 2, 3],
                    "num_gen_drafts": 5,
                    "num_acc_drafts": 4,
                    "num_gen_tokens": 15,
                    "num_acc_tokens": 9,
                    "acc_tokens_per_pos": [4, 3, 2],
                    "begin_ms": 0.1,
                    "gen_ms": 0.2,
                    "acc_ms": 0.3,
                    "faults": 0,
                }
            },
        }

    def check(self) -> None:
        if self.dead:
            raise EngineDeadError("the engine is down: test")

    def reconfigure(self, speculative: dict[str, Any]) -> None:
        self.reconfigured = speculative

    def reset_prefix_cache(self) -> None:
        self.check()
        self.num_resets += 1

    def check_weights(self, target: str, drafter: str = "") -> None:
        self.check()
        if self.refuse is not None:
            raise self.refuse

    def update_weights(
        self, target: str, drafter: str = "", mode: str = "keep", version: str = ""
    ) -> int:
        self.check_weights(target, drafter)
        self.weight_versions.append(version)
        self.updates.append((target, drafter, mode))
        return len(self.updates)

    def drafters(self) -> dict[str, Any]:
        self.check()
        section = self.speculative or {"decoding_type": "None"}
        kinds = [section] if section["decoding_type"] != "None" else []
        drafters = [
            {"name": each["decoding_type"].lower(), "decoding_type": each["decoding_type"],
             "placement": "engine", "speculative_model": None}
            for each in kinds
        ]  # fmt: skip
        return {"drafters": drafters, "speculative_config": section, "num_changes": 0}

    def planned_drafters(self, change: DrafterChange) -> dict[str, Any]:
        self.check()
        return change.applied(NoSpeculation(), [])

    def change_drafters(self, change: DrafterChange) -> None:
        planned = self.planned_drafters(change)
        self.changes.append(change)
        if self.refuse_drafters is not None and self.refuse_drafters == planned:
            raise CheckpointError.at("speculative_config", "refused here")
        self.speculative = planned
        names = tuple(each["name"] for each in self.drafters()["drafters"])
        self.info = SimpleNamespace(**vars(self.info) | {"drafters": names})

    def adapt(self, action: str) -> None:
        self.check()
        if self.adaptation is None:
            raise InvalidRequestError.at("online_adaptation", "it is off")
        self.wishes.append(action)

    def num_sent_ranks(self) -> int:
        return 2

    def link_trainer(self, link: TrainerLink) -> None:
        self.check()
        self.links.append(link)
        if self.refuse is not None:
            raise self.refuse

    def take_weights(self, sent: SentWeights, mode: str = "keep") -> int:
        self.check()
        if self.refuse is not None and sent.until != "check":
            raise self.refuse
        self.sent.append((sent.until, sent.id))
        self.weight_versions.append(sent.version)
        return len(self.sent)

    def take_sent(self, sent_id: str, mode: str = "keep", version: str = "") -> bool:
        self.check()
        has_it = ("stage", sent_id) in self.sent
        self.sent.append(("taken" if has_it else "dropped", sent_id))
        return has_it

    def staged(self, for_s: float) -> str:
        verb, sent_id = self.sent[-1] if self.sent else ("", "")
        return sent_id if verb == "stage" and self.staged_s >= for_s else ""

    def drop_staged(self, staged_id: str) -> None:
        self.sent.append(("dropped", staged_id))

    def lose_weights(self) -> None:
        self.lacks_weights = True
        for callback in self.on_lack:
            callback()

    def record_trace(self, max_steps: int) -> None:
        self.check()
        self.traced_steps.append(max_steps)

    def trace(self) -> dict[str, Any]:
        return {"machine": {"num_cores": 2}, "runs": self.runs}

    def pause(self, mode: str = "abort") -> None:
        self.check()
        self.pauses.append(mode)

    def resume(self, *, takes_folder: bool = True) -> None:
        self.check()
        self.pauses.clear()

    def adapters(self) -> dict[str, str]:
        self.check()
        return dict(self.served_adapters)

    def add_adapter(self, name: str, path: str) -> None:
        self.check()
        if self.refuse is not None:
            raise self.refuse
        self.served_adapters[name] = path

    def remove_adapter(self, name: str) -> None:
        self.check()
        del self.served_adapters[name]

    serve_adapters = Engine.serve_adapters

    def sleep(self, level: int = 1, mode: str = "abort") -> None:
        self.check()
        self.sleeps.append((level, mode))

    def wake_up(self, tags: tuple[str, ...] = ()) -> None:
        self.check()
        self.sleeps.append((0, *tags))

    def shutdown(self) -> None:
        self._closed = True
        self._wake.set()
        self.gate.set()

    def _run(self) -> None:
        while not self._closed:
            if not self._running:
                self._wake.wait(0.05)
                self._wake.clear()
            self.gate.wait()
            if self.pause_s:
                threading.Event().wait(self.pause_s)
            self._step()

    def _step(self) -> None:
        with self._lock:
            if self._running and self.free_steps is not None:
                self.free_steps -= 1
                if self.free_steps == 0:
                    self.free_steps = None
                    self.gate.clear()
            by_sink: dict[int, tuple[Any, list[Delta]]] = {}
            for request_id, (request, sink, done, steps) in list(self._running.items()):
                delta = self._advance(request, done, steps + 1)
                self._running[request_id] = (request, sink, done, steps + 1)
                if delta.finish_reason:
                    del self._running[request_id]
                by_sink.setdefault(id(sink), (sink, []))[1].append(delta)
            for sink, deltas in by_sink.values():
                sink.deliver(deltas)

    def _advance(self, request: Request, done: list[int], steps: int) -> Delta:
        if self.error is not None:
            return Delta(request.id, (), finish_reason="error", error=self.error)
        sampling = request.sampling
        new: list[int] = []
        reason = None
        while len(new) < self.num_per_step and reason is None:
            token = self.script[len(done) % len(self.script)]
            done.append(token)
            new.append(token)
            if token in request.eos_token_ids or token in sampling.stop_token_ids:
                reason = "stop"
            elif len(done) >= (sampling.max_tokens or 10**9):
                reason = "length"
        if sampling.max_tokens == 0:
            new, reason = [], "length"
        wanted = sampling.logprobs
        value = self.logprob(request)
        logprobs = () if wanted is None else tuple(_logprobs(id, wanted, value) for id in new)
        return Delta(
            request.id,
            tuple(new),
            num_accepted=len(new) - 1,
            finish_reason=reason,
            stop_token_id=new[-1] if reason == "stop" else None,
            logprobs=logprobs,
            num_cached_tokens=2,
            usage=SpeculationUsage("fake", steps, steps, 3 * steps, 2 * steps),
            prompt_logprobs=_prompt_logprobs(request) if steps == 1 else None,
            trace=self._trace(new) if request.speculation.trace else None,
            times=RequestTimes(0.25, 0.5) if steps == 1 else None,
        )

    def _trace(self, new: list[int]) -> StepTrace:
        """All tokens but the last were guessed, and one wrong one beside the last."""
        num_accepted = len(new) - 1
        return StepTrace(
            tokens=(*new[:num_accepted], WRONG),
            parents=tuple(range(-1, num_accepted)),
            origins=("fake",) * (num_accepted + 1),
            path=tuple(range(num_accepted)),
        )


def _logprobs(token: int, wanted: int, value: float = -0.5) -> TokenLogprobs:
    rivals = [token, *(id for id in (65, 66, 67, 68, 69) if id != token)][:wanted]
    return TokenLogprobs(value, tuple((id, value - rank) for rank, id in enumerate(rivals)))


def _prompt_logprobs(request: Request) -> Logprobs | None:
    """Of prompt token i: -i for itself; the likeliest are tokens 65, 66, ... from 0 down."""
    top, count = request.sampling.prompt_logprobs, len(request.prompt)
    if top is None:
        return None
    ids, values = np.arange(65, 65 + top), -np.arange(top, dtype=np.float32)
    return Logprobs(
        -np.arange(1, count, dtype=np.float32),
        ints(np.tile(ids, (count - 1, 1))),
        np.tile(values, (count - 1, 1)).astype(np.float32),
        np.full(count - 1, 1 + top, dtype=np.int32),
    )


@pytest.fixture
def make_engine(limits: Any, tokenizer: Any) -> Iterator[Callable[..., FakeEngine]]:
    """Builds engines that write a text over and over; they end with the test."""
    engines: list[FakeEngine] = []

    def make(text: str = "the cat sat on the mat. ", *, eos: bool = False, num_per_step: int = 3):  # type: ignore[no-untyped-def]
        script = tokenizer.encode(text) + ([EOS] if eos else [])
        engines.append(FakeEngine(limits, script, num_per_step))
        return engines[-1]

    yield make
    for engine in engines:
        engine.shutdown()


@pytest.fixture(scope="module")
def end_server() -> Iterator[Callable[[Any, threading.Thread], None]]:
    """`end_server(server, thread)`: of uvicorn; its pauses pass beside the tests that follow."""
    threads: list[threading.Thread] = []

    def end(server: Any, thread: threading.Thread) -> None:
        server.should_exit = True
        threads.append(thread)

    yield end
    for thread in threads:
        thread.join(10)
