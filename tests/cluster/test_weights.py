"""Other weights for ranks that are actors: whoever comes after them has the same."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import pytest
from safetensors.torch import load_file

from outrider.cluster.backend import RayBackend
from outrider.cluster.keeper import Successors
from outrider.config import EngineConfig
from outrider.engine.engine import Engine
from outrider.errors import CheckpointError, WorkerError
from outrider.workers.collective import TrainerGroup

from ..helpers.engines import complete, engine_of, plain_outputs, random_prompts
from ..helpers.models import write_models
from ..helpers.ports import free_port, wait_for
from ..helpers.serving.kills import below, is_dead, kill, kill_all

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


Post = Callable[[str, dict[str, Any]], tuple[int, dict[str, Any]]]


class Trainer:
    """Rank 0 of a process group with every engine of a server, which is told by `post`."""

    def __init__(self, post: Post, num_engines: int) -> None:
        self._post, port = post, free_port()
        place: dict[str, Any] = {"master_address": "127.0.0.1", "master_port": port}
        size = 1 + num_engines
        with ThreadPoolExecutor() as pool:
            made = pool.submit(TrainerGroup, "127.0.0.1", port, size, timeout_s=300.0)
            status, answer = post("/init_weights_update_group", {**place, "world_size": size})
            assert (status, answer.get("num_engines")) == (200, num_engines), answer
            self._group = made.result()

    def send(
        self, model: str, before: Callable[[], None], after: Callable[[], None]
    ) -> tuple[int, dict[str, Any]]:
        """What the server answers; the calls are made before the first byte, and after the last."""
        state = load_file(Path(model, "model.safetensors"))
        dtypes, shapes = zip(*((str(each.dtype), [*each.shape]) for each in state.values()))
        body = {"names": [*state], "dtypes": dtypes, "shapes": shapes}
        with ThreadPoolExecutor() as pool:
            answer = pool.submit(self._post, "/update_weights_from_distributed", body)
            before()
            with suppress(RuntimeError):  # an engine is gone
                self._group.send(state)
            after()
            return answer.result()


def test_every_engine_of_a_server(serve_port, models, tmp_path):
    """Those that are up, and those that come after them, whose workers are new, too.

    From a folder and from a trainer, over HTTP and by the application's handle; an engine that is
    killed on the way costs no request, and leaves all with the old weights or all with the new.
    """
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
    handle = serve.run(build_app(args), name="weights", route_prefix="/weights")
    http = httpx.Client(
        base_url=f"http://127.0.0.1:{serve_port}/weights", timeout=280
    )  # < the group's
    prompts = random_prompts(4, 60)
    replicas = "ray::ServeReplica:weights:Engine"

    def body_of(prompt: list[int]) -> dict[str, Any]:
        return {"prompt": prompt, "temperature": 0, "max_tokens": 16, "ignore_eos": True,
                "return_token_ids": True}  # fmt: skip

    def texts() -> list[list[int]]:
        answers = [http.post("/v1/completions", json=body_of(p)).json()
                   for p in prompts for _ in range(3)]  # fmt: skip
        found = [answer["choices"][0]["token_ids"] for answer in answers]
        assert all(found[n] == found[n - n % 3] for n in range(len(found))), "engines differ"
        return found[::3]

    def wanted_of(model: str) -> list[list[int]]:
        found = plain_outputs(model, prompts, {"max_tokens": 16})[0]
        return [list(found[str(n)]) for n in range(len(prompts))]

    def served(key: str = "model") -> list[str]:
        engines = http.get("/stats").json()["engines"]
        return sorted(str(each["weights"].get(key)) for each in engines)

    def by_http(path: str, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        answer = http.post(path, json=body)
        return answer.status_code, answer.json()

    def by_handle(path: str, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        answer = handle.post.remote(path, body).result()
        return answer["status"], answer["body"]

    answers: list[list[int]] = []  # of requests that come all the time
    is_over = threading.Event()

    def load(prompt: list[int]) -> None:
        while not is_over.is_set():
            status, answer = by_http("/v1/completions", body_of(prompt))
            assert status == 200, answer
            answers.append([*prompt, *answer["choices"][0]["token_ids"]])

    def kill_one() -> None:
        kill(below(replicas)[0])

    def engines_receive() -> None:
        """Steps, and so answers, wait for the trainer."""
        count = -1
        while count != len(answers):
            count = len(answers)
            time.sleep(1.0)

    def nothing() -> None: ...

    def in_the_middle() -> None:
        engines_receive()
        kill_one()

    old, new = wanted_of(models["target"]), wanted_of(models["draft"])
    assert texts() == old != new
    for post, before, after in (
        (by_http, nothing, nothing),
        (by_handle, nothing, nothing),
        (by_http, in_the_middle, nothing),
        (by_handle, nothing, kill_one),
    ):
        wait_for(lambda: http.get("/get_world_size").json()["world_size"] == 2)
        trainer = Trainer(post, 2)
        answers.clear()
        is_over.clear()
        with ThreadPoolExecutor() as pool:
            loads = [pool.submit(load, prompt) for prompt in prompts]
            status, answer = trainer.send(models["draft"], before, after)
            is_over.set()
            for each in loads:
                each.result()
        found, reason = texts(), answer.get("error", {"message": ""})["message"]
        is_new = status == 200 or "are served, but not by every engine" in reason
        if status != 200:
            assert in_the_middle is before or kill_one is after
            assert "1 of 2 engines did not answer" in reason
        assert found == (new if is_new else old), (status, reason)
        wait_for(lambda: len(below(replicas)) == 2 == len(served()), 240)
        assert texts() == found
        lacking = "lost" if after is kill_one else "served"
        assert served("sent") == (sorted([lacking, "served"]) if is_new else ["None"] * 2)
        answer = http.post("/admin/update_weights", json={"path": models["target"]})
        assert answer.json() == {"num_engines": 2}
        assert texts() == old
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
