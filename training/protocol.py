"""The base of a training method: a module, its loss on a batch, its exported files.

One file per method derives from `Method`, and `options.py` lists them. The modules are the ones
used for serving (`drafters/heads/`), with another attention. `FrozenTarget` is what they learn
from.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Unpack

import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
from torch import Tensor
from torch.nn.functional import linear
from transformers import AutoModelForCausalLM

from ..config.files import reason
from ..drafters.heads.protocol import TargetFacts
from ..errors import CheckpointError
from ..workers.model.checkpoint.hub import Trust
from ..workers.model.fit import check_weights


@dataclass(frozen=True, slots=True)
class Windows:
    """Windows of text of equal length; short ones are padded with weight 0."""

    tokens: Tensor  # [num_windows, window_len] int64
    weights: Tensor  # [num_windows, window_len] float32, loss weight of each token


@dataclass(frozen=True, slots=True)
class TargetStates:
    """The frozen target's outputs on `Windows`, without gradients."""

    hidden: dict[int, Tensor]  # by captured layer, [num_windows, window_len, hidden_size]
    logits: Tensor  # [num_windows, window_len, vocab], in the target's dtype


def open_model(
    path: Path, field: str, dtype: torch.dtype | None = None, **trust: Unpack[Trust]
) -> Any:
    """Returns transformers' own model of a checkpoint.

    Args:
        field: the option that names the checkpoint.
        dtype: None: the checkpoint's.

    Raises:
        CheckpointError: it is not a causal language model; or a tensor is missing (transformers
            would initialise it randomly) or superfluous (transformers would ignore it).
    """
    try:
        found: Any = AutoModelForCausalLM.from_pretrained(
            path,
            dtype=dtype or "auto",
            local_files_only=True,
            output_loading_info=True,
            trust_remote_code=trust.get("trust_remote_code", False),
            use_safetensors=None if trust.get("allow_pickle") else True,
        )
    except (
        ValueError, OSError, LookupError, TypeError, AttributeError, ArithmeticError, RuntimeError,
        SafetensorError, StrictDataclassError,
    ) as error:  # fmt: skip
        _check_fit(path, field, **trust)
        why = f"{str(path)!r} is no causal language model: {reason(error, path)}"
        raise CheckpointError.at(field, why) from error
    model, report = found
    if report["missing_keys"] or report["unexpected_keys"]:
        _check_fit(path, field, **trust)
    return model


def _check_fit(path: Path, field: str, **trust: Unpack[Trust]) -> None:
    """Raises `CheckpointError` if a checkpoint's tensors do not match its config.json."""
    try:
        check_weights(path, **trust)
    except CheckpointError as error:
        raise CheckpointError.at(field, error.message) from None


class FrozenTarget:
    """The target as used by a method: transformers' own model, unsharded, without a cache.

    Args:
        dtype: None: the checkpoint's.

    Raises:
        CheckpointError: as in `open_model`.
    """

    def __init__(
        self,
        path: Path,
        device: torch.device,
        dtype: torch.dtype | None = None,
        **trust: Unpack[Trust],
    ) -> None:
        self.path, allow_pickle = path, trust.get("allow_pickle", False)
        model = open_model(path, "target", dtype, **trust)
        self.model: Any = model.to(device).eval().requires_grad_(False)
        self.config = self.model.config.get_text_config()
        self.facts = TargetFacts(
            self.config.hidden_size,
            self.config.vocab_size,
            self.config.num_hidden_layers,
            self.model.dtype,
            device,
            allow_pickle,
        )

    def embed(self, token_ids: Tensor) -> Tensor:  # [...] -> [..., hidden_size]
        """Returns the target's embedding, without gradients."""
        with torch.no_grad():
            states: Tensor = self.model.get_input_embeddings()(token_ids)
        return states

    def unembed(self, states: Tensor) -> Tensor:  # [..., hidden_size] -> [..., vocab]
        """Applies the target's output layer; frozen, but gradients flow to `states`."""
        output = self.model.get_output_embeddings()
        return linear(states, output.weight.to(states.dtype), output.bias)

    @torch.no_grad()
    def states(self, tokens: Tensor, capture: tuple[int, ...]) -> TargetStates:
        """Runs one forward over windows [num_windows, window_len].

        Hidden state i is the input of layer i; the last one is the output of the final norm.
        """
        out = self.model(input_ids=tokens, use_cache=False, output_hidden_states=list(capture))
        wanted = sorted(set(capture))
        if not wanted:
            return TargetStates({}, out.logits)
        # transformers returns the requested layers in ascending order, or all layers.
        if len(out.hidden_states) == len(wanted):
            hidden = dict(zip(wanted, out.hidden_states, strict=True))
        else:
            hidden = {layer: out.hidden_states[layer] for layer in wanted}
        return TargetStates(hidden, out.logits)


@dataclass(frozen=True, slots=True)
class Losses:
    """A batch's loss, and how often a greedy draft would have been accepted.

    Position d of a draft (0 is the first drafted token) is evaluated where its token has a weight.
    It agrees if it and all positions before it are the target's likeliest tokens on this text, so
    `num_agreed / num_judged` is the probability that a chain's first d + 1 tokens are all accepted.
    """

    loss: Tensor  # []
    num_agreed: Tensor  # [num_positions]
    num_judged: Tensor  # [num_positions]


class Method:
    """Defines how one kind of head is trained."""

    capture: tuple[int, ...]  # target layers whose inputs it reads; num_layers: the final state
    module: Any  # in float32; parameters that require gradients are trained

    def prepare(self, token_counts: Tensor) -> None:  # [vocab] int64
        """Called with the number of times that each token is predicted in the training text.

        It is called before the first step and before resuming; the result must depend only on the
        counts.
        """

    def loss(self, windows: Windows, states: TargetStates, target: FrozenTarget) -> Losses:
        """Returns the loss of a batch; called under autocast, with or without gradients."""
        raise NotImplementedError

    def export(self, folder: Path) -> None:
        """Writes the published format: weights and `config.json`, in the target's dtype."""
        raise NotImplementedError
