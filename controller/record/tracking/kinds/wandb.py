"""Weights & Biases: one run of the same id, which is continued when the run is resumed."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Sequence
from importlib import import_module
from typing import Annotated, Any, Literal

from pydantic import Field

from nonet.controller.record.tracking.kinds.base import MetricPoint, TrackedRun, TrackerKind, TrackerSink
from nonet.options import StrictModel

_CONNECT_PATIENCE_S = (
    20  # how long the library waits for the server; the thread of the sink tries again later
)


class WandbOptions(StrictModel):
    """Keys of `tracking.wandb`. The key of the account is read from WANDB_API_KEY of the controller's environment."""

    project: Annotated[str | None, Field(description="by default the name of the scenario")] = None
    entity: Annotated[str | None, Field(description="the user or team that owns the project")] = None
    mode: Annotated[
        Literal["online", "offline"],
        Field(description="offline: files in RUN/wandb, which `wandb sync` uploads later"),
    ] = "online"


class WandbSink(TrackerSink):
    """The W&B run of a run. Metrics are named STAGE/NAME and drawn by STAGE/step."""

    def __init__(
        self,
        run: TrackedRun,
        project: str | None = None,
        entity: str | None = None,
        mode: Literal["online", "offline"] = "online",
    ):
        wandb: Any = import_module("wandb")
        # Nothing of the machine, the console or the code is recorded: a run's own files have these.
        settings = wandb.Settings(
            silent=True,
            console="off",
            disable_git=True,
            save_code=False,
            x_disable_stats=True,
            x_disable_meta=True,
            init_timeout=_CONNECT_PATIENCE_S,
        )
        self._run: Any = wandb.init(
            project=project or run.name or "nonet",
            entity=entity,
            id=re.sub(r"[^\w\-.]", "-", run.id),
            name=run.id,
            dir=str(run.folder),
            mode=mode,
            resume="allow",
            reinit="create_new",
            config=dict(run.facts),
            settings=settings,
        )
        self._stages: set[str] = set()

    def write(self, points: Sequence[MetricPoint]) -> None:
        """Give points to the library, which has a queue of its own; one record per stage and step."""
        records: dict[tuple[str, int], dict[str, float]] = defaultdict(dict)
        for point in points:
            records[point.stage, point.step][f"{point.stage}/{point.name}"] = point.value
        for (stage, step), values in records.items():
            if stage not in self._stages:
                self._stages.add(stage)
                self._run.define_metric(f"{stage}/step", hidden=True)
                self._run.define_metric(f"{stage}/*", step_metric=f"{stage}/step")
            self._run.log({**values, f"{stage}/step": step})

    def close(self, state: str) -> None:
        """End the W&B run."""
        self._run.finish(exit_code=int(state == "failed"))


SPEC = TrackerKind(WandbSink, WandbOptions, needs="wandb")
