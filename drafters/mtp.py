"""Multi-token prediction, seen from the engine; its modules are in `heads/mtp_head.py`."""

from __future__ import annotations

from .colocated import Colocated


class MTP(Colocated):
    """Modules that were trained with the target (DeepSeek-V3, arXiv:2412.19437)."""

    name = "mtp"
