"""OrphanGuard: ends a worker whose controller is gone, because detached actors outlive the process that started them.

A worker that gets no heartbeat from its controller for `timeout_s` seconds removes its placement group, which kills all
actors in that group, and then ends itself without a restart (docs/explanation/design.md, section 5).
"""

from __future__ import annotations

import contextlib
import os
import threading
import time


class OrphanGuard:
    """A thread that ends the process if heartbeats are missing.

    Args:
        timeout_s: Seconds without a heartbeat after which the process ends; 0 disables the guard, for groups that Ray ends
            together with their owner.
    """

    def __init__(self, timeout_s: float):
        self._timeout_s, self._last = timeout_s, time.monotonic()
        if timeout_s > 0:
            threading.Thread(target=self._watch, name="orphan guard", daemon=True).start()

    def record_heartbeat(self) -> None:
        """Record that a heartbeat arrived from the controller."""
        self._last = time.monotonic()

    def _watch(self) -> None:
        """Wait until heartbeats have been missing for too long, then end the process."""
        while time.monotonic() - self._last < self._timeout_s:
            time.sleep(min(1.0, self._timeout_s / 5))
        end_orphan()


def end_orphan() -> None:
    """Remove this actor's placement group, then kill this actor without a restart."""
    import ray
    from ray.util.placement_group import remove_placement_group

    group = ray.util.get_current_placement_group()
    me = ray.get_runtime_context().current_actor
    with contextlib.suppress(Exception):  # another orphaned worker may have removed it already
        if group is not None:
            remove_placement_group(group)
    with contextlib.suppress(Exception):
        ray.kill(me, no_restart=True)
    os._exit(0)
