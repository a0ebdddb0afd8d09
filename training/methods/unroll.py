"""What methods of heads that read their own output share: windows run as drafts, pass by pass.

Pass 0 reads the target's features; every later one reads what the head made in the pass before,
as a growing draft does (training-time test, arXiv:2503.01840, section 3.2; HASS, 2408.15766).
Row t of pass k consumes the embedding of token t + 1 + k at position t + k and predicts token
t + 2 + k, so its teacher is the target at position t + 1 + k.

Method `adapt` goes on with a checkpoint of such a head, and writes one with the same names.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from ...config import EngineConfig, HeadConfig
from ...config.strict import read_mapping
from ...drafters.heads.load import FIELD, Tensors, read_config
from ...drafters.heads.protocol import FeatureModule
from ...drafters.registry import build_head, method_of
from ...errors import CheckpointError, ConfigError
from ..options import AdaptOptions, PassOptions
from ..protocol import FrozenTarget, TargetStates, Windows
from ..state import write_files
from .distil import ChainMethod


class Unrolled:
    """Attention of passes over the same windows, without a cache; call `advance` between two.

    Rows are flat, [num_windows * window_len, heads, head_dim], as heads have them.
    Pass 0 is causal. In pass k, row t is the draft's k-th row after row t of pass 0: it sees pass
    0 up to row t, its own ancestors (row t of passes 1 to k - 1), and itself.
    """

    def __init__(self, window_len: int) -> None:
        self._window_len = window_len
        self._pass = 0
        self._keys: dict[int, list[Tensor]] = {}  # by layer, one per pass
        self._values: dict[int, list[Tensor]] = {}

    def advance(self) -> None:
        """Starts the next pass."""
        self._pass += 1

    def __call__(
        self,
        layer: int,
        query: Tensor,  # [num_rows, num_heads, head_dim]
        key: Tensor,  # [num_rows, num_kv_heads, head_dim]
        value: Tensor,  # [num_rows, num_kv_heads, value_dim]
        scale: float,
    ) -> Tensor:  # [num_rows, num_heads, value_dim]
        split = (-1, self._window_len)
        rows, near, far = (part.unflatten(0, split).transpose(1, 2) for part in (query, key, value))
        keys = self._keys.setdefault(layer, [])
        values = self._values.setdefault(layer, [])
        keys.append(near)
        values.append(far)
        assert len(keys) == self._pass + 1, (layer, len(keys), self._pass)
        if self._pass:
            out = _later(rows, keys, values, scale)
        else:
            out = scaled_dot_product_attention(
                rows, near, far, is_causal=True, scale=scale, enable_gqa=True
            )
        return out.transpose(1, 2).flatten(0, 1)


def _later(
    rows: Tensor,  # [num_windows, num_heads, window_len, head_dim]
    keys: list[Tensor],  # per pass, [num_windows, num_kv_heads, window_len, head_dim]
    values: list[Tensor],
    scale: float,
) -> Tensor:  # [num_windows, num_heads, window_len, value_dim]
    """Attends to pass 0 as one causal block, with one further column per later pass."""
    fold, length = rows.shape[1] // keys[0].shape[1], rows.shape[2]
    hidden = torch.ones(length, length, dtype=torch.bool, device=rows.device).triu(1)
    block = rows @ keys[0].repeat_interleave(fold, dim=1).transpose(2, 3) * scale
    scores = [block.masked_fill(hidden, -torch.inf)]
    for key in keys[1:]:
        column = (rows * key.repeat_interleave(fold, dim=1)).sum(-1, keepdim=True)
        scores.append(column * scale)
    weights = torch.cat(scores, dim=-1).float().softmax(-1).to(rows.dtype)
    out = weights[..., :length] @ values[0].repeat_interleave(fold, dim=1)
    for index, value in enumerate(values[1:], start=length):
        out = out + weights[..., index, None] * value.repeat_interleave(fold, dim=1)
    return out


def passes(
    module: FeatureModule,
    features: Tensor,  # [num_windows, window_len, all features], the target's
    embedded: Tensor,  # [num_windows, window_len, embedding size]
    num_passes: int,
    mask: tuple[Tensor, Tensor] | None = None,  # [1, embedding size], [1, hidden_size]
) -> Iterator[tuple[Tensor, Tensor]]:  # [num_windows, window_len - 2 - k, hidden_size] each
    """Yields, per pass k, the next feature and the output layer's input of rows inside the window.

    With a `mask`, every pass except the first reads its embedding and feature.
    """
    num_windows, num_rows = embedded.shape[0], embedded.shape[1] - 2
    attend = Unrolled(num_rows)
    row = torch.arange(num_rows, device=embedded.device)
    feature = module.fuse(features[:, :num_rows].flatten(0, 1))
    for index in range(min(num_passes, num_rows)):
        if index:
            attend.advance()
        # Rows whose token lies beyond the window read its last one; their results are unused.
        token = (row + 1 + index).clamp(max=num_rows + 1)
        positions = (row + index).repeat(num_windows)
        entered = embedded[:, token].flatten(0, 1)
        if index and mask is not None:
            entered, feature = (part.expand(len(positions), -1) for part in mask)
        feature, read = module(entered, feature, positions, attend)
        inside = num_rows - index
        shape = (num_windows, num_rows)
        yield feature.unflatten(0, shape)[:, :inside], read.unflatten(0, shape)[:, :inside]


class UnrolledMethod(ChainMethod):
    """The loss of a head that is trained on its own features; `capture` is in the head's order."""

    module: FeatureModule

    def __init__(
        self,
        target: FrozenTarget,
        capture: tuple[int, ...],
        options: PassOptions,
        draft_vocab_size: int | None = None,
    ) -> None:
        super().__init__(
            target,
            capture,
            argmax_weight=options.argmax_weight,
            decay=options.pass_decay,
            num_trained=options.num_passes,
            num_judged=options.max_draft_len,
            draft_vocab_size=draft_vocab_size,
        )

    def levels(
        self, windows: Windows, states: TargetStates, target: FrozenTarget, count: int
    ) -> Iterator[tuple[Tensor, Tensor | float]]:
        features = torch.cat([states.hidden[layer] for layer in self.capture], dim=-1).float()
        table, own = self.module.embed_tokens, self.module.lm_head
        embedded = (target.embed if table is None else table)(windows.tokens).float()
        made = passes(self.module, self._input_features(features), embedded, count, self._mask())
        for index, (feature, read) in enumerate(made):
            wanted = features[:, 1 + index : 1 + index + read.shape[1]]
            further = self._feature_loss(feature, wanted, windows.weights[:, 2 + index :])
            yield target.unembed(read) if own is None else own(read), further

    def _input_features(self, features: Tensor) -> Tensor:  # [num_windows, window_len, ...], alike
        """Returns the target's features in the form that the head reads."""
        return features

    def _mask(self) -> tuple[Tensor, Tensor] | None:  # [1, embedding size], [1, hidden_size]
        """Returns what later passes read instead of tokens and of the head's own features."""
        return None

    def _feature_loss(
        self,
        feature: Tensor,  # [num_windows, num_rows, hidden_size], the head's
        wanted: Tensor,  # [num_windows, num_rows, all features], the target's
        weights: Tensor,  # [num_windows, num_rows]
    ) -> Tensor | float:
        """Returns a further loss."""
        return 0.0


class AdaptMethod(UnrolledMethod):
    """Continues to train a head that is used for serving.

    Its layers and its output layer are trained; its own embedding stays.

    Raises:
        ConfigError: `config` has no head that can be trained further.
        CheckpointError: the head cannot be read, or is of another target.
    """

    def __init__(self, options: AdaptOptions, target: FrozenTarget) -> None:
        section = _section(options.config, target.path)
        try:
            head: Any = build_head(section, replace(target.facts, dtype=torch.float32))
        except CheckpointError as error:
            raise CheckpointError.at("config", error.message.removeprefix(f"{FIELD}: ")) from None
        if head.only_module is None or head.published() is None:
            raise ConfigError.at(
                "config", "the head has several modules, or reads zeros for the first token"
            )
        super().__init__(target, head.capture, options)
        self._head, self.module = head, head.only_module.requires_grad_(True)
        self._folder = section.folder
        self.target_ids = head.target_ids
        for kept in self.module.of_target():
            kept.requires_grad_(False)
        if self.module.embed_tokens is not None:
            self.module.embed_tokens.requires_grad_(False)

    def prepare(self, token_counts: Tensor) -> None:  # [vocab]
        """Keeps the draft vocabulary."""

    def export(self, folder: Path) -> None:
        """Writes the checkpoint that it began with, with new weights."""
        names = ("model", "pytorch_model", "mtp")
        allow_pickle = self._target.facts.allow_pickle
        stored = Tensors(self._folder, names, allow_pickle=allow_pickle)
        known = {match[0]: stored.reader(match[0])() for match in stored.matches(".*")}
        learnt: dict[str, Tensor] = self._head.published()
        wide = self._target.model.dtype
        tensors = {
            name: tensor.to(known[name].dtype if _is_plain(known.get(name)) else wide)
            for name, tensor in learnt.items()
        }
        if self._folder.resolve() != self._target.path.resolve():
            tensors = {name: each for name, each in known.items() if _is_kept(name)} | tensors
        config = read_config(self._folder)
        config.pop("quantization_config", None)
        write_files(folder, tensors, config)


def _section(file: Path, target: Path) -> HeadConfig:
    """Returns the section of the only head in a configuration that can be trained further."""
    given = read_mapping(file, "config")
    section = given.get("speculative_config", given)
    config = EngineConfig.load({"model": str(target), "speculative_config": section})
    found = [
        each
        for each in config.speculative_config.sections
        if isinstance(each, HeadConfig) and method_of(each).continues
    ]
    if len(found) != 1:
        raise ConfigError.at(
            "config", f"{file} has {len(found)} heads that can go on learning, expected one"
        )
    folder = found[0].folder_beside(str(target))
    return found[0].model_copy(update={"speculative_model": str(folder)})


def _is_plain(tensor: Tensor | None) -> bool:
    """Returns True if a stored tensor has a type in which weights can be written unchanged."""
    return tensor is not None and tensor.is_floating_point() and tensor.element_size() > 1


def _is_kept(name: str) -> bool:
    """Returns True if a tensor besides the weights is kept; scales of quantised weights are not."""
    return not name.endswith("_scale_inv")
