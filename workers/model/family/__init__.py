"""Our own decoder: one forward for every architecture of the family, over `workers/ops/`."""

from .adapted import Adapters
from .decoder import FamilyModel, FamilyRunner, LayerStack
from .load import build_family, build_layers
from .spec import FamilySpec, read_spec, recurrent_layers, without_attention

__all__ = [
    "Adapters", "FamilyModel", "FamilyRunner", "FamilySpec", "LayerStack", "build_family",
    "build_layers", "read_spec", "recurrent_layers", "without_attention",
]  # fmt: skip
