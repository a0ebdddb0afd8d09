"""Text that is no configuration is an error that names the key, never a traceback."""

from __future__ import annotations

import pytest

from outrider.config import EngineConfig
from outrider.config.strict import read_json, read_yaml
from outrider.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "hint"),
    [
        ("a: 1\nb: 2\na: 3\n", "key 'a' is given twice"),
        ("s:\n  x: 1\n  x: 1\n", "key 'x' is given twice"),
        ("a: " + "[" * 5000, "nested too deep"),
        ("a: 2001-99-99\n", "not YAML"),
        ("a: [1\n", "not YAML"),
        ("? [a, b]\n: 1\n", "not YAML"),
        ("{? {a: 1} : 1}\n", "not YAML"),
        ("a: &a {b: [1, *a]}\n", "an alias of a part within that part"),
    ],
)
def test_yaml_that_is_refused(text, hint):
    with pytest.raises(ConfigError, match=f"(?s)^config: .*{hint}") as caught:
        read_yaml(text, "config", "file.yaml")
    assert caught.value.field == "config"


def test_aliases_of_aliases_are_read_at_once():
    text = "a0: &a0 [1]\n" + "".join(
        f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]\n" for n in range(1, 20)
    )
    assert len(read_yaml(text, "config", "file.yaml")["a19"]) == 9


def test_yaml_with_merges_is_read():
    text = "base: &b {x: 1}\none: {<<: *b, y: 2}\ntwo: {<<: *b, x: 3}\n"
    data = read_yaml(text, "config", "file.yaml")
    assert (data["one"], data["two"]) == ({"x": 1, "y": 2}, {"x": 3})


@pytest.mark.parametrize(
    ("text", "hint"),
    [
        ('{"a": 1, "a": 2}', "key 'a' is given twice"),
        ("[" * 100_000, "nested too deep"),
        ('{"a"', "not JSON"),
    ],
)
def test_json_that_is_refused(text, hint):
    with pytest.raises(ConfigError, match=f"^section: .*{hint}"):
        read_json(text, "section")


def test_a_misspelt_required_key_is_suggested():
    with pytest.raises(ConfigError, match="modle: unknown key; did you mean 'model'"):
        EngineConfig.load({"modle": "m"})
    with pytest.raises(ConfigError, match="model: this key is required"):
        EngineConfig.load({"something": 1})
