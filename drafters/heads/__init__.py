"""Heads: small modules that draft from the target's hidden states, inside its workers."""

from .registry import build_head, check_head

__all__ = ["build_head", "check_head"]
