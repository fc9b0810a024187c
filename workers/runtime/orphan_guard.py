"""OrphanGuard: ends an orphaned worker, since detached actors outlive the process that started them.

A host that hears nothing from its controller for `timeout_s` removes the placement group that it is in, which kills
all actors in it, and then itself, without a restart (docs/explanation/design.md, section 8).
"""

from __future__ import annotations

import contextlib
import os
import threading
import time


class OrphanGuard:
    """A watch for missing heartbeats.

    Args:
        timeout_s: Seconds without a heartbeat after which the process ends; 0 disables the watch, for groups whose
            owner Ray watches.
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
    with contextlib.suppress(Exception):  # another orphan may have removed it already
        if group is not None:
            remove_placement_group(group)
    with contextlib.suppress(Exception):
        ray.kill(me, no_restart=True)
    os._exit(0)
