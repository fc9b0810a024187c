"""Follower: publishes a run's newest commit once it is whole."""

from __future__ import annotations

import threading
from typing import Any

from nonet.deploy.serving.features import OpenRun
from nonet.errors import CheckpointError, ConfigError, StaleVersion

_LOOK_S = 0.1


class Follower:
    """Of a run. `look` looks once; `start` looks in a thread from now on."""

    def __init__(self, run: OpenRun):
        self._run = run
        self._seen: Any = None
        self.problem: str | None = None

    def look(self) -> None:
        """Publish what is new; what cannot be published is in `problem`."""
        try:
            newest = max(self._run.folder.checkpoints.glob("step-*/manifest.json"), default=None)
            seen = newest and (newest, newest.stat().st_mtime_ns)
            if seen is None or seen == self._seen:
                return
            try:
                self._run.publish_newest()
            except (
                StaleVersion
            ) as error:  # made from a version that was rolled back: it is not looked at again
                self._seen, self.problem = seen, _line(error)
                return
            self._seen, self.problem = seen, None
        except (ConfigError, CheckpointError, OSError) as error:
            self.problem = _line(error)

    def start(self) -> None:
        """Look until the process ends."""
        stopped = threading.Event()

        def watch() -> None:
            while not stopped.wait(_LOOK_S):
                self.look()

        threading.Thread(target=watch, name="commits", daemon=True).start()


def _line(error: Exception) -> str:
    return " ".join(str(error).split())
