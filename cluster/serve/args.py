"""Arguments of the Serve application; Ray Serve LLM's fields are read in `cluster/app.py`.

Serve's own schema ignores unknown keys; here, each is an error that suggests the nearest key.
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
_LATER_THAN_NEXT = 1.1  # Serve varies the period of health checks by up to a tenth
_AUTO_MAX_REPLICAS = 100  # the same as Serve's own `num_replicas: auto`


def check_autoscaling(given: dict[str, Any]) -> None:
    """Raises an error for a validator if Serve's autoscaler does not have a key or value."""
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
    """Returns Serve's `autoscaling_config`; None for a fixed number of engines.

    An engine is added if on average more than `target_ongoing_requests` are running or queued per
    engine. The default is a full batch. Serve counts a request from its arrival to its last token;
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
    """Implements Serve's autoscaling policy: counts the engines' running and queued requests.

    Serve itself would count its own calls, but requests are not Serve calls. Serve bounds, delays
    and smooths the returned value according to `autoscaling_config`.
    """
    loads = context.aggregated_metrics.get(LOAD, {})
    if not loads:  # no engine has reported yet
        return context.target_num_replicas, {}
    return sum(loads.values()) / context.config.get_target_ongoing_requests(), {}


class DeploymentConfig(Strict):
    """How Serve deploys the engines of one model."""

    num_replicas: int | Literal["auto"] = 1
    """Engines behind one endpoint; auto scales between 1 and 100."""
    autoscaling_config: dict[str, Any] | None = None
    """Serve's autoscaler, by the length of the queue; not with num_replicas."""
    max_ongoing_requests: int | None = Field(None, ge=1)
    """Requests that an engine gets at once; others wait in the ingress. Default: no limit, or two
    batches if Serve scales the engines."""
    max_queued_requests: int | None = Field(None, ge=-1)
    """Requests that an ingress queues; default: the engine's limit; -1: no limit."""
    health_check_period_s: float = Field(5.0, gt=0, description="Seconds between health checks.")
    health_check_timeout_s: float = Field(30.0, gt=0)
    """Seconds after which a health check has failed."""
    hung_after_s: float = Field(10.0, ge=0)
    """Seconds after which a process that is stopped or hangs is killed and replaced; 0: never."""
    graceful_shutdown_timeout_s: float = Field(30.0, ge=0)
    """Seconds that running requests may take to finish at shutdown."""
    ray_actor_options: dict[str, Any] = Field(default_factory=dict)
    """Ray options of engine replicas, such as runtime_env."""
    user_config: dict[str, Any] | None = None
    """Speculation at run time: {enabled: bool, max_draft_len: int or null}."""

    @property
    def scales(self) -> bool:
        """True if Serve decides how many engines there are."""
        return self.autoscaling_config is not None or self.num_replicas == "auto"

    @property
    def health_hold_s(self) -> float:
        """How long a health check is held: until the next one, well within its timeout."""
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
    """Seconds within which a request's body has to arrive."""
    header_timeout_s: float = Field(10.0, gt=0)
    """Seconds within which a request's headers have to arrive."""
    write_timeout_s: float = Field(30.0, gt=0)
    """Seconds after which a client that does not read, or is gone, is disconnected."""
    resume_window_s: float = Field(30.0, ge=0, le=3600)
    """Seconds for which tokens of broken streams are kept; 0: not kept."""
    resume_max_values: int = Field(2_000_000, ge=1)
    """Maximum number of kept tokens and log-probabilities per engine."""
    otlp_endpoint: str | None = Field(
        None, pattern=r"^https?://", examples=["http://collector:4318"]
    )
    """URL to which OpenTelemetry spans are sent."""
    drafter_groups: tuple[DrafterGroupConfig, ...] = ()
    """Drafter groups of the application: draft models that its engines share."""
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
        """Number of ingresses; with two, one takes over the streams of the other if that dies.

        Each ingress counts a key's requests separately, so limits would not be exact with several.
        """
        count = self.num_ingress_replicas
        return count if isinstance(count, int) else 1 if self.access.may_limit else 2

    @property
    def deployment(self) -> DeploymentConfig:
        """The keys that concern engines."""
        return DeploymentConfig(**self.model_dump(include=set(DeploymentConfig.model_fields)))


def check_acceptance(config: EngineConfig) -> None:
    """Raises `ConfigError` if a server would use synthetic acceptance, unless that is allowed."""
    section = config.speculative_config
    if section.is_synthetic and not config.allow_synthetic_acceptance:
        raise ConfigError.at(
            "speculative_config.synthetic_acceptance_rate",
            f"{section.synthetic_acceptance_rate:g} "
            "makes a server emit text that is not the model's; it is for benchmarks only: set "
            "`allow_synthetic_acceptance: true` as well to serve it",
        )


def read_args(args: dict[str, Any]) -> tuple[EngineConfig, ServeConfig]:
    """Reads arguments in the form of `serve run ... key=value` or of a Serve YAML file.

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
    """Nests keys such as `serve.num_replicas`, and parses sections given as JSON or YAML text."""
    data: dict[str, Any] = {}
    dotted: list[tuple[str, str, Any]] = []
    for key, value in args.items():
        section, dot, rest = key.partition(".") if isinstance(key, str) else (key, "", "")
        if section not in _SECTIONS:
            data[key] = value
            continue
        # Values on the command line are text: "null", "true", "2".
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
