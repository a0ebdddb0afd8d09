"""Requests and tokens between an ingress and engines, here in one process: loss, replay, choice."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import ExitStack, asynccontextmanager
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from outrider.cluster.serve import edge, engines, serve_client
from outrider.cluster.serve.edge import EdgeLink, EngineDoor, FromEngine
from outrider.cluster.serve.engines import EngineLink, Engines
from outrider.cluster.serve.models import WeightsBoard, WeightsNote
from outrider.cluster.serve.replica import WeightsFollower
from outrider.cluster.serve.resume_tokens import TokenStore
from outrider.cluster.serve.serve_client import ServeClient
from outrider.engine.weights import DrafterChange, sent_weights
from outrider.errors import (
    CheckpointError,
    ConfigError,
    EngineDeadError,
    InvalidRequestError,
    OverloadedError,
    WorkerError,
)
from outrider.scheduler.sampling import SamplingParams
from outrider.scheduler.types import Delta, Request, ints
from outrider.workers.collective import TrainerGroup
from outrider.workers.spec import SentWeights, TrainerLink
from outrider.workers.transport import framing

from ...helpers.engines import complete, engine_of, plain_outputs, random_prompts
from ...helpers.ports import wait_for

TEXT = "the cat sat on the mat. "


def request(max_tokens: int = 12, name: str = "r", prompt: int = 2) -> Request:
    params = SamplingParams(max_tokens=max_tokens)
    return Request(name, ints(range(5, 5 + prompt)), params, seed=1)


class Cluster:
    """Engines with their doors, as Serve would list them, and an ingress's view of them."""

    def __init__(self, make_engine: Callable[..., Any]) -> None:
        self._make = make_engine
        self.doors: dict[str, EngineDoor] = {}
        self.engines: Engines

    def add(self, name: str, *, node: str = "node", host: str = "127.0.0.1") -> Any:
        """Another engine."""
        engine = self._make(TEXT, num_per_step=3)
        store = TokenStore(60.0)
        self.doors[name] = EngineDoor(engine, store, engine.stats, host, node)
        self.list()
        return engine

    def remove(self, name: str) -> EngineDoor:
        """Serve lists it no more; it goes on."""
        door = self.doors.pop(name)
        self.list()
        return door

    def list(self) -> None:
        self.engines.update({name: door.address for name, door in self.doors.items()})


@asynccontextmanager
async def cluster(make_engine: Callable[..., Any], **limits: Any) -> AsyncIterator[Cluster]:
    found = Cluster(make_engine)
    found.engines = Engines(None, "node", **limits)
    try:
        yield found
    finally:
        found.engines.close()
        for door in found.doors.values():
            door.shutdown()


async def until(condition: Callable[[], bool]) -> None:
    for _ in range(2000):
        if condition():
            return
        await asyncio.sleep(0.005)
    raise AssertionError("it never came")


async def all_of(client: ServeClient, wanted: Request) -> list[Delta]:
    return [delta async for delta in client.generate(wanted)]


def tokens(deltas: list[Delta]) -> list[int]:
    return [token for delta in deltas for token in delta.token_ids]


class Board(WeightsBoard):
    """One in this process."""

    def __init__(self) -> None:
        super().__init__("", "")
        self.notes: list[WeightsNote] = []

    def read(self) -> WeightsNote | None:
        return self.notes[-1] if self.notes else None

    def write(self, note: WeightsNote) -> None:
        self.notes.append(note)


class Flaw:
    """What goes wrong with the second message for a request."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.kinds: list[str] = []
        self.counts: Counter[str] = Counter()  # messages by request
        self.seen: list[str] = []
        deliver = EdgeLink.deliver
        flaw = self

        def flawed(link: EdgeLink, deltas: list[Delta]) -> None:
            flaw.counts[deltas[0].request_id] += 1
            if flaw.counts[deltas[0].request_id] != 2 or not flaw.kinds:
                deliver(link, deltas)
                return
            kind = flaw.kinds.pop(0)
            flaw.seen.append(kind)
            frame = framing.frame(FromEngine(1, deltas).encoded())
            if kind == "garbled":
                link._socket.sendall(framing.frame(b"no deltas"))
            elif kind == "cut":
                link._socket.sendall(frame[: len(frame) // 2])
                link._socket.shutdown(socket.SHUT_RDWR)
            elif kind == "dies":
                link.close()
            else:
                link._door.engine._running.clear()  # type: ignore[attr-defined]
                failure = (deltas[0].request_id, EngineDeadError.__name__, "rank 0", None)
                link._send(failures=[failure])

        monkeypatch.setattr(EdgeLink, "deliver", flawed)
        monkeypatch.setattr(engines, "_RETRY_S", 0.01)
        monkeypatch.setattr(serve_client, "_BACKOFF_S", 0.001)


@pytest.mark.parametrize("node", ["node", "another"])
def test_a_lost_engine_costs_no_token(
    make_engine: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, node: str
) -> None:
    """Whichever way it is lost, by the Unix socket and by TCP."""
    flaw = Flaw(monkeypatch)

    async def main() -> None:
        async with cluster(make_engine) as here:
            submitted = [here.add(name, node=node).submitted for name in "ab"]
            client = ServeClient(here.engines, None)
            whole = await all_of(client, request())
            assert len(tokens(whole)) == 12
            ways = (
                ["dies"], ["cut"], ["garbled"], ["dead"], ["dies", "cut"],
                ["garbled", "dead", "dies"],
            )  # fmt: skip
            for kinds in ways:
                flaw.kinds, flaw.seen = [*kinds], []
                for each in submitted:
                    each.clear()
                # A name of its own: the last one's abort may still be on its way.
                name = "-".join(kinds)
                deltas = await all_of(client, request(name=name))
                assert flaw.seen == kinds
                assert tokens(deltas) == tokens(whole)
                assert {delta.request_id for delta in deltas} == {name}
                assert deltas[-1].finish_reason == "length"
                assert deltas[-1].usage == whole[-1].usage, "statistics sum over the engines"
                sent = [each for engine in submitted for each in engine]
                assert len({each.id for each in sent}) == len(sent) == len(kinds) + 1
                # By its number: a connection may be lost with the tokens that were on their way.
                last = max(sent, key=lambda each: int(each.id.partition(".")[2] or 0))
                assert last.was_accepted, "a full queue does not refuse it"
            flaw.kinds = ["dies"] * 4
            with pytest.raises(EngineDeadError, match="lost on 4"):
                await all_of(client, request(60, "last"))

    asyncio.run(main())


@pytest.mark.parametrize("error", [InvalidRequestError("bad", field="x"), OverloadedError("full")])
def test_what_is_wrong_everywhere_is_not_replayed(
    make_engine: Callable[..., Any], error: Any
) -> None:
    async def main() -> None:
        async with cluster(make_engine) as here:
            here.add("a").refuse = error
            with pytest.raises(type(error)) as caught:
                await all_of(ServeClient(here.engines, None), request())
            assert (caught.value.message, caught.value.field) == (error.message, error.field)
            await until(lambda: here.doors["a"].num_requests == 0)

    asyncio.run(main())


def test_a_failed_step_and_a_fault_name_their_reason(make_engine: Callable[..., Any]) -> None:
    async def main() -> None:
        async with cluster(make_engine) as here:
            engine = here.add("a")
            client = ServeClient(here.engines, None)
            engine.error = "the step failed: x"
            with pytest.raises(WorkerError, match="the step failed: x"):
                await all_of(client, request())
            engine.error, engine.refuse = None, ValueError("no such thing")
            with pytest.raises(Exception, match="failed to handle this request: ValueError"):
                await all_of(client, request())
            engine.refuse = None
            assert len(tokens(await all_of(client, request()))) == 12

    asyncio.run(main())


def test_every_engine_resets_its_prefix_cache(make_engine: Callable[..., Any]) -> None:
    async def main() -> None:
        async with cluster(make_engine) as here:
            engines = [
                here.add(name, node=node) for name, node in (("a", "node"), ("b", "elsewhere"))
            ]
            client = ServeClient(here.engines, None)
            await until(lambda: len(here.engines.links) == 2)
            assert await client.tell("reset_prefix_cache") == 2
            assert [engine.num_resets for engine in engines] == [1, 1]
            engines[1].dead = True
            with pytest.raises(EngineDeadError, match="1 of 2 engines did not answer"):
                await client.tell("reset_prefix_cache")

    asyncio.run(main())


def test_every_engine_gets_the_new_weights_or_none(make_engine: Callable[..., Any]) -> None:
    async def main() -> None:
        async with cluster(make_engine) as here:
            board = Board()
            client = ServeClient(here.engines, None, board=board)
            with pytest.raises(EngineDeadError, match="no engine is up"):
                await client.update_weights("/a", "", "keep")
            engines = [here.add("a"), here.add("b", node="elsewhere")]
            for door in here.doors.values():
                door.verbs["update_weights"] = WeightsFollower(door.engine, board).answer
            await until(lambda: len(here.engines.links) == 2)
            assert await client.update_weights("/a", "", "wait") == 2
            assert await client.update_weights("", "/b", "keep") == 2
            assert [engine.updates for engine in engines] == [
                [("/a", "", "wait"), ("/a", "/b", "keep")]
            ] * 2
            engines[1].refuse = CheckpointError.at("weights", "no such folder here")
            with pytest.raises(CheckpointError, match="no such folder here") as caught:
                await client.update_weights("/c", "", "keep")
            assert caught.value.field == "weights"
            assert [len(engine.updates) for engine in engines] == [2, 2]
            assert len(board.notes) == 2
            engines[1].refuse = None
            assert await client.tell("pause", "wait") == 2
            assert engines[0].pauses == engines[1].pauses == ["wait"]
            assert await client.tell("resume") == 2
            engines[1].dead = True
            with pytest.raises(EngineDeadError):
                await client.update_weights("/c", "", "keep")

    asyncio.run(main())


class Trainer:
    """Sends the weights of folders to all ranks, in threads beside the engines' calls."""

    def __init__(self, client: ServeClient, world_size: int, timeout_s: float = 60.0) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = int(probe.getsockname()[1])
        self.client, self._world_size, self._timeout_s = client, world_size, timeout_s
        self.group: TrainerGroup

    async def join(self) -> int:
        def make() -> None:
            self.group = TrainerGroup(
                "127.0.0.1", self.port, self._world_size, timeout_s=self._timeout_s
            )

        link = TrainerLink(
            "weights", "127.0.0.1", self.port, 1, self._world_size, timeout_s=self._timeout_s
        )
        count, _ = await asyncio.gather(self.client.link_trainer(link), asyncio.to_thread(make))
        return count

    async def send(self, folder: str, **changes: Any) -> int:
        state = load_file(Path(folder, "model.safetensors"))
        given = {
            "names": [*state],
            "dtypes": [each.dtype for each in state.values()],
            "shapes": [each.shape for each in state.values()],
            **changes,
        }
        sending = asyncio.to_thread(self.group.send, {} if changes else state)
        sent = sent_weights("weights", **given)
        taken, _ = await asyncio.gather(
            self.client.take_weights(sent, "keep"), sending, return_exceptions=True
        )
        if isinstance(taken, BaseException):
            raise taken
        return taken


def test_a_trainer_sends_weights_to_several_engines(tiny: Any) -> None:
    """All take them or none does, and whoever loses them serves nothing until they come again."""
    prompts = random_prompts(4, 96)
    params = SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True)
    new, old = (
        [
            list(each)
            for _, each in sorted(plain_outputs(model, prompts, {"max_tokens": 24})[0].items())
        ]
        for model in (tiny.draft, tiny.target)
    )
    assert new != old
    stack = ExitStack()

    def make(*_: Any, **__: Any) -> Any:
        engine = stack.enter_context(engine_of(tiny.target))
        made.append(engine)
        return engine

    made: list[Any] = []
    num_runs = count()

    async def main() -> None:
        async with cluster(make) as here:
            board = Board()
            client = ServeClient(here.engines, None, board=board)

            async def served(*, by: set[Any]) -> list[list[int]]:
                before = [each.stats()["requests"]["num_finished"] for each in made]
                run = next(num_runs)
                wanted = [
                    Request(f"{run}-{at}", ints(prompt), params, seed=1)
                    for at, prompt in enumerate(prompts)
                ]
                found = await asyncio.gather(*(all_of(client, each) for each in wanted))
                after = [each.stats()["requests"]["num_finished"] for each in made]
                assert {e for e, b, a in zip(made, before, after, strict=True) if a > b} == by
                return [tokens(each) for each in found]

            one, two = here.add("a"), here.add("b", node="elsewhere")
            followers = {}
            for name, door in here.doors.items():
                followers[name] = WeightsFollower(door.engine, board)
                door.verbs["update_weights"] = followers[name].answer
            await until(lambda: len(here.engines.links) == 2)
            assert await served(by={one, two}) == old
            with pytest.raises(InvalidRequestError, match="ranks 1 to 2 of 2 engines, in a group"):
                await client.link_trainer(TrainerLink("weights", "127.0.0.1", 1, 1, 2))
            trainer = Trainer(client, 3)
            assert await trainer.join() == 2
            with pytest.raises(ConfigError, match="engine a: .*nothing") as refused:
                await trainer.send(tiny.draft, names=["nothing"], dtypes=["float32"], shapes=[[1]])
            assert refused.value.field == "names"
            assert await trainer.send(tiny.draft) == 2
            assert await served(by={one, two}) == new
            assert [each.stats()["weights"]["sent"] for each in made] == ["served"] * 2

            # A rank is replaced: its engine's requests go to the other.
            two._inbox.put(lambda: two._recover(WorkerError("lost")))
            await until(lambda: not all(link.is_able for link in here.engines.links))
            assert await served(by={one}) == new
            await client.check()
            await until(lambda: two.lacks_weights)
            await client.tell("resume")  # of pauses, and not with the folder's weights
            assert two.lacks_weights
            assert await served(by={one}) == new
            trainer.group.close()
            again = Trainer(client, 3)
            assert await again.join() == 2
            assert await again.send(tiny.draft) == 2
            await until(lambda: all(link.is_able for link in here.engines.links))
            assert await served(by={one, two}) == new

            # An engine that comes later has none; the one whose ranks stay has them.
            with engine_of(tiny.target) as late:
                follower = WeightsFollower(late, board)
                follower.follow(starts=True)
                assert not late.lacks_weights, "it decodes a token first"
                follower.settle()
                assert late.lacks_weights
                WeightsFollower(late, Board()).follow()
                assert late.lacks_weights
            two._serve_sent(None)
            WeightsFollower(two, board).follow()
            assert await served(by={one, two}) == new

            # Folders go on, and end it.
            assert await client.update_weights(tiny.target, "", "keep") == 2
            assert board.read().sent == ""
            assert await served(by={one, two}) == old

    with stack:
        asyncio.run(main())


@pytest.mark.parametrize("has_them", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_an_engine_that_dies_as_weights_come_costs_the_others_none(
    tiny: Any, monkeypatch: pytest.MonkeyPatch, has_them: bool
) -> None:
    """Once it has received them, or before: then the trainer waits for it as long as it may."""
    monkeypatch.setattr(engines, "_RETRY_S", 60.0)

    async def main() -> None:
        with ExitStack() as stack:
            async with cluster(
                lambda *_, **__: stack.enter_context(engine_of(tiny.target))
            ) as here:
                board = Board()
                client = ServeClient(here.engines, None, board=board)
                with pytest.raises(EngineDeadError, match="no engine is up"):
                    await client.link_trainer(TrainerLink("weights"))
                one, two = here.add("a"), here.add("b")
                for door in here.doors.values():
                    door.verbs["update_weights"] = WeightsFollower(door.engine, board).answer
                await until(lambda: len(here.engines.links) == 2)
                trainer = Trainer(client, 3, timeout_s=60.0 if has_them else 10.0)
                assert await trainer.join() == 2
                take = here.doors["b"].verbs["take_weights"]

                def dies(*sent: Any) -> Any:
                    if SentWeights(*sent).until == "stage":
                        if has_them:
                            take(*sent)
                        for link in [*here.doors["b"]._links]:
                            link.close()
                        return None
                    return take(*sent)

                here.doors["b"].verbs["take_weights"] = dies
                with pytest.raises(EngineDeadError, match="1 of 2 engines did not answer: b"):
                    await trainer.send(tiny.draft)
                assert board.notes == []
                prompts = random_prompts(2, 96)
                assert complete(one, prompts)[0] == plain_outputs(tiny.target, prompts, {})[0]
                assert one.stats()["weights"] == two.stats()["weights"]
                assert not one.take_sent("dropped"), "what was staged is gone"

    asyncio.run(main())


def test_engines_join_a_trainer_in_the_order_of_their_names(
    make_engine: Callable[..., Any],
) -> None:
    async def main() -> None:
        async with cluster(make_engine) as here:
            client = ServeClient(here.engines, None, board=Board())
            engines = {name: here.add(name) for name in ("c", "a", "b")}
            await until(lambda: len(here.engines.links) == 3)
            link = TrainerLink("weights", "trainer", 5, 3, 9)
            assert await client.link_trainer(link) == 3
            offsets = [engines[name].links[0].rank_offset for name in "abc"]
            assert offsets == [3, 5, 7], "each has two ranks"
            assert await client.link_trainer(TrainerLink("weights")) == 3
            engines["b"].refuse = ConfigError.at("master_address", "no process group")
            with pytest.raises(ConfigError, match="engine b: no process group") as refused:
                await client.link_trainer(link)
            assert refused.value.field == "master_address"
            assert engines["a"].links[-1].host == "", "it left again"
            sent = sent_weights("weights", ["x"], ["torch.float32"], [[1]])
            with pytest.raises(ConfigError, match="engine b"):
                await client.take_weights(sent, "keep")
            assert engines["a"].sent[-1] == ("dropped", "")
            assert not any(each.sent[-1][0] == "taken" for each in engines.values() if each.sent)
            engines["b"].refuse = None
            for door in here.doors.values():
                follower = WeightsFollower(door.engine, client.board)
                door.verbs["update_weights"] = follower.answer
            assert await client.take_weights(sent, "wait") == 3
            assert {each.sent[-1] for each in engines.values()} == {
                ("taken", client.board.read().sent)
            }

    asyncio.run(main())


def test_a_request_that_is_given_back_on_its_way_runs_nowhere_else(
    make_engine: Callable[..., Any],
) -> None:
    """As where its grammar is being compiled while its engine loses its weights."""

    async def main() -> None:
        async with cluster(make_engine) as here:
            engine, held = here.add("a"), []
            engine.gate.clear()
            post, engine.post = engine.post, lambda *given: held.append(given)
            await until(lambda: len(here.engines.links) == 1)
            asked = asyncio.create_task(all_of(ServeClient(here.engines, None), request()))
            await until(lambda: len(held) == 1)
            engine.lacks_weights = True
            for changed in engine.on_lack:
                changed()
            await until(lambda: not here.engines.links[0].is_able)
            post(*held[0])
            assert len(engine.submitted) == 1
            assert not engine.stats()["running"]
            engine.post, engine.lacks_weights = post, False
            for changed in engine.on_lack:
                changed()
            engine.gate.set()
            assert len(tokens(await asked)) == 12

    asyncio.run(main())


def test_requests_go_on_elsewhere_while_an_engine_replaces_its_workers(
    make_engine: Callable[..., Any],
) -> None:
    """As where a node is lost that another engine does not need; without one, they wait."""

    async def main() -> None:
        async with cluster(make_engine) as here:
            client = ServeClient(here.engines, None)
            late = here.add("late")
            await until(lambda: len(here.engines.links) == 1)
            late.free_steps = 2
            running = asyncio.create_task(all_of(client, request(30)))
            await until(lambda: not late.gate.is_set())

            def turn(lacks: bool) -> None:
                late.lacks_workers = lacks
                for changed in late.on_lack:
                    changed()

            turn(True)
            await until(lambda: here.engines.links[0].is_late)
            waiting = asyncio.create_task(all_of(client, request(12, "waits")))
            await until(lambda: len(late.submitted) == 2)
            assert not running.done(), "there is no other engine"
            other = here.add("other")
            deltas = await running
            assert len(tokens(deltas)) == 30
            assert tokens(deltas)[:6] == other.submitted[0].emitted.tolist()
            assert len(tokens(await waiting)) == 12
            assert len(tokens(await all_of(client, request(12, "new")))) == 12
            assert [each.id for each in other.submitted] == ["r.1", "waits.1", "new"]
            late.gate.set()
            turn(False)
            await until(lambda: all(link.is_able for link in here.engines.links))
            assert len(late.submitted) == 2

    asyncio.run(main())


def test_new_requests_do_not_wait_for_workers_that_are_replaced(
    make_engine: Callable[..., Any],
) -> None:
    """What runs there stays; where no other engine has room, new ones wait there as well."""

    async def main() -> None:
        async with cluster(make_engine, max_each=1, max_waiting=0) as here:
            client = ServeClient(here.engines, None)
            hit = here.add("hit")
            await until(lambda: len(here.engines.links) == 1)

            async def turn(recovers: bool) -> None:
                hit.is_recovering = recovers
                for changed in hit.on_lack:
                    changed()
                here_is = here.engines.links[0]
                await until(lambda: here_is.is_recovering == recovers)

            await turn(True)
            hit.gate.clear()
            alone = asyncio.create_task(all_of(client, request(12, "alone")))
            await until(lambda: len(hit.submitted) == 1)
            other = here.add("other")
            await until(lambda: len(here.engines.links) == 2)
            assert len(tokens(await all_of(client, request(12, "new")))) == 12
            assert [each.id for each in other.submitted] == ["new"]
            assert not alone.done(), "it waits where it is"
            hit.gate.set()
            assert len(tokens(await alone)) == 12
            other.gate.clear()
            busy = asyncio.create_task(all_of(client, request(12, "busy")))
            await until(lambda: len(other.submitted) == 2)
            assert len(tokens(await all_of(client, request(12, "more")))) == 12
            assert [each.id for each in hit.submitted] == ["alone", "more"]
            other.gate.set()
            await busy
            await turn(False)
            assert all(link.is_able for link in here.engines.links)

    asyncio.run(main())


def test_every_engine_gets_the_new_drafters_or_all_go_back(make_engine: Callable[..., Any]) -> None:
    ngram, suffix = {"decoding_type": "NGram"}, {"decoding_type": "Suffix"}

    async def main() -> None:
        async with cluster(make_engine) as here:
            board = Board()
            client = ServeClient(here.engines, None, board=board)
            with pytest.raises(EngineDeadError, match="no engine is up"):
                await client.change_drafters(DrafterChange(ngram))
            engines = [here.add("a"), here.add("b", node="elsewhere")]
            for door in here.doors.values():
                door.verbs["update_weights"] = WeightsFollower(door.engine, board).answer
            await until(lambda: len(here.engines.links) == 2)
            assert await client.change_drafters(DrafterChange(ngram)) == (2, ("ngram",))
            assert [engine.speculative for engine in engines] == [ngram] * 2
            assert board.read().drafters == ("ngram",)
            assert await client.update_weights("/a", "", "keep") == 2
            assert board.read().speculative == ngram
            engines[1].refuse_drafters = suffix
            with pytest.raises(CheckpointError, match="refused here"):
                await client.change_drafters(DrafterChange(whole=suffix))
            assert [engine.speculative for engine in engines] == [ngram] * 2
            assert board.read().speculative == ngram
            engines[1].refuse_drafters = None
            assert await client.change_drafters(DrafterChange(whole=suffix)) == (2, ("suffix",))
            assert [engine.updates for engine in engines] == [[("/a", "", "keep")]] * 2
            assert set(await client.drafters()) == {"a", "b"}
            with pytest.raises(InvalidRequestError, match="no drafter 'eagle'"):
                await client.change_drafters(DrafterChange(replaces="eagle"))
            engines[1].dead = True
            with pytest.raises(EngineDeadError):
                await client.change_drafters(DrafterChange(ngram))

    asyncio.run(main())


def test_every_engine_gets_an_adapter_or_none(make_engine: Callable[..., Any]) -> None:
    async def main() -> None:
        async with cluster(make_engine) as here:
            board = Board()
            client = ServeClient(here.engines, None, board=board)
            with pytest.raises(EngineDeadError, match="no engine is up"):
                await client.change_adapters({"a": "/a"})
            engines = [here.add("a"), here.add("b", node="elsewhere")]
            for door in here.doors.values():
                door.verbs["update_weights"] = WeightsFollower(door.engine, board).answer
            await until(lambda: len(here.engines.links) == 2)
            assert await client.change_adapters({"a": "/a"}) == 2
            assert await client.update_weights("/t", "", "keep") == 2
            engines[1].refuse = CheckpointError.at("lora_modules", "not here")
            with pytest.raises(CheckpointError, match="not here"):
                await client.change_adapters({"a": "/a", "b": "/b"})
            engines[1].refuse = None
            assert [each.served_adapters for each in engines] == [{"a": "/a"}] * 2
            assert await client.adapters() == {"a": "/a"}
            late = make_engine()
            WeightsFollower(late, board).follow(needs_drafters=False)
            assert (late.served_adapters, late.updates) == ({"a": "/a"}, [("/t", "", "keep")])
            assert await client.change_adapters({}) == 2
            assert [each.served_adapters for each in engines] == [{}] * 2
            assert [each.updates for each in engines] == [[("/t", "", "keep")]] * 2

    asyncio.run(main())


def test_an_engine_that_starts_late_has_the_drafters_of_the_board(
    make_engine: Callable[..., Any],
) -> None:
    board = Board()
    first = WeightsNote("/a", "/b", "keep")
    board.write(first)
    ngram = {"decoding_type": "NGram"}
    note = WeightsNote("", "", "keep", speculative=ngram).after(board.read())
    assert (note.target, note.drafter, note.speculative) == ("/a", "", ngram)
    board.write(note)
    engine, late = make_engine(), make_engine()
    WeightsFollower(engine, board).follow(needs_drafters=False)
    assert (engine.speculative, engine.updates) == (ngram, [("/a", "", "keep")])
    late.refuse_drafters = ngram  # it serves without, rather than not at all
    follower = WeightsFollower(late, board)
    follower.follow(needs_drafters=False)
    follower.look()
    assert late.speculative is None
    board.write(WeightsNote("", "/d", "wait").after(board.read()))
    assert board.read().version == first.id, "the target's weights are those of before"
    late.refuse_drafters = None
    follower.follow()
    assert (late.speculative, late.updates[-1]) == (ngram, ("/a", "/d", "wait"))


def test_an_engine_follows_what_it_has_missed(make_engine: Callable[..., Any]) -> None:
    engine, board = make_engine(), Board()
    follower = WeightsFollower(engine, board)
    follower.follow()
    follower.look()
    assert engine.updates == []
    board.write(WeightsNote("/a", "", "keep"))
    follower.look()
    wait_for(lambda: engine.updates == [("/a", "", "keep")])
    board.write(WeightsNote("/a", "", "keep"))  # the folder has others now
    follower.follow()
    follower.look()
    assert len(engine.updates) == 2
    engine.refuse = CheckpointError("it is gone")
    board.write(WeightsNote("/b", "", "keep"))
    follower.look()

    def failed() -> bool:
        try:
            follower.look()
        except CheckpointError:
            return True
        return False

    wait_for(failed)  # Serve replaces it, since it has other weights than the rest


def test_weights_of_an_ingress_that_died_are_freed(make_engine: Callable[..., Any]) -> None:
    """Not before all ingresses that live have written their note, nor if the note names them."""
    engine, board = make_engine(), Board()
    follower = WeightsFollower(engine, board)
    engine.sent.append(("stage", "one"))
    engine.staged_s = serve_client.UPDATE_TIMEOUT_S
    follower.look()
    assert engine.sent == [("stage", "one")]
    engine.staged_s += 120.0
    follower.look()
    wait_for(lambda: engine.sent[1:] == [("dropped", "one")])
    engine.sent.append(("stage", "two"))
    board.write(WeightsNote(sent="two"))
    follower._drop_staged()
    follower.look()
    wait_for(lambda: engine.sent[2:] == [("stage", "two"), ("taken", "two")])


def test_abort_and_hanging_up_end_a_request(make_engine: Callable[..., Any]) -> None:
    async def main() -> None:
        async with cluster(make_engine) as here:
            client = ServeClient(here.engines, None)
            waiting = asyncio.ensure_future(all_of(client, request(name="early")))
            await asyncio.sleep(0.05)
            await client.abort("early")  # before there is an engine
            assert [each.finish_reason for each in await waiting] == ["abort"]
            engine = here.add("a")
            engine.pause_s = 0.01
            seen = []
            async for delta in client.generate(request(10**6)):
                seen.append(delta)
                if len(seen) == 2:
                    await client.abort("r")
            assert seen[-1].finish_reason == "abort"
            assert seen[-1].usage is not None
            deltas = client.generate(request(10**6))
            await anext(deltas)
            await deltas.aclose()
            await until(lambda: engine.stats()["running"] == 0)
            await until(lambda: here.doors["a"].num_requests == 0)

    asyncio.run(main())


def test_the_engine_with_the_fewest_requests_is_chosen_or_a_near_one_that_knows_the_prompt(
    make_engine: Callable[..., Any],
) -> None:
    async def main() -> None:
        async with cluster(make_engine, slack=2) as here:
            found = [here.add(name) for name in "abc"]
            for engine in found:
                engine.gate.clear()
            await until(lambda: len(here.engines.links) == 3)

            async def sent(name: str, prompt: int = 2) -> str:
                link, _ = await here.engines.run(request(100, name, prompt))
                return link.name

            for turn in range(4):
                assert {await sent(f"{turn}.{k}") for k in range(3)} == set("abc")
            await until(lambda: all(door.num_requests == 4 for door in here.doors.values()))
            first = await sent("p0", 80)
            assert [await sent(f"p{k}", 80) for k in (1, 2)] == [first] * 2
            assert await sent("p3", 80) != first, "it has slack + 1 more than the others now"
            # Another ingress learns of requests that are not its own.
            other = Engines(None, "node")
            other.update({name: door.address for name, door in here.doors.items()})
            await until(lambda: sum(link.load for link in other.links) == 16)
            assert (await other.run(request(100, "o")))[0].name != first
            other.close()
            for engine in found:
                engine.gate.set()

    asyncio.run(main())


def linked(loads: list[int]) -> Engines:
    """An ingress's view of engines with these loads, without sockets."""
    found = Engines(None, "node", slack=2)
    for index, load in enumerate(loads):
        link = found._links[f"{index}"] = EngineLink(f"{index}", found._changed)
        link.data_received(framing.frame(FromEngine(load).encoded()))
    return found


def test_of_many_engines_two_are_compared() -> None:
    """Loads are known late: of the least loaded, every ingress would choose the same."""

    async def main() -> None:
        few = linked([*range(engines.MAX_COMPARED)])
        assert {few._best(request()).name for _ in range(50)} == {"0"}
        loads = [*range(engines.MAX_COMPARED + 12)]
        many = linked(loads)
        chosen = Counter(many._best(request()).name for _ in range(400))
        assert len(chosen) > len(loads) // 2
        assert f"{loads[-1]}" not in chosen, "one of two is less loaded than the most loaded"
        # One that knows the prompt's beginning is chosen wherever it is no busier than the slack.
        alike = linked([5] * len(loads))
        first = alike._best(request(prompt=80)).name
        assert {alike._best(request(prompt=80)).name for _ in range(50)} == {first}
        alike._links[first].data_received(framing.frame(FromEngine(8).encoded()))
        assert alike._best(request(prompt=80)).name != first

    asyncio.run(main())


def test_a_load_that_nobody_waits_for_touches_no_other_link(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Loads of many engines change many times a second."""

    async def main() -> None:
        found = linked([1, 2, 3])
        with monkeypatch.context() as patch:
            patch.setattr(Engines, "links", property(lambda _: pytest.fail("all were read")))
            found._links["0"].data_received(framing.frame(FromEngine(7).encoded()))
        assert found._links["0"].load == 7

    asyncio.run(main())


def test_requests_wait_in_the_ingress_where_engines_get_so_many(
    make_engine: Callable[..., Any],
) -> None:
    """In their order, up to the limit; a door tells Serve's autoscaler of them."""

    async def main() -> None:
        async with cluster(make_engine, max_each=2, max_waiting=3) as here:
            engine = here.add("a")
            engine.gate.clear()
            client = ServeClient(here.engines, None)
            await until(lambda: len(here.engines.links) == 1)
            ended: list[str] = []

            async def answer(name: str) -> None:
                assert len(tokens(await all_of(client, request(12, name)))) == 12
                ended.append(name)

            running = [asyncio.ensure_future(answer(f"{k}")) for k in range(5)]
            await until(lambda: here.doors["a"].num_expected == 5)
            assert len(engine.submitted) == 2
            with pytest.raises(OverloadedError, match="max_queued_requests = 3"):
                await all_of(client, request(12, "late"))
            engine.gate.set()
            await asyncio.gather(*running)
            assert [each.id for each in engine.submitted] == list("01234")
            await until(lambda: here.doors["a"].num_expected == 0)

    asyncio.run(main())


def test_an_engine_that_leaves_ends_what_runs_and_gets_no_more(
    make_engine: Callable[..., Any],
) -> None:
    async def main() -> None:
        async with cluster(make_engine) as here:
            client = ServeClient(here.engines, None)
            old = here.add("old")
            old.pause_s = 0.02
            running = asyncio.ensure_future(all_of(client, request(60)))
            await until(lambda: bool(old.submitted))
            new = here.add("new")
            await until(lambda: len(here.engines.links) == 2)
            door = here.remove("old")
            await until(lambda: len(here.engines.links) == 1)
            door.leave()
            assert len(tokens(await all_of(client, request(12, "next")))) == 12
            assert [each.id for each in new.submitted] == ["next"]
            assert len(tokens(await running)) == 60
            assert len(old.submitted) == 1
            door.shutdown()

    asyncio.run(main())


def test_what_engines_answer(make_engine: Callable[..., Any]) -> None:
    """Health, statistics, kept streams; an engine that fails or is slow spoils nothing else."""

    async def main() -> None:
        async with cluster(make_engine) as here:
            client = ServeClient(here.engines, None)
            with pytest.raises(EngineDeadError, match="no engine is up"):
                await client.check()
            here.add("a")
            here.add("b")
            await until(lambda: len(here.engines.links) == 2)
            assert set(await client.stats()) == {"a", "b"}
            lost = EngineLink("gone", lambda: None)
            lost.ended.set_result(None)
            with pytest.raises(WorkerError, match="engine gone is lost"):
                await lost.ask("report")
            verbs = [door.verbs for door in here.doors.values()]
            verbs[0]["report"] = lambda: {"error": "no rank"}
            await client.check()
            assert set(await client.stats()) == {"b"}
            verbs[1]["report"] = lambda: {"recovering": "rank 0", "loading": "weights: 1 of 2 GiB"}
            # One reason is given, of the engine that was connected first.
            reasons = "no rank|the workers are being replaced: rank 0; weights: 1 of 2 GiB"
            with pytest.raises(EngineDeadError, match=reasons):
                await client.check()
            verbs[0]["report"] = lambda: 1 / 0
            with pytest.raises(EngineDeadError, match="rank 0"):
                await client.check()
            busy = threading.Event()
            verbs[0]["report"] = busy.wait  # others are before the question
            await client.check()
            busy.set()

    asyncio.run(main())


def test_an_ingress_that_does_not_read_is_given_up_and_others_go_on(
    make_engine: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(edge, "MAX_WAITING_BYTES", 2**16)

    async def main() -> None:
        async with cluster(make_engine) as here:
            engine = here.add("a")
            address = here.doors["a"].address
            place = tuple(address["tcp"])
            stuck = framing.connect(place, bytes.fromhex(address["secret"]), 5.0)  # type: ignore[arg-type]
            await until(lambda: len(here.doors["a"]._links) == 2)
            lost = next(link for link in here.doors["a"]._links if link._socket.family != 1)
            lost.requests.add("x")
            client = ServeClient(here.engines, None)
            for _ in range(10_000):
                lost.deliver([Delta("x", tuple(range(10_000)))])
                if lost.lost:
                    break
            assert lost.lost
            assert engine.aborted == ["x"]
            lost.deliver([Delta("x", (1,))])  # the engine ends its requests a little later
            assert not lost._outbox
            assert len(tokens(await all_of(client, request()))) == 12
            stuck.close()

    asyncio.run(main())


def test_strangers_and_failed_accepts_do_not_end_the_door(
    make_engine: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    following, failures = framing.Acceptor.next, [OSError(24, "Too many open files")] * 4

    def flaky(*args: Any) -> Any:
        if failures:
            raise failures.pop()
        return following(*args)

    monkeypatch.setattr(framing.Acceptor, "next", flaky)
    monkeypatch.setattr(edge, "_ACCEPT_POLL_S", 0.05)

    async def main() -> None:
        async with cluster(make_engine) as here:
            here.add("a")
            place = tuple(here.doors["a"].address["tcp"])
            stranger = framing.connect(place, b"wrong", 5.0)  # type: ignore[arg-type]
            client = ServeClient(here.engines, None)
            assert len(tokens(await all_of(client, request()))) == 12
            assert not failures
            stranger.close()
            # A message that is none costs its sender alone.
            address = here.doors["a"].address
            garbled = framing.connect(place, bytes.fromhex(address["secret"]), 5.0)  # type: ignore[arg-type]
            framing.send(garbled, b"\xc1")
            assert garbled.recv(1) == b""
            assert len(tokens(await all_of(client, request()))) == 12

    asyncio.run(main())


def test_commands_of_one_turn_are_one_frame(make_engine: Callable[..., Any]) -> None:
    async def main() -> None:
        async with cluster(make_engine) as here:
            engine = here.add("a")
            await until(lambda: len(here.engines.links) == 1)
            (link,) = here.engines.links
            assert isinstance(link, EngineLink)
            frames: list[bytes] = []
            write = link._transport.write

            class Written:
                def write(self, data: bytes) -> None:
                    frames.append(data)
                    write(data)

            transport, link._transport = link._transport, Written()  # type: ignore[assignment]
            inboxes = [link.run(request(3, f"{k}")) for k in range(8)]
            for inbox in inboxes:
                assert (await inbox.get()).finish_reason == "length"
            assert len(frames) == 1
            assert len(engine.submitted) == 8
            link._transport = transport

    asyncio.run(main())
