"""Spans of the calls of a worker, stored until the controller collects them and also counted in Ray metrics.

Recording a span takes a few microseconds (`nonet bench dispatch` measures it). Only the newest 100,000 spans are stored.
"""

from __future__ import annotations

from collections import deque
from typing import Any

MAX_SPANS = 100_000
_MAX_COUNTED_VALUES = 64  # Values of a list or tuple that are measured one by one.


class SpanRecorder:
    """Records spans (role.method, start, end, bytes of the result), with times in unix seconds."""

    def __init__(self):
        self._spans: deque[tuple[str, float, float, int]] = deque(maxlen=MAX_SPANS)
        self._metrics: tuple[Any, Any] | None = None

    def add(
        self, name: str, start: float, end: float, result: Any = None, *, size: int | None = None
    ) -> None:
        """Record one call.

        Args:
            name: `role.method`.
            start: Start of the call in unix seconds.
            end: End of the call in unix seconds.
            result: The result of the call, whose bytes are counted.
            size: Number of bytes of the result, if it is known without `result`.
        """
        size = count_bytes(result) if size is None else size
        self._spans.append((name, start, end, size))
        busy_seconds, bytes_out = self._metrics or self._create_metrics()
        tags = {"method": name}
        busy_seconds.inc(max(end - start, 1e-9), tags)  # A Ray counter rejects 0.
        if size:
            bytes_out.inc(size, tags)

    def take(self) -> list[tuple[str, float, float, int]]:
        """Return the spans that were recorded since the last call of this method."""
        spans, self._spans = self._spans, deque(maxlen=MAX_SPANS)
        return list(spans)

    def _create_metrics(self) -> tuple[Any, Any]:
        """Create and return the Ray counters of busy seconds and of bytes out."""
        from ray.util.metrics import Counter

        self._metrics = (
            Counter("nonet_busy_seconds", "Seconds in role methods", tag_keys=("method",)),
            Counter("nonet_bytes_out", "Bytes given back by role methods", tag_keys=("method",)),
        )
        return self._metrics


def count_bytes(value: Any, depth: int = 4) -> int:
    """Count the bytes of the arrays, tensors, tables and byte strings in a value; other objects count as 0.

    Lists and tuples of more than 64 values, and values nested deeper than `depth`, also count as 0, so that counting is fast.
    """
    size = getattr(value, "nbytes", None)
    if size is not None:
        return int(size)
    if isinstance(value, bytes | bytearray | memoryview):
        return len(value)
    if depth and isinstance(value, dict):
        return sum(count_bytes(part, depth - 1) for part in value.values())
    if depth and isinstance(value, list | tuple):
        is_short = len(value) <= _MAX_COUNTED_VALUES
        return sum(count_bytes(part, depth - 1) for part in value) if is_short else 0
    if depth and hasattr(value, "offsets") and hasattr(value, "values"):
        return count_bytes(value.values) + count_bytes(value.offsets)
    return 0
