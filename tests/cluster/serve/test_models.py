"""How Serve deploys the engines of a model."""

from __future__ import annotations

import pytest

from outrider.cluster.serve.args import DeploymentConfig
from outrider.cluster.serve.models import ServedModel
from outrider.config import EngineConfig


@pytest.mark.parametrize(("num_running", "num_waiting"), [(2, 1), (64, 1024)])
def test_a_full_engine_has_room_for_questions(num_running: int, num_waiting: int) -> None:
    """Health and statistics count in Serve's limit; an engine refuses requests before it."""
    settings = {
        "model": "m",
        "max_num_seqs": num_running,
        "max_queued_requests": num_waiting,
    }
    model = ServedModel(EngineConfig.load(settings), DeploymentConfig())
    assert model.serve_options()["max_ongoing_requests"] > num_running + num_waiting + 16


def test_engines_to_come_share_what_waits() -> None:
    deployment = DeploymentConfig(num_replicas="auto")
    model = ServedModel(EngineConfig.load({"model": "m", "max_num_seqs": 8}), deployment)
    assert model.serve_options()["max_ongoing_requests"] == 16


def test_a_limit_that_is_set_is_kept() -> None:
    model = ServedModel(EngineConfig.load({"model": "m"}), DeploymentConfig(max_ongoing_requests=5))
    assert model.serve_options()["max_ongoing_requests"] == 5
