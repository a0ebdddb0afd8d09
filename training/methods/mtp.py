"""Method `mtp`: one multi-token-prediction module for any target, which is reused when it drafts.

A layer of the target's own class over a projection of embedding and state; it begins as a copy of
the target's last layer and lets the state through, or continues from an existing module, such as
the one that came with the target. Trained over its own features, pass by pass (`unroll.py`), since
a module trained only on the target's features drafts just one token well.

Source: DeepSeek-V3 (arXiv:2412.19437, section 2.2).
"""

from __future__ import annotations

from pathlib import Path

import torch

from ...config import MTPConfig, parse
from ...drafters.heads.block import Reader, materialise_constants, read_block_config
from ...drafters.heads.load import FIELD, Tensors
from ...drafters.heads.mtp import DEEPSEEK, QWEN, ModuleNames, MTPModule, read_mtp
from ...errors import CheckpointError
from ..options import MTPOptions
from ..protocol import FrozenTarget
from ..state import target_config, write_tensors
from .distil import output_rows
from .unroll import UnrolledMethod

_QWEN_KINDS = ("qwen3_next",)  # model types


class MTPMethod(UnrolledMethod):
    """Trains one module.

    Raises:
        CheckpointError: `init` holds no module that fits, or the target's layers are not such as
            a head can have.
    """

    module: MTPModule

    def __init__(self, options: MTPOptions, target: FrozenTarget) -> None:
        field = "init" if options.init else "target"
        try:
            module = _opened(options, target) if options.init else _fresh(options, target)
        except CheckpointError as error:
            message = error.message.removeprefix(f"{FIELD}: ")
            raise CheckpointError.at(field, f"{message}") from None
        module.to(target.facts.device, torch.float32).requires_grad_(True)
        super().__init__(target, (target.facts.num_layers,), options)
        self.module, self._options = module, options

    def export(self, folder: Path) -> None:
        """Writes the module with the names and keys of a target's own module of this kind."""
        config = {**target_config(self._target), "num_nextn_predict_layers": 1}
        config.pop("quantization_config", None)
        facts = self._target.facts
        self.module.place, embedding, output = _names(config["model_type"], facts.num_layers)
        tensors = self.module.published()
        if self._options.copies:
            every = torch.arange(facts.vocab_size, device=facts.device)
            tensors[embedding] = self._target.embed(every)
            tensors[output] = output_rows(self._target)
        write_tensors(folder, tensors, config, self._target)


def _names(model_type: str, num_layers: int) -> tuple[ModuleNames, str, str]:
    """Returns names of a module, and of copies of the target's embedding and output layer.

    They are Qwen3-Next's for its own kind, and DeepSeek's for every other.
    """
    if model_type in _QWEN_KINDS:
        own = ModuleNames("mtp.", "mtp.layers.0.", QWEN)
        return own, "model.embed_tokens.weight", "lm_head.weight"
    stem = f"model.layers.{num_layers}."
    own = ModuleNames(stem, stem, DEEPSEEK)
    return own, f"{stem}embed_tokens.weight", f"{stem}shared_head.head.weight"


def _opened(options: MTPOptions, target: FrozenTarget) -> MTPModule:
    """Returns the first module of a folder."""
    # As the layout that it is written in has it, whichever it is read from.
    states = {"recycle": options.recycle, "target_state": "post_norm"}
    section = {"speculative_model": str(options.init), **states}
    config = parse(MTPConfig, section | {"use_mtp_vanilla": False})
    module = read_mtp(config, target.facts)[0]
    assert isinstance(module, MTPModule), type(module)
    return module.train()


def _fresh(options: MTPOptions, target: FrozenTarget) -> MTPModule:
    """Returns the target's last layer, and a projection that passes the state through."""
    facts, config = target.facts, read_block_config(target.path)
    module = MTPModule(config, pre_norm=options.recycle == "pre_norm")
    stored = Tensors(target.path, ("model", "pytorch_model"), allow_pickle=facts.allow_pickle)
    last = module.block.source_layer
    module.to_empty(device=facts.device)
    materialise_constants(module.block.whole, facts.device)
    module.block.begin(module)
    with torch.no_grad():
        module.eh_proj.weight.normal_(std=0.02)
        module.eh_proj.weight[:, facts.hidden_size :] += torch.eye(
            facts.hidden_size, device=facts.device
        )
        for match in stored.matches(r"(?!.*layers\.)(?:.*\.)?norm\.weight"):
            module.norm.get_parameter("weight").copy_(stored.reader(match[0])())
    if options.init_from_target:
        found = stored.matches(rf"(?:.*\.)?layers\.{last}\.((?!.*rotary_emb\.inv_freq).*)")
        readers: dict[str, Reader] = {match[1]: stored.reader(match[0]) for match in found}
        state = module.block.states_from(readers, f"model.layers.{last}.")
        module.block.load_state_dict({n: each.to(facts.device) for n, each in state.items()})
    return module
