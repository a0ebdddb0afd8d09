"""Large bodies wait for threads, small ones for nothing, and the number that waits is bounded."""

from __future__ import annotations

import asyncio
import json
import threading

import pytest

from outrider.cluster.serve.openai.parse import load
from outrider.cluster.serve.openai.streaming import Offload, Pool
from outrider.errors import InvalidRequestError, OverloadedError


def test_a_large_body_delays_no_other() -> None:
    async def main() -> None:
        offload, gate = Offload(), threading.Event()
        main_thread = threading.get_ident()
        large = [asyncio.ensure_future(offload.run(2**20, gate.wait)) for _ in range(4)]
        assert await offload.run(100, threading.get_ident) == main_thread
        assert await offload.run(100_000, threading.get_ident) != main_thread
        assert not any(task.done() for task in large)
        gate.set()
        assert await asyncio.gather(*large) == [True] * 4

    asyncio.run(main())


def test_too_many_bodies_are_refused_until_one_is_done() -> None:
    async def main() -> None:
        pool, gate = Pool("test", 1, 2), threading.Event()
        waiting = [asyncio.ensure_future(pool.run(gate.wait)) for _ in range(2)]
        await asyncio.sleep(0)
        with pytest.raises(OverloadedError):
            await pool.run(gate.wait)
        waiting[1].cancel()  # its thread has not begun: nothing is left of it
        gate.set()
        assert await waiting[0]
        while pool._room._value < 2:
            await asyncio.sleep(0.01)
        assert await pool.run(gate.wait)

    asyncio.run(main())


def test_a_dense_body_is_read_alike() -> None:
    data = {"prompt": [[1, -2, 3.5, None, True], {"a": "é\n"}] * 60_000, "n": 1}
    raw = json.dumps(data).encode()
    assert load(raw) == data
    for wrong in (raw[:-1], raw + b"x", b"[" * 300_000, raw.replace(b"null", b"NaN ")):
        with pytest.raises(InvalidRequestError) as caught:
            load(wrong)
        assert caught.value.field == "body"
    with pytest.raises(InvalidRequestError, match="^a: .* twice"):
        load(raw.replace(b'{"a"', b'{"a": 1, "a"', 1))
