"""PARD-2: tiny checkpoints in the published layout, and the equations written out.

`Reference` shares no code with the package: transformers' own models over one dense text.
"""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForCausalLM

from .eagle import Trees
from .head_files import target_tensors

MASK = 95
SIZES = {
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "initializer_range": 0.15,
}
PUBLISHED = {
    "pard2": True,
    "spd_type": "pard2",
    "pard_token": MASK,
    "pard2_scale": 0.3,
    "pard2_proj_bias": False,
    "pard2_target_layers": [-1],
}
KINDS: dict[str, tuple[str, int, dict[str, Any], dict[str, Any]]] = {
    # Architecture, its width, more of its configuration, and what is published beside that.
    "llama": ("llama", 64, {"tie_word_embeddings": False}, {}),
    "qwen3": (
        "qwen3",
        96,
        {"tie_word_embeddings": False},
        {"pard2_target_layers": [-1, 2, 0, -4], "pard2_proj_bias": True},
    ),
    "tied": ("qwen2", 64, {"tie_word_embeddings": True}, {}),  # guesses nothing right
}


def write_pard2(
    folder: Path, target: str, kind: str = "llama", *, pickled: bool = True, **keys: Any
) -> str:
    """A checkpoint that often guesses right for `write_guessable`: embeddings are let through.

    Masks follow the attention alone, so that it is a draft's first token that is right.

    Args:
        pickled: False: the projection is in a file of safetensors.
        keys: of `config.json`, in place of others.
    """
    name, hidden, more, published = KINDS[kind]
    stored, generator = target_tensors(target), torch.Generator().manual_seed(0)
    table, output = stored["model.embed_tokens.weight"], stored["lm_head.weight"]
    vocab, width = output.shape
    torch.manual_seed(0)
    config = AutoConfig.for_model(name, vocab_size=vocab + 4, hidden_size=hidden, **SIZES, **more)
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        ends = [model.model.embed_tokens.weight, model.lm_head.weight]
        for end, values in zip(ends, (table, output), strict=True):
            if not config.tie_word_embeddings:
                end[:vocab, :width] = values
                end[:, width:] = 0
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.mul_(0.3)
            layer.mlp.down_proj.weight.mul_(0.3)
    published = PUBLISHED | published | keys
    reads = len(published["pard2_target_layers"]) * width
    weight = torch.randn(hidden, reads, generator=generator) * reads**-0.5
    warp = {"target_proj.weight": weight}
    if published["pard2_proj_bias"]:
        warp["target_proj.bias"] = torch.randn(hidden, generator=generator)
    _save(folder, model, warp, published)
    if not pickled:
        (folder / "warp_model.bin").unlink()
        save_file(warp, folder / "warp_model.safetensors")
    return str(folder)


def _save(folder: Path, model: Any, warp: dict[str, torch.Tensor], keys: dict[str, Any]) -> str:
    model.save_pretrained(folder)
    torch.save(warp, folder / "warp_model.bin")
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | keys))
    return str(folder)


def teach_pard2(
    folder: Path, target: str, texts: list[list[int]], layers: tuple[int, ...], mask: int
) -> str:
    """A model with 3 masks, of scale 1, which has learnt `texts` by heart."""
    torch.manual_seed(0)
    reads = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32).eval()
    width, tokens, ahead = reads.config.hidden_size, torch.tensor(texts), 4
    config = AutoConfig.for_model(
        "llama", vocab_size=reads.config.vocab_size, hidden_size=32, intermediate_size=48,
        num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, initializer_range=0.2,
    )  # fmt: skip
    model, projection = AutoModelForCausalLM.from_config(config), torch.nn.Linear(
        len(layers) * width, 32, bias=False
    )  # fmt: skip
    with torch.no_grad():
        states = reads(tokens, output_hidden_states=True).hidden_states
    features = torch.cat([states[layer] for layer in layers], dim=-1)
    before = torch.cat([torch.zeros_like(features[:, :1]), features[:, :-1]], dim=1)
    optimizer = torch.optim.AdamW([*model.parameters(), *projection.parameters()], lr=5e-3)
    places = torch.arange(tokens.shape[1])
    for _ in range(150):
        text = torch.randint(len(tokens), (32,))
        known = torch.randint(2, len(places) - ahead + 1, (32, 1))
        ids = torch.where(places < known, tokens[text], mask)
        rows = before[text[:, None], places.minimum(known - 1)]
        out = model(inputs_embeds=model.get_input_embeddings()(ids) + projection(rows))
        drafted = known - 1 + torch.arange(ahead)
        logits = out.logits[torch.arange(32)[:, None], drafted]
        wanted = tokens[text[:, None], drafted + 1]
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(logits.flatten(0, 1), wanted.flatten()).backward()
        optimizer.step()
    keys = {"pard_token": mask, "pard2_scale": 1.0, "pard2_target_layers": list(layers)}
    warp = {"target_proj.weight": projection.weight.detach()}
    return _save(folder, model, warp, PUBLISHED | keys)


class Reference(Trees):
    """Drafts of a folder over a target."""

    def __init__(self, target: str, folder: str, *, scale: float | None = None) -> None:
        load = AutoModelForCausalLM.from_pretrained
        self.target, self.model = (load(path, dtype=torch.float32) for path in (target, folder))
        self.config = json.loads((Path(folder) / "config.json").read_text())
        self.warp = torch.load(Path(folder) / "warp_model.bin")
        self.scale = self.config["pard2_scale"] if scale is None else scale
        self.vocab = self.target.config.vocab_size
        self.logs = cache(self._logs)

    @torch.no_grad()
    def _logs(self, text: tuple[int, ...], count: int) -> torch.Tensor:  # [count, vocab]
        """Of the tokens behind `text`, whose last one has no states yet."""
        states = self.target(torch.tensor([text[:-1]]), output_hidden_states=True).hidden_states
        features = torch.cat([states[i][0] for i in self.config["pard2_target_layers"]], -1)
        shifted = torch.cat([torch.zeros(1, features.shape[1]), features])
        shifted = torch.cat([shifted, shifted[-1:].expand(count - 1, -1)])
        added = shifted @ self.warp["target_proj.weight"].T
        added = added + self.warp.get("target_proj.bias", 0)
        ids = torch.tensor([*text, *[self.config["pard_token"]] * (count - 1)])
        embedded = self.model.get_input_embeddings()(ids) + self.scale * added
        logits = self.model(inputs_embeds=embedded[None]).logits[0, -count:, : self.vocab]
        return logits.log_softmax(-1)

    def after(self, text: list[int], path: list[int]) -> torch.Tensor:  # [vocab]
        return self.logs(tuple(text), len(path) + 1)[-1]
