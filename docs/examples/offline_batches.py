"""Completes a dataset with Ray Data, and goes on where an earlier run was stopped.

python docs/examples/offline_batches.py FOLDER
"""

from __future__ import annotations

import sys
from typing import Any

import ray

from outrider.data import ProcessorConfig, build_processor

CONFIG = ProcessorConfig(
    model_source="demo/models/target",
    engine_kwargs={
        "executor": "local",  # the engine runs in the worker; "ray" gives ranks their own places
        "max_model_len": 512,
        "kv_cpu_bytes": 2**26,
        "speculative_config": {"method": "ngram", "num_speculative_tokens": 4},
    },
    batch_size=4,
    concurrency=1,
    on_error="return",
)


def prompt(row: dict[str, Any]) -> dict[str, Any]:
    """What the model is asked for a row."""
    settings = {"temperature": 0, "max_tokens": row["num"]}
    return {"prompt": f"def {row['name']}(", "sampling_params": settings}


def kept(row: dict[str, Any]) -> dict[str, Any]:
    """What is kept of a row."""
    return {"text": row["generated_text"], "num_steps": row["speculation"]["num_steps"]}


def main(folder: str) -> None:
    names = ("main", "parse", "read", "write", "close", "refused")
    rows = [{"name": name, "num": -1 if name == "refused" else 8} for name in names]
    processor = build_processor(CONFIG, preprocess=prompt, postprocess=kept)
    written = processor.write(ray.data.from_items(rows), folder, "name")
    for row in written.take_all():
        print(row["name"], repr(row["text"]), row["__inference_error__"], sep=" | ")


if __name__ == "__main__":
    main(sys.argv[1])
