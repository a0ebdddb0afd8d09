"""How soon deaths are noticed by the Ray that `outrider serve` starts.

A Ray that runs already has what `ray start` was given; `docs/operations.md` lists the variables.
"""

from __future__ import annotations

import os

DETECTION = {
    "RAY_SERVE_PROXY_HEALTH_CHECK_PERIOD_S": "0.25",  # a proxy is replaced after three failures
    # An engine's answers to all ingresses wait behind those to one that died, one after the other,
    # each for this time (whole seconds) and for the check behind it.
    "RAY_core_worker_rpc_server_reconnect_timeout_base_s": "0",
    "RAY_grpc_client_check_connection_status_interval_milliseconds": "20",
}


def set_detection() -> None:
    """Sets what the environment does not set already, for processes that Ray starts."""
    for name, value in DETECTION.items():
        os.environ.setdefault(name, value)
