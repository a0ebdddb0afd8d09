"""`outrider check`: everything that can be known of a configuration without computing.

`--load` starts the workers as well, decodes one token and stops them.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ..cluster.local_ray import find_ray, worker_niceness
from ..engine.preflight import preflight
from ..errors import ConfigError
from .console import err, note, say, table
from .options import EngineOptions, serve_section

if TYPE_CHECKING:
    from ..config import EngineConfig


def check(
    engine: EngineOptions,
    file: Annotated[
        Path | None,
        typer.Argument(
            metavar="CONFIG",
            help="YAML or JSON: our keys, TensorRT-LLM's, vLLM's JSON; or a checkpoint's folder.",
        ),
    ] = None,
    load: Annotated[
        bool, typer.Option("--load", help="Start the workers, decode a token, and stop them.")
    ] = False,
) -> None:
    """Checks a configuration, the files it names and how they fit; prints it in full.

    Every error is reported, each with its field.
    """
    import yaml

    if file is not None:
        if file.suffix == ".safetensors" or (file.name == "config.json" and _is_part(file)):
            raise ConfigError.at(
                "config", f"{file} is part of a checkpoint; give its folder, {file.parent}"
            )
        given = {"model": str(file)} if file.is_dir() else {"config": file}
        engine = engine.model_copy(update=given)
    config = engine.resolve()
    serve_section(engine, {})
    cluster = None if config.executor == "local" else find_ray()
    errors: list[ConfigError] = []
    facts = preflight(config, is_local=cluster is None, in_full=True, errors=errors)
    if errors:
        errors[0].others = errors[1:]
        raise errors[0]
    if cluster is not None and (niceness := worker_niceness(cluster)) > 0:
        facts["niceness"] = (
            f"{niceness}: this Ray's workers wait for every other process of their machines; "
            "start it with RAY_worker_niceness=0"
        )
    say(yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False).rstrip())
    table("Checked", facts)
    if load:
        _load(config)
    note("The configuration is sound.")


def _is_part(file: Path) -> bool:
    """Whether weights lie beside a configuration."""
    return any(file.parent.glob("*.safetensors"))


def _load(config: EngineConfig) -> None:
    """Starts the workers, decodes one token, and stops them.

    Raises:
        OutriderError: what `generate` and `serve` would fail with.
    """
    from .. import LLM
    from ..scheduler.sampling import SamplingParams

    with err().status("Loading the model..."), LLM.from_config(config) as llm:
        llm.generate([[0]], SamplingParams(max_tokens=1, temperature=0.0), use_tqdm=False)
    note("The workers started, decoded a token and stopped.")
