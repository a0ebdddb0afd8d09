"""All contact with transformers' internals; private parts are imported here,
in `llama4.py`, and for heads in `drafters/heads/block.py`.

Facts relied on (transformers 5.23): an attention function registered through `AttentionInterface`
without a mask function keeps mask building out of the way; custom keyword arguments reach it;
`use_cache=False` must be passed; model forwards are wrapped by decorators that `inspect.unwrap`
removes; `_init_weights` recomputes rotary frequencies and other constants. Each architecture that
we claim has a test in `tests/workers/model/test_equality.py`.
"""

from __future__ import annotations

import inspect
import re
import threading
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import rms_norm
from transformers import AttentionInterface, AutoModelForCausalLM
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    Concatenate,
    MergeModulelist,
    WeightConverter,
    WeightRenaming,
    dot_natural_key,
    rename_source_key,
)
from transformers.modeling_outputs import MoeModelOutputWithPast
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from ...config.trust import reason
from ...errors import CheckpointError
from ..attention import StepAttention
from . import llama4
from .checkpoint.weights import Joined, Stacked, TensorSource, Whole, whole_box

_BUILDING = threading.Lock()
ATTENTION = "outrider_paged"
ADAPTED: dict[str, Callable[[Any], None]] = {"llama4_text": llama4.adapt}
"""Model types that would run and be wrong, and what makes them right."""


def build_meta(config: Any, dtype: torch.dtype, *, trust_remote_code: bool = False) -> Any:
    """The model without weights, ready for ours, set to call `paged_attention`.

    One thread at a time: transformers sets torch's default dtype for the whole process meanwhile.
    """
    try:
        with _BUILDING, torch.device("meta"):
            model = AutoModelForCausalLM.from_config(
                deepcopy(config),
                dtype=dtype,
                attn_implementation=ATTENTION,
                trust_remote_code=trust_remote_code,
            )
    except (ValueError, ImportError, AttributeError) as error:
        raise CheckpointError(
            f"{config.model_type!r} is not a causal language model that can be served: "
            f"{reason(error, config.name_or_path)}",
            field="model",
        ) from error
    if adapt := ADAPTED.get(config.model_type):
        adapt(model)
    return model.eval().requires_grad_(False)


def tp_hints(model: Any) -> dict[str, str]:
    """The model's own tensor-parallel plan: name pattern -> style."""
    return dict(model.tp_plan or {})


def tied_names(model: Any) -> dict[str, str]:
    """State-dict names that share another's tensor: {tied: owner}."""
    return dict(model.all_tied_weights_keys)


def materialise_constants(model: Any, device: torch.device) -> None:
    """Compute what is in no checkpoint: rotary frequencies, embedding scales."""
    for module in model.modules():
        names = [name for name in module._non_persistent_buffers_set if name in module._buffers]
        if not names:
            continue
        for name in names:
            module._buffers[name] = torch.empty_like(module._buffers[name], device=device)
        with torch.no_grad():
            model._init_weights(module)  # weights are still meta, so only constants get values


def shrink_heads(model: Any, attentions: Sequence[str], num_heads: int, num_kv_heads: int) -> None:
    """Tell attention modules how many heads this rank has. After `materialise_constants`."""
    if not attentions:
        return
    counts = {
        "num_heads": num_heads,
        "num_attention_heads": num_heads,
        "num_key_value_heads": num_kv_heads,
        "num_key_value_groups": num_heads // num_kv_heads,
    }
    modules = [model.get_submodule(name) for name in attentions]
    for owner in [*modules, *{id(m.config): m.config for m in modules}.values()]:
        for name, count in counts.items():
            if isinstance(getattr(owner, name, None), int):
                setattr(owner, name, count)


def fuse_norms(model: Any) -> None:
    """Replaces the six operations of Llama's RMSNorm and of its copies by one call of torch.

    A copy is a class whose `forward` compiles to the same code; Gemma's does not.
    """
    reference = _code(LlamaRMSNorm)
    for module in model.modules():
        if "RMSNorm" in type(module).__name__ and _code(type(module)) == reference:
            weight, eps = module.weight, module.variance_epsilon
            fused = partial(_rms_norm, shape=tuple(weight.shape), weight=weight, eps=eps)
            object.__setattr__(module, "forward", fused)


def _rms_norm(states: Tensor, *, shape: tuple[int, ...], weight: Tensor, eps: float) -> Tensor:
    return rms_norm(states, shape, weight, eps)


def _code(cls: type) -> tuple[bytes, tuple[str, ...], tuple[Any, ...]]:
    code = inspect.unwrap(cls.forward).__code__  # type: ignore[attr-defined]
    return code.co_code, code.co_names, code.co_consts


class _LastStates(MoeModelOutputWithPast):
    """Stands for the output of the layers; models read some of these fields and leave others."""

    cross_attentions = None


class Forward:
    """Calls the model on a flat batch, past the decorators that cost time in every step.

    `hidden_states` index i is the input of layer i; the last one is the output of the final norm.
    """

    def __init__(self, model: Any) -> None:
        self._outer = partial(inspect.unwrap(type(model).forward), model)
        inner = getattr(model, model.base_model_prefix, None) or model.model  # Llama-4's misleads
        decorated = inner.forward
        plain = partial(inspect.unwrap(type(inner).forward), inner)

        def forward(
            *args: Any, output_hidden_states: Any = None, outrider_states: Any = None, **kwargs: Any
        ) -> Any:
            if outrider_states is not None:
                return _LastStates(last_hidden_state=outrider_states)
            if output_hidden_states is None:
                return plain(*args, **kwargs)
            return decorated(*args, output_hidden_states=output_hidden_states, **kwargs)

        inner.forward = forward

    def __call__(
        self,
        token_ids: Tensor,  # [num_tokens]
        positions: Tensor,  # [num_tokens]
        rows: Tensor | None,  # [num_rows]; None: every row
        attention: StepAttention,
        capture: tuple[int, ...] = (),
    ) -> tuple[Tensor, tuple[Tensor, ...]]:  # [num_rows, vocab], each [num_tokens, hidden_size]
        kinds: dict[str, Any] = {"output_hidden_states": list(capture)} if capture else {}
        output = self._outer(
            input_ids=token_ids.unsqueeze(0),
            position_ids=positions.unsqueeze(0),
            attention_mask=None,
            past_key_values=None,
            use_cache=False,
            logits_to_keep=0 if rows is None else rows,
            outrider_attention=attention,
            outrider_positions=positions,
            **kinds,
        )
        hidden = tuple(states[0] for states in output.hidden_states or () if states is not None)
        return output.logits[0], hidden

    def logits(self, states: Tensor) -> Tensor:  # [num_rows, hidden_size] -> [num_rows, vocab]
        """The output layer, and what the model does with it (scales, soft caps), on `states`."""
        zeros = torch.zeros(1, len(states), dtype=torch.int64, device=states.device)
        output = self._outer(
            input_ids=zeros, use_cache=False, logits_to_keep=0, outrider_states=states.unsqueeze(0)
        )
        logits: Tensor = output.logits[0]
        return logits


def paged_attention(
    module: nn.Module,
    query: Tensor,  # [1, num_heads, num_tokens, head_dim]
    key: Tensor,  # [1, num_kv_heads, num_tokens, head_dim]
    value: Tensor,  # [1, num_kv_heads, num_tokens, value_dim]
    attention_mask: Tensor | None,
    *,
    outrider_attention: StepAttention,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,  # [num_heads], gpt-oss's sinks
    **_: Any,
) -> tuple[Tensor, None]:
    """What every layer calls in place of transformers' attention functions."""
    out = outrider_attention.attend(
        module.layer_idx,  # type: ignore[arg-type]
        query[0].transpose(0, 1),
        key[0].transpose(0, 1),
        value[0].transpose(0, 1),
        query.shape[-1] ** -0.5 if scaling is None else scaling,
        sliding_window,
        softcap,
        s_aux,
    )
    return out.unsqueeze(0), None


AttentionInterface.register(ATTENTION, paged_attention)


def map_checkpoint(
    model: Any, stored: Mapping[str, TensorSource]
) -> tuple[dict[str, TensorSource], list[str]]:
    """Sources by the model's own names, and checkpoint names that no module uses.

    Renames and merges are those of transformers' conversion mapping. The common merges (experts
    stored one by one) stay unread; any other conversion is run on whole tensors.
    """
    transforms = get_model_conversion_mapping(model)
    renamings = [entry for entry in transforms if isinstance(entry, WeightRenaming)]
    converters = [entry for entry in transforms if isinstance(entry, WeightConverter)]
    by_pattern = {pattern: entry for entry in converters for pattern in entry.source_patterns}
    wanted = model.state_dict()
    rename = partial(
        rename_source_key, base_model_prefix=model.base_model_prefix, meta_state_dict=wanted
    )
    sources: dict[str, TensorSource] = {}
    collected: dict[str, tuple[WeightConverter, dict[str, list[TensorSource]]]] = {}
    surplus = []
    for name in sorted(stored, key=dot_natural_key):
        target, pattern = rename(name, renamings, converters)
        if target not in wanted:
            target, pattern = rename(name, [], [])
        if target not in wanted:
            surplus.append(name)
        elif pattern is None:
            sources[target] = stored[name]
        else:
            _, parts = collected.setdefault(target, (by_pattern[pattern], {}))
            parts.setdefault(pattern, []).append(stored[name])
    for target, (converter, parts) in collected.items():
        sources.update(_convert(model, target, converter, parts))
    ignored = [
        *(model._keys_to_ignore_on_load_unexpected or []),
        r"rotary_emb\.inv_freq",
        *_beyond_the_last_layer(model.config),
    ]
    return sources, [name for name in surplus if not any(re.search(key, name) for key in ignored)]


def _beyond_the_last_layer(config: Any) -> list[str]:
    """Patterns of modules that predict further tokens; they are a head's, if anyone's."""
    last = config.num_hidden_layers
    count = getattr(config, "num_nextn_predict_layers", None) or 0
    layers = "|".join(str(layer) for layer in range(last, last + count))
    return [r"^(model\.)?mtp\.", *([rf"^model\.layers\.({layers})\."] if layers else [])]


def _convert(
    model: Any, target: str, converter: WeightConverter, parts: dict[str, list[TensorSource]]
) -> dict[str, TensorSource]:
    operations = converter.operations
    merge, joins = operations[0], operations[1:]
    lazy = isinstance(merge, MergeModulelist) and merge.dim == 0
    if lazy and len(joins) <= 1 and all(type(join) is Concatenate for join in joins):
        stacks = [Stacked(parts[key]) for key in converter.source_patterns if key in parts]
        if not joins:
            return {target: stacks[0]}
        return {target: Joined(stacks, joins[0].dim)}  # type: ignore[attr-defined]
    whole = deepcopy(converter)
    for pattern, pieces in parts.items():
        for piece in pieces:
            read = partial(piece.read, whole_box(piece.shape))
            whole.add_tensor(target, target, pattern, read)  # type: ignore[arg-type]
    converted = whole.convert(target, model=model, config=model.config)
    return {
        name: Whole(tensor[0] if isinstance(tensor, list) else tensor)
        for name, tensor in converted.items()
    }
