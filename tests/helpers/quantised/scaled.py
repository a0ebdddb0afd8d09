"""Weights as stored values with a scale for each block."""

from __future__ import annotations

import json

import torch

BLOCKS = {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic"}


def quantise(weight, block, dtype):
    """Stored values, scales by block, and what the two stand for; by looking at every block."""
    rows, columns = (step or size for step, size in zip(block, weight.shape))
    grid = [-(-weight.shape[0] // rows), -(-weight.shape[1] // columns)]
    stored, wide, scales = torch.empty_like(weight), torch.empty_like(weight), torch.empty(grid)
    largest = 127.0 if dtype == torch.int8 else 448.0
    for row in range(grid[0]):
        for column in range(grid[1]):
            at = (
                slice(row * rows, (row + 1) * rows),
                slice(column * columns, (column + 1) * columns),
            )
            scale = weight[at].abs().max() / largest
            part = weight[at] / scale
            part = part.round() if dtype == torch.int8 else part
            stored[at] = part.to(dtype).float()
            wide[at], scales[row, column] = stored[at] * scale, scale
    return stored.to(dtype), scales, wide


def rewrite(folder, settings) -> None:
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = settings
    (folder / "config.json").write_text(json.dumps(config))
