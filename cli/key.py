"""`outrider key`: creates API keys, and prints the configuration lines with their hashes."""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer

from ..config.access import KeyConfig
from ..config.strict import parse
from ..errors import ConfigError
from .console import Command, note, say
from .options import expand, options_of

_FIELDS = (
    "tenant", "name", "requests_per_minute", "tokens_per_minute", "max_concurrent_requests",
    "max_request_tokens",
)  # fmt: skip
_KeyFields: Any = options_of(KeyConfig, "Key", _FIELDS)
app = typer.Typer(help="API keys.", no_args_is_help=True)


class KeyOptions(_KeyFields):
    """The key's tenant and limits."""


@app.callback()
def key() -> None:
    """API keys."""


def new(
    options: KeyOptions,
    admin: Annotated[
        bool, typer.Option("--admin", help="An administrator's key: every route.")
    ] = False,
) -> None:
    """Prints a new key, once, and its line for `access.keys` or a file of keys."""
    from ..config.access import hash_of, new_key

    given = options.given()
    if admin and given:
        field = next(iter(given))
        raise ConfigError.at(field, "an administrator's key has none")
    secret = new_key()
    section, entry = "admin_keys", json.dumps(hash_of(secret))
    if not admin:
        config = parse(KeyConfig, {"hash": hash_of(secret), **given})
        section, entry = "keys", json.dumps(config.model_dump(exclude_defaults=True))
    say(secret)
    say(f"- {entry}")
    note(f"The first line is the key: it is shown this once. The second goes under {section}:")


app.command(cls=Command)(expand(new))
