"""The engine's end of its sockets to ingresses: requests in, tokens out, one message per step.

An engine's replica listens (`EngineDoor`), and each ingress connects to it once (`engines.py`). An
ingress's frame has the commands of one turn of its event loop. An engine's frame has the deltas of
one step for all requests of that ingress, failures, answers, and the number of the engine's
requests. Serve carries none of this: it places, replaces and lists the replicas.
"""

from __future__ import annotations

import contextlib
import logging
import secrets
import socket
import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields
from functools import partial
from operator import attrgetter
from typing import TYPE_CHECKING, Any, cast

import msgpack

from ... import errors
from ...engine.weights import DrafterChange
from ...errors import EngineDeadError, InternalError, OutriderError, WorkerDiedError, WorkerError
from ...scheduler.types import Delta, Request, SpeculationUsage, record
from ...workers.spec import SentWeights, TrainerLink
from ...workers.transport import framing
from ...workers.transport.wire import decode, encode
from ..process import start_thread
from .resume_tokens import TokenStore

if TYPE_CHECKING:
    from ...engine.engine import Engine

log = logging.getLogger(__name__)
RUN, ABORT, ASK, WAITING = range(4)  # commands of an ingress
LEAVING = -1  # instead of a load: the engine accepts no more requests
LACKING = -2  # likewise: the engine accepts no requests until it has weights
LATE = -3  # likewise: a slow replacement of workers; others are preferred and take its requests
RECOVERING = -4  # likewise: a quick replacement of workers; others are preferred meanwhile
MAX_WAITING_BYTES = 64 * 2**20  # per ingress: seconds of a full batch's tokens
_ACCEPT_POLL_S = 1.0
_LACK = "the engine waits for weights from a trainer"
_PUBLISH_S = 0.05  # between two messages to an ingress that only have the load
# Fields of a delta, and of its usage, that a flat list has.
_FLAT = attrgetter(
    "request_id", "token_ids", "num_accepted", "finish_reason", "stop_token_id",
    "num_cached_tokens", "weight_version",
)  # fmt: skip
_USAGE = attrgetter(*(each.name for each in fields(SpeculationUsage)))
Failure = tuple[str, str, str, str | None]  # request, kind of error, message, field
Answer = tuple[int, bytes | None, str]  # number, and the encoded answer or the error


class EdgeLostError(WorkerError):
    """The connection between an engine and an ingress broke; the request can be sent again."""


class PassedOnError(EdgeLostError):
    """Another engine should compute the request; nothing was lost."""


@record
class FromEngine:
    """One frame of an engine."""

    load: int
    deltas: Sequence[Delta] = ()
    failures: Sequence[Failure] = ()
    answers: Sequence[Answer] = ()

    def encoded(self) -> bytes:
        """Encodes the frame. A common delta (tokens and counts) is a flat list; others are records.

        A record of `workers/transport/wire.py` takes some 20 us to encode and as much to decode, a
        flat list 1 us; a full batch sends one delta per sequence and step.
        """
        deltas = [_flat(delta) for delta in self.deltas]
        whole = (self.load, deltas, self.failures, self.answers)
        return bytes(msgpack.packb(whole, use_bin_type=True))

    @classmethod
    def decoded(cls, data: bytes) -> FromEngine:
        """Decodes a frame; raises `WorkerError` if `data` is malformed."""
        try:
            load, deltas, failures, answers = msgpack.unpackb(data, raw=False)
            return cls(load, [_delta(given) for given in deltas], failures, answers)
        except (msgpack.UnpackException, ValueError, TypeError) as error:
            raise WorkerError(f"malformed message of {len(data)} bytes: {error}") from None


def _flat(delta: Delta) -> list[Any] | bytes:
    if (
        delta.logprobs
        or delta.trace is not None
        or delta.prompt_logprobs is not None
        or delta.times is not None
        or delta.error is not None
        or delta.pooled is not None
    ):
        return encode(delta)
    return [*_FLAT(delta), None if delta.usage is None else _USAGE(delta.usage)]


def _delta(given: list[Any] | bytes) -> Delta:
    if isinstance(given, bytes):
        return cast("Delta", decode(given))
    request_id, token_ids, num_accepted, reason, stop_token_id, num_cached, version, counts = given
    usage = None if counts is None else SpeculationUsage(*counts)
    ids = tuple(token_ids)
    return Delta(
        request_id, ids, num_accepted, reason, stop_token_id, (), num_cached, usage,
        weight_version=version,
    )  # fmt: skip


def described(error: OutriderError) -> tuple[str, str, str | None]:
    """Converts an error to the arguments of `error_of`."""
    return type(error).__name__, error.message, error.field


def failure_of(check: Callable[..., object], *arguments: Any) -> tuple[str, str, str | None] | None:
    """Returns what a call raises, as arguments of `error_of`; None if it does not raise."""
    try:
        check(*arguments)
    except OutriderError as error:
        return described(error)
    return None


def error_of(name: str, message: str, field: str | None) -> OutriderError:
    """Returns the error that a failure represents."""
    kind = getattr(errors, name, WorkerError)
    return cast("OutriderError", kind(message, field=field))


class EngineDoor:
    """Accepts connections of ingresses to one engine, on a Unix socket and on TCP.

    Args:
        report: returns the engine's statistics for an ingress that asks.
        host: this node's address, for ingresses on other nodes.
        node: the node's id; ingresses there use the Unix socket.
        folder: for the Unix socket; None is the folder for temporary files.
    """

    def __init__(
        self,
        engine: Engine,
        store: TokenStore,
        report: Callable[[], Any],
        host: str,
        node: str = "",
        folder: str | None = None,
    ) -> None:
        self.engine, self.store = engine, store
        self.verbs: dict[str, Callable[..., Any]] = {
            "report": report,
            "count_resumable": store.count,
            "take": self._take,
            "reset_prefix_cache": engine.reset_prefix_cache,
            "check_weights": partial(failure_of, engine.check_weights),
            "drafters": engine.drafters,
            "adapters": engine.adapters,
            "plan_drafters": self._plan_drafters,
            "pause": engine.pause,
            "resume": partial(engine.resume, takes_folder=False),
            "num_sent_ranks": engine.num_sent_ranks,
            "link_trainer": lambda *link: failure_of(engine.link_trainer, TrainerLink(*link)),
            "take_weights": lambda *sent: failure_of(engine.take_weights, SentWeights(*sent)),
            "drop_sent": lambda: engine.take_sent(""),
            "sleep": engine.sleep,
            "wake_up": engine.wake_up,
            "record_trace": engine.record_trace,
            "trace": engine.trace,
            "adapt": partial(failure_of, engine.adapt),
        }
        # Readers do not compile grammars or wait for other processes' statistics.
        self.threads = ThreadPoolExecutor(32, thread_name_prefix="outrider-edge")
        engine.on_lack.append(self._lack_changed)
        self._links: list[EdgeLink] = []
        self._closed, self._changed = threading.Event(), threading.Event()
        self._is_leaving = False
        secret = secrets.token_bytes(32)
        self._servers = [framing.listen(None, folder)]
        try:
            self._servers.append(framing.listen(host))
        except OSError:
            self.shutdown()
            raise
        self.address = {  # plain values, for Serve's list of replicas
            "node": node,
            "unix": list(self._servers[0][1]),
            "tcp": list(self._servers[1][1]),
            "secret": secret.hex(),
        }
        for server, _ in self._servers:
            start_thread("accept", self._accept, framing.Acceptor(server, secret))
        start_thread("edge-load", self._publish)

    @property
    def num_requests(self) -> int:
        """Number of unfinished requests of all ingresses."""
        return sum([len(link.requests) for link in self._links])

    @property
    def num_expected(self) -> float:
        """`num_requests`, plus this engine's share of the requests that wait in ingresses."""
        return self.num_requests + sum([link.num_waiting for link in self._links])

    @property
    def load(self) -> int:
        """The load sent to ingresses: `num_requests`, or a code such as `LEAVING`."""
        if self._is_leaving:
            return LEAVING
        if self.engine.lacks_weights:
            return LACKING
        if self.engine.lacks_workers:
            return LATE
        return RECOVERING if self.engine.is_recovering else self.num_requests

    def changed(self) -> None:
        """Reports a changed load soon to ingresses that get no deltas now."""
        if len(self._links) > 1 or self._is_leaving:
            self._changed.set()

    def leave(self) -> None:
        """Asks ingresses to send no more requests; running ones continue."""
        self._is_leaving = True
        self.changed()

    def shutdown(self) -> None:
        """Stops listening and disconnects; running requests are replayed elsewhere."""
        self._closed.set()
        self._changed.set()
        for server, address in self._servers:
            server.close()
            framing.unlink(address)
        for link in [*self._links]:
            link.close()

    def _lack_changed(self) -> None:
        """Tells ingresses that this engine began or stopped to lack weights or workers."""
        if self.engine.lacks_weights:
            for link in [*self._links]:
                link.give_back()
        self._changed.set()

    def forget(self, link: EdgeLink) -> None:
        """Removes a lost link."""
        with contextlib.suppress(ValueError):
            self._links.remove(link)
        self.changed()

    def _plan_drafters(self, change: dict[str, Any]) -> Any:
        """Returns the `speculative_config` that a change makes, or a `failure` as above."""
        try:
            return {"planned": self.engine.planned_drafters(DrafterChange(**change))}
        except OutriderError as error:
            return {"failure": described(error)}

    def _take(self, stream_id: str, owner: str) -> Any:
        """Returns the record of a resumable stream, whose requests end here."""
        taken, running = self.store.take(stream_id, owner)
        for request_id in running:
            self.engine.abort(request_id)
        return {index: (t.token_ids, t.logprobs, t.finish_reason, t.stop_token_id)
                for index, t in taken.items()}  # fmt: skip

    def _accept(self, acceptor: framing.Acceptor) -> None:
        while not self._closed.is_set():
            try:
                connection = acceptor.next(_ACCEPT_POLL_S)
            except TimeoutError:
                continue
            except (OSError, ValueError) as error:  # for example, out of file descriptors
                if not self._closed.wait(_ACCEPT_POLL_S):
                    log.warning("a connection was not accepted: %s", error)
                continue
            self._links.append(EdgeLink(connection, self))
            self._changed.set()

    def _publish(self) -> None:
        while not self._closed.is_set():
            self._changed.wait()
            self._changed.clear()
            for link in [*self._links]:
                link.tell_load()
            self._closed.wait(_PUBLISH_S)


class EdgeLink:
    """One ingress's connection: a sink of the engine for all of its requests.

    The engine's loop writes as much as the socket accepts at once; a thread writes the rest and
    later frames, so the loop never waits. An ingress that does not read is disconnected at
    `MAX_WAITING_BYTES`. Its requests end here, and it replays them from its tokens once it reads
    again. The same applies to an ingress that is gone.
    """

    def __init__(self, connection: socket.socket, door: EngineDoor) -> None:
        self.requests: set[str] = set()
        self.num_waiting = 0.0  # this engine's share of the requests that wait in the ingress
        self.lost = False
        self._socket, self._door = connection, door
        self._told_load = 0
        # Frames that the socket did not accept yet, and whether the thread is writing one.
        self._outbox: deque[bytes] = deque()
        self._num_bytes, self._writes = 0, False
        self._changed = threading.Condition()
        for name, target in (("write", self._write), ("read", self._read)):
            start_thread(f"edge-{name}", target)

    def deliver(self, deltas: list[Delta]) -> None:
        """Receives deltas from the engine's loop."""
        self._door.store.record(deltas)  # before any client can receive them
        last = [each for each in deltas if each.finish_reason is not None]
        ended = [each.request_id for each in last]
        failed = [each for each in last if each.finish_reason == "error"]
        failures = [(each.request_id, *self._why(each)) for each in failed]
        self.requests.difference_update(ended)
        sent = [each for each in deltas if each.finish_reason != "error"] if failed else deltas
        self._send(sent, failures)
        self._release(ended)

    def give_back(self) -> None:
        """Makes the ingress replay its requests elsewhere."""
        running, self.requests = self.requests, set()
        reason = described(EngineDeadError(_LACK))
        self._send(failures=[(request_id, *reason) for request_id in running])
        for request_id in running:
            self._door.engine.abort(request_id)
        self._release(running)

    def tell_load(self) -> None:
        """Sends the load if it has changed for the ingress."""
        if self._told_load != self._door.load:
            self._send()

    def close(self) -> None:
        """Disconnects, and ends the running requests."""
        with self._changed:
            if self.lost:
                return
            self.lost = True
            self._outbox.clear()
            self._changed.notify()
        # `shutdown` wakes a thread in `recv`; `close` does not.
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        self._door.forget(self)
        running, self.requests = self.requests, set()
        for request_id in running:
            self._door.engine.abort(request_id)
        self._release(running)

    def _why(self, delta: Delta) -> tuple[str, str, str | None]:
        """Returns the failure of a request whose steps or whose engine failed."""
        return failure_of(self._door.engine.check) or described(delta.failure)

    def _release(self, request_ids: Iterable[str]) -> None:
        for request_id in request_ids:
            self._door.store.release(request_id)
            self._door.changed()

    def _send(
        self,
        deltas: Sequence[Delta] = (),
        failures: Sequence[Failure] = (),
        answers: Sequence[Answer] = (),
    ) -> None:
        self._told_load = load = self._door.load
        frame = framing.frame(FromEngine(load, deltas, failures, answers).encoded())
        with self._changed:
            if self.lost:
                return
            if not self._writes and not self._outbox:
                with contextlib.suppress(OSError):  # full; or lost, which the reader detects, too
                    frame = frame[self._socket.send(frame, socket.MSG_DONTWAIT) :]
                if not frame:
                    return
            self._outbox.append(frame)
            self._num_bytes += len(frame)
            is_stuck = self._num_bytes > MAX_WAITING_BYTES
            self._changed.notify()
        if is_stuck:
            log.warning("an ingress does not read its tokens; its requests end here")
            self.close()

    def _write(self) -> None:
        while True:
            with self._changed:
                self._writes = False
                while not self._outbox and not self.lost:
                    self._changed.wait()
                if self.lost:
                    return
                frame, self._writes = self._outbox.popleft(), True
                self._num_bytes -= len(frame)
            try:
                self._socket.sendall(frame)
            except OSError as error:
                log.warning("the connection to an ingress is lost: %s", error)
                self.close()
                return

    def _read(self) -> None:
        verbs: dict[int, Callable[..., None]] = {
            RUN: self._run,
            ABORT: self._door.engine.abort,
            ASK: self._ask,
            WAITING: self._wait,
        }
        try:
            reader = framing.FrameReader(self._socket)
            while True:
                for verb, *arguments in msgpack.unpackb(reader.receive(), raw=False):
                    verbs[verb](*arguments)
        except (OSError, WorkerDiedError):
            if not self.lost:
                log.info("an ingress has closed its connection")
        except Exception:
            log.exception("an ingress's connection is closed: its message cannot be read")
        self.close()

    def _run(self, body: bytes) -> None:
        request = decode(body)
        assert isinstance(request, Request)
        self.requests.add(request.id)
        self._told_load += 1  # the ingress counts its own requests
        self._door.changed()
        self._door.store.begin(request)
        if self._door.engine.lacks_weights:
            self._posted(request.id, EngineDeadError(_LACK))
            return
        sampling = request.sampling
        if sampling.structured_outputs is None and sampling.thinking_budget is None:
            self._post(request)
        else:
            self._door.threads.submit(self._post, request)

    def _post(self, request: Request) -> None:
        posted = partial(self._posted, request.id)
        try:
            self._door.engine.post([request], self, posted)
        except OutriderError as error:
            posted(error)
        except Exception as error:
            log.exception("request %s was not read", request.id)
            reason = f"the server failed to handle this request: {type(error).__name__}"
            posted(InternalError(reason))

    def _posted(self, request_id: str, error: OutriderError | None) -> None:
        """Called when the engine has queued or rejected the request."""
        if error is not None:
            self.requests.discard(request_id)
            self._send(failures=[(request_id, *described(error))])
            self._release([request_id])
        elif self.lost or request_id not in self.requests:
            # The link was closed or gave back its requests meanwhile, so nothing else would end it.
            self._door.engine.abort(request_id)
            self._release([request_id])

    def _ask(self, number: int, verb: str, *arguments: Any) -> None:
        self._door.threads.submit(self._answer, number, verb, arguments)

    def _answer(self, number: int, verb: str, arguments: tuple[Any, ...]) -> None:
        answer: Answer
        try:
            answer = (number, encode(self._door.verbs[verb](*arguments)), "")
        except Exception as error:
            log.exception("%s was not answered", verb)
            answer = (number, None, f"{type(error).__name__}: {error}")
        self._send(answers=[answer])

    def _wait(self, num_waiting: float) -> None:
        self.num_waiting = num_waiting
