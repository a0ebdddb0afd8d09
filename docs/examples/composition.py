"""An application with a model inside: it asks for whole answers and for streams, without HTTP.

python docs/examples/composition.py
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Any

from ray import serve
from ray.serve.handle import DeploymentHandle

from outrider.serve_llm import build_llm_deployment

MODEL = {
    "model_loading_config": {"model_id": "demo", "model_source": "demo/models/target"},
    "engine_kwargs": {
        "max_model_len": 512,
        "kv_cpu_bytes": 2**26,
        "speculative_config": {"method": "ngram", "num_speculative_tokens": 4},
    },
}


@serve.deployment(ray_actor_options={"num_cpus": 0})
class Writer:
    """Completes a function from its first line."""

    def __init__(self, model: DeploymentHandle[Any]) -> None:
        self._model = model

    async def write(self, line: str) -> str:
        body = {"prompt": f"{line}\n", "max_tokens": 32, "temperature": 0}
        answer = await self._model.completions.remote(body)
        return str(answer["choices"][0]["text"])

    async def stream(self, line: str) -> AsyncGenerator[str, None]:
        body = {"prompt": f"{line}\n", "max_tokens": 32, "temperature": 0, "stream": True}
        async for chunk in self._model.options(stream=True).completions.remote(body):
            yield chunk["choices"][0]["text"]


def main() -> None:
    application = Writer.bind(build_llm_deployment(MODEL))
    writer = serve.run(application, name="writer", route_prefix="/writer")
    line = "def main():"
    whole = writer.write.remote(line).result()
    pieces = list(writer.options(stream=True).stream.remote(line))
    assert "".join(pieces) == whole
    print(line, whole, f"({len(pieces)} pieces)", sep="\n")
    serve.shutdown()


if __name__ == "__main__":
    main()
