"""`outrider simulate`: simulates a deployment without models, with schedulers in virtual time.

The simulation is in `bench/simulation.py`, and the stand-ins for models in `bench/modelled.py`.
This module has the options, the variants of a sweep, and the table.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field, field_validator

from ..config import SECTIONS, EngineConfig, parse
from ..config.strict import (
    nearest,
    read_json,
    read_mapping,
    read_text,
    read_yaml,
    tag,
    unknown_key,
)
from ..errors import ConfigError
from .console import check_writable, err, grid, note, out, write_json
from .options import EngineOptions, Options, numbers

if TYPE_CHECKING:
    from ..bench.simulation import Outcome, Scenario
    from ..bench.traces import Trace, TracedRequest

_MODEL = "modelled"  # replaces a checkpoint, which is not read
_Rate = Annotated[float, Field(ge=0, le=1)]
_MAX_VARIANTS = 256


class SimulateOptions(Options):
    """The requests, the deployment, and the times of models."""

    panel = "Simulation"
    scenario: Path | None = None
    """YAML or JSON with these options as keys (step_ms: ...); options override it."""
    trace: Path | None = None
    """Times and acceptance of live engines, from `outrider bench --trace` or a server's
    `/admin/trace`; other options override it."""
    replay: bool = False
    """Replay the requests of the trace, with their lengths and arrival times, instead of a load."""
    sweep: list[str] = Field([])
    """KEY=VALUE,VALUE: a variant for each value of a key of this command, of the engine or of its
    speculative section; several: all combinations."""
    json_path: Path | None = Field(None, description="Write all figures.")
    num_requests: int = Field(1000, ge=1, le=10**7, description="Requests in all.")
    rate: float | None = Field(None, gt=0)
    """Requests per second, at random times; default: closed loops."""
    streams: int | None = Field(None, ge=1)
    """Closed loops: total number of requests in flight; default: 8 per engine."""
    think_ms: float = Field(0.0, ge=0)
    """Closed loops: time from an answer to the stream's next request."""
    one_client: bool = False
    """Closed loops: one client submits for all streams and waits until each request is accepted, as
    `outrider bench` does."""
    input_len: int = Field(512, ge=1, le=10**7, description="Tokens of a prompt.")
    output_len: int = Field(128, ge=1, le=10**7, description="Tokens of an answer.")
    range_ratio: float = Field(0.0, ge=0, lt=1)
    """Lengths are drawn from 1 - this to 1 + this times the mean."""
    engines: int = Field(1, ge=1, le=4096, description="Engines, each with an ingress.")
    drafters: int | None = Field(None, ge=1, le=4096)
    """Devices for separate draft models of all engines together; default: one per engine."""
    step_ms: str | None = None
    """Time of a target step: 25, or by rows (tokens and draft nodes) 1:20,64:30,512:90; default
    25."""
    context_ms: float | None = Field(None, ge=0)
    """Additional time per 1,000 tokens in the KV cache."""
    draft_ms: str | None = None
    """Time of a draft model's forward, of which a chain needs one per token: 2, or by rows; default
    2."""
    round_ms: float | None = Field(None, ge=0)
    """Additional time per round of a draft model; for a look-up or head, the whole time."""
    link_ms: float = Field(0.0, ge=0)
    """Time of a message to or from a separate drafter."""
    acceptance: str | None = None
    """Acceptance rate of a node whose predecessors were accepted, by depth: 0.8,0.7,0.6; the last
    value applies to deeper nodes; default 0.7."""
    drafted: float | None = Field(None, ge=0, le=1)
    """Share of a request's steps with a draft, below 1 if look-ups find nothing; default 1."""
    bonus_ranks: str = "0.5,0.25,0.12"
    """How often the target's own token is the drafter's first, second, ... candidate, for which a
    speculation cache can prepare."""
    seed: int = Field(0, ge=0, description="Seed of all draws.")

    @field_validator("step_ms", "draft_ms", "acceptance", "bonus_ranks", mode="before")
    @classmethod
    def _as_text(cls, given: Any) -> Any:
        """Converts a file's numbers, lists, and mappings of rows to milliseconds to text."""
        if isinstance(given, dict):
            return ",".join(f"{rows}:{ms}" for rows, ms in given.items())
        if isinstance(given, list):
            return ",".join(map(str, given))
        return str(given) if isinstance(given, (int, float)) else given

    def with_file(self) -> SimulateOptions:
        """Returns these options on top of those of the scenario file; raises `ConfigError`."""
        if self.scenario is None:
            return self
        data = read_mapping(self.scenario, "scenario")
        for name in ("scenario", "json_path"):
            if name in data:
                raise ConfigError.at("scenario", f"{name} is no key of such a file")
        given = {name: getattr(self, name) for name in self.model_fields_set}
        return parse(SimulateOptions, {**data, **given})


def simulate(engine: EngineOptions, options: SimulateOptions) -> None:
    """Plans a deployment: runs real schedulers, loops and draft controllers over simulated models.

    Shows throughput, latencies, the load of targets and drafters, and how much drafting is hidden
    behind verification. The engine's options and configuration files are those of the other
    commands; no checkpoint is read.
    """
    options = options.with_file()
    check_writable(options.json_path, "json")
    from ..bench.simulation import simulate as run
    from ..bench.traces import Trace

    trace = None
    if options.trace is not None:
        data = read_json(read_text(options.trace, "trace"), "trace")
        if not isinstance(data, dict):
            raise ConfigError.at("trace", f"{options.trace} is no trace")
        trace = Trace.read(data)
        cores, device = trace.machine.get("num_cores", "?"), trace.machine.get("gpu", "no GPU")
        note(f"Times are those of {trace.model} on {cores} cores, {device}.")
    found: list[tuple[str, Scenario, Outcome]] = []
    variants = list(_variants(engine, options, trace))
    with err().status("Simulating...") as status:
        for label, scenario in variants:
            status.update(f"Simulating {label}...")
            found.append((label, scenario, run(scenario)))
    _show(found)
    settings = options.model_dump(mode="json", exclude={"json_path"})
    results = [
        {"variant": label, "engine": scenario.config.model_dump(mode="json"),
         "target": asdict(scenario.target), "draft": asdict(scenario.draft), **outcome.as_dict()}
        for label, scenario, outcome in found
    ]  # fmt: skip
    write_json(options.json_path, {"settings": settings, "results": results}, "json")


# -- variants


def _variants(
    engine: EngineOptions, options: SimulateOptions, trace: Trace | None
) -> Iterator[tuple[str, Scenario]]:
    """Yields a scenario for each combination of the sweeps' values, or a single one."""
    axes = [_axis(text) for text in options.sweep]
    names = [name for name, _ in axes]
    if len(set(names)) < len(names):
        raise ConfigError.at("sweep", "a key is given twice")
    points = list(itertools.product(*(values for _, values in axes)))
    if len(points) > _MAX_VARIANTS:
        raise ConfigError.at("sweep", f"{len(points)} variants, at most {_MAX_VARIANTS}")
    for point in points:
        changes = dict(zip(names, point, strict=True))
        label = ", ".join(f"{name}={value}" for name, value in changes.items())
        try:
            yield label or "as given", _scenario(*_changed(engine, options, changes), trace)
        except ConfigError as error:
            if not changes:
                raise
            raise ConfigError.at("sweep", f"{label}: {error.message}") from None


def _axis(text: str) -> tuple[str, list[Any]]:
    name, equals, values = text.partition("=")
    name = name.strip().replace("-", "_")
    if not equals or not name or not values:
        raise ConfigError.at("sweep", f"expected KEY=VALUE,VALUE, got {text!r}")
    if name == "model":
        raise ConfigError.at("sweep", "model: no checkpoint is read here")
    own = _SWEPT | _ENGINE
    near = None if name in own | _OF_SECTIONS else nearest(name, own, 0.9)
    if near is not None:
        raise unknown_key("sweep", name, [near])
    return name, [read_yaml(each, "sweep", repr(each)) for each in values.split(",")]


def _changed(
    engine: EngineOptions, options: SimulateOptions, changes: dict[str, Any]
) -> tuple[EngineConfig, SimulateOptions]:
    """Returns the engine's configuration and the options with a variant's values."""
    own = {name: value for name, value in changes.items() if name in _SWEPT}
    of_engine = {name: value for name, value in changes.items() if name in _ENGINE - own.keys()}
    of_section = changes.keys() - own.keys() - of_engine.keys()
    if own:
        given = {name: getattr(options, name) for name in options.model_fields_set}
        options = parse(SimulateOptions, {**given, **own})
    if of_section:
        kept = [pair for pair in engine.spec_key or [] if pair.partition("=")[0] not in of_section]
        added = [f"{name}={changes[name]}" for name in sorted(of_section)]
        engine = engine.model_copy(update={"spec_key": [*kept, *added]})
    data = engine.model if engine.model is not None else engine._file().get("model", _MODEL)
    return engine.settings(model=data, **of_engine), options


_SWEPT = SimulateOptions.model_fields.keys() - {"scenario", "trace", "sweep", "json_path"}
_ENGINE = EngineConfig.model_fields.keys() - {"speculative_config"}
_OF_SECTIONS = {key for section in SECTIONS.values() for key in section.model_fields}


def _scenario(config: EngineConfig, options: SimulateOptions, trace: Trace | None) -> Scenario:
    from ..bench.measure import Load
    from ..bench.modelled import Curve, DraftLaw, DraftTimes, TargetTimes, rates_of
    from ..bench.simulation import Scenario, check
    from ..bench.traces import fit_draft, fit_target

    section = config.speculative_config
    check(section)
    target = TargetTimes(Curve((1.0,), (25.0,)))
    draft, rates = DraftTimes(Curve((1.0,), (2.0,))), [0.7]
    recorded: list[dict[tuple[int, int], int]] = []
    if not section.has_model:
        draft = DraftTimes(Curve((1.0,), (0.0,)))  # look-ups take almost no time
    if trace is not None:
        target = fit_target(trace.runs)
        if section.draft_len and not (options.acceptance and options.draft_ms):
            run = trace.run_of(tag(type(section)) or "")
            draft, recorded = fit_draft(run), run.recorded
            rates = rates_of(recorded)
    if options.step_ms is not None:
        target = TargetTimes(Curve.parse(options.step_ms, "step_ms"))
    if options.context_ms is not None:
        target = TargetTimes(target.curve, target.seq_ms, options.context_ms)
    curve = draft.curve if options.draft_ms is None else Curve.parse(options.draft_ms, "draft_ms")
    round_ms = draft.round_ms if options.round_ms is None else options.round_ms
    if options.draft_ms is not None and options.round_ms is None:
        round_ms = 0.0
    if options.acceptance is not None:
        rates, recorded = _shares("acceptance", options.acceptance), []
    drafted = 1.0
    if options.drafted is not None:
        drafted, recorded = options.drafted, []
    ranks = _shares("bonus_ranks", options.bonus_ranks)
    if sum(ranks) > 1 + 1e-9:
        raise ConfigError.at("bonus_ranks", f"they sum to {sum(ranks):g}, more than 1")
    requests = _replayed(options, trace, (tag(type(section)) or "") if recorded else "")
    followed = [each.drafts for each in requests]
    load = Load(streams=options.streams or 8 * options.engines, seed=20 + options.seed)
    if options.rate is not None:
        for name in ("streams", "think_ms", "one_client"):
            if getattr(options, name):
                raise ConfigError.at(name, "it is of closed loops; requests come at a rate here")
        load = Load(rate=options.rate, seed=20 + options.seed)
    scenario = Scenario(
        config=config,
        target=target,
        draft=DraftTimes(curve, round_ms, options.link_ms),
        law=lambda number: DraftLaw(
            rates, drafted, recorded, ranks, options.seed * 4099 + number, followed
        ),
        load=load,
        num_requests=len(requests) or options.num_requests,
        input_len=options.input_len,
        output_len=options.output_len,
        range_ratio=options.range_ratio,
        one_client=options.one_client,
        think_ms=options.think_ms,
        num_engines=options.engines,
        num_drafters=options.drafters or options.engines,
        seed=options.seed,
        requests=requests,
    )
    _check_fits(scenario)
    return scenario


_LOAD = ("num_requests", "rate", "streams", "think_ms", "one_client", "input_len", "output_len",
         "range_ratio")  # fmt: skip


def _replayed(
    options: SimulateOptions, trace: Trace | None, decoding_type: str
) -> list[TracedRequest]:
    """Returns the requests of the trace if they are to be replayed; otherwise none."""
    if not options.replay:
        return []
    if trace is None:
        raise ConfigError.at("replay", "there is no trace")
    for name in _LOAD:
        if name in options.model_fields_set:
            raise ConfigError.at(name, "--replay takes the requests of the trace as they were")
    return trace.requests(decoding_type)


def _shares(field: str, text: str) -> list[float]:
    """Parses numbers from 0 to 1; a number may be repeated."""
    wanted = "numbers from 0 to 1 like 0.8,0.7"
    return [numbers(field, part, _Rate, f"{wanted}")[0] for part in text.split(",")]


def _check_fits(scenario: Scenario) -> None:
    """Raises `ConfigError` if the longest request could never run."""
    config = scenario.config
    longest, most = scenario.longest, config.max_model_len
    name = "trace" if scenario.requests else "input_len"
    if most is not None and longest > most:
        raise ConfigError.at(
            name, f"prompt and answer have up to {longest} tokens; max_model_len is {most}"
        )
    if config.num_kv_blocks is not None and longest > config.num_kv_blocks * config.block_size:
        raise ConfigError.at(
            name,
            f"prompt and answer have up to {longest} tokens; the KV cache has "
            f"{config.num_kv_blocks * config.block_size} (num_kv_blocks)",
        )


# -- the table

_COLUMNS = (
    *("variant", "tokens/s", "to first", "tokens/step", "first token, ms", "inter-token, ms"),
    *("target", "drafters", "hidden"),
)


def _show(found: Sequence[tuple[str, Scenario, Outcome]]) -> None:
    """Prints a row per variant; latencies are p50 / p90 / p99 in virtual time."""
    rows = []
    first = found[0][2].tokens_per_s
    for label, _, outcome in found:
        hidden, ratio = outcome.hidden_share, outcome.tokens_per_s / first if first else 0.0
        rows.append(
            (
                label,
                f"{outcome.tokens_per_s:.1f}",
                f"{ratio:.2f}",
                f"{outcome.tokens_per_step:.2f}",
                *(
                    " / ".join(f"{value:.1f}" for value in each.values())
                    for each in (outcome.ttft_ms, outcome.inter_token_ms)
                ),
                f"{outcome.target_share:.0%}",
                f"{outcome.drafter_share:.0%}" if outcome.drafter_share else "-",
                "-" if hidden is None else f"{hidden:.0%}",
            )
        )
    console = out()
    console.print(grid("Simulated, not measured", _COLUMNS, rows))
    for label, _, outcome in found:
        if outcome.num_refused:
            console.print(f"{label}: {outcome.num_refused} requests were refused (queues full)")
        if outcome.num_preemptions:
            console.print(f"{label}: {outcome.num_preemptions} preemptions")
