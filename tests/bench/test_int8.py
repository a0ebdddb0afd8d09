"""Every int8 product computes the product by its weight, with the error of its rounding."""

from __future__ import annotations

import pytest

from outrider.bench.micro.int8 import KINDS, error

LIMITS = {"bfloat16": 0.004, "float32": 1e-5, "weight-only int8": 0.01}


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_products(kind):
    assert error(kind, (96, 128)) < LIMITS.get(kind.name, 0.02)
