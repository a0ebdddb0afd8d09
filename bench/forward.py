"""What a forward costs: the bridge, the family's decoder, and the matrix products alone.

    python -m outrider.bench.forward [--model FOLDER] [--dtype bfloat16] [--threads 1] ...
    python -m outrider.bench.forward --prompts 64 170 512 2048 ...
    python -m outrider.bench.forward --deterministic [--tokens 1 8 64] ...
    python -m outrider.bench.forward --kv-cache-dtype fp8_e4m3 [--context 200 4000] ...
    python -m outrider.bench.forward --pools [--kv-cache-dtype fp8_e4m3] [--model FOLDER]

One sequence with some context and a random tree of tokens; or prompts, of which only the last row
gets logits. The three take turns within a round, and with `--deterministic` the family's with
batch-invariant operations, with `--kv-cache-dtype` that over such a cache, too: so they meet the
same machine. Of all rounds the quickest and the
median count. With one thread
the clock is that thread's time on a CPU, which other processes disturb less. The bare
products are oneDNN's with packed weights, joined as the decoder joins them, without anything
between them: what a forward would cost that did nothing else. `--pools` times nothing: it allocates
the KV caches of both forwards and prints what a token takes in them.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ..errors import OutriderError
from ..scheduler.types import Draft, StepInput, ints
from ..workers.attention import KV_FORMATS
from ..workers.collective import Collective
from ..workers.model.checkpoint.weights import Checkpoint
from ..workers.model.fit import check_weights
from ..workers.model.info import read_config
from ..workers.model.paged import PagedModel
from ..workers.model.target import load_model
from ..workers.ops.cpu import pack_large
from ..workers.seats import sample_step
from .drafters import MODELS
from .measure import Rows, in_turn

DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}
BLOCK_SIZE = 16


def tree_step(num_tokens: int, context_len: int, vocab_size: int) -> tuple[StepInput, int]:
    """A root with a random tree below it, after a context, and the blocks that it takes."""
    rng = np.random.default_rng(num_tokens)
    parents = [int(rng.integers(-1, node)) for node in range(num_tokens - 1)]
    tokens = rng.integers(0, vocab_size, num_tokens).tolist()
    num_blocks = (context_len + num_tokens) // BLOCK_SIZE + 1
    draft = Draft(ints(tokens[1:]), ints(parents))
    table = rng.permutation(num_blocks).tolist()
    return sample_step(tokens[:1], context_len, table, draft, BLOCK_SIZE), num_blocks


def prompt_step(num_tokens: int, vocab_size: int) -> tuple[StepInput, int]:
    """A whole prompt, and the blocks that it takes."""
    rng = np.random.default_rng(num_tokens)
    num_blocks = num_tokens // BLOCK_SIZE + 1
    tokens, table = rng.integers(0, vocab_size, num_tokens), rng.permutation(num_blocks)
    step = sample_step(tokens.tolist(), 0, table.tolist(), block_size=BLOCK_SIZE)
    return replace(step, rows=ints([num_tokens - 1])), num_blocks


@dataclass(frozen=True, slots=True)
class Product:
    """A product of a layer."""

    shape: tuple[int, int]
    share: float = 1.0  # of the rows


def layer_products(config: Any, layer: int) -> list[Product]:
    """A layer's, joined as the decoder joins them; rows spread evenly over experts.

    Products per head of latent attention count as one with as many multiplications.
    """
    hidden, heads = config.hidden_size, config.num_attention_heads
    if getattr(config, "kv_lora_rank", None):
        latent, turned = config.kv_lora_rank, config.qk_rope_head_dim
        plain, value = config.qk_nope_head_dim, config.v_head_dim
        shapes = [
            (config.q_lora_rank + latent + turned, hidden),
            (heads * (plain + turned), config.q_lora_rank),
            (latent, heads * plain),
            (heads * value, latent),
            (hidden, heads * value),
        ]
    else:
        dim = getattr(config, "head_dim", None) or hidden // heads
        shapes = [((heads + 2 * config.num_key_value_heads) * dim, hidden), (hidden, heads * dim)]
    found = [Product(shape) for shape in shapes]
    inner, share = config.intermediate_size, 1.0
    num_experts = getattr(config, "n_routed_experts", None) or getattr(config, "num_experts", 0)
    if not num_experts or layer < getattr(config, "first_k_dense_replace", 0):
        return [*found, Product((2 * inner, hidden)), Product((hidden, inner))]
    inner, share = config.moe_intermediate_size, config.num_experts_per_tok / num_experts
    found.append(Product((num_experts, hidden)))
    if getattr(config, "n_shared_experts", None):
        found += [Product((2 * inner, hidden)), Product((hidden, inner))]
    return (
        found + [Product((2 * inner, hidden), share), Product((hidden, inner), share)] * num_experts
    )


def bare_products(path: Path, dtype: torch.dtype) -> Callable[[int, int], None]:
    """A function that multiplies so many rows with weights of the model's shapes.

    Its second argument is how many rows the output layer gets.
    """
    config = read_config(path)
    layers = range(config.num_hidden_layers)
    products = [each for layer in layers for each in layer_products(config, layer)]
    products.append(Product((config.vocab_size, config.hidden_size)))
    packed = [pack_large(torch.randn(each.shape).to(dtype), None) for each in products]
    inputs: dict[tuple[int, int], torch.Tensor] = {}  # by rows and length

    def multiply(num_rows: int, num_logits: int) -> None:
        rest = 0.0  # of a row, which the experts before have left
        for index, (multiplied, each) in enumerate(zip(packed, products, strict=True)):
            wanted = num_rows * each.share + (rest if each.share < 1 else 0.0)
            rest = wanted - int(wanted) if each.share < 1 else rest
            size = (num_logits if index == len(products) - 1 else int(wanted), each.shape[1])
            if not size[0]:
                continue
            if size not in inputs:
                inputs[size] = torch.randn(size).to(dtype)
            assert multiplied is not None, dtype
            multiplied(inputs[size])

    return multiply


def contenders(
    models: dict[str, PagedModel],
    products: Callable[[int, int], None],
    make_step: Callable[[int], tuple[StepInput, int]],  # for a vocabulary: a step and its blocks
) -> dict[str, Callable[[], object]]:
    """What is timed for one step."""
    found: dict[str, Callable[[], object]] = {}
    for name, model in models.items():
        step, num_blocks = make_step(model.info.vocab_size)
        cache = model.new_cache(num_blocks, BLOCK_SIZE)
        for pages in (*cache.keys, *cache.values):
            if pages.is_floating_point():
                pages.normal_()
        for layer, code in enumerate(model.kv_codes):
            if code is not None:
                for pages in (cache.keys[layer], cache.values[layer]):
                    pages.copy_(code.format.encode(torch.randn(pages.shape), 1.0))
        found[name] = lambda model=model, step=step, cache=cache: model.forward(step, cache)  # type: ignore[misc]
    found["products"] = lambda: products(len(step.token_ids), len(step.rows))
    return found


def pool_bytes_per_token(model: PagedModel) -> float:
    """Bytes that a pool grows by for each token, of the storages that are allocated."""
    sizes = []
    for num_blocks in (64, 128):
        cache = model.new_cache(num_blocks, BLOCK_SIZE)
        storages = [pages.untyped_storage() for pages in (*cache.keys, *cache.values)]
        sizes.append(sum({each.data_ptr(): each.nbytes() for each in storages}.values()))
    return (sizes[1] - sizes[0]) / (64 * BLOCK_SIZE)


def cases(
    options: argparse.Namespace,
) -> Iterator[tuple[int, int, Callable[[int], tuple[StepInput, int]]]]:
    """Context, tokens and step of every row of the table."""
    for num_tokens in options.prompts or ():
        yield 0, num_tokens, partial(prompt_step, num_tokens)
    if options.prompts is None:
        for context_len, num_tokens in product(options.context, options.tokens):
            yield context_len, num_tokens, partial(tree_step, num_tokens, context_len)


def _arguments(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m outrider.bench.forward")
    parser.add_argument("--model", type=Path, default=MODELS / "target")
    parser.add_argument("--dtype", nargs="+", default=list(DTYPES), choices=list(DTYPES))
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 5, 8, 16, 64])
    parser.add_argument("--context", type=int, nargs="+", default=[200, 2000, 8000])
    parser.add_argument("--prompts", type=int, nargs="+", help="time prompts of so many tokens")
    parser.add_argument("--deterministic", action="store_true", help="time its operations too")
    parser.add_argument("--kv-cache-dtype", nargs="+", default=[], choices=list(KV_FORMATS))
    parser.add_argument("--pools", action="store_true", help="print a token's bytes in KV caches")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=15)
    options = parser.parse_args(arguments)
    if min(options.threads, options.rounds, *options.tokens, *(options.prompts or [1])) < 1:
        parser.error("--threads, --rounds, --tokens and --prompts must be at least 1")
    if min(options.context) < 0:
        parser.error("--context must be at least 0")
    try:
        check_weights(options.model)
    except OutriderError as error:
        parser.error(str(error))
    return options


def _models(path: Path, dtype: str, names: Sequence[str]) -> dict[str, PagedModel]:
    """The model over each of these forwards."""
    models: dict[str, PagedModel] = {}
    for name in names:
        models[name] = load_model(
            path,
            dtype=DTYPES[dtype],
            device=torch.device("cpu"),
            collective=Collective.single(),
            forward="bridge" if name == "bridge" else "family",
            deterministic=name == "deterministic",
        )
        if name in KV_FORMATS:
            models[name].keep_kv_as(KV_FORMATS[name], Checkpoint(path), 0)
    return models


def _pools(options: argparse.Namespace) -> None:
    """Prints a token's bytes in the caches of both forwards."""
    names = ("bridge", "family", *options.kv_cache_dtype)
    table = Rows("dtype", *names, "bridge / family")
    for dtype in options.dtype:
        models = _models(options.model, dtype, names)
        sizes = [pool_bytes_per_token(each) for each in models.values()]
        table.add(dtype, *(f"{each:,.0f}" for each in sizes), f"{sizes[0] / sizes[1]:.2f}")


@torch.inference_mode()
def main(arguments: list[str] | None = None) -> None:
    """Measures every combination and prints a table."""
    options = _arguments(arguments)
    torch.set_num_threads(options.threads)
    if options.pools:
        _pools(options)
        return
    clock = time.thread_time if options.threads == 1 else time.perf_counter
    others = [*["deterministic"] * options.deterministic, *options.kv_cache_dtype]
    names = ["bridge", "family", *others]
    ratios = ["family / bridge", "/ products", "/ one token"]
    ratios += [f"{name} / family" for name in others]
    sys.stdout.write(f"Milliseconds, quickest (median) of {options.rounds} rounds\n\n")
    table = Rows("dtype", "context", "tokens", *names, "products", *ratios)
    for dtype in options.dtype:
        models = _models(options.model, dtype, names)
        products = bare_products(options.model, DTYPES[dtype])
        alone: dict[int, float] = {}  # by context: the family's time of one token
        for context_len, num_tokens, make_step in cases(options):
            found = in_turn(contenders(models, products, make_step), options.rounds, clock)
            best = {name: min(times) for name, times in found.items()}
            cells = [f"{best[name]:.2f} ({statistics.median(found[name]):.2f})" for name in found]
            own = best["family"]
            if num_tokens == 1:
                alone[context_len] = own
            besides = best["bridge"], best["products"], alone.get(context_len)
            cells += ["-" if each is None else f"{own / each:.2f}" for each in besides]
            cells += [f"{best[name] / own:.2f}" for name in others]
            table.add(dtype, context_len, num_tokens, *cells)


if __name__ == "__main__":
    main()
