"""Multi-token-prediction modules: a projection and a decoder layer of the target's architecture.

Row i of the first module consumes the target's state h_i (after its final norm) and the embedding
of token i + 1, and predicts token i + 2:

    x = eh_proj([enorm(embedding), hnorm(h)]);  y = layer(x);  z = norm(y);  logits = head(z)

Embedding and output layer are the target's. The next feature is z, or y with `pre_norm`. A second
module reads the first one's feature of row i and the embedding of token i + 2, and so on; a single
module reads its own feature, as EAGLE's do. If modules of a layout were trained on states before
the target's final norm, that norm is undone. Since hnorm divides by the length, only the norm's
weights must be undone.

Source: DeepSeek-V3 (arXiv:2412.19437, section 2.2).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from copy import deepcopy
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from ...config import MTPConfig
from .block import DecoderBlock, materialise_constants, read_block_config
from .load import ConfigReader, Tensors, fail
from .protocol import (
    Attend,
    Entrance,
    FeatureModule,
    HeadHost,
    HeadLayer,
    HeadRows,
    TargetFacts,
)
from .tree_drafting import TreeDraftingHead, a_token_earlier


class _Attended(Exception):
    """Ends a layer's run at its attention."""


class MTPModule(FeatureModule):
    """One module, built without weights on the meta device.

    Args:
        config: transformers' configuration of the target, or of an equivalent checkpoint.
        layer: cache layer of the head that holds this module's keys and values.
        undoes_norm: whether the module reads the target's state before the final norm, but gets the
            normed state.
    """

    def __init__(
        self, config: Any, *, layer: int = 0, pre_norm: bool = False, undoes_norm: bool = False
    ) -> None:
        super().__init__()
        hidden = config.hidden_size
        self.hidden_size = self.embedding_size = hidden
        self.block = DecoderBlock(config)
        self.enorm, self.hnorm = self.block.new_norm(), self.block.new_norm()
        self.eh_proj = nn.Linear(2 * hidden, hidden, bias=False, device="meta")
        self.norm = self.block.new_norm()
        self.undone = self.block.new_norm() if undoes_norm else None
        self.layer, self.norm_output = layer, not pre_norm
        self.embed_tokens = self.lm_head = None
        self.place: ModuleNames | None = None  # in its checkpoint
        self.final_norm: Tensor | None = None  # [hidden_size], the target's, if it is undone

    def published(self) -> dict[str, Tensor]:
        """Returns the weights by the names of its checkpoint."""
        assert self.place is not None, "it was read from a checkpoint"
        found: dict[str, Tensor] = {
            self.place.stem + public: self.get_parameter(f"{name}.weight").detach()
            for name, public in self.place.layout.names.items()
        }
        if self.place.layout.state_first:
            name = self.place.stem + self.place.layout.names["eh_proj"]
            found[name] = _exchanged(found[name])
        if self.final_norm is not None:
            found[_FINAL_NORM] = self.final_norm
        layer = self.block.published()
        return found | {self.place.layer + name: tensor for name, tensor in layer.items()}

    def entrance(self) -> Entrance:
        norms = () if self.undone is None else (self.undone,)
        return Entrance(norms, None, None, self.enorm, self.hnorm, self.eh_proj)

    def of_target(self) -> list[Tensor]:
        found: list[Tensor] = [] if self.undone is None else [*self.undone.parameters()]
        if self.place is not None and self.place.layout.names["norm"] == _FINAL_NORM:
            found += self.norm.parameters()
        return found

    def decode(
        self, states: Tensor, read: Tensor | None, positions: Tensor, attend: Attend
    ) -> tuple[Tensor, Tensor]:
        states = self.block(states, positions, self.layer, attend)
        return states, self.norm(states)

    @torch.inference_mode()
    def kept(self) -> HeadLayer:
        """KV shape of the layer, found by running it on one row up to its attention.

        This works for any architecture. It stops there because experts' products do not support
        float32 on the meta device, where weights are not read.

        Raises:
            CheckpointError: the layer needs an attention that heads do not support.
        """
        shapes: list[HeadLayer] = []

        def watch(layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
            shapes.append(HeadLayer(key.shape[1], key.shape[2], value.shape[2]))
            raise _Attended

        weight = self.eh_proj.weight
        row = weight.new_zeros(1, weight.shape[0])
        try:
            with suppress(_Attended):
                self(row, row, torch.zeros(1, dtype=torch.int64, device=weight.device), watch)
        except (RuntimeError, TypeError, ArithmeticError) as error:
            raise fail(f"the layer described by config.json does not run: {error}") from None
        assert len(shapes) == 1, (len(shapes), "a layer has one attention")
        return shapes[0]


_FILES = ("model", "pytorch_model", "mtp")
_SCALE = "_scale_inv"
_BLOCK = (128, 128)


@dataclass(frozen=True, slots=True)
class Layout:
    """How checkpoints of a kind of model store modules, and the modules' training inputs."""

    names: Mapping[str, str]  # by attribute of `MTPModule`, below a module's stem
    state_first: bool = False  # `eh_proj` reads the state before the embedding
    recycle: str = "post_norm"  # which output is the next feature
    target_state: str = "post_norm"


DEEPSEEK = Layout(
    {
        "enorm": "enorm.weight",
        "hnorm": "hnorm.weight",
        "eh_proj": "eh_proj.weight",
        "norm": "shared_head.norm.weight",
    }
)
QWEN = Layout(
    {
        "enorm": "pre_fc_norm_embedding.weight",
        "hnorm": "pre_fc_norm_hidden.weight",
        "eh_proj": "fc.weight",
        "norm": "norm.weight",
    }
)
_MIMO = Layout(
    {
        "enorm": "token_layernorm.weight",
        "hnorm": "hidden_layernorm.weight",
        "eh_proj": "input_proj.weight",
        "norm": "final_layernorm.weight",
    },
    state_first=True,
    target_state="pre_norm",
)
_FINAL_NORM = "model.norm.weight"  # the target's


def _ernie(index: int) -> Layout:
    """Returns the layout of ERNIE, whose modules end with the target's own norm."""
    names = {
        "enorm": f"model.mtp_emb_norm.{index}.weight",
        "hnorm": f"model.mtp_hidden_norm.{index}.weight",
        "eh_proj": f"model.mtp_linear_proj.{index}.weight",
        "norm": _FINAL_NORM,
    }
    return Layout(names, recycle="pre_norm", target_state="pre_norm")


_FOREIGN = {  # known layouts that are rejected by name
    r"mtp_layers\..*": "the speculators library's",
    r"model\.mtp\.layers\.\d+\.pre_mlp_layernorm\..*": "MiMo-V2's",
    r"model\.mtp\.layers\.\d+\.[eh]norm\.m\..*": "LongCat's",
    r"(language_model\.)?model\.mtp\.layers\.\d+\.transformer_layer\..*": "MiniMax-M3's",
    r"mtp\.layers\.\d+\.mixer\..*": "Nemotron-H's",
    r"model\.layers\.\d+\.shared_head\.output\..*": "Step-3.5's",
    r"(model\.)?mtp\.\d+\.[eh]_proj\..*": "DeepSeek-V4's",
    r"(pre|post)_projection\..*": "Gemma 4's",
}
_COPIES = ("embed_tokens.weight", "shared_head.head.weight", "lm_head.weight")


@dataclass(frozen=True, slots=True)
class ModuleNames:
    """Checkpoint names of one module."""

    stem: str  # prefix of the tensors outside the layer
    layer: str  # prefix of the layer's tensors
    layout: Layout


def read_mtp(config: MTPConfig, target: TargetFacts) -> nn.ModuleList:
    """Loads the modules of `config`'s folder that are used, in order.

    Raises:
        CheckpointError: there are none or too few, or a tensor is missing, superfluous, or does
            not fit the target.
    """
    _refuse_foreign(config, target)  # before config.json is read, since some have no layer there
    block_config = read_block_config(config.folder)
    ConfigReader(config.folder, block_config.to_dict()).check_vocabulary(target.vocab_size)
    tensors, places = _find(config, block_config.num_hidden_layers, target)
    if config.use_mtp_vanilla and config.draft_len > len(places):
        raise fail(
            f"use_mtp_vanilla needs one module per token, {config.draft_len} "
            f"(max_draft_len), but {str(config.folder)!r} holds {len(places)}: "
            f"{', '.join(place.stem + '*' for place in places)}"
        )
    used = places[:1] if config.use_mtp_vanilla is False else places[: config.draft_len]
    modules = nn.ModuleList()
    for index, place in enumerate(used):
        module = MTPModule(
            block_config,
            layer=index,
            pre_norm=(config.recycle or place.layout.recycle) == "pre_norm",
            undoes_norm=not index
            and (config.target_state or place.layout.target_state) == "pre_norm",
        )
        _fill(module, place, tensors, target)
        modules.append(module)
    unused = [
        re.escape(name) + ".*"
        for place in places[len(used) :]
        for name in (place.layer, *(place.stem + own for own in place.layout.names.values()))
    ]
    ignored = (r".*rotary_emb\.inv_freq", re.escape(_FINAL_NORM), *unused)
    tensors.finish("|".join(ignored))
    return modules.eval().requires_grad_(False)


def dequantised(
    weight: Tensor,  # [num_rows, num_columns], float8
    scale: Tensor,  # [row blocks, column blocks], float32
) -> Tensor:  # [num_rows, num_columns], float32
    """Dequantises DeepSeek's FP8 blocks: each block times its scale."""
    rows, columns = weight.shape
    wide = scale.float().repeat_interleave(_BLOCK[0], 0)[:rows]
    return weight.float() * wide.repeat_interleave(_BLOCK[1], 1)[:, :columns]


def _find(
    config: MTPConfig, num_layers: int, target: TargetFacts
) -> tuple[Tensors, list[ModuleNames]]:
    """Finds the folder's modules, in order.

    They are often in the target's own folder. DeepSeek's layout (and GLM-4.5's) has
    `model.layers.{n}.` after the target's last layer, or from 0 in a folder with only the module.
    Qwen3-Next's has `mtp.`, whose modules share all tensors except their layers. MiMo's has
    `model.mtp_layers.{n}.`. ERNIE 4.5's has `model.mtp_block.{n}.` with `model.mtp_emb_norm.{n}.`
    and others.
    """
    for first in (num_layers, 0):
        tensors = _tensors(config, target, _from(first))
        if found := _numbers(tensors, r"model\.mtp_layers\.(\d+)\..*"):
            stems = [f"model.mtp_layers.{layer}." for layer in found]
            return tensors, [ModuleNames(stem, stem, _MIMO) for stem in stems]
        if found := _numbers(tensors, r"model\.mtp_(?:block|linear_proj)\.(\d+)\..*"):
            blocks = [(f"model.mtp_block.{layer}.", _ernie(layer)) for layer in found]
            return tensors, [ModuleNames("", block, layout) for block, layout in blocks]
        if tensors.matches(r"mtp\..*"):
            layers = sorted({0, *_numbers(tensors, r"mtp\.layers\.(\d+)\..*")})
            return tensors, [ModuleNames("mtp.", f"mtp.layers.{layer}.", QWEN) for layer in layers]
        own = r"model\.layers\.(\d+)\.(enorm|hnorm|eh_proj|shared_head)\..*"
        if layers := _numbers(tensors, own):
            stems = [f"model.layers.{layer}." for layer in layers]
            return tensors, [ModuleNames(stem, stem, DEEPSEEK) for stem in stems]
    raise tensors.fault(
        f"holds no MTP module: neither "
        f"'model.layers.{num_layers}.eh_proj.weight' nor 'mtp.fc.weight'"
    )


def _numbers(tensors: Tensors, pattern: str) -> list[int]:
    """Returns the numbers in names that match, ascending."""
    return sorted({int(match[1]) for match in tensors.matches(pattern)})


def _tensors(
    config: MTPConfig, target: TargetFacts, rename: Callable[[str], str | None]
) -> Tensors:
    return Tensors(config.folder, _FILES, rename, target.device, allow_pickle=target.allow_pickle)


def _refuse_foreign(config: MTPConfig, target: TargetFacts) -> None:
    """Raises `CheckpointError` for a known layout that is not supported."""
    tensors = _tensors(config, target, lambda stored: stored)
    for pattern, whose in _FOREIGN.items():
        if found := tensors.matches(pattern):
            raise tensors.bad(
                found[0][0],
                f"is in {whose} layout of MTP modules, which is not read; the layouts of "
                "DeepSeek-V3, GLM-4.5, Qwen3-Next, MiMo and ERNIE 4.5 are",
            )


def _from(first: int) -> Callable[[str], str | None]:
    """Returns a function that renames to the published names and ignores layers before `first`."""

    def rename(stored: str) -> str | None:
        name = stored.removeprefix("model.")
        if name.startswith("mtp."):
            return name
        if name.startswith("mtp_") or name == "norm.weight":
            return f"model.{name}"
        match = re.match(r"layers\.(\d+)\.", name)
        return f"model.{name}" if match and int(match[1]) >= first else None

    return rename


def _fill(module: MTPModule, place: ModuleNames, tensors: Tensors, target: TargetFacts) -> None:
    """Loads one module's weights onto the target's device."""
    hidden = target.hidden_size
    shapes = {"eh_proj": (hidden, 2 * hidden)}
    state: dict[str, Tensor] = {}
    for name, public in place.layout.names.items():
        full = place.stem + public
        shape = shapes.get(name, (hidden,))
        is_turned = full in tensors and tensors.shape(full) == shape[::-1] != shape
        tensors.expect(full, *(shape[::-1] if is_turned else shape))
        weight = _reader(tensors, full)()
        state[f"{name}.weight"] = weight.T if is_turned else weight
    if place.layout.state_first:
        state["eh_proj.weight"] = _exchanged(state["eh_proj.weight"])
    if module.undone is not None:
        if _FINAL_NORM not in tensors:
            raise tensors.fault(
                f"lacks tensor {_FINAL_NORM!r}, the target's final norm, by which states before it "
                "are found (target_state: pre_norm)"
            )
        tensors.expect(_FINAL_NORM, hidden)
        final = _reader(tensors, _FINAL_NORM)()
        state["undone.weight"], module.final_norm = _undoing(module.undone, final, tensors), final
    for copy in _COPIES:
        if place.stem + copy in tensors:
            tensors.expect(place.stem + copy, target.vocab_size, hidden)
    rest = {
        match[0]: _reader(tensors, match[0])
        for match in tensors.matches(re.escape(place.layer) + r"(?!.*rotary_emb\.inv_freq).*")
        if not match[0].endswith(_SCALE) and not _is_outside(match[0], place)
    }
    below = {name.removeprefix(place.layer): read for name, read in rest.items()}
    layer = module.block.states_from(below, place.layer)
    state.update({f"block.{name}": tensor for name, tensor in layer.items()})
    cast = module.block.dtype_of
    state = {
        name: tensor.to(target.device, cast(name, target.dtype)) for name, tensor in state.items()
    }
    module.load_state_dict(state, assign=True)
    module.place = place
    materialise_constants(module.block.whole, target.device)


def _exchanged(weight: Tensor) -> Tensor:  # [hidden_size, 2 * hidden_size], same shape
    """Swaps the two inputs of a projection."""
    return torch.cat(weight.chunk(2, dim=1)[::-1], dim=1)


def _undoing(norm: nn.Module, weight: Tensor, tensors: Tensors) -> Tensor:  # [hidden_size] each
    """Returns the weight with which a norm of this kind undoes the scale of `weight`."""
    if weight.is_meta:
        return weight
    ones, like = torch.ones(1, len(weight)), deepcopy(norm)

    def scale(of: Tensor) -> Tensor:
        like.load_state_dict({"weight": of}, assign=True)
        return like(ones)[0]

    offset = scale(torch.zeros(len(weight))).round()  # 1: it scales by 1 + weight
    scales = weight.float() + offset
    if bool((scales == 0).any()):
        raise tensors.bad(
            _FINAL_NORM,
            "scales by 0, so that the state before it is lost; set target_state: post_norm",
        )
    return (1 / scales - offset).to(weight.dtype)


def _is_outside(name: str, place: ModuleNames) -> bool:
    """Returns True if a tensor is outside the layer, in a layout where both share one prefix."""
    return name.removeprefix(place.stem) in {*place.layout.names.values(), *_COPIES}


def _reader(tensors: Tensors, name: str) -> Callable[[], Tensor]:
    """Returns a reader of a tensor that dequantises FP8."""
    read, scale = tensors.reader(name), name + _SCALE
    scaled: Any = tensors.reader(scale) if scale in tensors else None
    if scaled is not None:
        shape = tensors.shape(name)
        blocks = tuple(-(-size // step) for size, step in zip(shape, _BLOCK, strict=False))
        if len(shape) != 2 or tensors.shape(scale) != blocks:
            raise fail(
                f"tensor {scale!r} has shape {list(tensors.shape(scale))}; blocks of "
                f"{list(_BLOCK)} of {name!r} {list(shape)} need {list(blocks)}"
            )

    def get() -> Tensor:
        tensor = read()
        if scaled is not None:
            return dequantised(tensor, scaled())
        if tensor.is_floating_point() and tensor.element_size() == 1:
            raise fail(f"tensor {name!r} is {tensor.dtype}, but {scale!r} is missing")
        return tensors.weight(name, tensor)

    return get


class MTPHead(TreeDraftingHead):
    """Runs the modules over a step.

    Each computed token has one row per module, in its own slot. In token j's slot, module m stores
    its row j - m, which consumes the embedding of token j + 1 and the feature of module m - 1 at
    token j - 1. No row depends on tokens beyond j + 1. The next step needs the features at the last
    token; they are cached next to the keys and so survive a rewind, a replay or a prefix hit.
    Before the first token there are no features: module m reads zeros at its first m tokens.

    While drafting, module l predicts level l. A draft longer than the number of modules starts
    again with the first one, which reads the last module's feature instead of the target's. A draft
    that is prepared behind a node starts again, too, from the feature of the previous module.
    """

    target_ids: Tensor | None = None  # draft ids are the target's
    outputs: tuple[nn.Linear, ...] = ()  # the target's output layer is used

    def __init__(self, config: MTPConfig, target: TargetFacts) -> None:
        super().__init__(config)
        self.module: nn.ModuleList = read_mtp(config, target)
        count = len(self.module)
        self.capture: tuple[int, ...] = (target.num_layers,)
        # The modules' own layers, then the stored features of all but the last module.
        self.layers = (
            *(
                replace(module.kept(), num_draft_rows=self.room)  # type: ignore[operator]
                for module in self.module
            ),
            *(HeadLayer(1, target.hidden_size, 0) for _ in range(count - 1)),
        )
        self._zero_first = config.zero_first_embedding
        self._begins_again = config.draft_len > count or config.speculation_cache is not None
        if count == 1 and not self._zero_first:
            self.only_module = self.module[0]  # type: ignore[assignment]

    def rows(self, step: HeadRows, host: HeadHost) -> tuple[Tensor, Tensor]:
        assert step.attend is not None, "modules attend"
        assert step.earlier is not None, "modules read features of the token before"
        embedded = host.embed(step.next_tokens)
        if self._zero_first:
            embedded = embedded.masked_fill((step.positions == 0)[:, None], 0)
        feature, features = self.module[0].fuse(step.hidden[self.capture[0]]), []  # type: ignore[operator]
        first = feature
        for index in range(len(self.module)):
            if index:
                before = len(self.module) + index - 1  # layer of the features of the module before
                feature = a_token_earlier(before, feature, step.earlier(), host)
            feature, read = self._run(index, embedded, feature, step.positions, step.attend)
            features.append(feature)
            if index == 0:
                first = read
        return torch.cat(features, dim=-1), first

    def advance(
        self, level: int, token_ids: Tensor, feature: Tensor, positions: Tensor, attend: Attend,
        host: HeadHost,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """Runs every module whose feature a later level may read; returns the level's output."""
        count = len(self.module)
        above = feature.chunk(count, dim=-1)
        here, embedded = list(above), host.embed(token_ids)
        first = 0 if self._begins_again else level
        read = feature
        for index in range(first, count):
            source = above[index - 1] if index else above[(level - 1) % count]
            here[index], normed = self._run(index, embedded, source, positions, attend)
            if index == level % count:
                read = normed
        return torch.cat(here, dim=-1), read

    def resume(self, feature: Tensor, depth: Tensor) -> tuple[Tensor, int]:
        count = len(self.module)
        parts = feature.unflatten(1, (count, -1))
        own = parts[torch.arange(len(parts), device=depth.device), depth % count]
        return torch.cat([parts[:, :-1].flatten(1), own], dim=1), count

    def published(self) -> dict[str, Tensor] | None:
        """Returns its weights by the names of its checkpoint; None: it has several modules."""
        return self.module[0].published() if len(self.module) == 1 else None  # type: ignore[operator]

    def _run(
        self,
        index: int,
        embedded: Tensor,  # [num_rows, hidden_size]
        feature: Tensor,  # [num_rows, hidden_size]
        positions: Tensor,  # [num_rows]
        attend: Attend,
    ) -> tuple[Tensor, Tensor]:  # [num_rows, hidden_size] each
        """Runs one module; its first `index` positions read zeros."""
        if index:
            before = (positions < index)[:, None]
            embedded, feature = embedded.masked_fill(before, 0), feature.masked_fill(before, 0)
        return self.module[index](embedded, feature, positions, attend)
