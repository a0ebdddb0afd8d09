"""What goes over the wire comes back as it was; what is not ours is refused."""

from __future__ import annotations

import msgpack
import numpy as np
import pytest

from outrider.errors import WorkerError
from outrider.scheduler.sampling import SamplingParams
from outrider.scheduler.types import (
    Bias,
    Delta,
    Draft,
    JoinedDrafts,
    Masks,
    Request,
    SamplingRows,
    SpeculationOptions,
    StepPlan,
    TokenLogprobs,
    ints,
)
from outrider.tests.helpers.engines import same
from outrider.workers.spec import TakeSent
from outrider.workers.transport import wire

REQUEST = Request(
    "r1",
    ints([1, 2, 3]),
    SamplingParams(temperature=0.5, stop=["x"], logit_bias={7: -3.0}, max_tokens=None),
    seed=-(2**62),
    eos_token_ids=(0, 5),
    speculation=SpeculationOptions(max_draft_len=2),
)
ROWS = SamplingRows(
    temperature=np.zeros(2, np.float32),
    top_k=ints([0, 3]),
    top_p=np.ones(2, np.float32),
    min_p=np.zeros(2, np.float32),
    seeds=np.array([2**62, -1], np.int64),
    min_new_tokens=ints([0, 1]),
    num_logprobs=ints([-1, 2]),
    ends=(ints([]), ints([0])),
    biases=(Bias(1, ints([4]), np.array([0.5], np.float32)),),
)
DELTA = Delta("r1", (4, 5), 1, "stop", logprobs=(TokenLogprobs(-0.5, ((4, -0.5),)),))


@pytest.mark.parametrize(
    "message",
    [REQUEST, ROWS, [DELTA, (1, "é", None, {"a": b"\x00"})], TakeSent("7f-3"), TakeSent("")],
)
def test_messages_survive(message):
    assert same(wire.decode(wire.encode(message)), message)


def test_decoded_arrays_may_be_written():
    array = wire.decode(wire.encode(ints([1, 2])))
    array[0] = 9


def test_only_listed_types_cross():
    with pytest.raises(TypeError, match="Draft"):
        wire.encode(Draft(ints([1]), ints([-1])))
    with pytest.raises(TypeError, match="object"):
        wire.encode(object())


@pytest.mark.parametrize("data", [b"", b"\xc1", b"\xc7\x01\x63x", wire.encode([1, 2])[:-1]])
def test_nonsense_is_a_worker_error(data):
    with pytest.raises(WorkerError, match="malformed"):
        wire.decode(data)


@pytest.mark.parametrize(
    "array",
    [
        np.zeros((0, 3), np.int32),
        np.array(7, np.int64),
        np.arange(12, dtype=np.float32).reshape(3, 4).T,
        np.array([True, False]),
        np.arange(6, dtype=np.uint8)[::2],
    ],
)
def test_arrays_of_any_layout_survive(array):
    (found,) = wire.decode(wire.encode([array]))
    assert found.flags.writeable
    assert found.dtype == array.dtype
    np.testing.assert_array_equal(found, array, strict=True)


def test_an_array_that_does_not_fit_its_bytes_is_refused():
    for wrong in (["|O", b"x" * 8, 1], ["<i4", b"x" * 8, 1], ["<i4", b"x", 1], ["<i4", b"", -1]):
        with pytest.raises(WorkerError, match="malformed"):
            wire.decode(msgpack.packb([msgpack.ExtType(1, b""), *wrong]))


def test_lists_are_never_taken_for_what_marks_begin():
    message = [[1, "<i4", b"abcd", 1], [4, 5], [[], [b"\x01"], {"list": [2, [3]]}], ("a", [1])]
    assert wire.decode(wire.encode(message)) == message


PLAN = StepPlan(
    step=7,
    seats=ints([0, 2]),
    context_lens=ints([5, -1]),
    chunk_lens=ints([1, 1]),
    max_nodes=ints([2, 0]),
    tokens=ints([4]),
    blocks=ints([[0, 3, 9], [2, 0, 4]]),
    kv_moves=np.zeros((0, 2), np.int32),
    drafts=JoinedDrafts(
        ints([8, 9]), ints([2, 0]), masks=Masks(ints([0]), np.zeros((1, 0), np.int32))
    ),
    thinking=np.array([True, False]),
)


def test_a_plan_survives_and_its_arrays_may_be_written():
    found = wire.decode(wire.encode(PLAN))
    assert same(found, PLAN)
    found.seats[0] = found.blocks[1, 2] = 77
    assert found.seats.tolist() == [77, 2]
    assert found.blocks.tolist() == [[0, 3, 9], [2, 0, 77]]
    assert found.drafts.tokens.tolist() == [8, 9]


@pytest.mark.parametrize(
    "integers",
    [
        [],
        [-1],
        [1],  # without its place
        [1, 0, 1],
        [1, 0, 1, 0],  # without its value
        [1, 0, 1, 0, 5, 6],  # with one too many
        [1, 9, 1, 0, 5],  # no such field
        [1, -1, 1, 0, 5],
        [1, 0, -1, 0, 5],
        [1, 0, 1, 2, 5],
        [2, 0, 1, 0, 5],
    ],
)
def test_arrays_that_are_not_where_a_record_has_them_are_refused(integers):
    index = bytes([wire._RECORDS.index(Bias)])
    good = wire.decode(_packed(index, [1, 1, 2, 0, 5, 6]))
    assert same(good, Bias(3, ints([5, 6]), 2.5))
    with pytest.raises(WorkerError, match="malformed"):
        wire.decode(_packed(index, integers))
    with pytest.raises(WorkerError, match="malformed"):
        wire.decode(_packed(index, integers, b"x"))


def _packed(index, integers, more=b""):
    return msgpack.packb([msgpack.ExtType(5, index), ints(integers).tobytes() + more, 3, None, 2.5])
