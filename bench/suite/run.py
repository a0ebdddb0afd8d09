"""One run of the suite: who takes part, the rounds, and the report as a dictionary."""

from __future__ import annotations

import json
import platform
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import yaml

from ...config import EngineConfig
from ...config.compat.translate import translate_section
from ...errors import ConfigError
from ...scheduler.sampling import SamplingParams
from ..compare import Comparison, Plan, compare, equality, machine, over_http, summarise
from ..contenders import Contender, EngineContender
from ..drafters import MODELS, SECTIONS
from ..hf_baseline import HfContender
from ..measure import Load
from .servers import ServerContender, ServerSpec
from .workloads import TextCutter, workloads

REFERENCE = "outrider"  # plain; ratios are to it
ENGINE_ALONE = "engine alone"  # plain and without HTTP, in the suite's process
ROOT = Path(__file__).resolve().parents[2]
_DEMO_TARGET = MODELS / "target"
_DEFAULT_DRAFTERS = ("NGram", "Suffix")
_DEFAULT_DEMO_DRAFTERS = (*_DEFAULT_DRAFTERS, "DraftTarget", "Eagle3")
_SOFTWARE = ("torch", "transformers", "ray", "numpy", "numba", "aiohttp")
_LOOKUP_TOKENS = 10  # transformers' own recommendation for prompt look-up
_FALLBACK_MODEL_LEN = 2048


@dataclass(frozen=True)
class Settings:
    """What a run is made of."""

    config: EngineConfig  # its speculative section is a contender of its own
    out: Path
    workloads: list[str]
    loads: list[Load]
    sampling: SamplingParams
    num_rounds: int
    num_prompts: int
    prompts_per_stream: int = 1
    drafters: list[str] = field(default_factory=lambda: ["default"])
    baselines: list[str] = field(default_factory=list)  # of transformers
    assistant: str | None = None  # draft model of assisted generation
    peers: list[str] = field(default_factory=list)
    prompts: Path | None = None
    threads: int | None = None  # None: each contender's own choice
    in_process: bool = False  # Outrider without HTTP
    engine_alone: bool = False  # plain Outrider over HTTP and without
    alone: bool = False
    start_timeout_s: float = 600.0


def run_suite(
    settings: Settings,
    progress: Callable[[str], None],
    save: Callable[[dict[str, Any]], None] = lambda _: None,
) -> dict[str, Any]:
    """Everything, measured.

    Args:
        save: is given the report after every round.

    Raises:
        ConfigError: names the field. A contender that cannot start is a row, not an error.
    """
    config = settings.config
    cutter = TextCutter(config.tokenizer or config.model, config.trust_remote_code)
    max_tokens = settings.sampling.max_tokens or 0
    kinds = workloads(settings.workloads, cutter, model_len(config) - max_tokens, settings.prompts)
    contenders = contenders_of(settings)
    plan = Plan(
        kinds,
        settings.sampling,
        settings.loads,
        settings.num_rounds,
        settings.num_prompts,
        settings.prompts_per_stream,
        alone=settings.alone,
    )
    conditions = _conditions(settings)

    def report(found: Comparison) -> dict[str, Any]:
        return {
            "machine": machine(),
            **conditions,
            "contenders": [_described(each, found.excluded.get(each.name)) for each in contenders],
            "results": summarise(found, REFERENCE),
            "equality": equality(found, REFERENCE),
            "http": over_http(found, REFERENCE, ENGINE_ALONE),
        }

    return report(compare(contenders, plan, progress, lambda found: save(report(found))))


def _conditions(settings: Settings) -> dict[str, Any]:
    """What does not change during the run."""
    return {
        "software": _software(),
        "command": shlex.join(["outrider", *sys.argv[1:]]),
        "commit": _commit(),
        "settings": {
            "engine": settings.config.model_dump(mode="json"),
            "sampling": settings.sampling.model_dump(mode="json"),
            "workloads": settings.workloads,
            "loads": [str(load) for load in settings.loads],
            "num_prompts": settings.num_prompts,
            "prompts_per_stream": settings.prompts_per_stream,
            "num_rounds": settings.num_rounds,
            "threads": settings.threads,
            "alone": settings.alone,
            "in_process": settings.in_process,
        },
        "reference": REFERENCE,
    }


def model_len(config: EngineConfig) -> int:
    """Positions of a request: the configuration's, or the checkpoint's."""
    if config.max_model_len is not None:
        return config.max_model_len
    path = Path(config.model) / "config.json"
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"model: cannot read {path}: {error}", field="model") from None
    data = data.get("text_config") or data
    return int(data.get("max_position_embeddings") or _FALLBACK_MODEL_LEN)


def contenders_of(settings: Settings) -> list[Contender]:
    """Outrider plain and with each drafter, then transformers, then other servers.

    Raises:
        ConfigError: an unknown drafter or baseline, a malformed peer, or a name used twice.
    """
    config = settings.config
    found = [_outrider(settings, name, each) for name, each in _outrider_configs(settings).items()]
    if settings.engine_alone:
        plain = _with_section(config, SECTIONS["none"])
        found.append(_outrider(replace(settings, in_process=True), ENGINE_ALONE, plain))
    lookup = config.speculative_config.draft_len or _LOOKUP_TOKENS
    assistant = settings.assistant
    if assistant is None and _is_demo(config):
        assistant = str(MODELS / "draft")
    for baseline in settings.baselines:
        options: dict[str, Any] = {"threads": settings.threads, "as_text": True}
        if baseline == "hf-lookup":
            options["prompt_lookup"] = lookup
        elif baseline == "hf-assisted":
            if assistant is None:
                continue  # there is no draft model
            options["assistant"] = assistant
        elif baseline != "hf":
            raise ConfigError(
                f"baselines: {baseline!r} is none of hf, hf-assisted, hf-lookup, none",
                field="baselines",
            )
        found.append(HfContender(baseline, config, **options))
    values = {
        "model": config.model,
        "dtype": config.dtype,
        "threads": settings.threads or "",
        "max_model_len": model_len(config),
        "max_num_seqs": config.max_num_seqs,
    }
    found += [_server(settings, ServerSpec.parse(peer, values)) for peer in settings.peers]
    names = [each.name for each in found]
    for name in names:
        if names.count(name) > 1:
            raise ConfigError(f"peer: there are two contenders {name!r}", field="peer")
    return found


def _outrider_configs(settings: Settings) -> dict[str, EngineConfig]:
    """Configurations by contender: plain, the named drafters, the settings' own section."""
    config, names = settings.config, settings.drafters
    usable = {
        name: section
        for name, section in SECTIONS.items()
        if _is_demo(config) or str(MODELS) not in json.dumps(section)
    }
    if names == ["default"]:
        names = list(_DEFAULT_DEMO_DRAFTERS if _is_demo(config) else _DEFAULT_DRAFTERS)
    elif names == ["all"]:
        names = [name for name in usable if name != "none"]
    elif names == ["none"]:
        names = []
    found = {REFERENCE: _with_section(config, SECTIONS["none"])}
    for name in names:
        if name not in usable:
            known = "; its weights are the demo target's" if name in SECTIONS else ""
            others = ", ".join(each for each in usable if each != "none")
            raise ConfigError(
                f"drafters: {name!r} cannot run with this model{known}; there are all, none, "
                f"{others}; others: --speculative-config",
                field="drafters",
            )
        found[f"{REFERENCE} {name}"] = _with_section(config, usable[name])
    own = config.speculative_config
    if own.draft_len:
        found[f"{REFERENCE} {own.label} (given)"] = config
    return found


def _with_section(config: EngineConfig, section: dict[str, Any]) -> EngineConfig:
    data = {**config.model_dump(mode="json"), "speculative_config": translate_section(section)}
    return EngineConfig.load(data)


def _outrider(settings: Settings, name: str, config: EngineConfig) -> Contender:
    if settings.threads is not None:
        resources = config.resources.model_copy(update={"threads_per_worker": settings.threads})
        config = config.model_copy(update={"resources": resources})
    if settings.in_process:
        local = config.model_copy(update={"executor": "local"})
        return EngineContender(name, local, as_text=True)
    path = settings.out / f"{_file_name(name)}.yaml"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(yaml.safe_dump(config.model_dump(mode="json")), encoding="utf-8")
    command = [sys.executable, "-m", "outrider", "serve", "--config", str(path)]
    command += ["--port", "{port}", "--stats-interval-s", "0"]
    return _server(settings, ServerSpec(name, command=shlex.join(command)))


def _server(settings: Settings, spec: ServerSpec) -> ServerContender:
    env = {} if settings.threads is None else {"OMP_NUM_THREADS": str(settings.threads)}
    return ServerContender(
        spec,
        settings.out / f"{_file_name(spec.name)}.log",
        env,
        start_timeout_s=settings.start_timeout_s,
    )


def _described(contender: Contender, reason: str | None) -> dict[str, Any]:
    found: dict[str, Any] = {"name": contender.name, "excluded": reason}
    if isinstance(contender, ServerContender):
        found |= {
            "url": contender.spec.url,
            "command": contender.spec.command,
            "version": contender.version,
        }
    return found


def _software() -> dict[str, str]:
    from ... import __version__

    found = {"outrider": __version__, "python": platform.python_version()}
    for name in _SOFTWARE:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def _commit() -> str | None:
    """The commit that is checked out, with a mark where files differ from it."""
    try:
        done = subprocess.run(
            ["git", "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"],
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=True,
        )
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout.strip()


def _is_demo(config: EngineConfig) -> bool:
    return Path(config.model).resolve() == _DEMO_TARGET.resolve()


def _file_name(name: str) -> str:
    return re.sub(r"[^\w.-]+", "_", name).strip("_")
