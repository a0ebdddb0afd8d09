"""Fixtures of the toy language (`helpers/toy.py`): requests, loops, and driving them to the end."""

from __future__ import annotations

import ast
import gc
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from outrider.config import EngineConfig
from outrider.drafters.protocol import DraftWait
from outrider.scheduler.loop import Loop
from outrider.scheduler.sampling import SamplingParams
from outrider.scheduler.scheduler import Scheduler
from outrider.scheduler.types import Request, ints

# What engines learn about draft lengths stays out of the user's caches and of other tests.
os.environ["OUTRIDER_LENGTHS_DIR"] = ""
# Nor does every engine measure what its steps cost, which takes two seconds.
os.environ.setdefault("OUTRIDER_MEASURE_S", "0")
# Nor is garbage looked for while tests are collected: a quarter of that time.
gc.disable()
pytest_plugins = ["outrider.tests.helpers.frontend"]


@cache
def starts_ray(file: Path) -> set[str]:
    """Names of a file's tests that are marked `ray`; `pytestmark` where all are."""
    found = set()
    for node in ast.parse(file.read_text()).body:
        if isinstance(node, ast.FunctionDef) and "pytest.mark.ray" in map(
            ast.unparse, node.decorator_list
        ):
            found.add(node.name)
        if isinstance(node, ast.Assign) and "pytest.mark.ray" in ast.unparse(node):
            found.add("pytestmark")
    return found


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Among several processes, a file's tests stay together; those marked `ray` are apart.

    One process takes these first, longest files first, and the others take them last: as long as
    there is anything else, one Ray at a time runs, and no process is idle while many are left.
    """
    from xdist.scheduler import LoadFileScheduling

    class ByFile(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file, _, name = nodeid.partition("::")
            starters = starts_ray(config.rootpath / file)
            return file + " ray" * bool({"pytestmark", name.partition("[")[0]} & starters)

        def _assign_work_unit(self, node: Any) -> None:
            scope = next_scope(self.workqueue, takes_ray=node is self.nodes[0])
            self.workqueue.move_to_end(scope, last=False)
            super()._assign_work_unit(node)

    return ByFile(config, log)


def next_scope(waiting: dict[str, dict[str, bool]], takes_ray: bool) -> str:
    """The file that a process takes next: of those that start Ray, the one with most tests."""
    ray = [scope for scope in waiting if scope.endswith(" ray")]
    others = [scope for scope in waiting if not scope.endswith(" ray")]
    if ray and (takes_ray or not others):
        return max(ray, key=lambda scope: len(waiting[scope]))
    return others[0]


@pytest.hookimpl(trylast=True)
def pytest_collection_finish() -> None:
    """Garbage is not looked for in what is loaded by now: a second each time, with all tests."""
    gc.collect()
    gc.freeze()
    gc.enable()


class RayOwners:
    """Fixtures of several tests that have started Ray; without one, no test leaves it running.

    Of a test that fails with Ray started, the next one that starts it would fail too.
    """

    def __init__(self) -> None:
        self.fixtures: list[Any] = []

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(self, fixturedef: Any) -> Iterator[None]:
        was_running = is_ray_running()
        made = yield
        if fixturedef.scope != "function" and not was_running and is_ray_running():
            self.fixtures.append(fixturedef)
        return made

    @pytest.hookimpl
    def pytest_fixture_post_finalizer(self, fixturedef: Any) -> None:
        if fixturedef in self.fixtures:
            self.fixtures.remove(fixturedef)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_teardown(self) -> Iterator[None]:
        try:
            return (yield)
        finally:
            if not self.fixtures and is_ray_running():
                if "ray.serve" in sys.modules:
                    with suppress(Exception):  # whatever state it is in
                        sys.modules["ray.serve"].shutdown()
                sys.modules["ray"].shutdown()


def is_ray_running() -> bool:
    return "ray" in sys.modules and sys.modules["ray"].is_initialized()


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(RayOwners(), "ray-owners")


@pytest.fixture(scope="session", autouse=True)
def patient() -> None:
    """Drafters may take longer than by default: a busy machine's pauses are no fault of theirs."""
    DraftWait.least_s = DraftWait.short_s = 1.0


@pytest.fixture
def make_loop() -> Callable[..., Loop]:
    """A loop over the token-cache target."""
    # Not above: the process that shares the tests out would wait for torch first.
    from .helpers.toy import OracleDrafting, TokenCacheTarget

    def make(
        num_blocks: int = 64,
        seed: int = 0,
        max_model_len: int = 200,
        drafting=None,
        kind: type[Loop] = Loop,
        **options,
    ) -> Loop:
        options = {"block_size": 4, "max_num_seqs": 8, "max_num_batched_tokens": 64, **options}
        speculative = {"decoding_type": "NGram", "adaptive_draft_len": False}
        speculative["max_draft_len"] = options.pop("max_draft_len", 6)
        num_groups = options.pop("num_groups", 1)
        config = EngineConfig.load({"model": "m", "speculative_config": speculative, **options})
        drafting = drafting or OracleDrafting(seed)
        scheduler = Scheduler(
            config,
            num_blocks,
            max_model_len,
            tree_drafts=drafting.proposes_trees,
            ranks_append=kind is not Loop and num_groups == 1,
            num_groups=num_groups,
        )
        scheduler.budget.enabled = not getattr(drafting, "is_idle", False)
        target = TokenCacheTarget(num_blocks, config.block_size)
        target.head = OracleDrafting(seed) if drafting.ranks_draft else None
        return kind(scheduler, target, drafting)

    return make


@pytest.fixture
def request_of() -> Callable[..., Request]:
    """A request of plain tokens."""

    def make(name: str, prompt: tuple[int, ...], max_tokens: int | None = 20, **fields) -> Request:
        sampling = SamplingParams(
            temperature=0.0, max_tokens=max_tokens, **fields.pop("sampling", {})
        )
        return Request(name, ints(prompt), sampling, seed=1, **fields)

    return make


@pytest.fixture
def drive() -> Callable[..., dict[str, tuple[int, ...]]]:
    """Steps until idle, checking the block accounting after every one."""

    def run(loop: Loop, max_steps: int = 10_000) -> dict[str, tuple[int, ...]]:
        outputs: dict[str, tuple[int, ...]] = {}
        for _ in range(max_steps):
            if not loop.has_work:
                return outputs
            for delta in loop.step():
                outputs[delta.request_id] = outputs.get(delta.request_id, ()) + delta.token_ids
            loop.scheduler.check()
        raise AssertionError("the loop did not come to an end")

    return run


@dataclass(frozen=True)
class TinyModels:
    """Folders of random checkpoints of one vocabulary; the draft is the target, disturbed."""

    target: str
    draft: str
    other_vocabulary: str


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> TinyModels:
    """A target whose text does not repeat at once, and a draft that often agrees with it."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    def config(vocab: int) -> LlamaConfig:
        return LlamaConfig(
            vocab_size=vocab,
            hidden_size=64,
            intermediate_size=96,
            num_hidden_layers=2,
            num_attention_heads=8,
            num_key_value_heads=2,
            max_position_embeddings=256,
            bos_token_id=0,
            eos_token_id=1,
            initializer_range=0.2,
        )

    folder = tmp_path_factory.mktemp("tiny")
    torch.manual_seed(0)
    target = LlamaForCausalLM(config(96))
    target.save_pretrained(folder / "target")
    with torch.no_grad():
        for weight in target.parameters():
            weight.add_(torch.randn_like(weight) * 0.01)
    target.save_pretrained(folder / "draft")
    LlamaForCausalLM(config(97)).save_pretrained(folder / "other")
    return TinyModels(*(str(folder / name) for name in ("target", "draft", "other")))
