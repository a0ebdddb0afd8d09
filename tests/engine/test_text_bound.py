"""Texts that cannot fit are refused by a prefix of them, and no text that fits is."""

from __future__ import annotations

import random
import re
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from outrider.engine.frontend import Frontend
from outrider.errors import PromptTooLongError

PIECES = [
    "the cat sat on the mat ",
    "é",
    "e\u0301",
    "\u1f00\u0301\u0345",
    "  \n\t ",
    "日本",
    "x" * 40,
]


def fast(normalizer: Any, *, strips: bool = False) -> Any:
    """Byte-level BPE with a few merges behind `normalizer`."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {char: id for id, char in enumerate(alphabet)}
    for left, right in (merges := [("t", "h"), ("th", "e"), ("x", "x"), ("xx", "xx")]):
        vocab.setdefault(left + right, len(vocab))
    tokenizer = Tokenizer(models.BPE(vocab, merges))
    tokenizer.normalizer = normalizer
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<|user|>", lstrip=strips, rstrip=strips)])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


@pytest.mark.parametrize("strips", [False, True])
@pytest.mark.parametrize(
    "normalizer",
    [
        None,
        normalizers.NFC(),
        normalizers.Sequence([normalizers.NFKC()]),
        normalizers.StripAccents(),
        normalizers.Replace("aaa", "a"),
        normalizers.BertNormalizer(),
    ],
)
def test_a_text_is_refused_exactly_if_it_does_not_fit(
    config: Any, limits: Any, normalizer: Any, strips: bool
) -> None:
    tokenizer = fast(normalizer, strips=strips)
    frontend = Frontend(config, limits, tokenizer)
    rng = random.Random(1)
    texts = ["".join(rng.choices([*PIECES, "<|user|>"], k=4**k)) for k in range(7)]
    for text in (*texts, " " * 5000 + "<|user|>" + "\u3000" * 5000, "\u1f00\u0301\u0345" * 3000):
        count = len(tokenizer.encode(text))
        try:
            assert len(frontend.text_prompt(text).token_ids) == count
        except PromptTooLongError as error:
            at_least = int(re.findall(r"at least (\d+) tokens", error.message)[0])
            assert limits.max_model_len <= at_least <= count


def test_a_word_of_any_length_may_be_one_token(config: Any, limits: Any) -> None:
    tokenizer = Tokenizer(models.WordLevel({"[UNK]": 0}, unk_token="[UNK]"))
    frontend = Frontend(config, limits, PreTrainedTokenizerFast(tokenizer_object=tokenizer))
    assert frontend.text_prompt("x" * 10**5).token_ids == (0,)


def test_a_text_that_cannot_fit_is_never_encoded_whole(config: Any, limits: Any) -> None:
    frontend = Frontend(config, limits)
    backend, lengths = frontend._backend, []

    class Noting:
        def encode_batch_fast(self, texts: list[str], **options: Any) -> Any:
            lengths.append(len(texts[0]))
            return backend.encode_batch_fast(texts, **options)

    frontend._backend = Noting()
    with pytest.raises(PromptTooLongError, match="at least"):
        frontend.text_prompt("the cat" * 10**6)
    with pytest.raises(PromptTooLongError) as caught:
        frontend.chat_prompt([{"role": "user", "content": "the cat" * 10**6}])
    assert caught.value.field == "messages"
    assert max(lengths) < 10**5


def test_the_quick_way_encodes_alike(config: Any, limits: Any, tokenizer: Any) -> None:
    frontend = Frontend(config, limits)
    assert frontend._backend is not None
    for text in ("", "the cat<|eos|> sat", *PIECES):
        for special in (True, False):
            expected = tokenizer.encode(text, add_special_tokens=special)
            prompt = frontend.text_prompt(text, add_special_tokens=special)
            assert list(prompt.token_ids) == expected
