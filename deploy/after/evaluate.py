"""`nonet evaluate RUN`: evaluate a run's checkpoints again without training, with other metrics or other data.

Items, semantic ids, the memory's counts and checkpoints are those of the run. Other data has other users
and events of the same items: known users have their sparse rows, new users have the default row, and events
of unknown items are dropped and counted.
"""

from __future__ import annotations

import re
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute

from nonet.controller.record import Checkpoints, RunFolder
from nonet.controller.scenario import Scenario
from nonet.controller.setup import make_baseline_options, make_data_setup
from nonet.deploy.opened import OpenedRun, read_run_interactions
from nonet.deploy.report import format_aligned
from nonet.errors import CheckpointError, ConfigError, DataError
from nonet.models.generation import Corpus
from nonet.plugins import load_heavy
from nonet.samples.sequences import RL, TEST, TRAIN, Sequences, build_sequences, find_user_rows
from nonet.samples.tables import find_files, replace_column
from nonet.suggest import join_names
from nonet.workers.roles.artifacts import DataSetup
from nonet.workers.roles.click import ClickData, ClickEvaluator
from nonet.workers.roles.evaluation import Evaluator

pc: Any = pyarrow.compute  # its functions are created at import time, which type checkers do not see
_INTERACTIONS = "interactions.parquet"


def evaluate_run(
    run: str,
    *,
    data: str | Path | None = None,
    columns: Mapping[str, str] | None = None,
    metrics: Sequence[str] | None = None,
    stages: Sequence[str] | None = None,
) -> dict[str, Any]:
    """Evaluate a run's stages and baselines on test events: by full ranking, or by the labels of the events for a click model.

    Args:
        run: The run's folder, its id, a prefix of its id, or `last`.
        data: A table of events, named as in `data.interactions`, or a folder with interactions.parquet; it is split like the
            run's data. None for the run's data.
        columns: The name of columns in `data`, by Nonet's name or by role, where it differs from the run's.
        metrics: Names of metrics, by default the scenario's.
        stages: Stages to evaluate, by default all.

    Returns:
        {"run": id, "data": {users, events, test, dropped_events, trained_events}: numbers, "subjects": {name: {metric: value}}
        of stages and baselines, "lists": {name: properties of its lists, for a model that makes lists}}. The value of a metric
        that the labels do not define is None.

    Raises:
        ConfigError: The run has not prepared its data, does not have the verb, or a metric or stage is unknown.
        DataError: The data cannot be used.
    """
    if columns and data is None:
        raise ConfigError("--column names columns of the table of --data; give both")
    opened = OpenedRun.open(run, verb="evaluate")
    folder, scenario = opened.folder, opened.scenario
    metric_names = list(metrics or scenario.evaluate.metrics)
    spec = scenario.model.spec
    tasks = spec.list_tasks(scenario)
    for metric in metric_names:
        spec.check_metric(metric, scenario.evaluate.width, tasks)
    checkpoints = dict(_find_checkpoints(folder, list(scenario.stages), stages))
    with _open_evaluator(opened, metric_names) as evaluator:
        counts_by_fact = _load_other_data(evaluator, opened, str(data), columns) if data else {}
        results = {name: _evaluate_baseline(evaluator, name) for name in make_baseline_options(scenario)}
        results |= {
            stage: evaluator.evaluate(stage, str(checkpoint)) for stage, checkpoint in checkpoints.items()
        }
        seq = evaluator.corpus.seq
    counts = seq.count_events()
    return {
        "run": folder.id,
        "data": {
            "users": counts["users"],
            "events": counts["events"],
            "test": counts["test"],
            **counts_by_fact,
        },
        "subjects": {name: _select_test_metrics(result) for name, result in results.items()},
        "lists": {name: result["lists"] for name, result in results.items() if "lists" in result},
    }


def format_evaluation(evaluation: dict[str, Any]) -> str:
    """Format an evaluation of `evaluate_run` as a table."""
    data, subjects = evaluation["data"], evaluation["subjects"]
    metrics = list(next(iter(subjects.values())))
    dropped = (
        f", {data['dropped_events']:,} events of unknown items dropped" if data.get("dropped_events") else ""
    )
    lines = [f"{evaluation['run']}: {data['test']:,} test events of {data['users']:,} users{dropped}", ""]
    if data.get("trained_events"):
        lines[1:] = [
            f"warning: the run has trained on {data['trained_events']:,} of these test events, so the metrics are too good",
            "",
        ]
    width = max([14, *(len(metric) + 2 for metric in metrics)])
    title = "test, full ranking" if evaluation["lists"] else "test"
    lines.append(f"{title:<20}" + "".join(f"{metric:>{width}}" for metric in metrics))
    lines += [
        f"{name:<20}" + "".join(format_aligned(values.get(metric), width) for metric in metrics)
        for name, values in subjects.items()
    ]
    return "\n".join(lines)


def _find_checkpoints(
    folder: RunFolder, stages: Sequence[str], chosen_stages: Sequence[str] | None
) -> Iterator[tuple[str, Path]]:
    """Yield the name and the last checkpoint of each chosen stage, or of each of `stages` that has ended if none is chosen.

    Raises:
        ConfigError: A chosen stage does not exist.
        CheckpointError: A chosen stage has not ended.
    """
    for name in chosen_stages or stages:
        if name not in stages:
            raise ConfigError(f"{folder.id} has no stage {name!r}; its stages: {', '.join(stages)}")
        try:
            yield name, Path(Checkpoints(folder.checkpoints).find_stage_end(name))
        except CheckpointError:
            if chosen_stages:  # stages that were not chosen by name may be unfinished
                raise


@contextmanager
def _open_evaluator(opened: OpenedRun, metrics: Sequence[str]) -> Iterator[Evaluator | ClickEvaluator]:
    """Open the model's evaluator on the run's artifacts; its results are deleted with the context."""
    changes = {"metrics": list(metrics), "exhaustive": None, "shuffle_ties": False}
    options = opened.scenario.evaluate.model_copy(update=changes)
    evaluator = load_heavy(opened.scenario.model.spec.roles.get("evaluator", Evaluator))(
        opened.setup, options
    )
    with tempfile.TemporaryDirectory() as results_dir:
        evaluator.open(opened.folders, results_dir)
        yield evaluator


def _evaluate_baseline(evaluator: Evaluator | ClickEvaluator, name: str) -> dict[str, Any]:
    """Fit and rank a baseline; each call fits a part of it until it is ranked."""
    while "fitting" in (result := evaluator.evaluate_baseline(name)):
        pass
    return result


def _load_other_data(
    evaluator: Evaluator | ClickEvaluator,
    opened: OpenedRun,
    data: str,
    columns: Mapping[str, str] | None = None,
) -> dict[str, int]:
    """Replace the evaluator's events by those of other data.

    Returns:
        {"dropped_events": number of events that were left out because their items are unknown, "trained_events": number of test
        events that the run has trained on}.

    Raises:
        DataError: No event has an item of the run, or a column that the model reads is missing.
    """
    path = str(Path(data) / _INTERACTIONS) if (Path(data) / _INTERACTIONS).exists() else data
    folder, setup = opened.folder, _make_setup_beside(opened.scenario, path)
    for labels in setup.labels:
        try:
            find_files(labels.path, "data.labels:")
        except DataError as error:
            raise DataError(
                f"{error} {folder.id} has labels that arrive later; write those of {path} to {labels.path}"
            ) from None
    interactions, _ = setup.attach_labels(
        read_run_interactions(
            path, opened.vocabulary, columns=columns or {}, keep_fractions=bool(setup.labels)
        )
    )
    items = evaluator.corpus.items
    is_known = pc.is_in(
        interactions["item_id"].cast(pa.string()),
        value_set=items["item_id"].cast(pa.string()).combine_chunks(),
    )
    known_events = interactions.filter(is_known)
    if not len(known_events):
        raise DataError(
            f"{path}: none of its {len(interactions):,} events has an item that {folder.id} knows"
        )
    item_ids = known_events["item_id"].cast(items["item_id"].type)
    known_events = replace_column(known_events, "item_id", item_ids)
    log = setup.compress_events(known_events, items)
    seq, seq_items = build_sequences(
        known_events if log is None else log.events,
        items,
        split=setup.options.split,
        targets=setup.options.targets,
        where=setup.options.where,
        repeats=setup.options.repeats,
        strict=log is not None,
    )
    if missing := [
        name
        for name in evaluator.corpus.seq.columns
        if name in opened.setup.features and name not in seq.columns
    ]:
        sources = [opened.vocabulary.sources.get(name, name) for name in missing]
        raise DataError(
            f"{path} has no column {' and no column '.join(map(repr, sources))}, which the model of {folder.id} reads; "
            f"it has {join_names(interactions.column_names)}. Add it"
        )
    seq = _renumber_items(seq, seq_items, evaluator.corpus)
    trained = evaluator.corpus.seq
    trained_events = _count_trained_events(seq, trained, _find_learned_events(opened.scenario, trained))
    evaluator.set_events(seq)
    return {"dropped_events": len(interactions) - len(known_events), "trained_events": trained_events}


def _make_setup_beside(scenario: Scenario, data: str) -> DataSetup:
    """Return the setup of a run's data whose label files are beside other data: a file, folder, pattern or URI."""
    address, question, options = data.partition("?") if "://" in data else (data, "", "")
    is_pattern = not Path(address).exists()
    parent = (re.split(r"[*?\[]", address)[0] if is_pattern else address.rstrip("/")).rpartition("/")[0]
    setup = make_data_setup(scenario, Path(parent))
    if "://" not in data:
        return setup
    labels = tuple(
        mine
        if ":" in own.path or own.path.startswith("/")
        else mine.model_copy(update={"path": f"{parent}/{own.path}{question}{options}"})
        for mine, own in zip(setup.labels, scenario.data.labels, strict=True)
    )
    return replace(setup, labels=labels)


def _find_learned_events(scenario: Scenario, trained: Sequences) -> np.ndarray:
    """Return the indices of the events of a run that its stages trained on: the RL events, and the TRAIN events by target."""
    is_learned = trained.split == RL
    find_taught = trained.find_targets if scenario.model.spec.makes_lists else trained.find_labelled
    for stage in scenario.stages:
        is_taught = find_taught(stage) if stage in trained.targets else np.ones(len(is_learned), bool)
        is_learned = is_learned | is_taught & (trained.split == TRAIN)
    return np.flatnonzero(is_learned)


def _count_trained_events(seq: Sequences, trained: Sequences, learned: np.ndarray) -> int:
    """Return how many test events are events of the same user, item and time that a run has trained on.

    Args:
        seq: The events that are tested, with the dense indices of items of the run.
        trained: The events of the run.
        learned: The indices of those that it has trained on.
    """
    known_rows = find_user_rows(seq.user_id, trained.user_id)
    tested = seq.find_split_events(TEST)
    tested_keys, trained_keys = (
        np.rec.fromarrays([rows, each.item[events].astype(np.int64), each.time[events].astype(np.int64)])
        for each, events, rows in (
            (seq, tested, known_rows[seq.find_users(tested)]),
            (trained, learned, trained.find_users(learned).astype(np.int64)),
        )
    )
    return int(np.isin(tested_keys, trained_keys).sum())


def _renumber_items(seq: Sequences, seq_items: Any, corpus: Corpus | ClickData) -> Sequences:
    """Return sequences with the run's dense indices of items instead of those of `seq_items`, a table of items."""
    run_ids = corpus.items["item_id"].combine_chunks()
    run_index = pc.index_in(seq_items["item_id"], value_set=run_ids).to_numpy()
    item = run_index[seq.item].astype(np.int32)
    return replace(seq, item=item, item_key=corpus.seq.item_key, joined=corpus.seq.joined)


def _select_test_metrics(result: dict[str, Any]) -> dict[str, float | None]:
    """Return the metrics over all test events, by exhaustive scoring if possible. Raises DataError without test events."""
    detail = result["detail"]
    if "test" not in detail:
        raise DataError(
            "there are no test events, or none with a label: data.split holds out more events than these users have, or columns "
            "of the target are missing"
        )
    return dict(detail["test"].get("exhaustive", detail["test"].get("beam"))["all"])
