"""Quantised checkpoints: which formats are read, and their weights as tensors."""
