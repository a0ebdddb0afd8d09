"""LoRA adapters on whole engines: merged weights' tokens with every drafter, and no shared keys."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from pathlib import Path

import pytest

from outrider import LLM, AsyncLLM, LoRARequest, SamplingParams
from outrider.config import EngineConfig
from outrider.engine.estimate import estimate
from outrider.engine.preflight import check_models, preflight, require_checkpoints
from outrider.errors import CheckpointError, ConfigError, InvalidRequestError, WorkerError
from outrider.scheduler.types import Request, SeatSettings, ints
from outrider.workers.device_step.shape import Sampler
from outrider.workers.group import LocalGroup

from ..helpers.adapters import merged, write_adapter
from ..helpers.engines import collect_all, complete, engine_of, random_prompts
from ..helpers.hybrid import VOCAB, write_hybrid

DEMO = Path(__file__).resolve().parents[2] / "demo" / "models"
NAMES = ("", "a", "b")
NUM_TOKENS = 20
SIZES = pytest.mark.parametrize(
    ("size", "stages"),
    [(1, 1), *(pytest.param(*each, marks=pytest.mark.slow) for each in [(2, 1), (1, 2)])],
)


@dataclass
class Case:
    """A target, its adapters, and the tokens of merged weights by request."""

    target: str
    modules: list[dict[str, str]]
    prompts: list[list[int]]
    tokens: dict[str, tuple[int, ...]]


def make_case(folder: Path, target: str, prompts: list[list[int]], alpha: float) -> Case:
    """Tokens are those of an engine of merged weights, without adapters and drafters."""
    folders = [
        write_adapter(folder / "a", target, seed=1, alpha=alpha),
        write_adapter(folder / "b", target, seed=2, rank=3, targets=("q_proj", "v_proj"),
                      use_rslora=True, alpha=alpha),
    ]  # fmt: skip
    models = [target, *(merged(folder / f"m{i}", target, each) for i, each in enumerate(folders))]
    tokens = {}
    for name, model in zip(NAMES, models, strict=True):
        with engine_of(model) as engine:
            found, _ = complete(engine, prompts, max_tokens=NUM_TOKENS)
        tokens |= {f"{name}{index}": each for index, each in found.items()}
    for index in range(len(prompts)):
        assert len({tokens[f"{name}{index}"] for name in NAMES}) == 3, "the adapters do something"
    modules = [{"name": n, "path": each} for n, each in zip(NAMES[1:], folders, strict=True)]
    return Case(target, modules, prompts, tokens)


@pytest.fixture(scope="module")
def case(tiny, tmp_path_factory):
    prompts = random_prompts(3, 96, longest=50)
    return make_case(tmp_path_factory.mktemp("adapters"), tiny.target, prompts, 8.0)


@pytest.fixture(scope="module")
def demo(tmp_path_factory):
    """The shipped target, for which there are heads."""
    prompts = [[300, 20, 41, 300, 20], [77, 9, 300, 18, 4, 9]]
    return make_case(tmp_path_factory.mktemp("demo"), str(DEMO / "target"), prompts, 1.0)


def requests(case: Case, order: tuple[str, ...] = NAMES, **options):
    sampling = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
    return [
        Request(f"{name}{index}", ints(prompt), sampling, seed=1, adapter=name, **options)
        for index, prompt in enumerate(case.prompts)
        for name in order
    ]


def sections(tiny) -> list[dict]:
    return [
        {"decoding_type": "NGram", "max_draft_len": 5, "max_matching_ngram_size": 1},
        {"decoding_type": "Suffix"},
        {"decoding_type": "NGramMod", "n_match": 2, "n_min": 1},
        {"decoding_type": "Lookahead"},
        {"decoding_type": "DraftTarget", "speculative_model": tiny.draft},
        {"decoding_type": "DraftTarget", "speculative_model": tiny.draft, "placement": "colocated"},
    ]


def sizes(size, stages):
    return {"tensor_parallel_size": size, "pipeline_parallel_size": stages}


@pytest.mark.parametrize(
    ("index", "size", "stages"),
    [
        *((index, 1, 1) for index in range(-1, 6)),
        *((index, *each) for index in (-1, 5) for each in [(2, 1), (1, 2)]),
        *(pytest.param(index, 2, 2, marks=pytest.mark.slow) for index in range(-1, 6)),
    ],
)
def test_tokens_are_those_of_merged_weights(case, tiny, index, size, stages):
    """Base and two adapters in one batch, then once more over what the prefix cache has kept."""
    section = None if index < 0 else sections(tiny)[index]
    options = {"lora_modules": case.modules, **sizes(size, stages)}
    with engine_of(case.target, section, **options) as engine:
        found, last = collect_all(engine, requests(case))
        again, _ = collect_all(engine, requests(case, ("b", "", "a")))
        assert engine.stats()["requests"]["num_hit_tokens"] > 0
    assert found == again == case.tokens
    if section is not None:
        assert sum(delta.usage.num_draft_tokens for delta in last.values()) > 0


@pytest.mark.parametrize("kind", ["Eagle3", "MTP", "Medusa", "ReDrafter", "Eagle"])
def test_heads_change_nothing(demo, kind):
    section = {"decoding_type": kind, "speculative_model": str(DEMO / kind.lower())}
    for placement in ("colocated", "separate"):
        with engine_of(
            demo.target, {**section, "placement": placement}, lora_modules=demo.modules
        ) as engine:
            found, last = collect_all(engine, requests(demo))
            assert found == demo.tokens
            assert sum(delta.usage.num_draft_tokens for delta in last.values()) > 0


def test_steps_that_are_planned_ahead(case, monkeypatch):
    monkeypatch.setattr(LocalGroup, "is_concurrent", True)
    with engine_of(case.target, lora_modules=case.modules, tensor_parallel_size=2) as engine:
        assert collect_all(engine, requests(case))[0] == case.tokens


def test_stages_of_a_hybrid_target(tmp_path):
    """The adapters' linears are in one of them alone."""
    target = write_hybrid(tmp_path / "target", "granite4")
    case = make_case(tmp_path, target, random_prompts(2, VOCAB, longest=50), 8.0)
    section = {"decoding_type": "NGram", "max_draft_len": 5, "max_matching_ngram_size": 1}
    with engine_of(target, section, lora_modules=case.modules, **sizes(1, 2)) as engine:
        for _ in range(2):
            assert collect_all(engine, requests(case))[0] == case.tokens
        assert engine.stats()["requests"]["num_hit_tokens"] > 0


@pytest.mark.parametrize("stages", [1, 2])
def test_preempted_requests_keep_their_adapter(case, stages):
    options = {"lora_modules": case.modules, "num_kv_blocks": 12, "block_size": 8}
    options |= sizes(1, stages)
    with engine_of(case.target, None, **options, max_model_len=80) as engine:
        assert collect_all(engine, requests(case))[0] == case.tokens
        assert engine.stats()["requests"]["num_preemptions"] > 0


def test_drawn_tokens_do_not_depend_on_drafts(case, tiny):
    sampling = SamplingParams(temperature=0.9, max_tokens=NUM_TOKENS, ignore_eos=True)
    asked = [
        Request(f"{name}{i}", ints(prompt), sampling, seed=i, adapter=name)
        for i, prompt in enumerate(case.prompts)
        for name in NAMES
    ]
    found = []
    for section in (None, *sections(tiny)[:1], *sections(tiny)[4:]):
        stages = 1 if section is None else 2
        options = {"lora_modules": case.modules, **sizes(1, stages)}
        with engine_of(case.target, section, **options) as engine:
            found.append(collect_all(engine, asked)[0])
    assert all(each == found[0] for each in found)


def test_an_adapters_request_takes_the_host_path():
    assert Sampler.of(SeatSettings(0, adapter="a"), has_edits=True) is Sampler.HOST


def test_python_chooses_by_request_or_name(demo):
    options = {"lora_modules": demo.modules, "executor": "local", "dtype": "float32"}
    sampling = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
    prompt, path = demo.prompts[0], demo.modules[0]["path"]

    def tokens(outputs):
        return [tuple(each.outputs[0].token_ids) for each in outputs]

    with LLM(demo.target, **options, max_lora_rank=4) as llm:
        wish = LoRARequest("a", 1, path)
        kept = {"use_tqdm": False}
        assert tokens(llm.generate(prompt, sampling, **kept)) == [demo.tokens["0"]]
        assert tokens(llm.generate(prompt, sampling, lora_request=wish, **kept)) == [
            demo.tokens["a0"]
        ]
        mixed = llm.generate([prompt] * 3, sampling, lora_request=[wish, None, "b"], **kept)
        assert tokens(mixed) == [demo.tokens[key] for key in ("a0", "0", "b0")]
        for name in ("a", None):
            llm.enqueue(prompt, sampling, lora_request=name)
        assert tokens(llm.wait_for_completion(**kept)) == [demo.tokens["a0"], demo.tokens["0"]]
        *_, last = llm.stream(prompt, sampling, lora_request="b")
        assert tokens([last]) == [demo.tokens["b0"]]
        for wrong, match in (
            ("c", "'c' is not served; there is 'a', 'b'"),
            (LoRARequest("a", 1, "/elsewhere"), "'a' is served from"),
            ([wish], "1 for 2 prompts"),
            (5, "a LoRARequest or a name, got 5"),
        ):
            with pytest.raises(InvalidRequestError, match=f"^lora_request: {match}"):
                llm.generate([prompt, prompt], sampling, lora_request=wrong, **kept)


@SIZES
def test_adapters_are_added_while_it_runs(demo, tiny, tmp_path, size, stages):
    """As vLLM's scripts do; the ranks that replace others have them too, and so do new weights."""
    options = {"executor": "local", "dtype": "float32", **sizes(size, stages)}
    ngram = {"decoding_type": "NGram", "max_draft_len": 4, "max_matching_ngram_size": 1}
    sampling = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
    wishes = [None, *(LoRARequest(each["name"], i + 1, each["path"])
                      for i, each in enumerate(demo.modules))]  # fmt: skip
    wanted = [demo.tokens[f"{name}{i}"] for i in range(2) for name in NAMES]
    with LLM(
        demo.target, **options, enable_lora=True, max_lora_rank=4, speculative_config=ngram
    ) as llm:

        def found():
            prompts = [prompt for prompt in demo.prompts for _ in wishes]
            outputs = llm.generate(prompts, sampling, lora_request=wishes * 2, use_tqdm=False)
            return [tuple(each.outputs[0].token_ids) for each in outputs]

        assert found() == wanted
        llm.engine._inbox.put(lambda: llm.engine._recover(WorkerError("lost")))
        assert found() == wanted
        llm.update_weights(demo.target)
        assert found() == wanted
        other = write_adapter(tmp_path / "x", tiny.target)
        large = write_adapter(tmp_path / "y", demo.target, rank=5)
        for path, match in (
            (other, r"lora_modules: 'x': tensor '.*lora_A' "),
            (large, r"lora_modules: 'x': .*r: 5 is above max_lora_rank"),
            (str(tmp_path), r"lora_modules: 'x': .* has no adapter_config.json"),
        ):
            with pytest.raises(CheckpointError, match=f"^{match}"):
                llm.generate("a", lora_request=LoRARequest("x", 3, path))
        with pytest.raises(InvalidRequestError, match="'x' is not served; there is 'a', 'b'"):
            llm.generate("a", lora_request="x")
        assert found() == wanted


@SIZES
def test_adapters_come_and_go(demo, tmp_path, size, stages):
    """A name that comes back has no stored prefix of the one before; those that run end first."""
    options = {"executor": "local", "dtype": "float32", **sizes(size, stages)}
    sampling = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
    paths = {each["name"]: each["path"] for each in demo.modules}
    with LLM(demo.target, **options, enable_lora=True, max_lora_rank=4) as llm:

        def tokens(name):
            outputs = llm.generate(demo.prompts[0], sampling, lora_request=name, use_tqdm=False)
            return tuple(outputs[0].outputs[0].token_ids)

        for wanted in ("a", "b", "a"):
            llm.load_lora_adapter("x", paths[wanted])
            llm.load_lora_adapter("y", paths["b"])
            assert tokens("x") == demo.tokens[f"{wanted}0"]
            for taken in ("x", "", llm.config.model_name):
                with pytest.raises(InvalidRequestError, match="lora_name"):
                    llm.load_lora_adapter(taken, paths["a"])
            with pytest.raises(CheckpointError):
                llm.load_lora_adapter("z", str(tmp_path))
            llm.enqueue(demo.prompts[0], sampling, lora_request="x")
            llm.unload_lora_adapter("x")
            (output,) = llm.wait_for_completion(use_tqdm=False)
            assert tuple(output.outputs[0].token_ids) == demo.tokens[f"{wanted}0"]
            with pytest.raises(InvalidRequestError, match="'x' is not served"):
                tokens("x")
            with pytest.raises(InvalidRequestError, match="no adapter 'x'"):
                llm.unload_lora_adapter("x")
            assert tokens("y") == demo.tokens["b0"]
            if wanted == "b":
                llm.engine._inbox.put(lambda: llm.engine._recover(WorkerError("lost")))
                assert tokens("y") == demo.tokens["b0"]
            assert list(llm.engine.adapters()) == ["y"]
            llm.unload_lora_adapter("y")
            assert tokens(None) == demo.tokens["0"]
    with LLM(demo.target, **options) as llm, pytest.raises(ConfigError, match="enable_lora"):
        llm.load_lora_adapter("x", paths["a"])


def test_an_event_loop_chooses_too(demo):
    options = {"lora_modules": demo.modules, "executor": "local", "dtype": "float32"}
    sampling = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)

    async def last(llm, name):
        steps = llm.generate(demo.prompts[0], sampling, lora_request=name)
        outputs = [output async for output in steps]
        return tuple(outputs[-1].outputs[0].token_ids)

    async def both():
        async with AsyncLLM(demo.target, **options) as llm:
            with pytest.raises(InvalidRequestError, match="^lora_request: 'c' is not served"):
                await last(llm, "c")
            return await asyncio.gather(*(last(llm, name) for name in ("b", None, "a")))

    assert asyncio.run(both()) == [demo.tokens[key] for key in ("b0", "0", "a0")]


def test_faults_are_found_before_anything_starts(demo, tiny, tmp_path):
    def config(**options):
        given = {"executor": "local", "lora_modules": demo.modules, **options}
        return EngineConfig.load({"model": demo.target, **given})

    facts = preflight(config())
    assert facts["adapters"] == "a (rank 4), b (rank 3)"
    plain, adapted = (
        estimate(config(lora_modules=each), 0)[0].rank.weights for each in ([], demo.modules)
    )
    assert facts["adapters per rank"] == f"{adapted - plain:,} bytes"
    staged = preflight(config(pipeline_parallel_size=2))  # an even number of layers
    assert staged["adapters per rank"] == f"at most {(adapted - plain) // 2:,} bytes"
    for check in (require_checkpoints, check_models, preflight):
        with pytest.raises(CheckpointError, match=r"'a': .*r: 4 is above max_lora_rank \(3\)"):
            check(config(max_lora_rank=3))
    other = write_adapter(tmp_path / "x", tiny.target)
    with pytest.raises(CheckpointError, match=r"lora_modules: 'x': tensor '.*lora_A' "):
        preflight(config(lora_modules=[f"x={other}"]))


def test_their_memory_is_planned(case):
    config = {"model": case.target, "executor": "local", "dtype": "float32"}
    # Of each of two layers: q and v of one input share products of rank 3 + 3.
    layer = (3 + 3) * (64 + 64 + 16 + 16) * 4
    for stages in (1, 2):
        options = {**config, "pipeline_parallel_size": stages}
        plain, adapted = (
            estimate(EngineConfig.load({**options, **more}), 0)[0]
            for more in ({}, {"lora_modules": case.modules[1:]})
        )
        for rank in range(stages):
            more = adapted.bytes_of(rank).weights - plain.bytes_of(rank).weights
            assert more == 2 // stages * layer
