"""The tokenizer of a GGUF file, and the tokens that end a text, consistent with llama.cpp.

transformers makes a tokenizer from the metadata. If it splits texts or treats special tokens
differently from llama.cpp (src/llama-vocab.cpp), the tokenizer's files are changed.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from ....errors import CheckpointError

log = logging.getLogger(__name__)

_TOKENS: Final = "tokenizer.ggml.tokens"
_CUT: Final = "tokenizer.ggml.pre"

# How texts are split before merges, by `tokenizer.ggml.pre`: by transformers' rule of that name,
# by GPT-2's rule, or by GPT-2's rule with every digit alone.
_KNOWN_CUTS: Final = frozenset(
    {
        *("llama3", "llama-v3", "llama-bpe", "falcon3", "pixtral", "dbrx", "smaug-bpe", "tekken"),
        *("qwen2", "deepseek-r1-qwen", "megrez", "kormo", "qwen35", "gpt-4o", "llama4", "kanana2"),
    }
)
_GPT2_CUTS: Final = frozenset(
    {
        *("gpt-2", "mpt", "olmo", "jais", "phi-2", "trillion", "granite-docling", "exaone4"),
        *("gigachat", "a.x-4.0", "mellum", "default", ""),
    }
)
# With these, a piece that is a token is never split into merges, and a text begins with BOS unless
# the file disables it.
_WHOLE_CUTS: Final = frozenset({"llama3", "llama-v3", "llama-bpe", "falcon3", "pixtral", "tekken"})
_DIGIT_CUTS: Final = frozenset(
    {"smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b"}
)
_SAMPLING: Final = ("top_k", "top_p", "min_p")  # general.sampling
_CONTROL, _USER_DEFINED, _UNUSED = 3, 4, 5  # tokenizer.ggml.token_type
_SPACE = "\N{LOWER ONE EIGHTH BLOCK}"  # SentencePiece's
# Tokens that end a turn or a text regardless of the file's keys, as in llama.cpp.
_ENDS_OF_TURNS: Final = frozenset(
    {
        *("<|eot_id|>", "<|eom_id|>", "<|end_of_text|>", "<|endoftext|>", "<|im_end|>", "<|end|>"),
        *("<end_of_turn>", "<｜end▁of▁sentence｜>", "<|return|>", "<|call|>"),
    }
)


def write_tokenizer(folder: Path, file: Path, meta: Mapping[str, Any]) -> None:
    """Writes the tokenizer's files and the chat template.

    Raises:
        CheckpointError: transformers does not support the kind of the file's tokenizer; names the
            field `tokenizer`.
    """
    kind, cut = meta.get("tokenizer.ggml.model"), meta.get(_CUT, "")
    hint = "set tokenizer to a folder with the model's own"
    known = _KNOWN_CUTS | _GPT2_CUTS | _DIGIT_CUTS
    if kind == "gpt2" and not (isinstance(cut, str) and cut in known):
        raise CheckpointError.at(
            "tokenizer", f"{file}: tokenizer.ggml.pre is {cut!r}, which is not read; {hint}"
        )
    if kind not in ("gpt2", "llama") or not _tokens(meta)[0]:
        raise CheckpointError.at(
            "tokenizer",
            f"{file}: tokenizer.ggml.model is {kind!r}; read with its tokens: gpt2, llama; {hint}",
        )
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerFast
    from transformers.utils import logging as theirs

    level = theirs.get_verbosity()
    theirs.set_verbosity_error()
    try:
        made = PreTrainedTokenizerFast.from_pretrained(
            file.parent, gguf_file=file.name, local_files_only=True
        )
        made.save_pretrained(folder)
        stored = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
        _mend(stored, meta)
        text = json.dumps(stored, ensure_ascii=False)
        Tokenizer.from_str(text)
    except Exception as error:  # invalid metadata may raise anything
        if isinstance(error, OSError) and error.errno is not None:  # raised by the folder's disk
            raise
        raise CheckpointError.at(
            "tokenizer", f"{file}: none can be made of its metadata: {error!r}; {hint}"
        ) from None
    finally:
        theirs.set_verbosity(level)
    if kind == "gpt2" and cut in ("default", ""):
        log.warning("%s: it does not say how texts are cut (tokenizer.ggml.pre); as GPT-2's", file)
    (folder / "tokenizer.json").write_text(text, "utf-8")
    named = folder / "tokenizer_config.json"
    settings = json.loads(named.read_text(encoding="utf-8"))
    for key in ("is_local", "local_files_only"):
        settings.pop(key, None)
    settings["tokenizer_class"] = "PreTrainedTokenizerFast"
    named.write_text(json.dumps(settings, indent=2), "utf-8")


def _tokens(meta: Mapping[str, Any]) -> tuple[list[Any], list[Any]]:
    """Returns the tokens by their ids, and their types; empty if they are not lists."""
    lists = (meta.get(_TOKENS), meta.get("tokenizer.ggml.token_type"))
    tokens, types = (each if isinstance(each, list) else [] for each in lists)
    return tokens, types


def _mend(stored: dict[str, Any], meta: Mapping[str, Any]) -> None:
    """Changes a tokenizer made by transformers to behave like llama.cpp."""
    tokens, types = _tokens(meta)
    model, kind, cut = stored["model"], meta["tokenizer.ggml.model"], meta.get(_CUT, "")
    # Tokens that transformers adds have no embedding rows.
    added = {each["id"]: each for each in stored["added_tokens"] if each["id"] < len(tokens)}
    spelled = {index: token for token, index in model["vocab"].items()}
    merged = {piece for merge in model["merges"] for piece in (*merge, "".join(merge))}
    for index, (token, number) in enumerate(zip(tokens, types, strict=False)):
        if number == _UNUSED and re.fullmatch(r"\[PAD\d+\]", token):  # an unused row
            model["vocab"].pop(token, None)
        elif kind == "gpt2" and number in (_CONTROL, _USER_DEFINED):  # not encoded as bytes
            if spelled.get(index) not in merged:
                model["vocab"].pop(spelled.get(index), None)
            model["vocab"][token] = index
            flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
            added[index] = {"id": index, "content": token, **flags, "special": number == _CONTROL}
    stored["added_tokens"] = [added[index] for index in sorted(added)]
    stored["post_processor"] = _post_processor(meta)
    if kind == "llama":
        # A space is prepended to every text between special tokens, even if it begins with one.
        has_prefix = meta.get("tokenizer.ggml.add_space_prefix", True)
        replace = {"type": "Replace", "pattern": {"String": " "}, "content": _SPACE}
        prepend = [{"type": "Prepend", "prepend": _SPACE}] if has_prefix else []
        stored["normalizer"] = {"type": "Sequence", "normalizers": [*prepend, replace]}
        stored["pre_tokenizer"] = None
        back = {"type": "Replace", "pattern": {"String": _SPACE}, "content": " "}
        strip = [{"type": "Strip", "content": " ", "start": 1, "stop": 0}] if has_prefix else []
        decoders = [back, {"type": "ByteFallback"}, {"type": "Fuse"}, *strip]
        stored["decoder"] = {"type": "Sequence", "decoders": decoders}
        return
    model["ignore_merges"] = cut in _WHOLE_CUTS
    if cut in _KNOWN_CUTS and '"Split"' not in json.dumps(stored["pre_tokenizer"]):
        raise ValueError(f"this version of transformers does not know tokenizer.ggml.pre {cut!r}")
    if cut in _DIGIT_CUTS:
        bytes_ = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
        digits = {"type": "Digits", "individual_digits": True}
        cuts = [digits, bytes_ | {"use_regex": True}]
        stored["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": cuts}


def _post_processor(meta: Mapping[str, Any]) -> dict[str, Any] | None:
    """Returns the processor that adds BOS and EOS, if the file or its kind requires it."""
    is_bytes = meta["tokenizer.ggml.model"] == "gpt2"
    by_default = not is_bytes or meta.get(_CUT) in _WHOLE_CUTS
    ends = []
    for name, usual in (("bos", by_default), ("eos", False)):
        index = meta.get(f"tokenizer.ggml.{name}_token_id")
        wanted = meta.get(f"tokenizer.ggml.add_{name}_token", usual)
        is_one = type(index) is int and 0 <= index < len(meta[_TOKENS])
        ends.append([(meta[_TOKENS][index], index)] if wanted and is_one else [])

    def template(letters: str) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = []
        for number, letter in enumerate(letters):
            first, last = (
                [{"SpecialToken": {"id": token, "type_id": number}} for token, _ in end]
                for end in ends
            )
            found += [*first, {"Sequence": {"id": letter, "type_id": number}}, *last]
        return found

    named = {
        token: {"id": token, "ids": [index], "tokens": [token]}
        for end in ends
        for token, index in end
    }
    if not named:
        return None
    parts = {"single": template("A"), "pair": template("AB")}
    return {"type": "TemplateProcessing", **parts, "special_tokens": named}


def generation_config(meta: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the tokens that end a text, and defaults of sampling."""
    named = (meta.get(f"tokenizer.ggml.{each}_token_id") for each in ("eos", "eot", "eom"))
    ends = [each for each in named if type(each) is int and each >= 0]
    tokens, types = _tokens(meta)
    # If "<|return|>" ends an answer, "<|end|>" only ends one of its messages.
    texts = _ENDS_OF_TURNS - {"<|end|>" if "<|return|>" in tokens else ""}
    for index, (token, kind) in enumerate(zip(tokens, types, strict=False)):
        if kind in (_CONTROL, _USER_DEFINED) and token in texts:
            ends.append(index)
    chosen: dict[str, Any] = {
        "bos_token_id": meta.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": list(dict.fromkeys(ends)) or None,
    }
    for ours, theirs in (("temperature", "temp"), *((each, each) for each in _SAMPLING)):
        chosen[ours] = meta.get(f"general.sampling.{theirs}")
    return {key: value for key, value in chosen.items() if value is not None}
