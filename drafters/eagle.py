"""EAGLE in its three generations, seen from the engine; the head is in `heads/eagle_head.py`."""

from __future__ import annotations

from .colocated import Colocated


class Eagle(Colocated):
    """A layer that guesses the target's next feature (Li et al. 2024, arXiv:2401.15077)."""

    name = "eagle"


class Eagle3(Colocated):
    """The same over features of three depths (Li et al. 2025, arXiv:2503.01840)."""

    name = "eagle3"
