"""Method `draft`: a small model of the target's family, distilled from it.

Row t predicts token t + 1 from the text alone, so its teacher is the target at position t.

Source: Hinton et al. 2015, arXiv:1503.02531; on the target's own text, Zhou et al. 2024,
arXiv:2310.08461.

Method `pard` also learns to predict several tokens ahead, behind masks. Beside a window's tokens
stand rows of mask tokens. Row (t, d) is the d-th mask behind the text up to token t: it sees that
text and the masks before it, and predicts token t + d + 1, so its teacher is the target at position
t + d. Rows (t, 0) are the tokens themselves. Of every next depth fewer rows are trained, and those
of one anchor t are dropped together with what follows them. Source: An et al. 2025,
arXiv:2504.18583, section 3.2 (conditional drop).

Method `pard2` adds to the embeddings of all rows of anchor t a projection of the target's states at
token t - 1; at the first token these are zeros. A row weighs as much as the target's chances of the
text's tokens from t + 1 to t + d, without which a draft would not get there. Source: An et al.
2026, arXiv:2605.08632 (confidence-adaptive tokens).
"""

from __future__ import annotations

import copy
import shutil
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM

from ...config import PARD2Config
from ...config.files import reason, write_whole
from ...drafters.heads.load import FIELD
from ...drafters.heads.pard2 import KINDS, PROJECTION, SCALE, PARD2Reader, states_of
from ...drafters.vocabulary import MASK_KEYS, PROJECTION_FILE, reads_states
from ...errors import CheckpointError, ConfigError
from ..options import DraftOptions, PARD2Options, PARDOptions
from ..protocol import FrozenTarget, Losses, Method, TargetStates, Windows, open_model
from ..state import stored_dtype
from .distil import Agreement, checked_mask, likeliest, rarest, soft_cross_entropy, teacher_of

# Beside the weights: what a text needs to become the same tokens as the target's.
_CARRIED = (
    "*token*.json", "*.model", "vocab.*", "merges.txt", "chat_template.*", "generation_config.json",
)  # fmt: skip
_ENDS = {"safetensors": ".safetensors", "reference": ".bin"}  # of a projection's file, by layout
_STATES = (-1,)  # which are read where none are named
_ALIKE = (
    "tie_word_embeddings", "max_position_embeddings", "rms_norm_eps", "bos_token_id",
    "eos_token_id", "pad_token_id",
)  # fmt: skip


class DraftMethod(Method):
    """Trains a whole model."""

    capture: tuple[int, ...] = ()

    def __init__(self, options: DraftOptions, target: FrozenTarget) -> None:
        self._options, self._target = options, target
        made: Any = _opened(options.init, target) if options.init else self._fresh()
        self.model = self.module = made.to(target.facts.device, torch.float32)

    def _fresh(self) -> Any:
        """Returns a model of the target's architecture and other sizes, with random weights."""
        config = AutoConfig.from_pretrained(
            self._target.path, local_files_only=True, trust_remote_code=False
        ).get_text_config()
        kinds = getattr(config, "layer_types", None)
        for name, size in _sizes(self._options, config).items():
            setattr(config, name, size)
        if kinds:
            config.layer_types = [kinds[i % len(kinds)] for i in range(config.num_hidden_layers)]
        if getattr(config, "quantization_config", None) is not None:  # not of what is trained
            del config.quantization_config
        return _built(config, self._target)

    def loss(self, windows: Windows, states: TargetStates, target: FrozenTarget) -> Losses:
        """Returns the mean over rows whose token is within the window."""
        options, window_len = self._options, windows.tokens.shape[1]
        teacher = teacher_of(states.logits[:, :-1], options.argmax_weight)
        logits = self.model(input_ids=windows.tokens, use_cache=False).logits[:, :-1]
        counts = windows.weights[:, 1:]
        loss = soft_cross_entropy(logits, teacher.probs, counts)
        guessed = logits.max(-1).indices
        agreement = Agreement()
        for index in range(min(options.max_draft_len, window_len - 1)):
            agreement.add(guessed[:, index:], teacher.best[:, index:], counts[:, index:] > 0)
        return Losses(loss, *agreement.totals())

    def export(self, folder: Path) -> None:
        """Writes a folder in transformers' layout, with the target's tokenizer."""
        made = folder / "model.partial"
        shutil.rmtree(made, ignore_errors=True)
        model = copy.deepcopy(self.model).to("cpu", stored_dtype(self._target))
        model.save_pretrained(made)
        self._write_beside(made, model.dtype)
        for path in (path for names in _CARRIED for path in self._target.path.glob(names)):
            shutil.copyfile(path, made / path.name)
        for path in sorted(made.iterdir(), key=lambda path: path.name == "config.json"):
            with path.open("rb") as file:
                write_whole(folder / path.name, iter(partial(file.read, 1 << 24), b""))
        shutil.rmtree(made)

    def _write_beside(self, folder: Path, dtype: torch.dtype) -> None:
        """Writes the model's further files into its folder."""


def _opened(folder: Path, target: FrozenTarget) -> Any:
    model = open_model(folder, "init", torch.float32, allow_pickle=target.facts.allow_pickle)
    size = model.config.get_text_config().vocab_size
    if size != target.facts.vocab_size:
        raise CheckpointError.at(
            "init", f"{str(folder)!r} has {size} tokens, the target has {target.facts.vocab_size}"
        )
    return model


def _built(config: Any, target: FrozenTarget) -> Any:
    """Returns a model with random weights."""
    try:
        return AutoModelForCausalLM.from_config(
            config, dtype=torch.float32, trust_remote_code=False
        )
    except RuntimeError as error:
        raise ConfigError.at(
            "hidden_size", f"no model of these sizes can be made: {reason(error, target.path)}"
        ) from error


def _sizes(options: DraftOptions, config: Any) -> dict[str, int]:
    """Returns the given sizes, or sizes derived from the target's configuration."""
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


@dataclass(frozen=True, slots=True)
class MaskRows:
    """A window's rows: its tokens, then the masks of each depth."""

    anchors: Tensor  # [num_rows] int64, the last token of the text that a row sees
    depths: Tensor  # [num_rows] int64; 0: a token
    counts: tuple[int, ...]  # by depth; the last token of a window is no anchor, but a row

    @classmethod
    def of(cls, window_len: int, num_depths: int, shares: float, least: float) -> MaskRows:
        """Returns rows; depth d keeps a random share of max(shares ** d, least)."""
        order = torch.randperm(window_len) if shares < 1 else torch.arange(window_len)
        anchors = [torch.arange(window_len)]
        for depth in range(1, num_depths):
            kept = order[: max(1, round(window_len * max(shares**depth, least)))].sort().values
            anchors.append(kept[kept < window_len - 1 - depth])
        depths = [torch.full_like(part, depth) for depth, part in enumerate(anchors)]
        return cls(torch.cat(anchors), torch.cat(depths), tuple(map(len, anchors)))

    def attention(self) -> Tensor:  # [1, 1, num_rows, num_rows] float32, added to scores
        """Lets every row see the text up to its anchor, and the masks between that and itself."""
        anchor, depth = self.anchors[:, None], self.depths[:, None]
        of_text = (self.depths == 0) & (self.anchors <= anchor)
        of_chain = (self.anchors == anchor) & (self.depths > 0) & (self.depths <= depth)
        hidden = ~(of_text | of_chain)
        return torch.zeros(hidden.shape).masked_fill_(hidden, torch.finfo().min)[None, None]


class PARDMethod(DraftMethod):
    """Trains a whole model on tokens and masks."""

    _options: PARDOptions

    def __init__(self, options: PARDOptions, target: FrozenTarget) -> None:
        super().__init__(options, target)
        given = checked_mask(options.mask_token_id, target)
        stored = (getattr(self.model.config, key, None) for key in MASK_KEYS)
        found = next((token for token in stored if isinstance(token, int)), None)
        self._mask_token = found if given is None else given

    def prepare(self, token_counts: Tensor) -> None:  # [vocab]
        """Uses the rarest token as the mask, unless one was given."""
        if self._mask_token is None:
            self._mask_token = rarest(token_counts)

    def loss(self, windows: Windows, states: TargetStates, target: FrozenTarget) -> Losses:
        """Returns the mean over depths of the mean over rows whose token is within the window.

        If rows are weighted by their probabilities, it is the mean over the rows of all depths.
        """
        options, window_len = self._options, windows.tokens.shape[1]
        is_trained, depths = torch.is_grad_enabled(), options.num_depths
        if not is_trained:  # without gaps, so that whole chains are judged
            depths = max(depths, options.max_draft_len)
        shares = options.retention if is_trained else 1.0
        depths = min(depths, window_len - 1)
        rows = MaskRows.of(window_len, depths, shares, options.least_retention)
        teacher = teacher_of(states.logits, options.argmax_weight)
        logits, chances = self._logits(windows.tokens, rows, states), self._chances(windows, states)
        agreement, loss = Agreement(), windows.weights.new_zeros(())
        total: float | Tensor = 0.0
        parts = zip(logits.split(rows.counts, 1), rows.anchors.split(rows.counts), strict=True)
        for depth, (part, anchors) in enumerate(parts):
            if depth == 0:
                part, anchors = part[:, :-1], anchors[:-1]
            weights = windows.weights[:, anchors + depth + 1]
            if depth < options.num_depths:
                share: float | Tensor = 1.0
                learnt = weights
                if chances is not None:
                    learnt = weights * (chances[:, anchors + depth] - chances[:, anchors]).exp()
                    share = learnt.sum()
                probs = teacher.probs[:, anchors + depth]
                loss = loss + share * soft_cross_entropy(part, probs, learnt)
                total = total + share
            if depth < (1 if is_trained else options.max_draft_len):
                best = teacher.best[:, anchors + depth]
                agreement.add(likeliest(part), best, weights > 0)
        return Losses(loss / max(total, 1e-6), *agreement.totals())

    def _chances(self, windows: Windows, states: TargetStates) -> Tensor | None:
        """Sums of logarithms up to each token, [num_windows, window_len]: the difference of two is
        that of the weight of the later one's row, seen from the other. None: all weigh alike."""
        return None

    def _logits(
        self, tokens: Tensor, rows: MaskRows, states: TargetStates
    ) -> Tensor:  # [num_windows, num_rows, vocab]
        device = tokens.device
        assert self._mask_token is not None, "prepare() comes first"
        num_masks = len(rows.depths) - rows.counts[0]
        masks = tokens.new_full((len(tokens), num_masks), self._mask_token)
        places = (rows.anchors + rows.depths).to(device).expand(len(tokens), -1)
        logits: Tensor = self.model(
            **self._inputs(torch.cat([tokens, masks], dim=1), rows, states),
            position_ids=places,
            attention_mask=rows.attention().to(device),
            use_cache=False,
        ).logits
        return logits

    def _inputs(self, token_ids: Tensor, rows: MaskRows, states: TargetStates) -> dict[str, Tensor]:
        """Returns the inputs of the model's forward for the rows."""
        return {"input_ids": token_ids}

    def export(self, folder: Path) -> None:
        """Does the same as `draft`, with `pard_token` in `config.json`."""
        self.model.config.pard_token = self._mask_token
        super().export(folder)


class PARD2Method(PARDMethod):
    """Trains a whole model and the projection of the target's states.

    Raises:
        ConfigError: `layers` names states that there are not.
        CheckpointError: `init` is no model that PARD-2 runs, or of another target.
    """

    _options: PARD2Options

    def __init__(self, options: PARD2Options, target: FrozenTarget) -> None:
        self.capture = states_of(options.layers or _STATES, target.facts.num_layers, "layers")
        stored: dict[str, Tensor] = {}
        self._scale = options.scale or SCALE
        if options.init is not None:
            self._scale, self.capture, stored = _begun(options, target, self.capture)
        super().__init__(options, target)
        width = len(self.capture) * target.facts.hidden_size
        self.projection = nn.Linear(width, self.model.config.hidden_size, bias="bias" in stored)
        if stored:
            self.projection.load_state_dict(stored)
        self.projection.to(target.facts.device)
        self.module = nn.ModuleDict({"model": self.model, PROJECTION: self.projection})

    def _fresh(self) -> Any:
        """Returns a model of the target's architecture, or of Llama's if that is unsupported."""
        theirs = AutoConfig.from_pretrained(
            self._target.path, local_files_only=True, trust_remote_code=False
        ).get_text_config()
        rotary = getattr(theirs, "rope_parameters", None) or {}
        kind = theirs.model_type if theirs.model_type in KINDS else KINDS[0]
        keys: dict[str, Any] = {
            "vocab_size": self._target.facts.vocab_size,
            "rope_parameters": {
                "rope_type": "default", "rope_theta": rotary.get("rope_theta", 10000.0),
            },
        }  # fmt: skip
        keys |= {key: getattr(theirs, key) for key in _ALIKE if hasattr(theirs, key)}
        made: Any = CONFIG_MAPPING[kind](**(keys | _sizes(self._options, theirs)))
        return _built(made, self._target)

    def _chances(self, windows: Windows, states: TargetStates) -> Tensor:
        """Returns the target's probabilities of the text's tokens."""
        logits, said = states.logits[:, :-1], windows.tokens[:, 1:, None]
        chosen = logits.gather(-1, said)[..., 0].float() - logits.float().logsumexp(-1)
        return nn.functional.pad(chosen.cumsum(1), (1, 0))

    def _inputs(self, token_ids: Tensor, rows: MaskRows, states: TargetStates) -> dict[str, Tensor]:
        features = torch.cat([states.hidden[layer] for layer in self.capture], dim=-1)
        before = nn.functional.pad(features[:, :-1], (0, 0, 1, 0))
        added = self.projection(before.to(self.projection.weight.dtype)) * self._scale
        embedded = self.model.get_input_embeddings()(token_ids)
        return {"inputs_embeds": embedded + added[:, rows.anchors.to(added.device)]}

    def export(self, folder: Path) -> None:
        """Does the same as `pard`, and writes the projection to a separate file."""
        read = {
            "pard2": True,
            "spd_type": "pard2",
            "pard2_scale": self._scale,
            "pard2_proj_bias": self.projection.bias is not None,
            "pard2_target_layers": list(self.capture),
            "pard2_target_dim": self.projection.in_features,
        }
        for key, value in read.items():
            setattr(self.model.config, key, value)
        super().export(folder)
        (other,) = (end for layout, end in _ENDS.items() if layout != self._options.layout)
        (folder / f"{PROJECTION_FILE}{other}").unlink(missing_ok=True)

    def _write_beside(self, folder: Path, dtype: torch.dtype) -> None:
        state = self.projection.state_dict().items()
        tensors = {f"{PROJECTION}.{name}": each.to("cpu", dtype) for name, each in state}
        save = torch.save if self._options.layout == "reference" else save_file
        save(tensors, folder / f"{PROJECTION_FILE}{_ENDS[self._options.layout]}")


def _begun(
    options: PARD2Options, target: FrozenTarget, capture: tuple[int, ...]
) -> tuple[float, tuple[int, ...], dict[str, Tensor]]:
    """Scale, states and projection of the model to start from, which may lack a projection.

    Raises:
        CheckpointError: PARD-2 does not run it.
    """
    section = PARD2Config(
        speculative_model=str(options.init),
        pard2_target_layers=options.layers,
        pard2_scale=options.scale,
    )
    try:
        reader = PARD2Reader(section, replace(target.facts, device=torch.device("cpu")))
        sizes = reader.sizes("layers.0")
        reader.rope(sizes.head_dim)
        if not reads_states(reader.folder):
            return reader.scale(), capture, {}
        capture = reader.capture()
        tensors = reader.projection(sizes.hidden_size, len(capture))
    except CheckpointError as error:
        raise CheckpointError.at("init", error.message.removeprefix(f"{FIELD}: ")) from None
    named = {name.removeprefix(f"{PROJECTION}."): each for name, each in tensors.items()}
    return reader.scale(), capture, named
