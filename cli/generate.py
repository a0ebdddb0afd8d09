"""`outrider generate`: completes prompts from the shell, without a server."""

from __future__ import annotations

import time
from contextlib import ExitStack
from typing import TYPE_CHECKING, Annotated

import typer

from .console import note, read_stdin, say, table, write
from .options import EngineOptions, SamplingOptions
from .running_server import drafter_lines
from .session import Adapter, loaded

if TYPE_CHECKING:
    from ..cluster.backend import LLM
    from ..engine.outputs import RequestOutput
    from ..scheduler.sampling import SamplingParams


def generate(
    engine: EngineOptions,
    sampling: SamplingOptions,
    prompts: Annotated[
        list[str], typer.Argument(metavar="PROMPT...", help="One or several; - reads stdin.")
    ],
    stream: Annotated[
        bool, typer.Option("--stream/--no-stream", help="Show tokens as they come (one prompt).")
    ] = True,
    stats: Annotated[
        bool, typer.Option("--stats/--no-stats", help="Statistics, on stderr.")
    ] = True,
    adapter: Adapter = None,
) -> None:
    """Completes prompts and prints the text; statistics of speculation go to stderr."""
    params = sampling.params()
    config = engine.resolve()
    texts = [read_stdin() if prompt == "-" else prompt for prompt in prompts]
    with ExitStack() as stack:
        llm = loaded(config, stack, adapter, prompts=texts, max_tokens=params.max_tokens)
        start = time.perf_counter()
        if stream and len(texts) == 1:
            outputs = [_stream(llm, texts[0], params, adapter)]
        else:
            outputs = llm.generate(texts, params, use_tqdm=stream, lora_request=adapter)
            for prompt, output in zip(texts, outputs, strict=True):
                if len(texts) > 1:
                    say(f"=== {prompt}")
                say(output.outputs[0].text)
        if stats:
            _show(llm, outputs, time.perf_counter() - start)


def _stream(llm: LLM, prompt: str, params: SamplingParams, adapter: str | None) -> RequestOutput:
    """Writes the text as it grows; returns the last output."""
    num_shown, last = 0, None
    for last in llm.stream(prompt, params, lora_request=adapter):
        text = last.outputs[0].text
        write(text[num_shown:])
        num_shown = len(text)
    write("\n")
    assert last is not None, "a stream has at least its end"
    return last


def _show(llm: LLM, outputs: list[RequestOutput], elapsed_s: float) -> None:
    """Prints the figures of a run, then the lines of each drafter."""
    from ..engine.outputs import add_usage

    usage = add_usage([output.speculation for output in outputs])
    rate = usage.num_accepted_tokens / usage.num_draft_tokens if usage.num_draft_tokens else 0.0
    mark = ", synthetic" if usage.synthetic else ""
    num_tokens = sum(len(output.outputs[0].token_ids) for output in outputs)
    num_prompt_tokens = sum(len(output.prompt_token_ids) for output in outputs)
    num_cached_tokens = sum(output.num_cached_tokens for output in outputs)
    table(
        "Statistics",
        {
            "prompt tokens": f"{num_prompt_tokens} ({num_cached_tokens} cached)",
            "output tokens": num_tokens,
            "time": f"{elapsed_s:.2f} s",
            "tokens per second": f"{num_tokens / max(elapsed_s, 1e-9):.1f}",
            "drafter": usage.drafter,
            "steps": usage.num_steps,
            "draft tokens": usage.num_draft_tokens,
            "accepted": f"{usage.num_accepted_tokens} ({rate:.1%}{mark})",
            "mean accepted length": f"{usage.mean_accepted_len:.2f}",
        },
    )
    for line in drafter_lines(llm.stats()["drafters"]):
        note(line)
