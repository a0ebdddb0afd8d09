"""`outrider bench` and its subcommands.

`outrider bench` compares configurations of the engine, `bench suite` compares servers, `bench
serve` loads a running server, and `bench gpu-proof` checks and measures a GPU. The measurements are
implemented in `bench/`; this module has the options, the tables and the JSON.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import ExitStack
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from pydantic import Field, PositiveInt

from ..config.strict import tag
from ..errors import ConfigError, OutriderError
from ..scheduler.sampling import SamplingParams
from .bench_serve import ServeCommand, serve
from .console import (
    Command,
    Group,
    check_writable,
    err,
    grid,
    make_folder,
    note,
    out,
    write_json,
    writing,
)
from .foreign import EPILOG
from .options import EngineOptions, Options, expand, known_names, names, numbers
from .session import prepare

if TYPE_CHECKING:
    from ..bench.contenders import Contender
    from ..bench.measure import Load
    from ..config import EngineConfig
    from ..scheduler.timer import TraceLog

PLAIN = "plain"
_Rate = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Row = dict[str, Any]


def show_report(report: dict[str, Any]) -> None:
    """Prints throughput, latency, acceptance and equality."""
    console = out()
    found, settings = report["machine"], report["settings"]
    console.print(
        f"{found['num_cores']} cores ({found['cpu_capability']}), {found['memory_gib']} GiB, "
        f"{found.get('gpu', 'no GPU')}; {settings['num_prompts']} prompts x "
        f"{settings['sampling']['max_tokens']} tokens, {settings['num_rounds']} rounds, "
        f"temperature {settings['sampling']['temperature']}, dtype {settings['engine']['dtype']}, "
        f"executor {settings['engine']['executor']}, "
        f"{settings['engine']['tensor_parallel_size']} rank(s)"
        f"{' a stage' * (settings['engine'].get('pipeline_parallel_size', 1) > 1)}"
    )
    for title, columns, cells in _TABLES:
        shown = [
            (row["contender"], row["load"], *cells(row))
            for row in report["results"]
            if title != "Drafts" or row["acceptance"] is not None
        ]
        if shown:
            console.print(grid(title, ("contender", "batch", *columns), shown))
    for row in report["equality"]:
        console.print(
            f"{row['contender']}, batch {row['load']}: {row['num_differing']} of "
            f"{row['num_prompts']} prompts differ from plain" + _places(row["first_difference"])
        )


def _throughput(row: Row) -> tuple[str, ...]:
    ratio, per_step = row["ratio"], row["tokens_per_step"]
    return (
        f"{row['tokens_per_s']:.1f}",
        f"{ratio['median']:.2f} ({ratio['low']:.2f}-{ratio['high']:.2f})" if ratio else "-",
        str(row["num_steps"] or "-"),
        f"{per_step:.2f}" if per_step else "-",
    )


def _acceptance(row: Row) -> tuple[str, ...]:
    drafts = row["acceptance"]
    return (
        str(drafts["num_drafts"]),
        str(drafts["num_draft_tokens"]),
        f"{drafts['rate']:.1%}",
        f"{drafts['mean_accepted_len']:.2f}",
        " ".join(f"{rate:.2f}" for rate in drafts["rate_per_pos"]),
    )


def _percentiles(*keys: str) -> Callable[[Row], tuple[str, ...]]:
    def cells(row: Row) -> tuple[str, ...]:
        return tuple(" / ".join(map(_short, row[key].values())) for key in keys)

    return cells


def _short(value: float) -> str:
    return f"{value:.1f}" if value < 100 else f"{value:.0f}"


# Title, columns after the contender and its batch, and the cells of a result.
_TABLES: tuple[tuple[str, tuple[str, ...], Callable[[Row], tuple[str, ...]]], ...] = (
    ("Throughput", ("tokens/s", "to plain (range)", "steps", "tokens/step"), _throughput),
    (
        "Latency, ms: p50 / p90 / p99",
        ("first token", "end to end"),
        _percentiles("ttft_ms", "e2e_ms"),
    ),
    (  # an arrival may bring several tokens
        "Pace, ms: p50 / p90 / p99",
        ("inter-token", "between arrivals"),
        _percentiles("inter_token_ms", "gap_ms"),
    ),
    ("Drafts", ("drafts", "tokens", "accepted", "mean length", "per position"), _acceptance),
)


def _places(first: dict[str, int]) -> str:
    if not first:
        return ""
    shown = [f"{prompt} at token {place}" for prompt, place in list(first.items())[:3]]
    return f" (prompt {', '.join(shown)})"


class RunOptions(Options):
    """The prompts, and how often they are run."""

    panel = "Benchmark"
    prompts: Path | None = None
    """One prompt per line, or .jsonl with `text`; default: the demo's held-out prompts."""
    num_prompts: int = Field(16, ge=1, description="Prompts of one run.")
    rounds: int = Field(3, ge=1, description="Times that everyone runs.")
    max_tokens: int = Field(128, ge=1, description="Tokens of an answer.")
    temperature: float = Field(0.0, description="Sampling temperature.")
    seed: int = Field(0, description="Seed of the sampling.")
    ignore_eos: bool = Field(True, description="Same work for all.")

    def sampling(self) -> SamplingParams:
        names = ("max_tokens", "temperature", "seed", "ignore_eos")
        return SamplingParams(**{name: getattr(self, name) for name in names})


class SuiteOptions(RunOptions):
    """The contenders and the loads."""

    panel = "Suite"
    out: Path = Field(Path("bench-suite"), description="Folder for the report, plots and logs.")
    drafters: str = "default"
    """Outrider's drafters, a list of names from bench/drafters.py; or default, all, none. A
    speculative section given by other options takes part as well."""
    baselines: str = "hf,hf-assisted,hf-lookup"
    """transformers' generate(): hf, hf-assisted, hf-lookup, or none."""
    assistant: str | None = Field(None, description="Draft model of hf-assisted, a folder.")
    peer: list[str] = Field([])
    """An OpenAI-compatible server: NAME=URL, NAME=COMMAND with {port} (and {model}, {dtype},
    {threads}, {max_model_len}, {max_num_seqs}), or vllm, sglang, tensorrt-llm, llama-server; may be
    repeated."""
    workloads: str = "code,edit,prose,chat,long,shared"
    """A list of code, edit, prose, chat, long, shared; own uses --prompts."""
    prompts: Path | None = Field(None, description="Prompts of `own`: a line each, or .jsonl.")
    streams: str = Field("1,4,16,64", description="Closed loops: requests in flight.")
    prompts_per_stream: int = Field(1, ge=1)
    """Minimum number of prompts per stream in one run. With 1, a run is a single batch, which lasts
    as long as its slowest answer."""
    rates: str = Field("2", description="Poisson arrivals: requests a second, a list; none.")
    max_tokens: int = Field(64, ge=1, description="Tokens of an answer.")
    threads: int | None = Field(None, ge=1)
    """Threads of every contender (OMP_NUM_THREADS of servers); default: each one's own choice."""
    in_process: bool = Field(False, description="Outrider without HTTP; closed loops only.")
    engine_alone: bool = False
    """Also measure plain Outrider without HTTP, which shows the cost of HTTP."""
    alone: bool = False
    """Run one contender at a time and start it for each round: for GPUs and small memories."""
    start_timeout_s: float = Field(600.0, ge=1, description="Until a server answers.")

    def loads(self) -> list[Load]:
        """Returns the closed loops, then the Poisson arrivals.

        Raises:
            ConfigError: a value is not a number above zero, or there is no load.
        """
        from ..bench.measure import Load

        found = [Load(streams=count) for count in _counts("streams", self.streams, PositiveInt)]
        found += [Load(rate=rate) for rate in _counts("rates", self.rates, _Rate)]
        if not found:
            raise ConfigError.at("streams", "no load: give --streams or --rates")
        return found


def _counts(field: str, text: str, kind: Any) -> list[Any]:
    """Parses a list of numbers above zero; `none` is an empty list."""
    if text == "none":
        return []
    return numbers(field, text, kind, "numbers above 0 like 1,8, or none")


def suite(engine: EngineOptions, options: SuiteOptions) -> None:
    """Compares Outrider with transformers and other servers: a table, JSON and plots."""
    loads = options.loads()
    config = _suite_config(engine, loads)
    make_folder(options.out, "out")
    from ..bench.suite.report import write
    from ..bench.suite.run import Settings, run_suite
    from ..engine.preflight import preflight

    settings = Settings(
        config=config,
        out=options.out,
        workloads=names(options.workloads),
        loads=loads,
        sampling=options.sampling(),
        num_rounds=options.rounds,
        num_prompts=options.num_prompts,
        prompts_per_stream=options.prompts_per_stream,
        drafters=names(options.drafters),
        baselines=[] if options.baselines == "none" else names(options.baselines),
        assistant=options.assistant,
        peers=options.peer,
        prompts=options.prompts,
        threads=options.threads,
        in_process=options.in_process,
        engine_alone=options.engine_alone,
        alone=options.alone,
        start_timeout_s=options.start_timeout_s,
    )
    with err().status("Checking the checkpoints..."):
        preflight(config)
    written: list[Path] = []

    def save(report: dict[str, Any]) -> None:
        with writing(options.out, "out"):
            written[:] = write(report, options.out)

    with err().status("Loading...") as status:
        report = run_suite(settings, status.update, save)
    show_suite(report)
    note("Wrote " + ", ".join(str(path) for path in written) + ".")


def show_suite(report: dict[str, Any]) -> None:
    """Prints the tables, and the contenders that failed."""
    from ..bench.suite.report import COLUMNS, table_rows

    console = out()
    for workload in report["settings"]["workloads"]:
        if rows := list(table_rows(report, workload)):
            console.print(grid(workload, COLUMNS, rows))
    for row in report["http"]:
        console.print(
            f"HTTP adds {row['framework_us_per_token']:.0f} us per token and "
            f"{row['first_token_ms_more']:.1f} ms to the first ({row['workload']}, {row['load']})"
        )
    for each in report["contenders"]:
        if each["excluded"]:
            console.print(f"{each['name']} did not run, or not to the end: {each['excluded']}")


def _suite_config(engine: EngineOptions, loads: list[Load]) -> EngineConfig:
    """Returns the configuration with enough sequences for all streams."""
    config = engine.resolve()
    most = max([load.streams or 1 for load in loads])
    return config.model_copy(update={"max_num_seqs": max(config.max_num_seqs, most)})


class Baseline(StrEnum):
    """Contenders from transformers."""

    hf = "hf"
    hf_lookup = "hf-lookup"


class BenchOptions(RunOptions):
    """Batch sizes, baselines and output files."""

    batch_sizes: str = Field("1,8", description="Requests in flight, a list.")
    baseline: list[Baseline] = Field([], description="transformers' generate(); may be repeated.")
    json_path: Path | None = Field(None, description="Write all figures.")
    trace: Path | None = None
    """Write the steps of the engines, for `outrider simulate --trace`."""


def bench(context: typer.Context, engine: EngineOptions, options: BenchOptions) -> None:
    """Measures throughput, latency and acceptance, with and without speculation."""
    if context.invoked_subcommand is not None:
        _refuse_options(context)
        return
    sizes = numbers("batch_sizes", options.batch_sizes, PositiveInt, "numbers like 1,8")
    check_writable(options.json_path, "json")
    check_writable(options.trace, "trace")
    config = _config(engine, sizes)
    from ..bench.compare import Plan, Workload, compare, equality, machine, summarise
    from ..bench.measure import Load
    from ..bench.suite.workloads import load_prompts
    from ..bench.traces import Trace, TraceRun

    sampling = options.sampling()
    prompts = load_prompts(options.prompts, options.num_prompts)
    if len(prompts) < options.num_prompts:
        note(f"There are {len(prompts)} prompts, not {options.num_prompts}.")
    with ExitStack() as stack:
        prepare(config, stack)
        with err().status("Loading...") as status:
            logs: list[TraceLog] = []
            contenders = _contenders(config, options.baseline, logs)
            workload = Workload("prompts", lambda _salt, _count: prompts)
            loads = [Load(streams=size) for size in sizes]
            plan = Plan([workload], sampling, loads, options.rounds, len(prompts))
            found = compare(contenders, plan, status.update)
        for name, reason in found.excluded.items():
            raise OutriderError(f"{name}: {reason}")
        report = {
            "machine": machine(),
            "settings": {
                "engine": config.model_dump(mode="json"),
                "sampling": sampling.model_dump(mode="json"),
                "num_prompts": len(prompts),
                "batch_sizes": sizes,
                "num_rounds": options.rounds,
            },
            "results": summarise(found, PLAIN),
            "equality": equality(found, PLAIN, same_prompts=True),
        }

    show_report(report)
    write_json(options.json_path, report, "json")
    if options.trace is not None:
        runs = tuple(TraceRun.model_validate(log.run(warms_up=True)) for log in logs)
        trace = Trace(version=1, machine=machine(), model=config.model_name, runs=runs)
        write_json(options.trace, trace.model_dump(mode="json"), "trace", indent=None)


def _refuse_options(context: typer.Context) -> None:
    """Raises `ConfigError` if options of this command precede a subcommand's name."""
    for name in context.params:
        source = context.get_parameter_source(name)
        if source is not None and source.name == "COMMANDLINE":
            raise ConfigError.at(
                name, f"options of `{context.invoked_subcommand}` come after its name"
            )


def _config(engine: EngineOptions, sizes: Iterable[int]) -> EngineConfig:
    """Returns the configuration with enough sequences, and no prefix cache across rounds."""
    config = engine.resolve()
    changes: dict[str, Any] = {"max_num_seqs": max(config.max_num_seqs, *sizes)}
    if engine.enable_prefix_caching is None:
        changes["enable_prefix_caching"] = False
    if config.executor == "ray" and config.resources.cpus_per_worker is None:
        # Both engines are up at the same time but work in turns, so they share the cores.
        changes["resources"] = config.resources.model_copy(update={"cpus_per_worker": 0.0})
    return config.model_copy(update=changes)


def _contenders(
    config: EngineConfig, baselines: Iterable[Baseline], logs: list[TraceLog]
) -> list[Contender]:
    """Returns all contenders; adds a log of each engine's steps to `logs`."""
    from ..bench.contenders import EngineContender
    from ..config import NoSpeculation
    from ..scheduler.timer import TraceLog

    def engine(name: str, config: EngineConfig) -> EngineContender:
        logs.append(TraceLog(name, tag(type(config.speculative_config)) or ""))
        return EngineContender(name, config, log=logs[-1])

    section = config.speculative_config
    plain = NoSpeculation.model_validate({})
    found: list[Contender] = [
        engine(PLAIN, config.model_copy(update={"speculative_config": plain}))
    ]
    if section.draft_len:
        found.append(engine(section.label, config))
    else:
        note("No speculative_config: only plain decoding is measured.")
    for baseline in baselines:
        from ..bench.hf_baseline import HfContender

        lookup = (section.draft_len or 10) if baseline is Baseline.hf_lookup else 0
        found.append(HfContender(baseline.value, config, prompt_lookup=lookup))
    return found


class GpuProofOptions(Options):
    """The checks and measurements, and their duration."""

    out: Path = Field(Path("gpu-proof"), description="Folder for the report, profiles and logs.")
    size: Literal["8b", "1b"] = "8b"
    """Size of the Llama with random weights: 8b or 1b."""
    minutes: float = Field(25.0, ge=0.01, description="When to stop.")
    rounds: int = Field(20, ge=1, description="Times that each measurement runs.")
    parts: str = ""
    """A list of machine, checks, timings, steps, serve, ranks; default: all."""
    model: Path | None = None
    """Folder of the model that servers serve; default: the demo's."""
    dry_run: bool = Field(False, description="The same on a CPU, tiny, kernels interpreted.")


def gpu_proof(options: GpuProofOptions) -> None:
    """Checks and measures the GPU path on one machine; JSON and a page after every case."""
    from ..bench.gpu.proof import PARTS, ProofOptions, failed, prove

    out, known = options.out, tuple(part.name for part in PARTS)
    wanted = tuple(known_names("parts", options.parts, known)) or known
    if options.model is not None and not options.model.is_dir():
        raise ConfigError.at("model", f"{options.model} is no folder")
    if not options.dry_run:
        import torch

        if not torch.cuda.is_available():
            raise OutriderError("no CUDA device that torch can use; --dry-run tries the code")
    make_folder(out, "out")
    what = options.minutes, options.rounds, wanted, options.model, options.dry_run
    report = prove(ProofOptions(out, options.size, *what), note)
    rows = [row for each in report["parts"].values() for row in each]
    num_failed = sum(map(failed, rows))
    note(f"Wrote {out / 'proof.md'} and {out / 'proof.json'}.")
    if num_failed or not rows:
        raise OutriderError(f"{num_failed} of {len(rows)} cases failed; see {out / 'proof.md'}")


class GpuModelOptions(Options):
    """The steps to compute."""

    models: str = Field("", description="Of Llama-3.1-8B, Llama-3.1-70B, DeepSeek-V3.")
    batches: str = Field("1,8,64", description="Sequences of a step, a list.")
    context_len: int = Field(2048, ge=1, description="Tokens in the cache of each.")
    floor_us: float = Field(2.0, ge=0.0)
    """Assumed minimum time of a kernel launch."""
    kv_cache_dtype: Literal["auto", "fp8_e4m3", "fp8_e5m2"] = "auto"
    """Format of the target's keys and values; auto is bfloat16."""
    json_path: Path | None = Field(None, description="Write all figures.")


def gpu_model(options: GpuModelOptions) -> None:
    """Computes how much steps move and calculate, and their minimum times on H100 and H200; no GPU.

    Published figures of vLLM and SGLang are shown beside steps with the same settings.
    """
    counts = tuple(numbers("batches", options.batches, PositiveInt, "numbers like 1,8"))
    check_writable(options.json_path, "json")
    from ..bench import published
    from ..bench.gpu_model import Sheet, cells, targets, unusable
    from ..workers.attention import KV_FORMATS

    if reason := unusable():
        raise OutriderError(reason)
    known = {each.name: each for each in targets()}
    sheet = Sheet(
        tuple(known[name] for name in known_names("models", options.models, known) or known),
        batches=counts,
        context_len=options.context_len,
        floor_us=options.floor_us,
        form=KV_FORMATS.get(options.kv_cache_dtype),
    )
    with err().status("Loading...") as status:
        rows = list(sheet.rows(status.update))
        figures = list(published.beside(sheet.targets, status.update, options.floor_us))
    console = out()
    console.print(grid("Arithmetic, not measured", sheet.columns, [cells(row) for row in rows]))
    shown, lines = published.table(figures)
    console.print(grid("Published figures beside it", published.COLUMNS, shown))
    for line in lines:
        console.print(line)
    report = {"rows": rows, "published": [each.row() for each in figures]}
    write_json(options.json_path, report, "json")


app = typer.Typer(cls=Group, invoke_without_command=True)
app.callback(epilog=EPILOG)(expand(bench))
app.command("suite", epilog=EPILOG, cls=Command)(expand(suite))
app.command("gpu-proof", cls=Command)(expand(gpu_proof))
app.command("gpu-model", cls=Command)(expand(gpu_model))
app.command("serve", cls=ServeCommand)(expand(serve))
