"""`outrider explain`: steps as lines, and what follows from them."""

from __future__ import annotations

import pytest

from outrider.cli.console import Origins
from outrider.cli.explain import _tree, acceptance_by_depth, expected_tokens

LOCAL = ("--executor", "local", "--dtype", "float32", "--num-kv-blocks", 256)


def step(*guesses):
    """A draft as (parent, accepted)."""
    return {"draft": [{"parent": parent, "accepted": accepted} for parent, accepted in guesses]}


def test_acceptance_counts_what_was_reached():
    chain = step((-1, True), (0, True), (1, False), (2, False))  # the last was never reached
    tree = step((-1, False), (-1, True), (0, False), (1, False))
    assert acceptance_by_depth([chain, tree, step()]) == [1.0, 0.5, 0.0]
    assert acceptance_by_depth([step()]) == []


@pytest.mark.parametrize("rate", [0.0, 0.3, 0.8])
@pytest.mark.parametrize("length", [0, 1, 5])
def test_the_closed_form_is_a_special_case(rate, length):
    closed = (1 - rate ** (length + 1)) / (1 - rate)
    assert expected_tokens([rate] * length) == pytest.approx(closed)


def test_white_space_can_be_seen_in_a_tree():
    texts = {" ": '" "', "": '""', "  x": "  x", "\n\t": r"\n\t", "\r\xa0\x1b": r"\r\xa0\x1b"}
    draft = [{"text": each, "parent": -1, "accepted": False, "origin": "a"} for each in texts]
    assert [each.label.plain for each in _tree(draft, Origins()).children] == [*texts.values()]


def test_every_step_is_a_line(outrider_cli, model):
    args = ("def __init__(self, name):\n        self.name", "-m", model, *LOCAL)
    args += ("--max-tokens", 16, "--ignore-eos")
    adaptive = ("--spec-key", "adaptive_draft_len=true")
    shown = outrider_cli("explain", *args, "--spec-type", "ngram", *adaptive)
    assert shown.exit_code == 0, shown.stderr
    plain = outrider_cli("generate", *args, "--no-stream", "--no-stats").stdout
    lines = shown.stdout.rstrip("\n").split("\n")
    assert [int(line.split()[0]) for line in lines] == list(range(1, len(lines) + 1))
    texts = [line[6:].partition("  [")[0].partition("   ngram")[0] for line in lines]
    assert "".join(texts) == plain.rstrip("\n").replace("\n", "\\n")
    for said in ("guess 1", "tokens per step", "time of a plain step", "speed to plain", "4 nodes"):
        assert said in shown.stderr
    drawn = outrider_cli("explain", *args, "--spec-type", "ngram", "--tree", "--no-compare").stdout
    assert drawn.count("      draft\n") == sum(line.endswith("ngram") for line in lines) > 0
    assert "└── " in drawn
    alone = outrider_cli("explain", *args, "--no-compare")
    assert "speed to plain" not in alone.stderr
    assert "0 with a draft" in alone.stderr
