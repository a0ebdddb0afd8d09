"""Ray Serve LLM's entry points, with Outrider's engine: applications, and bodies for handles.

applications:
- name: llm
  import_path: outrider.serve_llm:build_openai_app
  args:
    llm_configs:
    - model_loading_config: {model_id: demo, model_source: /models/demo}
"""

from .cluster.app import build_llm_deployment, build_openai_app
from .cluster.serve.ingress import ChatCompletionRequest, CompletionRequest

__all__ = [
    "ChatCompletionRequest",
    "CompletionRequest",
    "build_llm_deployment",
    "build_openai_app",
]
