"""Checkpoints: their folders, which may come from the Hub, and partial reads of their weights."""
