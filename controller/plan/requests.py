"""The groups that a scenario requests, before they are placed: fused roles in one group, and groups that share devices.

By default trainer, rollout and embedding are fused in one process; each reward and the evaluator have their own on cpu. On
cpu the groups of a pipeline take turns, so a worker requests a quarter core from Ray and computes with the planned threads.
k groups on the same devices request 1/k of a device each, rounded down to Ray's four decimals so that the sum never exceeds
1.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from math import floor

from nonet.controller.cluster import Elastic, Pool, Topology
from nonet.controller.plan.resolved import ResolvedRun
from nonet.controller.scenario import Role, Scenario
from nonet.errors import ConfigError
from nonet.workers.devices import get_device

# CPUs that a worker on cpu requests from Ray: with torch code, and without. They are less than one because groups take turns.
TORCH_CPUS, LIGHT_CPUS = 0.25, 0.05


@dataclass(frozen=True, slots=True)
class GroupRequest:
    """A request for one group.

    Attributes:
        name: The name of the group.
        roles: The roles that each process holds.
        pool: The pool of the scenario.
        device: The kind of device.
        resource: Ray's name of the device; "CPU" on cpu.
        labels: Labels that a node must have.
        topology: How near to each other the workers must or should be.
        least: The smallest acceptable number of workers.
        most: The largest number of workers.
        asks: Units of the resource that one worker requests from Ray.
        bundle: Units that are reserved for one worker and for the groups that share with it.
        light: Whether the group contains no torch code of Nonet (rewards, steps between).
        gang: Whether its workers communicate in a process group.
        together: The number of neighbouring workers that should be on one node, because they compute the same samples.
        where: The path of its options in the scenario, such as "roles.trainer", for messages.
        shares: The group whose bundles it uses; "" for bundles of its own.
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
    together: int = 1


def make_group_requests(run: ResolvedRun, stage: str | None = None) -> list[GroupRequest]:
    """Return the requests for all groups, in the order in which they are shown.

    Args:
        run: The scenario with everything that follows from it.
        stage: The stage whose own roles apply; None for the roles of the whole run.

    Raises:
        ConfigError: Roles are fused or collocated in a circle, or contradict each other.
    """
    scenario, roles = run.scenario, run.get_roles(stage)
    hosts = {name: _find_host(name, roles) for name in roles}
    # By role: the role whose process it is part of, and the one that owns the devices of this process ("" if it does).
    process_roles = {name: process_role for name, (process_role, _) in hosts.items()}
    device_owners = {name: owner and process_roles[owner] for name, (_, owner) in hosts.items()}
    kinds = {name: role.find_kind(name) for name, role in roles.items()}
    order = sorted(roles, key=lambda name: kinds[name].order)
    fused_roles = {name: tuple(r for r in order if process_roles[r] == name) for name in order}
    sharers: dict[str, list[str]] = {}
    for name in order:
        if device_owners[name]:
            sharers.setdefault(device_owners[name], []).append(name)
    requests = []
    for name in order:
        if not fused_roles[name]:
            continue
        added_roles = [other for role in fused_roles[name] for other in kinds[role].beside]
        group_roles = (*fused_roles[name], *added_roles)
        sharer_count = len(sharers.get(device_owners[name] or name, ()))
        request = _make_request(scenario, roles, name, group_roles, sharer_count, device_owners[name])
        trains_here = "trainer" in (*group_roles, *sharers.get(name, ()))
        requests.append(replace(request, together=scenario.tensor_ranks) if trains_here else request)
    return requests + list(_list_light_requests(run))


def _find_host(name: str, roles: Mapping[str, Role]) -> tuple[str, str]:
    """Return the role whose process a role is part of, and the role on whose devices this process is.

    Args:
        name: The role.
        roles: All roles.

    Returns:
        (role of the process, role that owns its devices); the second is "" if the process has devices of its own.

    Raises:
        ConfigError: Roles are fused or collocated in a circle.
    """
    path = [name]
    while roles[name].fuse:
        name = roles[name].fuse or ""
        if name in path:
            raise ConfigError(
                f"roles.{path[0]}: roles are fused in a circle ({' -> '.join([*path, name])}); break it"
            )
        path.append(name)
    process_role, next_owner = name, roles[name].collocate or ""
    while next_owner:
        if next_owner in path:
            raise ConfigError(
                f"roles.{process_role}: is collocated with itself ({' -> '.join([*path, next_owner])}); break the circle"
            )
        path.append(next_owner)
        name, next_owner = next_owner, roles[next_owner].fuse or roles[next_owner].collocate or ""
    return process_role, name if name != process_role else ""


def _make_request(
    scenario: Scenario,
    roles: Mapping[str, Role],
    name: str,
    group_roles: tuple[str, ...],
    sharer_count: int,
    device_owner: str,
) -> GroupRequest:
    """Build the request for the group of a role and those fused with it.

    Args:
        scenario: The scenario.
        roles: All roles, by name.
        name: The role after which the group is named.
        group_roles: All roles of the group.
        sharer_count: The number of groups that share the devices with their owner.
        device_owner: The role whose group owns the devices; "" for devices of its own.
    """
    host = device_owner or name
    role = roles[host]
    for other in (r for r in group_roles if r in roles and r != host):
        _check_same("pool", other, roles[other].pool, host, role.pool or "cpu")
        if "workers" in roles[other].model_fields_set:
            _check_same("workers", other, roles[other].workers, host, role.workers)
    least, most = _get_worker_range(role.workers)
    pool = scenario.pools.get(role.pool or "cpu", Pool())
    resource = get_device(pool.device).resource or "CPU"
    kinds = [roles[name].find_kind(name) for name in group_roles if name in roles]
    gang = any(kind.gang for kind in kinds) or role.topology != Topology()
    light = all(kind.light for kind in kinds)
    cpus = LIGHT_CPUS if light else TORCH_CPUS
    asks = cpus if resource == "CPU" else floor(1e4 / (1 + sharer_count)) / 1e4  # Ray has four decimals
    bundle = cpus * (1 + sharer_count) if resource == "CPU" else 1.0
    return GroupRequest(
        name=name,
        roles=group_roles,
        pool=role.pool or "cpu",
        device=pool.device,
        resource=resource,
        labels=pool.labels,
        topology=role.topology,
        least=least,
        most=most,
        asks=asks,
        bundle=bundle,
        light=light,
        gang=gang,
        where=f"roles.{host}",
        shares=device_owner,
    )


def _list_light_requests(run: ResolvedRun) -> Iterator[GroupRequest]:
    """Yield the requests for rewards and steps between, whose workers do not communicate."""
    for stage, stage_options in run.scenario.stages.items():
        for own in run.kinds[stage].list_own_workers(stage, stage_options):
            yield _make_light_request(run.scenario, own.name, own.where, own.pool, own.workers)


def _make_light_request(
    scenario: Scenario, name: str, where: str, pool_name: str | None, workers: int
) -> GroupRequest:
    """Build the request for a group of one role without torch."""
    pool = scenario.pools.get(pool_name or "cpu", Pool())
    resource = get_device(pool.device).resource or "CPU"
    units_per_worker = LIGHT_CPUS if resource == "CPU" else 1.0
    return GroupRequest(
        name=name,
        roles=(name,),
        pool=pool_name or "cpu",
        device=pool.device,
        resource=resource,
        labels=pool.labels,
        topology=Topology(),
        least=workers,
        most=workers,
        asks=units_per_worker,
        bundle=units_per_worker,
        light=True,
        gang=False,
        where=where,
    )


def _check_same(key: str, name: str, value: object, host: str, host_value: object) -> None:
    """Raise ConfigError if a role that shares with `host` states another value for a key."""
    if value is not None and value != host_value:
        raise ConfigError(
            f"roles.{name}.{key} is {value}, but it shares with {host}, whose {key} is {host_value}: "
            f"leave it out, or give both the same"
        )


def _get_worker_range(workers: int | Elastic) -> tuple[int, int]:
    """Return the smallest and largest number of workers."""
    return (workers.min, workers.max) if isinstance(workers, Elastic) else (workers, workers)
