"""Medusa, seen from the engine; its heads are in `heads/medusa.py`."""

from __future__ import annotations

from .colocated import Colocated


class Medusa(Colocated):
    """Several heads on the target's last hidden state (Cai et al. 2024, arXiv:2401.10774)."""

    name = "medusa"
