"""The stores through which the ranks of a process group meet.

One rank's process holds the keys of a store, and the others reach them by calls of its Ray actor: there is no port without
a token. Outside Ray, where ranks are processes of one machine, the keys are in a file.
"""

from __future__ import annotations

import datetime
import secrets
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# The operations of a store that other ranks may ask for.
_OPERATIONS = frozenset(
    {"set", "add", "append", "compare_set", "check", "multi_get", "multi_set", "delete_key", "num_keys"}
)


@dataclass(frozen=True, slots=True)
class StoreAddress:
    """The place of the keys through which ranks meet.

    Attributes:
        name: Name of the store in the process that holds it; without an actor, the path of a file that all ranks reach.
        actor: Ray's actor of the process that holds it.
    """

    name: str
    actor: Any = None


_connected_store: Any = None  # The store of this process's group: torch's C++ keeps no Python object alive.
# The stores whose keys this process holds, by name; None for one that is not created yet.
_hosted_stores: dict[str, Any] = {}


def reserve_store() -> str:
    """Return the name of a store that this process creates later, in `join_role_process_group`."""
    name = secrets.token_hex(8)
    _hosted_stores[name] = None
    return name


def open_store() -> StoreAddress:
    """Open a store of which this process holds the keys, until `close_store`."""
    actor = get_own_actor()
    if actor is None:
        return StoreAddress(str(Path(tempfile.mkdtemp(prefix="nonet-store-")) / "keys"))
    address = StoreAddress(secrets.token_hex(8), actor)
    host_store(address.name)
    return address


def close_store(address: StoreAddress) -> None:
    """Forget the keys of a store that `open_store` opened in this process."""
    if address.actor is None:
        shutil.rmtree(Path(address.name).parent, ignore_errors=True)
    _hosted_stores.pop(address.name, None)


def access_store(name: str, operation: str, *arguments: Any) -> Any:
    """Apply an operation to a store that this process holds, without waiting, for the `ActorStore` of another rank.

    Returns:
        Its result; None while a key that is read does not exist, and for each operation before the store is created.

    Raises:
        LookupError: This process does not hold the store.
    """
    if operation not in _OPERATIONS:
        raise LookupError(f"a store has no operation {operation!r}; it has {', '.join(sorted(_OPERATIONS))}")
    if name not in _hosted_stores:
        raise LookupError(f"this process does not hold the store {name}")
    store = _hosted_stores[name]
    if store is None or (operation == "multi_get" and not store.check(*arguments)):
        return None
    return getattr(store, operation)(*arguments)


def host_store(name: str) -> Any:
    """Create the store of a name in this process."""
    import torch.distributed as dist

    _hosted_stores[name] = dist.HashStore()
    return _hosted_stores[name]


def connect_store(address: StoreAddress, world: int, timeout: datetime.timedelta) -> Any:
    """Return the store at an address, whose calls wait as long as `timeout`. It is kept until the next is connected."""
    global _connected_store
    import torch.distributed as dist

    if (store := _hosted_stores.get(address.name)) is not None:
        store.set_timeout(timeout)
    elif address.actor is None:
        store = dist.FileStore(address.name, world)
        store.set_timeout(timeout)
    else:
        from nonet.workers.runtime.rendezvous.actor_store import ActorStore

        store = ActorStore(address.name, address.actor, timeout)
    _connected_store = store
    return store


def get_own_actor() -> Any:
    """Return the handle of the Ray actor of this process, None outside an actor."""
    import ray

    if not ray.is_initialized() or ray.get_runtime_context().get_actor_id() is None:
        return None
    return ray.get_runtime_context().current_actor
