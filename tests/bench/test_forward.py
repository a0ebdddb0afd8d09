"""`bench.forward` prints a row per size, and names what is wrong before it loads anything."""

from __future__ import annotations

import pytest

from outrider.bench import forward


def test_a_row_for_every_size(capsys) -> None:
    forward.main(["--dtype", "float32", "--tokens", "1", "3", "--context", "20", "--rounds", "1"])
    table = [
        line.split(" | ") for line in capsys.readouterr().out.splitlines() if "| float" in line
    ]
    assert [row[1:3] for row in table] == [["20", "1"], ["20", "3"]]
    assert all(float(cell.split()[0]) > 0 for row in table for cell in row[3:6])
    assert table[0][-1].strip(" |") == "1.00"
    forward.main(["--dtype", "float32", "--prompts", "3", "--rounds", "1", "--deterministic"])
    out = capsys.readouterr().out
    heads, row = (out.splitlines()[at].strip("| ").split(" | ") for at in (2, -1))
    assert dict(zip(heads, row, strict=True))["/ one token"] == "-", "no token alone to compare"
    assert float(row[heads.index("deterministic / family")]) > 0


def test_bytes_of_allocated_pools(capsys) -> None:
    forward.main(["--dtype", "float32", "bfloat16", "--pools"])
    wide, narrow = [line.split(" | ")[1:3] for line in capsys.readouterr().out.splitlines()[2:]]
    assert wide[0] == wide[1]
    assert narrow[0] == narrow[1], "one form of keys and values"
    assert int(wide[0].replace(",", "")) == 2 * int(narrow[0].replace(",", ""))


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--model", "/nowhere"], "'/nowhere' does not exist"),
        (["--tokens", "0"], "--tokens"),
        (["--context", "-1"], "--context"),
    ],
)
def test_wrong_arguments(capsys, arguments, named) -> None:
    with pytest.raises(SystemExit):
        forward.main(arguments)
    assert named in capsys.readouterr().err
