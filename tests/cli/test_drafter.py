"""`outrider drafter`: mistakes by the name of their option, and a group from start to end."""

from __future__ import annotations

import pytest

from ..helpers.head_files import medusa_tensors, write_medusa
from ..helpers.ports import wait_for


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--members", "2"), "error: name: give the group a --name"),
        (("--stop",), "error: name: give the group a --name"),
        (("--name", "a b"), "error: name: 'a b'"),
        (("m", "--name", "a", "--stop"), "error: stop: it ends a group that runs"),
        (("--name", "a", "--stop", "--members", "2"), "error: members: --stop ends all of them"),
        (("--max-members", "2"), "error: name: give the group a --name"),
        (("--name", "a", "--members", "2", "--max-members", "2"), "error: members: it fixes"),
        (("--name", "a", "--min-members", "2"), "error: max_members: this key is required"),
        (
            ("--name", "a", "--min-members", "3", "--max-members", "2"),
            "error: min_members (3) must not exceed max_members (2)",
        ),
        (
            ("--name", "a", "--max-engines", "2"),
            "error: max_engines: it is chosen as a group starts",
        ),
        (("", "--name", "a"), "error: model: the name is empty"),
        (("--name", "a", "--detach"), "error: detach: it is chosen as a group starts"),
        (("--name", "a", "--dtype", "float32"), "error: dtype: it is chosen as a group starts"),
        (("--name", "a", "--address", "local"), "error: address: drafter groups live in a Ray"),
    ],
)
def test_mistakes(outrider_cli, arguments, message):
    result = outrider_cli("drafter", *arguments)
    assert result.exit_code == 1
    assert result.stderr.startswith(message)


@pytest.mark.ray
@pytest.mark.slow
def test_a_group_is_started_listed_scaled_and_ended(outrider_cli, model, tmp_path):
    ray = pytest.importorskip("ray")
    ray.init("local", num_cpus=4, include_dashboard=False, log_to_driver=False)
    try:
        assert outrider_cli("drafter").stdout == ""
        result = outrider_cli("drafter", model, "--name", "small", "--detach")
        assert result.exit_code == 0, result.stderr
        wait_for(lambda: "1 of 1 members up" in outrider_cli("drafter").stdout, 120)
        head = write_medusa(tmp_path / "head", medusa_tensors(str(model), 2), "safetensors")
        for arguments, message in (
            ((model, "--name", "small"), "name: there is a drafter group 'small' already"),
            (("/nowhere", "--name", "new"), "model path '/nowhere' does not exist"),
            ((head, "--name", "new"), "model: "),
        ):
            result = outrider_cli("drafter", *arguments, "--detach")
            assert result.exit_code == 1
            assert result.stderr.startswith(f"error: {message}"), result.stderr
            assert result.stderr.count("\n") == 1, result.stderr
        assert outrider_cli("drafter").stdout.count("\n") == 1  # none was started
        result = outrider_cli("drafter", "--name", "small", "--members", "0")
        assert "small: " in result.stdout
        assert "0 of 0 members up" in result.stdout
        limits = ("--max-members", "4", "--target-ongoing-requests", "2")
        result = outrider_cli("drafter", "--name", "small", *limits)
        assert "0 of 1 members up (1 to 4 by load)" in result.stdout, result.stdout
        result = outrider_cli("drafter", "--name", "other", "--members", "2")
        assert result.stderr.startswith("error: name: there is no drafter group 'other'")
        assert "has ended" in outrider_cli("drafter", "--name", "small", "--stop").stderr
        assert outrider_cli("drafter").stdout == ""
    finally:
        ray.shutdown()
