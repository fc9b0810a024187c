"""ClusterProbes: probes the nodes and devices of a Ray cluster before workers are placed, and isolates faulty ones.

A node is probed by a task on it, and the node of this process without Ray. The free devices of a node that the scenario's pools
may use are probed by one task, with the pool's environment. If a device fails, each free device of the node gets an actor
that probes it again. The actor of a device that fails again stays, so that Ray gives the device to nobody else, and ends when
the device has passed. An isolated node is left out of the views that plans are made on.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from nonet.cache import find_cache_root
from nonet.controller.cluster.health import HealthRecord, Isolation
from nonet.controller.cluster.live import leave_out_nodes, read_live_view
from nonet.controller.cluster.pools import Pool
from nonet.controller.cluster.view import Node
from nonet.errors import PlacementError
from nonet.workers.devices import PoolEnvironment, get_device, probe_devices, probe_host

_LOOK_EVERY_S = 2.0  # between two looks for isolated nodes and devices that are to be probed again


class ClusterProbes:
    """The probes of one session of a run.

    Args:
        folder: The folder of the run.
        pools: The pools that roles of the run use, by name.
        timeout_s: The longest time for a probe.
        note: Shows a note of the run.
    """

    def __init__(
        self, folder: Path, pools: Mapping[str, Pool], timeout_s: float, note: Callable[[str], None]
    ):
        self._record, self._pools, self._timeout_s, self._note = HealthRecord(folder), pools, timeout_s, note
        self._holders: dict[tuple[str, str], Any] = {}  # the actors of faulty devices, by node and device
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None

    def list_isolated(self) -> list[Isolation]:
        """Return the nodes and devices that are isolated now."""
        return self._record.list_isolated()

    def check(self) -> None:
        """Probe the cluster, isolate what fails twice, and readmit what has healed.

        Isolated nodes are probed again only when their pause is over.
        """
        with self._lock:
            leave_out_nodes(())
            nodes = {node.id: node for node in read_live_view().nodes}
            self._record.end_lost(nodes)
            waiting = {
                entry.node
                for entry in self.list_isolated()
                if not entry.device and not self._record.is_due(entry)
            }
            self._check_nodes([node for node in nodes if node not in waiting])
            isolated = self._list_isolated_nodes()
            self._check_devices([node for node in nodes.values() if node.id not in isolated])
            leave_out_nodes(isolated)
        if self.list_isolated() and self._thread is None:
            self._thread = threading.Thread(target=self._probe_again, name="probes", daemon=True)
            self._thread.start()

    def close(self) -> None:
        """Stop probing, and release the isolated devices that actors hold."""
        self._ended.set()
        for holder in self._holders.values():
            ray.kill(holder)
        self._holders.clear()

    def explain(self, error: PlacementError) -> PlacementError:
        """Return an error that there is no room, which also says what is isolated."""
        clauses = [entry.describe() for entry in self.list_isolated()]
        return PlacementError("; ".join([str(error), *clauses])) if clauses else error

    def _list_isolated_nodes(self) -> set[str]:
        """Return the ids of the nodes that are isolated as a whole."""
        return {entry.node for entry in self.list_isolated() if not entry.device}

    def _check_nodes(self, nodes: Sequence[str]) -> None:
        """Probe nodes, once more those that fail."""
        problems = self._probe_nodes(nodes)
        failing = [node for node in nodes if problems[node]]
        problems |= self._probe_nodes([node for node in failing if self._record.find(node) is None])
        for node in nodes:
            self._update(node, problems[node])

    def _probe_nodes(self, nodes: Sequence[str]) -> dict[str, str]:
        """Probe nodes, and return what is wrong with each, "" for a healthy one."""
        own_node = ray.get_runtime_context().get_node_id()
        others = [node for node in nodes if node != own_node]
        probe = ray.remote(num_cpus=0, max_retries=0)(probe_cache)
        refs = {
            node: probe.options(scheduling_strategy=_make_node_strategy(node)).remote() for node in others
        }
        return {node: probe_cache() for node in nodes if node == own_node} | self._collect(refs, str)

    def _check_devices(self, nodes: Sequence[Node]) -> None:
        """Probe the free devices of nodes that the pools may use."""
        for kind, pool in {pool.device: pool for pool in self._pools.values()}.items():
            resource = get_device(kind).resource
            if not resource:
                continue
            counts = {
                node.id: int(node.free.get(resource, 0))
                for node in nodes
                if pool.labels.items() <= node.labels.items() and node.free.get(resource, 0) >= 1
            }
            if not self._can_probe(pool, counts):
                continue
            probe = ray.remote(num_cpus=0, max_retries=0, max_calls=1)(probe_devices)
            refs = {
                node: probe.options(
                    **_make_options(pool, count), scheduling_strategy=_make_node_strategy(node)
                ).remote(kind)
                for node, count in counts.items()
            }
            faulty_nodes = {}
            for node, problems in self._collect(refs, dict).items():
                if isinstance(problems, str) or any(problems.values()):
                    faulty_nodes[node] = counts[node]
                else:
                    for device_id in problems:
                        self._update(node, "", f"{kind} {device_id}")
            self._hold_faulty(kind, pool, faulty_nodes)

    def _can_probe(self, pool: Pool, nodes: Collection[str]) -> bool:
        """Return whether the environment of a pool starts at once on some nodes; if not, the start of workers reports it."""
        env = PoolEnvironment.from_options(pool.env.model_dump() if pool.env else None)
        if env.image or env.pip:
            return False
        try:
            env.check_interpreter("probed", nodes, self._timeout_s)
        except PlacementError:
            return False
        return True

    def _hold_faulty(self, kind: str, pool: Pool, counts: Mapping[str, int]) -> None:
        """Probe each free device of some nodes by an actor of its own, and keep the actors of those that fail again."""
        holder_class: Any = ray.remote(num_cpus=0, max_restarts=0)(DeviceHolder)
        actors = [
            (
                node,
                holder_class.options(
                    **_make_options(pool, 1), scheduling_strategy=_make_node_strategy(node)
                ).remote(),
            )
            for node, count in counts.items()
            for _ in range(count)
        ]
        refs = {index: actor.probe.remote(kind) for index, (_, actor) in enumerate(actors)}
        results = self._collect(refs, dict)
        for index, (node, actor) in enumerate(actors):
            result = results[index]
            device_id, why = next(iter(result.items())) if isinstance(result, dict) else (f"?{index}", result)
            device = f"{kind} {device_id}"
            self._update(node, why, device)
            if why:
                self._holders[node, device] = actor
            else:
                ray.kill(actor)

    def _collect(self, refs: Mapping[Any, Any], read: Callable[[Any], Any]) -> dict[Any, Any]:
        """Wait for probes, and return what each found; a clause for one that failed or did not end in time."""
        ready, _ = (
            ray.wait(list(refs.values()), num_returns=len(refs), timeout=self._timeout_s)
            if refs
            else ([], [])
        )
        results = {}
        for key, ref in refs.items():
            if ref not in ready:
                results[key] = f"a probe did not end within {self._timeout_s:g} s"
                with contextlib.suppress(ValueError):  # calls of actors end with their actors
                    ray.cancel(ref, force=True)
                continue
            try:
                results[key] = read(ray.get(ref))
            except RayError as error:
                results[key] = f"a probe failed: {' '.join(str(error).split())[:200]}"
        return results

    def _update(self, node: str, why: str, device: str = "") -> None:
        """Record the result of a probe, and show it if a node or device is isolated or readmitted by it."""
        if why and (entry := self._record.record_failure(node, why, device)):
            self._note(f"warning: {entry.describe()}; it is probed again")
        elif not why and (entry := self._record.record_success(node, device)):
            self._note(f"{entry.name} has passed a probe and is used again")

    def _probe_again(self) -> None:
        """Probe isolated nodes and devices when their pauses are over, until `close`."""
        while not self._ended.wait(_LOOK_EVERY_S):
            with self._lock:
                for entry in self.list_isolated():
                    if self._ended.is_set() or not self._record.is_due(entry):
                        continue
                    if entry.device:
                        self._probe_held(entry)
                    else:
                        self._update(entry.node, self._probe_nodes([entry.node])[entry.node])
                leave_out_nodes(self._list_isolated_nodes())

    def _probe_held(self, entry: Isolation) -> None:
        """Probe a device that an actor holds, and end the actor if it passes."""
        holder = self._holders.get((entry.node, entry.device))
        if holder is None:
            return  # an earlier session held it: `check` probes it
        kind = entry.device.partition(" ")[0]
        ref = {0: holder.probe.remote(kind)}
        why = self._collect(ref, lambda problems: "; ".join(filter(None, problems.values())))[0]
        self._update(entry.node, why, entry.device)
        if not why:
            ray.kill(self._holders.pop((entry.node, entry.device)))


class DeviceHolder:
    """An actor that has one device."""

    def probe(self, kind: str) -> dict[str, str]:
        """Return what is wrong with the device, by its id."""
        return probe_devices(kind)


def probe_cache() -> str:
    """Probe this node with the disk of its cache; return what is wrong, "" if nothing is."""
    return probe_host(find_cache_root())


def _make_node_strategy(node: str) -> NodeAffinitySchedulingStrategy:
    """Return the strategy that runs a task or an actor on one node only."""
    return NodeAffinitySchedulingStrategy(node, soft=False)


def _make_options(pool: Pool, devices: int) -> dict[str, Any]:
    """Return Ray's options of a probe that has some devices of a pool."""
    device = get_device(pool.device)
    options = device.get_ray_options(devices)
    env = PoolEnvironment.from_options(pool.env.model_dump() if pool.env else None)
    runtime_env = env.to_runtime_env(device)
    return options | ({"runtime_env": runtime_env} if runtime_env else {})
