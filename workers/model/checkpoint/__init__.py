"""Checkpoints: their folders, from the Hub too, and their weights, read in part."""
