"""The bound on a text's tokens is never above their true number."""

from __future__ import annotations

import random
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from outrider.engine.frontend import Frontend, text_bound
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
    "normalizer", [None, normalizers.NFC(), normalizers.Sequence([normalizers.NFKC()])]
)
def test_no_text_has_fewer_tokens(normalizer: Any, strips: bool) -> None:
    tokenizer = fast(normalizer, strips=strips)
    bound = text_bound(tokenizer)
    assert bound is not None
    assert bound.counts_white is not strips
    rng = random.Random(1)
    texts = ["".join(rng.choices([*PIECES, "<|user|>"], k=rng.randint(0, 30))) for _ in range(200)]
    for text in (*texts, " " * 500 + "<|user|>" + "\u3000" * 500, "\u1f00\u0301\u0345" * 300):
        assert bound.min_tokens(text) <= len(tokenizer.encode(text, add_special_tokens=False))


@pytest.mark.parametrize(
    "normalizer",
    [normalizers.StripAccents(), normalizers.Replace("aaa", "a"), normalizers.BertNormalizer()],
)
def test_no_bound_where_characters_may_vanish(normalizer: Any) -> None:
    assert text_bound(fast(normalizer)) is None
    tokenizer = Tokenizer(models.WordLevel({"[UNK]": 0}, unk_token="[UNK]"))
    assert text_bound(PreTrainedTokenizerFast(tokenizer_object=tokenizer)) is None


def test_a_text_that_cannot_fit_is_never_encoded(config: Any, limits: Any) -> None:
    class NotCalled:
        def encode_batch_fast(self, *_: Any, **__: Any) -> None:
            raise AssertionError("it was encoded")

    frontend = Frontend(config, limits)
    frontend._backend = NotCalled()
    with pytest.raises(PromptTooLongError, match="at least"):
        frontend.text_prompt("the cat" * 10**6)
    with pytest.raises(PromptTooLongError) as caught:
        frontend.chat_prompt([{"role": "user", "content": "the cat" * 10**6}])
    assert caught.value.field == "messages"


def test_the_quick_way_encodes_alike(config: Any, limits: Any, tokenizer: Any) -> None:
    frontend = Frontend(config, limits)
    assert frontend._backend is not None
    for text in ("", "the cat<|eos|> sat", *PIECES):
        for special in (True, False):
            expected = tokenizer.encode(text, add_special_tokens=special)
            prompt = frontend.text_prompt(text, add_special_tokens=special)
            assert list(prompt.token_ids) == expected
