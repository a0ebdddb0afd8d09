"""EAGLE written out by its equations: dense, without a cache, one sequence, one row at a time.

Shares no code with the package. `Reference.rows(text)` are the rows of a committed text;
`extended(path)` goes on with guesses, whose features are the head's own.
"""

from __future__ import annotations

import math
from functools import cache

import torch
from torch.nn.functional import silu
from transformers import AutoModelForCausalLM


def rms(x, weight, eps=1e-6):
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * weight


class Trees:
    """Drafts by a head whose `after` says what follows a text and a path of guesses."""

    def chain(self, text, depth):
        path: list[int] = []
        for _ in range(depth):
            path.append(int(self.after(text, path).argmax()))
        return path

    def fixed(self, text, nodes):
        """Tokens of a tree of ranks."""
        paths: dict[tuple, list[int]] = {(): []}
        for node in sorted(nodes, key=len):
            ranked = self.after(text, paths[node[:-1]]).argsort(descending=True)
            paths[node] = [*paths[node[:-1]], int(ranked[node[-1]])]
        return [paths[node][-1] for node in nodes]

    def dynamic(self, text, top, depth, total):
        """The set of paths of EAGLE-2's tree."""
        pool: list[tuple[float, tuple[int, ...]]] = []
        frontier: list[tuple[float, tuple[int, ...]]] = [(0.0, ())]
        for _ in range(depth):
            children = []
            for score, path in frontier:
                logs = self.after(text, list(path))
                for token in logs.argsort(descending=True)[:top].tolist():
                    children.append((score + float(logs[token]), (*path, token)))
            pool += children
            frontier = sorted(children, key=lambda each: -each[0])[:top]
        best = sorted(pool, key=lambda each: (-each[0], len(each[1])))  # ties go to the parent
        return {path for _, path in best[:total]}


class Reference(Trees):
    """A head of either version over a target."""

    def __init__(self, target: str, config: dict, tensors: dict, version: int, capture=None):
        self.model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32).eval()
        self.t = dict(tensors)
        self.config = {**config, **config.get("transformer_layer_config", {})}
        self.version = version
        self.capture = capture
        self.stem = next(n for n in ("midlayer", "layers.0") if f"{n}.mlp.up_proj.weight" in self.t)
        later = (*(f"layers.{i}" for i in range(1, 9)), "additional_layers.0")
        self.stems = [self.stem, *(n for n in later if f"{n}.mlp.up_proj.weight" in self.t)]
        # What many drafts and the nodes of one have in common is computed once.
        self.features, self.reached = cache(self.features), cache(self.reached)

    @torch.no_grad()
    def features(self, text: tuple[int, ...]):
        """[len(text), feature]."""
        if self.version == 1:
            return self.model.model(torch.tensor([text])).last_hidden_state[0]
        out = self.model.model(torch.tensor([text]), output_hidden_states=True)
        parts = [out.hidden_states[layer][0] for layer in self.capture]
        if "fc_norm.0.weight" in self.t:
            parts = [rms(part, self.t[f"fc_norm.{i}.weight"]) for i, part in enumerate(parts)]
        joined = torch.cat(parts, -1)
        if "input_norm.weight" in self.t:
            joined = rms(joined, self.t["input_norm.weight"])
        return joined @ self.t["fc.weight"].T

    @torch.no_grad()
    def run(self, features, ids):
        """Next features and logits of every row of one causal sequence, from scratch."""
        embedding = self.t.get("embed_tokens.weight", self.model.model.embed_tokens.weight)
        emb = embedding[torch.tensor(ids)]
        if self.version == 1:
            if "embedding_layernorm.weight" in self.t:
                emb = rms(emb, self.t["embedding_layernorm.weight"])
                features = rms(features, self.t["hidden_states_layernorm.weight"])
            x = torch.cat([emb, features], -1) @ self.t["fc.weight"].T + self.t.get("fc.bias", 0)
            for stem in self.stems:
                name = f"{stem}.input_layernorm.weight"
                normed = rms(x, self.t[name]) if name in self.t else x
                x = x + self.attention(normed, stem)
                x = x + self.mlp(rms(x, self.t[f"{stem}.post_attention_layernorm.weight"]), stem)
            z = rms(x, self.t["norm.weight"]) if "norm.weight" in self.t else x
            recycled = x if self.config.get("recycle") == "pre_norm" else z
            return recycled, z @ self.t.get("lm_head.weight", self.model.lm_head.weight).T
        stem = self.stem
        if "eh_proj.weight" in self.t:
            both = torch.cat([rms(emb, self.t["enorm.weight"]), features], -1)
            y = self.plain(both @ self.t["eh_proj.weight"].T, stem)
            return y, rms(y, self.t["norm.weight"]) @ self.t["lm_head.weight"].T
        normed = rms(features, self.t[f"{stem}.hidden_norm.weight"])
        both = torch.cat([rms(emb, self.t[f"{stem}.input_layernorm.weight"]), normed], -1)
        before = self.config.get("norm_before_residual", False)
        x = (normed if before else features) + self.attention(both, stem)
        y = x + self.mlp(rms(x, self.t[f"{stem}.post_attention_layernorm.weight"]), stem)
        for later in self.stems[1:]:
            y = self.plain(y, later)
        z = rms(y, self.t["norm.weight"])
        recycled = z if self.config.get("norm_output") else y
        return recycled, z @ self.t["lm_head.weight"].T

    def plain(self, x, stem):
        """A layer that reads one state."""
        names = (f"{stem}.input_layernorm.weight", f"{stem}.hidden_norm.weight")
        norm = next(self.t[name] for name in names if name in self.t)
        x = x + self.attention(rms(x, norm), stem)
        return x + self.mlp(rms(x, self.t[f"{stem}.post_attention_layernorm.weight"]), stem)

    def latents(self, x, stem):
        """Row by row and head by head, each pair of a query and a key by itself."""
        heads, length = self.config["num_attention_heads"], len(x)

        def by(name, rows):
            return rows @ self.t[f"{stem}.self_attn.{name}.weight"].T

        if f"{stem}.self_attn.q_a_proj.weight" in self.t:
            narrow = rms(by("q_a_proj", x), self.t[f"{stem}.self_attn.q_a_layernorm.weight"])
            queries = by("q_b_proj", narrow)
        else:
            queries = by("q_proj", x)
        rank = self.t[f"{stem}.self_attn.kv_b_proj.weight"].shape[1]
        both = by("kv_a_proj_with_mqa", x)
        latent = rms(both[:, :rank], self.t[f"{stem}.self_attn.kv_a_layernorm.weight"])
        turned = both[:, rank:]
        size, dim = turned.shape[1], queries.shape[1] // heads
        expanded = by("kv_b_proj", latent).view(length, heads, -1)
        keys, values = expanded[..., : dim - size], expanded[..., dim - size :]
        queries = queries.view(length, heads, dim)
        speeds, scale, sharpness = self.yarn(size)
        angles = torch.arange(length)[:, None] * speeds

        def turn(rows):
            if self.config.get("rope_interleave", True):
                pairs = rows.reshape(length, -1, 2)
            else:
                pairs = rows.reshape(length, 2, -1).transpose(1, 2)
            turns = torch.polar(torch.full_like(angles, scale), angles)
            return torch.view_as_real(torch.view_as_complex(pairs.contiguous()) * turns).flatten(1)

        out, keys_turned = torch.zeros(length, heads, values.shape[-1]), turn(turned)
        for head in range(heads):
            scores = queries[:, head, : dim - size] @ keys[:, head].T
            scores = scores + turn(queries[:, head, dim - size :]) @ keys_turned.T
            scores = scores * sharpness / math.sqrt(dim)
            scores = scores.masked_fill(torch.ones(length, length).triu(1).bool(), -math.inf)
            out[:, head] = scores.softmax(-1) @ values[:, head]
        return by("o_proj", out.flatten(1))

    def yarn(self, size):
        """Speeds of pairs, and what YaRN multiplies rotations and scores by."""
        theta, given = self.config.get("rope_theta", 10000.0), self.config.get("rope_scaling")
        speeds = [theta ** (-2 * pair / size) for pair in range(size // 2)]
        if given is None:
            return torch.tensor(speeds), 1.0, 1.0
        factor, length = given["factor"], given["original_max_position_embeddings"]

        def pair_of(turns):
            return size * math.log(length / (2 * math.pi * turns)) / (2 * math.log(theta))

        low, high = math.floor(pair_of(given["beta_fast"])), math.ceil(pair_of(given["beta_slow"]))
        low, high = max(low, 0), min(high, size - 1)
        for pair, speed in enumerate(speeds):
            share = min(max((pair - low) / (high - low), 0), 1)
            speeds[pair] = speed * (1 - share) + speed / factor * share
        grown = [0.1 * given[key] * math.log(factor) + 1 for key in ("mscale", "mscale_all_dim")]
        return torch.tensor(speeds), grown[0] / grown[1], grown[1] ** 2

    def attention(self, x, stem):
        if f"{stem}.self_attn.kv_b_proj.weight" in self.t:
            return self.latents(x, stem)
        heads, kv_heads = self.config["num_attention_heads"], self.config["num_key_value_heads"]
        dim, length = self.config["head_dim"], len(x)
        q, k, v = (
            (x @ self.t[f"{stem}.self_attn.{part}_proj.weight"].T).view(length, count, dim)
            for part, count in (("q", heads), ("k", kv_heads), ("v", kv_heads))
        )
        if f"{stem}.self_attn.q_norm.weight" in self.t:
            q = rms(q, self.t[f"{stem}.self_attn.q_norm.weight"])
            k = rms(k, self.t[f"{stem}.self_attn.k_norm.weight"])
        theta = self.config.get("rope_theta", 10000.0)
        out = torch.zeros_like(q)
        turn = self.turn_pairs if self.config.get("rope_layout") == "interleaved" else self.turn
        if self.config.get("no_rope_layers", [1] * 9)[self.stems.index(stem)]:
            q, k = (turn(z, torch.arange(length)[:, None, None], theta) for z in (q, k))
            if self.config.get("use_qk_norm"):
                q, k = rms(q, 1), rms(k, 1)
        elif self.config["attn_temperature_tuning"]:
            rates = [
                1 + self.config["attn_scale"] * math.log1p((at + 1) // self.config["floor_scale"])
                for at in range(length)
            ]
            q = q * torch.tensor(rates)[:, None, None]
        for head in range(heads):
            shared = head // (heads // kv_heads)
            scores = q[:, head] @ k[:, shared].T / math.sqrt(dim)
            scores = scores.masked_fill(torch.ones(length, length).triu(1).bool(), -math.inf)
            out[:, head] = scores.softmax(-1) @ v[:, shared]
        return out.reshape(length, -1) @ self.t[f"{stem}.self_attn.o_proj.weight"].T

    @staticmethod
    def turn(rows, positions, theta):
        half = rows.shape[-1] // 2
        angles = positions * theta ** (-torch.arange(half) / half)
        low, high = rows[..., :half], rows[..., half:]
        return torch.cat(
            [low * angles.cos() - high * angles.sin(), high * angles.cos() + low * angles.sin()], -1
        )

    @staticmethod
    def turn_pairs(rows, positions, theta):
        """Neighbours are a complex number."""
        half = rows.shape[-1] // 2
        angles = positions * theta ** (-torch.arange(half) / half)
        pairs = torch.view_as_complex(rows.reshape(*rows.shape[:-1], half, 2))
        return torch.view_as_real(pairs * torch.polar(torch.ones_like(angles), angles)).flatten(-2)

    def mlp(self, x, stem):
        gate = silu(x @ self.t[f"{stem}.mlp.gate_proj.weight"].T)
        wide = gate * (x @ self.t[f"{stem}.mlp.up_proj.weight"].T)
        return wide @ self.t[f"{stem}.mlp.down_proj.weight"].T

    def reached(self, text: tuple[int, ...], path: tuple[int, ...]):
        """Features read, next ones and logits of the rows of text + path."""
        features = self.features(text[:-1])
        if path:
            before, recycled, _ = self.reached(text, path[:-1])
            features = torch.cat([before, recycled[-1:]])
        return features, *self.run(features, [*text[1:], *path])

    def after(self, text, path):
        """Log-probabilities over the target's ids (-inf: unknown to the head) after text + path."""
        logits = self.reached(tuple(text), tuple(path))[2]
        logs = logits[-1].log_softmax(-1)
        if "d2t" not in self.t:
            return logs
        ids_of = torch.arange(len(logs)) + self.t["d2t"]
        return torch.full((len(self.t["t2d"]),), -math.inf).index_put((ids_of,), logs)


class MaskReference(Reference):
    """All that follows the last row reads masks, not what was guessed."""

    def after(self, text, path):
        return self.reached(tuple(text), len(path))

    @torch.no_grad()
    def reached(self, text, count):
        token = next(
            self.config[key]
            for key in ("pard_token", "mask_token_id", "ptd_token_id")
            if key in self.config
        )
        masked = self.t["mask_hidden"].reshape(1, -1)
        fused = [masked]
        if "fc_norm.0.weight" in self.t:
            parts = masked.chunk(3, -1)
            fused = [rms(part, self.t[f"fc_norm.{i}.weight"]) for i, part in enumerate(parts)]
        feature = torch.cat(fused, -1) @ self.t["fc.weight"].T
        features = torch.cat([self.features(text[:-1]), feature.expand(count, -1)])
        _, logits = self.run(features, [*text[1:], *[token] * count])
        logs = logits[-1].log_softmax(-1)
        if "d2t" not in self.t:
            return logs
        ids_of = torch.arange(len(logs)) + self.t["d2t"]
        return torch.full((len(self.t["t2d"]),), -math.inf).index_put((ids_of,), logs)


LLAMA4 = {
    "architectures": ["EagleLlama4ForCausalLM"],
    "model_type": "llama4_text",
    "moe_layers": [],
    "use_qk_norm": True,
    "no_rope_layers": [1, 0],
    "attn_temperature_tuning": True,
    "floor_scale": 4,
    "attn_scale": 0.5,
    "rope_theta": 700.0,
}
LLAMA4_ONE = {"input_norm": True, "final_norm": True, "fc_bias": False, "config": LLAMA4}
PROMPTS = [[7, 3, 50, 21, 9, 4, 33, 80, 61], [5, 6], [11, 12, 13, 90, 14, 15, 16]]
SHAPES = {
    "chain": {"max_draft_len": 4},
    "dynamic": {
        "use_dynamic_tree": True,
        "dynamic_tree_max_topK": 4,
        "max_draft_len": 3,
        "max_total_draft_tokens": 12,
    },
}


def section(folder: str, **fields):
    return {"decoding_type": "Eagle", "speculative_model": folder, **fields}
