"""The engines of one model from an ingress's view: finding them, and choosing one per request.

Serve's list of replicas has the engines and their addresses; a closed socket shows at once that one
is gone. A request goes to the engine with the fewest requests, according to loads sent with each
step, or to a slightly busier one that has computed the beginning of its prompt. If there are many
engines, two are compared: loads arrive some 50 ms late, and all ingresses would otherwise choose
the same few engines meanwhile (Mitzenmacher 2000, "How useful is old information?";
`bench/scale.py` simulates it).
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import msgpack
from ray.serve._private.request_router.pow_2_router import PowerOfTwoChoicesRequestRouter
from ray.serve.exceptions import DeploymentUnavailableError

from ...errors import EngineDeadError, OutriderError, OverloadedError, WorkerError
from ...scheduler.types import Delta, Request
from ...workers.transport import framing
from ...workers.transport.wire import decode, encode
from .edge import (
    ABORT,
    ASK,
    LACKING,
    LATE,
    LEAVING,
    RECOVERING,
    RUN,
    WAITING,
    EdgeLostError,
    FromEngine,
    PassedOnError,
    error_of,
)

if TYPE_CHECKING:
    from ray.serve.handle import DeploymentHandle

log = logging.getLogger(__name__)
_CONNECT_TIMEOUT_S = 10.0
_RETRY_S = 0.25  # between attempts to reach an engine that Serve lists
_PREFIX_LEN = 64  # number of leading tokens that identify prompts with the same beginning
_MAX_PREFIXES = 4096
MAX_COMPARED = 8  # up to this number of engines, the least loaded one is chosen


class Inbox:
    """The deltas of one request, for one reader.

    Replaces `asyncio.Queue` for a single reader, which is woken once per token.
    """

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._items: deque[Delta | OutriderError] = deque()
        self._reader: asyncio.Future[None] | None = None
        self.is_passed_on = False

    def put(self, item: Delta | OutriderError) -> None:
        self._items.append(item)
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)

    async def get(self) -> Delta:
        """Returns the next delta; raises an exception that was put in its place."""
        while not self._items:
            self._reader = self._loop.create_future()
            await self._reader
        item = self._items.popleft()
        if isinstance(item, OutriderError):
            raise item
        return item


class EngineLink(asyncio.Protocol):
    """The ingress's end of the socket to one engine.

    Args:
        on_change: called with the link where the engine's load is another, or the link is lost.
    """

    def __init__(self, name: str, on_change: Callable[[EngineLink], None]) -> None:
        self.name = name
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._on_change = on_change
        self._told_load = self._num_sent = 0  # and the requests sent since then
        self._is_listed = True
        self._inboxes: dict[str, Inbox] = {}
        self._asked: dict[int, asyncio.Future[Any]] = {}
        self._num_asked = 0
        self._commands: list[list[Any]] = []
        self._buffer = bytearray()
        self._transport: asyncio.Transport

    @property
    def is_open(self) -> bool:
        """Whether the engine accepts requests."""
        return self._is_listed and self._told_load != LEAVING and not self.ended.done()

    @property
    def is_able(self) -> bool:
        """Whether it would compute them now."""
        return self._told_load not in (LACKING, LATE, RECOVERING)

    @property
    def is_recovering(self) -> bool:
        """Whether it would compute them soon, once its workers are replaced."""
        return self._told_load == RECOVERING

    @property
    def is_late(self) -> bool:
        """Whether it would compute them only after a long replacement of its workers."""
        return self._told_load == LATE

    @property
    def load(self) -> int:
        """Number of the engine's requests, from all ingresses."""
        return max(self._told_load + self._num_sent, len(self._inboxes))

    def run(self, request: Request) -> Inbox:
        """Sends a request and returns the inbox of its deltas."""
        inbox = self._inboxes[request.id] = Inbox()
        self._num_sent += 1
        self._put(RUN, encode(request))
        return inbox

    def abort(self, request_id: str) -> None:
        """Ends a request early; its last delta still arrives."""
        self._put(ABORT, request_id)

    def close(self, request_id: str, *, is_finished: bool) -> None:
        """Drops a request, and ends it unless its last delta has arrived."""
        if self._inboxes.pop(request_id, None) is None:
            return
        if not is_finished:
            self.abort(request_id)
        self._on_change(self)

    def give_up(self) -> None:
        """Lets other engines compute its requests."""
        error = PassedOnError(f"the workers of engine {self.name} are being replaced")
        for inbox in self._inboxes.values():
            if not inbox.is_passed_on:
                inbox.is_passed_on = True
                inbox.put(error)

    def tell_waiting(self, share: float) -> None:
        """Reports how many requests wait for this engine to have room."""
        self._put(WAITING, share)

    async def ask(self, verb: str, *arguments: Any) -> Any:
        """Returns the engine's answer (raises `WorkerError`)."""
        if self.ended.done():
            raise EdgeLostError(f"the connection to engine {self.name} is lost")
        self._num_asked += 1
        number = self._num_asked
        answer = self._asked[number] = asyncio.get_running_loop().create_future()
        self._put(ASK, number, verb, *arguments)
        try:
            return await answer
        finally:
            del self._asked[number]

    def leave(self) -> None:
        """Sends no more requests; running ones continue until the engine disconnects."""
        self._is_listed = False

    def hang_up(self) -> None:
        """Disconnects and gives up all requests."""
        self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)  # uvloop's is no subclass

    def data_received(self, data: bytes) -> None:
        buffer, begin, header = self._buffer, 0, framing.HEADER
        buffer += data
        try:
            while len(buffer) - begin >= header.size:
                (size,) = header.unpack_from(buffer, begin)
                if size > framing.MAX_FRAME_BYTES:
                    raise WorkerError(f"a frame of {size} bytes")
                end = begin + header.size + size
                if end > len(buffer):
                    break
                self._take(FromEngine.decoded(bytes(memoryview(buffer)[begin + header.size : end])))
                begin = end
        except Exception:
            log.exception("the connection to engine %s is closed: it cannot be read", self.name)
            self._transport.abort()
            begin = len(buffer)
        del buffer[:begin]

    def connection_lost(self, exc: Exception | None) -> None:
        error = EdgeLostError(f"the connection to engine {self.name} is lost: {exc or 'closed'}")
        self.ended.set_result(None)
        for inbox in self._inboxes.values():
            inbox.put(error)
        for answer in self._asked.values():
            if not answer.done():
                answer.set_exception(error)
        self._on_change(self)

    def _put(self, verb: int, *arguments: Any) -> None:
        """Queues a command; commands of one turn of the event loop form one frame."""
        if not self._commands:
            asyncio.get_running_loop().call_soon(self._flush)
        self._commands.append([verb, *arguments])

    def _flush(self) -> None:
        commands, self._commands = self._commands, []
        if not self.ended.done():
            self._transport.write(framing.frame(msgpack.packb(commands, use_bin_type=True)))

    def _take(self, frame: FromEngine) -> None:
        for delta in frame.deltas:
            inbox = self._inboxes.get(delta.request_id)
            if inbox is not None:
                inbox.put(delta)
        for request_id, name, message, field in frame.failures:
            inbox = self._inboxes.get(request_id)
            if inbox is not None:
                inbox.put(error_of(name, message, field))
        for number, body, reason in frame.answers:
            answer = self._asked.get(number)
            if answer is None or answer.done():
                continue
            if body is None:
                answer.set_exception(WorkerError(reason))
            else:
                answer.set_result(decode(body))
        if self._num_sent or frame.load != self._told_load:
            before = self.load, self.is_open, self.is_able
            self._told_load, self._num_sent = frame.load, 0
            if before != (self.load, self.is_open, self.is_able):
                self._on_change(self)


class Engines:
    """The engines behind one deployment; used in the ingress's event loop.

    Args:
        handle: handle of the deployment. While there is no engine, a call to it is pending, so that
            Serve starts one, or reports that it cannot.
        node: this node's id; engines there are reached by the Unix socket.
        max_each: maximum number of requests per engine; None: no limit.
        max_waiting: maximum number of requests that wait here for room; negative: no limit.
        slack: how many more requests an engine may have if it knows the beginning of a prompt.
    """

    def __init__(
        self,
        handle: DeploymentHandle[Any] | None,
        node: str,
        *,
        max_each: int | None = None,
        max_waiting: int = -1,
        slack: int = 4,
    ) -> None:
        self._handle, self._node = handle, node
        self._max_each, self._max_waiting, self._slack = max_each, max_waiting, slack
        self._loop = asyncio.get_running_loop()
        self._keepers: dict[str, asyncio.Task[None]] = {}  # by the replica's name
        self._links: dict[str, EngineLink] = {}
        self._queue: deque[asyncio.Future[None]] = deque()
        self._wake: asyncio.Task[None] | None = None
        self._is_any_late = False  # whether a link was late at the last check
        self._told_waiting = 0
        self._prefixes: OrderedDict[int, set[str]] = OrderedDict()

    @property
    def links(self) -> list[EngineLink]:
        """The links to engines that accept requests, now or later."""
        return [link for link in self._links.values() if link.is_open]

    def update(self, addresses: Mapping[str, Mapping[str, Any]]) -> None:
        """Receives Serve's list of replicas; callable from any thread."""
        self._loop.call_soon_threadsafe(self._set, dict(addresses))

    def run(self, request: Request) -> asyncio.Future[tuple[EngineLink, Inbox]]:
        """Sends a request to an engine, once one has room; returns the link and the inbox.

        The future is already done if an engine has room. It may end with:
            OverloadedError: too many requests wait already.
            EngineDeadError: Serve starts no engine.
        """
        link = None if self._queue else self._best(request)
        if link is None:
            return asyncio.ensure_future(self._run_later(request))
        sent: asyncio.Future[tuple[EngineLink, Inbox]] = self._loop.create_future()
        sent.set_result((link, link.run(request)))
        return sent

    async def _run_later(self, request: Request) -> tuple[EngineLink, Inbox]:
        if 0 <= self._max_waiting <= len(self._queue) and not request.was_accepted:
            raise OverloadedError(
                f"every engine is full, and {len(self._queue)} requests wait "
                f"(max_queued_requests = {self._max_waiting})"
            )
        turn = self._loop.create_future()
        self._queue.append(turn)
        self._changed()
        try:
            while True:
                await turn
                link = self._best(request)
                if link is not None:
                    return link, link.run(request)
                turn = self._loop.create_future()
                self._queue.appendleft(turn)
        finally:
            if turn in self._queue:
                self._queue.remove(turn)
            self._changed()

    async def ask(
        self,
        verb: str,
        *arguments: Any,
        timeout_s: float,
        each: Mapping[str, Sequence[Any]] | None = None,
    ) -> dict[str, Any]:
        """Returns the engines' answers, by name; engines that are lost meanwhile are left out.

        Args:
            each: further arguments by engine name, only for the engines to ask; None: all are
                asked.

        Raises:
            TimeoutError: not all answered in time.
        """
        links = [link for link in self.links if each is None or link.name in each]
        own = {} if each is None else each
        asked = [link.ask(verb, *arguments, *own.get(link.name, ())) for link in links]
        async with asyncio.timeout(timeout_s):
            answers = await asyncio.gather(*asked, return_exceptions=True)
        found = dict(zip([link.name for link in links], answers, strict=True))
        for name in [name for name, each in found.items() if isinstance(each, BaseException)]:
            log.warning("%s got no answer: %s", verb, found.pop(name))
        return found

    def close(self) -> None:
        """Disconnects."""
        self._set({})
        for link in self._links.values():
            link.hang_up()

    def _best(self, request: Request) -> EngineLink | None:
        """Returns the engine with the fewest requests, or a similar one that knows the prefix.

        Of more than `MAX_COMPARED` engines, the better of two random ones is chosen.
        """
        links = self._with_room()
        if not links:
            return None
        compared = links if len(links) <= MAX_COMPARED else random.sample(links, 2)
        least = min([link.load for link in compared])
        idlest = [link for link in compared if link.load == least]
        if len(request.prompt) < _PREFIX_LEN:
            return random.choice(idlest)
        key = hash((request.sharer, request.prompt[:_PREFIX_LEN].tobytes()))
        knowing = self._prefixes.setdefault(key, set())
        self._prefixes.move_to_end(key)
        if len(self._prefixes) > _MAX_PREFIXES:
            self._prefixes.popitem(last=False)
        near = [link for link in links if link.name in knowing and link.load <= least + self._slack]
        link = min(near or idlest, key=lambda each: (each.load, random.random()))
        knowing.add(link.name)
        return link

    def _set(self, addresses: dict[str, Mapping[str, Any]]) -> None:
        for name in [*self._keepers]:
            if name not in addresses:  # its requests continue until it disconnects
                self._keepers.pop(name).cancel()
        for name, address in addresses.items():
            if name not in self._keepers and address:
                self._keepers[name] = asyncio.ensure_future(self._keep(name, address))

    async def _keep(self, name: str, address: Mapping[str, Any]) -> None:
        """Keeps a link to an engine for as long as Serve lists it."""
        there = address["unix" if address["node"] == self._node else "tcp"]
        place, secret = (there[0], there[1], there[2]), bytes.fromhex(address["secret"])
        while True:
            try:
                connection = await asyncio.to_thread(
                    framing.connect, place, secret, _CONNECT_TIMEOUT_S
                )
                connection.setblocking(False)
                made = partial(EngineLink, name, self._changed)
                _, link = await self._loop.connect_accepted_socket(made, connection)
            except OSError as error:
                log.info("engine %s cannot be reached: %s", name, error)
            else:
                await self._linked(link)
            await asyncio.sleep(_RETRY_S)

    async def _linked(self, link: EngineLink) -> None:
        """Waits until the link is lost. An engine that Serve no longer lists gets no requests."""
        self._links[link.name] = link
        link.ended.add_done_callback(lambda _: self._forget(link))
        self._changed()
        try:
            await asyncio.shield(link.ended)
        except asyncio.CancelledError:
            link.leave()
            raise

    def _forget(self, link: EngineLink) -> None:
        if self._links.get(link.name) is link:
            del self._links[link.name]
        for knowing in self._prefixes.values():
            knowing.discard(link.name)

    def _changed(self, link: EngineLink | None = None) -> None:
        """Handles a change of loads, links or the queue: waiting requests may have room now."""
        if self._is_any_late or (link is not None and link.is_late):
            self._pass_on()
        waiting = len(self._queue)
        if not waiting and not self._told_waiting:
            return  # nothing to call or report: loads change many times per second
        links = self.links
        if waiting != self._told_waiting and links:
            self._told_waiting = waiting
            for link in links:
                link.tell_waiting(waiting / len(links))
        if not links and waiting and self._handle is not None and self._wake is None:
            self._wake = asyncio.ensure_future(self._held())
        if self._with_room():
            self._call_next()

    def _pass_on(self) -> None:
        """Moves requests away from engines whose workers are replaced slowly."""
        links = self.links
        late = [link for link in links if link.is_late]
        self._is_any_late = bool(late)
        for link in late if any(link.is_able for link in links) else ():
            link.give_up()

    def _with_room(self) -> list[EngineLink]:
        """Returns the engines that a request may go to.

        These are engines that compute now, if any has room; otherwise those that will soon; those
        whose workers are replaced slowly only if there are no others.
        """
        links, limit = self.links, self._max_each
        able = [link for link in links if link.is_able]
        soon = [link for link in links if link.is_recovering]
        late = [] if able or soon else [link for link in links if link.is_late]
        for group in (able, soon, late):
            if found := [link for link in group if limit is None or link.load < limit]:
                return found
        return []

    def _call_next(self) -> None:
        if self._queue and not self._queue[0].done():
            self._queue.popleft().set_result(None)

    async def _held(self) -> None:
        """Waits for a call that Serve holds until an engine is up; fails if there will be none."""
        assert self._handle is not None
        try:
            await self._handle.wake.remote()
        except DeploymentUnavailableError as error:
            while self._queue:
                self._queue.popleft().set_exception(EngineDeadError(error.message))
        except Exception as error:  # noqa: BLE001, raised by Serve; it is tried again
            log.info("no engine is up: %s", error)
        finally:
            await asyncio.sleep(_RETRY_S)
            self._wake = None
            self._changed()


class Directory:
    """Serve's lists of replicas that this process knows, and their followers."""

    def __init__(self) -> None:
        self._followers: dict[str, Engines] = {}  # by deployment
        self._lists: dict[str, dict[str, Mapping[str, Any]]] = {}

    def follow(self, deployment: str, engines: Engines) -> None:
        """Makes `engines` follow the list of a deployment's replicas."""
        self._followers[deployment] = engines
        if deployment in self._lists:
            engines.update(self._lists[deployment])

    def listed(self, deployment: str, replicas: Iterable[Any]) -> None:
        """Receives a changed list of a deployment's replicas."""
        found = {each.replica_id.unique_id: each.replica_metadata for each in replicas}
        self._lists[deployment] = found
        if deployment in self._followers:
            self._followers[deployment].update(found)


directory = Directory()


class EngineRouter(PowerOfTwoChoicesRequestRouter):
    """Serve's own router, for calls of other applications; also forwards the list of replicas."""

    def update_replicas(self, replicas: list[Any]) -> None:
        super().update_replicas(replicas)
        # Serve may rebuild this class from its source, without this module.
        from outrider.cluster.serve import engines

        engines.directory.listed(str(self._deployment_id), replicas)
