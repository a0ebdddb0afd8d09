"""Tiny random models with the tests' tokenizer (`frontend.py`), and forwards of them."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from outrider.drafters import vocabulary

from .frontend import EOS, VOCAB_SIZE


def write_models(tokenizer_path: Path, folder: Path, **keys: Any) -> dict[str, str]:
    """A target, and a draft model that often agrees with it; their folders by name.

    Args:
        keys: of their configuration, in place of those here.
    """
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "max_position_embeddings": 256}
    layers = {"num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2}
    ends = {"vocab_size": VOCAB_SIZE, "bos_token_id": None, "eos_token_id": EOS}
    config = {**sizes, **layers, **ends, "initializer_range": 0.2, **keys}
    model = LlamaForCausalLM(LlamaConfig(**config))
    paths = {}
    for name in ("target", "draft"):
        model.save_pretrained(folder / name)
        for file in tokenizer_path.iterdir():
            if file.name != "config.json":
                shutil.copy(file, folder / name)
        paths[name] = str(folder / name)
        with torch.no_grad():
            for weight in model.parameters():
                weight.add_(torch.randn_like(weight) * 0.02)
    return paths


def write_of_another_vocabulary(target: str, folder: Path) -> tuple[str, dict[int, int]]:
    """A draft model that often agrees with `target`, and its token of each that both have.

    Two thirds of the target's tokens are there in another order, written as SentencePiece does: a
    mark for a space, and tokens of bytes. It has some that the target lacks, and ends with `</s>`.
    """
    import random

    from tokenizers import Tokenizer, decoders, models, normalizers
    from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

    ours = vocabulary.read(Path(target))
    texts = {index: ours.bytes_of(index) for index in ours.base if index % 3}
    pieces = {index: _piece(text) for index, text in texts.items()}
    extra = ["<unk>", "▁zebra", "zebras", "▁▁", *(f"<own{index}>" for index in range(40))]
    every = [*extra, "</s>", *pieces.values()]
    random.Random(5).shuffle(every)
    every.insert(0, every.pop(every.index("<unk>")))
    tokenizer = Tokenizer(models.Unigram([(piece, -1.0) for piece in every], 0, False))
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence(steps)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="</s>",
        unk_token="<unk>",
    )
    places = {piece: index for index, piece in enumerate(every)}
    shared = {index: places[piece] for index, piece in pieces.items()} | {EOS: places["</s>"]}
    model: Any = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32)
    size = len(every) + 4 - len(every) % 4
    torch.manual_seed(4)
    with torch.no_grad():
        for name in ("embed_tokens", "lm_head"):
            module = model.lm_head if name == "lm_head" else model.model.embed_tokens
            weight = torch.randn(size, module.weight.shape[1]) * 0.2
            weight[list(shared.values())] = module.weight[list(shared)]
            module.weight = torch.nn.Parameter(weight + torch.randn_like(weight) * 0.01)
    model.config.vocab_size = size
    model.config.eos_token_id = places["</s>"]
    model.save_pretrained(folder)
    fast.save_pretrained(folder)
    return str(folder), shared


def _piece(text: bytes) -> str:
    """A token's text as SentencePiece writes it."""
    try:
        return text.decode().replace(" ", "▁")
    except UnicodeDecodeError:
        return f"<0x{text[0]:02X}>"


def write_guessable(
    folder: Path, num_layers: int = 6, others: float = 0.06, vocab_size: int = 96, **keys: Any
) -> str:
    """A target whose next token depends on the last one, and a little on the rest.

    Args:
        others: scale of what layers add to a token's embedding.
        keys: more of its configuration.
    """
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(1)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=vocab_size,
            hidden_size=64,
            intermediate_size=96,
            num_hidden_layers=num_layers,
            num_attention_heads=8,
            num_key_value_heads=2,
            max_position_embeddings=256,
            initializer_range=0.15,
            **keys,
        )
    )
    with torch.no_grad():
        model.model.embed_tokens.weight.mul_(8)
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.mul_(others)
            layer.mlp.down_proj.weight.mul_(others)
    model.save_pretrained(folder)
    return str(folder)


BLOCK = 4
CPU = torch.device("cpu")
NOT_OF_THE_FAMILY = ("gpt_neox", "gpt2", "qwen2_moe", "cohere2")
# Which the bridge does not serve:
RECURRENT = (
    *("qwen3_next_hybrid", "qwen3_5", "qwen3_5_moe"),
    *("bamba", "granite4", "granite4_moe"),
    *("nemotron_h", "nemotron_h_moe", "falcon_h1", "falcon_h1_norm"),
)
TABLES = [[9, 2, 14, 5, 0, 7, 21, 11, 17], [3, 8, 1, 19, 6, 12, 4, 16]]


def full_logits(model, tokens):
    with torch.inference_mode():
        return model(torch.tensor([tokens], dtype=torch.int64), use_cache=False).logits[0]


def skip_other(variant, forward):
    if forward == "family" and variant in NOT_OF_THE_FAMILY:
        pytest.skip("served by the bridge alone")
    if forward == "bridge" and variant in RECURRENT:
        pytest.skip("served by the family alone")


def with_scales(source: str, folder: Path, **scales: object) -> Path:
    """A copy of a checkpoint, with scales of the KV cache in layer 1."""
    copied = Path(shutil.copytree(source, folder))
    tensors = load_file(copied / "model.safetensors")
    for name, value in scales.items():
        tensors[f"model.layers.1.self_attn.{name.replace('__', '.')}"] = torch.tensor(value)
    save_file(tensors, copied / "model.safetensors", {"format": "pt"})
    return copied
