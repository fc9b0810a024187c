"""The Ray actor of one worker process, which holds one role or several fused ones.

It has four concurrency groups: `work` (one thread: role methods and collectives, in order), `control` (two threads:
ping, stacks, counters, keys of a rendezvous), `read` (two threads: rows of a published version) and `beside` (eight
threads: methods declared with `concurrent`). The last three never touch a process group, so a worker inside a collective
still answers. A host (this process) that Ray restarted holds no roles and rejects calls until its group has built them again.
"""

from __future__ import annotations

import os
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ray
from ray.exceptions import GetTimeoutError

from nonet.deadlines import suggest_longer_deadline
from nonet.errors import (
    ConfigError,
    DeadlineExceeded,
    NonetError,
    NotAdmitted,
    StaleVersion,
    WorkerFailed,
    WorkerLost,
)
from nonet.storage import FileEntry, MountedRun, RunCopy, fetch_arguments, find_copy, mount
from nonet.trust import take_trust
from nonet.workers import (
    WorkerActivity,
    describe_activity,
    explain_unreachable,
    is_lost_connection,
    is_peer_timeout,
)
from nonet.workers.runtime.dispatch import assemble_arguments, parse_task_name, unpack_header
from nonet.workers.runtime.methods import get_declaration
from nonet.workers.runtime.orphan_guard import OrphanGuard
from nonet.workers.runtime.payload import count_rows, register_tensor_serializer
from nonet.workers.runtime.rendezvous import StoreAddress, access_store, reserve_store
from nonet.workers.runtime.timeline import SpanRecorder
from nonet.workers.runtime.worker import DistributeWorker, Place, RoleSpec

if TYPE_CHECKING:  # torch, which rewards need not have
    from nonet.workers.runtime.residents import OffloadStats, RoleOffloader


@dataclass(frozen=True, slots=True)
class HostLocation:
    """The location of a host.

    Attributes:
        node: Ray's node id, shortened.
        address: Address of the node.
        store: Name of the store that its group uses if this is the host of rank 0 (`join_role_process_group`).
        devices: Ids of its devices.
    """

    node: str
    address: str
    store: str
    devices: tuple[str, ...]


@ray.remote(concurrency_groups={"work": 1, "control": 2, "read": 2, "beside": 8})  # pyright: ignore[reportCallIssue]
class WorkerActor:
    """One worker process.

    Args:
        place: The place of the worker in its group.
        orphan_timeout_s: The process exits when no controller contacts it for that many seconds; 0 means never.
    """

    def __init__(self, place: Place, orphan_timeout_s: float = 0.0):
        self._place = place
        take_trust(place.trust)
        if place.threads:
            # torch's OpenMP reads this when torch is imported, which the first role does. Workers share cores, and their
            # threads would spin there while they wait for a thread that another worker keeps from running.
            os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
        self._roles: dict[str, DistributeWorker] = {}
        # The running call, the unix seconds when it began, and the id of its thread.
        self._current_call, self._call_started_at, self._call_thread_id = "", 0.0, 0
        self._epoch = 0
        self._context = ray.get_runtime_context()
        self._spans = SpanRecorder()
        self._location = self._determine_location()
        self._orphan_guard = OrphanGuard(orphan_timeout_s)
        self._offloader: RoleOffloader | None = None
        self._build_error: WorkerFailed | None = None
        self._build_ended = threading.Event()
        if self._context.was_current_actor_reconstructed:
            self._build_ended.set()  # Calls do not wait for another build, but are rejected until the roles exist.

    def __repr__(self) -> str:
        """Return the name in Ray's dashboard, logs and traces, such as rollout-3@1f2e3d4c-npu5."""
        device_kind = self._place.device.partition(":")[0]
        devices = "".join(f"-{device_kind}{device_id}" for device_id in self._location.devices)
        return f"{self._place.role}-{self._place.rank}@{self._location.node}{devices}"

    @ray.method(concurrency_group="control")
    def get_location(self) -> HostLocation:
        """Return the location of this host."""
        return self._location

    @ray.method(concurrency_group="work")
    def build(self, specs: dict[str, RoleSpec], head: Any, *locations: HostLocation) -> dict[str, Any]:
        """Construct every role, give each its peers, then set up all of them in order.

        Args:
            specs: By role, its class and arguments.
            head: The actor of rank 0, None for rank 0 itself.
            *locations: The location of each rank, in rank order.

        Returns:
            "node" (Ray's node id, shortened), "pid" and "name" of the worker.
        """
        self._current_call, self._call_started_at, self._call_thread_id = (
            f"{self._place.role}.build",
            time.time(),
            threading.get_ident(),
        )
        if self._place.threads:
            _make_deterministic(self._place.threads)
        ranks_on_node = [rank for rank, other in enumerate(locations) if other.node == self._location.node]
        place = replace(
            self._place,
            node=self._location.node,
            local_rank=ranks_on_node.index(self._place.rank) if locations else 0,
            meeting=StoreAddress(locations[0].store, head) if locations else None,
        )
        try:
            self._run_guarded(f"{place.role}.mount", _mount_all, (place.mounts,), {})
            self._roles = self._build_roles(specs, place)
        except WorkerFailed as error:
            self._build_error = error  # Queued calls raise this error instead of reporting a lost worker.
            raise
        finally:
            self._build_ended.set()
        register_tensor_serializer()
        return {"node": self._location.node, "pid": os.getpid(), "name": repr(self)}

    @ray.method(concurrency_group="work")
    def call(self, *flat: Any) -> Any:
        """Run the role method that the task name says, with its positional arguments.

        Errors are raised as WorkerFailed with role, rank and traceback.
        """
        name = self._context.get_task_name()
        assert name is not None  # Ray names every task
        return self._run_guarded(name, self._find_method(name), flat, {})

    @ray.method(concurrency_group="work")
    def call_with(self, data: bytes, *flat: Any) -> Any:
        """Run a role method as `call` does, with keyword arguments assembled from the flat values as a header says.

        Args:
            data: The pickled header.
            *flat: The flat values of this rank.
        """
        name = self._context.get_task_name()
        assert name is not None  # Ray names every task
        return self._run_guarded(name, self._find_method(name), (), self._assemble_arguments(data, flat))

    @ray.method(concurrency_group="work", num_returns="streaming")
    def stream(self, data: bytes, *flat: Any) -> Iterator[Any]:
        """Run a role method that yields, with the arguments of `call_with`; each value is sent as soon as it is yielded."""
        name = self._context.get_task_name()
        assert name is not None  # Ray names every task
        yield from self._run_guarded(name, self._find_method(name), (), self._assemble_arguments(data, flat))

    @ray.method(concurrency_group="work")
    def offload_roles(self, offloaded_roles: Sequence[str]) -> OffloadStats:
        """Offload the buffers of these roles to host memory and bring all others back to the device.

        Calls of offloaded roles are rejected. The move waits in the queue of the role methods, so calls that were sent
        before it find their buffers on the device.

        Returns:
            The bytes that were moved.
        """
        from nonet.workers.runtime.residents import RoleOffloader

        if self._offloader is None:
            self._offloader = RoleOffloader(repr(self), self._roles)
        start = time.time()
        moved = self._offloader.offload_roles(offloaded_roles)
        for direction, size in (("offload", moved.offload), ("resume", moved.resume)):
            if size:
                self._spans.add(f"{self._place.role}.{direction}", start, time.time(), size=size)
        return moved

    @ray.method(concurrency_group="work")
    def begin_generation(self, folder: str, generation: int) -> None:
        """Set the generation of the files of a stored run that this worker makes from now on (`RunCopy.raise_generation`).

        It waits in the queue of the role methods, so what an earlier call makes has the generation of before.
        """
        if isinstance(copy := find_copy(Path(folder)), RunCopy):
            copy.generation = generation

    @ray.method(concurrency_group="work")
    def set_threads(self, threads: int) -> None:
        """Set the number of torch threads; does nothing where the roles use no torch."""
        if self._place.threads:
            self._place = replace(self._place, threads=threads)
            _make_deterministic(threads)

    @ray.method(concurrency_group="control")
    def count(self, value: Any) -> int:
        """Return the row count of a result of this host, for a group of another size that takes the result by reference."""
        return count_rows(value)

    @ray.method(concurrency_group="control")
    def ping(self) -> str:
        """Record a heartbeat of the controller. Returns the call that the work thread runs, "" when it is idle."""
        self._orphan_guard.record_heartbeat()
        return self._current_call

    @ray.method(concurrency_group="control")
    def admit_epoch(self, epoch: int | None = None) -> bool:
        """With `epoch`, reject calls of older gang epochs from now on. Returns whether the roles of this host are built."""
        self._epoch = max(self._epoch, epoch or 0)
        return bool(self._roles)

    @ray.method(concurrency_group="control")
    def check_shared_file(self, file: str, token: str) -> str:
        """Return why this host cannot use the folder of a file that contains `token`, "" if it can."""
        problem = explain_unreachable(Path(file), token)
        return problem and f"{self!r} (node {self._location.node}, {self._location.address}) {problem}"

    @ray.method(concurrency_group="control")
    def read_file(self, path: str) -> bytes | None:
        """Return the content of a file of this node, None if there is no such file."""
        return Path(path).read_bytes() if Path(path).is_file() else None

    @ray.method(concurrency_group="control")
    def list_put(self, folder: str, start: int) -> list[tuple[str, FileEntry]]:
        """Return the results and artifacts that this worker has stored, from a position on (`RunCopy.list_put`)."""
        copy = find_copy(Path(folder))
        return copy.list_put(start) if isinstance(copy, RunCopy) else []

    @ray.method(concurrency_group="control")
    def refresh_copy(self, folder: str) -> None:
        """Make the local copy of a stored run on this node equal to the stored run (`RunCopy.match_results`)."""
        if isinstance(copy := find_copy(Path(folder)), RunCopy):
            copy.match_results()

    @ray.method(concurrency_group="control")
    def access_store(self, name: str, operation: str, *arguments: Any) -> Any:
        """Apply an operation to a rendezvous store that this process holds, which does not wait (`ActorStore`)."""
        return access_store(name, operation, *arguments)

    @ray.method(concurrency_group="control")
    def take_spans(self) -> list[tuple[str, float, float, int]]:
        """Return the spans since the last call: (role.method, start, end, bytes of the result), times in unix seconds."""
        return self._spans.take()

    @ray.method(concurrency_group="control")
    def describe_activity(self) -> WorkerActivity:
        """Describe what the work thread is doing, for the message of a watchdog."""
        return describe_activity(
            repr(self), self._current_call, time.time() - self._call_started_at, self._call_thread_id
        )

    @ray.method(concurrency_group="read")
    def read(self, role: str, *request: Any) -> Any:
        """Return the result of the role's `read`, which may run while another method of the role runs."""
        start = time.time()
        response = self._roles[role].read(*request)  # type: ignore[attr-defined]
        self._spans.add(f"{role}.read", start, time.time(), getattr(response, "data", None))
        return response

    @ray.method(concurrency_group="work")
    def stop(self) -> None:
        """Tear down every role, the last one built first."""
        for worker in reversed(self._roles.values()):
            worker.teardown()

    def _determine_location(self) -> HostLocation:
        """Determine the location of this host."""
        ids = [i for ids_of_kind in self._context.get_accelerator_ids().values() for i in ids_of_kind]
        return HostLocation(
            self._context.get_node_id()[:8],
            ray.util.get_node_ip_address(),
            reserve_store(),
            tuple(ids),
        )

    def _build_roles(self, specs: Mapping[str, RoleSpec], place: Place) -> dict[str, DistributeWorker]:
        """Construct every role, then set up all of them; each sees all others as peers. Returns the workers by role."""
        roles: dict[str, DistributeWorker] = {}
        for role, spec in specs.items():
            worker = self._run_guarded(f"{role}.__init__", spec.cls, spec.args, spec.kwargs or {})
            worker.place = replace(place, role=role, peers=roles)
            roles[role] = worker
        for role, worker in roles.items():
            self._run_guarded(f"{role}.setup", worker.setup, (), {})
        return roles

    def _find_method(self, task_name: str) -> Callable[..., Any]:
        """Wait until the roles are built, and return the method of a task.

        Raises:
            WorkerFailed: The roles could not be built.
            NotAdmitted: The host was restarted and holds no such role yet.
            StaleVersion: The call is of an older gang epoch.
            NotResident: The buffers of the role are offloaded.
        """
        role, method, epoch = parse_task_name(task_name)
        self._build_ended.wait()  # Concurrent calls run on other threads, so they do not queue behind `build`.
        if role not in self._roles and self._build_error is not None:
            raise self._build_error
        if role not in self._roles:
            raise NotAdmitted(
                f"{self!r} was restarted and holds no {role!r} yet; the call did not run",
                role=role,
                rank=self._place.rank,
            )
        if epoch < self._epoch:
            raise StaleVersion(
                f"{self!r} is in epoch {self._epoch}; a call of epoch {epoch} arrived too late and did not run"
            )
        if self._offloader is not None and not get_declaration(type(self._roles[role]), method).away:
            self._offloader.require_resident(role)
        return getattr(self._roles[role], method)

    def _assemble_arguments(self, data: bytes, flat: Sequence[Any]) -> dict[str, Any]:
        """Assemble the keyword arguments of a call from its pickled header and flat values."""
        return assemble_arguments(unpack_header(data), flat, self._place.rank, self._place.world, self._fetch)

    def _fetch(self, parameter: str, refs: list[Any]) -> list[Any]:
        """Return the values that references of other workers' results point to.

        Raises:
            DeadlineExceeded: They did not arrive within the step deadline.
        """
        try:
            return ray.get(refs, timeout=self._place.deadline_s)
        except GetTimeoutError:
            name, limit = self._context.get_task_name(), self._place.deadline_s
            raise DeadlineExceeded(
                f"{self!r}: {name}: {len(refs)} chunks of {parameter!r} did not come from the workers that made them within "
                f"{limit:g} s{suggest_longer_deadline(limit)}"
            ) from None

    def _run_guarded(self, name: str, function: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Run a function as the current call (`role.method`): record its span, and convert its errors."""
        start, self._current_call = time.time(), name
        self._call_started_at, self._call_thread_id = start, threading.get_ident()
        result = None
        try:
            fetch_arguments((args, kwargs))
            result = function(*args, **kwargs)
            register_tensor_serializer()
            return result
        except (Exception, SystemExit) as error:  # a `sys.exit` of a user's class must not end the worker
            raise self._to_worker_error(name, error) from None
        finally:
            self._current_call = ""
            self._orphan_guard.record_heartbeat()
            self._spans.add(name, start, time.time(), result)

    def _to_worker_error(self, name: str, error: Exception | SystemExit) -> NonetError:
        """Convert an error of a role method into a NonetError that names this worker."""
        role, method, _ = parse_task_name(name)
        if is_peer_timeout(error):
            limit = self._place.deadline_s
            return DeadlineExceeded(
                f"{self!r}: {method} gave up waiting for other ranks: {error}{suggest_longer_deadline(limit)}"
            )
        if is_lost_connection(error):  # the other rank may have died, or only the connection between both
            return WorkerLost(f"{self!r}: {method} lost the connection to another rank: {error}")
        caller_fault = isinstance(error, ConfigError)
        text = str(error) if caller_fault else f"{self!r}: {method} raised {type(error).__name__}: {error}"
        return WorkerFailed(
            text,
            role=role,
            rank=self._place.rank,
            traceback=traceback.format_exc(),
            caller_fault=caller_fault,
        )


def _mount_all(mounts: Sequence[MountedRun]) -> None:
    """Mount stored runs in this process, and fetch the small files that their local copies lack."""
    for mounted in mounts:
        mount(mounted)


def _make_deterministic(threads: int) -> None:
    """Make torch deterministic: a fixed number of threads, and no kernels whose sums depend on the order of threads."""
    import torch

    torch.set_num_threads(threads)
    # Unlike `use_deterministic_algorithms`, this does not import torch's compiler, which takes more than a second.
    torch.set_deterministic_debug_mode("error")
    # Uninitialised memory is never read, and filling it takes time.
    torch.utils.deterministic.fill_uninitialized_memory = False  # pyright: ignore[reportAttributeAccessIssue]
