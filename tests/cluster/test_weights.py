"""Other weights for ranks that are actors: whoever comes after them has the same."""

from __future__ import annotations

import threading

import httpx
import pytest

from outrider.cluster.backend import RayBackend
from outrider.cluster.keeper import Successors
from outrider.config import EngineConfig
from outrider.engine.engine import Engine
from outrider.errors import CheckpointError, WorkerError

from ..helpers.engines import complete, engine_of, plain_outputs, random_prompts
from ..helpers.models import write_models
from ..helpers.ports import wait_for
from ..helpers.serving.kills import is_dead, kill_all

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(900)]
PROMPTS = random_prompts(4, 96)


def wanted(model):
    return plain_outputs(model, PROMPTS, {})[0]


def end(cluster, group, rank: int = 0, ranks: tuple = ()) -> None:
    process = group.reports[rank].location.process
    cluster.kill((ranks or group._ranks)[rank])
    wait_for(lambda: is_dead(process))


def test_a_rank_that_dies_is_replaced_with_the_new_weights(cluster, tiny):
    draft = {"decoding_type": "DraftTarget", "speculative_model": tiny.draft}
    options = {"executor": "ray", "tensor_parallel_size": 2, "resources": {"spare_workers": True}}
    with engine_of(tiny.target, draft, **options) as engine:
        group = engine._host.target_group
        ranks = [report.location.process for report in group.reports]
        wait_for(lambda: len(group.spares()) == 2)  # they began with the old weights
        engine.update_weights(tiny.draft)
        assert complete(engine, PROMPTS)[0] == wanted(tiny.draft)
        assert [report.location.process for report in group.reports] == ranks
        for rank in (1, 0):  # by a spare, and by a new one
            end(cluster, group, rank)
            assert complete(engine, PROMPTS)[0] == wanted(tiny.draft)
        assert engine.stats()["num_restarts"] == 2
        with pytest.raises(CheckpointError, match="another model"):
            engine.update_weights(tiny.other_vocabulary)
        assert complete(engine, PROMPTS)[0] == wanted(tiny.draft)
        assert engine.stats()["num_restarts"] == 2


def test_a_rank_that_dies_meanwhile_leaves_the_old_weights(cluster, tiny):
    options = {"executor": "ray", "tensor_parallel_size": 2}
    with engine_of(tiny.target, **options) as engine:
        group = engine._host.target_group
        load = group.load_weights

        def dies(weights):
            threading.Thread(target=end, args=(cluster, group, 1)).start()
            wait_for(lambda: not group.alive)
            load(weights)

        group.load_weights = dies
        with pytest.raises(WorkerError):
            engine.update_weights(tiny.draft)
        assert complete(engine, PROMPTS)[0] == wanted(tiny.target)
        assert engine.weights()["model"] == tiny.target


@pytest.mark.parametrize("speculative", [None, {"decoding_type": "NGram", "max_draft_len": 4}])
def test_steps_that_are_under_way_end_with_the_old_weights(cluster, tiny, speculative):
    """Steps are posted ahead here; requests go on with the new weights at a token's boundary."""
    with engine_of(tiny.target, speculative, executor="ray") as engine:
        threads = []

        def update(count, delta):
            if count in (12, 30):
                act = engine.pause if count == 30 else engine.update_weights
                given = "keep" if count == 30 else tiny.draft
                threads.append(threading.Thread(target=act, args=(given,)))
                threads[-1].start()
                while engine._inbox.empty():  # the engine waits here, and finds it then
                    threads[-1].join(0.001)
                if count == 30:
                    engine.resume()

        outputs, last = complete(engine, PROMPTS, on_delta=update)
        for thread in threads:
            thread.join()
        assert {delta.finish_reason for delta in last.values()} == {"length"}
        assert engine.weights()["model"] == tiny.draft
        for index, prompt in enumerate(PROMPTS):
            text, old = outputs[str(index)], wanted(tiny.target)[str(index)]
            same = next((n for n in range(32) if text[n] != old[n]), 31)
            begun = [[*prompt, *text[:n]] for n in range(1, same + 1)]
            ends = complete(engine, begun)[0]
            found = [ends[str(n - 1)][: 32 - n] == text[n:] for n in range(1, same + 1)]
            assert any(found), (index, same)


class Server:
    """Starts engines as replicas of one deployment do, and takes them away as a kill does."""

    def __init__(self, model: str) -> None:
        settings = {"model": model, "executor": "ray", "dtype": "float32", "num_kv_blocks": 256}
        self._config = EngineConfig.load(settings)

    def start(self) -> tuple[Engine, RayBackend]:
        backend = RayBackend(Successors("weights", "same", 60.0))
        return Engine.start(self._config, backend), backend

    def lose(self, engine: Engine, backend: RayBackend) -> None:
        engine._closed.set()
        engine._thread.join()
        engine._host.target_group._hang_up()
        backend._keeper.leave()


@pytest.mark.parametrize("rank_dies", [False, True])
def test_an_engine_takes_over_the_weights_that_its_ranks_have(cluster, tiny, rank_dies):
    server = Server(tiny.target)
    engine, backend = server.start()
    engine.update_weights(tiny.draft)
    assert complete(engine, PROMPTS)[0] == wanted(tiny.draft)
    group = engine._host.target_group
    ranks = tuple(group._ranks)
    server.lose(engine, backend)
    if rank_dies:
        end(cluster, group, ranks=ranks)
    engine, backend = server.start()
    try:
        assert engine.weights()["model"] == tiny.draft
        assert complete(engine, PROMPTS)[0] == wanted(tiny.draft)
        end(cluster, engine._host.target_group)
        assert complete(engine, PROMPTS)[0] == wanted(tiny.draft)
    finally:
        engine.shutdown()


def test_a_keeper_that_dies_is_replaced_by_one_that_knows_the_weights(cluster, tiny):
    engine, backend = Server(tiny.target).start()
    try:
        engine.update_weights(tiny.draft)
        cluster.kill(backend._keeper._keeper)
        wait_for(lambda: complete(engine, PROMPTS)[0] == wanted(tiny.draft))
        end(cluster, engine._host.target_group)
        assert complete(engine, PROMPTS)[0] == wanted(tiny.draft)
        assert engine.weights()["model"] == tiny.draft
    finally:
        engine.shutdown()


@pytest.fixture(scope="module")
def models(tokenizer_path, tmp_path_factory) -> dict[str, str]:
    return write_models(tokenizer_path, tmp_path_factory.mktemp("models"))


def test_every_engine_of_a_server(serve_port, models, tmp_path):
    """Those that are up, and those that come after them, whose workers are new, too."""
    from ray import serve

    from outrider.cluster.app import build_app

    args = {
        "model": models["target"],
        "served_model_name": "tiny",
        "dtype": "float32",
        "kv_cpu_bytes": 2**24,
        "resources": {"keep_workers_s": 0, "spare_workers": False, "cpus_per_worker": 0.5},
        "speculative_config": {"decoding_type": "NGram", "max_draft_len": 3},
        "serve": {"port": None, "num_replicas": 2},
    }
    serve.run(build_app(args), name="weights", route_prefix="/weights")
    http = httpx.Client(base_url=f"http://127.0.0.1:{serve_port}/weights", timeout=120)
    prompts = random_prompts(4, 60)

    def texts() -> list[list[int]]:
        bodies = [{"prompt": p, "temperature": 0, "max_tokens": 16, "ignore_eos": True,
                   "return_token_ids": True} for p in prompts for _ in range(3)]  # fmt: skip
        answers = [http.post("/v1/completions", json=body).json() for body in bodies]
        found = [answer["choices"][0]["token_ids"] for answer in answers]
        assert all(found[n] == found[n - n % 3] for n in range(len(found))), "engines differ"
        return found[::3]

    def wanted_of(model: str) -> list[list[int]]:
        found = plain_outputs(model, prompts, {"max_tokens": 16})[0]
        return [list(found[str(n)]) for n in range(len(prompts))]

    def served() -> list[str]:
        return [each["weights"]["model"] for each in http.get("/stats").json()["engines"]]

    assert texts() == wanted_of(models["target"])
    answer = http.post("/admin/update_weights", json={"path": models["draft"]})
    assert answer.json() == {"num_engines": 2}
    assert texts() == wanted_of(models["draft"]) != wanted_of(models["target"])
    refused = http.post("/admin/update_weights", json={"path": str(tmp_path / "none")})
    assert refused.status_code == 400
    assert "does not exist" in refused.json()["error"]["message"]
    assert served() == [models["draft"]] * 2
    kill_all("ray::ServeReplica:weights:Engine")
    wait_for(lambda: served() == [models["draft"]] * 2)
    assert texts() == wanted_of(models["draft"])
    answer = http.post("/admin/update_weights", json={"path": models["target"], "mode": "wait"})
    assert answer.json() == {"num_engines": 2}
    assert texts() == wanted_of(models["target"])
