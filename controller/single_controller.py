"""SingleController: the actor that conducts a run. It plans, drives groups and commits; it holds references, never rows.

`run` works; `poll`, `stop` and `rss_bytes` answer meanwhile on threads of their own.
"""

from __future__ import annotations

import resource
import threading
import traceback
from pathlib import Path
from typing import Any

import ray

from nonet.controller.pipeline import Pipeline
from nonet.controller.recorder import Recorder
from nonet.controller.run_folder import RunFolder
from nonet.controller.scenario import Scenario
from nonet.controller.session import Session
from nonet.errors import NonetError

DONE, STOPPED, FAILED = "done", "stopped", "failed"


@ray.remote(num_cpus=0, concurrency_groups={"work": 1, "control": 3})
class SingleController:
    """One run's conductor."""

    def __init__(self, scenario: Scenario, folder: str, run: str, resume: bool):
        self._session = Session(scenario, folder=Path(folder), run=RunFolder(Path(run)), resume=resume)
        self._stop = threading.Event()
        self._recorder: Recorder | None = None

    @ray.method(concurrency_group="work")
    def run(self) -> dict[str, Any]:
        """Run the pipeline: {"state": done | stopped | failed, "error", "traceback", "exit_code"}."""
        Path(self._session.run.path).mkdir(parents=True, exist_ok=True)
        self._recorder = Recorder(self._session.run.path, self._session.run.id)
        try:
            finished = Pipeline(self._session, self._recorder, self._stop.is_set).run()
            return {"state": DONE if finished else STOPPED}
        except NonetError as error:
            return {
                "state": FAILED,
                "error": str(error),
                "traceback": getattr(error, "traceback", ""),
                "exit_code": error.exit_code,
            }
        except Exception as error:
            return {
                "state": FAILED,
                "error": f"{type(error).__name__}: {error}",
                "traceback": traceback.format_exc(),
                "exit_code": 1,
            }
        finally:
            self._recorder.close()

    @ray.method(concurrency_group="control")
    def poll(self, seen: int) -> list[dict[str, Any]]:
        """Events after the first `seen`."""
        return self._recorder.since(seen) if self._recorder else []

    @ray.method(concurrency_group="control")
    def stop(self) -> None:
        """Stop at the next step boundary, after a commit."""
        self._stop.set()

    @ray.method(concurrency_group="control")
    def rss_bytes(self) -> int:
        """Peak resident memory of this actor: it must not grow with the payload."""
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
