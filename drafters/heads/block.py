"""A decoder layer of the target's architecture, used as a head's layer.

Wraps a one-layer transformers model of the target's class without its embedding, final norm and
output layer: it maps states to states with transformers' rotary positions, experts and scales. The
given `Attend` decides which keys and values a row reads. All contact of heads with transformers is
in this file.

Assumptions (transformers 5.23): those of `workers/model/bridge.py`; a base model has `layers` and
`norm` and accepts `inputs_embeds`; per-layer lists of a configuration have `num_hidden_layers`
entries.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from huggingface_hub.errors import StrictDataclassError
from torch import Tensor, nn
from transformers import (
    CONFIG_MAPPING,
    AttentionInterface,
    AutoConfig,
    AutoModelForCausalLM,
)
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    WeightConverter,
    WeightRenaming,
    dot_natural_key,
    rename_source_key,
    revert_weight_conversion,
)
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from ...config.files import SERVED_AS, reason, stored_config
from .load import fail
from .protocol import Attend

ATTENTION = "outrider_head"
_SPARSE = "its attention chooses tokens by an indexer (DSA), which heads do not have"
REFUSED = {
    "llama4_text": "its attention takes positions and temperatures from the mask",
    "deepseek_v32": _SPARSE,
    "glm_moe_dsa": _SPARSE,
}
"""Model types whose layer would run but give wrong results."""
_PLAIN = "full_attention"
_BY_LAYER = ("layer_types", "mlp_layer_types", "no_rope_layers")
"""Configuration keys with one entry per layer."""
_SET = {
    "num_hidden_layers": 1,
    "embedding_multiplier": 1.0,  # the input rows are not embeddings
    # Make the layer a mixture of experts if the architecture has any:
    "first_k_dense_replace": 0,
    "mlp_only_layers": [],
    "decoder_sparse_step": 1,
    "moe_layer_start_index": 1,  # except ERNIE's, whose modules are dense
}
_UNBUILT = (ValueError, LookupError, TypeError, AttributeError, ArithmeticError)
"""Exceptions that transformers raises for inconsistent configurations."""

Reader = Callable[[], Tensor]
Piece = TypeVar("Piece")


def read_block_config(folder: Path) -> Any:
    """Returns the text model's configuration in `folder`.

    Raises:
        CheckpointError: it is missing, or transformers does not support it.
    """
    data = stored_config(folder)
    kind = data.get("model_type")
    try:
        if kind in SERVED_AS and kind not in CONFIG_MAPPING:
            keys = {
                key: value for key, value in data.items() if key not in ("model_type", "auto_map")
            }
            config = CONFIG_MAPPING[SERVED_AS[kind]].from_dict(keys)
        else:
            config = AutoConfig.from_pretrained(
                folder, local_files_only=True, trust_remote_code=False
            )
    except (*_UNBUILT, OSError, StrictDataclassError) as error:
        raise fail(
            f"config.json of {str(folder)!r} is not a configuration that transformers supports; it "
            f"must describe the layer, as the target's does: {reason(error, folder)}"
        ) from None
    return config.get_text_config()


class DecoderBlock(nn.Module):
    """One decoder layer over rows without a cache; built without weights, on the meta device.

    Raises:
        CheckpointError: a layer of this architecture cannot be used on its own.
    """

    def __init__(self, config: Any) -> None:
        super().__init__()
        kind = config.model_type
        if why := REFUSED.get(kind):
            raise fail(f"a head cannot use a layer of {kind!r}: {why}")
        try:
            with torch.device("meta"):  # no dtype: that would set torch's default for all threads
                whole = AutoModelForCausalLM.from_config(
                    _one_layer(config),
                    dtype=None,
                    attn_implementation=ATTENTION,
                    trust_remote_code=False,
                )
        except (*_UNBUILT, ImportError, RuntimeError) as error:
            raise fail(f"a head cannot use a layer of {kind!r}: {error}") from None
        prefix = whole.base_model_prefix
        base = getattr(whole, prefix)
        if not (isinstance(getattr(base, "norm", None), nn.Module) and hasattr(base, "layers")):
            raise fail(f"a head cannot use a layer of {kind!r}: it has no layers and norm")
        self._norm = (base.norm,)  # a tuple, so that it is not registered as a submodule
        base.norm, base.embed_tokens = nn.Identity(), nn.Identity()
        whole.set_output_embeddings(nn.Identity())
        self.whole = whole
        self.source_layer = _source_layer(config)  # a layer of the target of this kind
        self.prefix = f"{prefix}.layers.0."
        self._call = partial(inspect.unwrap(type(base).forward), base)

    @property
    def base(self) -> Any:
        """The model without its ends: one layer and the rotary frequencies."""
        return getattr(self.whole, self.whole.base_model_prefix)

    def new_norm(self) -> nn.Module:
        """Returns a norm like the architecture's final one, without weights."""
        return deepcopy(self._norm[0])

    @torch.no_grad()
    def begin(self, module: nn.Module) -> None:
        """Initialises a part of this architecture as transformers does."""
        for part in module.modules():
            self.whole._init_weights(part)

    def forward(
        self,
        states: Tensor,  # [num_rows, hidden_size]
        positions: Tensor,  # [num_rows]
        layer: int,  # of the head, for `attend`
        attend: Attend,
    ) -> Tensor:  # [num_rows, hidden_size]
        out = self._call(
            inputs_embeds=states[None],
            position_ids=positions[None],
            attention_mask=None,
            past_key_values=None,
            use_cache=False,
            outrider_attend=partial(attend, layer),
        )
        return out.last_hidden_state[0]

    def dtype_of(self, name: str, dtype: torch.dtype) -> torch.dtype:
        """Returns the dtype in which a tensor is kept when the model runs in `dtype`."""
        wide = self.whole._keep_in_fp32_modules_strict or ()
        return torch.float32 if any(part in name for part in wide) else dtype

    def states_from(self, stored: Mapping[str, Reader], where: str) -> dict[str, Tensor]:
        """Converts a layer's tensors from checkpoint names below `where` to this module's names.

        Raises:
            CheckpointError: a tensor is missing, superfluous or of another shape.
        """
        wanted = {
            name: tensor
            for name, tensor in self.whole.state_dict().items()
            if name.startswith(self.prefix)
        }
        found = self._converted(stored, where)
        for name, empty in wanted.items():
            public = where + name.removeprefix(self.prefix)
            if name not in found:
                raise fail(f"tensor {public!r} of shape {list(empty.shape)} is missing")
            if found[name].shape != empty.shape:
                raise fail(
                    f"tensor {public!r} has shape {list(found[name].shape)}, expected "
                    f"{list(empty.shape)} by config.json"
                )
        return {f"whole.{name}": tensor for name, tensor in found.items()}

    def published(self) -> dict[str, Tensor]:
        """Returns the layer's tensors by their checkpoint names, relative to the layer."""
        own = {
            name: tensor.detach()
            for name, tensor in self.whole.state_dict().items()
            if name.startswith(self.prefix)
        }
        stored: dict[str, Tensor] = revert_weight_conversion(self.whole, own)
        return {name.removeprefix(self.prefix): tensor for name, tensor in stored.items()}

    def _converted(self, stored: Mapping[str, Reader], where: str) -> dict[str, Tensor]:
        """Applies transformers' checkpoint conversion of this architecture to `stored`."""
        full = {self.prefix + name: read for name, read in stored.items()}
        whole, merges, surplus = by_target(self.whole, full)
        if surplus:
            public = where + surplus[0].removeprefix(self.prefix)
            why = f": {_SPARSE}" if ".indexer." in public else ""
            raise fail(f"tensor {public!r} has no place in a layer of this architecture{why}")
        found = {target: read() for target, read in whole.items()}
        for target, (converter, parts) in merges.items():
            try:
                found |= merged(self.whole, target, converter, parts)
            except (RuntimeError, ValueError) as error:
                public = where + target.removeprefix(self.prefix)
                raise fail(f"the parts of tensor {public!r} do not fit together: {error}") from None
        return found


@torch.no_grad()
def materialise_constants(model: Any, device: torch.device, longest: int | None = None) -> None:
    """Computes the constants that no checkpoint has: rotary frequencies, embedding scales.

    Args:
        longest: tokens of the longest sequence; None: the configuration's limit.
    """
    for module in model.modules():
        names = [name for name in module._non_persistent_buffers_set if name in module._buffers]
        for name in names:
            module._buffers[name] = torch.empty_like(module._buffers[name], device=device)
        if names:  # weights of such a module, if any, are not loaded yet
            model._init_weights(module)
    base = getattr(model, model.base_model_prefix, None)
    if base is not None and base is not model:  # Falcon-H1's computes its layers' constants
        model._init_weights(base)
    for module in model.modules():
        if hasattr(module, "rope_type"):
            _settle_longrope(module, longest or model.config.max_position_embeddings)


def _settle_longrope(module: Any, longest: int) -> None:
    """Makes all positions use one set of rotary frequencies.

    It is the long set if sequences may be longer than those of pre-training, as in llama.cpp and
    vLLM. transformers chooses the set by the longest sequence of each forward. With a cache,
    drafts, chunks and other requests would then decide how a key is rotated, and keys of both kinds
    would be mixed.
    """
    by_layer, kinds = isinstance(module.rope_type, dict), module.rope_type
    for layer, kind in kinds.items() if by_layer else [("", kinds)]:
        if kind != "longrope":
            continue
        section = module.config.rope_parameters
        section = section[layer] if by_layer else section
        if longest > section["original_max_position_embeddings"]:
            keys = {"layer_type": layer} if by_layer else {}
            long, _ = ROPE_INIT_FUNCTIONS[kind](module.config, seq_len=longest, **keys)
            getattr(module, f"{layer}_inv_freq" if by_layer else "inv_freq").copy_(long)
        if by_layer:
            kinds[layer] = "default"  # so that it is not changed again
        else:
            module.rope_type = "default"


def by_target(
    model: Any, stored: Mapping[str, Piece]
) -> tuple[dict[str, Piece], dict[str, tuple[WeightConverter, dict[str, list[Piece]]]], list[str]]:
    """Maps a checkpoint's tensors to the model's own names by transformers' conversion mapping.

    Returns tensors to use unchanged; tensors to merge, by source pattern; and unused names.
    """
    transforms = get_model_conversion_mapping(model)
    renamings = [entry for entry in transforms if isinstance(entry, WeightRenaming)]
    converters = [entry for entry in transforms if isinstance(entry, WeightConverter)]
    by_pattern = {pattern: entry for entry in converters for pattern in entry.source_patterns}
    wanted = model.state_dict()
    rename = partial(
        rename_source_key, base_model_prefix=model.base_model_prefix, meta_state_dict=wanted
    )
    whole: dict[str, Piece] = {}
    merges: dict[str, tuple[WeightConverter, dict[str, list[Piece]]]] = {}
    surplus = []
    for name in sorted(stored, key=dot_natural_key):
        target, pattern = rename(name, renamings, converters)
        if target not in wanted:
            target, pattern = rename(name, [], [])
        if target not in wanted:
            surplus.append(name)
        elif pattern is None:
            whole[target] = stored[name]
        else:
            _, parts = merges.setdefault(target, (by_pattern[pattern], {}))
            parts.setdefault(pattern, []).append(stored[name])
    return whole, merges, surplus


def merged(
    model: Any, target: str, converter: WeightConverter, parts: Mapping[str, Sequence[Reader]]
) -> dict[str, Tensor]:
    """Runs one of transformers' conversions on whole tensors."""
    running = deepcopy(converter)
    for pattern, readers in parts.items():
        for read in readers:
            running.add_tensor(target, target, pattern, read)  # type: ignore[arg-type]
    tensors = running.convert(target, model=model, config=model.config)
    return {
        name: tensor[0] if isinstance(tensor, list) else tensor for name, tensor in tensors.items()
    }


def head_attention(
    module: nn.Module,
    query: Tensor,  # [1, num_heads, num_rows, head_dim]
    key: Tensor,  # [1, num_kv_heads, num_rows, head_dim]
    value: Tensor,  # [1, num_kv_heads, num_rows, value_dim]
    attention_mask: Tensor | None,
    *,
    outrider_attend: Callable[[Tensor, Tensor, Tensor, float], Tensor],
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Replaces transformers' attention functions in the layer."""
    if sliding_window is not None or softcap is not None or s_aux is not None:
        raise fail("the layer needs a window, a soft cap or sinks, which heads do not support")
    out = outrider_attend(
        query[0].transpose(0, 1),
        key[0].transpose(0, 1),
        value[0].transpose(0, 1),
        query.shape[-1] ** -0.5 if scaling is None else scaling,
    )
    return out.unsqueeze(0), None


AttentionInterface.register(ATTENTION, head_attention)


def _source_layer(config: Any) -> int:
    """The last layer with full attention; the last layer if there is none."""
    kinds = getattr(config, "layer_types", None) or ()
    plain = [index for index, kind in enumerate(kinds) if kind == _PLAIN]
    return int(plain[-1] if plain else config.num_hidden_layers - 1)


def _one_layer(config: Any) -> Any:
    """`config` reduced to one layer, with full attention if any layer has it."""
    single, index = deepcopy(config), _source_layer(config)
    for name in _BY_LAYER:
        values = getattr(config, name, None)
        if isinstance(values, (list, tuple)) and len(values) == config.num_hidden_layers:
            setattr(single, name, [values[index]])
    for name, value in _SET.items():
        if hasattr(single, name):
            setattr(single, name, deepcopy(value))
    if not getattr(config, "layer_types", None) and hasattr(single, "sliding_window"):
        single.sliding_window = None
    if getattr(single, "quantization_config", None) is not None:
        del single.quantization_config
    return single
