"""`outrider run-batch`: answers a file of OpenAI's batch API in this process, without a server.

Every line of the input is a request, `{"custom_id", "method": "POST", "url", "body"}`. The output
gets a line for each request as soon as it is answered. A second run continues: it skips lines whose
`custom_id` is already in the output.
"""

from __future__ import annotations

import asyncio
import json
import uuid
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TextIO

import typer

from ..errors import (
    ConfigError,
    EngineDeadError,
    InvalidRequestError,
    OutriderError,
    OverloadedError,
)
from .console import check_writable, note
from .options import EngineOptions
from .session import loaded

if TYPE_CHECKING:
    from ..cluster.backend import LLM
    from ..cluster.serve.openai.calls import Calls

_BUSY_S = 0.25  # pause before a full queue is retried
_HEAD = b'{"id": "batch_req_'  # beginning of every line of an output


def run_batch(
    engine: EngineOptions,
    input_file: Annotated[
        Path, typer.Option("--input-file", "-i", help="JSON lines, as for OpenAI's batch API.")
    ],
    output_file: Annotated[
        Path, typer.Option("--output-file", "-o", help="A line per request; continued if there.")
    ],
    checkpoint: Annotated[
        str | None, typer.Argument(metavar="[MODEL]", help="Checkpoint folder.")
    ] = None,
    progress: Annotated[
        bool, typer.Option("--progress/--no-progress", help="Show a bar, on stderr.")
    ] = True,
) -> None:
    """Answers a file of OpenAI's batch API; a second run continues where the first one ended."""
    if checkpoint is not None:
        engine = engine.with_argument("model", checkpoint)
    config = engine.resolve()
    num_lines = sum(1 for _ in requests_of(input_file, check_ids=True))
    check_writable(output_file, "output_file")
    if output_file.exists() and output_file.samefile(input_file):
        raise ConfigError.at("output_file", f"{output_file} is the input file")
    done = continued(output_file)
    with ExitStack() as stack:
        llm = loaded(config, stack)
        # Lone surrogates, which an id may contain, are written as JSON escapes.
        file = stack.enter_context(
            output_file.open("a", encoding="utf-8", errors="backslashreplace")
        )
        waiting = (each for each in requests_of(input_file) if each["custom_id"] not in done)
        num_waiting = sum(each["custom_id"] not in done for each in requests_of(input_file))
        num_failed = asyncio.run(_answer_all(llm, waiting, num_waiting, file, progress))
    note(
        f"{num_lines} requests: {num_lines - num_waiting} answered before, "
        f"{num_waiting - num_failed} now, {num_failed} with an error"
    )


def requests_of(path: Path, *, check_ids: bool = False) -> Iterator[dict[str, Any]]:
    """Yields the requests in the non-empty lines of an input.

    Raises:
        ConfigError: the file cannot be read, or a line is not an object with a unique `custom_id`;
            names the line.
    """
    seen: set[str] = set()
    try:
        with path.open(encoding="utf-8") as file:
            for number, line in enumerate(file, start=1):
                if line.strip():
                    request = _request(line, number)
                    custom_id = request["custom_id"]
                    if check_ids and custom_id in seen:
                        raise _of_line(number, f"custom_id: a second line has {custom_id!r}")
                    if check_ids:
                        seen.add(custom_id)
                    yield request
    except OSError as error:
        raise ConfigError.at("input_file", f"cannot read {path}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise ConfigError.at("input_file", f"{path} is not UTF-8: {error}") from None


def _request(line: str, number: int) -> dict[str, Any]:
    try:
        request = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise _of_line(number, f"it is not JSON: {error}") from None
    if not isinstance(request, dict):
        raise _of_line(number, "it has to be a JSON object")
    if not isinstance(request.get("custom_id"), str):
        raise _of_line(number, f"custom_id: expected a text, got {request.get('custom_id')!r}")
    return request


def _of_line(number: int, reason: str) -> ConfigError:
    return ConfigError.at("input_file", f"line {number}: {reason}")


def continued(path: Path) -> set[str]:
    """Returns every `custom_id` in an output; removes an incomplete last line.

    Raises:
        ConfigError: a line is not a line of an output.
    """
    found: set[str] = set()
    if not path.exists():
        return found
    with path.open("r+b") as file:
        kept = 0  # bytes
        for number, line in enumerate(file, start=1):
            if not line.endswith(b"\n") and (line.startswith(_HEAD) or _HEAD.startswith(line)):
                file.truncate(kept)  # an earlier run ended while writing
                break
            try:
                found.add(str(json.loads(line)["custom_id"]))
            except (ValueError, TypeError, KeyError, RecursionError):
                raise ConfigError.at(
                    "output_file", f"line {number} of {path} is not of a batch's output"
                ) from None
            kept += len(line)
    return found


async def _answer_all(
    llm: LLM, waiting: Iterator[dict[str, Any]], total: int, file: TextIO, progress: bool
) -> int:
    """Answers requests, with limited concurrency, and writes each line when it is ready.

    Returns:
        The number of requests with an error.
    """
    from tqdm.auto import tqdm

    from ..cluster.serve.metrics import EdgeMetrics
    from ..cluster.serve.openai.calls import Calls, Edge
    from ..cluster.serve.openai.engine_client import EngineClient

    metrics = EdgeMetrics(llm.config.model_name)
    calls = Calls(
        Edge(
            EngineClient(llm.engine),
            llm.frontend,
            metrics,
            max_completions=llm.config.max_queued_requests,
        )
    )
    num_failed = 0

    async def work() -> None:
        nonlocal num_failed
        for request in waiting:  # shared by all tasks
            line = await answered(calls, request)
            num_failed += line["error"] is not None
            file.write(json.dumps(line, ensure_ascii=False) + "\n")
            file.flush()
            bar.update(1)

    # Enough tasks to fill the next batch while the current one runs.
    num_tasks = min(2 * llm.config.max_num_seqs, llm.config.max_queued_requests, max(1, total))
    with tqdm(total=total, desc="Requests", dynamic_ncols=True, disable=not progress) as bar:
        tasks = [asyncio.create_task(work()) for _ in range(num_tasks)]
        try:
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
    return num_failed


async def answered(calls: Calls, request: dict[str, Any]) -> dict[str, Any]:
    """Returns the output line of a request, which contains its error.

    Raises:
        EngineDeadError: no further request can be answered.
    """
    from ..cluster.serve.openai.errors import error_body

    error: dict[str, Any] | None = None
    try:
        status, body = 200, await _answer(calls, request)
    except EngineDeadError:
        raise
    except OutriderError as failure:
        status, body = failure.status, error_body(failure)
        error = {"code": failure.code or failure.kind, "message": failure.message}
    line_id = uuid.uuid4().hex
    return {
        "id": f"batch_req_{line_id}",
        "custom_id": request["custom_id"],
        "response": {
            "status_code": status,
            "request_id": str(body.get("id") or f"req_{line_id}"),
            "body": body,
        },
        "error": error,
    }


async def _answer(calls: Calls, request: dict[str, Any]) -> dict[str, Any]:
    """Returns the answer to a request; waits while the queue is full."""
    unknown = sorted(request.keys() - {"custom_id", "method", "url", "body"})
    if unknown:
        raise InvalidRequestError.at(unknown[0], "unknown field of a batch's line")
    if request.get("method", "POST") != "POST":
        raise InvalidRequestError.at("method", f"expected 'POST', got {request['method']!r}")
    if not isinstance(request.get("url"), str):
        raise InvalidRequestError.at("url", f"expected a text, got {request.get('url')!r}")
    while True:
        try:
            return await calls.answer(request["url"], request.get("body"))
        except OverloadedError:
            await asyncio.sleep(_BUSY_S)
