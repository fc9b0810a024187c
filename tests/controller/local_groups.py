"""Groups of one rank in this process: a role's methods called directly, answers as futures that are there."""

from __future__ import annotations

from typing import Any

from nonet.workers.runtime.methods import PerRank, Replicate, Shard, get_declaration


class Done:
    """A future that has its value."""

    def __init__(self, value: Any):
        self.value = value

    def get(self, timeout_s: float | None = None) -> Any:
        return self.value

    def settle(self, timeout_s: float | None = None) -> Done:
        return self

    def request_row_counts(self) -> list[Any]:
        return []

    def get_row_counts(self) -> list[int]:
        first = self.value[0] if isinstance(self.value, list) and self.value else self.value
        return [len(first)] if hasattr(first, "__len__") else []

    def set_deadline(self, timeout_s: float) -> Done:
        return self


class LocalGroup:
    """One role as a group of one; `asked` notes (method, keyword arguments) of every call."""

    world = 1

    def __init__(self, role: Any):
        self.role, self.asked = role, []

    def __getattr__(self, method: str) -> Any:
        def call(*args: Any, retries: int = 0, timeout_s: float | None = None, **kwargs: Any) -> Done:
            self.asked.append((method, args))
            value = getattr(self.role, method)(*map(_plain, args), **kwargs)
            return Done([value] if get_declaration(type(self.role), method).collect == "list" else value)

        return call


def _plain(value: Any) -> Any:
    if isinstance(value, Shard | Replicate | PerRank):
        value = value.value
    return value.value if isinstance(value, Done) else value
