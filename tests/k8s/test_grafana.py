"""The Grafana dashboard asks for metrics that a server exports, with labels that they have."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

import outrider
from outrider.cluster.serve.metrics import EdgeMetrics, Stopwatch, exposition
from outrider.scheduler.types import RequestTimes

from ..helpers.engines import complete, engine_of, random_prompts

K8S = Path(outrider.__file__).parent / "k8s"
FILE = K8S / "components" / "grafana-dashboard" / "outrider.json"
METRIC = re.compile(r"outrider:\w+")
SELECTED = re.compile(r"(outrider:\w+)\{([^}]*)\}")
LABELS = re.compile(r"(?:by|on|ignoring) \(([^)]*)\)")


def panels() -> list[dict[str, Any]]:
    return [each for each in json.loads(FILE.read_text())["panels"] if each["type"] != "row"]


def expressions() -> list[str]:
    return [target["expr"] for panel in panels() for target in panel["targets"]]


@pytest.fixture(scope="module")
def exported(tiny: Any) -> dict[str, set[str]]:
    """Labels of every sample of a scrape after a few requests."""
    edge = EdgeMetrics("tiny")
    edge.started(3)
    times = Stopwatch(edge)
    times.before_first(RequestTimes(0.1, 0.2))
    for _ in range(2):
        times.tokens(2)
    times.finished("stop")
    with engine_of(tiny.target, {"decoding_type": "NGram", "max_draft_len": 4}) as engine:
        complete(engine, random_prompts(8, 96))
        text = exposition(edge.families(), {"tiny": {"local": engine.stats()}}).decode()
    found: dict[str, set[str]] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            found.setdefault(sample.name, set()).update(sample.labels)
    return found


def test_every_metric_is_exported_with_its_labels(exported: dict[str, set[str]]) -> None:
    for expression in expressions():
        names = METRIC.findall(expression)
        assert names, expression
        assert set(names) <= set(exported), expression
        for name, selectors in SELECTED.findall(expression):
            used = {label.split("=")[0].rstrip("!~") for label in selectors.split(",")}
            assert used <= exported[name], expression
        every = set.union(*(exported[name] for name in names))
        for labels in LABELS.findall(expression):
            assert set(labels.split(", ")) <= every, expression


def test_the_dashboard_covers_what_is_exported(exported: dict[str, set[str]]) -> None:
    """A metric that nothing shows is either missing here, or of no use; vLLM's names have panels
    of their own.
    """
    shown = set(METRIC.findall(" ".join(expressions())))
    own = [name for name in exported if not name.startswith("vllm:")]
    families = {re.sub(r"_(total|bucket|sum|count)$", "", name) for name in own}
    missing = {name for name in families if not any(each.startswith(name) for each in shown)}
    assert missing <= {
        "outrider:engine_prompt_tokens",  # as at the edge
        "outrider:requests_finished",  # request_success has the reason too
        "outrider:spec_decode_num_accepted_drafts",
    }


ONCE = "max without (instance, pod, job) ("


def test_what_several_ingresses_report_counts_once() -> None:
    """Each has the figures of all engines: a sum over the scraped pods would multiply them."""
    for expression in expressions():
        for before, function in re.findall(r"(.{34})((?:rate|increase)\()?outrider:", expression):
            assert (before + function).removesuffix(function).endswith(ONCE), expression
        assert expression.count(ONCE) == len(METRIC.findall(expression)), expression


def test_panels_do_not_overlap_and_have_their_own_ids() -> None:
    every = json.loads(FILE.read_text())["panels"]
    assert len({panel["id"] for panel in every}) == len(every)
    taken: set[tuple[int, int]] = set()
    for panel in every:
        place = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not cells & taken, panel["title"]
        assert max(x for x, _ in cells) < 24
        taken |= cells
