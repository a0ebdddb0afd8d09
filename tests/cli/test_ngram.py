"""`outrider ngram` and llama.cpp's options of the look-up drafters."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
import yaml
from tokenizers import Tokenizer

from outrider.drafters.lookup.ngram_file import load
from outrider.drafters.vocabulary import fingerprint
from outrider.tests.helpers.lookups import counts_of


def read(path, tokenizer) -> Counter:
    """(two tokens, what followed) -> count."""
    (arrays,) = load(path, "f", fingerprint(tokenizer), 1 << 20)
    return Counter(
        {(*key, t): count for key, some in counts_of(arrays).items() for t, count in some.items()}
    )


def test_build_counts_what_follows(outrider_cli, tmp_path, model):
    texts = ["the cat sat on the mat, the cat sat still\n" * 30, "the dog sat\n"]
    files = []
    for index, text in enumerate(texts):
        files.append(tmp_path / f"{index}.txt")
        files[-1].write_text(text)
    out = tmp_path / "out.ngrams"
    result = outrider_cli("ngram", "build", out, "--input", *files, "--tokenizer", model)
    assert result.exit_code == 0, result.stderr
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    wanted: Counter = Counter()
    for text in texts:
        ids = tokenizer.encode(text, add_special_tokens=False).ids
        wanted.update(zip(ids, ids[1:], ids[2:]))
    assert read(out, model) == wanted
    shown = outrider_cli("ngram", "inspect", out)
    assert shown.exit_code == 0
    assert yaml.safe_load(shown.stdout)["facts"]["num_files"] == 2
    assert "sound" in shown.stderr


@pytest.mark.parametrize("kind", ["npy", "txt"])
def test_build_from_tokens(outrider_cli, tmp_path, model, kind):
    ids = np.random.default_rng(0).integers(0, 20, 500)
    file, out = tmp_path / f"ids.{kind}", tmp_path / "out"
    np.save(file, ids) if kind == "npy" else file.write_text(" ".join(map(str, ids)))
    args = ("ngram", "build", out, "--input", file, "--tokenizer", model, "--tokens")
    assert outrider_cli(*args).exit_code == 0
    wanted = Counter(zip(ids.tolist(), ids[1:].tolist(), ids[2:].tolist()))
    assert read(out, model) == wanted
    assert outrider_cli(*args, "--min-count", 2).exit_code == 0
    assert read(out, model) == Counter({k: n for k, n in wanted.items() if n > 1})


def test_mistakes_are_named(outrider_cli, tmp_path, model):
    file, out = tmp_path / "ids.txt", tmp_path / "out"
    file.write_text("1 2 999999999")
    blank = tmp_path / "blank.txt"
    blank.write_text("\n")
    cases = [
        (("--input", file, "--tokenizer", model, "--tokens"), "outside the vocabulary"),
        (("--input", tmp_path / "none", "--tokenizer", model), "is not a file"),
        (("--input", blank, "--tokenizer", model), "no three tokens in a row are in the text once"),
        (("--input", file, "--tokenizer", tmp_path), "tokenizer.json"),
    ]
    for args, words in cases:
        result = outrider_cli("ngram", "build", out, *args)
        assert result.exit_code == 1
        assert words in result.stderr.replace("\n", " ")
        assert not out.exists()
    file.write_text("one two")
    result = outrider_cli("ngram", "build", out, "-i", file, "-t", model, "--tokens")
    assert "no token ids" in result.stderr
    assert outrider_cli("ngram", "inspect", file).exit_code == 1


BAD_IDS = {
    "floats": (np.array([1.5, 2.0, 3.0]), "float64, not integers"),
    "whole floats": (np.array([1.0, 2.0, 3.0], dtype=np.float32), "float32, not integers"),
    "truths": (np.array([True, False, True]), "bool, not integers"),
    "complex": (np.array([1j]), "complex128, not integers"),
    "times": (np.array(["2020-01-01"], dtype="datetime64[D]"), "not integers"),
    "more than 63 bits": (np.array([1, 2, 2**64 - 1], dtype=np.uint64), "outside the vocabulary"),
    "objects": (np.array([1, None]), "no token ids"),
}


@pytest.mark.parametrize(("ids", "words"), BAD_IDS.values(), ids=BAD_IDS.keys())
def test_arrays_that_are_no_tokens_are_refused(outrider_cli, tmp_path, model, ids, words):
    file, out = tmp_path / "ids.npy", tmp_path / "out"
    np.save(file, ids)
    result = outrider_cli("ngram", "build", out, "-i", file, "-t", model, "--tokens")
    assert result.exit_code == 1
    assert "error: --input: " in result.stderr
    assert words in result.stderr.replace("\n", " ")
    assert not out.exists()


@pytest.mark.parametrize("content", [b"", b"PK\x03\x04", b"\x93NUMPY\x01\x00", b"1 2 3"])
def test_files_that_are_no_arrays_are_refused(outrider_cli, tmp_path, model, content):
    file = tmp_path / "ids.npy"
    file.write_bytes(content)
    result = outrider_cli("ngram", "build", tmp_path / "o", "-i", file, "-t", model, "--tokens")
    assert result.exit_code == 1
    assert "no token ids" in result.stderr.replace("\n", " ")


def test_numbers_beyond_63_bits_are_refused(outrider_cli, tmp_path, model):
    file = tmp_path / "ids.txt"
    for text in ("99999999999999999999999 1 2", "1.5 2 3"):
        file.write_text(text)
        result = outrider_cli("ngram", "build", tmp_path / "o", "-i", file, "-t", model, "--tokens")
        assert result.exit_code == 1
        assert "no token ids" in result.stderr.replace("\n", " ")


@pytest.mark.parametrize("place", ["folder", "none/out", "ids.txt/out"])
def test_a_table_that_cannot_be_written_leaves_nothing(outrider_cli, tmp_path, model, place):
    file = tmp_path / "ids.txt"
    file.write_text("1 2 3")
    (tmp_path / "folder").mkdir()
    args = ("-i", file, "-t", model, "--tokens")
    result = outrider_cli("ngram", "build", tmp_path / place, *args)
    assert result.exit_code == 1
    assert "error: OUT: " in result.stderr
    assert "cannot be written" in result.stderr.replace("\n", " ")
    assert sorted(each.name for each in tmp_path.iterdir()) == ["folder", "ids.txt"]


def resolved(outrider_cli, model, *args):
    result = outrider_cli("check", "-m", model, *args)
    assert result.exit_code == 0, result.stderr
    return yaml.safe_load(result.stdout)["speculative_config"]


def test_llama_cpps_options(outrider_cli, model):
    simple = ("--spec-type", "ngram-simple", "--draft-max", 64)
    assert resolved(outrider_cli, model, *simple)["max_draft_len"] == 64
    k4v = resolved(
        outrider_cli, model, "--spec-type", "ngram-map-k4v", "--spec-ngram-size-n", 8,
        "--spec-ngram-size-m", 8, "--spec-ngram-min-hits", 2, "--spec-ngram-check-rate", 3,
        "--spec-draft-n-max", 64, "--draft-min", 2,
    )  # fmt: skip
    wanted = {
        "decoding_type": "NGramMapK4V", "ngram_size_n": 8, "ngram_size_m": 8, "min_hits": 2,
        "check_rate": 3, "max_draft_len": 64, "draft_min": 2,
    }  # fmt: skip
    assert k4v.items() >= wanted.items()


def test_ngram_mods_options_old_and_new(outrider_cli, model):
    old = ("--spec-ngram-size-n", 20, "--draft-min", 40, "--draft-max", 60)
    new = (
        "--spec-ngram-mod-n-match", 20, "--spec-ngram-mod-n-min", 40, "--spec-ngram-mod-n-max", 60
    )  # fmt: skip
    sections = [
        resolved(outrider_cli, model, "--spec-type", "ngram-mod", *args) for args in (old, new)
    ]
    assert sections[0] == sections[1]
    assert (sections[0]["n_match"], sections[0]["n_min"], sections[0]["max_draft_len"]) == (
        20, 40, 60,
    )  # fmt: skip


def test_a_table_implies_its_drafter(outrider_cli, model, tmp_path):
    (tmp_path / "ids").write_text("1 2 3")
    args = ("-i", tmp_path / "ids", "-t", model, "--tokens")
    assert outrider_cli("ngram", "build", tmp_path / "a", *args).exit_code == 0
    section = resolved(
        outrider_cli, model, "-lcs", tmp_path / "a", "--lookup-cache-dynamic", tmp_path / "b"
    )
    assert section["decoding_type"] == "NGramCache"
    assert section["lookup_cache_static"] == str(tmp_path / "a")


def test_a_key_of_another_drafter_is_named(outrider_cli, model):
    args = ("--spec-type", "ngram-simple", "--spec-ngram-mod-n-match", 20)
    result = outrider_cli("check", "-m", model, *args)
    assert result.exit_code == 1
    assert "speculative_config.spec_ngram_mod_n_match" in result.stderr


def test_generate_with_a_table(outrider_cli, model, tmp_path):
    text, out = tmp_path / "text", tmp_path / "out"
    text.write_text("Once upon a time there was a little girl.\n" * 20)
    assert outrider_cli("ngram", "build", out, "-i", text, "-t", model).exit_code == 0
    args = ("generate", "-m", model, "--executor", "local", "-n", 12, "Once upon")
    plain = outrider_cli(*args)
    drafted = outrider_cli(*args, "--lookup-cache-static", out)
    assert drafted.exit_code == 0, drafted.stderr
    assert drafted.stdout == plain.stdout
    out.write_bytes(out.read_bytes()[:-1])
    broken = outrider_cli(*args, "--lookup-cache-static", out)
    assert broken.exit_code == 1
    assert "truncated" in broken.stderr
