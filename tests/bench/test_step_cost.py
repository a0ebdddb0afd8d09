"""The benchmark of a step beside the forward runs both paths, and names bad options."""

from __future__ import annotations

import pytest

from outrider.bench.micro import step_cost


def test_rows_of_a_run(capsys):
    step_cost.main(["--batch", "2", "--tp", "1", "2", "--steps", "3"])
    rows = [line.split("|")[1:-1] for line in capsys.readouterr().out.splitlines()[2:]]
    assert [row[:2] for row in rows] == [[" 2 ", " 1 "], [" 2 ", " 2 "]]
    one, two = ([float(cell) for cell in row[2:]] for row in rows)
    assert 0 < one[3] < one[0] < 2048
    assert two[3] == pytest.approx(2 * one[3], abs=2)


def test_bad_options_are_named(capsys):
    with pytest.raises(SystemExit):
        step_cost.main(["--steps", "0"])
    assert "--steps" in capsys.readouterr().err
