"""Reads heads of Llama-like layers: the shared parts of several drafters' checkpoints.

Sizes come from tensor shapes, since configurations are often wrong. Facts that no shape shows (head
counts, rotary positions, the mask token) come from `config.json`, in the flat form or in the
speculators library's, or from the user's section.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn

from ...config import HeadConfig
from ...errors import ConfigError
from .llama import SCALING, LayerSizes, Rope, halves, neighbours
from .load import ConfigReader, Tensors, fail, read_config
from .protocol import TargetFacts

_FILES = ("model", "pytorch_model")
_TURNED = re.compile(r".*\.([qk]_proj\.(weight|bias)|[qk]_norm\.weight)")
_YARN = ("beta_fast", "beta_slow", "mscale", "mscale_all_dim", "attention_factor")
_IGNORED = r".*rotary_emb\.inv_freq"


def own_name(stored: str, renamed: Mapping[str, str]) -> str:
    """Returns our name of a stored tensor; `renamed` maps prefixes of names."""
    name = stored.removeprefix("model.").replace(".feed_forward.", ".mlp.")
    for theirs, ours in renamed.items():
        if name.startswith(theirs):
            return ours + name.removeprefix(theirs)
    return name


@dataclass(frozen=True, slots=True)
class Origin:
    """The places of a module's weights in its checkpoint."""

    names: Mapping[str, str]  # in the files, by the module's names
    interleaved: int | None = None  # head size of rotary pairs that were reordered to halves

    def published(self, module: nn.Module) -> dict[str, Tensor]:
        """Returns the module's weights with the names, and in the order of rows, of the files."""
        state = module.state_dict()
        if self.interleaved is not None:
            for name in filter(_TURNED.fullmatch, state):
                state[name] = neighbours(state[name], self.interleaved)
        return {stored: state[name] for name, stored in self.names.items()}


class LlamaReader:
    """Tensors and configuration of a folder.

    Args:
        config: the user's section, with `rope_theta` and `rope_layout`.
        renamed: as in `own_name`.
    """

    default_theta: float = 10_000.0  # rotary base of a checkpoint that has none

    def __init__(self, config: HeadConfig, target: TargetFacts, renamed: Mapping[str, str]) -> None:
        self.target, self.folder = target, config.folder
        self._section = cast(Any, config)
        raw = read_config(config.folder)
        if not raw:
            raise fail(f"{str(config.folder)!r} has no config.json with 'num_attention_heads'")
        self.raw = ConfigReader(config.folder, raw)
        layer = self.raw.section("transformer_layer_config")
        self.config = ConfigReader(config.folder, {**raw, **layer.values})
        self.tensors = Tensors(
            config.folder,
            _FILES,
            partial(own_name, renamed=renamed),
            target.device,
            allow_pickle=target.allow_pickle,
        )
        self.interleaved = self._section.rope_layout == "interleaved"
        self.origin = Origin({})  # of the loaded weights
        self.scaling: dict[str, Any] = {}  # of rotary positions, once `rope` has read it

    def refuse(self, owners: dict[str, str]) -> None:
        """Raises `CheckpointError` for unsupported tensors; `owners` maps patterns to kinds."""
        for pattern, owner in owners.items():
            if found := self.tensors.matches(pattern):
                raise self.tensors.bad(found[0][0], f"belongs to {owner}")

    def load(
        self,
        module: nn.Module,
        head_dim: int,
        stored_name: Callable[[str], str] = lambda name: name,
        beside: dict[str, Tensor] | None = None,
    ) -> None:
        """Loads the weights of `module`; `beside` are weights from other files, by its names."""
        given = beside or {}
        wanted = {name: empty for name, empty in module.state_dict().items() if name not in given}
        state = {
            name: self.tensors.take(stored_name(name), *empty.shape)
            for name, empty in wanted.items()
        }
        names = {name: self.tensors.stored_name(stored_name(name)) for name in wanted}
        self.origin = Origin(names, head_dim if self.interleaved else None)
        self.tensors.finish(_IGNORED)
        if self.interleaved:
            for name in filter(_TURNED.fullmatch, state):
                state[name] = halves(state[name], head_dim)
        module.load_state_dict(state | given, assign=True)
        module.to(self.target.device, self.target.dtype).eval().requires_grad_(False)

    def without(self, key: str, why: str) -> None:
        """Raises `ConfigError` if the user set `key`, which this head does not have."""
        if (value := getattr(self._section, key)) is not None:
            raise ConfigError.at(
                f"speculative_config.{key}",
                f"{value!r} has no meaning for {str(self.folder)!r}: {why}",
            )

    def sizes(self, layer: str) -> LayerSizes:
        """Returns a layer's dimensions, from tensor shapes and the number of heads."""
        shape, has = self.tensors.shape, self.tensors.__contains__
        names = [f"{layer}.self_attn.{part}_proj.weight" for part in "qko"]
        names.append(f"{layer}.mlp.gate_proj.weight")
        self.require_matrices(names)
        query, key, output, gate = (shape(name) for name in names)
        heads = self.config.number("num_attention_heads")
        head_dim = self.config.number("head_dim", max(1, query[0] // heads))
        if head_dim * heads != query[0] or key[0] % head_dim:
            raise fail(
                f"tensors {names[0]!r} {list(query)} and {names[1]!r} {list(key)} of "
                f"{str(self.folder)!r} do not fit {heads} heads of {head_dim} "
                "(num_attention_heads, head_dim)"
            )
        self.config.only("hidden_act", "silu", "swish", why="heads are run with silu")
        return LayerSizes(
            hidden_size=output[0],
            input_size=query[1],
            intermediate_size=gate[0],
            num_heads=heads,
            num_kv_heads=key[0] // head_dim,
            head_dim=head_dim,
            eps=self.config.real("rms_norm_eps", 1e-6),
            qkv_bias=has(f"{layer}.self_attn.q_proj.bias"),
            output_bias=has(f"{layer}.self_attn.o_proj.bias"),
            qk_norm=has(f"{layer}.self_attn.q_norm.weight"),
        )

    def require_matrices(self, names: Sequence[str]) -> None:
        """Raises `CheckpointError` if one is missing or is not a matrix."""
        for name in names:
            if name not in self.tensors:
                raise self.tensors.fault(f"lacks tensor {name!r} (two dimensions)")
            shape = self.tensors.shape(name)
            if len(shape) != 2 or 0 in shape:
                raise self.tensors.bad(name, f"has shape {list(shape)}, expected two dimensions")

    def rope(self, head_dim: int) -> Rope:
        """Returns the rotary frequencies."""
        scaling = self.config.section("rope_parameters")
        scaling = scaling if scaling.values else self.config.section("rope_scaling")
        theta = scaling.real("rope_theta", self.default_theta)
        theta = self.config.real("rope_theta", theta)
        kind = str(scaling.values.get("rope_type") or scaling.values.get("type") or "default")
        if kind not in SCALING:
            raise fail(
                f"rope_scaling of {str(self.folder)!r} is of type {kind!r}; allowed: "
                f"{', '.join(SCALING)}"
            )
        for key in SCALING[kind]:
            scaling.real(key)
        theta = self._section.rope_theta or theta
        if kind == "yarn":
            for key in filter(scaling.__contains__, _YARN):
                scaling.real(key)
            scaling.flag("truncate", True)
            if theta <= 1:
                raise fail(
                    f"rope_theta of {str(self.folder)!r} is {theta}, expected a number above 1: "
                    "its rope_scaling is yarn"
                )
        self.scaling = {**scaling.values, "rope_type": kind}
        return Rope(head_dim, theta, self.scaling)

    def embedding(self, width: int) -> int | None:
        """Returns the rows of the head's own embedding; None if it uses the target's."""
        if "embed_tokens.weight" not in self.tensors:
            if width != self.target.hidden_size:
                raise self.tensors.fault(
                    f"lacks tensor 'embed_tokens.weight' of shape "
                    f"{[self.target.vocab_size, width]}, needed since the target's is "
                    f"{self.target.hidden_size} wide"
                )
            return None
        return self.target.vocab_size

    def vocabulary(self, hidden: int) -> tuple[int | None, Tensor | None]:
        """Returns the output layer's rows (None: the target's) and target ids (None: the same)."""
        tensors, vocab = self.tensors, self.target.vocab_size
        size, ids = None, None
        if "lm_head.weight" in tensors:
            size = next(iter(tensors.shape("lm_head.weight")), 0)
            tensors.expect("lm_head.weight", size, hidden)
        else:
            self.check_target_output(hidden)
        if "d2t" in tensors:
            if size is None:
                raise self.tensors.fault("has 'd2t' but lacks tensor 'lm_head.weight'")
            ids = tensors.take_ids("d2t", size) + torch.arange(size)
            self._check_ids(ids, vocab)
        elif size is not None and size != vocab:
            raise self.tensors.bad(
                "lm_head.weight",
                f"has {size} rows, the target "
                f"{vocab} tokens, and there is no 'd2t' of shape [{size}] between them",
            )
        if "t2d" in tensors:
            known = tensors.take_ids("t2d", vocab).to(torch.bool)
            if ids is not None and not torch.equal(known.nonzero()[:, 0], ids):
                raise fail(f"tensors 't2d' and 'd2t' of {str(self.folder)!r} disagree")
        if not any(n in tensors for n in ("lm_head.weight", "embed_tokens.weight", "t2d")):
            self.config.check_vocabulary(vocab)
        return size, None if ids is None else ids.to(self.target.device)

    def check_target_output(self, hidden: int) -> None:
        """Raises `CheckpointError` if the target's output layer cannot serve the head."""
        width, vocab = self.target.hidden_size, self.target.vocab_size
        if hidden != width:
            raise self.tensors.fault(
                f"lacks tensor 'lm_head.weight' of width {hidden}, "
                f"needed since the target's output layer reads {width}"
            )
        if (size := self.config.number("draft_vocab_size", vocab)) != vocab:
            raise self.tensors.fault(
                "lacks tensor 'lm_head.weight', needed since its draft_vocab_size is "
                f"{size} and the target's vocabulary {vocab}"
            )

    def _check_ids(self, ids: Tensor, vocab: int) -> None:  # [draft_vocab]
        """Checks that they are token ids of the target, strictly ascending."""
        wrong = (ids < 0) | (ids >= vocab)
        wrong[1:] |= ids.diff() <= 0
        if bool(wrong.any()):
            index = int(wrong.nonzero()[0, 0])
            raise self.tensors.bad(
                "d2t",
                f"makes draft token {index} token {int(ids[index])}: outside the target's {vocab} "
                "tokens, or not above the one before; id = i + d2t[i] must rise within them",
            )

    def mask_token(self, keys: Sequence[str], *readers: ConfigReader, limit: int | None) -> int:
        """Returns the token that stands for those to be drafted, from the section or `readers`.

        Args:
            limit: number of embedded tokens; None: the mask's embedding is in a separate file.
        """
        token = self._section.mask_token_id
        if token is not None:
            if limit is not None and token >= limit:
                raise ConfigError.at(
                    "speculative_config.mask_token_id",
                    f"{token} is outside the vocabulary of {limit} tokens",
                )
            return int(token)
        for reader in readers:
            for key in keys:
                if key not in reader:
                    continue
                token = reader.values[key]
                if type(token) is not int or token < 0 or (limit is not None and token >= limit):
                    raise reader.wrong(key, f"a token of the vocabulary of {limit}")
                return token
        raise fail(
            f"config.json of {str(self.folder)!r} has none of {', '.join(keys)}; give the head's "
            "mask_token_id"
        )
