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
"""

from __future__ import annotations

import copy
import shutil
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from ...config.files import reason, write_whole
from ...drafters.vocabulary import MASK_KEYS
from ...errors import CheckpointError, ConfigError
from ..options import DraftOptions, PARDOptions
from ..protocol import FrozenTarget, Losses, Method, TargetStates, Windows, open_model
from ..state import stored_dtype
from .distil import Agreement, checked_mask, likeliest, rarest, soft_cross_entropy, teacher_of

# Beside the weights: what a text needs to become the same tokens as the target's.
_CARRIED = (
    "*token*.json", "*.model", "vocab.*", "merges.txt", "chat_template.*", "generation_config.json",
)  # fmt: skip


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
    model = open_model(folder, "init", torch.float32, allow_pickle=target.facts.allow_pickle)
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
    try:
        return AutoModelForCausalLM.from_config(
            config, dtype=torch.float32, trust_remote_code=False
        )
    except RuntimeError as error:
        raise ConfigError.at(
            "hidden_size", f"no model of these sizes can be made: {reason(error, target.path)}"
        ) from error


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


@dataclass(frozen=True, slots=True)
class MaskRows:
    """A window's rows: its tokens, then the masks of each depth."""

    anchors: Tensor  # [num_rows] int64, the last token of the text that a row sees
    depths: Tensor  # [num_rows] int64; 0: a token
    counts: tuple[int, ...]  # by depth; the last token of a window is no anchor, but a row

    @classmethod
    def of(cls, window_len: int, num_depths: int, shares: float, least: float) -> MaskRows:
        """Rows of which depth d keeps the share max(shares ** d, least), drawn at random."""
        order = torch.randperm(window_len) if shares < 1 else torch.arange(window_len)
        anchors = [torch.arange(window_len)]
        for depth in range(1, num_depths):
            kept = order[: max(1, round(window_len * max(shares**depth, least)))].sort().values
            anchors.append(kept[kept < window_len - 1 - depth])
        depths = [torch.full_like(part, depth) for depth, part in enumerate(anchors)]
        return cls(torch.cat(anchors), torch.cat(depths), tuple(map(len, anchors)))

    def attention(self) -> Tensor:  # [1, 1, num_rows, num_rows] float32, added to scores
        """Every row sees the text up to its anchor, and the masks between that and itself."""
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
        stored = (getattr(self.module.config, key, None) for key in MASK_KEYS)
        found = next((token for token in stored if isinstance(token, int)), None)
        self._mask_token = found if given is None else given

    def prepare(self, token_counts: Tensor) -> None:  # [vocab]
        """The mask is the rarest token, unless one was given."""
        if self._mask_token is None:
            self._mask_token = rarest(token_counts)

    def loss(self, windows: Windows, states: TargetStates, target: FrozenTarget) -> Losses:
        """The mean over depths of the mean over rows whose token is within the window."""
        options, window_len = self._options, windows.tokens.shape[1]
        is_trained, depths = torch.is_grad_enabled(), options.num_depths
        if not is_trained:  # without gaps, so that whole chains are judged
            depths = max(depths, options.max_draft_len)
        shares = options.retention if is_trained else 1.0
        depths = min(depths, window_len - 1)
        rows = MaskRows.of(window_len, depths, shares, options.least_retention)
        teacher = teacher_of(states.logits, options.argmax_weight)
        logits = self._logits(windows.tokens, rows)
        agreement, loss = Agreement(), windows.weights.new_zeros(())
        parts = zip(logits.split(rows.counts, 1), rows.anchors.split(rows.counts), strict=True)
        for depth, (part, anchors) in enumerate(parts):
            if depth == 0:
                part, anchors = part[:, :-1], anchors[:-1]
            weights = windows.weights[:, anchors + depth + 1]
            if depth < options.num_depths:
                loss = loss + soft_cross_entropy(part, teacher.probs[:, anchors + depth], weights)
            if depth < (1 if is_trained else options.max_draft_len):
                best = teacher.best[:, anchors + depth]
                agreement.add(likeliest(part), best, weights > 0)
        return Losses(loss / min(depths, options.num_depths), *agreement.totals())

    def _logits(self, tokens: Tensor, rows: MaskRows) -> Tensor:  # [num_windows, num_rows, vocab]
        device = tokens.device
        assert self._mask_token is not None, "prepare() comes first"
        num_masks = len(rows.depths) - rows.counts[0]
        masks = tokens.new_full((len(tokens), num_masks), self._mask_token)
        places = (rows.anchors + rows.depths).to(device).expand(len(tokens), -1)
        logits: Tensor = self.module(
            input_ids=torch.cat([tokens, masks], dim=1),
            position_ids=places,
            attention_mask=rows.attention().to(device),
            use_cache=False,
        ).logits
        return logits

    def export(self, folder: Path) -> None:
        """As `draft`, with `pard_token` in `config.json`."""
        self.module.config.pard_token = self._mask_token
        super().export(folder)
