"""Models by their ids, from a stand-in for the Hub: fetched once, resumed, timeouts in words."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from huggingface_hub import constants, file_download
from huggingface_hub.utils import _http

from outrider import LLM, SamplingParams
from outrider.errors import CheckpointError
from outrider.tests.helpers import hub as stand_in
from outrider.tests.helpers.hub import COMMIT, Hub
from outrider.workers.model.checkpoint import progress
from outrider.workers.model.checkpoint.hub import local_folder

DEMO = Path(__file__).resolve().parents[2] / "demo" / "models"
WEIGHTS = "model.safetensors"


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """The demo's models as `acme/target` and `acme/draft`, and an empty cache."""
    with stand_in.serving({f"acme/{name}": DEMO / name for name in ("target", "draft")}) as served:
        template = served.url + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(constants, "ENDPOINT", served.url)
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
        yield served


def fetched(hub: Hub) -> list[str]:
    return [path.rpartition("/")[2] for method, path, _ in hub.asked if method == "GET"]


def test_a_model_and_its_draft_model_are_fetched_once(hub: Hub, monkeypatch) -> None:
    section = {"decoding_type": "DraftTarget", "speculative_model": "acme/draft@main"}
    options = {"executor": "local", "num_kv_blocks": 64, "device": "cpu", "dtype": "float32"}
    params = SamplingParams(temperature=0, max_tokens=8)

    def text(model: str, **more: object) -> str:
        with LLM(model, **options, **more) as llm:
            return llm.generate("def main(", params, use_tqdm=False)[0].outputs[0].text

    found = text("acme/target", speculative_config=section)
    assert found == text(str(DEMO / "target"))
    assert fetched(hub).count(WEIGHTS) == 2, "of either model"
    hub.asked.clear()
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert text("acme/target", speculative_config=section) == found
    assert hub.asked == []


def test_a_download_that_breaks_off_is_resumed(hub: Hub, monkeypatch) -> None:
    monkeypatch.setattr(constants, "DOWNLOAD_CHUNK_SIZE", 100_000)
    hub.cut_after = 1_000_000
    folder = Path(local_folder("acme/target"))
    assert folder.name == COMMIT
    assert (folder / WEIGHTS).read_bytes() == (DEMO / "target" / WEIGHTS).read_bytes()
    ranges = [where for _, path, where in hub.asked if path.endswith(WEIGHTS) and where]
    assert ranges
    assert all(100_000 <= int(each[6:-1]) <= 1_000_000 for each in ranges), ranges
    hub.status = 503  # what is whole in the cache is served from there
    assert local_folder("acme/target") == str(folder)


def test_a_download_is_told_in_lines_without_a_terminal(hub: Hub, monkeypatch, caplog) -> None:
    """And counted where somebody looks; of what is in the cache there is nothing to tell."""
    for name, seconds in (("_POLL_S", 0.01), ("_FIRST_S", 0.1), ("_EVERY_S", 0.1)):
        monkeypatch.setattr(progress, name, seconds)
    monkeypatch.setattr(constants, "DOWNLOAD_CHUNK_SIZE", 2**16)
    sizes = {name: sum(file.stat().st_size for file in (DEMO / name).iterdir() if read(file))
             for name in ("target", "draft")}  # fmt: skip
    hub.bytes_per_s = sizes["target"] / 1.5
    local_folder("acme/target")
    lines = [each for each in caplog.records if each.name == progress.LOGGER]
    assert len(lines) > 2
    for line in lines:
        assert line.levelno == logging.INFO
        assert re.fullmatch(
            rf"acme/target: weights: [\d.]+ of {sizes['target'] / 2**20:,.1f} MiB fetched, "
            r"[\d.]+ MiB/s(, about \d+ s left)?",
            line.message,
        )
    caplog.clear()
    counted = progress.Progress()
    hub.bytes_per_s = None
    local_folder("acme/draft", progress=counted)
    assert counted.amount == progress.Amount("fetched", sizes["draft"], sizes["draft"])
    counted = progress.Progress()
    local_folder("acme/draft", progress=counted)
    local_folder("acme/target")
    assert counted.amount == progress.Amount()
    assert not [each for each in caplog.records if each.name == progress.LOGGER]


def read(file: Path) -> bool:
    """Whether a model's file is one of those that are fetched."""
    return file.suffix in (".json", ".safetensors", ".jinja", ".txt", ".model")


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("acme/none", "is no repository on {hub}, or a private one: set HF_TOKEN"),
        ("acme/target@v9", "has no such revision"),
    ],
)
def test_what_the_hub_does_not_have(hub: Hub, source: str, message: str) -> None:
    host = hub.url.partition("://")[2]
    with pytest.raises(CheckpointError, match=message.format(hub=host)) as error:
        local_folder(source, "speculative_config.speculative_model")
    assert error.value.field == "speculative_config.speculative_model"


def test_a_hub_that_does_not_answer(hub: Hub, monkeypatch) -> None:
    """Nor does one that fails; what is in the cache is served all the same."""
    for module in (_http, file_download):  # before they try again
        monkeypatch.setattr(module, "time", SimpleNamespace(sleep=lambda wait_s: None))
    hub.status = 500
    with pytest.raises(CheckpointError, match="neither a folder here nor whole in the cache"):
        local_folder("acme/target")
    hub.status = None
    folder = local_folder("acme/draft")
    for name in ("HF_HUB_ETAG_TIMEOUT", "HF_HUB_DOWNLOAD_TIMEOUT"):
        monkeypatch.setattr(constants, name, 0.05)
    hub.delay_s = 0.2
    assert local_folder("acme/draft") == folder
    with pytest.raises(CheckpointError, match=f"{hub.url.partition('://')[2]} cannot be reached"):
        local_folder("acme/target")
