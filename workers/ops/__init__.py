"""The operations that a decoder is made of: one protocol, one implementation per kind of device."""

from .factory import c_compiler, make_invariant_ops, make_ops, max_latent_heads, missing_kernels
from .plan import PagedStep, plan_step
from .protocol import DeviceOps, Ops, PlannedOps
from .reference import ReferenceOps

__all__ = [
    "DeviceOps",
    "Ops",
    "PagedStep",
    "PlannedOps",
    "ReferenceOps",
    "c_compiler",
    "make_invariant_ops",
    "make_ops",
    "max_latent_heads",
    "missing_kernels",
    "plan_step",
]
