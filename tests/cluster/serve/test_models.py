"""How many requests an engine of a model gets, and how Serve counts its engines."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from outrider.cluster.serve.args import LOAD, DeploymentConfig, by_load
from outrider.cluster.serve.models import ServedModel
from outrider.config import EngineConfig


def served(**deployment: Any) -> ServedModel:
    config = EngineConfig.load({"model": "m", "max_num_seqs": 8, "max_queued_requests": 100})
    return ServedModel(config, DeploymentConfig(**deployment))


@pytest.mark.parametrize(
    ("deployment", "max_each", "max_waiting"),
    [
        ({}, None, 100),  # an engine refuses what its own queue cannot hold
        ({"num_replicas": 3, "max_queued_requests": 7}, None, 7),
        ({"num_replicas": "auto"}, 16, 100),  # engines to come share what waits
        ({"autoscaling_config": {"max_replicas": 2}, "max_queued_requests": -1}, 16, -1),
        ({"max_ongoing_requests": 5}, 5, 100),
        ({"num_replicas": "auto", "max_ongoing_requests": 5}, 5, 100),
    ],
)
def test_limits(deployment: dict[str, Any], max_each: int | None, max_waiting: int) -> None:
    model = served(**deployment)
    assert (model.max_each, model.max_waiting) == (max_each, max_waiting)


def test_engines_are_as_many_as_the_requests_need() -> None:
    """Those that engines have and those that wait; Serve's own count of its calls is no matter."""

    def wanted(**loads: float) -> float:
        context = SimpleNamespace(
            aggregated_metrics={LOAD: loads} if loads else {},
            target_num_replicas=3,
            config=SimpleNamespace(get_target_ongoing_requests=lambda: 8),
        )
        return by_load(context)[0]

    assert wanted(a=16.0, b=4.0) == 2.5
    assert wanted(a=0.0) == 0
    assert wanted() == 3, "nothing is known yet"
