"""Checkpoints by addresses in object storage: fetched once, resumed, the same on all nodes."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from outrider import LLM, SamplingParams
from outrider.config import EagleConfig, parse
from outrider.errors import CheckpointError
from outrider.workers.model.checkpoint import storage
from outrider.workers.model.checkpoint.hub import local_folder
from outrider.workers.spec import on_this_node

DEMO = Path(__file__).resolve().parents[4] / "demo" / "models"
FILES = {"config.json": b"{}", "model.safetensors": bytes(range(256)) * 40, "empty.txt": b""}


class Bucket(MemoryFileSystem):
    """Objects in memory, with faults on demand."""

    protocol = "bucket"
    store: dict[str, Any] = {}
    pseudo_dirs = [""]
    asked: list[tuple[str, int]] = []
    faults: dict[int, BaseException | int] = {}
    down: BaseException | None = None

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return MemoryFileSystem._strip_protocol(path.removeprefix("bucket://"))

    def ls(self, path: str, detail: bool = True, **kwargs: Any) -> Any:
        if self.down is not None:
            raise self.down
        return super().ls(path, detail=detail, **kwargs)

    def cat_file(self, path: str, start: Any = None, end: Any = None, **kwargs: Any) -> bytes:
        self.asked.append((path.rpartition("/")[2], start))
        fault = self.faults.get(start)
        if isinstance(fault, BaseException):
            raise fault
        return super().cat_file(path, start=start, end=end if fault is None else start + fault)


@pytest.fixture(autouse=True)
def bucket(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Bucket]:
    """`bucket://models/small`, and an empty cache."""
    fsspec.register_implementation("bucket", Bucket, clobber=True)
    system = fsspec.filesystem("bucket", skip_instance_cache=True)
    for name, data in {**FILES, "notes.md": b"not read", "weights.bin": b"nor this"}.items():
        system.pipe_file(f"/models/small/{name}", data)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(storage, "_PIECE", 1000)
    monkeypatch.setattr(storage, "_PAUSE_S", 0.0)
    yield system
    Bucket.store.clear()
    Bucket.asked.clear()
    Bucket.faults.clear()
    Bucket.down = None


def names(folder: str) -> dict[str, bytes]:
    return {each.name: each.read_bytes() for each in Path(folder).iterdir() if each.name[0] != "."}


def test_what_a_model_needs_is_fetched_once(bucket: Bucket) -> None:
    folder = local_folder("bucket://models/small")
    assert names(folder) == FILES
    assert [start for name, start in sorted(bucket.asked) if "model" in name] == [
        *range(0, 10_240, 1000)
    ]
    bucket.asked.clear()
    for again in ("bucket://models/small/", "bucket:/models/small", folder):
        assert local_folder(again) == folder
    assert not bucket.asked
    bucket.pipe_file("/models/small/model.safetensors", b"other weights")
    other = local_folder("bucket://models/small")
    assert names(other)["model.safetensors"] == b"other weights"
    assert names(folder) == FILES, "an engine that serves the former ones keeps them"


@pytest.mark.parametrize("fault", [ConnectionResetError("cut"), 300], ids=["error", "short"])
def test_a_transfer_that_breaks_off_goes_on_where_it_ended(bucket: Bucket, fault: Any) -> None:
    bucket.faults[5000] = fault
    with pytest.raises(CheckpointError, match=r"model.safetensors cannot be read from byte 5000"):
        local_folder("bucket://models/small", "tokenizer")
    assert bucket.asked.count(("model.safetensors", 5000)) == 4
    bucket.faults.clear()
    bucket.asked.clear()
    assert names(local_folder("bucket://models/small")) == FILES
    assert min(start for name, start in bucket.asked if "model" in name) == 5000


def test_another_node_fetches_the_same_version(bucket: Bucket, tmp_path: Path) -> None:
    folder = local_folder("bucket://models/small")
    (Path(folder) / "config.json").unlink()  # a copy that is not whole is not served
    assert local_folder(folder) == folder
    assert names(folder) == FILES
    shutil.rmtree(tmp_path / "cache")
    head = parse(EagleConfig, {"speculative_model": folder})
    assert on_this_node(head, allow_pickle=False).speculative_model == folder
    assert names(folder) == FILES
    shutil.rmtree(tmp_path / "cache")
    bucket.pipe_file("/models/small/config.json", b"[]")
    with pytest.raises(CheckpointError, match="has changed since the engine's node read it"):
        local_folder(folder)


def test_what_may_be_read_is_fetched_beside_what_is_there(bucket: Bucket) -> None:
    """The version does not depend on it: nodes agree, whatever else a reader may do."""
    bucket.pipe_file("/models/small/modeling.py", b"code")
    folder = local_folder("bucket://models/small")
    assert names(folder) == FILES
    bucket.asked.clear()
    assert local_folder("bucket://models/small", trust_remote_code=True) == folder
    assert local_folder(folder, allow_pickle=True) == folder
    assert {name for name, _ in bucket.asked} == {"modeling.py"}
    Bucket.down = TimeoutError("no answer")
    assert local_folder(folder) == local_folder("bucket://models/small") == folder


def test_a_file_s_address_is_its_path(tmp_path: Path) -> None:
    assert local_folder(f"file://{tmp_path}") == str(tmp_path)


def test_a_copy_serves_where_the_storage_does_not_answer(bucket: Bucket) -> None:
    Bucket.down = TimeoutError("no answer")
    with pytest.raises(CheckpointError, match=r"'bucket://models/small' cannot.*TimeoutError: no"):
        local_folder("bucket://models/small")
    Bucket.down = None
    folder = local_folder("bucket://models/small")
    Bucket.down = TimeoutError("no answer")
    assert local_folder("bucket://models/small") == folder
    Bucket.down = PermissionError("denied")
    with pytest.raises(CheckpointError, match="denied"):
        local_folder("bucket://models/small")


@pytest.mark.parametrize(
    ("address", "message"),
    [
        ("bucket://models/none", "cannot be read: there is no such model"),
        ("bucket://models/none.gguf", "there is no such model"),
        ("bucket://models/../../etc", "a path without"),
        ("warehouse://models/small", "Protocol not known: warehouse"),
        ("wandb://models/small", "wandb"),
    ],
)
def test_what_cannot_be_read(address: str, message: str) -> None:
    with pytest.raises(CheckpointError, match=message) as error:
        local_folder(address, "speculative_config.speculative_model")
    assert error.value.field == "speculative_config.speculative_model"


class Ranges(SimpleHTTPRequestHandler):
    """Files and lists of folders over HTTP, with ranges."""

    def do_GET(self) -> None:
        file = Path(self.translate_path(self.path))
        asked = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers["Range"] or "")
        if not file.is_file() or asked is None:
            return super().do_GET()
        body = file.read_bytes()[int(asked[1]) : int(asked[2]) + 1]
        self.send_response(206)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
        return None

    def log_message(self, *_: Any) -> None:
        """Nothing."""


def test_a_target_and_its_draft_model_over_http(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(storage, "_PIECE", 1 << 20)
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Ranges, directory=str(DEMO)))
    Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    base = f"http://127.0.0.1:{server.server_address[1]}"
    section = {"decoding_type": "DraftTarget", "speculative_model": f"{base}/draft"}
    options = {"executor": "local", "num_kv_blocks": 64, "device": "cpu", "dtype": "float32"}
    params = SamplingParams(temperature=0, max_tokens=8)
    try:
        with LLM(f"{base}/target", speculative_config=section, **options) as llm:
            found = llm.generate("def main(", params, use_tqdm=False)[0].outputs[0]
    finally:
        server.shutdown()
        server.server_close()
    with LLM(str(DEMO / "target"), **options) as llm:
        wanted = llm.generate("def main(", params, use_tqdm=False)[0].outputs[0]
    assert found.text == wanted.text
