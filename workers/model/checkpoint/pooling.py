"""Embeddings and scores of a causal model whose checkpoint is made for them.

These models are trained to use the state of a text's last token, after the final norm. An embedding
is that state, or its direction. The score of a pair is the difference of two tokens' logits there,
or a linear layer with one row. A checkpoint declares this in sentence-transformers' files
(`modules.json`: a pooling of the last token, with or without normalisation; or a `LogitScore`), by
an architecture `...ForSequenceClassification` with one label, or by vLLM's key of config.json,
`classifier_from_token`: the tokens of no and yes.

Sources: last-token pooling as in E5-Mistral (arXiv:2401.00368); embeddings and scores as in
Qwen3-Embedding (arXiv:2506.05176).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from ....errors import CheckpointError
from ....scheduler.types import FloatArray
from .hub import read_mapping, stored_names

if TYPE_CHECKING:
    import torch
    from torch import Tensor

_MODULES, _SETTINGS = "modules.json", "config_sentence_transformers.json"
_CLASSIFIER, _TOKENS = "ForSequenceClassification", "classifier_from_token"
LAYER = "score.weight"
_OUTPUT_LAYERS = ("lm_head.weight", "embed_out.weight", "output.weight")


@dataclass(frozen=True, slots=True)
class Pooling:
    """How a checkpoint uses the state of a text's last token.

    Args:
        kind: embeddings of texts, or scores of pairs of texts.
        normalizes: embeddings have length 1.
        dimensions: sizes to which an embedding may be truncated (Matryoshka); empty: any; None:
            none.
        tokens: tokens whose logits make a score: "yes", and optionally "no", which is subtracted;
            empty: the checkpoint has a separate layer.
        has_sigmoid: scores are between 0 and 1.
        generates: whether the checkpoint has an output layer, so that text can be generated.
        size: size of an embedding.
        model_type: the type in config.json.
    """

    kind: Literal["embed", "score"]
    normalizes: bool = False
    dimensions: tuple[int, ...] | None = None
    tokens: tuple[int, ...] = ()
    has_sigmoid: bool = True
    generates: bool = True
    size: int = 0
    model_type: str = ""

    def cut(self, dimensions: int, embedding: FloatArray) -> FloatArray:  # [dimensions]
        """Truncates an embedding; normalizes it again if whole embeddings are normalized."""
        part = embedding[:dimensions]
        length = float(np.linalg.norm(part)) if self.normalizes else 1.0
        return part / np.float32(length or 1.0)


def read_pooling(path: Path, overrides: Mapping[str, Any] = MappingProxyType({})) -> Pooling | str:
    """Returns what the checkpoint in `path` computes, or why it computes neither.

    Args:
        overrides: keys that replace those of config.json.

    Raises:
        CheckpointError: one of its files is damaged.
    """
    config = {**read_mapping(path / "config.json"), **overrides}
    if not is_declared(path, config):
        return (
            "its checkpoint has neither sentence-transformers' modules.json nor an architecture "
            f"...{_CLASSIFIER}, nor {_TOKENS} in its config.json or in hf_overrides"
        )
    if config.get("is_causal") is False:
        return "its attention is not causal (is_causal: false), which is not computed"
    if _TOKENS in config:
        return _by_tokens(path, config)
    if _architecture(config).endswith(_CLASSIFIER):
        return _classifier(path, config)
    return _by_modules(path, config)


def is_declared(path: Path, config: dict[str, Any]) -> bool:
    """Returns True if a checkpoint declares embeddings or scores; `config` is its config.json."""
    has_files = (path / _MODULES).is_file() or _TOKENS in config
    return has_files or _architecture(config).endswith(_CLASSIFIER)


def classifies(config: Any) -> bool:
    """Returns True if a transformers configuration is a classifier's, with a separate layer."""
    return any(name.endswith(_CLASSIFIER) for name in getattr(config, "architectures", None) or ())


def lacks_output_layer(path: Path) -> bool:
    """Returns True if a checkpoint that declares embeddings or scores has no output layer.

    Only its states are used then; the embedding stands in for the output layer.
    """
    config = read_mapping(path / "config.json")
    if not is_declared(path, config):
        return False
    names = stored_names(path)
    return bool(names) and not any(name.endswith(_OUTPUT_LAYERS) for name in names)


def _architecture(config: dict[str, Any]) -> str:
    named = config.get("architectures")
    return str(named[0]) if isinstance(named, list) and named else ""


def _by_tokens(path: Path, config: dict[str, Any]) -> Pooling:
    """Reads vLLM's key."""
    from tokenizers import Tokenizer

    file, named = path / "tokenizer.json", config[_TOKENS]
    try:
        no, yes = map(Tokenizer.from_file(str(file)).token_to_id, named)
    except Exception as error:  # noqa: BLE001, the library raises nothing narrower
        why = f"expected two tokens of {file.name}, those of no and yes: {error}"
        raise CheckpointError(f"{_TOKENS} of config.json is {named!r}; {why}") from None
    if no is None or yes is None:
        raise CheckpointError(f"{_TOKENS} of config.json is {named!r}; {file} has no such token")
    sigmoid = _has_sigmoid(path, config)
    return Pooling("score", tokens=(yes, no), has_sigmoid=sigmoid, model_type=_type(config))


def _classifier(path: Path, config: dict[str, Any]) -> Pooling | str:
    """Reads an architecture for classification."""
    labels = config.get("id2label")
    count = len(labels) if isinstance(labels, dict) else config.get("num_labels", 2)
    if count != 1:
        return f"{_architecture(config)} with {count} labels scores no pairs; expected one label"
    sigmoid = _has_sigmoid(path, config)
    return Pooling("score", has_sigmoid=sigmoid, generates=False, model_type=_type(config))


def _by_modules(path: Path, config: dict[str, Any]) -> Pooling | str:
    """Reads the chain of sentence-transformers' modules."""
    chain = _chain(path)
    names = [name for name, _ in chain]
    if names == ["Transformer", "LogitScore"]:
        file = chain[1][1] / "config.json"
        settings = read_mapping(file)
        wanted = (settings.get("true_token_id"), settings.get("false_token_id"))
        tokens = tuple(token for token in wanted if token is not None)
        if wanted[0] is None or not all(type(token) is int for token in tokens):
            raise CheckpointError(f"{file} has no token id as true_token_id: {wanted[0]!r}")
        sigmoid = _has_sigmoid(path, config)
        return Pooling("score", tokens=tokens, has_sigmoid=sigmoid, model_type=_type(config))
    if names not in (["Transformer", "Pooling"], ["Transformer", "Pooling", "Normalize"]):
        return f"its {_MODULES} is a chain that is not computed: {', '.join(names) or 'empty'}"
    settings = read_mapping(chain[1][1] / "config.json")
    modes = {key for key, value in settings.items() if key.startswith("pooling_mode_") and value}
    if isinstance(mode := settings.get("pooling_mode"), str):
        modes = {f"pooling_mode_{mode}"}
    if modes != {"pooling_mode_lasttoken"}:
        listed = ", ".join(sorted(modes)) or "none"
        return f"its pooling is {listed}; expected pooling_mode_lasttoken"
    return Pooling(
        "embed",
        normalizes=len(names) == 3,
        dimensions=_dimensions(path, config),
        generates=bool(config.get("tie_word_embeddings")) or not lacks_output_layer(path),
        size=int((config.get("text_config") or config).get("hidden_size") or 0),
        model_type=_type(config),
    )


def _type(config: dict[str, Any]) -> str:
    return str(config.get("model_type") or "")


def _chain(path: Path) -> list[tuple[str, Path]]:
    """Returns the last name components of the classes in `modules.json`, and their folders."""
    file = path / _MODULES
    try:
        modules = json.loads(file.read_text(encoding="utf-8"))
        return [(str(each["type"]).rpartition(".")[2], path / each["path"]) for each in modules]
    except (OSError, ValueError, TypeError, LookupError, RecursionError) as error:
        raise CheckpointError(f"{file} is no list of modules: {error}") from None


def _has_sigmoid(path: Path, config: dict[str, Any]) -> bool:
    """Returns True if the scores' activation is a sigmoid, which is the default."""
    nested = config.get("sentence_transformers")
    named = read_mapping(path / _SETTINGS).get("activation_fn")
    if named is None and isinstance(nested, dict):
        named = nested.get("activation_fn")
    kind = str(named or "Sigmoid").rpartition(".")[2]
    if kind not in ("Sigmoid", "Identity"):
        raise CheckpointError(f"{path}: the scores' activation_fn {named!r} is not computed")
    return kind == "Sigmoid"


def _dimensions(path: Path, config: dict[str, Any]) -> tuple[int, ...] | None:
    """Returns the sizes that config.json declares by vLLM's keys."""
    listed = config.get("matryoshka_dimensions")
    if not listed:
        return () if config.get("is_matryoshka") else None
    if not isinstance(listed, list) or not all(type(size) is int and size > 0 for size in listed):
        raise CheckpointError(f"{path / 'config.json'}: matryoshka_dimensions is {listed!r}")
    return tuple(sorted(listed))


def described(path: Path, overrides: Mapping[str, Any] = MappingProxyType({})) -> str:
    """Describes what a checkpoint computes in addition to text, for users; "" if nothing."""
    found = read_pooling(path, overrides)
    if isinstance(found, str):
        is_meant = overrides or is_declared(path, read_mapping(path / "config.json"))
        return found if is_meant else ""
    if found.kind == "embed":
        cut = "" if found.dimensions is None else ", to be cut"
        return f"embeddings of {found.size}{', normalised' * found.normalizes}{cut}"
    return "scores of pairs"


class Pooler:
    """Computes embeddings or scores on a rank.

    Args:
        layer: the checkpoint's separate layer, [1, hidden_size], float32; None: it has none.
    """

    def __init__(self, pooling: Pooling, layer: Tensor | None) -> None:
        self._pooling, self._layer = pooling, layer

    @classmethod
    def load(
        cls, pooling: Pooling, path: Path, device: torch.device, *, allow_pickle: bool
    ) -> Pooler:
        """Loads the pooler of a checkpoint.

        Raises:
            CheckpointError: its layer is missing.
        """
        from .weights import Checkpoint, whole_box

        layer = None
        if pooling.kind == "score" and not pooling.tokens:
            checkpoint = Checkpoint(path, allow_pickle=allow_pickle)
            if LAYER not in checkpoint.names:
                raise CheckpointError(f"{str(path)!r} has no tensor {LAYER!r}")
            source = checkpoint.source(LAYER)
            layer = source.read(whole_box(source.shape)).to(device).float()
        return cls(pooling, layer)

    def values(
        self,
        states: Tensor,  # [num_pooled, hidden_size], after the final norm
        logits: Tensor,  # [num_pooled, vocab], float32
    ) -> FloatArray:  # [num_pooled, hidden_size], or [num_pooled, 1]
        """Returns embeddings or scores."""
        import torch
        from torch.nn.functional import normalize

        if self._pooling.kind == "embed":
            found = states.float()
            found = normalize(found, dim=1) if self._pooling.normalizes else found
        else:
            if self._layer is not None:
                found = states.float() @ self._layer.T
            else:
                columns = logits[:, list(self._pooling.tokens)]
                found = columns[:, :1] - columns[:, 1:].sum(dim=1, keepdim=True)
            found = torch.sigmoid(found) if self._pooling.has_sigmoid else found
        return found.cpu().numpy().astype(np.float32)
