"""What the tests of this folder share."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from outrider.tests.helpers.kubernetes import crd


@pytest.fixture(scope="session")
def schemas() -> dict[tuple[str, str], crd.Schema]:
    folder = os.environ.get("OUTRIDER_CRDS")
    if not folder:
        pytest.skip("OUTRIDER_CRDS is not set: no folder with KubeRay's CRDs to validate against")
    return crd.load_schemas(Path(folder))
