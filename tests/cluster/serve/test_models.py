"""How Serve deploys the engines of a model."""

from __future__ import annotations

import pytest

from outrider.cluster.serve.args import DeploymentConfig
from outrider.cluster.serve.models import ServedModel
from outrider.config import EngineConfig


@pytest.mark.parametrize(("num_running", "num_waiting"), [(2, 1), (64, 1024)])
def test_an_engine_refuses_requests_itself(num_running: int, num_waiting: int) -> None:
    """So that requests wait in one queue, by priority and tenant; ingresses hold none back."""
    settings = {
        "model": "m",
        "max_num_seqs": num_running,
        "max_queued_requests": num_waiting,
    }
    model = ServedModel(EngineConfig.load(settings), DeploymentConfig())
    assert model.max_each is None
    assert model.max_waiting == num_waiting


def test_engines_to_come_share_what_waits() -> None:
    deployment = DeploymentConfig(num_replicas="auto")
    model = ServedModel(EngineConfig.load({"model": "m", "max_num_seqs": 8}), deployment)
    assert model.max_each == 16


def test_a_limit_that_is_set_is_kept() -> None:
    model = ServedModel(EngineConfig.load({"model": "m"}), DeploymentConfig(max_ongoing_requests=5))
    assert model.max_each == 5


@pytest.mark.parametrize(("queued", "waiting"), [(None, 7), (0, 0), (3, 3), (-1, -1)])
def test_requests_that_wait_in_an_ingress_have_a_bound(queued: int | None, waiting: int) -> None:
    config = EngineConfig.load({"model": "m", "max_queued_requests": 7})
    model = ServedModel(config, DeploymentConfig(max_queued_requests=queued))
    assert model.max_waiting == waiting
