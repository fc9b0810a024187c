"""Spans of the calls of a worker, kept until the controller collects them, and the same as Ray metrics.

An event costs a few microseconds (`nonet bench dispatch` prints it). The newest 100,000 are kept.
"""

from __future__ import annotations

from collections import deque
from typing import Any

MOST = 100_000


class SpanRecorder:
    """A recorder of spans (role.method, start, end, bytes out) in unix seconds."""

    def __init__(self, role: str):
        self._kept: deque[tuple[str, float, float, int]] = deque(maxlen=MOST)
        self._metrics: tuple[Any, Any] | None = None
        self._role = role

    def add(
        self, name: str, start: float, end: float, result: Any = None, *, size: int | None = None
    ) -> None:
        """Record one call.

        Args:
            name: `role.method`.
            start: Unix seconds.
            end: Unix seconds.
            result: The result of the call, whose bytes are counted.
            size: Bytes that were moved, instead of those of a result.
        """
        size = count_bytes(result) if size is None else size
        self._kept.append((name, start, end, size))
        busy, out = self._metrics or self._create_metrics()
        tags = {"method": name}
        busy.inc(max(end - start, 1e-9), tags)
        if size:
            out.inc(size, tags)

    def take(self) -> list[tuple[str, float, float, int]]:
        """Return the spans since the last call."""
        spans, self._kept = self._kept, deque(maxlen=MOST)
        return list(spans)

    def _create_metrics(self) -> tuple[Any, Any]:
        """Create the Ray metrics."""
        from ray.util.metrics import Counter

        self._metrics = (
            Counter("nonet_busy_seconds", "Seconds in role methods", tag_keys=("method",)),
            Counter("nonet_bytes_out", "Bytes given back by role methods", tag_keys=("method",)),
        )
        return self._metrics


def count_bytes(value: Any, depth: int = 4) -> int:
    """Count the bytes of the arrays, tensors, tables and byte strings in a value; other objects count as 0."""
    size = getattr(value, "nbytes", None)
    if size is not None:
        return int(size)
    if isinstance(value, bytes | bytearray | memoryview):
        return len(value)
    if depth and isinstance(value, dict):
        return sum(count_bytes(part, depth - 1) for part in value.values())
    if depth and isinstance(value, list | tuple):
        return sum(count_bytes(part, depth - 1) for part in value) if len(value) <= 64 else 0
    if depth and hasattr(value, "offsets") and hasattr(value, "values"):
        return count_bytes(value.values) + count_bytes(value.offsets)
    return 0
