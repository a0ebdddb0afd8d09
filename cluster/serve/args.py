"""Arguments of the Serve application, in our own names; Ray Serve LLM's are in `cluster/app.py`.

Serve's own schema swallows unknown keys; here every one is an error that names the nearest.
"""

from __future__ import annotations

import difflib
from typing import Any, Literal

from pydantic import Field, ValidationError, field_validator, model_validator

from ...config import DrafterGroupConfig, EngineConfig, Strict, parse, unknown_key
from ...config.access import AccessConfig
from ...config.strict import at_key, read_yaml
from ...errors import ConfigError, below, in_words, shown_value

_SECTIONS = ("serve", "speculative_config", "resources", "kv_cache_config")
_LATER_THAN_NEXT = 1.1  # Serve varies the period of health checks by a tenth
_AUTO_MAX_REPLICAS = 100  # as Serve's own `num_replicas: auto`


def check_autoscaling(given: dict[str, Any]) -> None:
    """For validators: raises what names a key or a value that Serve's autoscaler does not have."""
    from ray.serve.config import AutoscalingConfig

    where = "autoscaling_config"
    known = [name for name in AutoscalingConfig.model_fields if not name.startswith("_")]
    for key in given:
        if key not in known:
            path = f"{where}.{key}"
            raise at_key(path, unknown_key(path, key, known).message)
    try:
        AutoscalingConfig(**given)
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join([where, *map(str, first["loc"])])
        raise at_key(key, in_words(first)) from None


def autoscaling(section: DeploymentConfig, max_num_seqs: int) -> dict[str, Any] | None:
    """Serve's `autoscaling_config`; None: a fixed number of engines.

    An engine is added where more than `target_ongoing_requests` run and wait for each; the default
    is a full batch. Serve counts a request from its arrival to its last token, queued or running;
    its own default of 2 would start an engine for every second request.
    """
    given = section.autoscaling_config
    if not section.scales:
        return None
    if section.num_replicas == "auto":
        given = {"min_replicas": 1, "max_replicas": _AUTO_MAX_REPLICAS, **(given or {})}
    policy = {"policy_function": f"{__name__}:{by_load.__name__}"}
    return {"target_ongoing_requests": max_num_seqs, "policy": policy, **(given or {})}


LOAD = "requests"


def by_load(context: Any) -> tuple[float, dict[str, Any]]:
    """Serve's autoscaling policy: engines for the requests that they have and that wait for them.

    Serve itself counts its own calls, and requests are none; it bounds, delays and smooths what
    this returns, as `autoscaling_config` says.
    """
    loads = context.aggregated_metrics.get(LOAD, {})
    if not loads:  # nothing is known yet
        return context.target_num_replicas, {}
    return sum(loads.values()) / context.config.get_target_ongoing_requests(), {}


class DeploymentConfig(Strict):
    """How Serve deploys the engines of one model."""

    num_replicas: int | Literal["auto"] = 1
    """Engines behind one endpoint; auto scales between 1 and 100."""
    autoscaling_config: dict[str, Any] | None = None
    """Serve's autoscaler, by the length of the queue; not with num_replicas."""
    max_ongoing_requests: int | None = Field(None, ge=1)
    """Requests that an engine gets at once, while others wait in the ingress; default: any
    number, or two batches where Serve scales the engines."""
    max_queued_requests: int | None = Field(None, ge=-1)
    """Requests queued by an ingress; default: the engine's; -1: any."""
    health_check_period_s: float = Field(5.0, gt=0, description="Seconds between health checks.")
    health_check_timeout_s: float = Field(30.0, gt=0)
    """Seconds after which a health check has failed."""
    hung_after_s: float = Field(10.0, ge=0)
    """Seconds after which a process that does not run is killed and replaced; 0: never."""
    graceful_shutdown_timeout_s: float = Field(30.0, ge=0)
    """Seconds that running requests have left at the end."""
    ray_actor_options: dict[str, Any] = Field(default_factory=dict)
    """Ray options of engine replicas, as runtime_env."""
    user_config: dict[str, Any] | None = None
    """Speculation at run time: {enabled: bool, max_draft_len: int or null}."""

    @property
    def scales(self) -> bool:
        """Whether Serve decides how many engines there are."""
        return self.autoscaling_config is not None or self.num_replicas == "auto"

    @property
    def health_hold_s(self) -> float:
        """How long a check is held: up to the next one, and well within the time it may take."""
        return min(_LATER_THAN_NEXT * self.health_check_period_s, self.health_check_timeout_s / 3)

    @field_validator("num_replicas", "num_ingress_replicas", check_fields=False)
    @classmethod
    def _some(cls, count: int | str) -> int | str:
        if isinstance(count, int) and count < 1:
            raise ValueError("must be at least 1")
        return count

    @model_validator(mode="after")
    def _one_way_to_scale(self) -> DeploymentConfig:
        if self.autoscaling_config is not None:
            if self.num_replicas not in (1, "auto"):
                raise ValueError("give either num_replicas or autoscaling_config, not both")
            check_autoscaling(self.autoscaling_config)
        return self


class ServeConfig(DeploymentConfig):
    """The `serve:` section: the endpoint, and the engines of the model where there is one."""

    name: str = Field("outrider", description="Name of the Serve application.")
    route_prefix: str = Field("/", pattern=r"^/", examples=["/llm"], description="Path before /v1.")
    host: str = Field("127.0.0.1", description="Address that ingresses listen on.")
    port: int | None = Field(8001, ge=1, le=65535)
    """Port that all ingresses of a node share; null: only Serve's proxy listens."""
    ssl_certfile: str | None = Field(None, description="Certificate chain in PEM: serve HTTPS.")
    ssl_keyfile: str | None = Field(None, description="The certificate's private key in PEM.")
    num_ingress_replicas: int | Literal["auto"] = "auto"
    """Processes that speak HTTP; auto: 2, or 1 if keys can have limits."""
    request_timeout_s: float | None = Field(None, gt=0)
    """Seconds after which a request gets 504; default: none."""
    max_body_bytes: int = Field(16 * 2**20, ge=1024, description="Largest body of a request.")
    body_timeout_s: float = Field(60.0, gt=0)
    """Seconds in which the body of a request has to arrive."""
    header_timeout_s: float = Field(10.0, gt=0)
    """Seconds in which the headers of a request have to arrive."""
    write_timeout_s: float = Field(30.0, gt=0)
    """Seconds after which a client that does not read, or is gone, is cut off."""
    resume_window_s: float = Field(30.0, ge=0, le=3600)
    """Seconds that tokens of broken streams are kept; 0: none."""
    resume_max_values: int = Field(2_000_000, ge=1)
    """Kept tokens and log-probabilities, per engine."""
    otlp_endpoint: str | None = Field(
        None, pattern=r"^https?://", examples=["http://collector:4318"]
    )
    """URL that OpenTelemetry spans are sent to."""
    drafter_groups: tuple[DrafterGroupConfig, ...] = ()
    """Drafter groups that the application has: draft models that its engines share."""
    access: AccessConfig = Field(AccessConfig(), description="API keys, their limits, and CORS.")

    @model_validator(mode="after")
    def _whole_certificate(self) -> ServeConfig:
        if self.ssl_keyfile is not None and self.ssl_certfile is None:
            raise at_key("ssl_certfile", "ssl_keyfile needs ssl_certfile as well")
        return self

    @field_validator("drafter_groups")
    @classmethod
    def _names_once(cls, groups: tuple[DrafterGroupConfig, ...]) -> tuple[DrafterGroupConfig, ...]:
        names = [each.name for each in groups]
        for index, name in enumerate(names):
            if name in names[:index]:
                raise at_key(f"{index}.name", f"a second drafter group {name!r}")
        return groups

    @property
    def num_ingresses(self) -> int:
        """How many ingresses there are: a second one takes over the streams of one that died.

        Ingresses count a key's requests on their own, and a part of a limit each is not the limit.
        """
        count = self.num_ingress_replicas
        return count if isinstance(count, int) else 1 if self.access.may_limit else 2

    @property
    def deployment(self) -> DeploymentConfig:
        """The part that is about engines."""
        return DeploymentConfig(**self.model_dump(include=set(DeploymentConfig.model_fields)))


def check_acceptance(config: EngineConfig) -> None:
    """Raises `ConfigError` where clients would be served what coins accepted, unless allowed."""
    section = config.speculative_config
    if section.is_synthetic and not config.allow_synthetic_acceptance:
        raise ConfigError.at(
            "speculative_config.synthetic_acceptance_rate",
            f"{section.synthetic_acceptance_rate:g} "
            "makes a server emit text that is not the model's; it is for benchmarks only: set "
            "`allow_synthetic_acceptance: true` as well to serve it",
        )


def read_args(args: dict[str, Any]) -> tuple[EngineConfig, ServeConfig]:
    """Arguments as `serve run ... key=value` or a Serve YAML file give them.

    Raises:
        ConfigError: names the key.
    """
    data = _structured(args)
    serve = data.pop("serve", None) or {}
    if not isinstance(serve, dict):
        raise ConfigError.at("serve", f"expected a mapping, got {shown_value(serve)}")
    with below("serve"):
        section = parse(ServeConfig, serve)
    for key in data:
        if difflib.get_close_matches(key, ["serve"], cutoff=0.8):
            raise unknown_key(key, key, ["serve"])
    return EngineConfig.load(data), section


def _structured(args: dict[str, Any]) -> dict[str, Any]:
    """`serve.num_replicas=2` nested, and sections given as JSON or YAML text read."""
    data: dict[str, Any] = {}
    dotted: list[tuple[str, str, Any]] = []
    for key, value in args.items():
        section, dot, rest = key.partition(".") if isinstance(key, str) else (key, "", "")
        if section not in _SECTIONS:
            data[key] = value
            continue
        # A value on the command line is text: "null", "true", "2".
        parsed = read_yaml(value, key, "it") if isinstance(value, str) else value
        if dot:
            dotted.append((section, rest, parsed))
        else:
            data[key] = parsed
    for section, rest, parsed in dotted:
        given = data.get(section) or {}
        if not isinstance(given, dict):
            raise ConfigError.at(section, f"expected a mapping, got {shown_value(given)}")
        data[section] = {**given, rest: parsed}
    return data
