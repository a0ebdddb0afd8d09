"""Prepares attention: normed and rotated queries and keys, and keys and values in their slots.

The inputs from a step and a layer are in two rows of integers and one of floats, in the order of
the fields of `Step` and `Layer`, so a call passes three addresses instead of forty numbers.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from . import LANES, inlined
from .elementwise import RowNorm, norm_row
from .vector import (
    FULL,
    fma,
    larger,
    load_one,
    load_some,
    mul,
    smaller,
    splat,
    store_some,
    store_some_codes,
    sub,
)

INT64, INT32, FLOAT64 = np.int64(0), np.int32(0), np.float64(0)


class Step(NamedTuple):
    """A step's row of integers: counts, then addresses of its arrays (`PagedStep`)."""

    num_tokens: int
    num_seqs: int
    max_blocks: int
    num_words: int
    block_size: int
    positions: int
    slots: int
    row_index: int
    query_start: int
    context_lens: int
    tree_start: int
    block_tables: int
    ancestors: int
    alignment: int  # tiles of keys begin at multiples of it


NUM_STEP_FIELDS = len(Step._fields)


class Layer(NamedTuple):
    """A layer's row of integers (`AttentionSpec`), then its row of float64."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    value_dim: int
    rotary_begin: int
    rotary_dim: int
    window: int  # 0: none
    chunk: int  # 0: none
    sinks: int
    has_query_norm: int
    query_weight: int
    has_key_norm: int
    key_weight: int
    norms_all_heads: int
    norms_after_rotation: int
    shared_values: int  # a key's first columns are its value
    code_bits: int  # of mantissa, of codes in the cache (`KVCode`); 0: the cache has no codes
    scale: float = 0.0
    softcap: float = 0.0
    query_eps: float = 0.0
    key_eps: float = 0.0
    key_scale: float = 1.0  # of codes
    value_scale: float = 1.0
    largest: float = 0.0  # that has a code


NUM_INTEGERS = 17  # of a layer's fields


class Angles(NamedTuple):
    """Addresses of a step's cosines and sines; 0: no rotation."""

    cos: int
    sin: int


class Cache(NamedTuple):
    """Addresses of a layer's keys and values."""

    keys: int
    values: int


@inlined
def item64(row, index):
    return load_one(INT64, row + index * 8)


@inlined
def number(row, index):
    return load_one(FLOAT64, row + index * 8)


@inlined
def item(array, index):
    """Returns an element of an int32 array."""
    return np.int64(load_one(INT32, array + index * 4))


@inlined
def read_step(row):
    return Step(
        item64(row, 0), item64(row, 1), item64(row, 2), item64(row, 3), item64(row, 4),
        item64(row, 5), item64(row, 6), item64(row, 7), item64(row, 8), item64(row, 9),
        item64(row, 10), item64(row, 11), item64(row, 12), item64(row, 13),
    )  # fmt: skip


@inlined
def read_layer(row, floats):
    return Layer(
        item64(row, 0), item64(row, 1), item64(row, 2), item64(row, 3), item64(row, 4),
        item64(row, 5), item64(row, 6), item64(row, 7), item64(row, 8), item64(row, 9),
        item64(row, 10), item64(row, 11), item64(row, 12), item64(row, 13), item64(row, 14),
        item64(row, 15), item64(row, 16), number(floats, 0), number(floats, 1), number(floats, 2),
        number(floats, 3), number(floats, 4), number(floats, 5), number(floats, 6),
    )  # fmt: skip


@inlined
def _rotate(kind, heads, count, to_head, angles, half):
    """Rotates the first `half` values of every head with the next `half`."""
    tag, width = kind.tag, kind.width
    for begin in range(0, half, LANES):
        left = half - begin
        along, across = (
            load_some(FULL, angles.cos + begin * 4, left),
            load_some(FULL, angles.sin + begin * 4, left),
        )
        for head in range(count):
            low = heads + head * to_head + begin * width
            high = low + half * width
            first, second = load_some(tag, low, left), load_some(tag, high, left)
            store_some(tag, low, sub(mul(first, along), mul(second, across)), left)
            store_some(tag, high, fma(second, along, mul(first, across)), left)


@inlined
def _norm_heads(kind, heads, count, norm, layer):
    if norm.is_there == 0:
        return
    dim = layer.head_dim
    if layer.norms_all_heads:
        count, dim = 1, count * dim
    for head in range(count):
        place = heads + head * dim * kind.width
        norm_row(kind, place, norm, place, dim)


@inlined
def _scale_heads(kind, heads, size, factor):
    tag, width = kind.tag, kind.width
    factors = splat(factor)
    for begin in range(0, size, LANES):
        place = heads + begin * width
        store_some(tag, place, mul(load_some(tag, place, size - begin), factors), size - begin)


@inlined
def _prepare_heads(kind, layer, heads, count, norm, angles):
    if not layer.norms_after_rotation:
        _norm_heads(kind, heads, count, norm, layer)
    half = layer.rotary_dim // 2
    if angles.cos and half:
        first = heads + layer.rotary_begin * kind.width
        _rotate(kind, first, count, layer.head_dim * kind.width, angles, half)
    if layer.norms_after_rotation:
        _norm_heads(kind, heads, count, norm, layer)


@inlined
def _copy(kind, source, target, size):
    for begin in range(0, size, LANES):
        offset, left = begin * kind.width, size - begin
        store_some(kind.tag, target + offset, load_some(kind.tag, source + offset, left), left)


@inlined
def _encode(kind, source, target, size, scale, layer):
    factor, most = splat(np.float32(1) / np.float32(scale)), np.float32(layer.largest)
    high, low = splat(most), splat(-most)
    for begin in range(0, size, LANES):
        value = mul(load_some(kind.tag, source + begin * kind.width, size - begin), factor)
        value = larger(smaller(value, high), low)
        store_some_codes(target + begin, value, layer.code_bits, size - begin)


@inlined
def prepare_rows(kind, joined, angles, temperature, step, layer, cache):
    width = kind.width
    query_size = layer.num_heads * layer.head_dim
    key_size = layer.num_kv_heads * layer.head_dim
    value_size = 0 if layer.shared_values else layer.num_kv_heads * layer.value_dim
    half = layer.rotary_dim // 2
    for row in range(step.num_tokens):
        query = joined + row * (query_size + key_size + value_size) * width
        key = query + query_size * width
        own = Angles(
            angles.cos + row * half * 4 if angles.cos else 0,
            angles.sin + row * half * 4 if angles.sin else 0,
        )
        for which in range(2):
            norm = RowNorm(
                layer.has_query_norm if which == 0 else layer.has_key_norm,
                layer.query_weight if which == 0 else layer.key_weight,
                layer.query_eps if which == 0 else layer.key_eps,
            )
            heads = query if which == 0 else key
            count = layer.num_heads if which == 0 else layer.num_kv_heads
            _prepare_heads(kind, layer, heads, count, norm, own)
        if temperature:
            factor = load_one(FULL, temperature + row * 4)
            _scale_heads(kind, query, query_size, factor)
        slot = item(step.slots, row)
        value = key + key_size * width
        if layer.code_bits:
            _encode(kind, key, cache.keys + slot * key_size, key_size, layer.key_scale, layer)
            place = cache.values + slot * value_size
            _encode(kind, value, place, value_size, layer.value_scale, layer)
        else:
            _copy(kind, key, cache.keys + slot * key_size * width, key_size)
            _copy(kind, value, cache.values + slot * value_size * width, value_size)
