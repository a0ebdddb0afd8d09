"""`outrider bench serve`: loads a running server of any maker.

Options, defaults and keys of the result are those of `vllm bench serve` wherever both have the same
feature.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from pydantic import Field

from ..config.strict import read_json
from ..errors import ConfigError, OutriderError
from .console import Command, check_writable, err, fail, grid, make_folder, note, out, write_json
from .options import Options, known_names, numbers
from .running_server import RunningServer

if TYPE_CHECKING:
    from ..bench.client.datasets import Tokens
    from ..bench.client.report import Result
    from ..bench.client.run import Outcome

_SEVERAL = ("--goodput", "--metadata", "--header", "--compare")  # take several values, as in vLLM
_POLL_S = 1.0
_SAMPLING = (
    "temperature", "top_p", "top_k", "min_p", "frequency_penalty", "presence_penalty",
    "repetition_penalty",
)  # fmt: skip
# Datasets, by the prefix of their options.
_OWNERS = {
    "random_": ("random",),
    "input_len": ("random",),
    "sharegpt_": ("sharegpt",),
    "custom_": ("custom", "humaneval", "spec_bench"),
    "spec_bench_": ("spec_bench",),
}
_Percent = Annotated[float, Field(ge=0, le=100)]
_MOST, _LONGEST = 10**6, 10**7  # requests of a run, tokens of a prompt or an answer


class ServerOptions(Options):
    """The server to load."""

    panel = "Server"
    base_url: str | None = None
    """The server's URL, with or without /v1; default: http://HOST:PORT."""
    host: str = Field("127.0.0.1", description="Of the server, without --base-url.")
    port: int = Field(8000, ge=1, le=65535, description="Of the server, without --base-url.")
    backend: Literal["openai", "openai-chat", "vllm"] = "openai"
    """openai: completions (vllm is the same); openai-chat: chats."""
    endpoint: str | None = Field(None, description="Path; default: the backend's.")
    model: str | None = Field(None, description="Default: the first that the server lists.")
    tokenizer: str | None = None
    """Folder; default: the server's /tokenize route, if it has one."""
    trust_remote_code: bool = Field(False, description="Run the tokenizer's own code.")
    header: list[str] = Field([], description="KEY=VALUE, sent with every request.")
    insecure: bool = Field(False, description="Do not check an HTTPS server's certificate.")
    request_timeout_s: float = Field(600.0, gt=0, description="Of one request.")
    ready_check_timeout_sec: float = Field(0.0, ge=0, description="How long to wait for it.")


class DatasetOptions(Options):
    """The prompts."""

    panel = "Prompts"
    dataset_name: Literal["random", "sharegpt", "custom", "humaneval", "spec_bench"] = "random"
    """random: random words; sharegpt: JSON of conversations; custom: .jsonl with `prompt`, or one
    prompt per line; humaneval: its .jsonl; spec_bench: .jsonl with `turns`."""
    dataset_path: Path | None = Field(None, description="The file; .gz is read too.")
    num_prompts: int = Field(1000, ge=1, le=_MOST, description="Requests.")
    seed: int = Field(0, ge=0, description="Of prompts, their order and arrivals.")
    disable_shuffle: bool = Field(False, description="Keep the file's order.")
    oversample: bool = Field(True, description="Repeat prompts where the file has too few.")
    input_len: int | None = Field(
        None, ge=1, le=_LONGEST, description="Same as --random-input-len."
    )
    output_len: int | None = Field(None, ge=1, le=_LONGEST, description="Tokens of every answer.")
    random_input_len: int = Field(1024, ge=1, le=_LONGEST, description="Tokens of a random prompt.")
    random_output_len: int = Field(128, ge=1, le=_LONGEST, description="Tokens of its answer.")
    random_range_ratio: float = Field(0.0, ge=0, le=1)
    """Lengths vary by this fraction in both directions."""
    random_prefix_len: int = Field(
        0, ge=0, le=_LONGEST, description="Tokens that all begin with, on top."
    )
    sharegpt_output_len: int | None = Field(None, ge=1, description="Default: as recorded.")
    custom_output_len: int | None = None
    """Tokens of an answer, also for humaneval and spec_bench; default: the line's `output_tokens`,
    or 256; -1 is the default."""
    spec_bench_category: str | None = Field(None, description="Only this one.")

    def check(self) -> None:
        """Raises `ConfigError` for an option of a dataset that was not chosen."""
        for name in sorted(self.model_fields_set):
            owners = next((each for start, each in _OWNERS.items() if name.startswith(start)), None)
            if owners is not None and self.dataset_name not in owners:
                reason = f"only with --dataset-name {' or '.join(owners)}"
                raise ConfigError.at(name, reason)


class LoadOptions(Options):
    """The arrival of requests."""

    panel = "Load"
    request_rate: float = Field(
        float("inf"), gt=0, allow_inf_nan=True, description="Requests a second."
    )
    burstiness: float = Field(1.0, gt=0)
    """Shape of the Gamma distribution of gaps: 1 is a Poisson process; higher is more even."""
    max_concurrency: int | None = Field(None, ge=1, description="Most requests in flight.")
    num_warmups: int = Field(0, ge=0, le=_MOST, description="Requests before the run.")


class AnswerOptions(Options):
    """Sampling settings; those that are not given are left to the server."""

    panel = "Sampling"
    ignore_eos: bool = Field(False, description="Same work for all.")
    temperature: float = Field(0.0, ge=0, description="Sampling temperature.")
    top_p: float | None = Field(None, description="Least set of tokens with this probability.")
    top_k: int | None = Field(None, description="Most likely tokens.")
    min_p: float | None = Field(
        None, description="Least probability, relative to the most likely token."
    )
    frequency_penalty: float | None = Field(None, description="Per occurrence of a token.")
    presence_penalty: float | None = Field(None, description="For tokens that occurred.")
    repetition_penalty: float | None = Field(None, description="Factor for tokens that occurred.")
    extra_body: str | None = Field(None, description="JSON object, part of every request.")

    def fields(self) -> dict[str, Any]:
        """Returns the fields of every request's body.

        Raises:
            ConfigError: `extra_body` is not a JSON object.
        """
        extra = {} if self.extra_body is None else read_json(self.extra_body, "extra_body")
        if not isinstance(extra, dict):
            raise ConfigError.at("extra_body", f"expected an object, got {self.extra_body!r}")
        found = {name: getattr(self, name) for name in _SAMPLING}
        found |= {"ignore_eos": True if self.ignore_eos else None}
        return {**{name: each for name, each in found.items() if each is not None}, **extra}


class ReportOptions(Options):
    """The reported figures, and the output files."""

    panel = "Report"
    percentile_metrics: str = Field("ttft,tpot,itl,e2el", description="Latencies, a list.")
    metric_percentiles: str = Field("50,90,99", description="Percentiles, a list.")
    goodput: list[str] = Field([], description="KEY:MS of ttft, tpot, e2el; several.")
    save_result: bool = Field(False, description="Write the figures as JSON.")
    save_detailed: bool = Field(False, description="With every request's values and text.")
    result_dir: Path = Field(Path("."), description="Folder of the result.")
    result_filename: str | None = Field(None, description="Default: made of model, rate, date.")
    label: str | None = Field(None, description="Beginning of that name; default: the backend.")
    metadata: list[str] = Field([], description="KEY=VALUE, kept in the result; several.")
    plot: Path | None = Field(None, description="Draw latencies and throughput: .png, .svg, .pdf.")
    compare: list[Path] = Field([])
    """Result files of Outrider or vLLM, compared with each other and with this run, if any."""
    disable_tqdm: bool = Field(False, description="No progress bar.")


class ServeCommand(Command):
    """A command with options that take all following values, as in vLLM."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        return super().parse_args(ctx, _one_each(args))


def _one_each(args: Sequence[str]) -> list[str]:
    """Rewrites `--goodput A B` to `--goodput A --goodput B`."""
    done: list[str] = []
    current: str | None = None
    num_values = 0
    for arg in args:
        if arg.startswith("-"):
            current, num_values = (arg if arg in _SEVERAL else None), 0
        elif current is not None:
            if num_values:
                done.append(current)
            num_values += 1
        done.append(arg)
    return done


def serve(
    server: ServerOptions,
    dataset: DatasetOptions,
    load: LoadOptions,
    answers: AnswerOptions,
    report: ReportOptions,
    api_key: Annotated[
        str | None,
        typer.Option(
            help="The server's key.",
            envvar=["OUTRIDER_API_KEY", "OPENAI_API_KEY"],
            show_envvar=True,
            rich_help_panel="Server",
        ),
    ] = None,
) -> None:
    """Measures a running server of any maker: rates, latencies, goodput, drafts."""
    from ..bench.client.report import check_format, read_result

    results = [read_result(path) for path in report.compare]
    if report.plot is not None:
        check_format(report.plot)
    check_writable(report.plot, "plot")
    if results and server.base_url is None:
        if len(results) < 2:
            raise ConfigError.at("compare", "one result alone: give a second, or --base-url")
        _show_comparison(results, report.plot)
        return
    path = _check_report(report)
    with ExitStack() as stack:
        running = _connect(server, api_key)
        stack.callback(running.close)
        outcome = _run(running, server, dataset, load, answers, report)
    outcome.scores.update(_described(server, dataset, report))
    _show(outcome, report)
    if path is not None:
        _save(outcome, report, path)
    if results:
        from ..bench.client.report import Result

        _show_comparison([*results, Result("this run", outcome.scores)], report.plot)
    elif report.plot is not None:
        from ..bench.client.report import plot_run

        note(f"Wrote {plot_run(outcome, report.plot)}.")


def _run(
    running: RunningServer,
    server: ServerOptions,
    dataset: DatasetOptions,
    load: LoadOptions,
    answers: AnswerOptions,
    report: ReportOptions,
) -> Outcome:
    """Runs the measurement; an unknown model becomes a readable error."""
    from ..bench.client.datasets import load_dataset
    from ..bench.client.load import CHATS, COMPLETIONS, Endpoint
    from ..bench.client.run import NothingAnsweredError, Plan, measure
    from ..bench.client.scores import read_goodput
    from ..bench.measure import Load

    dataset.check()
    goodput, fields = read_goodput(report.goodput), answers.fields()
    metrics, percents = _metrics(report), _percents(report)
    listed = _models(running, server)
    model = server.model or listed[0]
    tokens = _tokens(running, server, model)
    default = CHATS if server.backend == "openai-chat" else COMPLETIONS
    endpoint = Endpoint(
        running.url,
        model,
        fields,
        timeout_s=server.request_timeout_s,
        path="/" + (server.endpoint or default).lstrip("/"),
        headers=running.headers,
        verify=not server.insecure,
    )
    plan = Plan(
        endpoint=endpoint,
        dataset=load_dataset(_dataset(dataset), tokens),
        load=Load(load.max_concurrency, load.request_rate, load.burstiness, dataset.seed),
        num_warmups=load.num_warmups,
        metrics=metrics,
        percents=percents,
        goodput=goodput,
        tokens=tokens,
        counters=running.metrics,
    )
    try:
        with _progress(len(plan.dataset.samples), not report.disable_tqdm) as advance:
            return measure(plan, advance)
    except NothingAnsweredError as error:
        if server.model is not None and listed and model not in listed:
            there = ", ".join(listed)
            raise ConfigError.at("model", f"{model!r} is not served: {there} ({error})") from None
        raise


@contextmanager
def _progress(total: int, shown: bool) -> Iterator[Callable[[], None]]:
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeRemainingColumn

    columns = (BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    console = err()
    hidden = not (shown and console.is_terminal)
    with Progress(*columns, console=console, transient=True, disable=hidden) as progress:
        task = progress.add_task("", total=total)
        yield lambda: progress.advance(task)


def _connect(server: ServerOptions, api_key: str | None) -> RunningServer:
    url = server.base_url
    if url is None:
        url = f"http://{server.host}:{server.port}"
    headers = dict(_pair(each, "header") for each in server.header)
    return RunningServer(
        url, api_key=api_key, headers=headers, verify=not server.insecure, field="base_url"
    )


def _models(running: RunningServer, server: ServerOptions) -> list[str]:
    """Returns the served models; empty if the server lists none and `--model` is given."""
    deadline = time.monotonic() + server.ready_check_timeout_sec
    while True:
        try:
            return running.models()
        except OutriderError as error:
            is_up = not isinstance(error, ConfigError)
            if time.monotonic() < deadline:
                time.sleep(_POLL_S)
            elif is_up and server.model is not None:
                return []
            else:
                raise


def _tokens(running: RunningServer, server: ServerOptions, model: str) -> Tokens | None:
    from ..bench.client.datasets import FolderTokens, ServerTokens

    if server.tokenizer is not None:
        return FolderTokens(server.tokenizer, server.trust_remote_code)
    return ServerTokens.find(running.http, model)


def _dataset(options: DatasetOptions) -> Any:
    from ..bench.client.datasets import Dataset

    own = {"random": None, "sharegpt": options.sharegpt_output_len}.get(
        options.dataset_name, options.custom_output_len
    )
    if own is not None and own != -1 and own < 1:
        raise ConfigError.at("custom_output_len", f"at least 1, or -1, got {own}")
    return Dataset(
        options.dataset_name,
        options.dataset_path,
        options.num_prompts,
        options.seed,
        output_len=options.output_len or (None if own == -1 else own),
        shuffle=not options.disable_shuffle,
        oversample=options.oversample,
        category=options.spec_bench_category,
        input_len=options.input_len or options.random_input_len,
        random_output_len=options.random_output_len,
        range_ratio=options.random_range_ratio,
        prefix_len=options.random_prefix_len,
    )


def _metrics(report: ReportOptions) -> list[str]:
    from ..bench.client.scores import METRICS

    return known_names("percentile_metrics", report.percentile_metrics, METRICS)


def _percents(report: ReportOptions) -> list[float]:
    wanted = "percentiles like 50,99"
    return numbers("metric_percentiles", report.metric_percentiles, _Percent, wanted)


def _pair(text: str, field: str) -> tuple[str, str]:
    key, equals, value = text.partition("=")
    if not key or not equals:
        raise ConfigError.at(field, f"expected KEY=VALUE, got {text!r}")
    return key, value


def _described(
    server: ServerOptions, dataset: DatasetOptions, report: ReportOptions
) -> dict[str, Any]:
    """Returns the description that a result contains beside its figures."""
    return {
        "backend": server.backend,
        "label": report.label,
        "tokenizer_id": server.tokenizer,
        "dataset_name": dataset.dataset_name,
        "dataset_path": None if dataset.dataset_path is None else str(dataset.dataset_path),
        "seed": dataset.seed,
        **dict(_pair(each, "metadata") for each in report.metadata),
    }


def _check_report(report: ReportOptions) -> Path | None:
    """Checks the output before the run; returns the result's path or folder, or None."""
    for each in report.metadata:
        _pair(each, "metadata")
    if not (report.save_result or report.save_detailed or report.result_filename is not None):
        return None
    make_folder(report.result_dir, "result_dir")
    if report.result_filename is None:
        return report.result_dir
    path = report.result_dir / report.result_filename
    check_writable(path, "result_filename")
    return path


def _save(outcome: Outcome, report: ReportOptions, path: Path) -> None:
    from ..bench.client.run import details

    scores = outcome.scores
    if report.result_filename is None:
        streams = scores["max_concurrency"]
        limit = "" if streams is None else f"-concurrency{streams}"
        model = str(scores["model_id"]).rstrip("/").rpartition("/")[2]
        path /= (
            f"{report.label or scores['backend']}-{scores['request_rate']}qps{limit}-{model}-"
            f"{scores['date']}.json"
        )
    more = details(outcome) if report.save_detailed else {}
    write_json(path, {**scores, **more}, "result_filename")


def _show(outcome: Outcome, report: ReportOptions) -> None:
    """Prints the tables; failures and remarks go to stderr."""
    from ..bench.client.scores import METRICS

    scores, console = outcome.scores, out()
    rows = [(title, f"{scores[key]:.2f}") for key, title in _RUN.items() if key in scores]
    console.print(grid("Run", ("", ""), rows))
    percents = [f"p{percent:g}" for percent in _percents(report)]
    columns = ("mean", "median", "std", *percents)
    latencies = [
        (METRICS[name], *(f"{scores[f'{column}_{name}_ms']:.2f}" for column in columns))
        for name in _metrics(report)
    ]
    console.print(grid("Latency, ms", ("", *columns), latencies))
    if "spec_decode_source" in scores:
        drafts = [(title, f"{scores[key]:.2f}") for key, title in _DRAFTS.items()]
        rates = scores["spec_decode_per_position_acceptance_rates"]
        if rates:
            drafts.append(("accepted per position", " ".join(f"{rate:.2f}" for rate in rates)))
        console.print(grid(f"Drafts (by {scores['spec_decode_source']})", ("", ""), drafts))
    for text in outcome.notes:
        note(text)
    if outcome.failures:
        count, total = len(outcome.failures), len(outcome.answers)
        first = f"{count} of {total} requests failed; the first: {outcome.failures[0]}"
        fail(OutriderError(first))


def _show_comparison(results: Sequence[Result], plot: Path | None) -> None:
    from ..bench.client.report import comparison, plot_comparison

    rows, differing = comparison(results)
    columns = ("", *(each.name for each in results), "last to first", "")
    out().print(grid("Comparison", columns, rows))
    if differing:
        note("Not the same conditions: " + "; ".join(differing) + ".")
    if plot is not None:
        note(f"Wrote {plot_comparison(results, plot)}.")


_RUN = {
    "duration": "seconds",
    "completed": "requests answered",
    "failed": "requests failed",
    "total_input_tokens": "prompt tokens",
    "total_output_tokens": "output tokens",
    "request_throughput": "requests/s",
    "request_goodput": "good requests/s",
    "output_throughput": "output tokens/s",
    "max_output_tokens_per_s": "most output tokens in a second",
    "max_concurrent_requests": "most requests in flight",
    "total_token_throughput": "all tokens/s",
    "max_late_ms": "longest wait of a request in the client, ms",
}
_DRAFTS = {
    "spec_decode_acceptance_rate": "accepted, %",
    "spec_decode_acceptance_length": "tokens per draft, with the target's own",
    "spec_decode_num_drafts": "drafts",
    "spec_decode_draft_tokens": "draft tokens",
    "spec_decode_accepted_tokens": "accepted tokens",
}
