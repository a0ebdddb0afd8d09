"""Reproducible benchmarks: Outrider with and without speculation, and peers, in one run."""
