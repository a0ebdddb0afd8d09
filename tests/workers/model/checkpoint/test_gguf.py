"""Headers of GGUF files: what is damaged, lies or is enormous costs one error and little memory."""

from __future__ import annotations

import random
import struct
import tracemalloc
from pathlib import Path

import pytest

import outrider
from outrider.config import EngineConfig
from outrider.engine.checkpoints import load_tokenizer, sampling_defaults
from outrider.errors import CheckpointError, ConfigError
from outrider.tests.helpers.gguf_files import write_gguf
from outrider.workers.model.checkpoint.gguf import read_files, shards_of
from outrider.workers.model.checkpoint.gguf_checkpoint import read_model
from outrider.workers.model.checkpoint.hub import local_folder
from outrider.workers.model.fit import check_weights

DEMO = Path(outrider.__file__).resolve().parent / "demo" / "models" / "draft"


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value.encode())) + value.encode()


def key(name: str, kind: int, value: bytes) -> bytes:
    return text(name) + struct.pack("<I", kind) + value


def tensor(name="t.weight", dims=(32,), kind=0, offset=0, num_dims=None) -> bytes:
    count = len(dims) if num_dims is None else num_dims
    return text(name) + struct.pack(f"<I{len(dims)}QIQ", count, *dims, kind, offset)


def header(keys=(), tensors=(), *, version=3, num_tensors=None, num_keys=None, magic=b"GGUF"):
    counts = (
        len(tensors) if num_tensors is None else num_tensors,
        len(keys) if num_keys is None else num_keys,
    )
    return magic + struct.pack("<IQQ", version, *counts) + b"".join((*keys, *tensors))


def padded(data: bytes, alignment: int = 32, values: int = 128) -> bytes:
    return data + bytes(-len(data) % alignment + values)


ARCHITECTURE = key("general.architecture", 8, text("llama"))
HOSTILE = {
    "empty": (b"", "it has 0 bytes"),
    "short": (b"GGUF\3", "it has 5 bytes"),
    "letters": (header(magic=b"GGML"), "does not begin with the letters GGUF"),
    "a pointer": (b"version https://git-lfs.github.com/spec/v1\noid sha256:1\n", "pointer of Git"),
    "version 1": (header(version=1), "version 1"),
    "big-endian": (header(version=3 << 24), "big-endian"),
    "keys": (header(num_keys=2**63), r"states 9,223,372,036,854,775,808 keys"),
    "tensors": (header(num_tensors=2**64 - 1), "states 18,446,744,073,709,551,615 tensors"),
    "fewer keys": (header(num_keys=3), "ends within the name of a key"),
    "fewer tensors": (header(num_tensors=3), "ends within the name of a tensor"),
    "a long name": (header([struct.pack("<Q", 2**63)]), "name of a key is 9,223"),
    "a long string": (header([key("a", 8, struct.pack("<Q", 2**60))]), "'a' is 1,152"),
    "a cut string": (header([key("a", 8, struct.pack("<Q", 9) + b"x")]), "ends within 'a'"),
    "no UTF-8": (header([key("a", 8, struct.pack("<Q", 2) + b"\xff\xfe")]), "'a' is not UTF-8"),
    "a type": (header([key("a", 99, b"")]), "'a' has the unknown type 99"),
    "a long array": (
        header([key("a", 9, struct.pack("<IQ", 4, 2**61))]),
        r"more than 4,194,304 elements \('a'\)",
    ),
    "long arrays": (
        header([key(f"a{n}", 9, struct.pack("<IQ", 0, 2**20) + bytes(2**20)) for n in range(5)]),
        r"more than 4,194,304 elements \('a4'\)",
    ),
    "a cut array": (header([key("a", 9, struct.pack("<IQ", 4, 1000))]), "ends within 'a'"),
    "a cut array of strings": (
        header([key("a", 9, struct.pack("<IQ", 8, 2**21))]),
        "ends within 'a'",
    ),
    "an array of arrays": (header([key("a", 9, struct.pack("<IQ", 9, 1))]), "unknown type 9"),
    "a key twice": (header([key("a", 0, b"1"), key("a", 0, b"1")]), "'a' occurs twice"),
    "alignment 0": (
        header([key("general.alignment", 4, bytes(4))], [tensor()]),
        "general.alignment is 0",
    ),
    "alignment 24": (
        header([key("general.alignment", 4, struct.pack("<I", 24))], [tensor()]),
        "alignment is 24, no power of two",
    ),
    "a large alignment": (
        header([key("general.alignment", 4, struct.pack("<I", 2**31))], [tensor()]),
        "alignment is 2147483648",
    ),
    "alignment's type": (
        header([key("general.alignment", 8, text("32"))], [tensor()]),
        "alignment is '32'",
    ),
    "no dimension": (header([], [tensor(dims=())]), "0 dimensions"),
    "five dimensions": (header([], [tensor(dims=(1,) * 5)]), "5 dimensions"),
    "many dimensions": (header([], [tensor(num_dims=2**32 - 1)]), "4294967295 dimensions"),
    "an empty dimension": (header([], [tensor(dims=(32, 0))]), r"no shape \[0, 32\]"),
    "overflow": (header([], [tensor(dims=(2**62, 2**62, 2**62, 2**62))]), "it may be truncated"),
    "overflow to nothing": (header([], [tensor(dims=(2**32, 2**32))]), "it may be truncated"),
    "an unknown type": (header([], [tensor(kind=77)]), "unknown type 77"),
    "a type that is not read": (header([], [tensor(kind=26)]), "type I32, which is not read"),
    "a removed type": (header([], [tensor(kind=4)]), "unknown type 4"),
    "half a block": (header([], [tensor(dims=(40,), kind=8)]), r"Q8_0 has no shape \[40\]"),
    "beyond the end": (header([], [tensor(dims=(2**20,))]), "it may be truncated"),
    "an offset": (header([], [tensor(offset=2**63)]), "begins at byte 9,223"),
    "an offset that wraps": (header([], [tensor(offset=2**64 - 32)]), "begins at byte 18,446"),
    "misaligned": (header([], [tensor(offset=8)]), "begins at byte 8 of the data, not 0"),
    "overlapping": (
        header([], [tensor("a"), tensor("b")]),
        "b begins at byte 0 of the data, not 128",
    ),
    "a tensor twice": (header([], [tensor("a"), tensor("a", offset=128)]), "a occurs twice"),
    "a long tensor's name": (header([], [tensor("a" * 64)]), "name of a tensor is 64"),
    "no architecture": (header([], [tensor()]), "general.architecture is ''"),
    "an odd architecture": (
        header([key("general.architecture", 9, struct.pack("<IQ", 4, 0))], [tensor()]),
        "general.architecture is ''",
    ),
    "nothing": (header([ARCHITECTURE]), "it has no tensor token_embd.weight"),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_a_file_that_lies_is_one_error(case, tmp_path, monkeypatch):
    data, why = HOSTILE[case]
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    file = tmp_path / "x.gguf"
    file.write_bytes(data if "has 0" in why or "has 5" in why else padded(data))
    if "cut" in case or "fewer" in case:
        file.write_bytes(data)
    tracemalloc.start()
    try:
        with pytest.raises(CheckpointError, match=why) as caught:
            local_folder(str(file), "speculative_config.speculative_model")
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert caught.value.field == "speculative_config.speculative_model"
    assert str(file) in caught.value.message
    assert peak < 2**27
    assert not (tmp_path / "cache").exists()


@pytest.fixture(scope="module")
def sound(tmp_path_factory) -> tuple[bytes, int]:
    """A sound file, and the length of its header."""
    file = write_gguf(DEMO, tmp_path_factory.mktemp("sound") / "x.gguf", "Q4_0")
    data = file.read_bytes()
    _, tensors = read_files([file])
    return data, min(each.offset for each in tensors.values())


EXTREMES = (0, 1, 2**8 - 1, 2**16, 2**31 - 1, 2**31, 2**32 - 1, 2**62, 2**63 - 1, 2**63, 2**64 - 1)


def mutated(data: bytes, header_bytes: int, rng: random.Random) -> bytes:
    """`data` with some changes of its header, half of which fall on its numbers and names."""
    changed = bytearray(data)
    # The lists of tokens and merges are most of the header, and one byte of them like another.
    begin, end = data.find(b"tokenizer.ggml.tokens"), data.rfind(b"tokenizer.chat_template")
    for _ in range(rng.randint(1, 4)):
        at = rng.choice(
            (
                rng.randrange(header_bytes),
                rng.randrange(24),
                rng.randrange(begin + 64),
                rng.randrange(end, header_bytes),
            )
        )
        how = rng.randrange(4)
        if how == 0:
            changed[at] ^= 1 << rng.randrange(8)
        elif how == 1:
            changed[at] = rng.randrange(256)
        elif how == 2:
            changed[at : at + 8] = struct.pack("<Q", rng.choice(EXTREMES))
        else:
            changed[at : at + 4] = struct.pack("<I", rng.choice(EXTREMES) & 0xFFFFFFFF)
    if rng.random() < 0.1:
        del changed[rng.randrange(len(changed)) :]
    return bytes(changed)


def try_all(sound, file: Path, seeds: range) -> int:
    """How many of the mutated files are refused, by the one error that is allowed."""
    refused = 0
    for seed in seeds:
        file.write_bytes(mutated(*sound, random.Random(seed)))
        try:
            read_model([file])
        except CheckpointError as error:
            assert error.message  # noqa: PT017, others pass too
            refused += 1
    return refused


def test_mutated_headers(sound, tmp_path):
    assert 90 < try_all(sound, tmp_path / "x.gguf", range(300)) < 300


@pytest.mark.slow
def test_many_mutated_headers(sound, tmp_path):
    assert try_all(sound, tmp_path / "x.gguf", range(300, 5000)) > 1500


@pytest.mark.slow
def test_mutated_files_are_unpacked_or_refused(sound, tmp_path, monkeypatch):
    """What gets past the header: the tokenizer's libraries, config.json, the weights."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    served = 0
    for seed in range(1000):
        file = tmp_path / f"{seed}.gguf"
        file.write_bytes(mutated(*sound, random.Random(seed)))
        try:
            check_weights(Path(local_folder(str(file), needs_tokenizer=True)))
            served += 1
        except CheckpointError:
            pass
        file.unlink()
    assert served > 10


VALUES = (
    *(0, -1, 1, 2**31, 2**63 - 1, 2**64 - 1, 1e30, -2.5, float("nan"), float("inf")),
    *("x", "", True, False, [1, 2], ["a", "b"], [1.5]),
)
KEYS = (
    *("general.alignment", "general.type", "general.sampling.temp", "general.sampling.top_k"),
    *("split.no", "split.count", "split.tensors.count"),
    *(f"llama.{each}" for each in ("block_count", "context_length", "embedding_length")),
    *("llama.feed_forward_length", "llama.expert_count", "llama.vocab_size"),
    *(f"llama.rope.{each}" for each in ("freq_base", "dimension_count", "scaling.type")),
    *("llama.rope.scaling.factor", "llama.attention.layer_norm_rms_epsilon"),
    *(f"llama.attention.{each}" for each in ("head_count", "head_count_kv", "key_length")),
    *(f"tokenizer.ggml.{each}" for each in ("model", "pre", "tokens", "token_type", "merges")),
    *(f"tokenizer.ggml.{each}_token_id" for each in ("bos", "eos", "eot", "padding", "unknown")),
    *(f"tokenizer.ggml.add_{each}" for each in ("bos_token", "eos_token", "space_prefix")),
    "tokenizer.chat_template",
)


@pytest.mark.slow
@pytest.mark.parametrize("name", KEYS)
def test_any_value_of_a_key_is_read_or_refused(name, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for value in VALUES:
        file = write_gguf(DEMO, tmp_path / "x.gguf", keys={name: value})
        try:
            folder = local_folder(str(file), needs_tokenizer=True)
            check_weights(Path(folder))
            config = EngineConfig.load({"model": folder})
            sampling_defaults(config)
            load_tokenizer(config)("x")
        except ConfigError:
            pass


def test_parts(tmp_path):
    whole = read_files([write_gguf(DEMO, tmp_path / "x.gguf")])[1]
    first = write_gguf(DEMO, tmp_path / "y.gguf", max_tensors=10)
    files = shards_of(first)
    assert len(files) == -(-len(whole) // 10) > 1
    assert shards_of(files[-1]) == files
    assert {name: each.shape for name, each in read_files(files)[1].items()} == {
        name: each.shape for name, each in whole.items()
    }


def test_parts_that_do_not_belong_together(tmp_path):
    first = write_gguf(DEMO, tmp_path / "y.gguf", max_tensors=7)
    files = shards_of(first)
    assert len(files) == 3
    renamed = tmp_path / "z.gguf"
    renamed.write_bytes(first.read_bytes())
    with pytest.raises(CheckpointError, match="split.no is 0 and split.count 3, .* 0 of 1"):
        read_files(shards_of(renamed))
    second = files[1].read_bytes()
    files[1].write_bytes(files[2].read_bytes())
    with pytest.raises(CheckpointError, match="00002-of-00003.* split.no is 2 .* 1 of 3"):
        read_files(files)
    files[1].write_bytes(second)
    files[2].unlink()
    with pytest.raises(CheckpointError, match="y-00003-of-00003.gguf, a part of the model, is not"):
        shards_of(first)
    files[2].write_bytes(b"GGUF")
    with pytest.raises(CheckpointError, match="00003-of-00003.gguf: it has 4 bytes"):
        read_files(files)
    nothing = tmp_path / "x-00001-of-00000.gguf"
    nothing.write_bytes(b"")
    with pytest.raises(CheckpointError, match="name is that of a part of none"):
        shards_of(nothing)
