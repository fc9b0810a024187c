"""OrphanGuard: ends an orphaned worker. Detached actors outlive whoever made them; without it they would stay for ever.

A host that hears nothing from its controller for `timeout_s` removes the placement group it stands in, which ends all
actors in it, and then itself, without a restart (docs/explanation/design.md, section 8).
"""

from __future__ import annotations

import contextlib
import os
import threading
import time


class OrphanGuard:
    """Counts the silence. `timeout_s` 0: waits for ever, as a group whose owner Ray itself watches does."""

    def __init__(self, timeout_s: float):
        self._timeout_s, self._last = timeout_s, time.monotonic()
        if timeout_s > 0:
            threading.Thread(target=self._watch, name="orphan guard", daemon=True).start()

    def record_heartbeat(self) -> None:
        """The controller lives."""
        self._last = time.monotonic()

    def _watch(self) -> None:
        while time.monotonic() - self._last < self._timeout_s:
            time.sleep(min(1.0, self._timeout_s / 5))
        end_orphan()


def end_orphan() -> None:
    """Remove this actor's placement group, then end this actor; Ray starts it no more."""
    import ray
    from ray.util.placement_group import remove_placement_group

    group = ray.util.get_current_placement_group()
    me = ray.get_runtime_context().current_actor
    with contextlib.suppress(Exception):  # another orphan of the group was first
        if group is not None:
            remove_placement_group(group)
    with contextlib.suppress(Exception):
        ray.kill(me, no_restart=True)
    os._exit(0)
