"""The proof's report survives whatever its parts do; a dry run executes every part."""

from __future__ import annotations

import json
import sys

import pytest

from outrider.bench.gpu.proof import PARTS, ProofOptions, failed, prove

# Stands in for a part's process: the cases of `checks` raise, end the process or hang.
FAKE = """
import json, os, sys, time
part, skip = sys.argv[1], int(sys.argv[2])
def say(**message): print("@proof " + json.dumps(message), flush=True)
cases = {"machine": ["good"], "checks": ["wrong", "raises", "dies", "lost", "last"]}
print("a library's line")
for name in cases.get(part, ["slow"])[skip:]:
    say(begin=name)
    if name == "dies":
        sys.exit("illegal address")
    if name == "slow":
        time.sleep(600)
    say(row={"error": "of a kernel"} if name in ("raises", "lost") else {"passed": name != "wrong"})
    if name == "lost":
        sys.exit("the device is not usable")
say(end=True)
"""


def run(tmp_path, minutes, **options):
    shown = []
    report = prove(
        ProofOptions(tmp_path, minutes=minutes, **options), shown.append,
        (sys.executable, "-c", FAKE),
    )  # fmt: skip
    return report, shown


def test_a_part_goes_on_behind_what_ends_its_process(tmp_path):
    report, shown = run(tmp_path, 5, parts=("machine", "checks"))
    rows = report["parts"]["checks"]
    assert [row["case"] for row in rows] == ["wrong", "raises", "dies", "lost", "last"]
    assert [failed(row) for row in rows] == [True, True, True, True, False]
    assert "illegal address" in rows[2]["error"]
    assert shown[0] == "machine: good: ok"
    assert json.loads((tmp_path / "proof.json").read_text()) == report
    page = (tmp_path / "proof.md").read_text()
    assert "4 of 6 cases failed" in page
    assert "- checks, dies: the process ended: illegal address" in page


def test_a_run_that_is_cut_off_keeps_what_it_found(tmp_path):
    report, _ = run(tmp_path, 0.05, parts=("machine", "timings", "steps"))
    assert [row["case"] for row in report["parts"]["machine"]] == ["good"]
    assert "'timings'" in report["cut_off"]
    assert "steps" not in report["parts"]
    assert "Cut off after 0.05 minutes" in (tmp_path / "proof.md").read_text()


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_dry_run(tmp_path):
    """The GPU's kernels and every line but CUDA's own, in processes that interpret them."""
    pytest.importorskip("triton")
    report = prove(ProofOptions(tmp_path, minutes=25, is_dry=True), lambda _: None)
    assert not report["cut_off"]
    assert list(report["parts"]) == [part.name for part in PARTS]
    for name, rows in report["parts"].items():
        assert rows, name
        assert not [row for row in rows if failed(row)], rows
    (device, *_) = report["parts"]["machine"]
    assert device["operations"] == "triton"
