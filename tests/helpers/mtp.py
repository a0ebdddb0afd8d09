"""Tiny random targets with MTP modules, in the published names, and the modules by their equations.

The reference shares no code with the package: transformers' own layers, called plainly with a
mask, everything computed afresh for every token.
"""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from outrider.tests.helpers.eagle import Trees
from outrider.tests.helpers.head_files import Tensors

BASE: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.15,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "tie_word_embeddings": False,
}
MOE = {"num_experts_per_tok": 2, "moe_intermediate_size": 16}
GROUPED = {"n_routed_experts": 4, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1, **MOE}
TARGETS: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama"},
    "deepseek": {
        "model_type": "deepseek_v3",
        "num_key_value_heads": 4,
        "q_lora_rank": 16,
        "kv_lora_rank": 16,
        "qk_nope_head_dim": 8,
        "qk_rope_head_dim": 8,
        "v_head_dim": 12,
        **GROUPED,
    },
    "glm": {"model_type": "glm4_moe", "head_dim": 8, **GROUPED},
    "qwen": {
        "model_type": "qwen3_next",
        "head_dim": 8,
        "num_experts": 4,
        "shared_expert_intermediate_size": 16,
        "layer_types": ["full_attention", "full_attention"],
        **MOE,
    },
    "mimo": {"model_type": "qwen2"},
    "ernie": {
        "model_type": "ernie4_5_moe",
        "moe_num_experts": 4,
        "moe_k": 2,
        "moe_intermediate_size": 16,
        "moe_num_shared_experts": 1,
        "rms_norm_eps": 1e-6,
    },
    # Not of the family:
    "qwen2_moe": {
        "model_type": "qwen2_moe",
        "num_experts": 4,
        "shared_expert_intermediate_size": 16,
        **MOE,
    },
}


BEFORE_NORM = ("mimo", "ernie")
"""Kinds whose modules read the target's state before its final norm."""
SHORT = ("enorm", "hnorm", "eh_proj", "norm")
PUBLISHED = {
    "qwen": ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "fc", "norm"),
    "mimo": ("token_layernorm", "hidden_layernorm", "input_proj", "final_layernorm"),
    "ernie": ("mtp_emb_norm.{}", "mtp_hidden_norm.{}", "mtp_linear_proj.{}", "norm"),
}
DEEPSEEK = ("enorm", "hnorm", "eh_proj", "shared_head.norm")
"""Names of `SHORT` in checkpoints of all other kinds."""


def target_config(kind: str, **changes: Any) -> Any:
    return AutoConfig.for_model(**{**BASE, **TARGETS[kind], **changes})


def random_model(config: Any, seed: int) -> Any:
    """Its next token hangs on the last one, and a little on the rest."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config).float().eval()
    with torch.no_grad():
        model.model.embed_tokens.weight.mul_(8)
        for name, parameter in model.named_parameters():
            if name.endswith(("o_proj.weight", "down_proj.weight", "down_proj")):
                parameter.mul_(0.1)
            elif parameter.dim() == 1:
                parameter.add_(torch.randn_like(parameter) * 0.1)
    return model


class Made:
    """A target with `count` modules after its last layer; `extra` are their own tensors."""

    def __init__(self, folder: Path, kind: str, count: int = 1) -> None:
        self.kind, self.count = kind, count
        self.target = random_model(target_config(kind), seed=1)
        if kind in BEFORE_NORM:
            with torch.no_grad():  # what it scales by is seen in drafts
                self.target.model.norm.weight.mul_(torch.randn(BASE["hidden_size"]).exp())
        self.target.save_pretrained(folder / "plain")
        many = {"num_hidden_layers": count, "first_k_dense_replace": 0}
        many["moe_layer_start_index"] = count  # ERNIE's are dense
        if kind == "qwen":
            many["layer_types"] = ["full_attention"] * count
        # As many layers of a model of the same kind: saved, they have the published names.
        self.layers = random_model(target_config(kind, **many), seed=2)
        self.layers.save_pretrained(folder / "layers")
        stored = load_file(folder / "layers" / "model.safetensors")
        self.around = [self._around(seed) for seed in range(count)]
        self.extra: Tensors = {}
        for index, around in enumerate(self.around):
            stem, layer, names = self._places(index)
            own = f"model.layers.{index}."
            for name, tensor in stored.items():
                if name.startswith(own):
                    self.extra[layer + name.removeprefix(own)] = tensor
            held = dict(around)
            if kind == "mimo":  # the state before the embedding
                held["eh_proj"] = around["eh_proj"].roll(BASE["hidden_size"], 1)
            self.extra.update({stem + public: held[name] for name, public in names.items()})
        changes = {"num_nextn_predict_layers": count}
        if kind == "mimo":
            code = {"AutoConfig": "configuration_mimo.MiMoConfig"}
            changes |= {"model_type": "mimo", "architectures": ["MiMoForCausalLM"]}
            changes |= {"auto_map": code}
        self.folder = write_beside(folder / "plain", folder / "whole", self.extra, changes)
        self.alone = write_alone(folder / "plain", folder / "alone", self.extra, changes)

    def _places(self, index: int) -> tuple[str, str, dict[str, str]]:
        stem = layer = f"model.layers.{2 + index}."
        if self.kind == "qwen":
            stem, layer = "mtp.", "mtp.layers.0."
        elif self.kind == "mimo":
            stem = layer = f"model.mtp_layers.{index}."
        elif self.kind == "ernie":
            stem, layer = "model.", f"model.mtp_block.{index}."
        names = [name.format(index) for name in PUBLISHED.get(self.kind, DEEPSEEK)]
        return stem, layer, {key: f"{name}.weight" for key, name in zip(SHORT, names, strict=True)}

    def _around(self, seed: int) -> Tensors:
        """The embedding is let through: it says most about what the target says next."""
        generator = torch.Generator().manual_seed(seed)
        size = BASE["hidden_size"]

        def noise(*shape: int, scale: float) -> torch.Tensor:
            return torch.randn(*shape, generator=generator) * scale

        one = 0.0 if self.kind == "qwen" else 1.0  # its norms scale by 1 + weight
        mix = torch.cat([torch.eye(size), torch.zeros(size, size)], 1)
        return {
            "enorm": one + noise(size, scale=0.1),
            "hnorm": one + noise(size, scale=0.1),
            "eh_proj": mix + noise(size, 2 * size, scale=0.05),
            "norm": self.target.model.norm.weight.detach().clone(),
        }


def write_beside(plain: Path, folder: Path, extra: Tensors, changes: dict[str, Any]) -> str:
    """The target's folder with the modules' tensors in it, copies of its own among them.

    Args:
        changes: of its configuration; `num_nextn_predict_layers` is the number of modules.
    """
    count = changes["num_nextn_predict_layers"]
    tensors = load_file(plain / "model.safetensors")
    ends = {
        "embed_tokens.weight": tensors["model.embed_tokens.weight"],
        "shared_head.head.weight": tensors["lm_head.weight"],
    }
    copies = {
        f"model.layers.{layer}.{name}": tensor.clone()
        for layer in range(2, 2 + count)
        if f"model.layers.{layer}.eh_proj.weight" in extra
        for name, tensor in ends.items()
    }
    return _write(plain, folder, {**tensors, **copies, **extra}, changes)


def write_alone(plain: Path, folder: Path, extra: Tensors, changes: dict[str, Any]) -> str:
    """A folder with nothing but the modules."""
    return _write(plain, folder, extra, changes)


def _write(plain: Path, folder: Path, tensors: Tensors, changes: dict[str, Any]) -> str:
    folder.mkdir(parents=True, exist_ok=True)
    config = json.loads((plain / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changes))
    tensors = {name: tensor.contiguous() for name, tensor in tensors.items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return str(folder)


def norm(states: torch.Tensor, weight: torch.Tensor, kind: str) -> torch.Tensor:
    scale = 1 + weight if kind == "qwen" else weight
    return states * torch.rsqrt(states.pow(2).mean(-1, keepdim=True) + 1e-6) * scale


class Reference(Trees):
    """The modules of `made`, one sequence at a time.

    Slot j of module m: the embedding of token j + 1, and the feature that module m - 1 has at slot
    j - 1; the first module has the target's at slot j, and where the draft is beyond it, the
    feature of the module that guessed last.
    """

    def __init__(
        self, made: Made, *, count: int | None = None, pre_norm=None, zero_first=False, before=None
    ):
        self.made, self.count = made, count or made.count
        self.pre_norm = made.kind == "ernie" if pre_norm is None else pre_norm
        self.before = made.kind in BEFORE_NORM if before is None else before
        self.zero_first = zero_first
        # What many drafts and the nodes of one have in common is computed once.
        self.entering, self.reached = cache(self.entering), cache(self.reached)

    @torch.no_grad()
    def module(self, index, features, tokens):
        """Next features and normed outputs at every slot, from scratch."""
        made, length = self.made, len(tokens)
        around, kind = made.around[index], made.kind
        embedded = made.target.model.embed_tokens(torch.tensor(tokens))
        features = torch.stack(features)
        if self.zero_first:
            embedded[:1] = 0
        embedded[:index], features[:index] = 0, 0
        both = [norm(embedded, around["enorm"], kind), norm(features, around["hnorm"], kind)]
        states = (torch.cat(both, -1) @ around["eh_proj"].T)[None]
        positions = torch.arange(length)[None]
        base = made.layers.model
        made.layers.set_attn_implementation("eager")
        out = base.layers[index](
            states,
            attention_mask=torch.full((length, length), -torch.inf).triu(1)[None, None],
            position_ids=positions,
            position_embeddings=base.rotary_emb(states, positions),
        )
        states = (out[0] if isinstance(out, tuple) else out)[0]
        normed = norm(states, around["norm"], kind)
        return (states if self.pre_norm else normed), normed

    @torch.no_grad()
    def entering(self, text: tuple[int, ...]):
        """The target's features, by slot."""
        entering, target = [], self.made.target
        hook = target.model.norm.register_forward_pre_hook(
            lambda _, states: entering.append(states[0][0])
        )
        states = target.model(torch.tensor([text[:-1]])).last_hidden_state[0]
        hook.remove()
        return list(entering[0] if self.before else states)

    @torch.no_grad()
    def reached(self, text: tuple[int, ...], path: tuple[int, ...]):
        """The first module's features behind text + path, and the state that guesses there."""
        first = self.reached(text, path[:-1])[0] if path else self.entering(text)
        tokens, features, outs = [*text, *path][1:], first, []
        for index in range(self.count):
            following, normed = self.module(index, features, tokens)
            outs.append(following)
            if index == len(path) % self.count:
                guess = normed[-1]
            features = [torch.zeros_like(following[0]), *following[:-1]]
        return [*first, outs[len(path) % self.count][-1]], guess

    @torch.no_grad()
    def after(self, text, path):
        """Log-probabilities of what follows text + path."""
        guess = self.reached(tuple(text), tuple(path))[1]
        return self.made.target.lm_head(guess).log_softmax(-1)
