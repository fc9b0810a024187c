"""GroupStream: values of every rank as they are made, of a method declared `collect="stream"` that yields.

Iteration gives (rank, value) in the order of arrival, and holds one value at a time.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import ray
from ray.exceptions import RayActorError, RayTaskError

from nonet.deadlines import BARE, way_out
from nonet.errors import DeadlineExceeded
from nonet.workers.future import translated


class GroupStream:
    """Results of `role.method` while the ranks still work. `timeout_s`: until the last value, from submission;
    by default a day."""

    def __init__(self, streams: list[Any], role: str, method: str, timeout_s: float | None):
        self.role, self.method = role, method
        self._ranks = {stream: rank for rank, stream in enumerate(streams)}
        self._timeout_s = BARE if timeout_s is None else timeout_s
        self._deadline = time.monotonic() + self._timeout_s

    def __iter__(self) -> Iterator[tuple[int, Any]]:
        pending = list(self._ranks)
        while pending:
            left = max(0.0, self._deadline - time.monotonic())
            ready, _ = ray.wait(pending, num_returns=1, timeout=left)
            if not ready:
                late = ", ".join(str(self._ranks[stream]) for stream in pending)
                raise DeadlineExceeded(
                    f"{self.role}.{self.method}: the stream of rank {late} did not end within {self._timeout_s:g} s"
                    f"{way_out(self._timeout_s)}"
                )
            stream = ready[0]
            try:
                yield self._ranks[stream], ray.get(next(stream))  # pyright: ignore[reportArgumentType]
            except StopIteration:
                pending.remove(stream)
            except (RayActorError, RayTaskError) as error:
                raise translated(error, self.role, self._ranks[stream], self.method) from None

    def get(self) -> list[list[Any]]:
        """All values, a list a rank, each in the order it was made."""
        values: list[list[Any]] = [[] for _ in self._ranks]
        for rank, value in self:
            values[rank].append(value)
        return values
