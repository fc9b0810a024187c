"""Which ranks of a broken sparse world are gone.

When an exchange breaks, every survivor leaves a mark in the rendezvous store and waits a second for the marks of the
others; ranks without one are named. It is an aid to people, never a decision: without a store, or when the store is
gone with its rank, nobody is named.
"""

from __future__ import annotations

import time

_GRACE_S = 1.0


def gone(rank: int, world: int) -> str:
    """The ranks that left no mark within a second, e.g. "rank 1", or nothing."""
    from torch.distributed.distributed_c10d import _get_default_store

    try:
        store = _get_default_store()
        store.set(f"sparse-world-alive/{rank}", "1")
        marks = {other: f"sparse-world-alive/{other}" for other in range(world) if other != rank}
        until = time.monotonic() + _GRACE_S
        while marks and time.monotonic() < until:
            marks = {other: mark for other, mark in marks.items() if not store.check([mark])}
            time.sleep(0.05)
    except (RuntimeError, ValueError):
        return ""
    return ", ".join(f"rank {other}" for other in sorted(marks))
