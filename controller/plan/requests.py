"""The groups a scenario asks for, before anybody says where: fused roles in one, sharers beside the group they sit on.

By default trainer, rollout and embedding are fused in one process; each reward and the evaluator have one of their own on
cpu. On CPU the groups of a pipeline take turns, so a worker asks Ray for a quarter core and computes with the planned
threads. k groups on the same devices ask 1/k of a device each, cut to Ray's four decimals so that the sum never passes 1.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import floor

from nonet.controller.plan.resolved import ResolvedRun
from nonet.controller.scenario import Elastic, Pool, Role, Scenario, Topology
from nonet.errors import ConfigError
from nonet.workers.devices import get_device

TORCH_CPUS, LIGHT_CPUS = 0.25, 0.05


@dataclass(frozen=True, slots=True)
class GroupRequest:
    """One group to be.

    least, most   workers
    asks          of one worker's own process, by resource; bundle: what is reserved for it and those that share it
    shares        the group on whose bundles it sits, "" for bundles of its own
    light         no torch of ours inside (rewards, steps between)
    gang          its workers talk in a process group
    where         the scenario's path, for messages
    """

    name: str
    roles: tuple[str, ...]
    pool: str
    device: str
    resource: str
    labels: Mapping[str, str]
    topology: Topology
    least: int
    most: int
    asks: float
    bundle: float
    light: bool
    gang: bool
    where: str
    shares: str = ""


def group_requests(run: ResolvedRun, stage: str | None = None) -> list[GroupRequest]:
    """Return every group in the order people read them; `stage` takes that stage's own roles into account.

    Raises ConfigError.
    """
    scenario, roles = run.scenario, run.roles_at(stage)
    hosts = {name: _host(name, roles) for name in roles}
    kinds = {name: role.kind(name) for name, role in roles.items()}
    order = sorted(roles, key=lambda name: kinds[name].order)
    fused = {name: tuple(r for r in order if hosts[r][0] == name) for name in order}
    sharers: dict[str, list[str]] = {}
    for name in order:
        if hosts[name][1]:
            sharers.setdefault(hosts[hosts[name][1]][0], []).append(name)
    requests = []
    for name in order:
        if not fused[name]:
            continue
        beside = [other for role in fused[name] for other in kinds[role].beside]
        group_roles = (*fused[name], *beside)
        under = hosts[name][1] and hosts[hosts[name][1]][0]
        requests.append(
            _draft(scenario, roles, name, group_roles, len(sharers.get(under or name, ())), under)
        )
    return requests + list(_light(run))


def _host(name: str, roles: Mapping[str, Role]) -> tuple[str, str]:
    """The role whose process this one lives in, and the role on whose devices that process sits ("" for its own)."""
    seen = [name]
    while roles[name].fuse:
        name = roles[name].fuse or ""
        if name in seen:
            raise ConfigError(
                f"roles.{seen[0]}: fuse goes in a circle ({' -> '.join([*seen, name])}); break it"
            )
        seen.append(name)
    root, under = name, roles[name].collocate or ""
    while under:
        if under in seen:
            raise ConfigError(
                f"roles.{root}: sits on its own devices ({' -> '.join([*seen, under])}); break the circle"
            )
        seen.append(under)
        name, under = under, roles[under].fuse or roles[under].collocate or ""
    return root, name if name != root else ""


def _draft(
    scenario: Scenario,
    roles: Mapping[str, Role],
    name: str,
    group_roles: tuple[str, ...],
    sharers: int,
    under: str,
) -> GroupRequest:
    host = under or name
    role = roles[host]
    for other in (r for r in group_roles if r in roles and r != host):
        _same("pool", other, roles[other].pool, host, role.pool or "cpu")
        if "workers" in roles[other].model_fields_set:
            _same("workers", other, roles[other].workers, host, role.workers)
    least, most = _range(role.workers)
    pool = scenario.pools.get(role.pool or "cpu", Pool())
    resource = get_device(pool.device).resource or "CPU"
    kinds = [roles[name].kind(name) for name in group_roles if name in roles]
    gang = any(kind.gang for kind in kinds) or role.topology != Topology()
    light = all(kind.light for kind in kinds)
    cpus = LIGHT_CPUS if light else TORCH_CPUS
    asks = cpus if resource == "CPU" else floor(1e4 / (1 + sharers)) / 1e4
    bundle = cpus * (1 + sharers) if resource == "CPU" else 1.0
    return GroupRequest(
        name,
        group_roles,
        role.pool or "cpu",
        pool.device,
        resource,
        pool.labels,
        role.topology,
        least,
        most,
        asks,
        bundle,
        light=light,
        gang=gang,
        where=f"roles.{host}",
        shares=under,
    )


def _light(run: ResolvedRun) -> Iterator[GroupRequest]:
    """Rewards and steps between: workers of the user's that work alone."""
    for stage, body in run.scenario.stages.items():
        for own in run.kinds[stage].list_own_workers(stage, body):
            yield _alone(run.scenario, own.name, own.where, own.pool, own.workers)


def _alone(scenario: Scenario, name: str, where: str, pool_name: str | None, workers: int) -> GroupRequest:
    pool = scenario.pools.get(pool_name or "cpu", Pool())
    resource = get_device(pool.device).resource or "CPU"
    each = LIGHT_CPUS if resource == "CPU" else 1.0
    return GroupRequest(
        name,
        (name,),
        pool_name or "cpu",
        pool.device,
        resource,
        pool.labels,
        Topology(),
        workers,
        workers,
        each,
        each,
        light=True,
        gang=False,
        where=where,
    )


def _same(key: str, name: str, mine: object, host: str, its: object) -> None:
    if mine is not None and mine != its:
        raise ConfigError(
            f"roles.{name}.{key} is {mine}, but it shares with {host}, whose {key} is {its}: "
            f"leave it out, or give both the same"
        )


def _range(workers: int | Elastic) -> tuple[int, int]:
    return (workers.min, workers.max) if isinstance(workers, Elastic) else (workers, workers)
