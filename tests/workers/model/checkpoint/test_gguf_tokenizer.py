"""Tokenizers of GGUF files, against the files' source and against a slow SentencePiece."""

from __future__ import annotations

import json
import random
from itertools import pairwise
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer

import outrider
from outrider.config import EngineConfig
from outrider.engine.checkpoints import sampling_defaults
from outrider.errors import CheckpointError
from outrider.tests.helpers.gguf_files import one_layer, write_gguf
from outrider.workers.model.checkpoint.hub import local_folder

DEMO = Path(outrider.__file__).resolve().parent / "demo" / "models"


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    """The user's cache folder."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def test_the_tokenizer_and_the_template_come_along(tmp_path):
    file = write_gguf(DEMO / "draft", tmp_path / "x.gguf", keys={"tokenizer.ggml.eot_token_id": 7})
    folder = local_folder(str(file), needs_tokenizer=True)
    found, wanted = (AutoTokenizer.from_pretrained(each) for each in (folder, DEMO / "draft"))
    assert found.get_vocab() == wanted.get_vocab(), "transformers' own tokens are not added"
    text = "def total(values):\n    return sum(values)\n"
    assert found.decode(found(text, add_special_tokens=False)["input_ids"]) == text
    assert found("<|bos|>x")["input_ids"][0] == 0
    chat = [{"role": "user", "content": "Hello"}]
    assert found.apply_chat_template(chat, tokenize=False) == wanted.apply_chat_template(
        chat, tokenize=False
    )
    stored = json.loads((Path(folder) / "generation_config.json").read_text())
    assert stored == {"bos_token_id": 0, "eos_token_id": [1, 7]}


@pytest.mark.parametrize(
    ("pre", "keys", "begins", "ends"),
    [
        ("qwen2", {}, False, False),
        ("llama-bpe", {}, True, False),
        ("llama-bpe", {"tokenizer.ggml.add_bos_token": False}, False, False),
        ("gpt-2", {"tokenizer.ggml.add_bos_token": True}, True, False),
        ("qwen2", {"tokenizer.ggml.add_eos_token": True}, False, True),
    ],
)
def test_tokens_at_both_ends(pre, keys, begins, ends, tmp_path):
    file = write_gguf(DEMO / "draft", tmp_path / "x.gguf", pre=pre, keys=keys)
    made = AutoTokenizer.from_pretrained(local_folder(str(file), needs_tokenizer=True))
    inner = made("x", add_special_tokens=False)["input_ids"]
    assert made("x")["input_ids"] == [0] * begins + inner + [1] * ends


@pytest.mark.parametrize(("pre", "is_whole"), [("llama-bpe", True), ("qwen2", False)])
def test_a_token_that_no_merge_makes(pre, is_whole, tmp_path):
    file, _ = renamed(tmp_path, {700: "qzqz"}, pre=pre)
    made = AutoTokenizer.from_pretrained(local_folder(str(file), needs_tokenizer=True))
    assert (made("qzqz", add_special_tokens=False)["input_ids"] == [700]) is is_whole


def test_special_tokens_in_other_letters_than_those_of_bytes(tmp_path):
    """As DeepSeek's; a user's token that is not special is kept in the text."""
    names = {0: "<｜begin▁of▁sentence｜>", 500: "<｜User｜>", 501: "<think a>"}
    file, tokens = renamed(tmp_path, names, {0: 3, 500: 3, 501: 4})
    made = AutoTokenizer.from_pretrained(local_folder(str(file), needs_tokenizer=True))
    found = made("<｜User｜>x<think a>y")["input_ids"]
    assert found[:2] == [0, 500]
    assert 501 in found
    assert made.bos_token_id == 0
    assert len(made) == len(tokens)
    assert made.decode(found, skip_special_tokens=True) == "x<think a>y"


def test_a_user_s_token_that_merges_make_as_well(tmp_path):
    """As GPT-NeoX's runs of spaces: in the text, and spelled in bytes."""
    stored = json.loads((DEMO / "draft" / "tokenizer.json").read_text())
    index = stored["model"]["vocab"]["ĠĠ"]
    merges = stored["model"]["merges"]
    assert any("".join(merge) == "ĠĠ" for merge in merges)
    file, _ = renamed(tmp_path, {index: "  "}, {index: 4}, merges=merges)
    made = AutoTokenizer.from_pretrained(local_folder(str(file), needs_tokenizer=True))
    found = made("a  b    c", add_special_tokens=False)["input_ids"]
    assert found.count(index) == 3
    assert made.decode(found) == "a  b    c"


def renamed(tmp_path, names, kinds=None, merges=None, **options):
    """A file whose tokenizer has other names, and types, for some ids."""
    stored = json.loads((DEMO / "draft" / "tokenizer.json").read_text())
    tokens = sorted(stored["model"]["vocab"], key=stored["model"]["vocab"].get)
    lost = {tokens[index] for index in names}
    for index, name in names.items():
        tokens[index] = name
    types = [(kinds or {}).get(index, 3 if index < 3 else 1) for index in range(len(tokens))]
    merges = merges or [
        merge for merge in stored["model"]["merges"] if not lost & {*merge, "".join(merge)}
    ]
    keys = {
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.merges": [" ".join(merge) for merge in merges],
    }
    return write_gguf(DEMO / "draft", tmp_path / "x.gguf", keys=keys, **options), tokens


@pytest.mark.parametrize(
    ("pre", "count"),
    [("llama-bpe", 2), ("gpt-4o", 2), ("smollm", 4), ("gpt-2", 1), ("qwen2", 4), ("tekken", 4)],
)
def test_texts_are_cut_as_the_file_says(pre, count, tmp_path):
    file = write_gguf(DEMO / "draft", tmp_path / "x.gguf", pre=pre)
    made = AutoTokenizer.from_pretrained(local_folder(str(file), needs_tokenizer=True))
    pieces = made.backend_tokenizer.pre_tokenizer.pre_tokenize_str("1234")
    assert len(pieces) == count


def test_an_unknown_cut_is_refused_unless_a_tokenizer_is_given(tmp_path, caplog):
    file = str(write_gguf(DEMO / "draft", tmp_path / "x.gguf", pre="another"))
    with pytest.raises(CheckpointError, match=r"^tokenizer: .*tokenizer\.ggml\.pre is 'another'"):
        local_folder(file, needs_tokenizer=True)
    folder = Path(local_folder(file))
    assert "another" in caplog.text
    assert not (folder / "tokenizer.json").exists()
    with pytest.raises(CheckpointError, match=r"^tokenizer: .*'another'"):
        local_folder(file, needs_tokenizer=True)


SPACE = "\N{LOWER ONE EIGHTH BLOCK}"
LETTERS = f"abcdefgh{SPACE}"


def pieces_of(rng) -> tuple[list[str], list[float], list[int]]:
    """A SentencePiece vocabulary: bytes, pieces that two others make, letters, special tokens."""
    pieces: dict[str, float] = {}

    def add(piece):
        if len(piece) > 1 and piece not in pieces:
            cut = rng.randint(1, len(piece) - 1)
            add(piece[:cut])
            add(piece[cut:])
            pieces[piece] = 0.0

    for _ in range(200):
        add("".join(rng.choices(LETTERS, k=rng.randint(2, 5))))
    found = sorted(pieces, key=lambda piece: len(piece) + 2 * rng.random()) + list(LETTERS)
    special = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    types = [2, 3, 3, *[6] * 256, *[1] * len(found), 3]
    scores = [0.0] * len(special) + [-float(rank) for rank in range(len(found))] + [-1000.0]
    return [*special, *found, "<|im_end|>"], scores, types


def greedy(text, tokens, scores):
    """SentencePiece's BPE: the best pair first, the leftmost of equals; bytes of what is left."""
    ids = {token: index for index, token in enumerate(tokens)}
    symbols = list(text.replace(" ", SPACE))
    while True:
        pairs = [(ids.get(a + b), at) for at, (a, b) in enumerate(pairwise(symbols))]
        known = [(scores[index], -at) for index, at in pairs if index is not None]
        if not known:
            break
        at = -max(known)[1]
        symbols[at : at + 2] = [symbols[at] + symbols[at + 1]]
    found = []
    for symbol in symbols:
        spelled = [f"<0x{byte:02X}>" for byte in symbol.encode()]
        found += [ids[symbol]] if symbol in ids else [ids[each] for each in spelled]
    return found


@pytest.mark.parametrize(("has_prefix", "has_bos"), [(True, True), (False, False)])
def test_sentencepiece(has_prefix, has_bos, tmp_path):
    rng = random.Random(0)
    tokens, scores, types = pieces_of(rng)
    writer = gguf.GGUFWriter(tmp_path / "x.gguf", "llama")
    writer.add_tokenizer_model("llama")
    writer.add_token_list(tokens)
    writer.add_token_scores(scores)
    writer.add_token_types(types)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    if not has_prefix:  # both are true where nothing is said
        writer.add_add_space_prefix(False)
    if not has_bos:
        writer.add_add_bos_token(False)
    file = one_layer(tmp_path / "x.gguf", "F32", np.zeros((6, 512), np.float32), writer, 1024)
    folder = local_folder(str(file), needs_tokenizer=True)
    made = AutoTokenizer.from_pretrained(folder)
    for _ in range(300):
        text = "".join(rng.choices("abcdefgh  zé\n", k=rng.randint(1, 12)))
        found = made(text)["input_ids"]
        assert found == [1] * has_bos + greedy(" " * has_prefix + text, tokens, scores), repr(text)
        assert made.decode(found, skip_special_tokens=True) == text
    end = tokens.index("<|im_end|>")
    assert made("<|im_end|>", add_special_tokens=False)["input_ids"] == [end]
    stored = json.loads((Path(folder) / "generation_config.json").read_text())
    assert stored["eos_token_id"] == [2, end], "also where no key says so"


@pytest.mark.parametrize("is_harmony", [False, True])
def test_the_end_of_a_message_is_not_that_of_an_answer(is_harmony, tmp_path):
    names = {500: "<|end|>"} | ({501: "<|return|>", 502: "<|call|>"} if is_harmony else {})
    file, _ = renamed(tmp_path, names, dict.fromkeys((0, 1, 2, *names), 3))
    folder = local_folder(str(file), needs_tokenizer=True)
    ends = json.loads((Path(folder) / "generation_config.json").read_text())["eos_token_id"]
    assert ends == ([1, 501, 502] if is_harmony else [1, 500])


def test_defaults_of_sampling_come_along(tmp_path):
    keys = {"general.sampling.temp": 0.6, "general.sampling.top_k": 20}
    folder = local_folder(str(write_gguf(DEMO / "draft", tmp_path / "x.gguf", keys=keys)))
    found = sampling_defaults(EngineConfig.load({"model": folder}))
    assert found == {"temperature": 0.6, "top_k": 20}


def test_padding_is_no_token(tmp_path):
    """A model with more rows than tokens: the names that stand in their place are left out."""
    folder = tmp_path / "model"
    folder.mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).write_text((DEMO / "draft" / name).read_text())
    config = json.loads((DEMO / "draft" / "config.json").read_text()) | {"vocab_size": 4200}
    (folder / "config.json").write_text(json.dumps(config))
    weights = load_file(DEMO / "draft" / "model.safetensors")
    embedding = weights["model.embed_tokens.weight"]
    padding = torch.zeros(4200 - len(embedding), embedding.shape[1], dtype=embedding.dtype)
    weights["model.embed_tokens.weight"] = torch.cat([embedding, padding])
    save_file(weights, folder / "model.safetensors")
    made = local_folder(str(write_gguf(folder, tmp_path / "x.gguf")), needs_tokenizer=True)
    found, wanted = (AutoTokenizer.from_pretrained(each) for each in (made, DEMO / "draft"))
    assert found.get_vocab() == wanted.get_vocab()
