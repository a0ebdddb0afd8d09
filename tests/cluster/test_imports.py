"""What an engine replica imports: its start is a pause of streams after another one's death."""

from __future__ import annotations

import subprocess
import sys

import pytest

SCRIPT = """
import sys
import outrider.cluster.app, outrider.cluster.backend
print(*(name for name in sys.argv[1:] if name in sys.modules))
"""


@pytest.mark.slow
def test_a_replica_does_not_import_what_computes_models() -> None:
    heavy = ("torch._dynamo", "transformers.modeling_utils", "outrider.workers.worker")
    command = [sys.executable, "-c", SCRIPT, *heavy]
    assert subprocess.run(command, capture_output=True, check=True, text=True).stdout.strip() == ""
