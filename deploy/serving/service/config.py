"""`serve.yaml`: how a run is served. Strict: a key that is not known is an error with a suggestion."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from pydantic import Field, ValidationError, field_validator, model_validator

from nonet.controller.scenario import yaml
from nonet.deploy.serving.access import Callers
from nonet.errors import ConfigError
from nonet.options import StrictModel
from nonet.suggest import suggest_sentence
from nonet.workers.devices import get_device as find_device


class Scaling(StrictModel):
    """min, max: replicas; ongoing: requests under way in each that are aimed at."""

    min: int = Field(default=1, ge=1)
    max: int = Field(default=1, ge=1)
    ongoing: float = Field(default=16, gt=0)


class Deployed(StrictModel):
    """One service: replicas, or how they scale; cpus, gpus and Ray resources (`NPU`, or a pool's own label) of each."""

    replicas: int = Field(default=1, ge=1)
    autoscaling: Scaling | None = None
    cpus: float = Field(default=1, ge=0)
    gpus: float = Field(default=0, ge=0)
    resources: dict[str, float] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _one_number(self) -> Deployed:
        if self.autoscaling is not None and self.replicas != 1:
            raise ValueError(
                "replicas has no effect beside autoscaling, which has min and max; leave one of them out"
            )
        return self

    @property
    def least(self) -> int:
        """Replicas at least."""
        return self.autoscaling.min if self.autoscaling else self.replicas

    @property
    def most(self) -> int:
        """Replicas at most."""
        return self.autoscaling.max if self.autoscaling else self.replicas


class FeaturesDeployed(Deployed):
    """store: where users' events are read by key, such as redis://HOST:PORT/NAME; without one they are this service's own."""

    store: str | None = None


class Services(StrictModel):
    """Services as deployments of their own. features holds the events that were posted, so it is one replica."""

    access: Deployed = Deployed(cpus=0.5)
    features: FeaturesDeployed = FeaturesDeployed(cpus=0.5)
    engine: Deployed = Deployed()

    @property
    def every(self) -> tuple[Deployed, ...]:
        """All of them."""
        return (self.access, self.features, self.engine)

    @model_validator(mode="after")
    def _one_journal(self) -> Services:
        if self.features.replicas != 1 or self.features.autoscaling:
            raise ValueError("features is one replica: it holds the events that were posted")
        for name, service in (("access", self.access), ("features", self.features)):
            if service.gpus:
                raise ValueError(
                    f"{name}.gpus is {service.gpus:g}, but only engine computes on a GPU; leave it out"
                )
        return self


class JournalConfig(StrictModel):
    """segment_bytes: size at which the file of posted events is sealed; retention_days: age at which sealed ones are deleted."""

    segment_bytes: int = Field(default=64 << 20, ge=1)
    retention_days: float | None = Field(default=None, gt=0)


class QueueConfig(StrictModel):
    """most_cost: cost of a merged batch at most, in positions of a history; most: its questions at most."""

    most_cost: float = Field(default=4096.0, gt=0)
    most: int = Field(default=256, ge=1)


class ServeConfig(StrictModel):
    """host, port: where it listens; deadline_s: of a request that names none; waiting: requests in the queue beyond which 429 is
    answered; proxies: addresses or networks of proxies that are trusted to say whom they forward; rate, burst: requests a second
    and caller; failures, pause_s: of the circuit breaker; block: events that a
    user's window moves by; state_bytes: kept of users who asked before, by each version, 0 for none; threads: of torch; cpus: of
    the replica; follow: serve what the run's stages select, false for none of it, "checkpoints" for those from the middle of a
    stage too; registry: address of the versions, such as s3://bucket/folder, by default a folder of the run; queue: most_cost
    and most of a merged batch; journal: of posted events; services: deployments of their own, by default all are one process."""

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
    services: Services | None = None

    @field_validator("proxies", mode="before")
    @classmethod
    def _as_tuple(cls, given: Any) -> Any:
        """Take YAML's list, or one address."""
        return (given,) if isinstance(given, str) else tuple(given) if isinstance(given, list) else given

    @model_validator(mode="before")
    @classmethod
    def _device_of_engine(cls, given: Any) -> Any:
        """Compute on the device that the engine's replicas reserve, where `device` is left out."""
        engine = ((given.get("services") or {}) if isinstance(given, dict) else {}) or {}
        engine = engine.model_dump() if isinstance(engine, StrictModel) else engine
        engine = engine.get("engine") if isinstance(engine, dict) else None
        engine = engine.model_dump() if isinstance(engine, StrictModel) else engine
        if not isinstance(engine, dict) or "device" in given:
            return given
        if engine.get("gpus"):
            return {**given, "device": "cuda"}
        if (engine.get("resources") or {}).get("NPU"):
            return {**given, "device": "npu"}
        return given

    @model_validator(mode="after")
    def _has_effect(self) -> ServeConfig:
        """Refuse keys that would change nothing."""
        kind = self.device.partition(":")[0]
        try:
            find_device(kind)
        except ConfigError as error:
            raise ValueError(f"device is {self.device!r}: {error}") from None
        engine = None if self.services is None else self.services.engine
        if engine is not None and engine.gpus and kind == "cpu":
            raise ValueError(
                f"services.engine.gpus is {engine.gpus:g}, but device is {self.device}: the GPUs would stay idle; "
                "say device: cuda, or leave gpus out"
            )
        try:
            Callers(self.proxies)
        except ConfigError as error:
            raise ValueError(str(error)) from None
        if self.burst is not None and self.rate is None:
            raise ValueError(
                "burst has no effect without rate, the requests per second that it exceeds; set rate too"
            )
        if self.services is not None and "cpus" in self.model_fields_set:
            raise ValueError(
                "cpus has no effect beside services, each of which has its own cpus; leave it out"
            )
        return self

    def all_cpus(self) -> float:
        """CPUs of all replicas at most."""
        if self.services is None:
            return self.cpus
        return sum(each.cpus * each.most for each in self.services.every)

    def journal_options(self) -> Any:
        """Return what an `EventJournal` takes of it."""
        from nonet.deploy.serving.features import JournalOptions

        return JournalOptions(**self.journal.model_dump())

    def service(self) -> Any:
        """What a `Service` takes of it."""
        from nonet.deploy.serving.service.service import Settings

        names = ("deadline_s", "waiting", "rate", "burst", "failures", "pause_s")
        return Settings(**{name: getattr(self, name) for name in names})


def read_config(path: Path | None) -> ServeConfig:
    """A file of these keys; without one the defaults. Raises ConfigError."""
    if path is None:
        return ServeConfig()
    body = yaml.read(path)
    if not isinstance(body, dict):
        raise ConfigError(f"{path}: a map of keys, such as `port: 8000`")
    for key in body:
        if key not in ServeConfig.model_fields:
            known = list(ServeConfig.model_fields)
            raise ConfigError(
                f"{path}: there is no key {key!r}; there are {', '.join(known)}.{suggest_sentence(key, known)}"
            )
    try:
        return ServeConfig(**body)
    except ValidationError as error:
        first = error.errors()[0]
        raise ConfigError(f"{path}: {'.'.join(map(str, first['loc']))}: {first['msg']}") from None
