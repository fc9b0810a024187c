"""Follower: publishes a run's newest commit once it is whole, and newer versions of its catalogue."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from nonet.deploy.serving.features import OpenRun
from nonet.errors import CheckpointError, ConfigError, StaleVersion
from nonet.models.generation import Corpus

_LOOK_S = 0.1


class Follower:
    """Of a run. `look` looks once; `start` looks in a thread from now on. renew: told of every later version of the catalogue."""

    def __init__(self, run: OpenRun, renew: Callable[[Corpus], None] | None = None):
        self._run, self._renew = run, renew
        self._catalogue = run.catalogues.newest()
        self._seen: Any = None
        self.problem: str | None = None

    def look(self) -> None:
        """Publish what is new; what cannot be published is in `problem`."""
        try:
            newest = max(self._run.folder.checkpoints.glob("step-*/manifest.json"), default=None)
            catalogue = self._run.catalogues.newest()
            if catalogue is not self._catalogue and self._renew is not None:
                self._renew(catalogue)
            self._catalogue = catalogue
            seen = newest and (newest, newest.stat().st_mtime_ns, catalogue.trie.version)
            if seen is None or seen == self._seen:
                return
            self._run.publish_catalogue()
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
