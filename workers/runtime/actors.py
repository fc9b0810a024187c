"""ActorGroup: the worker processes of one group, whatever roles they hold.

The groups of a run are named and detached: they outlive a controller that is restarted, and exit when no controller
contacts them (docs/explanation/design.md, section 5). A group of a script belongs to the script's driver, as Ray
actors do.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import ray
from ray.exceptions import ActorDiedError, GetTimeoutError, RayActorError, RayError

from nonet.deadlines import DEFAULTS, Deadlines, suggest_longer_deadline
from nonet.errors import ConfigError, DeadlineExceeded, NonetError, PlacementError, WorkerLost
from nonet.storage import list_mounts
from nonet.trust import list_trust
from nonet.workers import WorkerActivity, check_ray_environment, start_ray
from nonet.workers.devices import PoolEnvironment, get_device
from nonet.workers.runtime.dispatch import CallMessage, format_task_name, pack_header
from nonet.workers.runtime.future import GroupFuture
from nonet.workers.runtime.host import WorkerActor
from nonet.workers.runtime.orphan_guard import OWNED, GroupLifetime
from nonet.workers.runtime.payload import register_tensor_serializer
from nonet.workers.runtime.worker import Place, RoleSpec

if TYPE_CHECKING:
    from nonet.workers.runtime.residents import OffloadStats


NAMESPACE = "nonet"  # Ray namespace of the named actors.
PING_PATIENCE_S = 5.0  # Seconds in which a control thread must answer; it is never busy for long.
_CONTROL_PATIENCE_S = 10.0  # Seconds in which all control threads must answer that do more than a ping.
_BUILT_PATIENCE_S = 1.0  # Seconds in which ranks must have been built whose spans are collected.
_STOP_GRACE_S = 10.0  # Seconds for the teardown of roles.


def ensure_ray(variables: Mapping[str, str] | None = None) -> None:
    """Join the cluster that `RAY_ADDRESS` names, or start a local one that ends with this process; once per process.

    Args:
        variables: Environment variables of the processes that this process starts on the cluster, if it has not joined yet.

    Raises:
        ConfigError: `RAY_ADDRESS` names no cluster, or a local one cannot be started with this temporary folder.
    """
    if not ray.is_initialized():
        check_ray_environment()
        address = os.environ.get("RAY_ADDRESS") or "local"
        options: dict[str, Any] = {"namespace": NAMESPACE}
        if address == "local":
            options["include_dashboard"] = False
        if variables:
            options["runtime_env"] = {"env_vars": dict(variables)}
        try:
            start_ray(address, options)
        except Exception as error:
            cause = " ".join(str(error).split())[:300]
            setting = f"RAY_ADDRESS is {address}" if "RAY_ADDRESS" in os.environ else "no RAY_ADDRESS is set"
            raise ConfigError(f"Ray does not start ({setting}): {type(error).__name__}: {cause}") from error
    register_tensor_serializer()


@dataclass(frozen=True, slots=True)
class WorkerResources:
    """The cluster resources of one worker.

    Attributes:
        device: Kind of the device.
        cpus: Number of CPUs.
        devices: Number of devices.
        threads: Number of torch threads, 0 for roles without torch.
        placement_group: Ray placement group of the workers; rank i uses bundle i.
        env: The `env:` options of its pool.
    """

    device: str = "cpu"
    cpus: float = 1.0
    devices: float = 0.0
    threads: int = 1
    placement_group: Any = None
    env: Mapping[str, Any] | None = field(default=None, hash=False)

    def to_actor_options(self, rank: int) -> dict[str, Any]:
        """Return the keyword arguments for `WorkerActor.options` of a rank."""
        device_kind = get_device(self.device)
        options: dict[str, Any] = {"num_cpus": self.cpus, **device_kind.get_ray_options(self.devices)}
        if self.placement_group is not None:
            from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

            options["scheduling_strategy"] = PlacementGroupSchedulingStrategy(self.placement_group, rank)
        if runtime_env := PoolEnvironment.from_options(self.env).to_runtime_env(device_kind):
            options["runtime_env"] = runtime_env
        return options


class ActorGroup:
    """A group of actors that all hold the same roles.

    Args:
        specs: Class and arguments of each role, by role.
        workers: Number of actors (ranks).
        name: Name of the group; by default its roles, joined by "+".
        seat: Resources of each worker.
        life: How long the processes live.
        deadlines: Time limits of calls.

    Attributes:
        world: Number of ranks.
        epoch: Gang epoch in which calls are sent.
        watchdog: Explains in error messages what late ranks are doing; None for no watchdog.
        hurt: By rank that was found lost, Ray's message.
        actors: The actor of each rank.
    """

    def __init__(
        self,
        specs: Mapping[str, RoleSpec],
        *,
        workers: int = 1,
        name: str = "",
        seat: WorkerResources | None = None,
        life: GroupLifetime = OWNED,
        deadlines: Deadlines = DEFAULTS,
    ):
        ensure_ray()
        seat = seat or WorkerResources()
        self.name, self.world, self.specs = name or "+".join(specs), workers, dict(specs)
        self.epoch = 0
        self._lifetime, self._deadlines = life, deadlines
        self._remembered_calls: dict[tuple[str, str], CallMessage] = {}  # By (role, method).
        self._remote_methods: dict[
            tuple[str, str], list[Any]
        ] = {}  # By (actor method, task name), of each rank.
        self.watchdog: Any = None
        self.hurt: dict[int, str] = {}
        self.actors: list[Any] = []
        try:
            for rank in range(workers):
                self.actors.append(self._start_actor(rank, seat))
            self._build_refs = self._send_build(range(workers))
        except BaseException:  # a detached actor does not end with its handle
            self.kill()
            raise
        self._pids: list[int] = []
        self._beats: list[Any] = []  # References to the answers to the last heartbeat, one per rank.
        self._alive_ranks: set[int] = set()  # Ranks that have answered a heartbeat.

    def _start_actor(self, rank: int, seat: WorkerResources) -> Any:
        """Start the actor of a rank, and return its handle."""
        options = seat.to_actor_options(rank)
        if self._lifetime.detached:
            name = self._lifetime.format_name(f"{self.name}-{rank}")
            options |= {"name": name, "namespace": NAMESPACE, "lifetime": "detached"}
        if self._lifetime.restarts:
            options["max_restarts"] = self._lifetime.restarts
        place = Place(
            role=self.name,
            rank=rank,
            world=self.world,
            threads=seat.threads,
            device=get_device(seat.device).to_torch_device(),
            deadline_s=self._deadlines.step,
            mounts=list_mounts(),
            trust=list_trust(),
        )
        return WorkerActor.options(**options).remote(place, self._lifetime.orphan_timeout_s)  # type: ignore[attr-defined]

    def _send_build(self, ranks: Sequence[int]) -> list[Any]:
        """Send the call that builds the roles to some ranks. Returns the references to the results of `build`."""
        locations = [actor.get_location.remote() for actor in self.actors]
        head = self.actors[0]
        return [
            self.actors[rank].build.remote(self.specs, head if rank else None, *locations) for rank in ranks
        ]

    def wait_until_ready(self) -> list[dict[str, Any]]:
        """Wait until every role of every rank is set up.

        Returns:
            {"node", "pid", "name"} of each rank (`WorkerActor.build`).

        Raises:
            PlacementError: The workers did not start within the start deadline.
        """
        future = GroupFuture(self._build_refs, self, self.name, "setup", "list")
        try:
            return future.get(self._deadlines.start)
        except DeadlineExceeded:
            raise PlacementError(self._explain_late_start()) from None

    def list_pids(self) -> list[int]:
        """Return the process id of every rank as it was first set up; empty until all ranks are. This does not wait."""
        if not self._pids and all(map(_has_succeeded, self._build_refs)):
            self._pids = [built["pid"] for built in ray.get(self._build_refs)]
        return self._pids

    def _explain_late_start(self) -> str:
        """Explain which ranks are not set up yet: what a started process is doing, or the resources that others wait for."""
        done_refs, _ = ray.wait(self._build_refs, num_returns=self.world, timeout=0, fetch_local=False)
        activities = zip(self.describe_activities(), self._build_refs, strict=True)
        late = [activity for activity, ref in activities if ref not in done_refs]
        reasons = [activity.describe() for activity in late if not activity.silent]
        if unplaced := [activity.who for activity in late if activity.silent]:
            total, free = ray.cluster_resources(), ray.available_resources()
            reasons.append(
                f"{', '.join(unplaced)} has no process that answers; the cluster has {_format_resources(total)}, "
                f"free are {_format_resources(free)}. Ask for fewer workers or cpus, or add a node"
            )
        return (
            f"group {self.name!r}: {len(late)} of {self.world} workers did not start within {self._deadlines.start:g} s: "
            f"{'; '.join(reasons)}{suggest_longer_deadline(self._deadlines.start)}."
        )

    def call_control(self, method: str, timeout_s: float = _CONTROL_PATIENCE_S) -> list[Any]:
        """Call a method of the control threads, such as ping, which answer even while the rank works.

        Returns:
            The result of each rank.
        """
        refs = [getattr(actor, method).remote() for actor in self.actors]
        return GroupFuture(refs, self, self.name, method, "list").get(timeout_s)

    def check_shared_file(self, file: str, token: str) -> list[str]:
        """Return why each rank cannot use the folder of a file that contains `token`, "" where it can."""
        refs = [actor.check_shared_file.remote(file, token) for actor in self.actors]
        return GroupFuture(refs, self, self.name, "check_shared_file", "list").get(self._deadlines.start)

    def read_file(self, path: str) -> bytes | None:
        """Return the content of a file on the node of rank 0, None if there is no such file."""
        ref = self.actors[0].read_file.remote(path)
        return GroupFuture([ref], self, self.name, "read_file", "list").get(self._deadlines.start)[0]

    def list_ready_actors(self) -> list[tuple[str, Any]]:
        """Return the node (Ray's id, shortened) and the actor of every rank whose roles are built."""
        done_refs, _ = ray.wait(self._build_refs, num_returns=self.world, timeout=0, fetch_local=False)
        pairs = zip(self._build_refs, self.actors, strict=False)  # a killed group has no actors
        built: list[tuple[Any, Any]] = [(ray.get(ref), actor) for ref, actor in pairs if ref in done_refs]
        return [(answer["node"], actor) for answer, actor in built]

    def describe_activities(self, timeout_s: float = PING_PATIENCE_S) -> list[WorkerActivity]:
        """Return what every rank is doing; a rank that does not answer in time is marked silent."""
        refs = [actor.describe_activity.remote() for actor in self.actors]
        ray.wait(refs, num_returns=len(refs), timeout=timeout_s)
        return [self._get_activity(rank, ref) for rank, ref in enumerate(refs)]

    def _get_activity(self, rank: int, ref: Any) -> WorkerActivity:
        """Return what a rank is doing, marked silent if its answer has not arrived."""
        try:
            return ray.get(ref, timeout=0)
        except (RayActorError, GetTimeoutError):
            return WorkerActivity(f"{self.name}-{rank}", silent=True)

    def explain_late_ranks(self, ranks: Sequence[int]) -> str:
        """Explain why these ranks are late, as far as a watchdog can see; "" for a group without one."""
        return f". {self.watchdog.describe_late(self, ranks)}" if self.watchdog else ""

    def take_spans(self) -> list[tuple[str, list[tuple[str, float, float, int]]]]:
        """Return the name and the new spans of every rank; an empty list if any rank does not answer.

        A span is (role.method, start, end, bytes out) in unix seconds; each is returned once.
        """
        try:
            names = [built["name"] for built in ray.get(self._build_refs, timeout=_BUILT_PATIENCE_S)]
            return list(zip(names, self.call_control("take_spans"), strict=True))
        except (NonetError, RayActorError, GetTimeoutError):
            return []  # The spans of a dead rank are lost with its process.

    def send_heartbeats(self) -> list[str]:
        """Send a heartbeat to every host without waiting.

        Returns:
            The names of the hosts that did not answer the previous heartbeat. Hosts that have never answered are left
            out: they are still starting, which `wait_until_ready` watches.
        """
        previous, self._beats = self._beats, [actor.ping.remote() for actor in self.actors]
        answered = {rank for rank, ref in enumerate(previous) if _has_succeeded(ref)}
        silent = [rank for rank in range(len(previous)) if rank in self._alive_ranks and rank not in answered]
        self._alive_ranks |= answered
        return [f"{self.name}-{rank}" for rank in silent if self.actors]

    def send(self, message: CallMessage, rank: int) -> Any:
        """Send a call to one rank. Returns the reference to its result."""
        values = message.flats[rank]
        if message.header is None:
            return self._get_remote_methods("call", message)[rank].remote(*values)
        return self._get_remote_methods("call_with", message)[rank].remote(
            pack_header(message.header), *values
        )

    def open_stream(self, message: CallMessage, rank: int) -> Any:
        """Call a method that yields on one rank. Returns a generator of references."""
        return self._get_remote_methods("stream", message)[rank].remote(
            pack_header(message.header or ()), *message.flats[rank]
        )

    def _get_remote_methods(self, actor_method: str, message: CallMessage) -> list[Any]:
        """Return each rank's remote method that sends a message under its task name; cached by name."""
        task_name = format_task_name(message.role, message.method, message.epoch)
        if (actor_method, task_name) not in self._remote_methods:
            options = {"name": task_name} | ({"concurrency_group": "beside"} if message.beside else {})
            self._remote_methods[actor_method, task_name] = [
                getattr(actor, actor_method).options(**options) for actor in self.actors
            ]
        return self._remote_methods[actor_method, task_name]

    def remember(self, message: CallMessage) -> None:
        """Remember a call that a restarted rank must receive again; only the last call of each method is kept."""
        if self._lifetime.restarts:
            self._remembered_calls[message.role, message.method] = message

    def heal(self) -> None:
        """Revive every rank that was found lost (`hurt`).

        Raises:
            WorkerLost: As in `revive`.
        """
        for rank, cause in list(self.hurt.items()):
            self.revive(rank, cause)

    def revive(self, rank: int, cause: str) -> None:
        """Wait until Ray has restarted a rank, build its roles and repeat the remembered calls.

        Args:
            rank: The rank that was lost.
            cause: Why it was lost, for messages.

        Raises:
            WorkerLost: The group has no restarts, or the start deadline has passed.
        """
        lost = WorkerLost(f"{self.name}-{rank} died: {cause}", role=self.name, rank=rank)
        if not self._lifetime.restarts:
            raise lost
        deadline, actor = time.monotonic() + self._deadlines.start, self.actors[rank]
        while True:
            try:
                has_roles = ray.get(actor.admit_epoch.remote(), timeout=self._deadlines.start)
                if not has_roles:
                    ray.get(self._send_build([rank]), timeout=max(1.0, deadline - time.monotonic()))
                    for message in self._remembered_calls.values():
                        ray.get(self.send(message, rank), timeout=self._deadlines.start)
                self.hurt.pop(rank, None)
                return
            except (RayActorError, GetTimeoutError) as error:
                if isinstance(error, ActorDiedError) or time.monotonic() > deadline:
                    raise lost from error
                time.sleep(0.1)

    def restart(self, rank: int) -> None:
        """Kill the process of a rank, which Ray then restarts; calls that wait for it fail with WorkerLost."""
        ray.kill(self.actors[rank], no_restart=not self._lifetime.restarts)
        self.hurt[rank] = "it did not answer and was ended"  # `heal` and `revive` wait for the new process.

    def begin_epoch(self, epoch: int) -> None:
        """Begin a gang epoch, which several groups may share: ranks reject calls of older epochs from then on.

        Raises:
            WorkerLost: A rank died.
            DeadlineExceeded: A rank did not answer within the start deadline.
        """
        self.epoch = epoch
        refs = [actor.admit_epoch.remote(epoch) for actor in self.actors]
        GroupFuture(refs, self, self.name, "advance", "list").get(self._deadlines.start)

    def offload_roles(self, offloaded_roles: Sequence[str], timeout_s: float) -> list[OffloadStats]:
        """Offload the buffers of these roles to host memory and bring all others back to the device, on every rank.

        Args:
            offloaded_roles: Roles to offload.
            timeout_s: Seconds to wait for all ranks.

        Raises:
            PlacementError: A move failed.
            WorkerLost: A rank died.
            DeadlineExceeded: A rank was busy for longer.
        """
        refs = [actor.offload_roles.remote(tuple(offloaded_roles)) for actor in self.actors]
        return GroupFuture(refs, self, self.name, "move", "list").get(timeout_s)

    def begin_generation(self, folder: str, generation: int) -> None:
        """Let what the calls from now on make in a stored run count as newer than a deletion (`RunCopy.raise_generation`)."""
        for actor in self.actors:
            actor.begin_generation.remote(folder, generation)

    def set_threads(self, threads: int) -> None:
        """Set the number of torch threads of every rank, effective after the calls that were sent before; does not wait."""
        for actor in self.actors:
            actor.set_threads.remote(threads)

    def find_dead_ranks(self) -> list[int]:
        """Return the ranks that do not answer a ping."""
        refs = [actor.ping.remote() for actor in self.actors]
        dead_ranks = []
        for rank, ref in enumerate(refs):
            try:
                ray.get(ref, timeout=PING_PATIENCE_S)
            except (RayActorError, GetTimeoutError):
                dead_ranks.append(rank)
        return dead_ranks

    def request_stop(self) -> list[Any]:
        """Ask every rank to tear down. Returns the references to their answers."""
        return [actor.stop.remote() for actor in self.actors]

    def kill(self) -> None:
        """Kill every process of the group, dead or alive, without a restart."""
        for actor in self.actors:
            ray.kill(actor, no_restart=True)
        self.actors, self._remote_methods = [], {}

    def stop(self, timeout_s: float = _STOP_GRACE_S) -> None:
        """Tear down the roles, then kill every process of the group."""
        refs = self.request_stop()
        if refs:
            ray.wait(refs, num_returns=len(refs), timeout=timeout_s)
        self.kill()


def _has_succeeded(ref: Any) -> bool:
    """Return whether a result is available and not an error."""
    try:
        ray.get(ref, timeout=0)
    except RayError:
        return False
    return True


def _format_resources(resources: Mapping[str, float]) -> str:
    """Format resources for a message, such as "CPU 8, GPU 1", without nodes, memory and the shares of placement groups."""
    hidden_parts = (":", "memory", "_group_")
    shown = {key: value for key, value in resources.items() if not any(part in key for part in hidden_parts)}
    return ", ".join(f"{key} {value:g}" for key, value in sorted(shown.items())) or "nothing"
