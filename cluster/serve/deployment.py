"""Deploys the application on a cluster's Serve, takes it down, and inspects a running Serve.

A cluster has a single Serve. Applications share it under different names, routes and ports, and
must not affect each other.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import ray
from ray import serve
from ray.serve import Application
from ray.serve._private.constants import SERVE_CONTROLLER_NAME, SERVE_NAMESPACE
from ray.serve.context import _get_global_client, _set_global_client
from ray.serve.schema import ApplicationStatus

from ... import errors
from ...errors import ConfigError, EngineDeadError, OutriderError
from .args import ServeConfig
from .models import forget_loading, loading_lines

_POLL_S = 0.25
_SETTLE_S = 15.0  # beyond the drain, until Serve notices that a replica has ended
_STOP_S = 20.0  # until Serve's own processes have ended
_OWN_ERROR = re.compile(r"outrider\.errors\.(\w+): (.+)")


@dataclass(frozen=True, slots=True)
class RunningServe:
    """A cluster's Serve, with the port of its own proxies."""

    port: int
    routes: dict[str, str] = field(default_factory=dict)  # application -> route prefix


def running_serve() -> RunningServe | None:
    """Returns the Serve of the joined cluster; None if there is none."""
    client = _get_global_client(raise_if_no_controller_running=False)
    if client is None:
        return None
    details: dict[str, Any] = client.get_serve_details()
    http = details.get("http_options") or {}
    applications = (details.get("applications") or {}).items()
    routes = {
        name: str(each.get("route_prefix"))
        for name, each in applications
        if each.get("status") != ApplicationStatus.DELETING
    }
    return RunningServe(int(http.get("port", 0)), routes)


def check_room(running: RunningServe, section: ServeConfig) -> None:
    """Checks that another application fits beside those of a running Serve.

    Raises:
        ConfigError: names the field and the application that it conflicts with.
    """
    if section.name in running.routes:
        raise ConfigError.at(
            "name",
            f"this cluster already serves an application {section.name!r} at "
            f"{running.routes[section.name]}; "
            "give this one another --name, --port and --route-prefix",
        )
    for name, route in running.routes.items():
        if route == section.route_prefix:
            raise ConfigError.at(
                "route_prefix",
                f"{route} belongs to the application {name!r} on this cluster"
                "; give this one another --route-prefix",
            )
    if section.port == running.port:
        raise ConfigError.at("port", f"Serve's own proxies use {section.port} on this cluster")


def start_serve() -> None:
    """Starts Serve's controller unless it runs; no proxies, because ingresses listen themselves."""
    serve.start(proxy_location="Disabled")


def deploy(
    application: Application,
    section: ServeConfig,
    tell: Callable[[list[str]], None] = lambda lines: None,
) -> None:
    """Deploys the application on the cluster's Serve and waits until it runs.

    Args:
        tell: called with new progress lines of engines that take long to load.

    Raises:
        ConfigError, CheckpointError, ResourcesError: why an engine cannot start; not retried.
        EngineDeadError: it did not start within Serve's retries; has the reason.
    """
    target = serve.RunTarget(
        target=application, name=section.name, route_prefix=section.route_prefix
    )
    forget_loading(section.name)
    serve.run_many([target], wait_for_applications_running=False)
    told: list[str] = []
    while True:
        status = serve.status().applications.get(section.name)
        if status is None:
            raise EngineDeadError(f"the application {section.name!r} was deleted while it started")
        if status.status == ApplicationStatus.RUNNING:
            return
        messages = [each.message for each in status.deployments.values() if each.message]
        found = _own_error(messages)
        if found is not None and isinstance(found, ConfigError):  # retrying would not help
            raise found
        if status.status == ApplicationStatus.DEPLOY_FAILED:
            raise found or EngineDeadError(
                "the application did not come up: " + "\n".join(messages or [status.message])
            )
        lines = loading_lines(section.name)
        if fresh := [line for line in lines if line not in told]:
            tell(fresh)
        told = lines
        time.sleep(_POLL_S)


def undeploy(section: ServeConfig) -> None:
    """Takes the application down, and Serve unless it has other applications.

    New requests are rejected; running ones may finish within `graceful_shutdown_timeout_s`.
    """
    running = running_serve()
    if running is None:
        return
    if section.name in running.routes:
        serve.delete(section.name, _blocking=False)
        _wait_for(
            lambda: section.name not in serve.status().applications,
            section.graceful_shutdown_timeout_s + _SETTLE_S,
        )
    if not set(running.routes) - {section.name}:
        _stop_serve()


def _stop_serve() -> None:
    """Ends Serve's processes.

    `serve.shutdown` leaves a call pending on the controller until that is dead, which Ray reports
    as an error on the terminal. This function instead returns from the call and polls for the
    controller.
    """
    client = _get_global_client(raise_if_no_controller_running=False)
    if client is None:
        return
    client.shutdown_cached_handles()
    ray.get(client._controller.graceful_shutdown.remote(wait=False), timeout=_STOP_S)
    _wait_for(lambda: not _has_controller(), _STOP_S)
    _set_global_client(None)


def _has_controller() -> bool:
    """Looks the controller up by name; a call to a dead one would be retried forever."""
    try:
        ray.get_actor(SERVE_CONTROLLER_NAME, namespace=SERVE_NAMESPACE)
    except ValueError:
        return False
    return True


def _wait_for(condition: Callable[[], bool], timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition() and time.monotonic() < deadline:
        time.sleep(_POLL_S)


def _own_error(messages: list[str]) -> OutriderError | None:
    """Returns the Outrider error that a deployment's message quotes, or None."""
    for message in messages:
        for name, text in reversed(_OWN_ERROR.findall(message)):
            kind = getattr(errors, name, None)
            if isinstance(kind, type) and issubclass(kind, OutriderError):
                return kind(text.strip())
    return None
