"""Vectors of 16 floats for numba kernels: loads, stores and arithmetic as LLVM instructions.

Kernels use addresses, and a tag names the type of the values there. Values of `HALF`, which is
bfloat16, are widened when loaded and rounded to nearest even when stored; `FULL` is float32. LLVM
compiles the vectors for any CPU; nothing here needs AVX-512.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import wraps
from inspect import Parameter, Signature, signature
from typing import Any, NamedTuple

import llvmlite.binding
import numba
import numpy as np
from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic, models, register_model

from . import LANES, Matrix, inlined

HALF = np.uint16(0)
FULL = np.float32(0)

F32, I1, I8, I16, I32, I64 = ir.FloatType(), *(ir.IntType(size) for size in (1, 8, 16, 32, 64))
VECTOR = ir.VectorType(F32, LANES)
CODES = ir.VectorType(I8, LANES)
WORDS = ir.VectorType(I32, LANES)

_SETTINGS: Any = numba.config
_IS_X86 = llvmlite.binding.get_process_triple().startswith(("x86_64", "i686"))
# A CPU named by NUMBA_CPU_NAME is another one.
HAS_PAIR_DOT = not _SETTINGS.CPU_NAME and bool(
    llvmlite.binding.get_host_cpu_features().get("avx512bf16", False)
)


class BFloat(ir.Type):
    """LLVM's bfloat, which llvmlite has no name for."""

    def _to_string(self) -> str:
        return "bfloat"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, BFloat)

    def __hash__(self) -> int:
        return hash(BFloat)


class Vector(types.Type):
    """16 floats in numba's type system."""

    def __init__(self) -> None:
        super().__init__("vector")


vector = Vector()


@register_model(Vector)
class _VectorModel(models.PrimitiveModel):
    def __init__(self, manager: Any, kind: Any) -> None:
        super().__init__(manager, kind, VECTOR)


# -- emission of LLVM instructions, shared with `tiles`


def is_half(kind: Any) -> bool:
    """Returns True if a tag's numba type stands for bfloat16."""
    assert kind in (types.uint16, types.float32), kind
    return kind == types.uint16


def constant(kind: Any, value: float) -> Any:
    """Returns `value` in every lane."""
    return ir.Constant(kind, [value] * kind.count)


def pointer(builder: Any, address: Any, kind: Any) -> Any:
    return builder.inttoptr(address, kind.as_pointer())


def emit_load(builder: Any, address: Any, kind: Any, align: int) -> Any:
    value = builder.load(pointer(builder, address, kind))
    value.align = align
    return value


def emit_store(builder: Any, value: Any, address: Any, align: int) -> None:
    builder.store(value, pointer(builder, address, value.type)).align = align


def emit_offset(builder: Any, base: Any, stride: Any, index: int) -> Any:
    return builder.add(base, builder.mul(stride, I64(index))) if index else base


def emit_mask(builder: Any, count: Any, lanes: int) -> Any:
    """Returns a mask of the lanes below `count`."""
    lane = ir.Constant(ir.VectorType(I32, lanes), list(range(lanes)))
    return builder.icmp_signed("<", lane, emit_splat(builder, builder.trunc(count, I32), lanes))


def emit_splat(builder: Any, value: Any, lanes: int = LANES) -> Any:
    kind = ir.VectorType(value.type, lanes)
    none = ir.Constant(kind, ir.Undefined)
    zeros = ir.Constant(ir.VectorType(I32, lanes), [0] * lanes)
    return builder.shuffle_vector(builder.insert_element(none, value, I32(0)), none, zeros)


def emit_call(builder: Any, name: str, result: Any, *arguments: Any) -> Any:
    """Calls an LLVM intrinsic."""
    kind = ir.FunctionType(result, [argument.type for argument in arguments])
    return builder.call(cgutils.get_or_insert_function(builder.module, kind, name), arguments)


def emit_masked_load(builder: Any, address: Any, kind: Any, align: int, mask: Any) -> Any:
    """Loads with zeros where the mask is unset; nothing is read there."""
    return emit_call(
        builder,
        f"llvm.masked.load.v{kind.count}{_name_of(kind.element)}.p0",
        kind,
        pointer(builder, address, kind),
        I32(align),
        mask,
        ir.Constant(kind, None),
    )


def emit_masked_store(builder: Any, value: Any, address: Any, align: int, mask: Any) -> None:
    """Writes where the mask is set."""
    name = f"llvm.masked.store.v{value.type.count}{_name_of(value.type.element)}.p0"
    place = pointer(builder, address, value.type)
    emit_call(builder, name, ir.VoidType(), value, place, I32(align), mask)


def _name_of(element: Any) -> str:
    return "f32" if element == F32 else f"i{element.width}"


def emit_widen(builder: Any, halves: Any) -> Any:
    """Converts bfloat16 bits to floats of the same number of lanes."""
    lanes = halves.type.count
    words = ir.VectorType(I32, lanes)
    shifted = builder.shl(builder.zext(halves, words), constant(words, 16))
    return builder.bitcast(shifted, ir.VectorType(F32, lanes))


def emit_round(builder: Any, value: Any) -> Any:
    """Rounds floats to bfloat16 bits, to nearest even; NaN stays NaN."""
    lanes = value.type.count
    if HAS_PAIR_DOT and lanes == LANES:  # numbers below the normal ones become 0
        kind = ir.VectorType(BFloat(), LANES)
        rounded = emit_call(builder, "llvm.x86.avx512bf16.cvtneps2bf16.512", kind, value)
        return builder.bitcast(rounded, ir.VectorType(I16, lanes))
    words = ir.VectorType(I32, lanes)
    bits = builder.bitcast(value, words)
    odd = builder.and_(builder.lshr(bits, constant(words, 16)), constant(words, 1))
    rounded = builder.add(builder.add(bits, odd), constant(words, 0x7FFF))
    ordered = builder.fcmp_ordered("ord", value, value)
    rounded = builder.select(ordered, rounded, constant(words, 0x7FC00000))
    rounded = builder.lshr(rounded, constant(words, 16))
    return builder.trunc(rounded, ir.VectorType(I16, lanes))


def emit_places(builder: Any, count: int) -> list[Any]:
    """Returns vectors in registers, initially zero."""
    return [cgutils.alloca_once_value(builder, constant(VECTOR, 0.0)) for _ in range(count)]


def emit_bias(builder: Any, bias: Any, half: bool, panel: int, mask: Any) -> Any:
    """The biases of a panel's columns, which begin at an address; zeros if that is 0."""
    (shift,) = emit_places(builder, 1)
    with builder.if_then(builder.icmp_signed("!=", bias, I64(0))):
        kind, width = (ir.VectorType(I16, LANES), 2) if half else (VECTOR, 4)
        place = builder.add(bias, I64(panel * LANES * width))
        values = emit_masked_load(builder, place, kind, width, mask)
        builder.store(emit_widen(builder, values) if half else values, shift)
    return builder.load(shift)


def emit_sum(builder: Any, value: Any, operation: str = "fadd") -> Any:
    """All lanes, halves added to halves; or their maximum."""
    lanes = value.type.count
    while lanes > 1:
        lanes //= 2
        low, high = (
            builder.shuffle_vector(value, value, ir.Constant(ir.VectorType(I32, lanes), part))
            for part in (list(range(lanes)), list(range(lanes, 2 * lanes)))
        )
        if operation == "fadd":
            value = builder.fadd(low, high)
        else:
            value = builder.select(builder.fcmp_ordered(">", low, high), low, high)
    return builder.extract_element(value, I32(0))


def emit_fma(builder: Any, left: Any, right: Any, addend: Any) -> Any:
    return emit_call(builder, "llvm.fma.v16f32", VECTOR, left, right, addend)


# -- what kernels call


def instruction(describe: Callable[..., tuple[Any, Callable[..., Any]]]) -> Any:
    """Returns a function that kernels can call.

    By the types of its arguments, `describe` returns its signature and the function that emits its
    instructions. This takes a builder and the arguments, and returns the result, if there is one.
    """

    @wraps(describe)
    def described(_: Any, *kinds: Any) -> tuple[Any, Any]:
        found, emit = describe(*kinds)

        def emitted(context: Any, builder: Any, _: Any, arguments: Any) -> Any:
            value = emit(builder, *arguments)
            return context.get_dummy_value() if value is None else value

        return found, emitted

    first = Parameter("context", Parameter.POSITIONAL_ONLY)
    described.__signature__ = Signature([first, *signature(describe).parameters.values()])  # type: ignore[attr-defined]
    return intrinsic(described)


@instruction
def load(kind: Any, address: Any) -> Any:
    """Loads 16 values."""
    found = vector(kind, types.int64)
    if is_half(kind):
        halves = ir.VectorType(I16, LANES)
        return found, lambda b, _, address: emit_widen(b, emit_load(b, address, halves, 2))
    return found, lambda b, _, address: emit_load(b, address, VECTOR, 4)


@instruction
def rounded(kind: Any, value: Any) -> Any:
    """Returns the value that a `load` returns after a `store`."""
    if not is_half(kind):
        return vector(kind, vector), lambda b, _, value: value
    return vector(kind, vector), lambda b, _, value: emit_widen(b, emit_round(b, value))


@instruction
def load_some(kind: Any, address: Any, count: Any) -> Any:
    """Loads the first `count` of 16 values; zeros beyond, where nothing is read."""

    def emit(builder: Any, _: Any, address: Any, count: Any) -> Any:
        mask = emit_mask(builder, count, LANES)
        if not is_half(kind):
            return emit_masked_load(builder, address, VECTOR, 4, mask)
        halves = ir.VectorType(I16, LANES)
        return emit_widen(builder, emit_masked_load(builder, address, halves, 2, mask))

    return vector(kind, types.int64, types.int64), emit


@instruction
def store(kind: Any, address: Any, value: Any) -> Any:
    def emit(builder: Any, _: Any, address: Any, value: Any) -> None:
        value = emit_round(builder, value) if is_half(kind) else value
        emit_store(builder, value, address, 2 if is_half(kind) else 4)

    return types.void(kind, types.int64, vector), emit


@instruction
def store_some(kind: Any, address: Any, value: Any, count: Any) -> Any:
    """Stores the first `count` of 16 values."""

    def emit(builder: Any, _: Any, address: Any, value: Any, count: Any) -> None:
        value = emit_round(builder, value) if is_half(kind) else value
        mask = emit_mask(builder, count, LANES)
        emit_masked_store(builder, value, address, 2 if is_half(kind) else 4, mask)

    return types.void(kind, types.int64, vector, types.int64), emit


@instruction
def load_one(kind: Any, address: Any) -> Any:
    """Loads one scalar of the tag's own type: a float, an integer, or bfloat16's bits."""
    floats = {types.float32: F32, types.float64: ir.DoubleType()}
    stored = floats.get(kind) or ir.IntType(kind.bitwidth)
    return kind(kind, types.int64), lambda b, _, address: emit_load(
        b, address, stored, kind.bitwidth // 8
    )


@instruction
def store_one(address: Any, value: Any) -> Any:
    """Stores one scalar of its own type."""
    size = value.bitwidth // 8
    return types.void(types.int64, value), lambda b, address, value: emit_store(
        b, value, address, size
    )


@instruction
def splat(value: Any) -> Any:
    """Returns `value` in every lane."""
    return vector(types.float32), emit_splat


@instruction
def total(value: Any) -> Any:
    """Returns the sum of all lanes."""
    return types.float32(vector), emit_sum


@instruction
def greatest(value: Any) -> Any:
    """Returns the largest lane."""
    return types.float32(vector), lambda b, value: emit_sum(b, value, "fmax")


@instruction
def fma(left: Any, right: Any, addend: Any) -> Any:
    """Computes left * right + addend."""
    return vector(vector, vector, vector), emit_fma


def _of_two(emit: Callable[[Any, Any, Any], Any]) -> Any:
    """Returns an instruction with two vector operands."""

    @instruction
    def operation(left: Any, right: Any) -> Any:
        return vector(vector, vector), emit

    return operation


add = _of_two(lambda b, left, right: b.fadd(left, right))
sub = _of_two(lambda b, left, right: b.fsub(left, right))
mul = _of_two(lambda b, left, right: b.fmul(left, right))
div = _of_two(lambda b, left, right: b.fdiv(left, right))
larger = _of_two(lambda b, left, right: b.select(b.fcmp_ordered(">", left, right), left, right))
smaller = _of_two(lambda b, left, right: b.select(b.fcmp_ordered("<", left, right), left, right))


_LOG2_E, _LN2_HIGH, _LN2_LOW = 1.4426950408889634, 0.693145751953125, 1.428606765330187e-06
_EXP = (1 / 720, 1 / 120, 1 / 24, 1 / 6, 0.5, 1.0, 1.0)
# Added to a float below 2 to the 22, it leaves the nearest whole number in the last bits.
_ROUNDS = float(3 << 22)


def _emit_power(builder: Any, rounded: Any, rest: Any, series: Sequence[float]) -> Any:
    """2 to a whole number, to which `_ROUNDS` was added, times the series of `rest`."""
    value = constant(VECTOR, series[0])
    for factor in series[1:]:
        value = emit_fma(builder, value, rest, constant(VECTOR, factor))
    exponent = builder.shl(builder.bitcast(rounded, WORDS), constant(WORDS, 23))
    return builder.bitcast(builder.add(builder.bitcast(value, WORDS), exponent), VECTOR)


def _emit_at_least(builder: Any, value: Any, least: float) -> Any:
    low = constant(VECTOR, least)
    return builder.select(builder.fcmp_ordered("<", value, low), low, value)


@instruction
def exp(value: Any) -> Any:
    """e to the value, within three units in the last place; 0 below -87."""
    return vector(vector), _emit_exp


def _emit_exp(builder: Any, exponent: Any) -> Any:
    high, rounds = constant(VECTOR, 88.0), constant(VECTOR, _ROUNDS)
    vanishes = builder.fcmp_ordered("<", exponent, constant(VECTOR, -87.0))
    value = _emit_at_least(builder, exponent, -87.0)
    value = builder.select(builder.fcmp_ordered(">", value, high), high, value)
    rounded = emit_fma(builder, value, constant(VECTOR, _LOG2_E), rounds)
    power = builder.fsub(rounded, rounds)
    rest = emit_fma(builder, power, constant(VECTOR, -_LN2_HIGH), value)
    rest = emit_fma(builder, power, constant(VECTOR, -_LN2_LOW), rest)
    power = _emit_power(builder, rounded, rest, _EXP)
    return builder.select(vanishes, constant(VECTOR, 0.0), power)


# The closest to 2 to the f between -1/2 and 1/2, exact at 0; largest relative error 1e-7.
_POWER = (0.0013264727, 0.0096715126, 0.0555073374, 0.2402224209, 0.6931469776, 1.0)


@instruction
def power_of_two(value: Any) -> Any:
    """2 to the value of at most 127, within two units in the last place.

    Below -126 it is less than 2 to the -125, and 0 from -127 down, whose exponent has no bits.
    """
    return vector(vector), _emit_power_of_two


def _emit_power_of_two(builder: Any, exponent: Any) -> Any:
    rounds = constant(VECTOR, _ROUNDS)
    value = _emit_at_least(builder, exponent, -127.0)
    rounded = builder.fadd(value, rounds)
    rest = builder.fsub(value, builder.fsub(rounded, rounds))
    return _emit_power(builder, rounded, rest, _POWER)


# -- the same for what is rounded to bfloat16, to a tenth of its last bit

# The closest to 2 to the f between 0 and 1; largest relative error 7.5e-5.
_SHORT_POWER = (0.07802452, 0.22606716, 0.69583354, 0.99992522)


def _emit_short_power(builder: Any, value: Any) -> Any:
    """2 to any value, 0 below -125: numbers beneath the normal ones take a hundred cycles each.

    AVX-512 takes the whole number below the value apart and puts it back.
    """
    zero, all_lanes, current = constant(VECTOR, 0.0), ir.Constant(I16, -1), I32(4)
    is_normal = builder.fcmp_ordered(">=", value, constant(VECTOR, -125.0))
    normal = builder.bitcast(is_normal, I16)
    name, to_floor = "llvm.x86.avx512.mask.reduce.ps.512", I32(9)
    rest = emit_call(builder, name, VECTOR, value, to_floor, zero, all_lanes, current)
    power = constant(VECTOR, _SHORT_POWER[0])
    for factor in _SHORT_POWER[1:]:
        power = emit_fma(builder, power, rest, constant(VECTOR, factor))
    name = "llvm.x86.avx512.mask.scalef.ps.512"
    return emit_call(builder, name, VECTOR, power, value, zero, normal, current)


@instruction
def weight_of(kind: Any, value: Any) -> Any:
    """`power_of_two` for what is rounded to a tag's type."""
    emit = _emit_short_power if is_half(kind) and HAS_PAIR_DOT else _emit_power_of_two
    return vector(kind, vector), lambda b, _, value: emit(b, value)


# -- softmax's weights as bfloat16 for AMX, by whole numbers of 16 bits
#
# bfloat16 has seven bits behind its exponent. So a number of 128ths of powers of two, counted from
# 2 to the -127 on, is the weight's bits, but for how far the line between two neighbouring powers
# lies above the curve; a table has that by six of the seven bits. The error is 1.4 times that of
# rounding a weight to bfloat16, and 32 weights take ten instructions in place of forty.

PART = np.float32(128)
"""Steps of a weight per power of two."""
UNITY = np.float32(127 * 128)
"""Steps up to a weight of 1."""
_ABOVE = [
    round(sum(part - 128 * (2 ** (part / 128) - 1) for part in (2 * index, 2 * index + 1)) / 2)
    for index in range(64)
]
_PAIRS = ir.VectorType(I16, 2 * LANES)


@instruction
def whole_steps_of(first: Any, second: Any) -> Any:
    """32 numbers to the nearest whole ones of 16 bits; 0 for those below 0.

    Quarters of the two vectors lie in turns, as AVX-512 packs them.
    """

    def emit(builder: Any, *numbers: Any) -> Any:
        name, all_lanes, current = "llvm.x86.avx512.mask.cvtps2dq.512", ir.Constant(I16, -1), I32(4)
        zero = constant(WORDS, 0)
        words = [emit_call(builder, name, WORDS, a, zero, all_lanes, current) for a in numbers]
        packed = emit_call(builder, "llvm.x86.avx512.packusdw.512", _PAIRS, *words)
        return builder.bitcast(packed, VECTOR)

    return vector(vector, vector), emit


@instruction
def weights_of_steps(steps: Any) -> Any:
    """bfloat16 of 32 whole numbers below 255 * 128: 2 to `steps / PART - 127`."""

    def emit(builder: Any, steps: Any) -> Any:
        octets, steps = ir.VectorType(I8, 64), builder.bitcast(steps, _PAIRS)
        index = builder.bitcast(builder.lshr(steps, constant(_PAIRS, 1)), octets)
        name, table = "llvm.x86.avx512.permvar.qi.512", ir.Constant(octets, _ABOVE)
        above = emit_call(builder, name, octets, table, index)
        low = ir.Constant(ir.VectorType(I1, 64), [1, 0] * 32)
        above = builder.bitcast(builder.select(low, above, constant(octets, 0)), _PAIRS)
        return builder.bitcast(builder.sub(steps, above), VECTOR)

    return vector(vector), emit


@instruction
def either(left: Any, right: Any) -> Any:
    """The bits of both."""

    def emit(builder: Any, *sides: Any) -> Any:
        left, right = (builder.bitcast(each, WORDS) for each in sides)
        return builder.bitcast(builder.or_(left, right), VECTOR)

    return vector(vector, vector), emit


@instruction
def has_steps_above(steps: Any) -> Any:
    """Whether one of 32 whole numbers is 128 * `PART` or more."""

    def emit(builder: Any, steps: Any) -> Any:
        steps = builder.and_(builder.bitcast(steps, _PAIRS), constant(_PAIRS, 0xC000))
        above = builder.icmp_unsigned("!=", steps, constant(_PAIRS, 0))
        return builder.icmp_unsigned("!=", builder.bitcast(above, I32), I32(0))

    return types.boolean(vector), emit


@instruction
def add_pairs(sums: Any, pairs: Any) -> Any:
    """Adds both values of every bfloat16 pair to their lane."""

    def emit(builder: Any, sums: Any, pairs: Any) -> Any:
        kind = ir.VectorType(BFloat(), 2 * LANES)
        ones = builder.bitcast(constant(ir.VectorType(I16, 2 * LANES), 0x3F80), kind)
        name = "llvm.x86.avx512bf16.dpbf16ps.512"
        return emit_call(builder, name, VECTOR, sums, builder.bitcast(pairs, kind), ones)

    return vector(vector, vector), emit


@instruction
def sigmoid(kind: Any, value: Any) -> Any:
    """1 / (1 + exp(-value)) for what is rounded to a tag's type, as `weight_of`."""
    is_short = is_half(kind) and HAS_PAIR_DOT

    def emit(builder: Any, _: Any, value: Any) -> Any:
        one = constant(VECTOR, 1.0)
        if not is_short:
            power = _emit_exp(builder, builder.fsub(constant(VECTOR, 0.0), value))
            return builder.fdiv(one, builder.fadd(one, power))
        power = _emit_short_power(builder, builder.fmul(value, constant(VECTOR, -_LOG2_E)))
        name, zero = "llvm.x86.avx512.rcp14.ps.512", constant(VECTOR, 0.0)
        grown = builder.fadd(one, power)
        return emit_call(builder, name, VECTOR, grown, zero, ir.Constant(I16, -1))

    return vector(kind, vector), emit


# -- floats of one byte: a sign, an exponent, and so many bits of mantissa (`KVFormat`)
#
# With the exponent moved to where a float has it, a code is a float, but for the bias. The smallest
# have no exponent: they count units, as do the last bits of any float of the right size.


class _Bias(NamedTuple):
    """What follows from the number of mantissa bits; all vectors."""

    shift: Any  # from a code's bits to a float's
    offset: Any  # of the exponent, in a float's bits
    least: Any  # float, the smallest with an exponent

    @staticmethod
    def emit(builder: Any, bits: Any) -> _Bias:
        """Emits the constants for `bits`, an int64 that does not change in a loop."""
        bias = builder.sub(builder.shl(I64(1), builder.sub(I64(6), bits)), I64(1))
        numbers = [
            builder.sub(I64(23), bits),
            builder.shl(builder.sub(I64(127), bias), I64(23)),
            builder.shl(builder.sub(I64(128), bias), I64(23)),
        ]
        shift, offset, least = [emit_splat(builder, builder.trunc(n, I32)) for n in numbers]
        return _Bias(shift, offset, builder.bitcast(least, VECTOR))


def _emit_decode(builder: Any, codes: Any, bits: Any) -> Any:
    bias, words = _Bias.emit(builder, bits), builder.zext(codes, WORDS)
    magnitude = builder.shl(builder.and_(words, constant(WORDS, 0x7F)), bias.shift)
    least_bits = builder.add(magnitude, builder.bitcast(bias.least, WORDS))
    tiny = builder.fsub(builder.bitcast(least_bits, VECTOR), bias.least)
    value = builder.bitcast(builder.add(magnitude, bias.offset), VECTOR)
    is_tiny = builder.icmp_unsigned("<", magnitude, constant(WORDS, 1 << 23))
    value = builder.bitcast(builder.select(is_tiny, tiny, value), WORDS)
    sign = builder.shl(builder.and_(words, constant(WORDS, 0x80)), constant(WORDS, 24))
    return builder.bitcast(builder.or_(value, sign), VECTOR)


def _emit_encode(builder: Any, value: Any, bits: Any) -> Any:
    bias, words = _Bias.emit(builder, bits), builder.bitcast(value, WORDS)
    magnitude = builder.and_(words, constant(WORDS, 0x7FFFFFFF))
    one = constant(WORDS, 1)
    odd = builder.and_(builder.lshr(magnitude, bias.shift), one)
    half = builder.sub(builder.shl(one, builder.sub(bias.shift, one)), one)
    rounded = builder.add(magnitude, builder.add(half, odd))
    code = builder.lshr(builder.sub(rounded, bias.offset), bias.shift)
    units = builder.add(
        builder.bitcast(bias.least, WORDS), builder.shl(bias.shift, constant(WORDS, 23))
    )
    size = builder.bitcast(magnitude, VECTOR)
    unit = builder.bitcast(units, VECTOR)
    counted = builder.bitcast(builder.fadd(size, unit), WORDS)
    is_tiny = builder.fcmp_ordered("<", size, bias.least)
    code = builder.select(is_tiny, builder.sub(counted, units), code)
    sign = builder.and_(builder.lshr(words, constant(WORDS, 24)), constant(WORDS, 0x80))
    return builder.trunc(builder.or_(code, sign), CODES)


@instruction
def load_codes(address: Any, bits: Any) -> Any:
    """16 values of codes with so many bits of mantissa."""
    return vector(types.int64, types.int64), lambda b, address, bits: _emit_decode(
        b, emit_load(b, address, CODES, 1), bits
    )


@instruction
def load_some_codes(address: Any, bits: Any, count: Any) -> Any:
    """The first `count` of them; zeros beyond, where nothing is read."""

    def emit(builder: Any, address: Any, bits: Any, count: Any) -> Any:
        mask = emit_mask(builder, count, LANES)
        return _emit_decode(builder, emit_masked_load(builder, address, CODES, 1, mask), bits)

    return vector(types.int64, types.int64, types.int64), emit


@instruction
def store_some_codes(address: Any, value: Any, bits: Any, count: Any) -> Any:
    """The codes of the first `count` values, which are not larger than the largest that has one."""

    def emit(builder: Any, address: Any, value: Any, bits: Any, count: Any) -> None:
        codes = _emit_encode(builder, value, bits)
        emit_masked_store(builder, codes, address, 1, emit_mask(builder, count, LANES))

    return types.void(types.int64, vector, types.int64, types.int64), emit


# -- keys and values of the next tile, which are fetched from memory while this one is used
#
# A burst of fetches would fill the buffers of lines under way, and the arithmetic behind it would
# have none under way. So every quad of units of 16 keys of every head begins to read four lines of
# keys and four of values.

_LINE_BITS = 6  # a line of memory has 64 bytes
_SECOND_CACHE = I32(2)  # LLVM's name of the place for fetched lines


class Ahead(NamedTuple):
    """What is read while a tile is used."""

    keys: Matrix  # from the first key head of a pass on
    values: Matrix
    slots: int  # address of the numbers of the next tile's keys
    num_keys: int  # of the next tile
    first_quad: int  # of the pass, which has those of several heads
    bits: int  # 0: all heads are in the pass, so that rows have nothing between them; else 2


@inlined
def fetch_lines(ahead, first, quad):
    """Begins to read what belongs to a quad of units of 16 keys, from `first` of the tile on."""
    keys, values = ahead.keys, ahead.values
    if first < ahead.num_keys:
        _FETCH(
            keys.start, keys.to_row, values.start, values.to_row, ahead.slots + first * 8,
            ahead.first_quad + quad, ahead.bits,
        )  # fmt: skip


@instruction
def _FETCH(
    keys: Any, to_key: Any, values: Any, to_value: Any, slots: Any, quad: Any, bits: Any
) -> Any:
    return types.void(*[types.int64] * 7), lambda b, *lines: _emit_lines(b, lines)


def emit_fetch_lines(builder: Any, lines: Sequence[Any], quad: Any) -> None:
    """Emits `fetch_lines`, from the first quad in `lines` on; nothing if their slots are 0."""
    *places, slots, first_quad, bits = lines
    with cgutils.if_likely(builder, builder.icmp_signed("!=", slots, I64(0))):
        _emit_lines(builder, [*places, slots, builder.add(first_quad, quad), bits])


def _emit_lines(builder: Any, lines: Sequence[Any]) -> None:
    """As many quads as a row has are as many lines of four rows, of which 16 keys have four."""
    keys, to_key, values, to_value, slots, quad, bits = lines
    row = builder.and_(quad, builder.sub(builder.shl(I64(1), bits), I64(1)))
    shift = builder.shl(builder.lshr(quad, bits), I64(_LINE_BITS))
    numbers = builder.add(slots, builder.mul(row, I64(8)))
    for group in range(4):
        slot = emit_load(builder, builder.add(numbers, I64(group * 32)), I64, 8)
        for start, to_row in ((keys, to_key), (values, to_value)):
            place = builder.add(builder.add(start, shift), builder.mul(slot, to_row))
            emit_fetch(builder, place)


def emit_fetch(builder: Any, address: Any) -> None:
    """Into the second cache: the few buffers of the first one's misses would be the bound."""
    place = builder.inttoptr(address, ir.IntType(8).as_pointer())
    emit_call(builder, "llvm.prefetch.p0", ir.VoidType(), place, I32(0), _SECOND_CACHE, I32(1))


# -- numbers that several threads read and write, and waiting for them


@instruction
def fetch_add(address: Any, value: Any) -> Any:
    """Adds to an int64 shared between threads; returns its previous value."""
    return types.int64(types.int64, types.int64), lambda b, address, value: b.atomic_rmw(
        "add", pointer(b, address, I64), value, "seq_cst"
    )


@instruction
def peek(address: Any) -> Any:
    """Reads the current value of an int64 that other threads write."""
    return types.int64(types.int64), lambda b, address: b.load_atomic(
        pointer(b, address, I64), "seq_cst", 8
    )


@instruction
def pause() -> Any:
    """Pauses briefly in a loop that waits."""

    def emit(builder: Any) -> None:
        if _IS_X86:
            emit_call(builder, "llvm.x86.sse2.pause", ir.VoidType())

    return types.void(), emit


LINE = 128  # bytes between numbers of different threads


class Claims(NamedTuple):
    """How threads share units of work: each takes its own share first, then others' units."""

    counters: int  # addresses: of each share how many were taken, then of all that are done
    num_units: int
    num_threads: int
    member: int  # this thread's number


@inlined
def next_unit(claims):
    """Claims a unit for this thread; returns -1 if none is left."""
    count = claims.num_threads
    for index in range(count):
        share = (claims.member + index) % count
        first, end = share * claims.num_units // count, (share + 1) * claims.num_units // count
        counter = claims.counters + share * LINE
        if peek(counter) < end - first:
            unit = first + fetch_add(counter, 1)
            if unit < end:
                return unit
    return -1


@inlined
def unit_done(claims):
    fetch_add(claims.counters + claims.num_threads * LINE, 1)


@inlined
def num_done(claims):
    return peek(claims.counters + claims.num_threads * LINE)


def call_of(*kinds: Any) -> Any:
    """Returns `call(address, ...)` for a function without a result, with these argument types."""

    def emit(builder: Any, address: Any, *values: Any) -> None:
        kind = ir.FunctionType(ir.VoidType(), [each.type for each in values])
        builder.call(pointer(builder, address, kind), values)

    def call(*_: Any) -> Any:
        return types.void(types.int64, *kinds), emit

    names = ("address", *(f"argument_{index}" for index in range(len(kinds))))
    named = [Parameter(name, Parameter.POSITIONAL_ONLY) for name in names]
    call.__signature__ = Signature(named)  # type: ignore[attr-defined]
    return instruction(call)
