"""Other drafters under load: over Ray, with kills, in every engine of a server."""

from __future__ import annotations

import threading
from typing import Any

import httpx
import pytest

from outrider.cluster.backend import RayBackend
from outrider.cluster.keeper import Successors
from outrider.config import EngineConfig
from outrider.engine.engine import Engine
from outrider.engine.weights import DrafterChange
from outrider.errors import CheckpointError, ConfigError, OutriderError
from outrider.scheduler.sampling import SamplingParams
from outrider.scheduler.types import Request, ints

from ..helpers.eagle import section as eagle_section
from ..helpers.engines import collect_all, complete, engine_of, plain_outputs, random_prompts
from ..helpers.head_files import eagle_tensors, write_eagle
from ..helpers.models import write_guessable, write_models
from ..helpers.ports import wait_for
from ..helpers.serving.kills import is_dead, kill_all

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(900)]
PROMPTS = random_prompts(6, 96)
NGRAM = {"decoding_type": "NGram", "max_draft_len": 3}


def wanted(model: str) -> Any:
    return plain_outputs(model, PROMPTS, {})[0]


@pytest.fixture(scope="module")
def guessable(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("guessable")
    one = write_guessable(folder / "one", num_layers=3)
    heads = {
        name: write_eagle(folder / name, *eagle_tensors(one, 3, seed=seed))
        for seed, name in enumerate(("head", "other"))
    }
    return {"one": one, **heads}


def head(folder: str, **keys: Any) -> dict[str, Any]:
    return {**eagle_section(folder, max_draft_len=3, **keys), "decoding_type": "Eagle3"}


class Load:
    """Requests one after the other in several threads, each compared with plain decoding."""

    def __init__(self, engine: Engine, model: str, threads: int = 2) -> None:
        self._engine, self._wanted = engine, wanted(model)
        self._ended = threading.Event()
        self.num_rounds, self.wrong = 0, list[Any]()
        self._threads = [threading.Thread(target=self._run, args=(n,)) for n in range(threads)]

    def __enter__(self) -> Load:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        for thread in self._threads:
            thread.join()

    def after_a_round(self) -> None:
        before = self.num_rounds
        wait_for(lambda: self.num_rounds > before + 1, 120)

    def _run(self, number: int) -> None:
        params = SamplingParams(temperature=0.0, max_tokens=32, ignore_eos=True)
        while not self._ended.is_set():
            mark = f"{number}-{self.num_rounds}-"
            requests = [
                Request(f"{mark}{n}", ints(prompt), params, seed=n)
                for n, prompt in enumerate(PROMPTS)
            ]
            outputs, last = collect_all(self._engine, requests)
            reasons = {delta.finish_reason for delta in last.values()}
            found = {name.removeprefix(mark): tokens for name, tokens in outputs.items()}
            if reasons != {"length"} or found != self._wanted:
                self.wrong.append((reasons, found))
            self.num_rounds += 1


def test_changes_under_load(cluster, guessable):
    one = guessable["one"]
    options = {"executor": "ray", "tensor_parallel_size": 2}
    options["resources"] = {"cpus_per_worker": 0.25, "spare_workers": False}
    draft = {"decoding_type": "DraftTarget", "speculative_model": one, "max_draft_len": 2}
    sections = [
        head(guessable["other"]),
        head(guessable["head"]),
        NGRAM,
        head(guessable["other"], placement="separate"),
        head(guessable["head"], placement="separate"),
        {**draft, "placement": "colocated"},
        draft,
        {"decoding_type": "Compose", "members": [NGRAM, draft]},
        {"decoding_type": "None"},
        {"decoding_type": "Suffix"},
    ]
    with engine_of(one, NGRAM, **options) as engine, Load(engine, one) as load:
        sections.append(sections[0])
        for section in sections:
            engine.change_drafters(DrafterChange(whole=section))
            load.after_a_round()
            with pytest.raises((CheckpointError, ConfigError)):  # of several in the ranks, one
                engine.change_drafters(DrafterChange(head(one)))
    assert load.wrong == []
    assert engine.stats()["num_restarts"] == 0
    assert engine.drafters()["num_changes"] == len(sections)


@pytest.mark.parametrize("placement", ["colocated", "separate"])
def test_a_kill_after_a_change_and_during_one(cluster, guessable, placement):
    one = guessable["one"]
    options = {"executor": "ray", "resources": {"cpus_per_worker": 0.25}}
    section = head(guessable["head"], placement=placement)
    with engine_of(one, NGRAM, **options) as engine, Load(engine, one) as load:
        engine.change_drafters(DrafterChange(whole=section))
        target = engine._host.target_group
        for group in (target, *(each for _, each in engine._host._apart)):
            process = group.reports[0].location.process
            cluster.kill(group._ranks[0])
            wait_for(lambda process=process: is_dead(process))
            load.after_a_round()

        def accepted() -> int:
            return engine.stats()["drafters"]["eagle3"]["num_acc_tokens"]

        before = accepted()
        wait_for(lambda: accepted() > before, 60)
        assert engine.weights()["drafter"] == guessable["head"]
        change = target.change_drafters

        def dies(drafters: Any) -> None:
            cluster.kill(target._ranks[0])
            wait_for(lambda: not target.alive)
            change(drafters)

        target.change_drafters = dies
        with pytest.raises(OutriderError):
            engine.change_drafters(DrafterChange(whole=head(guessable["other"])))
        load.after_a_round()
        assert engine.weights()["drafter"] == guessable["head"]
    assert load.wrong == []


@pytest.mark.parametrize("first", [NGRAM, "draft"])
def test_an_engine_takes_over_ranks_that_draft_otherwise(cluster, guessable, first):
    """It has the drafters of its configuration, until somebody tells it others."""
    one = guessable["one"]
    draft = {"decoding_type": "DraftTarget", "speculative_model": one, "placement": "colocated"}
    settings = {"model": one, "executor": "ray", "dtype": "float32", "num_kv_blocks": 256}
    settings["speculative_config"] = draft if first == "draft" else first
    settings["resources"] = {"cpus_per_worker": 0.25, "spare_workers": False}
    config = EngineConfig.load(settings)

    def start() -> tuple[Engine, RayBackend]:
        backend = RayBackend(Successors("swap", str(first), 60.0))
        return Engine.start(config, backend), backend

    apart = head(guessable["head"], placement="separate")
    members = [head(guessable["other"]), apart]
    change = DrafterChange(whole={"decoding_type": "Compose", "members": members})
    engine, backend = start()
    engine.change_drafters(change)
    assert complete(engine, PROMPTS)[0] == wanted(one)
    ranks = [each.location.process for each in engine._host.target_group.reports]
    engine._closed.set()
    engine._thread.join()
    for group in (engine._host.target_group, *(each for _, each in engine._host._apart)):
        group._hang_up()
    backend._keeper.leave()
    engine, backend = start()
    try:
        assert complete(engine, PROMPTS)[0] == wanted(one)
        assert [each["decoding_type"] for each in engine.drafters()["drafters"]] == [
            config.speculative_config.decoding_type
        ]
        engine.change_drafters(change)
        backend.retain()
        assert complete(engine, PROMPTS)[0] == wanted(one)
        assert [each.location.process for each in engine._host.target_group.reports] == ranks
        assert engine.stats()["num_restarts"] == 0
    finally:
        engine.shutdown()


@pytest.fixture(scope="module")
def models(tokenizer_path, tmp_path_factory) -> dict[str, str]:
    return write_models(tokenizer_path, tmp_path_factory.mktemp("models"))


def test_every_engine_of_a_server(serve_port, models, tmp_path):
    """Those that are up, and those that come after them; streams that run do not notice."""
    from ray import serve

    from outrider.cluster.app import build_app

    args = {
        "model": models["target"],
        "served_model_name": "tiny",
        "dtype": "float32",
        "kv_cpu_bytes": 2**24,
        "resources": {"keep_workers_s": 0, "spare_workers": False, "cpus_per_worker": 0.25},
        "speculative_config": NGRAM,
        "serve": {"port": None, "num_replicas": 2},
    }
    serve.run(build_app(args), name="swap", route_prefix="/swap")
    http = httpx.Client(base_url=f"http://127.0.0.1:{serve_port}/swap", timeout=120)
    prompts = random_prompts(4, 60)

    def texts() -> list[list[int]]:
        bodies = [{"prompt": p, "temperature": 0, "max_tokens": 16, "ignore_eos": True,
                   "return_token_ids": True} for p in prompts for _ in range(3)]  # fmt: skip
        answers = [http.post("/v1/completions", json=body).json() for body in bodies]
        return [answer["choices"][0]["token_ids"] for answer in answers]

    found = plain_outputs(models["target"], prompts, {"max_tokens": 16})[0]
    plain = [list(found[str(n)]) for n in range(len(prompts)) for _ in range(3)]

    def served() -> list[list[str]]:
        engines = http.get("/admin/drafters").json()["engines"]
        return [[each["name"] for each in engine["drafters"]] for engine in engines]

    wrong, ended = [], threading.Event()

    def load() -> None:
        while not ended.is_set():
            if texts() != plain:
                wrong.append(1)

    thread = threading.Thread(target=load)
    thread.start()
    try:
        draft = {"decoding_type": "DraftTarget", "speculative_model": models["draft"]}
        for body, names in (
            ({"drafter": {**draft, "placement": "colocated"}}, ["ngram", "draft_target"]),
            ({"drafter": draft, "replaces": "draft_target"}, ["ngram", "draft_target"]),
        ):
            answer = http.post("/admin/drafters", json=body)
            assert answer.json() == {"num_engines": 2, "drafters": names}
            assert served() == [names] * 2
        bad = http.post("/admin/drafters", json={"drafter": {**draft, "speculative_model": "/no"}})
        assert (bad.status_code, served()) == (400, [names] * 2)
        code = {"decoding_type": "User", "drafter": "os:system"}
        assert http.post("/admin/drafters", json={"drafter": code}).status_code == 400
        kill_all("ray::ServeReplica:swap:Engine")
        wait_for(lambda: served() == [names] * 2, 120)
        assert http.delete("/admin/drafters/ngram").json()["drafters"] == ["draft_target"]

        def listed() -> list[str]:
            return http.get("/v1/models").json()["data"][0]["drafters"]

        wait_for(lambda: listed() == ["draft_target"])  # other ingresses with their health checks
        assert http.delete("/admin/drafters/ngram").status_code == 400
    finally:
        ended.set()
        thread.join()
    assert wrong == []
    assert texts() == plain
