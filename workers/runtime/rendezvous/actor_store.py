"""ActorStore: the keys of a rendezvous in the process of another rank, read and written by calls of its Ray actor.

torch's own TCPStore listens on all interfaces and answers everyone. Ray authenticates its calls with the cluster's token
and needs no other port. The actor answers on its control threads, so that it can be in a collective itself.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayError
from torch.distributed import DistNetworkError, DistStoreError, Store

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = (
    0.002,
    0.05,
)  # Pauses between two questions for a key that is not there yet.


class ActorStore(Store):
    """A store of torch.distributed whose keys another rank's process holds.

    Backends call it from C++, also in threads that Python did not start. A call that waits for keys asks again after a pause,
    so that it blocks no thread of the actor.

    Args:
        name: Name of the store in the process that holds it.
        actor: The Ray actor of that process, a `WorkerActor`.
        timeout: How long a call waits.
    """

    def __init__(self, name: str, actor: Any, timeout: timedelta):
        super().__init__()
        self._name, self._actor = name, actor
        self.set_timeout(timeout)

    def set(self, key: str, value: str | bytes) -> None:
        """Set the value of a key."""
        self._ask("set", key, value)

    def get(self, key: str) -> bytes:
        """Wait for a key, and return its value."""
        return self.multi_get([key])[0]

    def add(self, key: str, amount: int) -> int:
        """Add an amount to the number of a key, which begins at 0, and return the sum."""
        return self._ask("add", key, amount)

    def append(self, key: str, value: str | bytes) -> None:
        """Append to the value of a key."""
        self._ask("append", key, value)

    def compare_set(self, key: str, expected: str | bytes, desired: str | bytes) -> bytes:
        """Set a key if its value is the expected one. Returns the value after that."""
        return self._ask("compare_set", key, expected, desired)

    def check(self, keys: Sequence[str]) -> bool:
        """Return whether all keys exist, without waiting for them."""
        return self._ask("check", list(keys))

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Wait until all keys exist.

        Raises:
            DistStoreError: The time-out has passed.
        """
        self._ask_until("check", list(keys), timeout.total_seconds() if timeout else self._timeout_s)

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        """Wait for several keys, and return their values."""
        return self._ask_until("multi_get", list(keys), self._timeout_s)

    def multi_set(self, keys: Sequence[str], values: Sequence[str | bytes]) -> None:
        """Set the values of several keys."""
        self._ask("multi_set", list(keys), list(values))

    def delete_key(self, key: str) -> bool:
        """Delete a key. Returns whether it existed."""
        return self._ask("delete_key", key)

    def num_keys(self) -> int:
        """Return the number of keys."""
        return self._ask("num_keys")

    def has_extended_api(self) -> bool:
        """Return True: the store has `append`, `multi_get` and `multi_set`."""
        return True

    def clone(self) -> ActorStore:
        """Return a store with the same keys, as calls from several threads do not disturb each other."""
        return self

    # The names by which torch's C++ calls these two.
    deleteKey, getNumKeys = delete_key, num_keys

    @property
    def _timeout_s(self) -> float:
        """The time-out in seconds, which torch may have changed by `set_timeout`."""
        return self.timeout.total_seconds()  # pyright: ignore[reportAttributeAccessIssue]

    def _ask_until(self, operation: str, keys: list[str], timeout_s: float) -> Any:
        """Repeat an operation on keys until its result is neither None nor False."""
        deadline, pause_s = time.monotonic() + timeout_s, _FIRST_PAUSE_S
        while not (result := self._ask(operation, keys)):
            if time.monotonic() > deadline:
                raise DistStoreError(f"wait timeout after {timeout_s:g} s for the keys {', '.join(keys[:8])}")
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
        return result

    def _ask(self, operation: str, *arguments: Any) -> Any:
        """Let the actor apply an operation to the store.

        Raises:
            DistStoreError: The actor does not answer within the time-out.
            DistNetworkError: The actor's process ended, or holds this store no longer.
        """
        timeout_s = self._timeout_s
        try:
            return ray.get(
                self._actor.access_store.remote(self._name, operation, *arguments), timeout=timeout_s
            )
        except GetTimeoutError:
            raise DistStoreError(
                f"wait timeout after {timeout_s:g} s for the rank that holds the store"
            ) from None
        except RayError as error:
            raise DistNetworkError(f"connection closed by the rank that holds the store: {error}") from None
