"""Joins a running Ray, or starts one, for the duration of a command or an `LLM`."""

from __future__ import annotations

import contextlib
import logging
import math
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import ConfigError
from .placement import Node

if TYPE_CHECKING:
    from ..config import EngineConfig

_CONNECT_TIMEOUT_S = 5.0
_PROBE_TIMEOUT_S = 30.0
_NICENESS = "RAY_worker_niceness"  # Ray's default is 15, which gives way to any other process

log = logging.getLogger(__name__)


def find_ray(address: str | None = None) -> str | None:
    """Returns the address of the cluster to join: `address`, RAY_ADDRESS, or a local `ray start`.

    Returns None if a new cluster has to be started, which `local` requests.

    Raises:
        ConfigError: no Ray answers at `address` or RAY_ADDRESS.
    """
    named = address or os.environ.get("RAY_ADDRESS") or None
    if "ray" not in sys.modules and (named == "local" or not (named or _address_file().exists())):
        return None  # without importing Ray, which is slow
    import ray
    from ray._private.services import find_bootstrap_address

    if ray.is_initialized():
        return str(ray.get_runtime_context().gcs_address)
    if named == "local":
        return None
    if named in (None, "auto"):
        found = find_bootstrap_address(None)  # the file may belong to a cluster that has ended
        if found is not None and _listens(*_split(found)) and _answers(found):
            return found
        if named is None:
            return None
        raise ConfigError.at("address", "no Ray is running on this machine")
    if not _answers(named.removeprefix("ray://")):
        raise ConfigError.at(
            "address",
            f"no Ray answers at {named} within {_CONNECT_TIMEOUT_S:.0f} s; start one with "
            "`ray start --head`, or leave the address out",
        )
    return named


def _address_file() -> Path:
    """Returns the file in which `ray start` stores its address (see `find_bootstrap_address`)."""
    folder = os.environ.get("RAY_TMPDIR", os.environ.get("TMPDIR", "/tmp"))
    return Path(folder) / "ray" / "ray_current_cluster"


def _answers(address: str) -> bool:
    """Returns True if a control plane accepts calls at `host:port` within a few seconds.

    Ray itself tries for 40 s or more, and ends the process on some failures.
    """
    import grpc

    host, port = _split(address)
    if os.environ.get("RAY_USE_TLS", "0") != "0":  # only Ray has the certificates
        return _listens(host, port)
    with grpc.insecure_channel(address, [("grpc.enable_http_proxy", 0)]) as channel:
        try:
            grpc.channel_ready_future(channel).result(timeout=_CONNECT_TIMEOUT_S)
        except grpc.FutureTimeoutError:
            return False
    return True


def _split(address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit():
        raise ConfigError.at("address", f"{address!r} is not host:port, 'auto' or 'local'")
    return host, int(port)


def _listens(host: str, port: int) -> bool:
    """Returns True if a server listens; returns at once if the connection is refused."""
    try:
        with socket.create_connection((host.strip("[]"), port), _CONNECT_TIMEOUT_S):
            return True
    except (OSError, OverflowError):
        return False


def _send_token() -> None:
    """Enables token authentication if a token is stored and no mode is set.

    In that case `ray start` requires the token, but `ray.init(address)` would not send it.
    """
    from ray._private.authentication import authentication_token_setup as setup
    from ray._raylet import AuthenticationTokenLoader  # type: ignore[attr-defined]

    if os.environ.get(setup.AUTH_MODE_ENV_VAR) is None and (
        AuthenticationTokenLoader.instance().has_token(ignore_auth_mode=True)
    ):
        setup._enable_token_auth()


def start_ray(
    config: EngineConfig,
    *,
    address: str | None = None,
    num_engines: int = 1,
    num_cpus_beside: float = 0.0,
) -> bool:
    """Joins the cluster that `find_ray` finds, or starts one; returns False if already joined.

    An existing cluster keeps its number of CPUs. A cluster that is started here serves only this
    process. It is given as many CPUs as the workers request; if there are fewer cores, workers
    share them, which is slower.

    Args:
        num_cpus_beside: CPUs requested by workers that belong to no engine.

    Raises:
        ConfigError: there is no Ray at `address`.
    """
    import ray

    if ray.is_initialized():
        return False
    found = find_ray(address)
    own: dict[str, Any] = {}
    if found is not None:
        _send_token()
    else:
        num_cpus = num_engines * num_cpus_of(config) + num_cpus_beside
        cores = len(os.sched_getaffinity(0))
        own = {"num_cpus": max(cores, math.ceil(num_cpus)), "include_dashboard": False}
        if _NICENESS not in os.environ:
            own["_system_config"] = {"worker_niceness": 0}
        if num_cpus > cores:
            log.warning("the workers ask for %g CPUs and share %d cores", num_cpus, cores)
    try:
        ray.init(
            address=found or "local", log_to_driver=False, logging_level=logging.WARNING, **own
        )
    except Exception as error:  # noqa: BLE001 -- Ray raises plain ones, too
        what = f"join Ray at {found}" if found else "start Ray on this machine"
        why = " ".join(str(error).split()) or type(error).__name__
        raise ConfigError.at("address", f"cannot {what}: {why}") from None
    return True


def join_ray(address: str) -> None:
    """Joins the cluster at `address`, as returned by `find_ray`."""
    import ray

    if not ray.is_initialized():
        _send_token()
        ray.init(address=address, log_to_driver=False, logging_level=logging.WARNING)


@contextlib.contextmanager
def _joined(address: str) -> Iterator[None]:
    """Joins this process to the cluster at `address` within the context."""
    import ray

    join_ray(address)
    try:
        yield
    finally:
        ray.shutdown()


def worker_niceness(address: str) -> int:
    """Joins the cluster at `address` to read the niceness of its workers, then leaves it.

    Returns 0 if the cluster ends meanwhile.
    """
    import ray
    from ray.exceptions import RayError

    with _joined(address):
        try:
            found: int = ray.get(ray.remote(num_cpus=0)(lambda: os.nice(0)).remote())
        except RayError:
            return 0
        return found


def cluster_nodes(address: str) -> list[Node]:
    """Returns the nodes of the cluster at `address` with their free resources.

    Joins the cluster and leaves it again. Nodes with GPUs are asked for their GPU memory, which Ray
    does not record; it is unknown for a node that does not answer within 30 s.
    """
    import ray
    from ray._private.state import available_resources_per_node
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    with _joined(address):
        free = available_resources_per_node()
        alive = [node for node in ray.nodes() if node["Alive"]]
        asked = {
            node["NodeID"]: ray.remote(num_cpus=0)(_gpu_bytes)
            .options(scheduling_strategy=NodeAffinitySchedulingStrategy(node["NodeID"], soft=False))
            .remote()
            for node in alive
            if node["Resources"].get("GPU")
        }
        refs, ready = [*asked.values()], list[Any]()
        if refs:
            ready, _ = ray.wait(refs, num_returns=len(refs), timeout=_PROBE_TIMEOUT_S)
        known = {node: ray.get(ref) for node, ref in asked.items() if ref in ready}
        return [
            Node(
                node["NodeManagerAddress"] + f" {node['NodeID'][:6]}",
                node["Resources"],
                free.get(node["NodeID"], {}),
                known.get(node["NodeID"]),
                int(node["Resources"].get("memory", 0)) or None,
            )
            for node in alive
        ]


def _gpu_bytes() -> int | None:
    """Returns the bytes of this machine's smallest GPU; None if nvidia-smi does not report them."""
    command = ["nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=20)
        return min(int(line) for line in done.stdout.split()) * 2**20
    except (OSError, subprocess.SubprocessError, ValueError):
        return None


def num_cpus_of(config: EngineConfig) -> float:
    """Returns the CPUs that one engine's workers request in a cluster without GPUs."""
    from ..config import DraftModelConfig, HeadConfig

    num_workers = config.tensor_parallel_size
    for section in config.speculative_config.sections:
        if isinstance(section, DraftModelConfig) and section.drafter_group is not None:
            continue
        if isinstance(section, DraftModelConfig) and section.placement == "separate":
            num_workers += section.draft_tensor_parallel_size or 1
        elif isinstance(section, HeadConfig) and section.placement == "separate":
            num_workers += 1
    each = config.resources.cpus_per_worker
    return num_workers * (1.0 if each is None else each)


# Settings of a Ray that `outrider serve` starts. A running Ray keeps those of its `ray start`;
# `docs/operations.md` lists the variables.
RAY_VARIABLES = {
    # If a caller dies, every pending answer to it delays the answers to all other callers, by this
    # time (whole seconds) and by the connection check after it.
    "RAY_core_worker_rpc_server_reconnect_timeout_base_s": "0",
    "RAY_grpc_client_check_connection_status_interval_milliseconds": "20",
    # Replicas wake up for Serve's metrics ten times per export interval; Ray exports every 10 s.
    "RAY_SERVE_METRICS_EXPORT_INTERVAL_MS": "5000",
}


def set_ray_variables() -> None:
    """Sets the variables that the environment does not define, for processes that Ray starts."""
    for name, value in RAY_VARIABLES.items():
        os.environ.setdefault(name, value)
