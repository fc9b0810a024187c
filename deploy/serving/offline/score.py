"""`nonet score RUN --data F.parquet --out R.parquet`: the score of the item of each row for its user, as of the row's time."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from nonet.atomic import replace_file
from nonet.deploy.opened import OpenedRun, RequestFeatures, read_run_interactions
from nonet.errors import DataError
from nonet.suggest import join_names

_ROWS_PER_CHUNK = 4096  # whose questions are made, and whose scores are written, at once
_ROWS_PER_BATCH = 256  # that the model computes at once


def score_rows(run: str, data: Path, out: Path, columns: Mapping[str, str] | None = None) -> dict[str, Any]:
    """Score each row of a table by the served version, or else the newest checkpoint.

    Args:
        run: The run's folder, its id, a prefix of its id, or `last`.
        data: The table, Parquet or delimited text, with a user, an item and a time in the columns that the run's log has them
            in. A click model also reads the other columns of the log that are its features.
        out: The Parquet file to write, with one row per row of `data`, in order: the user, the item and the time in the columns
            of the run's log, score, score_TASK for each further task of a click model, cold_start and version. The score of an
            unknown item is null.
        columns: The name of columns in `data`, by Nonet's name or by role, where it differs from the run's.

    Returns:
        {"rows": number of rows, "unknown_items": number of rows of unknown items, "version": number, "file": the written file}.

    Raises:
        DataError: The table cannot be read, lacks a column, or has no rows.
        ConfigError: The run has no checkpoint, or a value does not fit its column.
    """
    opened_run = OpenedRun.open(run, verb="score")
    rows = read_run_interactions(str(data), opened_run.vocabulary, keep_order=True, columns=columns or {})
    features = RequestFeatures.from_run(opened_run, posts=False)
    if absent := [name for name in features.value_columns if name not in rows.column_names]:
        own_names = join_names(opened_run.vocabulary.get_own_columns(absent))
        raise DataError(
            f"{data}: no column {own_names}, which the model reads; add it, empty where it is not known"
        )
    version = opened_run.registry.serving.default or opened_run.publish_newest().number
    engine = opened_run.load_engine(opened_run.registry.read_version(version))
    fields = [rows.schema.field(name) for name in ("user_id", "item_id")]
    fields.append(pa.field("timestamp", pa.timestamp("s", "UTC")))
    score_names = ["score", *(f"score_{task}" for task in opened_run.setup.model.get("tasks", ()))]
    scores_fields = [(name, pa.float32()) for name in score_names]
    schema = pa.schema([*fields, *scores_fields, ("cold_start", pa.bool_()), ("version", pa.int32())])
    own_names = opened_run.vocabulary.get_own_columns(schema.names)
    schema = pa.schema([field.with_name(name) for field, name in zip(schema, own_names, strict=True)])
    unknown_count = 0
    with replace_file(out) as draft, pq.ParquetWriter(draft, schema) as writer:
        for start in range(0, len(rows), _ROWS_PER_CHUNK):
            table = rows.slice(start, _ROWS_PER_CHUNK)
            scores, is_cold = _score_table(features, engine, table, opened_run.withdrawn)
            values = [
                *(table[field.name].cast(field.type) for field in fields),
                *(pa.array(column, pa.float32()) for column in scores),
                pa.array(is_cold),
            ]
            versions = pa.array([version] * len(table), pa.int32())
            writer.write_table(pa.table([*values, versions], schema))
            unknown_count += scores[0].count(None)
    return {"rows": len(rows), "unknown_items": unknown_count, "version": version, "file": str(out)}


def _score_table(
    features: RequestFeatures, engine: Any, table: pa.Table, withdrawn: tuple[str, ...]
) -> tuple[list[list[float | None]], list[bool]]:
    """Return the scores of rows, None for unknown items, and those of each task; and whether no event of the user is older."""
    value_names = [name for name in features.value_columns if name in table.column_names]
    columns = {name: table[name].to_pylist() for name in ("user_id", "item_id", "timestamp", *value_names)}
    prepared = features.read_joined_columns(
        [
            features.prepare_score_question(
                columns["user_id"][row],
                None,
                [columns["item_id"][row]],
                withdrawn=withdrawn,
                time=datetime.fromtimestamp(columns["timestamp"][row], UTC),
                values={name: columns[name][row] for name in value_names},
            )
            for row in range(len(table))
        ]
    )
    questions = [each.question for each in prepared]
    starts = range(0, len(questions), _ROWS_PER_BATCH)
    answers = [
        answer for start in starts for answer in engine.answer(questions[start : start + _ROWS_PER_BATCH])
    ]
    scores = [
        [float(score[0]) if len(score) else None for score in (answer.score, *answer.tasks.values())]
        for answer in answers
    ]
    return [list(column) for column in zip(*scores, strict=True)], [each.cold_start for each in prepared]
