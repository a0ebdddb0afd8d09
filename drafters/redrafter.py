"""ReDrafter, seen from the engine; its head is in `heads/redrafter.py`."""

from __future__ import annotations

from .colocated import Colocated


class ReDrafter(Colocated):
    """A recurrent head, searched with beams (Zhang et al. 2024, arXiv:2403.09919)."""

    name = "redrafter"
