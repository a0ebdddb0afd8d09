"""The wire format: msgpack, with numpy arrays and frozen dataclasses as marked lists.

A record's int32 arrays are sent as one array of bytes, and the receiver creates views of one copy.
A step's plan and verdict have a dozen arrays, each of which would cost several Python calls.

Only the dataclasses listed here are encoded; decoding never executes code (no pickle).
"""

from __future__ import annotations

import dataclasses
from array import array
from collections.abc import Callable
from functools import lru_cache, partial
from operator import attrgetter
from typing import Any

import msgpack
import numpy as np

from ...drafters import protocol
from ...errors import WorkerError
from ...scheduler import types
from ...scheduler.sampling import SamplingParams
from ...scheduler.types import JoinedDrafts, Opening, SeatSettings, StepPlan
from .. import spec
from . import channel

_ARRAY, _RECORD, _SAMPLING, _TUPLE, _PACKED = 1, 2, 3, 4, 5
_INT32 = np.dtype(np.int32)
_PLACE = 3  # integers that describe an array: field, length, columns (0: it is a list)
_TABLE = 2  # dimensions

# A record is identified by its position: both ends run the same version.
_RECORDS: tuple[type[Any], ...] = (
    types.SpeculationOptions, types.ResumeKey, types.Request, types.Penalties, types.Bias,
    types.Masks, types.SamplingRows, types.DraftProbs, types.StepInput, JoinedDrafts, SeatSettings,
    Opening, StepPlan, types.Logprobs, types.NextDrafts, types.ThreadChoice, types.Verdict,
    types.TokenLogprobs, types.SpeculationUsage, types.StepTrace, types.RequestTimes, types.Delta,
    protocol.DraftStep, protocol.Preparation, protocol.Continuation, protocol.Outcomes,
    protocol.Drafted, protocol.HeadAsk, protocol.HeadAnswer,
    channel.ListenFeatures, channel.LinkOffer, channel.OpenFeatures,
    spec.NewWeights, spec.NewAdapter, spec.WeightsAnswer, spec.OpenLease, spec.Leased,
    spec.NewDrafters, spec.Rest, spec.TrainerLink, spec.SentWeights, spec.TakeSent, spec.ModelSpec,
    spec.WorkerReport, spec.ModelReport, spec.RankLocation, spec.HeadReport, spec.DeviceStepReport,
)  # fmt: skip


def _fields_of(record: type[Any]) -> Callable[[Any], tuple[Any, ...]]:
    """Returns a function that reads the fields of a record, in order."""
    names = [field.name for field in dataclasses.fields(record)]
    get = attrgetter(*names)
    return get if len(names) > 1 else lambda value: (get(value),)


_FIELDS = {record: _fields_of(record) for record in _RECORDS}


@dataclasses.dataclass(frozen=True, slots=True)
class _Mark:
    """The first item of a list that encodes another object, which `make` builds from the rest.

    Marks are extension types, which no plain value decodes to. A flat list costs a third of a
    nested message.
    """

    code: int
    data: bytes
    make: Callable[..., Any]

    def encoded(self) -> msgpack.ExtType:
        return msgpack.ExtType(self.code, self.data)


def _array(dtype: str, body: bytes, *shape: int) -> np.ndarray[Any, Any]:
    array: np.ndarray[Any, Any] = np.ndarray(shape, _dtype(dtype), body)
    if array.nbytes != len(body) or (shape and min(shape) < 0):
        raise ValueError(f"{len(body)} bytes for an array of {array.nbytes}")
    return array.copy()


def _unpacked(record: type[Any], packed: bytes, *fields: Any) -> Any:
    """Builds a record whose int32 arrays are in `packed`: their number, places and values."""
    flat, values = np.frombuffer(bytearray(packed), _INT32), list(fields)
    begin = 1 + _PLACE * int(flat[0]) if len(flat) else 0
    if begin < 1:
        raise ValueError(f"{record.__name__} without places of its arrays")
    places = flat[1:begin].tolist()
    for index in range(0, len(places), _PLACE):
        field, length, columns = places[index : index + _PLACE]
        if not 0 <= field < len(values) or length < 0 or columns < 0:
            raise ValueError(f"{record.__name__} with arrays at {places}")
        if not length:  # most arrays of most steps are empty
            values[field] = _no_rows(columns)
            continue
        end = begin + length * (columns or 1)
        values[field] = flat[begin:end].reshape(length, columns) if columns else flat[begin:end]
        begin = end
    if begin != len(flat):
        raise ValueError(f"{record.__name__}: {len(flat)} integers for {begin}")
    return record(*values)


@lru_cache(maxsize=64)
def _no_rows(columns: int) -> np.ndarray[Any, Any]:
    """Returns an empty list of integers, or an empty table."""
    return np.empty((0, columns) if columns else 0, _INT32)


@lru_cache(maxsize=64)
def _dtype(name: str) -> np.dtype[Any]:
    dtype = np.dtype(name)
    if dtype.kind not in "biuf":
        raise ValueError(f"arrays of {name!r}")
    return dtype


_MARKS = [
    _Mark(_ARRAY, b"", _array),
    _Mark(_TUPLE, b"", lambda *items: items),
    _Mark(_SAMPLING, b"", lambda settings: SamplingParams(**settings)),
    *(_Mark(_RECORD, bytes([index]), record) for index, record in enumerate(_RECORDS)),
    *(
        _Mark(_PACKED, bytes([index]), partial(_unpacked, record))
        for index, record in enumerate(_RECORDS)
    ),
]
_FOUND = {(mark.code, mark.data): mark for mark in _MARKS}
_ARRAY_MARK, _TUPLE_MARK, _SAMPLING_MARK, *_rest = [mark.encoded() for mark in _MARKS]
_RECORD_MARKS = dict(zip(_RECORDS, _rest[: len(_RECORDS)], strict=True))
_PACKED_MARKS = dict(zip(_RECORDS, _rest[len(_RECORDS) :], strict=True))


def encode(message: Any) -> bytes:
    """Encodes `message` (plain values, arrays, tuples, records) as bytes.

    Raises:
        TypeError: a value has no encoding.
    """
    return msgpack.packb(message, default=_default, strict_types=True, use_bin_type=True)


def decode(data: bytes | bytearray | memoryview) -> Any:
    """Decodes the message in `data`; arrays are writable copies.

    Raises:
        WorkerError: `data` is malformed.
    """
    try:
        return msgpack.unpackb(
            data, ext_hook=_ext_hook, list_hook=_list_hook, strict_map_key=False, raw=False
        )
    except (msgpack.UnpackException, ValueError, TypeError) as error:
        raise WorkerError(f"malformed message of {len(data)} bytes: {error}") from None


def _default(value: Any) -> Any:
    kind = type(value)
    if kind in _RECORD_MARKS:
        return _encoded(kind, _FIELDS[kind](value))
    if isinstance(value, np.ndarray):
        return [_ARRAY_MARK, value.dtype.str, value.tobytes(), *value.shape]
    if isinstance(value, tuple):
        return [_TUPLE_MARK, *value]
    if isinstance(value, SamplingParams):
        return [_SAMPLING_MARK, value.model_dump(exclude_defaults=True)]
    if isinstance(value, np.generic):
        return value.item()
    raise TypeError(f"{kind.__name__} cannot be sent between processes")


def _encoded(record: type[Any], fields: tuple[Any, ...]) -> list[Any]:
    """Returns the marked list of a record, whose lists and tables of int32 are packed."""
    rest, places, parts = list(fields), [0], [b""]
    for index, field in enumerate(fields):
        if type(field) is not np.ndarray or field.dtype != _INT32:
            continue
        shape = field.shape
        if len(shape) == 1:
            places += (index, shape[0], 0)
        elif len(shape) == _TABLE and shape[1]:
            places += (index, *shape)
        else:
            continue
        rest[index] = None
        if shape[0]:
            parts.append(field.tobytes())
    if len(places) == 1:
        return [_RECORD_MARKS[record], *fields]
    places[0] = len(places) // _PLACE
    parts[0] = array("i", places).tobytes()
    return [_PACKED_MARKS[record], b"".join(parts), *rest]


def _ext_hook(code: int, data: bytes) -> _Mark:
    mark = _FOUND.get((code, data))
    if mark is None:
        raise ValueError(f"unknown extension type {code}")
    return mark


def _list_hook(items: list[Any]) -> Any:
    if items and type(items[0]) is _Mark:
        return items[0].make(*items[1:])
    return items
