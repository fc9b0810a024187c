"""WorkerGroup: N ranks of one role, called as one object.

    group = WorkerGroup(Score, workers=4)
    group.double([1, 2, 3, 4, 5]).get(timeout_s=30)

Submission is one Ray call a rank. Small chunks go inline; a replicated argument over 100 KB is put once for all ranks. A
future of another group goes on unfetched: equal sizes pass rank to rank, unequal ones are cut by the receivers.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping
from typing import Any

import ray

from nonet.errors import ConfigError, DeadlineExceeded, PlacementError
from nonet.workers import rows
from nonet.workers.device import device as known_device
from nonet.workers.environment import Environment
from nonet.workers.future import GroupFuture
from nonet.workers.host import Argument, Host, RoleSpec
from nonet.workers.method import Method, PerRank, Replicate, Shard, declared, signature
from nonet.workers.worker import DistributeWorker, Place

INLINE_BYTES = 100_000


def ensure_ray() -> None:
    """Join the cluster that `RAY_ADDRESS` names, or start a local one that ends with this process."""
    if not ray.is_initialized():
        address = os.environ.get("RAY_ADDRESS") or "local"
        local = {"include_dashboard": False} if address == "local" else {}
        ray.init(
            address=address, namespace="nonet", log_to_driver=False, logging_level=logging.ERROR, **local
        )


class Hosts:
    """The worker processes of one group: `world` actors, each holding the same roles."""

    def __init__(
        self,
        specs: Mapping[str, RoleSpec],
        *,
        workers: int = 1,
        name: str = "",
        device: str = "cpu",
        cpus: float = 1.0,
        devices: float = 0.0,
        threads: int = 1,
        placement_group: Any = None,
        env: Mapping[str, Any] | None = None,
        start_timeout_s: float = 120.0,
    ):
        ensure_ray()
        self.name, self.world, self.specs = name or "+".join(specs), workers, dict(specs)
        kind = known_device(device)
        self.actors = []
        runtime_env = Environment.of(env).runtime_env(kind)
        for rank in range(workers):
            options: dict[str, Any] = {"num_cpus": cpus, **kind.ray_options(devices)}
            if placement_group is not None:
                from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

                options["scheduling_strategy"] = PlacementGroupSchedulingStrategy(placement_group, rank)
            if runtime_env:
                options["runtime_env"] = runtime_env
            place = Place(rank=rank, world=workers, threads=threads, device=kind.torch_device())
            self.actors.append(Host.options(**options).remote(place))  # type: ignore[attr-defined]
        self._built = [actor.build.remote(self.specs) for actor in self.actors]
        self._start_timeout_s = start_timeout_s

    def ready(self) -> list[dict[str, Any]]:
        """Wait until every role of every rank is set up; their nodes and process ids."""
        future = GroupFuture(self._built, self.name, "setup", "list")
        try:
            return future.get(self._start_timeout_s)
        except DeadlineExceeded:
            asked = ray.cluster_resources(), ray.available_resources()
            raise PlacementError(
                f"group {self.name!r}: {self.world} workers did not start within {self._start_timeout_s:g} s; "
                f"the cluster has {_short(asked[0])}, free are {_short(asked[1])}"
            ) from None

    def view(self, role: str) -> WorkerGroup:
        """The group as one of its roles."""
        return WorkerGroup._of(self, role)

    def control(self, method: str, timeout_s: float = 10.0) -> list[Any]:
        """A control method (ping, spans, dump_stacks) on every rank, answered even while the rank works."""
        return GroupFuture(
            [getattr(actor, method).remote() for actor in self.actors], self.name, method, "list"
        ).get(timeout_s)

    def stop(self, timeout_s: float = 10.0) -> None:
        """Tear down, then end every process of the group. Never raises: what is dead already is what was wanted."""
        refs = [actor.stop.remote() for actor in self.actors]
        ray.wait(refs, num_returns=len(refs), timeout=timeout_s)
        for actor in self.actors:
            ray.kill(actor, no_restart=True)
        self.actors = []


class WorkerGroup:
    """N ranks of one role. Group methods of the class appear as methods here and return a `GroupFuture`."""

    def __init__(
        self,
        cls: type[DistributeWorker],
        *args: Any,
        workers: int = 1,
        role: str = "",
        device: str = "cpu",
        cpus: float = 1.0,
        devices: float | None = None,
        threads: int = 1,
        env: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ):
        if not (isinstance(cls, type) and issubclass(cls, DistributeWorker)):
            raise ConfigError(f"WorkerGroup wants a subclass of nonet.DistributeWorker, got {cls!r}")
        role = role or cls.__name__.lower()
        count = (0.0 if device == "cpu" else 1.0) if devices is None else devices
        self._bind(
            Hosts(
                {role: RoleSpec(cls, args, kwargs)},
                workers=workers,
                device=device,
                cpus=cpus,
                devices=count,
                threads=threads,
                env=env,
            ),
            role,
        )

    @classmethod
    def _of(cls, hosts: Hosts, role: str) -> WorkerGroup:
        group = cls.__new__(cls)
        group._bind(hosts, role)
        return group

    def _bind(self, hosts: Hosts, role: str) -> None:
        self.hosts, self.role, self.world = hosts, role, hosts.world
        self._cls = hosts.specs[role].cls

    def __getattr__(self, name: str) -> Callable[..., GroupFuture]:
        if name.startswith("_"):
            raise AttributeError(name)
        declaration = declared(self._cls, name)

        def call(*args: Any, **kwargs: Any) -> GroupFuture:
            return self._call(name, declaration, args, kwargs)

        return call

    def stop(self) -> None:
        """End the group's processes."""
        self.hosts.stop()

    def _call(
        self, name: str, declaration: Method, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> GroupFuture:
        try:
            bound = signature(getattr(self._cls, name)).bind(*args, **kwargs)
        except TypeError as error:
            raise ConfigError(f"{self.role}.{name}: {error}") from None
        layouts: list[list[Argument]] = [[] for _ in range(self.world)]
        flats: list[list[Any]] = [[] for _ in range(self.world)]
        for parameter, value in bound.arguments.items():
            marker = declaration.markers.get(parameter)
            for rank, (argument, values) in enumerate(
                self._spread(f"{self.role}.{name}", parameter, value, marker)
            ):
                layouts[rank].append(argument)
                flats[rank].extend(values)
        refs = [
            actor.call.remote(self.role, name, tuple(layout), *flat)
            for actor, layout, flat in zip(self.hosts.actors, layouts, flats, strict=True)
        ]
        return GroupFuture(refs, self.role, name, declaration.collect)

    def _spread(
        self, where: str, parameter: str, value: Any, marker: Any
    ) -> list[tuple[Argument, list[Any]]]:
        if isinstance(value, Shard | Replicate | PerRank):
            marker, value = type(value), value.value
        if isinstance(value, GroupFuture):
            return self._pass_on(where, parameter, value, marker)
        if isinstance(value, Mapping) and any(isinstance(part, GroupFuture) for part in value.values()):
            return self._spread_dict(where, parameter, value, marker)
        if marker is Shard:
            chunks = [rows.cut(value, *share) for share in rows.shares(rows.count(value), self.world)]
        elif marker is PerRank:
            chunks = list(value)
            if len(chunks) != self.world:
                raise ConfigError(
                    f"{where}({parameter}): PerRank wants {self.world} values, one a rank, got {len(chunks)}"
                )
        elif marker is Replicate or not rows.is_collection(value):
            chunks = [_put_once(value, self.world)] * self.world
        else:
            raise ConfigError(
                f"{where}({parameter}): a {type(value).__name__} is not sharded by guess; "
                "mark it in @nonet.method or at the call: "
                f"Shard (cut along rows), Replicate (same for all ranks) or PerRank (one value a rank)"
            )
        return [(Argument(parameter), [chunk]) for chunk in chunks]

    def _spread_dict(
        self, where: str, parameter: str, value: Mapping[str, Any], marker: Any
    ) -> list[tuple[Argument, list[Any]]]:
        """A dict with futures among its values: each value is spread by the same marker."""
        parts = [self._spread(where, name, part, marker) for name, part in value.items()]
        by_rank = [[part[rank] for part in parts] for rank in range(self.world)]
        return [
            (Argument(parameter, parts=tuple(a for a, _ in mine)), [v for _, flat in mine for v in flat])
            for mine in by_rank
        ]

    def _pass_on(
        self, where: str, parameter: str, future: GroupFuture, marker: Any
    ) -> list[tuple[Argument, list[Any]]]:
        refs = future.refs
        if marker is Shard and future.collect != "concat":
            raise ConfigError(
                f"{where}({parameter}): only results collected by 'concat' can be sharded; "
                f"{future.role}.{future.method} collects by {future.collect!r}"
            )
        if marker in (Shard, PerRank) and len(refs) == self.world:
            return [(Argument(parameter), [ref]) for ref in refs]
        if marker is PerRank:
            raise ConfigError(
                f"{where}({parameter}): PerRank wants {self.world} results, {future.role}.{future.method} has {len(refs)}"
            )
        if marker is Shard:
            return [
                (Argument(parameter, len(refs), (rank, self.world)), list(refs)) for rank in range(self.world)
            ]
        if future.collect == "first":
            return [(Argument(parameter), refs[:1])] * self.world
        if future.collect == "concat":
            return [(Argument(parameter, len(refs), (0, 1)), list(refs))] * self.world
        raise ConfigError(
            f"{where}({parameter}): {future.role}.{future.method} collects by {future.collect!r}; "
            "get() it first, or collect by 'concat' or 'first'"
        )


def _put_once(value: Any, world: int) -> Any:
    size = getattr(value, "nbytes", 0) or (len(value) if isinstance(value, bytes | str) else 0)
    if isinstance(value, list | tuple | dict):
        size = (
            INLINE_BYTES + 1
            if world > 1 and len(value) > 1000
            else sum(getattr(v, "nbytes", 0) for v in (value.values() if isinstance(value, dict) else value))
        )
    return ray.put(value) if world > 1 and size > INLINE_BYTES else value


def _short(resources: dict[str, float]) -> str:
    return (
        ", ".join(
            f"{key} {value:g}"
            for key, value in sorted(resources.items())
            if ":" not in key and "memory" not in key
        )
        or "nothing"
    )
