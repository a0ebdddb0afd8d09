"""The table of architectures in `docs/models.md`, from the code that serves them and from the types
that tests compare; a test fails where it is out of date.

`python -m outrider.docs.scripts.models` writes it. Typed here are names alone: of models, and of
heads that were published for them.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from ...config.files import SERVED_AS
from ...workers.model.bridge import build_meta
from ...workers.model.checkpoint.adapters import adaptable
from ...workers.model.checkpoint.gguf_checkpoint import architectures_of
from ...workers.model.family import FamilySpec, read_spec, recurrent_layers
from ...workers.model.info import TESTED, TESTED_ALONE
from ...workers.model.target import without_stages

PAGE = Path(__file__).resolve().parents[1] / "models.md"
BEGIN, END = "<!-- table: python -m outrider.docs.scripts.models -->", "<!-- end of table -->"
MODELS = {
    "llama": "Llama 2 and 3, SmolLM2, Vicuna, and others of this architecture",
    "mistral": "Mistral, with sliding windows",
    "qwen2": "Qwen2, Qwen2.5",
    "mimo": "MiMo",
    "qwen3": "Qwen3",
    "phi3": "Phi-3, Phi-4",
    "granite": "Granite 3",
    "gemma2": "Gemma 2",
    "gemma3_text": "Gemma 3, its text part",
    "olmo2": "OLMo 2",
    "smollm3": "SmolLM3",
    "mixtral": "Mixtral",
    "qwen3_moe": "Qwen3-MoE",
    "granitemoehybrid": "Granite 4, dense and with experts",
    "bamba": "Bamba",
    "nemotron_h": "Nemotron-H, Nemotron 3, dense and with experts",
    "falcon_h1": "Falcon-H1",
    "qwen3_next": "Qwen3-Next",
    "qwen3_5_text": "Qwen3.5, the text part, dense",
    "qwen3_5_moe_text": "Qwen3.5 with experts, the text part",
    "gpt_oss": "gpt-oss",
    "llama4_text": "Llama 4 Scout and Maverick, the text part",
    "glm4_moe": "GLM-4.5, GLM-4.6",
    "ernie4_5": "ERNIE 4.5, dense",
    "ernie4_5_moe": "ERNIE 4.5 with experts, the text part",
    "deepseek_v2": "DeepSeek-V2",
    "deepseek_v3": "DeepSeek-V3, DeepSeek-R1",
    "kimi_k2": "Kimi-K2, and the text part of Kimi-K2.5 and K2.6",
    "deepseek_v32": "DeepSeek-V3.2, contexts of up to `index_topk` tokens (2048)",
    "glm_moe_dsa": "GLM-5, contexts of up to `index_topk` tokens (2048)",
}
"""Of the family, by `model_type`, in the order of the page."""
_OWN = "MTP: in the model's own checkpoint"
HEADS: dict[str, tuple[str, ...]] = {
    "llama": (
        "EAGLE-3: `yuhuili/EAGLE3-LLaMA3.1-Instruct-8B`, "
        "`RedHatAI/Llama-3.1-8B-Instruct-speculator.eagle3`",
        "EAGLE: `yuhuili/EAGLE-LLaMA3-Instruct-8B`",
        "DFlash: `z-lab/LLaMA3.1-8B-Instruct-DFlash-UltraChat`",
        "Medusa: `FasterDecoding/medusa-vicuna-7b-v1.3`",
    ),
    "qwen2": ("EAGLE: `yuhuili/EAGLE-Qwen2-7B-Instruct`",),
    "mimo": (_OWN,),
    "ernie4_5_moe": (_OWN,),
    "qwen3": (
        "EAGLE-3: `RedHatAI/Qwen3-32B-speculator.eagle3`, `AngelSlim/Qwen3-32B_eagle3`",
        "DFlash: `z-lab/Qwen3-8B-DFlash-b16`",
        "P-EAGLE: `RedHatAI/Qwen3-8B-speculator.peagle`",
    ),
    "mixtral": ("EAGLE: `yuhuili/EAGLE-mixtral-instruct-8x7B`",),
    "qwen3_moe": (
        "EAGLE-3: `lmsys/SGLang-EAGLE3-Qwen3-30B-A3B-Instruct-2507-SpecForge-Nex`, "
        "`nvidia/Qwen3-235B-A22B-Eagle3`",
        "DFlash: `z-lab/Qwen3-Coder-30B-A3B-DFlash`",
    ),
    "qwen3_next": (_OWN, "DFlash: `z-lab/Qwen3-Coder-Next-DFlash`"),
    "qwen3_5_text": (_OWN, "DFlash: `z-lab/Qwen3.5-27B-DFlash`"),
    "qwen3_5_moe_text": (
        _OWN,
        "EAGLE-3: `AQ-MedAI/Qwen3.5-397B-A17B-eagle3`",
        "DFlash: `z-lab/Qwen3.5-35B-A3B-DFlash`",
    ),
    "gpt_oss": (
        "EAGLE-3: `RedHatAI/gpt-oss-20b-speculator.eagle3`",
        "DFlash: `z-lab/gpt-oss-20b-DFlash`",
    ),
    "llama4_text": (
        "EAGLE-3: `nvidia/Llama-4-Maverick-17B-128E-Eagle3`, "
        "`lmsys/sglang-EAGLE3-Llama-4-Maverick-17B-128E-Instruct-v1`",
        "EAGLE: `morgendave/EAGLE-Llama-4-Scout-17B-16E-Instruct`",
    ),
    "glm4_moe": (_OWN,),
    "deepseek_v3": (_OWN,),
    "kimi_k2": (
        "EAGLE-3: `AQ-MedAI/Kimi-K2-Instruct-eagle3`, `lightseekorg/kimi-k2.6-eagle3-mla`",
        "DFlash: `z-lab/Kimi-K2.5-DFlash`",
    ),
    "granitemoe": ("EAGLE-3: `wantsleep/granite-3.1-1b-a400m-EAGLE3`",),
    "minimax_m2": ("DFlash: `z-lab/MiniMax-M2.5-DFlash`",),
}
"""By `model_type`, the name of a published checkpoint for each kind of head."""
_COLUMNS = ("`model_type`", "models", "forward", "ranks", "stages", "states", "LoRA", "GGUF",
            "packed weights", "heads")  # fmt: skip
_MAX_LAYERS = 12  # of a model that is built to be looked at
_WITH_ATTENTION: dict[str, dict[str, Any]] = {
    "bamba": {"attn_layer_indices": [1]},
    "granitemoehybrid": {"layer_types": ["linear_attention", "full_attention"] * 16},
}
"""Of types whose default configuration has no layer with attention."""


def render() -> str:
    """The table."""
    lines = [f"| {' | '.join(_COLUMNS)} |", f"|{'---|' * len(_COLUMNS)}"]
    rest = sorted((TESTED | TESTED_ALONE) - MODELS.keys())
    lines += [f"| {' | '.join(_row(kind))} |" for kind in (*MODELS, *rest)]
    return "\n".join(lines)


def written(page: str) -> str:
    """`page` with the table between its marks."""
    before, _, rest = page.partition(BEGIN)
    after = rest.partition(END)[2]
    return f"{before}{BEGIN}\n{render()}\n{END}{after}"


def _row(kind: str) -> Iterator[str]:
    config = AutoConfig.for_model(SERVED_AS.get(kind, kind), **_WITH_ATTENTION.get(kind, {}))
    spec = read_spec(config)
    is_family = isinstance(spec, FamilySpec)
    yield f"`{kind}`"
    yield MODELS.get(kind) or f"`{MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[kind]}`"
    yield "family" if is_family else "bridge"
    yield "1, 2, 4" if is_family else "1" if kind in TESTED_ALONE else "1, 2"
    yield "" if without_stages(config) else "yes"
    yield "yes" if recurrent_layers(config) else ""
    yield _adapted(config) if is_family else ""
    yield ", ".join(f"`{name}`" for name in architectures_of(kind))
    yield _packed(config, spec) if isinstance(spec, FamilySpec) else ""
    yield "; ".join(HEADS.get(kind, ()))


def _adapted(config: Any) -> str:
    """Which linears take adapters."""
    config.num_hidden_layers = min(config.num_hidden_layers, _MAX_LAYERS)
    names = adaptable(build_meta(config, torch.bfloat16))
    has_attention = any(name.endswith("o_proj") for name in names)
    has_mlp = any(name.endswith("down_proj") for name in names)
    return ", ".join(["attention"] * has_attention + ["MLPs"] * has_mlp)


def _packed(config: Any, spec: FamilySpec) -> str:
    if spec.experts_transposed:
        return "but experts"
    return "but latents' expansion" if getattr(config, "kv_lora_rank", None) else "all"


if __name__ == "__main__":
    PAGE.write_text(written(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
