"""The soak's traffic and report, and a short soak of a real server."""

from __future__ import annotations

import random

import pytest

from outrider.bench.serving.demo_server import demo_server
from outrider.bench.soak.__main__ import Memory, soak
from outrider.bench.soak.traffic import KINDS, next_exchange


def test_every_kind_of_request_comes_up_and_reads_as_it_asks() -> None:
    rng = random.Random(0)
    exchanges = [next_exchange(rng) for _ in range(500)]
    assert {each.kind for each in exchanges} == set(KINDS)
    assert {each.reading for each in exchanges} == {"whole", "stream", "resumable", "slow", "abort"}
    for each in exchanges:
        assert each.body.get("stream", False) == (each.reading != "whole")
        assert each.body.get("resumable", False) == (each.reading == "resumable")


def test_growth_is_measured_from_the_end_of_the_warm_up() -> None:
    memory = Memory()
    memory._names[1] = "rank"
    memory._samples[1] = [(0.0, 10.0), (60.0, 50.0), (120.0, 50.0), (180.0, 52.0), (240.0, 54.0)]
    assert memory.rows(60.0) == [["rank", "10.0", "50.0", "54.0", "4.0", "+1.40"]]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_short_soak(capsys: pytest.CaptureFixture[str]) -> None:
    with demo_server({"resources": {"spare_workers": False}}) as server:
        assert soak(server, 20.0, 4, 0), capsys.readouterr().out
    assert " 0 unexpected answers, 0 KV blocks held" in capsys.readouterr().out
