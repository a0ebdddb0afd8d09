"""Ray Data sends its rows to a running model: `ray.data.llm`'s processor of Serve deployments.

python docs/examples/batch_through_serve.py
"""

from __future__ import annotations

from typing import Any

import ray
from ray import serve
from ray.data.llm import ServeDeploymentProcessorConfig, build_processor

from outrider.serve_llm import ChatCompletionRequest, CompletionRequest, build_openai_app

MODEL = {
    "model_loading_config": {"model_id": "demo", "model_source": "demo/models/target"},
    "engine_kwargs": {"max_model_len": 512, "kv_cpu_bytes": 2**26},
}


def request(row: dict[str, Any]) -> dict[str, Any]:
    """The method that is called for a row, and its body."""
    return {
        "method": "completions",
        "dtype": "CompletionRequest",
        "request_kwargs": {"prompt": row["item"], "max_tokens": row["num"], "temperature": 0},
    }


def text(row: dict[str, Any]) -> dict[str, Any]:
    """What is kept of an answer."""
    return {"prompt": row["item"], "text": row["choices"][0]["text"]}


def main() -> None:
    serve.run(build_openai_app({"llm_configs": [MODEL]}), name="outrider")
    config = ServeDeploymentProcessorConfig(
        deployment_name="Ingress",
        app_name="outrider",
        dtype_mapping={
            "CompletionRequest": CompletionRequest,
            "ChatCompletionRequest": ChatCompletionRequest,
        },
        should_continue_on_error=True,  # a row that is refused has `__inference_error__`
        batch_size=4,
    )
    processor = build_processor(config, preprocess=request, postprocess=text)
    rows = [{"item": "def main():", "num": 8}, {"item": "class Stack:", "num": -1}]
    for row in processor(ray.data.from_items(rows)).take_all():
        *_, error = row["__inference_error__"].splitlines() or [""]
        print(row.get("text"), error, sep=" | ")
    serve.shutdown()


if __name__ == "__main__":
    main()
