"""Streaming equals one-shot decoding, however the tokens are cut; stop strings likewise."""

from __future__ import annotations

import random
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, normalizers
from transformers import PreTrainedTokenizerFast

from outrider.engine.outputs import REPLACEMENT, Detokenizer, StopMatcher, Vocabulary

TEXTS = [
    "the cat sat on the mat",
    "naïve café – “quotes” …",
    "日本語のテキスト、漢字とかな",
    "emoji 👩‍👩‍👧‍👦 family 🏳️‍🌈 flag, 𝔘𝔫𝔦𝔠𝔬𝔡𝔢",
    "  leading and trailing  \n\n\ttabs",
    "עברית العربية हिन्दी ไทย",
    "",
]


def pieces(rng: random.Random, items: list[int]) -> list[list[int]]:
    """`items`, cut at random."""
    parts, at = [], 0
    while at < len(items):
        size = rng.randint(1, 6)
        parts.append(items[at : at + size])
        at += size
    return parts


def stream(vocabulary: Vocabulary, chunks: list[list[int]], **options: Any) -> list[str]:
    detokenizer = Detokenizer(vocabulary, **options)
    return [*(detokenizer.push(chunk) for chunk in chunks), detokenizer.finish()]


@pytest.fixture(scope="module")
def byte_fallback() -> Any:
    """A tokenizer in Llama-2's manner: `▁` for spaces, `<0xNN>` for what has no token."""
    vocab = {"<unk>": 0}
    vocab.update({f"<0x{byte:02X}>": 1 + byte for byte in range(256)})
    for char in "▁abcdefghijklmnopqrstuvwxyz,.é":
        vocab.setdefault(char, len(vocab))
    tokenizer = Tokenizer(
        models.BPE(vocab, [], unk_token="<unk>", byte_fallback=True, fuse_unk=True)
    )
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>")


def test_streaming_equals_one_shot_on_random_tokens(tokenizer: Any) -> None:
    for seed in range(200):
        rng = random.Random(seed)
        vocabulary = Vocabulary(tokenizer)
        ids = [rng.randrange(len(tokenizer)) for _ in range(rng.randint(1, 150))]
        for skip in (True, False):
            streamed = "".join(stream(vocabulary, pieces(rng, ids), skip_special_tokens=skip))
            assert streamed == tokenizer.decode(ids, skip_special_tokens=skip), seed


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("kind", ["byte_level", "byte_fallback"])
def test_streaming_equals_one_shot_on_text(
    tokenizer: Any, byte_fallback: Any, text: str, kind: str
) -> None:
    chosen = tokenizer if kind == "byte_level" else byte_fallback
    vocabulary = Vocabulary(chosen)
    ids = chosen.encode(text * 5)
    for seed in range(20):
        parts = stream(vocabulary, pieces(random.Random(seed), ids))
        assert "".join(parts) == chosen.decode(ids)
        assert not any(REPLACEMENT in part for part in parts), "half a character was given out"


@pytest.mark.parametrize(
    ("decoder", "words"),
    [
        (decoders.WordPiece(), ["the", "##se", "cat", "##s", "sat", "a", "."]),
        (decoders.Metaspace(), ["▁the", "se", "▁cat", "s", "▁sat", "▁a", "▁"]),
        (decoders.BPEDecoder("</w>"), ["the", "se</w>", "cat", "s</w>", "sat</w>", "a", "a</w>"]),
        (decoders.Sequence([decoders.Fuse()]), ["th", "e", " c", "at", " sat"]),
    ],
)
def test_streaming_equals_one_shot_with_other_decoders(decoder: Any, words: list[str]) -> None:
    inner = Tokenizer(models.BPE({word: id for id, word in enumerate(words)}, []))
    inner.decoder = decoder
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner)
    vocabulary = Vocabulary(tokenizer)
    for seed in range(100):
        rng = random.Random(seed)
        ids = [rng.randrange(len(words)) for _ in range(rng.randint(1, 20))]
        streamed = "".join(stream(vocabulary, pieces(rng, ids)))
        # A space between words comes with the one before, also at the end.
        assert streamed.removesuffix(" ") == tokenizer.decode(ids).removesuffix(" ")


def test_text_comes_with_its_token(tokenizer: Any) -> None:
    vocabulary = Vocabulary(tokenizer)
    ids = tokenizer.encode("the cat sat on the mat and the other cat sat too")
    detokenizer = Detokenizer(vocabulary)
    for token_id in ids:
        assert detokenizer.push([token_id]) == vocabulary.token_text(token_id)


@pytest.mark.parametrize("kind", ["byte_level", "byte_fallback"])
def test_endless_garbage_flows(tokenizer: Any, byte_fallback: Any, kind: str) -> None:
    """Bytes that never make a character are neither held for ever nor decoded again and again."""
    chosen = tokenizer if kind == "byte_level" else byte_fallback
    vocabulary = Vocabulary(chosen)
    byte = next(id for id in range(len(chosen)) if vocabulary.token_bytes(id) == b"\x80")
    decoded: list[int] = []
    decode = vocabulary.decode
    vocabulary.decode = lambda ids: decoded.append(len(ids)) or decode(ids)  # type: ignore[func-returns-value]
    detokenizer = Detokenizer(vocabulary)
    text = "".join(detokenizer.push([byte]) for _ in range(500))
    assert len(text) >= 490
    assert text + detokenizer.finish() == chosen.decode([byte] * 500)
    assert max(decoded) < 64


def test_ids_beyond_the_tokenizer_are_silent(tokenizer: Any) -> None:
    vocabulary = Vocabulary(tokenizer)
    assert "".join(stream(vocabulary, [[10**6], [len(tokenizer)]])) == ""


def test_byte_tokens_however_they_arrive(byte_fallback: Any) -> None:
    """Runs of byte tokens, sound or not: the text is that of a UTF-8 decoder, in any pieces."""
    for seed in range(60):
        rng = random.Random(seed)
        vocabulary = Vocabulary(byte_fallback)
        letters = byte_fallback.convert_tokens_to_ids(["a", "b", "é", "▁"])
        likely = [1 + byte for byte in (0xC3, 0xA9, 0xE2, 0x82, 0xAC, 0xF0, 0x9F, 0xEF, 0xBF, 0xBD)]
        ids = [rng.choice(likely + letters) for _ in range(rng.randint(1, 60))]
        raw = b"".join(vocabulary.token_bytes(id) for id in ids)
        expected = "".join(_decoded(run) for run in _runs(vocabulary, ids))
        if raw.startswith(b" "):
            expected = expected[1:]  # the decoder drops the space that begins a text
        once = "".join(stream(vocabulary, [ids]))
        assert once == expected == vocabulary.text(ids), seed
        assert "".join(stream(vocabulary, [[id] for id in ids])) == once
        for _ in range(5):
            assert "".join(stream(vocabulary, pieces(rng, ids))) == once


def _runs(vocabulary: Vocabulary, ids: list[int]) -> list[bytes]:
    """Bytes of neighbouring byte tokens together, of every other token alone."""
    runs, previous = [], False
    for id in ids:
        is_byte = 1 <= id <= 256
        if is_byte and previous:
            runs[-1] += vocabulary.token_bytes(id)
        else:
            runs.append(vocabulary.token_bytes(id))
        previous = is_byte
    return runs


def _decoded(run: bytes) -> str:
    return run.decode("utf-8", "replace")


def test_a_text_goes_on_behind_its_context(byte_fallback: Any) -> None:
    vocabulary = Vocabulary(byte_fallback)
    ids = byte_fallback.convert_tokens_to_ids(["▁", "a", "▁", "b", "<0xC3>"])
    detokenizer = Detokenizer(vocabulary, context=ids[:2])
    assert detokenizer.push(ids[2:4]) == " b", "the space is dropped at the start of a text only"
    assert Detokenizer(vocabulary, context=ids).push(ids[:2]) == " a"
    assert [vocabulary.token_text(id) for id in ids[:2]] == [" ", "a"]


def test_ids_above_a_hole(tmp_path: Any) -> None:
    """A vocabulary's number of tokens is not its largest id."""
    tokenizer = Tokenizer(models.BPE({"a": 0, "b": 1, "c": 900}, []))
    tokenizer.decoder = decoders.Fuse()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer)
    vocabulary = Vocabulary(fast)
    assert vocabulary.knows(900)
    assert not vocabulary.knows(500)
    assert "".join(stream(vocabulary, [[0, 500], [900], [1, 901]])) == "acb"
    assert [vocabulary.token_text(id) for id in (900, 500, 10**6)] == ["c", "", ""]


def test_names_of_parts_of_characters(tokenizer: Any, byte_fallback: Any) -> None:
    vocabulary = Vocabulary(byte_fallback)
    assert vocabulary.token_name(1 + 0xC3) == "bytes:\\xc3"
    assert vocabulary.token_name(1 + 0x41) == "A"
    vocabulary = Vocabulary(tokenizer)
    names = [vocabulary.token_name(id) for id in tokenizer.encode("é")]
    assert names == ["bytes:\\xc3", "bytes:\\xa9"]


def test_token_bytes_rebuild_every_text(tokenizer: Any, byte_fallback: Any) -> None:
    for text in TEXTS:
        vocabulary = Vocabulary(tokenizer)
        ids = tokenizer.encode(text)
        assert b"".join(vocabulary.token_bytes(id) for id in ids) == text.encode()
    vocabulary = Vocabulary(byte_fallback)
    ids = byte_fallback.encode("日本")[1:]
    assert b"".join(vocabulary.token_bytes(id) for id in ids) == "日本".encode()


def first_stop(text: str, stops: list[str], include: bool) -> tuple[str, str | None]:
    """The slow oracle: character by character, the longest stop string that is complete."""
    for end in range(len(text) + 1):
        done = [stop for stop in stops if text[:end].endswith(stop)]
        if done:
            stop = max(done, key=len)
            return text[: end if include else end - len(stop)], stop
    return text, None


def test_stops_do_not_depend_on_chunks() -> None:
    for seed in range(300):
        rng = random.Random(seed)
        text = "".join(rng.choices("abc", k=rng.randint(0, 40)))
        stops = ["".join(rng.choices("abc", k=rng.randint(1, 5))) for _ in range(rng.randint(1, 4))]
        include = rng.random() < 0.5
        matcher = StopMatcher(stops, include=include)
        out, at = "", 0
        while at < len(text) and matcher.matched is None:
            end = min(len(text), at + rng.randint(1, 5))
            out += matcher.push(text[at:end])
            at = end
            _, stop = first_stop(text[:at], stops, include)
            if matcher.matched is None:
                held = len(text[:at]) - len(out)
                assert stop is None
                assert held == 0 or any(other.startswith(text[at - held : at]) for other in stops)
        out += matcher.finish()
        assert (out, matcher.matched) == first_stop(text, stops, include), seed


def test_a_stop_string_that_begins_before_it_may() -> None:
    """Only the text that completes a stop string has to be allowed to stop."""
    for cut in range(1, 5):
        matcher = StopMatcher(["stop", "top"])
        out = matcher.push("x stop " + "stop"[:cut], may_stop=False)
        assert matcher.matched is None
        out += matcher.push("stop"[cut:] + " stop")
        assert matcher.matched == "stop"
        assert out == ("x stop " if cut < 4 else "x stop stop "), cut
    matcher = StopMatcher(["to", "xtoyy"])
    assert matcher.push("xto", may_stop=False) + matcher.push("z") == "xtoz"
    assert matcher.matched is None
