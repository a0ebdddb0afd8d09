"""Method `draft`: a small model of the target's family, distilled from it.

Row t predicts token t + 1 from the text alone, so its teacher is the target at position t.

Source: Hinton et al. 2015, arXiv:1503.02531; on the target's own text, Zhou et al. 2024,
arXiv:2310.08461.
"""

from __future__ import annotations

import copy
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from ...config.hub import reason
from ...drafters.files import write_whole
from ...errors import CheckpointError, ConfigError
from ..options import DraftOptions
from ..protocol import FrozenTarget, Losses, Method, TargetStates, Windows
from ..state import stored_dtype
from .distil import Agreement, soft_cross_entropy, teacher_of

# Beside the weights: what a text needs to become the same tokens as the target's.
_CARRIED = (
    "*token*.json",
    "*.model",
    "vocab.*",
    "merges.txt",
    "chat_template.*",
    "generation_config.json",
)


class DraftMethod(Method):
    """Trains a whole model."""

    capture = ()

    def __init__(self, options: DraftOptions, target: FrozenTarget) -> None:
        self._options, self._target = options, target
        model: Any = _opened(options.init, target) if options.init else _fresh(options, target)
        self.module = model.to(target.facts.device, torch.float32)

    def loss(self, windows: Windows, states: TargetStates, target: FrozenTarget) -> Losses:
        """The mean over rows whose token is within the window."""
        options, window_len = self._options, windows.tokens.shape[1]
        teacher = teacher_of(states.logits[:, :-1], options.argmax_weight)
        logits = self.module(input_ids=windows.tokens, use_cache=False).logits[:, :-1]
        counts = windows.weights[:, 1:]
        loss = soft_cross_entropy(logits, teacher.probs, counts)
        guessed = logits.max(-1).indices
        agreement = Agreement()
        for index in range(min(options.max_draft_len, window_len - 1)):
            agreement.add(guessed[:, index:], teacher.best[:, index:], counts[:, index:] > 0)
        return Losses(loss, *agreement.totals())

    def export(self, folder: Path) -> None:
        """A folder as transformers writes it, with the target's tokenizer."""
        made = folder / "model.partial"
        shutil.rmtree(made, ignore_errors=True)
        model = copy.deepcopy(self.module).to("cpu", stored_dtype(self._target))
        model.save_pretrained(made)
        for path in (path for names in _CARRIED for path in self._target.path.glob(names)):
            shutil.copyfile(path, made / path.name)
        for path in sorted(made.iterdir(), key=lambda path: path.name == "config.json"):
            with path.open("rb") as file:
                write_whole(folder / path.name, iter(partial(file.read, 1 << 24), b""))
        shutil.rmtree(made)


def _opened(folder: Path, target: FrozenTarget) -> Any:
    try:
        model: Any = AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, local_files_only=True, trust_remote_code=False
        )
    except (ValueError, OSError, KeyError) as error:
        raise CheckpointError.at(
            "init", f"{str(folder)!r} is no causal language model: {reason(error, folder)}"
        ) from error
    size = model.config.get_text_config().vocab_size
    if size != target.facts.vocab_size:
        raise CheckpointError.at(
            "init", f"{str(folder)!r} has {size} tokens, the target has {target.facts.vocab_size}"
        )
    return model


def _fresh(options: DraftOptions, target: FrozenTarget) -> Any:
    """A model of the target's architecture and other sizes, with random weights."""
    config = AutoConfig.from_pretrained(
        target.path, local_files_only=True, trust_remote_code=False
    ).get_text_config()
    kinds = getattr(config, "layer_types", None)
    for name, size in _sizes(options, config).items():
        setattr(config, name, size)
    if kinds:
        config.layer_types = [kinds[i % len(kinds)] for i in range(config.num_hidden_layers)]
    if getattr(config, "quantization_config", None) is not None:  # not of what is trained
        del config.quantization_config
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32, trust_remote_code=False)


def _sizes(options: DraftOptions, config: Any) -> dict[str, int]:
    """The sizes given, or those derived from the target's configuration."""
    heads_of_target = config.num_attention_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads_of_target
    hidden = options.hidden_size or max(head_dim, config.hidden_size // 2)
    heads = options.num_attention_heads or max(1, hidden // head_dim)
    kv_heads = options.num_key_value_heads
    if kv_heads is None:
        most = min(heads, getattr(config, "num_key_value_heads", None) or heads)
        kv_heads = next(count for count in range(most, 0, -1) if heads % count == 0)
    if hidden % heads:
        raise ConfigError.at(
            "num_attention_heads", f"{heads} does not divide hidden_size, {hidden}"
        )
    if hidden // heads % 2:
        raise ConfigError.at(
            "num_attention_heads",
            f"{heads} of hidden_size {hidden} have {hidden // heads} numbers "
            "each; rotary positions need an even number",
        )
    if heads % kv_heads:
        raise ConfigError.at(
            "num_key_value_heads", f"{kv_heads} does not divide num_attention_heads, {heads}"
        )
    wide = getattr(config, "intermediate_size", None) or 4 * config.hidden_size
    return {
        "num_hidden_layers": options.num_layers or max(1, config.num_hidden_layers // 4),
        "intermediate_size": options.intermediate_size
        or max(1, wide * hidden // config.hidden_size),
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": hidden // heads,
    }
