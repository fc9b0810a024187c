"""The follower publishes checkpoints that a run's stages select, and newer versions of its catalogue."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from nonet.controller.record import Checkpoints
from nonet.deploy.opened import OpenedRun
from nonet.errors import NonetError, StaleVersion
from nonet.models.generation import Corpus

_POLL_S = 0.1  # between two checks of the run


class RunFollower:
    """Checks a run once (`check_once`) or periodically in a thread (`start`).

    Args:
        run: The run whose checkpoints and catalogues are published.
        renew: Called with every later version of the catalogue.
        mid_stage: Whether checkpoints from the middle of a stage are published too.

    Attributes:
        problem: Why the newest checkpoint cannot be published; None if it can.
    """

    def __init__(
        self, run: OpenedRun, renew: Callable[[Corpus], None] | None = None, *, mid_stage: bool = False
    ):
        self._run, self._renew, self._mid_stage = run, renew, mid_stage
        self._stopped = threading.Event()
        self._catalogue = run.catalogues.get_newest()
        self._checked_state: Any = None  # of the run at the last check that was completed
        self.problem: str | None = None

    def check_once(self) -> None:
        """Publish new checkpoints and catalogues; failures are recorded in `problem`."""
        try:
            newest = Checkpoints(self._run.folder.checkpoints).find_newest_unchecked()
            catalogue = self._run.catalogues.get_newest()
            if catalogue is not self._catalogue and self._renew is not None:
                self._renew(catalogue)
            self._catalogue = catalogue
            state = newest and self._read_state(newest, catalogue)
            if state is None or state == self._checked_state:
                return
            self._run.publish_catalogue()
            if not self._mid_stage and self._run.has_version and not self._run.has_ended_stage:
                # Until a stage ends, the version that the user has chosen is served.
                self._checked_state, self.problem = state, None
                return
            try:
                self._run.publish_newest(mid_stage=self._mid_stage)
            except StaleVersion as error:  # based on a version that was rolled back; it is not tried again
                self._checked_state, self.problem = state, _format_error(error)
                return
            self._checked_state, self.problem = state, None
        except (NonetError, OSError) as error:
            self.problem = _format_error(error)

    def _read_state(self, checkpoint: Path, catalogue: Corpus) -> tuple[Any, ...]:
        """Return what a check depends on; versions that a person promotes may have an older catalogue."""
        written_ns = (checkpoint / "manifest.json").stat().st_mtime_ns
        return checkpoint, written_ns, catalogue.trie.version, self._run.registry.announced.versions

    def start(self) -> None:
        """Start a thread that checks periodically until `stop` or the end of the process."""

        def check_until_stopped() -> None:
            while not self._stopped.wait(_POLL_S):
                self.check_once()

        threading.Thread(target=check_until_stopped, name="checkpoints", daemon=True).start()

    def stop(self) -> None:
        """Stop checking."""
        self._stopped.set()


def _format_error(error: Exception) -> str:
    """Return the text of an error on one line."""
    return " ".join(str(error).split())
