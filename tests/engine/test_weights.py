"""Other weights for an engine that serves, and pauses: `workers/`, `engine/` and their threads."""

from __future__ import annotations

import asyncio
import json
import shutil
import tempfile
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from outrider import LLM, AsyncLLM, SamplingParams
from outrider.engine.engine import Engine
from outrider.engine.outputs import Assembler
from outrider.errors import (
    CheckpointError,
    ConfigError,
    InvalidRequestError,
    OutriderError,
    WorkerError,
)
from outrider.scheduler.types import Request, ints

from ..helpers.adapters import write_adapter
from ..helpers.eagle import section as eagle_section
from ..helpers.engines import (
    Box,
    collect_all,
    complete,
    engine_of,
    plain_outputs,
    random_prompts,
)
from ..helpers.head_files import eagle_tensors, write_eagle
from ..helpers.models import write_guessable, write_models
from ..helpers.mtp import Made
from ..helpers.ports import wait_for

PROMPTS = random_prompts(6, 96)


def wanted(model: str, prompts=PROMPTS, **sampling):
    """What a new engine gives."""
    return plain_outputs(model, prompts, sampling)[0]


@pytest.fixture(scope="module")
def guessable(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Two targets of one architecture, and a head that guesses what both emit."""
    folder = tmp_path_factory.mktemp("guessable")
    one = write_guessable(folder / "one", num_layers=3)
    two = write_guessable(folder / "two", num_layers=3, others=0.2)
    head = write_eagle(folder / "head", *eagle_tensors(one, 3))
    other = write_eagle(folder / "other", *eagle_tensors(one, 3, seed=1))
    return {"one": one, "two": two, "head": head, "other": other}


@pytest.fixture(scope="module")
def models(tokenizer_path: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return write_models(tokenizer_path, tmp_path_factory.mktemp("models"))


def llm_of(model: str, speculative: dict[str, Any] | None = None, **options: Any) -> LLM:
    options = {"executor": "local", "dtype": "float32", "num_kv_blocks": 256, **options}
    return LLM(model, speculative_config=speculative, **options)


def greedy_ids(llm: LLM, prompts: list[list[int]]) -> dict[str, tuple[int, ...]]:
    params = SamplingParams(temperature=0.0, max_tokens=32, ignore_eos=True)
    outputs = llm.generate(prompts, params, use_tqdm=False)
    return {str(index): tuple(each.outputs[0].token_ids) for index, each in enumerate(outputs)}


def test_outputs_name_the_weights_that_gave_them(models, caplog):
    """An answer across an update has both; a drafter that stays is behind, and the log says so."""
    draft = {"decoding_type": "DraftTarget", "speculative_model": models["draft"]}
    params = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)

    def versions(llm: LLM) -> tuple[tuple[str, int], ...]:
        (output,) = llm.generate([PROMPTS[0]], params, use_tqdm=False)
        return output.outputs[0].weight_versions

    with llm_of(models["target"], draft) as llm:
        assert versions(llm) == ()
        assert llm.update_weights(models["draft"]) == 1
        assert versions(llm) == (("1", 24),)
        assert "have not had the last 1 updates" in caplog.text
        assert llm.stats()["weights"]["num_behind"] == 1
        assert llm.update_weights(models["target"], weight_version="step-2") == 2
        assert versions(llm) == (("step-2", 24),)
        assert llm.stats()["weights"]["num_behind"] == 2
        with pytest.raises(InvalidRequestError, match="names the target's") as caught:
            llm.update_weights(drafter=models["target"], weight_version="step-3")
        assert caught.value.field == "weight_version"
        llm.load_drafter({"decoding_type": "NGram", "max_draft_len": 2})  # the model stays
        assert llm.stats()["weights"]["num_behind"] == 2
        llm.unload_drafter("ngram")
        llm.update_weights(drafter=models["target"])
        found = llm.stats()["weights"]
        assert (found["weight_version"], found["num_behind"]) == ("step-2", 0)
        engine, begun, box = llm.engine, threading.Event(), Box(lambda *_: begun.set())
        request = Request("a", ints(PROMPTS[0]), params, seed=0)
        assembler = Assembler(llm.frontend.vocabulary, params)
        engine.submit(request, box)
        begun.wait(30)
        engine.update_weights(models["draft"], version="step-3")
        while not assembler.finished:
            assembler.push(box.deltas.get(timeout=30))
        spans = assembler.output().weight_versions
        assert sum(count for _, count in spans) == 24
        assert spans[-1][0] in ("step-2", "step-3"), "the update may come after its end"


@pytest.mark.parametrize(
    ("kind", "size"),
    [("none", 1), ("ngram", 1), ("draft", 1), ("draft", 2), ("apart", 1), ("apart", 2)],
)
def test_outputs_are_those_of_a_new_engine(tiny, kind, size, caplog):
    draft = {"decoding_type": "DraftTarget", "speculative_model": tiny.draft}
    section = {
        "none": None,
        "ngram": {"decoding_type": "NGram", "max_draft_len": 4},
        "draft": {**draft, "placement": "colocated"},
        "apart": {**draft, "placement": "separate"},
    }[kind]
    assert wanted(tiny.draft) != wanted(tiny.target)
    with engine_of(tiny.target, section, tensor_parallel_size=size) as engine:
        assert complete(engine, PROMPTS)[0] == wanted(tiny.target)
        assert engine.update_weights(tiny.draft) == 1
        assert complete(engine, PROMPTS)[0] == wanted(tiny.draft)
        if "speculative_model" in str(section):
            assert engine.update_weights(tiny.target, drafter=tiny.target) == 2
            drafter = tiny.target
        else:
            assert engine.update_weights(tiny.target) == 2
            drafter = None
        assert complete(engine, PROMPTS)[0] == wanted(tiny.target)
        stats = engine.stats()
        assert stats["weights"] == {
            "model": tiny.target, "drafter": drafter, "num_updates": 2,
            "weight_version": "2", "num_behind": 0,
        }  # fmt: skip
        assert stats["num_restarts"] == 0
        assert all(each["faults"] == 0 for each in stats["drafters"].values())
    assert not [each for each in caplog.records if each.exc_info]  # the restart was asked for


@pytest.mark.parametrize("placement", ["colocated", "separate"])
@pytest.mark.parametrize("size", [1, 2])
def test_a_head_goes_on(guessable, placement, size, caplog):
    """It drafts from the new target's states, with the new target's output layer."""
    head = eagle_section(guessable["head"], max_draft_len=3, placement=placement)
    head["decoding_type"] = "Eagle3"
    with engine_of(guessable["one"], head, tensor_parallel_size=size) as engine:
        assert complete(engine, PROMPTS)[0] == wanted(guessable["one"])
        for target, drafter in (("two", ""), ("one", guessable["other"])):
            engine.update_weights(guessable[target], drafter)
            assert complete(engine, PROMPTS)[0] == wanted(guessable[target])
            assert engine.weights()["drafter"] == (drafter or guessable["head"])
        assert engine.stats()["num_restarts"] == 0
    assert not [each for each in caplog.records if each.exc_info]


def changed(folder: Path, source: str) -> str:
    """A copy of a checkpoint with noise on every tensor."""
    shutil.copytree(source, folder)
    generator = torch.Generator().manual_seed(0)
    tensors = load_file(folder / "model.safetensors")
    for tensor in tensors.values():
        tensor.add_(torch.randn(tensor.shape, generator=generator) * 0.05)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return str(folder)


@pytest.mark.parametrize("size", [1, 2])
def test_modules_of_the_checkpoint_are_replaced_with_it(tmp_path, size):
    one = Made(tmp_path, "llama").folder
    two = changed(tmp_path / "two", one)
    mtp = {"decoding_type": "MTP", "num_nextn_predict_layers": 1}
    with engine_of(one, mtp, tensor_parallel_size=size) as engine:
        assert complete(engine, PROMPTS)[0] == wanted(one)
        engine.update_weights(two)
        assert complete(engine, PROMPTS)[0] == wanted(two) != wanted(one)
        assert engine.weights()["drafter"] == two


@pytest.mark.parametrize("size", [1, 2])
def test_adapters_stay(tiny, tmp_path, size):
    """They are added to the new weights."""
    module = {"name": "a", "path": write_adapter(tmp_path / "a", tiny.target)}
    options = {"lora_modules": [module], "tensor_parallel_size": size}
    params = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True)

    def adapted(engine: Engine) -> Any:
        requests = [
            Request(str(n), ints(each), params, seed=n, adapter="a")
            for n, each in enumerate(PROMPTS)
        ]
        return collect_all(engine, requests)[0]

    with engine_of(tiny.draft, **options) as engine:
        fresh = adapted(engine)
    with engine_of(tiny.target, **options) as engine:
        assert adapted(engine) != fresh
        engine.update_weights(tiny.draft)
        assert adapted(engine) == fresh
        assert complete(engine, PROMPTS)[0] == wanted(tiny.draft)


def test_sampled_outputs(tiny):
    with engine_of(tiny.target, {"decoding_type": "NGram", "max_draft_len": 4}) as engine:
        engine.update_weights(tiny.draft)
        found = complete(engine, PROMPTS, temperature=0.8, top_p=0.9)[0]
        assert found == wanted(tiny.draft, temperature=0.8, top_p=0.9)


def test_stored_prefixes_are_dropped(tiny):
    prompts = [list(range(2, 60))]
    with engine_of(tiny.target) as engine:
        for model in (tiny.target, tiny.draft):
            if model == tiny.draft:
                engine.update_weights(model)
            for num_cached in (0, 48):
                outputs, last = complete(engine, prompts)
                assert outputs == wanted(model, prompts)
                assert last["0"].num_cached_tokens == num_cached


def during(engine: Engine, at: int, act: Callable[[], Any]) -> tuple[Box, list[Any]]:
    """A sink that has `act` run beside the engine from its delta `at` on, and what came of it."""
    found: list[Any] = []

    def run() -> None:
        try:
            found.append(act())
        except OutriderError as error:
            found.append(error)

    def begin(count: int, delta: Any) -> None:
        if count == at:
            thread = threading.Thread(target=run)
            thread.start()
            while engine._inbox.empty():  # the engine waits here, and finds the change then
                thread.join(0.001)

    return Box(begin), found


def finish(box: Box, count: int) -> tuple[dict[str, tuple[int, ...]], set[str]]:
    outputs: dict[str, tuple[int, ...]] = {}
    reasons: list[str] = []
    while len(reasons) < count:
        delta = box.deltas.get(timeout=60)
        outputs[delta.request_id] = outputs.get(delta.request_id, ()) + delta.token_ids
        reasons += [delta.finish_reason] if delta.finish_reason else []
    return outputs, set(reasons)


def submit(engine: Engine, box: Box, prompts=PROMPTS) -> None:
    """All of them are there before the first step."""
    params = SamplingParams(temperature=0.0, max_tokens=32, ignore_eos=True)
    was_paused = engine.is_paused
    if not was_paused:
        engine.pause("keep")
    engine.submit_all(
        [Request(str(n), ints(each), params, seed=n) for n, each in enumerate(prompts)], box
    )
    if not was_paused:
        engine.resume()


@pytest.mark.parametrize("speculative", [None, {"decoding_type": "NGram", "max_draft_len": 4}])
def test_running_requests_go_on_with_the_new_weights(tiny, speculative):
    with engine_of(tiny.target, speculative) as engine:
        box, found = during(engine, 40, lambda: engine.update_weights(tiny.draft))
        submit(engine, box)
        outputs, reasons = finish(box, len(PROMPTS))
        wait_for(lambda: found)
        assert (found, reasons) == ([1], {"length"})
        for index, prompt in enumerate(PROMPTS):
            text, old = outputs[str(index)], wanted(tiny.target)[str(index)]
            same = next((n for n in range(32) if text[n] != old[n]), 31)
            # From one of the tokens on that are the old weights', all are what a new engine gives.
            begun = [[*prompt, *text[:n]] for n in range(1, same + 1)]
            ends = complete(engine, begun)[0]
            assert any(ends[str(n - 1)][: 32 - n] == text[n:] for n in range(1, same + 1)), (
                index,
                same,
            )


def test_running_requests_may_end_first(tiny):
    with engine_of(tiny.target, max_num_seqs=3) as engine:
        box, found = during(engine, 20, lambda: engine.update_weights(tiny.draft, mode="wait"))
        submit(engine, box)
        outputs, reasons = finish(box, len(PROMPTS))
        wait_for(lambda: found)
        assert (found, reasons) == ([1], {"length"})
        old, new = wanted(tiny.target), wanted(tiny.draft)
        assert [outputs[n] == old[n] for n in map(str, range(6))] == [True] * 3 + [False] * 3
        assert [outputs[n] == new[n] for n in map(str, range(6))] == [False] * 3 + [True] * 3


def test_requests_may_be_aborted(tiny):
    with engine_of(tiny.target, max_num_seqs=3) as engine:
        box, found = during(engine, 20, lambda: engine.update_weights(tiny.draft, mode="abort"))
        submit(engine, box)
        assert finish(box, len(PROMPTS))[1] == {"abort"}
        assert complete(engine, PROMPTS)[0] == wanted(tiny.draft)
        wait_for(lambda: found)
        assert found == [1]


@pytest.mark.parametrize("mode", ["keep", "wait", "abort"])
def test_a_pause(tiny, mode):
    with engine_of(tiny.target, max_num_seqs=3) as engine:
        box, found = during(engine, 20, lambda: engine.pause(mode))
        submit(engine, box)
        late = Box()
        wait_for(lambda: found)
        engine.submit(Request("late", ints([5]), SamplingParams(max_tokens=2), seed=0), late)
        num_steps = engine.stats()["steps"]["num_steps"]
        assert (engine.stats()["paused"], found) == (True, [None])
        assert engine.stats()["running"] == {"keep": 3, "wait": 0, "abort": 0}[mode]
        assert engine.stats()["steps"]["num_steps"] == num_steps
        assert late.deltas.empty()
        engine.pause("wait")  # again, at once: nothing runs
        engine.resume()
        outputs, reasons = finish(box, len(PROMPTS))
        assert late.last().finish_reason is not None
        assert not engine.is_paused
        if mode == "abort":
            assert reasons == {"abort"}
        else:
            assert outputs == wanted(tiny.target)


def test_an_update_in_a_pause(tiny):
    with engine_of(tiny.target) as engine:
        engine.pause()
        box = Box()
        submit(engine, box)
        engine.update_weights(tiny.draft)
        assert engine.is_paused
        assert box.deltas.empty()
        engine.resume()
        assert finish(box, len(PROMPTS))[0] == wanted(tiny.draft)


def altered(folder: Path, source: str, **keys: Any) -> Path:
    """A copy of a checkpoint with other keys in its config.json."""
    shutil.copytree(source, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | keys))
    return folder


def _without(state: dict[str, torch.Tensor], name: str) -> dict[str, torch.Tensor]:
    return {key: value for key, value in state.items() if key != name}


NORM = "model.layers.0.input_layernorm.weight"
BAD: dict[str, tuple[Any, str]] = {
    "missing": (lambda state: {k: v for k, v in state.items() if k != NORM}, NORM),
    "unknown": (lambda state: state | {"model.nothing": torch.zeros(2)}, "model.nothing"),
    "shape": (lambda state: state | {NORM: torch.zeros(31)}, rf"{NORM}.*\[31\]"),
    "prefix": (lambda state: {f"module.{key}": each for key, each in state.items()}, "module."),
    "empty": (lambda state: {}, "no tensors"),
    "value": (lambda state: state | {NORM: [1.0]}, NORM),
    "twice": (lambda state: [*state.items(), (NORM, state[NORM])], f"{NORM}.*twice"),
    "pairs": (lambda state: [NORM], "pairs"),
    "number": (lambda state: 7, "a path, a state dict"),
    "path": (lambda state: "/nowhere/at/all", "/nowhere/at/all.*does not exist"),
    "none": (lambda state: "", "the path is empty"),
    "surrogate": (lambda state: "a\ud800", "is no name of a file"),
    "zero": (lambda state: "a\0b", "is no name of a file"),
}


@pytest.fixture(scope="module")
def one_llm(models):
    with llm_of(models["target"], tensor_parallel_size=2) as llm:
        yield llm


def folders() -> set[Path]:
    """Of state dicts."""
    return set(Path(tempfile.gettempdir()).glob("outrider-weights-*"))


def refused(llm: LLM, message: str, weights: Any = None, **options: Any) -> None:
    """The update is refused, and what was served still is."""
    prompts, before = random_prompts(3, 60), folders()
    first = greedy_ids(llm, prompts)
    with pytest.raises((CheckpointError, ConfigError, InvalidRequestError), match=message):
        llm.update_weights(weights, **options)
    assert folders() == before
    assert greedy_ids(llm, prompts) == first
    assert llm.stats()["weights"]["num_updates"] == 0
    assert llm.stats()["num_restarts"] == 0


@pytest.mark.parametrize("case", list(BAD))
def test_a_state_that_does_not_fit_changes_nothing(one_llm, models, case):
    change, message = BAD[case]
    refused(one_llm, message, change(load_file(Path(models["draft"], "model.safetensors"))))


def test_arguments_that_are_wrong(one_llm, models):
    refused(one_llm, "mode: .*'now'", models["draft"], mode="now")
    refused(one_llm, "neither weights nor")
    refused(one_llm, "drafter: .*one drafter", models["draft"], drafter=models["draft"])
    refused(one_llm, "drafter: .*one drafter", drafter={"a": torch.zeros(2)})


def test_a_folder_that_does_not_fit_changes_nothing(one_llm, models, tmp_path):
    def copied(name: str, **keys: Any) -> Path:
        folder = tmp_path / name
        shutil.copytree(models["draft"], folder)
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | keys))
        return folder

    rope = {"rope_type": "default", "rope_theta": 7.0}
    for key, value in (("num_hidden_layers", 2), ("rope_parameters", rope), ("hidden_act", "relu")):
        refused(one_llm, f"another model.* {key} is", copied(key, **{key: value}))
    refused(one_llm, "another model", copied("kind", model_type="mistral"))
    cut = copied("cut")
    file = cut / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-7])
    refused(one_llm, "truncated", cut)
    (cut / "config.json").unlink()
    refused(one_llm, "no config.json", cut)
    refused(one_llm, "is a file", file)


def test_states_of_a_trainer(models, tmp_path):
    """What an optimiser has made of the model, ten times; nothing is left behind."""
    from transformers import AutoModelForCausalLM

    prompts, before = random_prompts(3, 60), folders()
    model = AutoModelForCausalLM.from_pretrained(models["target"], dtype=torch.float32)
    optimiser = torch.optim.AdamW(model.parameters(), lr=0.05)
    ids = torch.tensor([prompts[0] + prompts[1]])
    seen = []
    with llm_of(models["target"], {"decoding_type": "NGram", "max_draft_len": 4}) as llm:
        worker = weakref.ref(_model_of(llm))
        for count in range(1, 11):
            model(input_ids=ids, labels=ids).loss.backward()
            optimiser.step()
            optimiser.zero_grad()
            state = model.state_dict()
            assert llm.update_weights(state if count % 2 else iter(state.items())) == count
            seen.append(greedy_ids(llm, prompts))
            assert len(folders() - before) == 1
            assert worker() is None  # the weights from before are not in memory any more
            worker = weakref.ref(_model_of(llm))
    assert folders() == before
    model.save_pretrained(tmp_path)
    for file in Path(models["target"]).glob("token*"):
        shutil.copy(file, tmp_path)
    with llm_of(str(tmp_path)) as fresh:
        assert greedy_ids(fresh, prompts) == seen[-1] != seen[-2]


def _model_of(llm: LLM) -> Any:
    return llm.engine._host.target_group._workers[0]._models["target"]


def test_a_dtype_stays(models, tmp_path):
    """Trainers write float32; a bfloat16 engine serves it as bfloat16, and so do new ranks."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(models["draft"], dtype=torch.float32)
    model.save_pretrained(tmp_path / "wide")
    model.bfloat16().save_pretrained(tmp_path / "narrow")
    for name in ("wide", "narrow"):
        for file in Path(models["target"]).glob("token*"):
            shutil.copy(file, tmp_path / name)
    prompts = random_prompts(3, 60)
    with llm_of(str(tmp_path / "narrow"), dtype="auto") as llm:
        outputs = greedy_ids(llm, prompts)
        llm.update_weights(tmp_path / "wide")
        assert greedy_ids(llm, prompts) == outputs
        llm.engine._host.target_group.restart()
        assert llm.engine._host.target_group.reports[0].target.dtype == "bfloat16"


def test_a_rank_that_fails_as_it_loads_leaves_the_old_weights(tiny, monkeypatch):
    from outrider.workers import worker

    load, failures = worker.load_model, [MemoryError("none left")]

    def fails(*arguments: Any, **options: Any) -> Any:
        if failures:
            raise failures.pop()
        return load(*arguments, **options)

    with engine_of(tiny.target) as engine:
        monkeypatch.setattr(worker, "load_model", fails)
        box, found = during(engine, 40, lambda: engine.update_weights(tiny.draft))
        submit(engine, box)
        assert finish(box, len(PROMPTS))[0] == wanted(tiny.target)
        wait_for(lambda: found)
        assert isinstance(found[0], WorkerError)
        assert "none left" in found[0].message
        assert engine.weights() == {
            "model": tiny.target, "drafter": None, "num_updates": 0, "weight_version": "",
            "num_behind": 0,
        }  # fmt: skip
        assert engine.update_weights(tiny.draft) == 1
        assert complete(engine, PROMPTS)[0] == wanted(tiny.draft)


def test_ranks_that_replace_others_have_the_new_weights(tiny):
    with engine_of(tiny.target) as engine:
        engine.update_weights(tiny.draft)
        engine._host.target_group.discard()
        assert complete(engine, PROMPTS)[0] == wanted(tiny.draft)
        assert engine.stats()["num_restarts"] == 1


@pytest.mark.parametrize("placement", ["colocated", "separate"])
def test_folders_from_before_are_not_needed(tiny, tmp_path, placement):
    names = {name: str(tmp_path / name) for name in ("one", "two", "three", "four")}
    for name, source in zip(names, (tiny.target, tiny.draft) * 2, strict=True):
        shutil.copytree(source, names[name])
    draft = {"decoding_type": "DraftTarget", "speculative_model": names["two"]}
    with engine_of(names["one"], draft | {"placement": placement}) as engine:
        engine.update_weights(names["four"], names["three"])
        shutil.rmtree(names["one"])
        shutil.rmtree(names["two"])
        assert complete(engine, PROMPTS)[0] == wanted(tiny.draft)
        assert engine.weights()["drafter"] == names["three"]
        engine._host.target_group.discard()
        assert complete(engine, PROMPTS)[0] == wanted(tiny.draft)
        engine.update_weights(names["three"], names["four"])
        assert complete(engine, PROMPTS)[0] == wanted(tiny.target)
        with pytest.raises(CheckpointError, match="drafter: .*another model"):
            engine.update_weights("", tiny.other_vocabulary)


def test_in_an_event_loop(models):
    async def run() -> tuple[Any, ...]:
        async with AsyncLLM(models["target"], executor="local", dtype="float32") as llm:
            params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)

            async def text() -> list[int]:
                async for output in llm.generate([5, 6, 7], params):
                    found = output.outputs[0].token_ids
                return found

            await llm.pause_generation("keep")
            waiting = asyncio.create_task(text())
            paused = await llm.is_paused()
            count = await llm.update_weights(models["draft"])
            await llm.resume_generation()
            return paused, count, await waiting

    paused, count, found = asyncio.run(run())
    assert (paused, count) == (True, 1)
    with llm_of(models["draft"]) as llm:
        params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
        (output,) = llm.generate([[5, 6, 7]], params, use_tqdm=False)
        assert output.outputs[0].token_ids == found
