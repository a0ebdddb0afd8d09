"""Options of a training run and of its methods.

Imports no torch, so that `outrider train --help` and the check of its options are fast.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field, model_validator

from ..config import Strict
from ..config.strict import at_key

if TYPE_CHECKING:
    from .protocol import FrozenTarget, Method

MICRO_BATCH = 4  # default number of windows per forward
_WIDEST = 2**20  # most features, heads, or blocks


class TrainingOptions(Strict):
    """Options of a run, without those of its method."""

    target: Path = Field(description="Folder of the target's checkpoint.")
    out: Path = Field(description="Folder of the run, and of the result.")
    inputs: tuple[Path, ...] = Field(min_length=1)
    """Text to train on, .txt or .jsonl; may be repeated."""

    # Data.
    window: int = Field(512, ge=8, description="Tokens in a training window.")
    heldout: float = Field(0.02, gt=0, lt=1)
    """Share of the corpus, at its end, that is held out for evaluation."""
    heldout_file: Path | None = None
    """File to evaluate on, instead of a part of the corpus."""
    all_tokens: bool = Field(False, description="Train on users' messages of conversations too.")
    generate: int = Field(
        0, ge=0, le=10**7, description="Texts that the target generates before training."
    )
    own_share: float = Field(0.5, ge=0, le=1, description="Share of generated texts in a batch.")
    temperature: float = Field(0.0, ge=0)
    """Temperature of generated texts; 0 is greedy."""

    # Optimization.
    steps: int = Field(1000, ge=1, le=10**9, description="Optimizer steps.")
    batch: int = Field(16, ge=1, le=2**16, description="Windows in a step, over all processes.")
    micro_batch: int = Field(MICRO_BATCH, ge=1, description="Windows in one forward pass.")
    seed: int = Field(0, ge=0, lt=2**31, description="Seed of every random choice.")
    optimizer: Literal["auto", "muon", "adamw"] = "auto"
    """auto, muon (AdamW for parameters that are not matrices) or adamw."""
    adam_lr: float | None = Field(None, gt=0)
    """AdamW's learning rate; default depends on the method."""
    muon_lr: float | None = Field(None, gt=0)
    """Muon's learning rate; default depends on the method."""
    weight_decay: float = Field(0.0, ge=0, description="Weight decay of matrices.")
    warmup: int = Field(20, ge=0, description="Steps in which the learning rate rises.")
    decay: float = Field(0.4, ge=0, le=1)
    """Share of the steps in which the learning rate falls to zero."""
    max_grad_norm: float = Field(1.0, gt=0)
    """Largest norm of the gradient; larger ones are clipped."""

    # Machine.
    device: Literal["auto", "cpu", "cuda"] = Field("auto", description="auto, cpu or cuda.")
    trust_remote_code: bool = Field(False, description="Run Python code that TARGET brings.")
    allow_pickle: bool = False
    """Read TARGET's pickled weights (pytorch_model.bin) without safetensors."""
    dtype: Literal["auto", "bfloat16", "float32"] = "bfloat16"
    """Data type of the target and of matrix products: bfloat16, float32, auto."""
    num_processes: int = Field(1, ge=1, description="Number of GPUs, or of processes on a CPU.")
    threads: int | None = Field(None, ge=1, le=4096)
    """Threads of a process; default shares out all cores."""

    # Reports.
    eval_every: int = Field(100, ge=1, description="Steps between evaluations.")
    eval_windows: int = Field(32, ge=1, description="Held-out windows in an evaluation.")
    save_every: int = Field(100, ge=1, description="Steps between checkpoints.")
    resume: bool = Field(False, description="Resume the run in OUT.")

    @model_validator(mode="after")
    def _shared_out(self) -> TrainingOptions:
        if self.batch % self.num_processes:
            raise at_key(
                "batch",
                f"{self.batch} windows cannot be divided evenly among "
                f"{self.num_processes} processes",
            )
        return self

    @model_validator(mode="after")
    def _is_used(self) -> TrainingOptions:
        """Rejects options without effect."""
        given = self.model_fields_set
        for name in ("own_share", "temperature"):
            if name in given and not self.generate:
                raise at_key(name, "it is of generated texts; give --generate too")
        if self.heldout_file is not None and "heldout" in given:
            raise at_key("heldout", "--heldout-file names the held-out text; give one of them")
        return self

    def identity(self) -> dict[str, Any]:
        """Options that must not change when a run is resumed; files are compared by content."""
        kept = (
            "window", "heldout", "all_tokens", "generate", "own_share", "temperature", "batch",
            "seed", "optimizer", "adam_lr", "muon_lr", "weight_decay", "warmup", "decay",
            "max_grad_norm", "dtype",
        )  # fmt: skip
        return {name: getattr(self, name) for name in kept}


# Of the training methods. The first line of a class describes its method on the command line.

ArgmaxWeight = Annotated[
    float, Field(ge=0, le=1, description="Weight of the target's most likely token in the loss.")
]
MaxDraftLen = Annotated[int, Field(ge=1, description="Draft positions that an evaluation reports.")]
InitFromTarget = Annotated[
    bool, Field(description="Initialize from the target's weights where shapes allow it.")
]
DraftVocabSize = Annotated[
    int | None,
    Field(ge=1, description="Number of most frequent tokens that can be drafted; default all."),
]


class PassOptions(Strict):
    """Options of every method that unrolls."""

    num_passes: int = Field(5, ge=1, le=16, description="Draft positions that are trained.")
    pass_decay: float = Field(0.8, gt=0, le=1)
    """Factor of the loss from each position to the next."""
    argmax_weight: ArgmaxWeight = 0.5
    max_draft_len: Annotated[MaxDraftLen, Field(le=16)] = 5


class LayerOptions(Strict):
    """Options of every method with Llama-like layers; sizes not given are the target's."""

    rope_theta: float = Field(10000.0, gt=0, description="Base of the rotary embedding.")
    intermediate_size: int | None = Field(None, ge=1, le=_WIDEST)
    """Width of the MLP; default the target's."""
    num_attention_heads: int | None = Field(None, ge=1, le=_WIDEST)
    """Attention heads; default the target's."""
    num_key_value_heads: int | None = Field(None, ge=1, le=_WIDEST)
    """Key/value heads; default the target's."""
    head_dim: int | None = Field(None, ge=2, le=_WIDEST, multiple_of=2)
    """Size of an attention head; default the target's."""


class UnrollOptions(PassOptions, LayerOptions):
    """Options of every EAGLE method."""

    init_from_target: InitFromTarget = True


class AdaptOptions(PassOptions):
    """A head of another run, or of someone else, which goes on learning."""

    config: Path
    """File with the head's section, as `speculative_config` or alone: how it is read when it
    serves."""


class MedusaOptions(Strict):
    """Heads on the target's last hidden state (Medusa)."""

    num_heads: int = Field(4, ge=1, le=64, description="Number of heads: tokens drafted ahead.")
    num_layers: int = Field(1, ge=1, le=16, description="Residual blocks of a head.")
    head_decay: float = Field(0.8, gt=0, le=1)
    """Factor of the loss from each head to the next."""
    argmax_weight: ArgmaxWeight = 0.5
    draft_vocab_size: DraftVocabSize = None
    layout: Literal["vllm", "reference"] = Field("vllm", exclude=True)
    """Layout of the files: vllm or reference."""


class ReDrafterOptions(Strict):
    """A recurrent head on the target's last hidden state (ReDrafter)."""

    num_positions: int = Field(5, ge=1, le=64, description="Draft positions that are trained.")
    position_decay: float = Field(1.0, gt=0, le=1)
    """Factor of the loss from each position to the next."""
    argmax_weight: ArgmaxWeight = 0.5
    max_draft_len: Annotated[MaxDraftLen, Field(le=64)] = 5
    init_from_target: InitFromTarget = True
    num_draft_layers: int = Field(1, ge=1, le=16, description="Residual blocks.")
    exit_dim: int | None = Field(None, ge=1, le=_WIDEST)
    """Width of the residual blocks; default twice the target's hidden size."""
    rnn: bool = Field(False, description="Recurrent weights, instead of a sum of embeddings.")


class EagleOptions(UnrollOptions):
    """A layer that predicts the target's next feature (EAGLE-1 and 2)."""

    num_passes: int = Field(3, ge=1, le=16, description="Draft positions that are trained.")
    feature_weight: float = Field(1.0, ge=0)
    """Weight of the distance to the target's feature in the loss."""
    feature_noise: float = Field(0.0, ge=0)
    """Largest noise that is added to the target's features."""
    layout: Literal["vllm", "sglang"] = Field("vllm", exclude=True)
    """Layout of the files: vllm or sglang."""


class Eagle3TrainOptions(UnrollOptions):
    """A layer on features of several target layers (EAGLE-3)."""

    layers: tuple[int, ...] | None = None
    """Target layers whose inputs are read, repeated; default 2, n // 2, n - 3."""
    draft_vocab_size: DraftVocabSize = None
    norm_before_residual: bool = False
    """The residual carries the normalized state."""


class PEagleOptions(Eagle3TrainOptions):
    """EAGLE-3's layer, which drafts all tokens in one forward, behind masks (P-EAGLE)."""

    num_passes: int = Field(8, ge=1, le=16, description="Draft positions that are trained.")
    max_draft_len: Annotated[MaxDraftLen, Field(le=16)] = 7
    mask_token_id: int | None = Field(None, ge=0)
    """Token whose embedding is the mask's; default the rarest of the text."""


class BlockTrainOptions(LayerOptions):
    """Options of every block drafter."""

    num_layers: int = Field(5, ge=1, le=64, description="Layers of the drafter.")
    block_size: int = Field(8, ge=2, le=64, description="Rows of a block, the last token's too.")
    num_anchors: int = Field(
        64, ge=1, le=_WIDEST, description="Blocks in a window, at random tokens."
    )
    layers: tuple[int, ...] | None = None
    """Target layers whose inputs are read, repeated; default up to five, evenly spaced."""
    smoothing: float = Field(0.5, ge=0, le=1)
    """D-PACE: 0 weighs positions by the chance that they are reached; 1 by their place alone."""
    argmax_weight: ArgmaxWeight = 0.5
    init_from_target: InitFromTarget = True
    draft_vocab_size: DraftVocabSize = None
    mask_token_id: int | None = Field(None, ge=0)
    """Token whose embedding is the mask's; default the rarest of the text."""


class DFlashTrainOptions(BlockTrainOptions):
    """Layers that fill a block of masks in one forward (DFlash)."""

    layout: Literal["zlab", "speculators"] = Field("zlab", exclude=True)
    """Layout of the files: zlab or speculators, which has draft vocabularies too."""


class DSparkTrainOptions(BlockTrainOptions):
    """DFlash's layers, with a Markov head and a confidence head (DSpark)."""

    markov_rank: int = Field(256, ge=1, le=_WIDEST, description="Rank of the Markov head.")
    sample_from_anchor: bool = Field(True, description="The last token's row drafts too.")
    distance_weight: float = Field(0.9, ge=0, le=1)
    """Weight of the distance of distributions in the loss, against cross-entropy."""


class MTPOptions(PassOptions):
    """A multi-token-prediction module (MTP).

    Its sizes are the target's.
    """

    num_passes: int = Field(3, ge=1, le=16, description="Draft positions that are trained.")
    init_from_target: InitFromTarget = True
    recycle: Literal["post_norm", "pre_norm"] = "post_norm"
    """Output that is the next position's feature: post_norm or pre_norm."""
    init: Path | None = Field(None, description="Folder with a module to start from.")
    copies: bool = Field(False, exclude=True)
    """Write the target's embedding and output layer too."""


SIZES = (
    "hidden_size", "num_layers", "num_attention_heads", "num_key_value_heads", "intermediate_size",
)  # fmt: skip


class DraftOptions(Strict):
    """A small model of the target's family, distilled from it.

    Sizes that are not given follow the target's.
    """

    init: Path | None = None
    """Model to start from, instead of one of the sizes below."""
    hidden_size: int | None = Field(None, ge=1, le=_WIDEST)
    """Hidden size; default half the target's."""
    num_layers: int | None = Field(None, ge=1, le=4096)
    """Number of layers; default a quarter of the target's."""
    num_attention_heads: int | None = Field(None, ge=1, le=_WIDEST)
    """Attention heads; default keeps the target's head size."""
    num_key_value_heads: int | None = Field(None, ge=1, le=_WIDEST)
    """Key/value heads; default the target's where they divide the heads."""
    intermediate_size: int | None = Field(None, ge=1, le=_WIDEST)
    """Width of the MLP; default in the target's proportion."""
    argmax_weight: ArgmaxWeight = 0.5
    max_draft_len: Annotated[MaxDraftLen, Field(le=64)] = 5

    @model_validator(mode="after")
    def _one_model(self) -> DraftOptions:
        given = [name for name in SIZES if getattr(self, name) is not None]
        if self.init is not None and given:
            raise at_key(given[0], "the model of 'init' has a size of its own")
        return self


class PARDOptions(DraftOptions):
    """A small model that drafts all tokens in one forward, behind masks (PARD)."""

    num_depths: int = Field(8, ge=1, le=64, description="Draft positions that are trained.")
    retention: float = Field(0.7, gt=0, le=1)
    """Share of the rows that are trained at each position, of those at the one before."""
    least_retention: float = Field(0.2, ge=0, le=1)
    """Least share of the rows that are trained at any position."""
    mask_token_id: int | None = Field(None, ge=0)
    """Token that is the mask; default the rarest of the text, or that of 'init'."""
    max_draft_len: Annotated[MaxDraftLen, Field(le=64)] = 8


class PARD2Options(PARDOptions):
    """PARD's model, which also reads states of the target (PARD-2)."""

    layers: tuple[int, ...] | None = Field(None, min_length=1)
    """States that it reads, repeated: 0 is the embedding, -1 the final one, which is the default;
    or those of 'init'."""
    scale: float | None = Field(None, gt=0)
    """Factor of what it adds to its embeddings; default 0.02, or that of 'init'."""
    layout: Literal["safetensors", "reference"] = Field("safetensors", exclude=True)
    """Layout of the projection's file: safetensors, or reference, which is pickled."""


@dataclass(frozen=True, slots=True)
class Entry:
    """A training method."""

    method: str  # module and class, in `methods/`
    options: type[Strict]
    adam_lr: float = 1e-3
    muon_lr: float = 1e-2

    @property
    def summary(self) -> str:
        """The first line of what its options say of it, for the help of the command line."""
        return (self.options.__doc__ or "").partition("\n")[0]

    def build(self, options: Any, target: FrozenTarget) -> Method:
        """Builds the method with these options, which must have the entry's type."""
        module, _, kind = self.method.partition(".")
        found = import_module(f".methods.{module}", __package__)
        return getattr(found, kind)(options, target)


METHODS: Mapping[str, Entry] = {
    "medusa": Entry("medusa.MedusaMethod", MedusaOptions, muon_lr=2e-2),
    "draft": Entry("draft.DraftMethod", DraftOptions, adam_lr=3e-3, muon_lr=2e-2),
    "pard": Entry("draft.PARDMethod", PARDOptions, adam_lr=3e-3, muon_lr=2e-2),
    "pard2": Entry("draft.PARD2Method", PARD2Options, adam_lr=3e-3, muon_lr=2e-2),
    "eagle": Entry("eagle.EagleMethod", EagleOptions),
    "eagle3": Entry("eagle.Eagle3Method", Eagle3TrainOptions),
    "peagle": Entry("eagle.PEagleMethod", PEagleOptions),
    "dflash": Entry("dflash.DFlashMethod", DFlashTrainOptions),
    "dspark": Entry("dflash.DSparkMethod", DSparkTrainOptions),
    "mtp": Entry("mtp.MTPMethod", MTPOptions),
    "redrafter": Entry("redrafter.ReDrafterMethod", ReDrafterOptions),
    "adapt": Entry("unroll.AdaptMethod", AdaptOptions, adam_lr=3e-4, muon_lr=2e-3),
}
