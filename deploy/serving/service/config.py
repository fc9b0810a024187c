"""`serve.yaml`: how a run is served. Strict: a key that is not known is an error with a suggestion."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pydantic import Field, ValidationError, model_validator

from nonet.controller.scenario import yaml
from nonet.errors import ConfigError
from nonet.options import StrictModel
from nonet.suggest import did_you_mean


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
        return self


class ServeConfig(StrictModel):
    """host, port: where it listens; deadline_s: of a request that names none; waiting: requests in the queue beyond which 429 is
    answered; rate, burst: requests a second and caller; failures, pause_s: of the circuit breaker; block: events that a
    user's window moves by; state_bytes: kept of users who asked before, by each version, 0 for none; threads: of torch; cpus: of
    the replica; follow: serve newer commits of the run; registry: address of the versions, such as s3://bucket/folder, by default
    a folder of the run; queue: most_cost and most of a merged batch; services: deployments
    of their own, by default all are one process."""

    host: str = "127.0.0.1"
    port: int = Field(default=8000, ge=1, le=65535)
    deadline_s: float = Field(default=1.0, gt=0)
    waiting: int = Field(default=512, ge=1)
    rate: float | None = Field(default=None, gt=0)
    burst: float | None = Field(default=None, gt=0)
    failures: int = Field(default=5, ge=1)
    pause_s: float = Field(default=2.0, gt=0)
    block: int = Field(default=1, ge=1)
    state_bytes: int = Field(default=0, ge=0)
    threads: int = Field(default=1, ge=1)
    cpus: int = Field(default=1, ge=0)
    follow: bool = True
    registry: str | None = None
    device: str = "cpu"
    queue: dict[str, float] = Field(default_factory=dict)
    services: Services | None = None

    def all_cpus(self) -> float:
        """CPUs of all replicas at most."""
        if self.services is None:
            return self.cpus
        return sum(each.cpus * each.most for each in self.services.every)

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
                f"{path}: there is no key {key!r}; there are {', '.join(known)}.{did_you_mean(key, known)}"
            )
    try:
        return ServeConfig(**body)
    except ValidationError as error:
        first = error.errors()[0]
        raise ConfigError(f"{path}: {'.'.join(map(str, first['loc']))}: {first['msg']}") from None
