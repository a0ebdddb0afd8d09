"""Everything that can be found wrong with a configuration without loading or starting anything.

Run before Ray is started, so that a wrong folder is said in a second.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ..config import EngineConfig


def preflight(config: EngineConfig) -> dict[str, Any]:
    """What the checkpoints say, once they have been found to fit.

    Raises:
        ConfigError, CheckpointError: model or draft model missing, vocabularies that differ, a
            size that does not divide, a head that does not fit, no tokenizer; names the field.
    """
    import torch

    from ..drafters.heads import check_head
    from ..drafters.heads.protocol import TargetFacts
    from ..workers.model import describe
    from .frontend import Frontend
    from .host import (
        check_length,
        check_thinking_tokens,
        check_vocabulary,
        draft_sections,
        draft_size,
        head_section,
        head_sections,
    )

    size = config.tensor_parallel_size
    target = describe(Path(config.model), tensor_parallel_size=size)
    check_length(config, target.max_model_len)
    check_thinking_tokens(config, target.vocab_size)
    Frontend(config, target)  # tokenizer and chat template
    facts: dict[str, Any] = {
        "model": config.model,
        "architecture": target.architecture,
        "layers": target.num_layers,
        "vocabulary": target.vocab_size,
        "context": config.max_model_len or target.max_model_len,
        "ranks": size,
        "heads per rank": f"{target.num_heads} ({target.num_kv_heads} of keys and values)",
        "drafter": config.speculative_config.decoding_type,
    }
    for field, section in draft_sections(config):
        ranks = draft_size(config, section)
        check_vocabulary(config.model, section.speculative_model, ranks, field)
        draft = describe(Path(section.speculative_model), tensor_parallel_size=ranks)
        label = field.removeprefix("speculative_config.").removesuffix("speculative_model")
        facts[f"{label}draft model"] = section.speculative_model
        facts[f"{label}draft architecture"] = draft.architecture
        facts[f"{label}draft ranks"] = f"{ranks} ({section.placement})"
    head_section(config)  # one at most in the target's workers
    fits = TargetFacts(
        target.hidden_size,
        target.vocab_size,
        target.num_layers,
        target.dtype,
        torch.device("meta"),
    )
    for index, head in enumerate(head_sections(config)):
        folder = str(head.folder_beside(config.model))
        check_head(head.model_copy(update={"speculative_model": folder}), fits)
        label = f"head {index + 1}" if index else "head"
        facts[label] = f"{folder} ({head.placement})"
    return facts
