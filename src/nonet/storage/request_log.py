"""Counts of the requests of this process to object storages, and the requests that have not returned yet."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from nonet.errors import StorageConflict

_SLOW_S = 3.0  # after which a request is shown as a wait

_lock = threading.Lock()
_counts: dict[str, dict[str, float]] = {}  # by operation
_pending: dict[
    tuple[float, int], str
] = {}  # what each does, by its start in monotonic seconds and its thread


@contextmanager
def log_request(operation: str, text: str) -> Iterator[None]:
    """Count a request with its repetitions while a block runs, as a failure if the block raises.

    Args:
        operation: read, write, list or delete.
        text: What is requested, for `describe_pending_requests`.
    """
    began = time.monotonic()
    key = began, threading.get_ident()
    with _lock:
        _pending[key] = text
    try:
        yield
    except StorageConflict:  # the answer to a condition, and no failure
        raise
    except BaseException:
        _add(operation, failures=1)
        raise
    finally:
        with _lock:
            _pending.pop(key, None)
        _add(operation, requests=1, seconds=time.monotonic() - began)


def count_repetition(operation: str) -> None:
    """Count that a request is repeated."""
    _add(operation, repetitions=1)


def _add(operation: str, **amounts: float) -> None:
    """Add to the counts of an operation."""
    with _lock:
        counts = _counts.setdefault(
            operation, {"requests": 0, "repetitions": 0, "failures": 0, "seconds": 0.0}
        )
        for name, amount in amounts.items():
            counts[name] += amount


def get_request_counts() -> dict[str, dict[str, float]]:
    """Return the requests of this process, by operation (read, write, list, delete).

    Returns:
        `requests`, those that failed in the end as `failures`, the `seconds` that they took together, and `repetitions` of
        conditional writes. obstore does not count its own repetitions of other requests: these show as seconds.
    """
    with _lock:
        return {operation: dict(counts) for operation, counts in _counts.items()}


def describe_pending_requests() -> list[str]:
    """Describe the requests that have not returned for some seconds, one clause per request."""
    now = time.monotonic()
    with _lock:
        pending = [(text, now - began) for (began, _), text in _pending.items()]
    return [
        f"the storage has not answered for {seconds:.0f} s: {text}"
        for text, seconds in pending
        if seconds >= _SLOW_S
    ]
