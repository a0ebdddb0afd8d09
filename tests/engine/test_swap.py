"""Other drafters for an engine that serves: outputs, what stays, what is refused."""

from __future__ import annotations

import asyncio
import shutil
import threading
from pathlib import Path
from typing import Any

import pytest

from outrider import LLM, AsyncLLM, SamplingParams
from outrider.config import ComposeConfig, EngineConfig, NoSpeculation, SpeculationBase
from outrider.engine.engine import Engine
from outrider.engine.weights import DrafterChange, composed, written, written_member
from outrider.errors import (
    CheckpointError,
    ConfigError,
    InvalidRequestError,
    OutriderError,
    WorkerError,
)
from outrider.scheduler.types import Request, ints

from ..helpers.eagle import section as eagle_section
from ..helpers.engines import Box, complete, engine_of, plain_outputs, random_prompts
from ..helpers.head_files import eagle_tensors, write_eagle
from ..helpers.models import write_guessable, write_models
from ..helpers.ports import wait_for

PROMPTS = random_prompts(6, 96)
NGRAM = {"decoding_type": "NGram", "max_draft_len": 4}
SUFFIX = {"decoding_type": "Suffix", "max_draft_len": 4}
SAMPLED = {"temperature": 0.9, "top_p": 0.9}


def wanted(model: str, **sampling: Any) -> Any:
    """What is emitted without a drafter."""
    return plain_outputs(model, PROMPTS, sampling)[0]


def draft(model: str, **keys: Any) -> dict[str, Any]:
    return {"decoding_type": "DraftTarget", "speculative_model": model, "max_draft_len": 3, **keys}


def names(engine: Engine) -> list[str]:
    return [each["name"] for each in engine.drafters()["drafters"]]


@pytest.fixture(scope="module")
def guessable(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """A target, heads that guess what it emits, and heads of other targets."""
    folder = tmp_path_factory.mktemp("guessable")
    one = write_guessable(folder / "one", num_layers=3)
    head = write_eagle(folder / "head", *eagle_tensors(one, 3))
    other = write_eagle(folder / "other", *eagle_tensors(one, 3, seed=1))
    return {"one": one, "head": head, "other": other}


@pytest.fixture(scope="module")
def models(tokenizer_path: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return write_models(tokenizer_path, tmp_path_factory.mktemp("models"))


def head(folder: str, **keys: Any) -> dict[str, Any]:
    return {**eagle_section(folder, max_draft_len=3, **keys), "decoding_type": "Eagle3"}


@pytest.mark.parametrize(
    ("placement", "size", "sampling"),
    [("colocated", 1, {}), ("colocated", 2, SAMPLED), ("separate", 1, SAMPLED)],
)
def test_every_way_from_none_to_several_and_back(tiny, placement, size, sampling):
    model = draft(tiny.draft, placement=placement)
    steps = [
        (DrafterChange(NGRAM), ["ngram"]),
        (DrafterChange(model), ["ngram", "draft_target"]),
        (DrafterChange(SUFFIX, "ngram"), ["suffix", "draft_target"]),
        (DrafterChange(draft(tiny.target, placement=placement), "draft_target"),
         ["suffix", "draft_target"]),
        (DrafterChange(replaces="suffix"), ["draft_target"]),
        (DrafterChange(whole={"decoding_type": "Lookahead"}), ["lookahead"]),
        (DrafterChange(replaces="lookahead"), []),
    ]  # fmt: skip
    with engine_of(tiny.target, tensor_parallel_size=size) as engine:
        for count, (change, found) in enumerate(steps, 1):
            engine.change_drafters(change)
            assert complete(engine, PROMPTS, **sampling)[0] == wanted(tiny.target, **sampling)
            assert names(engine) == found
            assert list(engine.info.drafters) == found
            assert engine.drafters()["num_changes"] == count
            for name in found:
                assert engine.stats()["drafters"][name]["num_gen_tokens"] > 0, name
        assert engine.stats()["num_restarts"] == 0
        assert engine.drafters()["speculative_config"] == {"decoding_type": "None"}


@pytest.mark.parametrize("placement", ["colocated", "separate"])
@pytest.mark.parametrize("size", [1, 2])
def test_heads(guessable, placement, size):
    """Into an engine without drafters, in the place of one another, and out again."""
    one, sampling = guessable["one"], SAMPLED if size == 1 else {}
    with engine_of(one, tensor_parallel_size=size) as engine:
        for folder in ("other", "head"):
            change = DrafterChange(head(guessable[folder], placement=placement))
            if engine.info.drafters:
                change = DrafterChange(change.drafter, engine.info.drafters[0])
            engine.change_drafters(change)
            assert complete(engine, PROMPTS, **sampling)[0] == wanted(one, **sampling)
            assert engine.weights()["drafter"] == guessable[folder]
            assert [each.placement for each in engine.info.heads] == [placement]
        stats = engine.stats()["drafters"]["eagle3"]
        assert stats["num_gen_tokens"] > stats["num_acc_tokens"] > 0
        engine.change_drafters(DrafterChange(NGRAM, "eagle3"))
        assert complete(engine, PROMPTS)[0] == wanted(one)
        assert engine.info.heads == ()
        assert engine.stats()["num_restarts"] == 0
        roles = {each["role"] for each in engine.stats()["workers"]}
        assert roles == {"target"}


def test_no_cache_gets_smaller(guessable):
    """Than those who hand out its blocks go by: kernels check no address."""
    one = guessable["one"]

    def blocks(engine: Engine) -> tuple[int, int]:
        (worker,) = engine._host.target_group._workers
        return worker._num_blocks

    model = draft(one, placement="colocated")
    with engine_of(one, model, num_kv_blocks=20) as engine:
        before = blocks(engine)
        assert before[0] == 20 < before[1]
        engine.change_drafters(DrafterChange(head(guessable["head"], placement="colocated")))
        assert blocks(engine) == before
        engine._host.target_group.restart()
        assert blocks(engine) == before
    with engine_of(one, num_kv_blocks=None, kv_cpu_bytes=2**20) as engine:
        before = engine.stats()["kv"]["num_blocks"]
        for added in (model, head(guessable["head"], placement="colocated")):
            engine.change_drafters(DrafterChange(added))
            engine._host.target_group.restart()
            assert blocks(engine) == (before, before)


def during(engine: Engine, at: int, act: Any) -> tuple[Box, list[Any]]:
    """A sink that has `act` run beside the engine from its delta `at` on, and what came of it."""
    found: list[Any] = []

    def run() -> None:
        try:
            act()
            found.append(None)
        except OutriderError as error:
            found.append(error)

    def begin(count: int, delta: Any) -> None:
        if count == at:
            threading.Thread(target=run).start()

    return Box(begin), found


@pytest.mark.parametrize(
    ("first", "second", "sampling"),
    [
        (None, "apart", SAMPLED),
        ("ngram", "colocated", SAMPLED),
        ("ngram", "colocated", {"temperature": 0.0}),
        ("colocated", "ngram", SAMPLED),
        ("apart", "suffix", SAMPLED),
        ("apart", "other", {"temperature": 0.0}),
        ("both", "ngram", SAMPLED),
    ],
)
def test_requests_that_run_keep_their_tokens(tiny, first, second, sampling):
    sections: dict[str | None, Any] = {
        None: None,
        "ngram": NGRAM,
        "suffix": SUFFIX,
        "apart": draft(tiny.draft),
        "other": draft(tiny.target),
        "colocated": draft(tiny.draft, placement="colocated"),
        "both": {"decoding_type": "Compose", "members": [NGRAM, draft(tiny.draft)]},
    }
    with engine_of(tiny.target, sections[first]) as engine:
        change = DrafterChange(whole=sections[second])
        box, found = during(engine, 20, lambda: engine.change_drafters(change))
        outputs, last = complete_to(engine, box, found, sampling)
        assert (found, last) == ([None], {"length"})
        assert outputs == long_outputs(tiny.target, sampling)
        assert engine.drafters()["num_changes"] == 1
        assert complete(engine, PROMPTS, **sampling)[0] == wanted(tiny.target, **sampling)


def long_outputs(model: str, sampling: dict[str, Any]) -> Any:
    return plain_outputs(model, PROMPTS, {**sampling, "max_tokens": 64})[0]


def complete_to(engine: Engine, box: Box, found: list[Any], sampling: dict[str, Any]) -> Any:
    """Outputs of requests that run while `found` is filled, and why they ended."""
    params = SamplingParams(max_tokens=64, ignore_eos=True, **sampling)
    requests = [Request(str(n), ints(p), params, seed=100 + n) for n, p in enumerate(PROMPTS)]
    outputs = {request.id: () for request in requests}
    reasons: set[str] = set()
    engine.submit_all(requests, box)
    left = len(requests)
    while left:
        delta = box.deltas.get(timeout=60)
        outputs[delta.request_id] += delta.token_ids
        if delta.finish_reason:
            reasons.add(delta.finish_reason)
            left -= 1
    wait_for(lambda: found)
    return outputs, reasons


def test_a_swap_in_the_midst_of_requests(tiny):
    """The change is performed while they run, at a step that is certain to come before the end."""
    with engine_of(tiny.target, NGRAM) as engine:
        swaps: list[Any] = []

        def swap(count: int, delta: Any) -> None:
            if count in (10, 30, 60):  # within the engine's thread, so that it waits
                whole = [draft(tiny.draft, placement="colocated"), SUFFIX, NGRAM][len(swaps)]
                thread = threading.Thread(
                    target=engine.change_drafters, args=(DrafterChange(whole=whole),)
                )
                swaps.append(thread)
                thread.start()
                while engine._inbox.empty() and thread.is_alive():
                    thread.join(0.001)

        outputs = complete(engine, PROMPTS, on_delta=swap)[0]
        for thread in swaps:
            thread.join()
        assert outputs == wanted(tiny.target)
        assert engine.drafters()["num_changes"] == len(swaps) == 3


def test_drafters_that_stay_are_not_touched(tiny):
    both = {"decoding_type": "Compose", "members": [NGRAM, draft(tiny.draft)]}
    with engine_of(tiny.target, both) as engine:
        complete(engine, PROMPTS)
        before = engine.stats()
        group = engine._host._apart[0][1]
        engine.change_drafters(DrafterChange(SUFFIX, "ngram"))
        assert engine._host._apart[0][1] is group
        after = engine.stats()
        for key in ("num_gen_tokens", "num_acc_tokens"):
            assert after["drafters"]["draft_target"][key] == before["drafters"]["draft_target"][key]
        engine.change_drafters(DrafterChange(replaces="suffix"))
        assert engine._host._apart[0][1] is group
        assert group.alive
        assert complete(engine, PROMPTS)[0] == wanted(tiny.target)
        engine.change_drafters(DrafterChange(replaces="draft_target"))
        assert not group.alive
        engine.change_drafters(DrafterChange(whole={"decoding_type": "None"}))  # as it is
        assert engine.drafters()["num_changes"] == 3


def test_a_drafter_keeps_the_weights_that_it_was_given(tiny, tmp_path):
    shutil.copytree(tiny.draft, tmp_path / "newer")
    with engine_of(tiny.target, draft(tiny.draft)) as engine:
        engine.update_weights("", str(tmp_path / "newer"))
        group = engine._host._apart[0][1]
        engine.change_drafters(DrafterChange(NGRAM))
        assert engine._host._apart[0][1] is group
        (model,) = [e for e in engine.drafters()["drafters"] if e["name"] == "draft_target"]
        assert model["speculative_model"] == str(tmp_path / "newer")
        engine.change_drafters(DrafterChange(replaces="ngram"))
        assert engine._host._apart[0][1] is group
        assert complete(engine, PROMPTS)[0] == wanted(tiny.target)


@pytest.mark.parametrize("first", [None, "ngram", "colocated", "apart"])
def test_what_cannot_draft_is_refused(tiny, guessable, tmp_path, first):
    sections: dict[str | None, Any] = {
        None: None,
        "ngram": NGRAM,
        "apart": draft(tiny.draft),
        "colocated": draft(tiny.draft, placement="colocated"),
    }
    cut, wrong = tmp_path / "cut", tmp_path / "wrong"
    for folder in (cut, wrong):
        shutil.copytree(tiny.draft, folder)
    file = cut / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    _renamed(wrong / "model.safetensors")
    bad: list[tuple[dict[str, Any], str, str]] = [
        (draft(tiny.other_vocabulary), "speculative_model", "vocabulary"),
        (draft(str(tmp_path / "none")), "speculative_model", "none"),
        (draft(str(cut)), "speculative_model", "cut"),
        (draft(str(wrong)), "", "nothing.weight"),
        (draft(str(wrong), placement="colocated"), "", "nothing.weight"),
        (head(guessable["head"]), "", ""),  # of another target
        (head(guessable["head"], placement="separate"), "", ""),
        (head(str(tmp_path / "none")), "speculative_model", "none"),
        ({**NGRAM, "max_draft_len": -1}, "max_draft_len", "-1"),
        ({**NGRAM, "verification": "rejection"}, "verification", "rejection"),
        ({"decoding_type": "Nothing"}, "decoding_type", "Nothing"),
        ({"decoding_type": "NGram", "pool": 1}, "pool", "unknown key"),
        ({"decoding_type": "NGramCache", "lookup_cache_static": str(tmp_path / "no")}, "", "no"),
        ({"decoding_type": "User", "drafter": "os:system"}, "decoding_type", "os:system"),
        ({**NGRAM, "max_draft_len": 1000}, "", "max_num_batched_tokens"),
    ]
    with engine_of(tiny.target, sections[first], max_num_batched_tokens=512) as engine:
        before = engine.drafters()
        workers = engine.stats()["workers"]
        for section, field, message in bad:
            with pytest.raises((ConfigError, CheckpointError), match=message) as caught:
                engine.change_drafters(DrafterChange(whole=section))
            assert field in (caught.value.field or ""), section
            assert _stable(engine.drafters()) == _stable(before)
        with pytest.raises(InvalidRequestError, match="no drafter 'eagle'"):
            engine.change_drafters(DrafterChange(NGRAM, "eagle"))
        with pytest.raises(InvalidRequestError, match="neither a drafter"):
            engine.change_drafters(DrafterChange())
        with pytest.raises(InvalidRequestError, match="give it alone"):
            engine.change_drafters(DrafterChange(NGRAM, whole=NGRAM))
        assert complete(engine, PROMPTS)[0] == wanted(tiny.target)
        assert engine.stats()["workers"] == workers
        assert engine.stats()["num_restarts"] == 0
        for name in engine.info.drafters:  # it drafts as before
            assert engine.stats()["drafters"][name]["num_gen_tokens"] > 0


def _stable(described: dict[str, Any]) -> Any:
    return [each["name"] for each in described["drafters"]], described["speculative_config"]


def _renamed(file: Path) -> None:
    """The file with one tensor under another name."""
    from safetensors.torch import load_file, save_file

    tensors = load_file(file)
    tensors["nothing.weight"] = tensors.pop(sorted(tensors)[0])
    save_file(tensors, file, metadata={"format": "pt"})


def test_plans_change_nothing(tiny):
    with engine_of(tiny.target, NGRAM) as engine:
        planned = engine.planned_drafters(DrafterChange(draft(tiny.draft, placement="colocated")))
        assert [each["decoding_type"] for each in planned["members"]] == ["NGram", "DraftTarget"]
        with pytest.raises(CheckpointError):
            engine.planned_drafters(DrafterChange(head(tiny.draft)))
        assert names(engine) == ["ngram"]
        engine.change_drafters(DrafterChange(whole=planned))
        assert names(engine) == ["ngram", "draft_target"]
        assert engine.planned_drafters(DrafterChange(whole=planned)) == planned


@pytest.mark.parametrize("others", [0, 1, 2])
def test_errors_of_a_drafter_name_its_keys(tiny, others):
    suffix = {"decoding_type": "Suffix"}
    members = [NGRAM, suffix][:others]
    served = {"decoding_type": "Compose", "members": members} if members else None
    missing = head("/nowhere", decoding_type="Medusa")
    bad = [
        ({**NGRAM, "max_draft_len": -1}, "drafter.max_draft_len"),
        ({**suffix, "shape": "round"}, "drafter.shape"),
        ({"method": "ngram", "num_speculative_tokens": "x"}, "drafter.max_draft_len"),
        ({"method": "eagle2"}, "drafter.method"),
        ({**suffix, "corpora": ["/nowhere.txt"]}, "drafter.corpora"),
        ({"decoding_type": "Nothing"}, "drafter.decoding_type"),
        ({"decoding_type": "User", "drafter": "os:system"}, "drafter.decoding_type"),
        (missing, "drafter.speculative_model"),
    ]
    with engine_of(tiny.target, served) as engine:
        for section, field in bad:
            for replaces in ("", *names(engine)):
                change = DrafterChange(section, replaces)
                for make in (engine.planned_drafters, engine.change_drafters):
                    with pytest.raises(ConfigError) as caught:
                        make(change)
                    assert caught.value.field == field, (section, replaces)
                    assert caught.value.message.startswith(f"{field}: ")
        assert names(engine) == [each["decoding_type"].lower() for each in members]


@pytest.mark.parametrize("placement", ["colocated", "separate"])
def test_a_failure_as_it_loads_leaves_the_drafters_from_before(tiny, monkeypatch, placement):
    from outrider.workers import worker

    load, failures = worker.load_model, [MemoryError("none left"), RuntimeError("none left")]

    def fails(*arguments: Any, **options: Any) -> Any:
        if failures:
            raise failures.pop()
        return load(*arguments, **options)

    with engine_of(tiny.target, NGRAM) as engine:
        monkeypatch.setattr(worker, "load_model", fails)
        change = DrafterChange(draft(tiny.draft, placement=placement))
        for _ in range(2):  # what a rank says, and what ends its message
            with pytest.raises((OutriderError, RuntimeError, MemoryError), match="none left"):
                engine.change_drafters(change)
            assert names(engine) == ["ngram"]
            assert complete(engine, PROMPTS)[0] == wanted(tiny.target)
        engine.change_drafters(change)
        assert names(engine) == ["ngram", "draft_target"]
        assert complete(engine, PROMPTS)[0] == wanted(tiny.target)


def test_ranks_that_fail_in_their_caches_are_replaced(tiny, monkeypatch):
    from outrider.workers.worker import Worker

    with engine_of(tiny.target, NGRAM) as engine:
        monkeypatch.setattr(
            Worker, "_with_new_drafters", lambda self: (_ for _ in ()).throw(RuntimeError("lost"))
        )
        with pytest.raises(WorkerError, match="lost"):
            engine.change_drafters(DrafterChange(draft(tiny.draft, placement="colocated")))
        assert names(engine) == ["ngram"]
        assert complete(engine, PROMPTS)[0] == wanted(tiny.target)
        assert engine.stats()["num_restarts"] == 1


@pytest.mark.parametrize("placement", ["colocated", "separate"])
def test_workers_that_replace_others_have_the_new_drafters(guessable, placement):
    one = guessable["one"]
    with engine_of(one, NGRAM) as engine:
        section = head(guessable["head"], placement=placement, adaptive_draft_len=False)
        engine.change_drafters(DrafterChange(whole=section))
        engine._host.target_group.discard()
        assert complete(engine, PROMPTS)[0] == wanted(one)
        assert engine.stats()["num_restarts"] == 1
        if placement == "separate":
            engine._host._apart[0][1].discard()

        def drafts() -> bool:
            before = engine.stats()["drafters"]["eagle3"]["num_acc_tokens"]
            assert complete(engine, PROMPTS)[0] == wanted(one)
            return engine.stats()["drafters"]["eagle3"]["num_acc_tokens"] > before

        wait_for(drafts)
        assert engine.weights()["drafter"] == guessable["head"]


def test_room_is_made_first_and_the_old_drafter_comes_back(tiny, monkeypatch):
    with engine_of(tiny.target, draft(tiny.draft)) as engine:
        alive: list[int] = []
        start = engine._host.start_apart

        def counted(*arguments: Any) -> Any:
            alive.append(sum(group.alive for _, group in engine._host._apart))
            return start(*arguments)

        monkeypatch.setattr(engine._host, "start_apart", counted)
        engine.change_drafters(DrafterChange(draft(tiny.target), "draft_target", make_room=True))
        assert alive == [0]
        assert engine.weights()["drafter"] == tiny.target
        other = DrafterChange(head(tiny.draft, placement="separate"), "draft_target", None, True)
        with pytest.raises(OutriderError):
            engine.change_drafters(other)
        assert engine.weights()["drafter"] == tiny.target
        assert complete(engine, PROMPTS)[0] == wanted(tiny.target)
        assert engine.stats()["drafters"]["draft_target"]["num_gen_tokens"] > 0


def section(**keys: Any) -> SpeculationBase:
    return EngineConfig.load({"model": "m", "speculative_config": keys}).speculative_config


def test_the_rule_and_what_holds_for_all_is_kept():
    rejection = {"verification": "rejection", "max_concurrency": 4}
    one = section(**NGRAM, **rejection)
    added = DrafterChange(SUFFIX).applied(one, ["ngram"])
    both = section(**added)
    assert isinstance(both, ComposeConfig)
    assert (both.verification, both.max_concurrency) == ("rejection", 4)
    assert all(each.max_concurrency is None for each in both.members)
    assert section(**written(both)) == both
    left = DrafterChange(replaces="ngram").applied(both, ["ngram", "suffix"])
    assert section(**left) == section(**SUFFIX, **rejection)
    none = section(**DrafterChange(replaces="ngram").applied(one, ["ngram"]))
    assert isinstance(none, NoSpeculation)
    assert none.verification == "rejection"
    whole = DrafterChange(whole={"method": "ngram", "num_speculative_tokens": 3}).applied(one, [])
    assert section(**whole).verification == "rejection"
    assert section(**composed(both, map(written_member, both.members[:1]))) == one
    merge = section(decoding_type="Compose", members=[NGRAM, SUFFIX], mode="merge")
    again = DrafterChange(NGRAM, "suffix").applied(merge, ["ngram", "suffix"])
    assert section(**again).mode == "merge"


def test_the_python_api(models):
    params = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True)
    prompts = random_prompts(3, 60)

    def ids(llm: LLM) -> list[list[int]]:
        outputs = llm.generate(prompts, params, use_tqdm=False)
        return [list(each.outputs[0].token_ids) for each in outputs]

    with LLM(models["target"], executor="local", dtype="float32", num_kv_blocks=256) as llm:
        plain = ids(llm)
        assert llm.load_drafter(draft(models["draft"])) == ["draft_target"]
        assert ids(llm) == plain
        assert llm.load_drafter(NGRAM, replaces="draft_target") == ["ngram"]
        assert llm.frontend.drafters == ("ngram",)
        assert llm.unload_drafter("ngram") == []
        user = {"decoding_type": "User", "drafter": "outrider.drafters.protocol:NoDrafter"}
        with pytest.raises(ConfigError):  # its code is looked at, and is none
            llm.load_drafter({**user, "drafter": "outrider.nothing:Nothing"})
        assert llm.replace_drafters(SUFFIX) == ["suffix"]
        assert ids(llm) == plain
        assert llm.replace_drafters(None) == []
        assert llm.drafters()["drafters"] == []

    async def run() -> tuple[Any, ...]:
        options = {"executor": "local", "dtype": "float32", "num_kv_blocks": 256}
        async with AsyncLLM(models["target"], **options) as llm:
            loaded = await llm.load_drafter(NGRAM)
            described = await llm.drafters()
            replaced = await llm.replace_drafters(SUFFIX)
            return (
                loaded,
                described["drafters"][0]["name"],
                replaced,
                await llm.unload_drafter("suffix"),
            )

    assert asyncio.run(run()) == (["ngram"], "ngram", ["suffix"], [])
