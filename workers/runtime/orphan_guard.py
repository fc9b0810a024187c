"""How long worker processes live; the orphan guard ends one whose controller is gone.

Detached actors outlive the process that started them. A worker that gets no heartbeat from its controller for `timeout_s`
seconds removes its placement group, which kills all actors in that group, and then ends itself without a restart
(docs/explanation/design.md, section 5).
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class GroupLifetime:
    """How long the processes of a group live.

    Attributes:
        run: The run that they belong to, "" for none.
        orphan_timeout_s: If above 0, the processes are detached and exit when no controller contacts them for that many
            seconds. With 0 they belong to the process that started them.
        restarts: How often a process that died is started again; its roles are built and its remembered calls are
            repeated.
    """

    run: str = ""
    orphan_timeout_s: float = 0.0
    restarts: int = 0

    @property
    def detached(self) -> bool:
        """Whether the processes outlive the one that started them."""
        return self.orphan_timeout_s > 0

    def format_name(self, suffix: str) -> str:
        """Return the name of a worker or placement group: `{run}/...` for detached ones, `{run}: ...` for others."""
        return f"{self.run}{'/' if self.detached else ': '}{suffix}" if self.run else suffix


OWNED = GroupLifetime()
"""The lifetime of processes that belong to the process that started them."""


class OrphanGuard:
    """A thread that ends the process if heartbeats are missing.

    Args:
        timeout_s: Seconds without a heartbeat after which the process ends; 0 disables the guard, for groups that Ray ends
            together with their owner.
    """

    def __init__(self, timeout_s: float):
        self._timeout_s, self._last_heartbeat = timeout_s, time.monotonic()
        if timeout_s > 0:
            threading.Thread(target=self._watch, name="orphan guard", daemon=True).start()

    def record_heartbeat(self) -> None:
        """Record that a heartbeat arrived from the controller."""
        self._last_heartbeat = time.monotonic()

    def _watch(self) -> None:
        """Wait until heartbeats have been missing for too long, then end the process."""
        while time.monotonic() - self._last_heartbeat < self._timeout_s:
            time.sleep(min(1.0, self._timeout_s / 5))
        end_orphan()


def end_orphan() -> None:
    """Remove this actor's placement group, then kill this actor without a restart."""
    import ray
    from ray.util.placement_group import remove_placement_group

    group = ray.util.get_current_placement_group()
    own_actor = ray.get_runtime_context().current_actor
    with contextlib.suppress(Exception):  # Another orphaned worker may have removed it already.
        if group is not None:
            remove_placement_group(group)
    with contextlib.suppress(Exception):
        ray.kill(own_actor, no_restart=True)
    os._exit(0)
