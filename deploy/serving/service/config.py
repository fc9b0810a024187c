"""`serve.yaml`: how a run is served. Unknown keys are errors with a suggestion."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from pydantic import Field, ValidationError, field_validator, model_validator

from nonet import yaml
from nonet.deploy.serving.access import CallerResolver
from nonet.errors import ConfigError
from nonet.options import StrictModel, describe_invalid
from nonet.suggest import suggest_sentence
from nonet.workers.devices import get_device as find_device


class ScalingConfig(StrictModel):
    """How Ray Serve scales the number of replicas of a deployment with its load.

    Attributes:
        min: Minimum number of replicas.
        max: Maximum number of replicas.
        ongoing: Target number of ongoing requests per replica.
    """

    min: int = Field(default=1, ge=1)
    max: int = Field(default=1, ge=1)
    ongoing: float = Field(default=16, gt=0)


class DeploymentConfig(StrictModel):
    """The replicas of one service, and their resources.

    Attributes:
        replicas: Number of replicas.
        autoscaling: How the number of replicas scales; None for a fixed number.
        cpus: CPUs of each replica.
        gpus: GPUs of each replica.
        resources: Other Ray resources of each replica (`NPU`, or a pool's own label).
    """

    replicas: int = Field(default=1, ge=1)
    autoscaling: ScalingConfig | None = None
    cpus: float = Field(default=1, ge=0)
    gpus: float = Field(default=0, ge=0)
    resources: dict[str, float] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _check_replicas(self) -> DeploymentConfig:
        """Refuse `replicas` beside `autoscaling`."""
        if self.autoscaling is not None and self.replicas != 1:
            raise ValueError(
                "replicas has no effect beside autoscaling, which has min and max; remove one of them"
            )
        return self

    @property
    def least(self) -> int:
        """Minimum number of replicas."""
        return self.autoscaling.min if self.autoscaling else self.replicas

    @property
    def most(self) -> int:
        """Maximum number of replicas."""
        return self.autoscaling.max if self.autoscaling else self.replicas


class FeaturesDeploymentConfig(DeploymentConfig):
    """The replica of the features service, and the store that it reads.

    Attributes:
        store: The address of the store of users' events, such as redis://HOST:PORT/NAME; without one, the
            service holds them itself.
    """

    store: str | None = None


class ServicesConfig(StrictModel):
    """Services as separate deployments. `features` holds the posted events and is therefore a single replica."""

    access: DeploymentConfig = DeploymentConfig(cpus=0.5)
    features: FeaturesDeploymentConfig = FeaturesDeploymentConfig(cpus=0.5)
    engine: DeploymentConfig = DeploymentConfig()

    @property
    def every(self) -> tuple[DeploymentConfig, ...]:
        """All services."""
        return (self.access, self.features, self.engine)

    @model_validator(mode="after")
    def _check_services(self) -> ServicesConfig:
        """Refuse several replicas of `features`, and GPUs for services other than `engine`."""
        if self.features.replicas != 1 or self.features.autoscaling:
            raise ValueError("features must be one replica, because it holds the posted events")
        for name, service in (("access", self.access), ("features", self.features)):
            if service.gpus:
                raise ValueError(
                    f"{name}.gpus is {service.gpus:g}, but only engine computes on a GPU; remove it"
                )
        return self


class JournalConfig(StrictModel):
    """The journal of posted events.

    Attributes:
        segment_bytes: Size at which the file is sealed and a new one begins.
        retention_days: Age in days at which sealed files are deleted; None keeps all.
    """

    segment_bytes: int = Field(default=64 << 20, ge=1)
    retention_days: float | None = Field(default=None, gt=0)


class QueueConfig(StrictModel):
    """How queued questions are merged into batches.

    Attributes:
        most_cost: Maximum cost of a batch, in positions (events) of its histories.
        most: Maximum number of questions of a batch.
    """

    most_cost: float = Field(default=4096.0, gt=0)
    most: int = Field(default=256, ge=1)


class JoinStoreConfig(StrictModel):
    """The store of a join of the run, as this server reads it.

    Attributes:
        use: The address of the store, by default that of the scenario.
        options: Options of the store, such as timeout_s and attempts, in addition to those of the scenario.
    """

    use: str | None = None
    options: dict[str, Any] = Field(default_factory=dict)


class ServeConfig(StrictModel):
    """How a run is served.

    Attributes:
        host: The host to listen on.
        port: The port to listen on.
        deadline_s: Deadline of a request that sets none, in seconds.
        waiting: Number of queued questions at which requests are refused with 429.
        proxies: Addresses or networks of proxies whose `X-Forwarded-For` is trusted.
        rate: Requests per second that each caller may make; None for no limit.
        burst: Requests that a caller may make at once; None for those of one second.
        failures: Failures of the engine in a row after which the circuit breaker opens.
        pause_s: Seconds for which the circuit breaker stays open.
        block: Number of events by which the window of a user's newest events moves, so that its start, and with
            it the user's cached state, stays valid for as many events.
        state_bytes: Memory in bytes of each version for cached states of users; 0 for none.
        threads: Number of torch threads.
        cpus: CPUs of the replica.
        follow: Whether to serve the checkpoints that stages select; "checkpoints" also serves those from
            the middle of a stage.
        registry: Address of the published versions, such as s3://bucket/folder, by default a folder of the run.
        device: The device that computes the model: cpu, cuda or npu.
        queue: How queued questions are merged into batches.
        journal: The journal of posted events.
        join: The stores of the run's joins by name, where they differ from those of the scenario.
        services: Services as separate deployments; by default all run in one process.
    """

    host: str = "127.0.0.1"
    port: int = Field(default=8000, ge=1, le=65535)
    deadline_s: float = Field(default=1.0, gt=0)
    waiting: int = Field(default=512, ge=1)
    proxies: tuple[str, ...] = ()
    rate: float | None = Field(default=None, gt=0)
    burst: float | None = Field(default=None, gt=0)
    failures: int = Field(default=5, ge=1)
    pause_s: float = Field(default=2.0, gt=0)
    block: int = Field(default=1, ge=1)
    state_bytes: int = Field(default=0, ge=0)
    threads: int = Field(default=1, ge=1)
    cpus: int = Field(default=1, ge=0)
    follow: bool | Literal["checkpoints"] = True
    registry: str | None = None
    device: str = "cpu"
    queue: QueueConfig = QueueConfig()
    journal: JournalConfig = JournalConfig()
    join: dict[str, JoinStoreConfig] = Field(default_factory=dict)
    services: ServicesConfig | None = None

    @field_validator("proxies", mode="before")
    @classmethod
    def _to_tuple(cls, value: Any) -> Any:
        """Convert a YAML list or a single address to a tuple; other values are left to the field's validation."""
        return (value,) if isinstance(value, str) else tuple(value) if isinstance(value, list) else value

    @model_validator(mode="before")
    @classmethod
    def _set_engine_device(cls, values: Any) -> Any:
        """Set `device` to the kind that the engine's replicas reserve if it is not set.

        The values are not validated yet: parts that have another type are left to the validation of the fields.
        """
        services = (values.get("services") or {}) if isinstance(values, dict) else {}
        services = services.model_dump() if isinstance(services, StrictModel) else services
        engine = services.get("engine") if isinstance(services, dict) else None
        engine = engine.model_dump() if isinstance(engine, StrictModel) else engine
        if not isinstance(engine, dict) or "device" in values:
            return values
        if engine.get("gpus"):
            return {**values, "device": "cuda"}
        if (engine.get("resources") or {}).get("NPU"):
            return {**values, "device": "npu"}
        return values

    @model_validator(mode="after")
    def _check_effects(self) -> ServeConfig:
        """Refuse unknown devices, wrong proxies, and keys that would have no effect."""
        device_type = self.device.partition(":")[0]
        try:
            find_device(device_type)
        except ConfigError as error:
            raise ValueError(f"device is {self.device!r}: {error}") from None
        engine = None if self.services is None else self.services.engine
        if engine is not None and engine.gpus and device_type == "cpu":
            raise ValueError(
                f"services.engine.gpus is {engine.gpus:g}, but device is {self.device}: the GPUs would be idle; "
                "set device: cuda, or remove gpus"
            )
        try:
            CallerResolver(self.proxies)  # raises if a proxy is neither an address nor a network
        except ConfigError as error:
            raise ValueError(str(error)) from None
        if self.burst is not None and self.rate is None:
            raise ValueError(
                "burst has no effect without rate, the requests per second that it exceeds; set rate too"
            )
        if self.services is not None and "cpus" in self.model_fields_set:
            raise ValueError("cpus has no effect beside services, which have their own cpus; remove it")
        return self

    def count_cpus(self) -> float:
        """Return the number of CPUs that all replicas reserve when every service has its most replicas."""
        if self.services is None:
            return self.cpus
        return sum(service.cpus * service.most for service in self.services.every)

    def make_join_stores(self) -> dict[str, dict[str, Any]]:
        """Return the address and options of the stores of joins by name, as `OpenedRun.replace_stores` takes them."""
        return {name: store.model_dump() for name, store in self.join.items()}

    def make_journal_options(self) -> Any:
        """Return the options of the journal of posted events."""
        from nonet.journal import JournalOptions

        return JournalOptions(**self.journal.model_dump())

    def make_service_settings(self) -> Any:
        """Return the settings of the `RecommendationService`."""
        from nonet.deploy.serving.service.service import ServiceSettings

        names = ("deadline_s", "waiting", "rate", "burst", "failures", "pause_s")
        return ServiceSettings(**{name: getattr(self, name) for name in names})


def read_config(path: Path | None) -> ServeConfig:
    """Read and validate a configuration file.

    Args:
        path: A YAML file with keys of `ServeConfig`; None for the defaults.

    Raises:
        ConfigError: A key or a value is wrong.
    """
    if path is None:
        return ServeConfig()
    values = yaml.read(path)
    if not isinstance(values, dict):
        raise ConfigError(f"{path}: must be a map of keys, such as `port: 8000`")
    for key in values:
        if key not in ServeConfig.model_fields:
            known_keys = list(ServeConfig.model_fields)
            raise ConfigError(
                f"{path}: there is no key {key!r}; keys: {', '.join(known_keys)}.{suggest_sentence(key, known_keys)}"
            )
    try:
        return ServeConfig(**values)
    except ValidationError as error:
        raise ConfigError(f"{path}: {describe_invalid(error)}") from None
