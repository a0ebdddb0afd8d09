"""Ray for the length of a command or of an `LLM`: joined where there is one, started where not."""

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
_NICENESS = "RAY_worker_niceness"  # Ray's own default is 15: any other process would go first

log = logging.getLogger(__name__)


def find_ray(address: str | None = None) -> str | None:
    """The cluster to join: `address`, RAY_ADDRESS, or what `ray start` left running here.

    None: a new one is to be started; `local` asks for that.

    Raises:
        ConfigError: nothing answers at `address`, or in RAY_ADDRESS.
    """
    named = address or os.environ.get("RAY_ADDRESS") or None
    if "ray" not in sys.modules and (named == "local" or not (named or _address_file().exists())):
        return None  # importing Ray takes longer than most mistakes to be found
    import ray
    from ray._private.services import find_bootstrap_address

    if ray.is_initialized():
        return str(ray.get_runtime_context().gcs_address)
    if named == "local":
        return None
    if named in (None, "auto"):
        found = find_bootstrap_address(None)  # the file may be of a cluster that has ended
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
    """Where `ray start` leaves its address, which `find_bootstrap_address` reads."""
    folder = os.environ.get("RAY_TMPDIR", os.environ.get("TMPDIR", "/tmp"))
    return Path(folder) / "ray" / "ray_current_cluster"


def _answers(address: str) -> bool:
    """Whether a control plane takes calls at `host:port`, within seconds.

    Ray itself tries for 40 s and more, and ends the process on some failures.
    """
    import grpc

    host, port = _split(address)
    if os.environ.get("RAY_USE_TLS", "0") != "0":  # its certificates are Ray's business
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
    """Whether anything does; at once where the kernel says that nothing does."""
    try:
        with socket.create_connection((host.strip("[]"), port), _CONNECT_TIMEOUT_S):
            return True
    except (OSError, OverflowError):
        return False


def _send_token() -> None:
    """Lets this process authenticate itself where a token is stored and no mode is set.

    `ray start` demands the token in that case, and `ray.init(address)` would not send it.
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
    """Joins the cluster that `find_ray` finds, or starts one; whether it did either.

    A cluster has the CPUs that it has. One that is started here, for this process alone, is given
    as many as the workers ask for: they share the cores, which is slower than having them.

    Args:
        num_cpus_beside: that workers of no engine ask for.

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
    """Joins the cluster at `address`, which `find_ray` has found."""
    import ray

    if not ray.is_initialized():
        _send_token()
        ray.init(address=address, log_to_driver=False, logging_level=logging.WARNING)


@contextlib.contextmanager
def _joined(address: str) -> Iterator[None]:
    """A process that is joined to the cluster at `address` for a while."""
    import ray

    join_ray(address)
    try:
        yield
    finally:
        ray.shutdown()


def worker_niceness(address: str) -> int:
    """At which niceness the cluster at `address` runs workers; joins and leaves it.

    0 where it ends meanwhile.
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
    """The nodes of the cluster at `address`, with what is free on each; joins and leaves it.

    Nodes with GPUs are asked for their memory, which Ray does not keep; one that does not answer
    within 30 s has an unknown one.
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
    """Memory of the smallest GPU of this machine; None where its driver's tool does not tell."""
    command = ["nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=20)
        return min(int(line) for line in done.stdout.split()) * 2**20
    except (OSError, subprocess.SubprocessError, ValueError):
        return None


def num_cpus_of(config: EngineConfig) -> float:
    """CPUs that one engine's workers ask of a cluster without GPUs."""
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


# Of the Ray that `outrider serve` starts. One that runs already has what `ray start` was given;
# `docs/operations.md` lists the variables.
RAY_VARIABLES = {
    # A process's answers to all callers wait behind those to one that died, one after the other,
    # each for this time (whole seconds) and for the check behind it.
    "RAY_core_worker_rpc_server_reconnect_timeout_base_s": "0",
    "RAY_grpc_client_check_connection_status_interval_milliseconds": "20",
    # Replicas wake for Serve's own metrics, which Ray exports every 10 s, ten times a second.
    "RAY_SERVE_METRICS_EXPORT_INTERVAL_MS": "5000",
}


def set_ray_variables() -> None:
    """Sets what the environment does not set already, for processes that Ray starts."""
    for name, value in RAY_VARIABLES.items():
        os.environ.setdefault(name, value)
