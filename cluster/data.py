"""Offline batches on Ray Data: `build_processor`, with one engine per worker.

    processor = build_processor(ProcessorConfig(model_source=...), preprocess=..., postprocess=...)
    processor(dataset)                            # returns a dataset, computed when it is read
    processor.write(dataset, "out", "id")         # JSON lines; resumable after an interruption

Columns and arguments have the names of `ray.data.llm`.
"""

from __future__ import annotations

import asyncio
import json
import uuid
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field

from ..config import EngineConfig, Strict
from ..config.files import write_whole
from ..errors import ConfigError, InvalidRequestError, below
from ..scheduler.sampling import SamplingParams

if TYPE_CHECKING:
    from ray.data import Dataset

    from ..engine.outputs import RequestOutput

RowFunction = Callable[[dict[str, Any]], dict[str, Any]]
ERROR = "__inference_error__"
_PART = "part-{}.jsonl"
_EMPTY: dict[str, Any] = {
    "generated_text": "",
    "generated_tokens": [],
    "finish_reason": "error",
    "num_input_tokens": 0,
    "num_generated_tokens": 0,
}


class ProcessorConfig(Strict):
    """The engine's configuration, the number of engines and the batch size."""

    model_source: str = Field(min_length=1, description="Folder, Hugging Face id or address.")
    engine_kwargs: dict[str, Any] = Field(default_factory=dict)
    """Keys of the engine, in our names or vLLM's."""
    batch_size: int = Field(64, ge=1, description="Rows that an engine gets at a time.")
    concurrency: int | tuple[int, int] = 1
    """Workers, each with an engine; two numbers: the minimum and maximum, scaled with the load."""
    max_concurrent_batches: int = Field(2, ge=1, description="Batches in an engine at once.")
    on_error: Literal["raise", "return"] = "raise"
    """return: a failed row has its message in `__inference_error__`; the others continue."""
    runtime_env: dict[str, Any] | None = None
    """Ray's runtime environment of the workers."""

    def engine(self) -> EngineConfig:
        """Returns the engine's configuration; raises `ConfigError`, which names the key."""
        with below("engine_kwargs"):
            return EngineConfig.load({"model": self.model_source, **self.engine_kwargs})

    def sizes(self) -> dict[str, Any]:
        """Returns the sizes of the worker pool; raises `ConfigError` if they are invalid."""
        low, high = (
            self.concurrency if isinstance(self.concurrency, tuple) else [self.concurrency] * 2
        )
        if not 1 <= low <= high:
            raise ConfigError.at(
                "concurrency", f"at least 1, or two numbers in order, got {self.concurrency}"
            )
        return {"min_size": low, "max_size": high}


def build_processor(
    config: ProcessorConfig,
    preprocess: RowFunction | None = None,
    postprocess: RowFunction | None = None,
) -> Processor:
    """Returns a processor that completes every row of a dataset.

    Args:
        preprocess: adds the input columns to a row: `prompt`, `prompt_token_ids` or `messages`, and
            `sampling_params` as a mapping.
        postprocess: returns the row to keep. Its argument has the columns of the dataset and of
            `preprocess`, and `generated_text`, `generated_tokens`, `finish_reason`,
            `num_input_tokens`, `num_generated_tokens`, `speculation` and `__inference_error__`.

    Raises:
        ConfigError: a key is invalid, or Ray Data is not installed.
    """
    try:
        import pyarrow  # noqa: F401
        from ray import data  # noqa: F401
    except ImportError as error:
        raise ConfigError(
            f"Ray Data is not installed ({error}); `pip install outrider[data]`"
        ) from None
    return Processor(config, preprocess, postprocess)


class Processor:
    """Completes datasets; see `build_processor`."""

    def __init__(
        self,
        config: ProcessorConfig,
        preprocess: RowFunction | None,
        postprocess: RowFunction | None,
    ) -> None:
        self._config, self._functions = config, (preprocess, postprocess)
        self._sizes, self._engine = config.sizes(), config.engine()

    def __call__(self, dataset: Dataset) -> Dataset:
        """Returns the dataset of completed rows, which is computed when it is read."""
        return self._mapped(dataset, None)

    def write(self, dataset: Dataset, folder: str | Path, id_column: str) -> Dataset:
        """Completes rows and writes each finished batch to a file of JSON lines.

        Rows whose `id_column` is already in the folder are skipped, so an interrupted call can be
        repeated. On several nodes, the folder must be shared by all of them.

        Returns:
            All rows of the folder.

        Raises:
            ConfigError: the dataset or a row of the folder lacks the column.
        """
        import ray

        path = Path(folder).absolute()
        path.mkdir(parents=True, exist_ok=True)
        names = dataset.columns()
        if names is not None and id_column not in names:
            raise ConfigError.at("id_column", f"the dataset has {names}, not {id_column!r}")
        done = ray.put(written_ids(path, id_column))
        left = dataset.filter(lambda row: row[id_column] not in ray.get(done))
        small = left.repartition(target_num_rows_per_block=self._config.batch_size)
        self._mapped(small, (str(path), id_column)).materialize()
        return ray.data.read_json(str(path), file_extensions=["jsonl"])

    def _mapped(self, dataset: Dataset, output: tuple[str, str] | None) -> Dataset:
        from ray.data import ActorPoolStrategy

        config, resources = self._engine, self._engine.resources
        at_once = self._config.max_concurrent_batches
        options: dict[str, Any] = {"num_cpus": 0}  # ranks reserve their own resources
        if config.executor != "ray":
            ranks, gpus = config.tensor_parallel_size, resources.gpus_per_worker
            options = {"num_cpus": ranks * (resources.cpus_per_worker or 1)}
            options |= {"num_gpus": ranks * gpus} if gpus else {}
        if self._config.runtime_env is not None:
            options["runtime_env"] = self._config.runtime_env
        return dataset.map_batches(
            _Worker,
            batch_size=self._config.batch_size,
            batch_format="pyarrow",
            compute=ActorPoolStrategy(**self._sizes, max_concurrent_calls_per_actor=at_once),
            fn_constructor_args=(config, self._config.on_error, *self._functions, output),
            **options,
        )


def written_ids(folder: Path, id_column: str) -> frozenset[Any]:
    """Returns the ids of all rows in a folder.

    Raises:
        ConfigError: a row has no id.
    """
    found = set()
    for path in sorted(folder.glob(_PART.format("*"))):
        for line in path.read_text(encoding="utf-8").splitlines():
            row = json.loads(line)
            if id_column not in row:
                raise ConfigError.at("id_column", f"{path.name} has rows without {id_column!r}")
            found.add(row[id_column])
    return frozenset(found)


class _Worker:
    """An actor with an engine, which completes batches of rows."""

    def __init__(
        self,
        config: EngineConfig,
        on_error: Literal["raise", "return"],
        preprocess: RowFunction | None,
        postprocess: RowFunction | None,
        output: tuple[str, str] | None,
    ) -> None:
        from .backend import LLM

        self._on_error, self._output = on_error, output
        self._preprocess, self._postprocess = preprocess, postprocess
        self._llm = LLM.from_config(config)

    async def __call__(self, batch: Any) -> AsyncIterator[Any]:
        import pyarrow

        rows = await asyncio.to_thread(self.completed, batch.to_pylist())
        if self._output is not None and rows:
            await asyncio.to_thread(self._write, rows)
            failed = sum(bool(row.get(ERROR)) for row in rows)
            rows = [{"num_rows": len(rows), "num_errors": failed}]
        names = dict.fromkeys(name for row in rows for name in row)
        yield pyarrow.Table.from_pylist([{name: row.get(name) for name in names} for row in rows])

    def completed(self, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Returns the rows with the completions.

        Raises:
            OutriderError: a row failed, and `on_error` is "raise".
        """
        prepared = [{**row, **(self._preprocess(row) if self._preprocess else {})} for row in rows]
        runnable: list[tuple[int, Any, SamplingParams]] = []
        for index, row in enumerate(prepared):
            try:
                runnable.append((index, self._prompt(row), self._sampling(row)))
            except InvalidRequestError as error:
                if self._on_error == "raise":
                    raise
                prepared[index] = {**row, **_EMPTY, ERROR: error.message}
        outputs = self._llm.generate(
            [prompt for _, prompt, _ in runnable],
            [sampling for *_, sampling in runnable],
            use_tqdm=False,
            on_error=self._on_error,
        )
        for place, ((index, *_), output) in enumerate(zip(runnable, outputs, strict=True)):
            prepared[index] |= _columns(output, f"prompts[{place}]: ")
        return [self._kept(given, row) for given, row in zip(rows, prepared, strict=True)]

    def _kept(self, given: dict[str, Any], row: dict[str, Any]) -> dict[str, Any]:
        """Returns the row to keep, with its id; a failed row keeps its message."""
        kept = row if row[ERROR] or self._postprocess is None else self._postprocess(row)
        more = {ERROR: row[ERROR]} if self._on_error == "return" else {}
        if self._output is not None:
            more[self._output[1]] = given[self._output[1]]
        return {**kept, **more}

    def _prompt(self, row: dict[str, Any]) -> Any:
        """Returns the prompt of a row."""
        given = [
            name for name in ("messages", "prompt_token_ids", "prompt") if row.get(name) is not None
        ]
        if not given:
            raise InvalidRequestError.at(
                "prompt", "a row needs prompt, prompt_token_ids or messages"
            )
        if given[0] == "messages":
            messages = [
                {name: value for name, value in each.items() if value is not None}
                for each in row["messages"]
            ]
            prompt = self._llm.frontend.chat_prompt(messages)
            return {"prompt": prompt.text, "prompt_token_ids": list(prompt.token_ids)}
        return row["prompt"] if given[0] == "prompt" else list(row["prompt_token_ids"])

    def _sampling(self, row: dict[str, Any]) -> SamplingParams:
        given = {
            name: value
            for name, value in (row.get("sampling_params") or {}).items()
            if value is not None
        }
        sampling = SamplingParams(**given)
        if sampling.n != 1:
            raise InvalidRequestError.at("n", f"a row has one completion, got {sampling.n}")
        return self._llm.frontend.with_defaults(sampling) if not given else sampling

    def _write(self, rows: list[dict[str, Any]]) -> None:
        """Writes a file atomically."""
        assert self._output is not None
        path = Path(self._output[0]) / _PART.format(uuid.uuid4().hex)
        write_whole(path, (json.dumps(row).encode() + b"\n" for row in rows))


def _columns(output: RequestOutput, place: str) -> dict[str, Any]:
    """Returns a completion's columns; removes the prompt's index from an error."""
    if output.error is not None:
        return {**_EMPTY, ERROR: output.error.removeprefix(place)}
    (completion,), usage = output.outputs, output.speculation
    return {
        "generated_text": completion.text,
        "generated_tokens": list(completion.token_ids),
        "finish_reason": completion.finish_reason,
        "num_input_tokens": len(output.prompt_token_ids),
        "num_generated_tokens": len(completion.token_ids),
        "speculation": {
            "drafter": usage.drafter,
            "num_draft_tokens": usage.num_draft_tokens,
            "num_accepted_tokens": usage.num_accepted_tokens,
            "mean_accepted_len": usage.mean_accepted_len,
            "num_steps": usage.num_steps,
        },
        ERROR: "",
    }
