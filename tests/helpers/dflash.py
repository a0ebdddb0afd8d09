"""Block drafters: tiny checkpoints in the published layouts, and their equations written out.

`Reference` shares no code with the package: dense, without a cache, one block at a time.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch.nn.functional import silu
from transformers import AutoModelForCausalLM

from .eagle import Trees, rms
from .head_files import Tensors, draft_vocabulary, target_tensors

HEADS, KV_HEADS, DIM, WIDE = 4, 2, 32, 48
MASK = 95
OUTPUTS = (1, 2, 4)  # target layers whose outputs are read


def block_tensors(target: str, *, num_layers: int = 2, seed: int = 0, **options: Any) -> Tensors:
    """Tensors of a head whose first guesses are often right, for `write_guessable`.

    Attention is nearly even, values let a token's embedding through but not the mask's.

    Args:
        options: `convs`, `selector`, `markov` (rank), `confidence`, `embed`, `draft_vocab`.
    """
    generator = torch.Generator().manual_seed(seed)
    stored = target_tensors(target)
    embedding, output = stored["model.embed_tokens.weight"], stored["lm_head.weight"]
    vocab, hidden = output.shape

    def noise(*shape: int, scale: float = 0.1) -> torch.Tensor:
        return torch.randn(*shape, generator=generator) * scale

    own, _ = torch.linalg.qr(torch.randn(hidden, hidden, generator=generator))
    mask = embedding[MASK] / embedding[MASK].norm()
    parts = own.chunk(KV_HEADS)
    out = torch.cat([part.T for part in parts for _ in range(HEADS // KV_HEADS)], dim=1)
    tensors: Tensors = {
        "fc.weight": noise(hidden, len(OUTPUTS) * hidden, scale=0.02),
        "hidden_norm.weight": 0.2 + noise(hidden, scale=0.05),
        "norm.weight": 1 + noise(hidden),
    }
    for layer in range(num_layers):
        stem, first = f"layers.{layer}.", layer == 0
        tensors |= {
            f"{stem}self_attn.q_proj.weight": noise(HEADS * DIM, hidden),
            f"{stem}self_attn.k_proj.weight": noise(KV_HEADS * DIM, hidden),
            f"{stem}self_attn.v_proj.weight": noise(KV_HEADS * DIM, hidden, scale=0.02)
            + first * own @ (torch.eye(hidden) - torch.outer(mask, mask)),
            f"{stem}self_attn.o_proj.weight": noise(hidden, HEADS * DIM, scale=0.02)
            + 60 * first * out,
            f"{stem}self_attn.q_norm.weight": 0.4 + noise(DIM),
            f"{stem}self_attn.k_norm.weight": 0.4 + noise(DIM),
            f"{stem}mlp.gate_proj.weight": noise(WIDE, hidden),
            f"{stem}mlp.up_proj.weight": noise(WIDE, hidden),
            f"{stem}mlp.down_proj.weight": noise(hidden, WIDE),
            f"{stem}input_layernorm.weight": 1 + noise(hidden),
            f"{stem}post_attention_layernorm.weight": 1 + noise(hidden),
        }
        for name in ("attention_conv", "mlp_conv") if options.get("convs") else ():
            groups = hidden // 16
            tensors[f"{stem}{name}.base_kernel"] = noise(2, 2, hidden)
            tensors[f"{stem}{name}.base_kernel"][:, 0] += 1
            name = f"{stem}{name}.kernel_projection.weight"
            tensors[name] = noise(4 * groups, hidden, scale=0.05)
    if options.get("selector"):
        tensors |= {
            "candidate_selector.predecessor_codebook": noise(vocab, 8, scale=0.5),
            "candidate_selector.successor_codebook": noise(vocab, 8, scale=0.5),
            "candidate_selector.hidden_projection.weight": noise(8, hidden),
        }
    if options.get("embed"):
        tensors["embed_tokens.weight"] = embedding + noise(vocab, hidden, scale=0.05)
    if count := options.get("draft_vocab"):
        tensors |= draft_vocabulary(output, count, generator)
    if rank := options.get("markov"):
        rows = tensors.get("lm_head.weight", output)
        normed = embedding * torch.rsqrt(embedding.pow(2).mean(-1, keepdim=True) + 1e-6)
        left, values, right = torch.linalg.svd(3 * normed @ rows.T)
        tensors["markov_head.markov_w1.weight"] = left[:, :rank] * values[:rank]
        tensors["markov_head.markov_w2.weight"] = right[:rank].T.contiguous()
    if options.get("confidence"):
        wide = hidden + options["markov"] * (options["confidence"] == "markov")
        tensors["confidence_head.proj.weight"] = noise(1, wide)
        tensors["confidence_head.proj.bias"] = noise(1)
    return {name: tensor.contiguous() for name, tensor in tensors.items()}


SELECTED = {
    "conv_group_size": 16,
    "conv_kernel_size": 2,
    "selector_top_k": 8,
    "selector_rank": 8,
    "output_multiplier": 0.7,
    "final_logit_softcapping": 20.0,
}
"""DFlash2's keys of `dflash_config`."""
SLIDING = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 5}

LAYER = {
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": DIM,
    "hidden_size": 64,
    "rms_norm_eps": 1e-6,
    "model_type": "qwen3",
}


def zlab_config(block_size: int = 6, **keys: Any) -> dict[str, Any]:
    """z-lab's `config.json`; `dflash_config` is added to."""
    inner = {"mask_token_id": MASK, "target_layer_ids": list(OUTPUTS)}
    inner |= keys.pop("dflash_config", {})
    return {"block_size": block_size, "num_target_layers": 6, "dflash_config": inner} | LAYER | keys


def speculators_config(kind: str, block_size: int = 6, **keys: Any) -> dict[str, Any]:
    """The speculators library's, whose ids name inputs."""
    layer = LAYER | {"vocab_size": 96} | keys.pop("layer", {})
    return {
        "speculators_model_type": kind,
        "transformer_layer_config": layer,
        "block_size": block_size,
        "mask_token_id": MASK,
        "aux_hidden_state_layer_ids": [each + 1 for each in OUTPUTS],
    } | keys


KINDS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "plain": (zlab_config(**SLIDING), {}),
    "selected": (zlab_config(dflash_config=SELECTED), {"convs": True, "selector": True}),
    "markov": (
        speculators_config("dspark", draft_vocab_size=80),
        {"markov": 16, "draft_vocab": 80, "confidence": "markov"},
    ),
}
"""Configuration and options of tensors by kind, for matrices of heads."""


def write_kind(folder: Path, target: str, kind: str) -> str:
    config, options = KINDS[kind]
    return write_block(folder, config, block_tensors(target, **options))


def write_block(folder: Path, config: dict[str, Any], tensors: Tensors) -> str:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors")
    return str(folder)


class Reference(Trees):
    """A block drafter over a target, drafting `length` tokens.

    Args:
        views: by layer, whether a row sees only those before it, and its window.
        mask: embedding of masks where it is in a file of its own.
    """

    def __init__(self, target, config, tensors, length, *, views=None, mask=None, outputs=OUTPUTS):
        self.model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32).eval()
        self.config = {**config, **config.get("transformer_layer_config", {})}
        self.inner = config.get("dflash_config", {})
        self.t, self.length, self.mask, self.outputs = dict(tensors), length, mask, outputs
        self.num_layers = len([name for name in tensors if name.endswith("q_proj.weight")])
        self.made: dict[tuple[int, ...], torch.Tensor] = {}
        self.views = views or [(False, None)] * self.num_layers
        is_spark = "markov_head.markov_w1.weight" in tensors
        self.from_anchor = self.config.get("sample_from_anchor", is_spark)

    def states(self, text):
        """What the output layer reads of every drafted token [length, hidden_size]."""
        if tuple(text) not in self.made:
            self.made[tuple(text)] = self.block(text)
        return self.made[tuple(text)]

    @torch.no_grad()
    def block(self, text):
        known = torch.tensor([text[:-1]])
        hidden = self.model(known, output_hidden_states=True).hidden_states
        joined = torch.cat([hidden[each + 1][0] for each in self.outputs], -1)
        context = rms(joined @ self.t["fc.weight"].T, self.t["hidden_norm.weight"])
        embedding = self.t.get("embed_tokens.weight", self.model.model.embed_tokens.weight)
        mask = embedding[MASK] if self.mask is None else self.mask
        count = self.length - self.from_anchor
        x = torch.stack([embedding[text[-1]], *[mask] * count])
        x = x * self.inner.get("input_embedding_scale", 1.0)
        for layer in range(self.num_layers):
            stem = f"layers.{layer}."
            h = rms(x, self.t[f"{stem}input_layernorm.weight"])
            kernel = self.kernel(h, f"{stem}attention_conv")
            h = self.attention(self.conv(h, kernel, 0), context, stem, self.views[layer])
            x = x + self.conv(h, kernel, 1)
            h = rms(x, self.t[f"{stem}post_attention_layernorm.weight"])
            kernel = self.kernel(h, f"{stem}mlp_conv")
            h = self.conv(h, kernel, 0)
            gate = silu(h @ self.t[f"{stem}mlp.gate_proj.weight"].T)
            h = gate * (h @ self.t[f"{stem}mlp.up_proj.weight"].T)
            x = x + self.conv(h @ self.t[f"{stem}mlp.down_proj.weight"].T, kernel, 1)
        x = rms(x, self.t["norm.weight"])
        return x if self.from_anchor else x[1:]

    def kernel(self, h, name):
        """[rows, 2, taps, groups]."""
        if f"{name}.base_kernel" not in self.t:
            return None
        base = self.t[f"{name}.base_kernel"]
        group = self.inner["conv_group_size"]
        deltas = h @ self.t[f"{name}.kernel_projection.weight"].T
        deltas = deltas.view(len(h), 2, base.shape[1], -1)
        return base[None] + deltas.repeat_interleave(group, -1)

    def conv(self, x, kernel, side):
        if kernel is None:
            return x
        out = torch.zeros_like(x)
        for row in range(len(x)):
            for tap in range(min(kernel.shape[2], row + 1)):
                out[row] += kernel[row, side, tap] * x[row - tap]
        return out

    def attention(self, h, context, stem, view):
        causal, window = view
        start, end = len(context), len(context) + len(h)
        q = (h @ self.t[f"{stem}self_attn.q_proj.weight"].T).view(len(h), HEADS, DIM)
        both = torch.cat([context, h])
        k = (both @ self.t[f"{stem}self_attn.k_proj.weight"].T).view(end, KV_HEADS, DIM)
        v = (both @ self.t[f"{stem}self_attn.v_proj.weight"].T).view(end, KV_HEADS, DIM)
        q = self.turn(rms(q, self.t[f"{stem}self_attn.q_norm.weight"]), range(start, end))
        k = self.turn(rms(k, self.t[f"{stem}self_attn.k_norm.weight"]), range(end))
        out = torch.zeros_like(q)
        for row in range(len(h)):
            at = start + row
            last = at if causal else end - 1
            seen = [key for key in range(last + 1) if window is None or key > at - window]
            for head in range(HEADS):
                shared = head // (HEADS // KV_HEADS)
                scores = k[seen, shared] @ q[row, head] / math.sqrt(DIM)
                out[row, head] = scores.softmax(0) @ v[seen, shared]
        return out.reshape(len(h), -1) @ self.t[f"{stem}self_attn.o_proj.weight"].T

    def turn(self, x, positions):
        theta = self.config.get("rope_theta", 1_000_000.0)
        half = DIM // 2
        angles = torch.tensor(list(positions))[:, None] * theta ** (-torch.arange(half) / half)
        cos, sin = angles.cos()[:, None], angles.sin()[:, None]
        low, high = x[..., :half], x[..., half:]
        return torch.cat([low * cos - high * sin, high * cos + low * sin], -1)

    @torch.no_grad()
    def after(self, text, path):
        """Log-probabilities over the target's ids after text + path; -inf: not drafted."""
        read = self.states(text)[len(path)]
        previous = [*text, *path][-1]
        logits = read @ self.t.get("lm_head.weight", self.model.lm_head.weight).T
        logits = logits * self.inner.get("output_multiplier", 1.0)
        if cap := self.inner.get("final_logit_softcapping"):
            logits = cap * torch.tanh(logits / cap)
        if "markov_head.markov_w1.weight" in self.t:
            w1 = self.t["markov_head.markov_w1.weight"][previous]
            logits = logits + self.t["markov_head.markov_w2.weight"] @ w1
        if "candidate_selector.predecessor_codebook" in self.t:
            best = logits.argsort(descending=True)[: self.inner["selector_top_k"]]
            read = self.t["candidate_selector.hidden_projection.weight"] @ read
            read = read * self.t["candidate_selector.predecessor_codebook"][previous]
            rated = logits[best] + self.t["candidate_selector.successor_codebook"][best] @ read
            logits = torch.full_like(logits, -math.inf).index_put((best,), rated)
        logs = logits.log_softmax(-1)
        if "d2t" not in self.t or "lm_head.weight" not in self.t:
            return logs
        ids_of = torch.arange(len(logs)) + self.t["d2t"]
        return torch.full((96,), -math.inf).index_put((ids_of,), logs)

    @torch.no_grad()
    def confidence(self, text, path):
        """Of the token after text + path."""
        read = self.states(text)[len(path)]
        if self.t["confidence_head.proj.weight"].shape[1] > len(read):
            read = torch.cat([read, self.t["markov_head.markov_w1.weight"][[*text, *path][-1]]])
        bias = self.t["confidence_head.proj.bias"]
        return float(torch.sigmoid(self.t["confidence_head.proj.weight"] @ read + bias))
