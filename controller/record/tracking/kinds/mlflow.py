"""MLflow: one MLflow run per run, which is found again by the tag `nonet.run` when the run is resumed."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from importlib import import_module
from typing import Annotated, Any

from pydantic import AfterValidator, Field

from nonet.controller.record.tracking.kinds.base import MetricPoint, TrackedRun, TrackerKind, TrackerSink
from nonet.options import StrictModel

_TAG = "nonet.run"
_STATUS = {"done": "FINISHED", "stopped": "KILLED", "failed": "FAILED"}  # by the state of the run
_MAX_METRICS = 1000  # of one request
_MAX_PARAMS = 100  # of one request
_MAX_PARAM_LENGTH = 500
# A request is tried again later by the thread of the sink, so MLflow itself should return soon.
_REQUEST_LIMITS = {"MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1", "MLFLOW_HTTP_REQUEST_TIMEOUT": "20"}


def _check_address(address: str | None) -> str | None:
    """Check that an address has a scheme; MLflow would take any other text for a folder."""
    if address is not None and address != "databricks" and not re.match(r"[a-z][a-z+]*:.", address):
        raise ValueError(
            f"wanted the address of a tracking server, such as http://HOST:5000, or of a store, such as "
            f"sqlite:////shared/mlflow.db, got {address!r}"
        )
    return address


class MlflowOptions(StrictModel):
    """Keys of `tracking.mlflow`."""

    address: Annotated[
        str | None,
        AfterValidator(_check_address),
        Field(
            description="the tracking server or store, such as http://HOST:5000 or sqlite:////shared/mlflow.db; by default "
            "MLFLOW_TRACKING_URI of the controller's environment"
        ),
    ] = None
    experiment: Annotated[str | None, Field(description="by default the name of the scenario")] = None


class MlflowSink(TrackerSink):
    """The MLflow run of a run. Metrics are named STAGE/NAME; the scenario's keys are its parameters."""

    def __init__(self, run: TrackedRun, address: str | None = None, experiment: str | None = None):
        for variable, value in _REQUEST_LIMITS.items():
            os.environ.setdefault(variable, value)
        self._entities: Any = import_module("mlflow.entities")
        self._client: Any = import_module("mlflow.tracking").MlflowClient(address)
        title = experiment or run.name or "nonet"
        found = self._client.get_experiment_by_name(title)
        experiment_id = found.experiment_id if found else self._client.create_experiment(title)
        earlier = self._client.search_runs([experiment_id], f"tags.`{_TAG}` = '{run.id}'", max_results=1)
        if earlier:
            self._run_id = earlier[0].info.run_id
            self._client.update_run(self._run_id, status="RUNNING")
            return
        tags = {_TAG: run.id, "nonet.folder": str(run.folder)}
        self._run_id = self._client.create_run(experiment_id, tags=tags, run_name=run.id).info.run_id
        params = [
            self._entities.Param(_clean_name(key), str(value)[:_MAX_PARAM_LENGTH])
            for key, value in run.facts.items()
        ]
        for start in range(0, len(params), _MAX_PARAMS):
            self._client.log_batch(self._run_id, params=params[start : start + _MAX_PARAMS])

    def write(self, points: Sequence[MetricPoint]) -> None:
        """Send points; a store ignores those that it has already."""
        metrics = [
            self._entities.Metric(
                _clean_name(f"{point.stage}/{point.name}"), point.value, round(point.time * 1000), point.step
            )
            for point in points
        ]
        for start in range(0, len(metrics), _MAX_METRICS):
            self._client.log_batch(self._run_id, metrics=metrics[start : start + _MAX_METRICS])

    def close(self, state: str) -> None:
        """End the MLflow run."""
        self._client.set_terminated(self._run_id, _STATUS.get(state, "FINISHED"))


def _clean_name(name: str) -> str:
    """Return a name with only the characters that MLflow allows; recall@10 becomes recall_at_10."""
    return re.sub(r"[^\w\-. :/]", "_", name.replace("@", "_at_"))


SPEC = TrackerKind(MlflowSink, MlflowOptions, needs="mlflow")
