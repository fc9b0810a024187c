"""WorkerGroup: the ranks of one role, called as one object.

    group = WorkerGroup(Score, workers=4)
    group.double([1, 2, 3, 4, 5]).get(timeout_s=30)

A call is submitted as one Ray call for each rank. Small chunks are sent inline; a replicated argument over 100 KB is
put once for all ranks. A future of another group is passed on unfetched: groups of equal size pass results from rank
to rank, and for unequal sizes the receivers fetch their shares.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from nonet.deadlines import DEFAULTS, Deadline
from nonet.errors import ConfigError
from nonet.workers.runtime.actors import ActorGroup, WorkerResources
from nonet.workers.runtime.dispatch import CallMessage, Header, is_plain, spread_argument
from nonet.workers.runtime.future import GroupFuture, GroupStream
from nonet.workers.runtime.methods import (
    MethodDeclaration,
    get_declaration,
    get_signature,
    list_positional_parameters,
)
from nonet.workers.runtime.orphan_guard import GroupLifetime
from nonet.workers.runtime.payload import register_tensor_serializer
from nonet.workers.runtime.worker import DistributeWorker, RoleSpec


class WorkerGroup:
    """The ranks of one role. Group methods of the class appear as methods here and return a `GroupFuture`.

    Every call also takes `timeout_s`, its deadline from submission. Calls of methods declared idempotent take
    `retries`: how often the call is repeated on a rank that was lost and restarted, in a group with `restarts`.

    Args:
        cls: The class of the role.
        *args: Positional arguments of its constructor.
        workers: Number of ranks.
        role: Name of the role; by default the class name in lower case.
        device: Kind of the device.
        cpus: CPUs of each rank.
        devices: Devices of each rank; by default one, none on a cpu.
        threads: Torch threads of each rank.
        restarts: How often a rank that died is restarted.
        env: The `env:` options of a pool.
        deadline_s: Seconds that a rank waits for a value of another rank; twice as long in a collective of the group.
        **kwargs: Keyword arguments of the constructor.
    """

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
        restarts: int = 0,
        env: Mapping[str, Any] | None = None,
        deadline_s: float = DEFAULTS.step,
        **kwargs: Any,
    ):
        if not (isinstance(cls, type) and issubclass(cls, DistributeWorker)):
            raise ConfigError(f"WorkerGroup needs a subclass of nonet.DistributeWorker, got {cls!r}")
        role = role or cls.__name__.lower()
        default_devices = 0.0 if device == "cpu" else 1.0
        hosts = ActorGroup(
            {role: RoleSpec(cls, args, kwargs)},
            workers=workers,
            seat=WorkerResources(
                device=device,
                cpus=cpus,
                devices=default_devices if devices is None else devices,
                threads=threads,
                env=env,
            ),
            life=GroupLifetime(restarts=restarts),
            deadlines=DEFAULTS.model_copy(update={"step": Deadline(deadline_s, "the group's deadline_s")}),
        )
        self._bind(hosts, role)

    @classmethod
    def from_actors(cls, hosts: ActorGroup, role: str, ranks_per_share: int = 1) -> WorkerGroup:
        """Return a group that calls one of the roles of existing actors.

        Args:
            hosts: The actors.
            role: The role.
            ranks_per_share: Number of neighbouring ranks that compute the same rows: they get the same share of a sharded
                argument, and what they return is collected once.
        """
        group = cls.__new__(cls)
        group._bind(hosts, role, ranks_per_share)
        return group

    def _bind(self, hosts: ActorGroup, role: str, ranks_per_share: int = 1) -> None:
        """Set the actors that are called, and the role that is called on them."""
        self.hosts, self.role, self.world = hosts, role, hosts.world
        self._ranks_per_share = ranks_per_share
        self._cls = hosts.specs[role].cls

    def __getattr__(self, name: str) -> Callable[..., Any]:
        """Return the group method of that name."""
        if name.startswith("_"):
            raise AttributeError(name)
        declaration = get_declaration(self._cls, name)

        def call(*args: Any, timeout_s: float | None = None, retries: int = 0, **kwargs: Any) -> Any:
            return self._call(name, declaration, args, kwargs, timeout_s, retries)

        self.__dict__[name] = call  # Later accesses do not reach `__getattr__`.
        return call

    def has_method(self, name: str) -> bool:
        """Return whether the class has a group method of that name."""
        return hasattr(getattr(self._cls, name, None), "__nonet_method__")

    def stop(self) -> None:
        """Stop the processes of the group."""
        self.hosts.stop()

    def _call(
        self,
        name: str,
        declaration: MethodDeclaration,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        timeout_s: float | None,
        retries: int,
    ) -> Any:
        """Send a call to all ranks. Returns a future, or a stream for methods that yield."""
        if retries and not declaration.idempotent:
            raise ConfigError(
                f"{self.role}.{name}: retries={retries} is only allowed for methods declared with @nonet.method(idempotent=True)"
            )
        register_tensor_serializer()
        if not self.hosts.actors:
            raise ConfigError(f"{self.role}.{name}: the group was stopped; make a new WorkerGroup")
        if self.hosts.hurt:
            self.hosts.heal()
        header, flats = self._prepare_call(name, declaration, args, kwargs)
        message = CallMessage(self.role, name, self.hosts.epoch, header, flats, declaration.beside)
        if declaration.remember:
            self.hosts.remember(message)
        if declaration.collect == "stream":
            streams = [self.hosts.open_stream(message, rank) for rank in range(self.world)]
            return GroupStream(streams, self.role, name, timeout_s)
        refs = [self.hosts.send(message, rank) for rank in range(self.world)]
        return GroupFuture(
            refs,
            self.hosts,
            self.role,
            name,
            declaration.collect,
            timeout_s,
            retries,
            message,
            ranks_per_share=self._ranks_per_share,
        )

    def call_rank(
        self, rank: int, name: str, *args: Any, timeout_s: float | None = None, **kwargs: Any
    ) -> GroupFuture:
        """Call a method on one rank alone.

        Args:
            rank: The rank.
            name: Name of the method.
            *args: Positional arguments.
            timeout_s: Deadline from submission.
            **kwargs: Keyword arguments.

        Returns:
            A future of one result, which can be passed to another group like that of a whole group.
        """
        declaration = get_declaration(self._cls, name)
        register_tensor_serializer()
        header, flats = self._prepare_call(name, declaration, args, kwargs)
        message = CallMessage(self.role, name, self.hosts.epoch, header, flats, declaration.beside)
        ref, actor = self.hosts.send(message, rank), self.hosts.actors[rank]
        return GroupFuture([ref], self.hosts, self.role, name, declaration.collect, timeout_s, actors=[actor])

    def _prepare_call(
        self, name: str, declaration: MethodDeclaration, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Header | None, Sequence[Sequence[Any]]]:
        """Divide the arguments of a call among the ranks (`nonet.workers.runtime.dispatch`).

        Returns:
            The header, None if the flat values are the positional arguments in order; and the flat values of each rank.
        """
        if not args and not kwargs and declaration.collect != "stream":
            return None, [()] * self.world
        function = getattr(self._cls, name)
        try:
            bound = get_signature(function).bind(*args, **kwargs)
        except TypeError as error:
            raise ConfigError(f"{self.role}.{name}: {error}") from None
        call_name, markers = f"{self.role}.{name}", declaration.markers
        spreads = [
            spread_argument(
                call_name, parameter, value, markers.get(parameter), self.world, self._ranks_per_share
            )
            for parameter, value in bound.arguments.items()
        ]
        header = tuple(argument for argument, _ in spreads)
        flats = (
            spreads[0][1]
            if len(spreads) == 1
            else [
                [value for _, values_by_rank in spreads for value in values_by_rank[rank]]
                for rank in range(self.world)
            ]
        )
        needs_header = declaration.collect == "stream" or not is_plain(
            header, list_positional_parameters(function)
        )
        return (header if needs_header else None), flats
