"""`outrider key new`, and the options of `serve` on who may use it."""

from __future__ import annotations

import pytest
import yaml

from outrider.cli.serve import AccessOptions
from outrider.cluster.serve.access.access import Access
from outrider.cluster.serve.args import read_args
from outrider.errors import AuthenticationError, ConfigError


def test_a_new_key_opens_what_its_line_is_put_into(outrider_cli, tmp_path):
    result = outrider_cli("key", "new", "--tenant", "alice", "--tokens-per-minute", "500")
    key, line = result.stdout.splitlines()
    admin_key, admin_line = outrider_cli("key", "new", "--admin").stdout.splitlines()
    assert key not in line
    assert key != admin_key
    file = tmp_path / "keys.yaml"
    file.write_text(f"keys:\n{line}\nadmin_keys:\n{admin_line}\n")
    section, own = AccessOptions(keys_file=file).apply(read_args({"model": "m"})[1])
    access = Access(section.access)
    identity = access.identify(f"Bearer {key}")
    assert (identity.tenant, identity.is_admin) == ("alice", False)
    assert identity.key.tokens_per_minute == 500
    for each in (admin_key, own):
        assert access.identify(f"Bearer {each}").is_admin
    assert outrider_cli("key", "new", "--admin", "--tenant", "x").stderr.startswith("error: tenant")


def test_one_key_as_an_option_or_a_variable(monkeypatch):
    section = read_args({"model": "m"})[1]
    assert AccessOptions().apply(section) == (section, None)
    given, own = AccessOptions(api_key=["secret-1", "secret-2"]).apply(section)
    assert own is not None
    for secret in ("secret-1", own):
        assert secret not in given.model_dump_json()
    access = Access(given.access)
    assert access.identify("bearer secret-2").tenant == "default"
    with pytest.raises(AuthenticationError):
        access.identify("Bearer secret")
    with pytest.raises(ConfigError, match="api_key"):
        AccessOptions(api_key=[""]).apply(section)


def test_who_may_operate_a_server_of_the_command() -> None:
    """One key alone monitors, although the command has a key of its own; several do not."""
    section = read_args({"model": "m"})[1]

    def rights(key: str, **options: list[str]) -> tuple[bool, bool]:
        given, own = AccessOptions(**options).apply(section)
        access = Access(given.access)
        assert access.identify(f"Bearer {own}").is_admin
        found = access.identify(f"Bearer {key}")
        return found.is_admin, found.may_monitor

    assert rights("a", api_key=["a"]) == (False, True)
    assert rights("a", api_key=["a", "b"]) == (False, False)
    assert rights("a", api_key=["a"], admin_key=["c"]) == (False, False)
    assert rights("c", api_key=["a"], admin_key=["c"]) == (True, True)
    assert rights("c", admin_key=["c"]) == (True, True)
    for field, keys in (("admin_key: it is empty", [""]), ("admin_key: it is also", ["a"])):
        with pytest.raises(ConfigError, match=field):
            AccessOptions(api_key=["a"], admin_key=keys).apply(section)


@pytest.mark.parametrize(
    ("text", "field"),
    [
        ("- a", "access.keys_file"),
        ("keys: [{hash: md5:00}]", "keys.0.hash"),
        ("key: []", "key"),
        (yaml.dump({"admin_keys": ["sha256:" + "0" * 64] * 2}), "admin_keys"),
        (yaml.dump({"keys": [{"hash": "sha256:" + "0" * 64, "tokens": 3}]}), "keys.0.tokens"),
    ],
)
def test_a_wrong_file_of_keys_is_named(outrider_cli, model, tmp_path, text, field):
    file = tmp_path / "keys.yaml"
    for path in (tmp_path, tmp_path / "none"):
        result = outrider_cli("serve", model, "--keys-file", path)
        assert result.exit_code == 1
        assert result.stderr.startswith("error: access.keys_file: cannot read")
    file.write_text(text)
    result = outrider_cli("serve", model, "--keys-file", file)
    assert result.stderr.startswith(f"error: {field}"), result.stderr
