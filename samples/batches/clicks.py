"""Every event of the sequences as a row of a click model: user, item, time, and whether the item was liked.

The features of a row depend only on earlier events, and on labels that were known by then, so a held-out row never sees its
own label or a later one (`click_questions.py` lists the features). Item and user columns are those of the row's own time.
"""

# Shapes: N events, P rows of a batch.

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import pyarrow as pa

from nonet.errors import ConfigError
from nonet.ranges import expand_ranges
from nonet.samples.batches.click_questions import (
    CLICK_FEATURES,
    ClickQuestions,
    ItemFacts,
    SparseKeys,
    make_bags,
    select_values,
)
from nonet.samples.batches.graphs import list_graph_features
from nonet.samples.sequences import NEVER, TRAIN, Sequences, find_tasks
from nonet.suggest import join_names, suggest_sentence
from nonet.types import Jagged


@dataclass(frozen=True, slots=True)
class ClickBatch:
    """A rank's share of a step.

    Attributes:
        bags: Bags of keys by feature.
        label: Labels [P] float32; [P, K] for K tasks, the target of the stage first.
        step_rows: Number of rows of the step on all ranks.
        weight: Weight of each label [P, K] float32 in the loss, 0 for unknown ones; None for one task.
    """

    bags: Mapping[str, Jagged]
    label: np.ndarray
    step_rows: int
    weight: np.ndarray | None = None


@dataclass(frozen=True)
class ClickRows:
    """Events of the sequences as rows of a click model.

    Attributes:
        seq: The sequences.
        items: Attributes of the items.
        label: Label of each event [N] float32: 1 if the stage's condition holds, else 0.
        features: Names of the features.
        history: Maximum number of earlier events that a row uses.
        keys: Sparse keys.
        known_from: Unix seconds [N] from which on the label is known; None if each label is known at the time of its event.
        is_labelled: Which events [N] may be trained or measured (`Sequences.find_labelled`); None for all.
        tasks: Labels [N], `known_from` [N] and `is_labelled` [N] of further tasks, by name.
        history_labels: Label and `known_from` of events as history, if they are those of another task.
    """

    seq: Sequences
    items: ItemFacts
    label: np.ndarray
    features: tuple[str, ...]
    history: int
    keys: SparseKeys
    known_from: np.ndarray | None = None
    is_labelled: np.ndarray | None = None
    tasks: Mapping[str, tuple[np.ndarray, np.ndarray, np.ndarray]] = field(default_factory=dict)
    history_labels: tuple[np.ndarray, np.ndarray | None] | None = None

    @classmethod
    def from_labels(
        cls,
        seq: Sequences,
        items: pa.Table,
        label: np.ndarray,
        features: Sequence[str],
        history: int,
        known_from: np.ndarray | None = None,
        joined: Sequence[str] = (),
    ) -> ClickRows:
        """Create the rows of a click model. Raises ConfigError for an unknown feature.

        Args:
            seq: The sequences.
            items: The item table in index order.
            label: Label of each event [N].
            features: Names of the features.
            history: Maximum number of earlier events that a row uses.
            known_from: Unix seconds [N] from which on labels are known; None if that is the time of the event.
            joined: Names of the columns that `seq` joins from stores.
        """
        item_columns = ItemFacts.list_columns(items.schema)
        graph_features = list_graph_features(seq.graphs.options if seq.graphs else ())
        check_click_features(features, (*seq.feature_columns, *item_columns, *joined, *graph_features))
        from_elsewhere = {*CLICK_FEATURES, *seq.feature_columns, *joined}
        facts = ItemFacts.from_items(
            items, [name for name in item_columns if name in features and name not in from_elsewhere]
        )
        keys = SparseKeys(seq.user_key, seq.item_key, facts.category_key)
        return cls(seq, facts, np.asarray(label, np.float32), tuple(features), history, keys, known_from)

    @classmethod
    def from_target(
        cls,
        seq: Sequences,
        items: pa.Table,
        target: str | None,
        features: Sequence[str],
        history: int,
        joined: Sequence[str] = (),
    ) -> ClickRows:
        """Create rows that are labelled by the condition of a target, by default the first one, and by those of its tasks."""
        target = target or next(iter(seq.targets))
        times = seq.get_label_times(target)
        known_from = None if times is seq.time else times
        label = seq.targets[target].astype(np.float32)
        rows = cls.from_labels(seq, items, label, features, history, known_from, joined)
        tasks = {
            task: (
                seq.targets[name].astype(np.float32),
                seq.get_label_times(name),
                seq.find_labelled(name),
            )
            for task, name in find_tasks(target, seq.targets).items()
        }
        is_labelled = None if known_from is None else seq.find_labelled(target)
        return replace(rows, is_labelled=is_labelled, tasks=tasks)

    def select_task(self, task: str) -> ClickRows:
        """Return rows with the labels of a task; "" is the target of the stage. Features are computed from the same labels."""
        if not task:
            return self
        label, known_from, is_labelled = self.tasks[task]
        history_labels = (self.label, self.known_from)
        return replace(
            self, label=label, known_from=known_from, is_labelled=is_labelled, history_labels=history_labels
        )

    def find_rows(self, split: int) -> np.ndarray:
        """Return the indices [P] of the events of a split that may be trained or measured."""
        selected = self.seq.split == split
        return np.flatnonzero(selected if self.is_labelled is None else selected & self.is_labelled)

    def find_history(self) -> np.ndarray:
        """Return the indices [P] of the TRAIN events whose label is known at some time, which may be history."""
        selected = self.seq.split == TRAIN
        return np.flatnonzero(selected if self.known_from is None else selected & (self.known_from < NEVER))

    def gather_labels(
        self, index: np.ndarray, weight_by_task: Mapping[str, float]
    ) -> tuple[np.ndarray, np.ndarray | None]:
        """Return the labels of events [P], and their weights in the loss.

        Args:
            index: Indices of the events [P], whose label of the stage's target is known.
            weight_by_task: Weight of the loss of each task besides the stage's target, which has the weight 1.

        Returns:
            Labels and weights as `ClickBatch` has them.
        """
        if not weight_by_task:
            return self.label[index], None
        label, weight = [self.label[index]], [np.ones(len(index), np.float32)]
        for task, task_weight in weight_by_task.items():
            task_label, _, is_labelled = self.tasks[task]
            label.append(task_label[index])
            weight.append(np.where(is_labelled[index], np.float32(task_weight), np.float32(0)))
        return np.stack(label, 1), np.stack(weight, 1)

    def batch(self, index: np.ndarray, *, without_moment: np.ndarray | None = None) -> dict[str, Jagged]:
        """Build the bags of keys by feature for events [P].

        Args:
            index: Indices of the events [P].
            without_moment: Mask [P] of the rows whose time features are left empty; None for no row.
        """
        seq = self.seq
        user, begin = seq.user[index], seq.offsets[seq.user[index]]  # `begin` is the user's first event
        # The end of the history: in a compressed log, a row must not see other events of its own second.
        end = np.maximum(begin, seq.first_of_second[index]) if seq.strict else index
        past, past_offsets = expand_ranges(np.maximum(begin, end - self.history), end)
        is_known = np.ones(
            len(past), bool
        )  # whether the label of each past event is known at the time of the row
        label, known_from = self.history_labels or (self.label, self.known_from)
        if known_from is not None:
            is_known = known_from[past] < np.repeat(seq.time[index], np.diff(past_offsets))
        item, time = seq.item[index].astype(np.int64), seq.time[index]
        questions = ClickQuestions(
            user=user,
            item=item,
            liked=select_values(seq.item[past], past_offsets, is_known & (label[past] > 0)),
            disliked=select_values(seq.item[past], past_offsets, is_known & (label[past] == 0)),
            activity=end - begin,
            time=time,
            since=np.where(end == begin, -1, time - seq.time[np.maximum(end - 1, 0)]),
            timeless=np.zeros(len(index), bool) if without_moment is None else without_moment,
            columns=seq.gather_columns(index, user, time),
            neighbours=seq.graphs.find_neighbours(self.features, user, item, time) if seq.graphs else {},
        )
        return make_bags(questions, self.items, self.features, self.keys)


def check_click_features(features: Sequence[str], columns: Sequence[str]) -> None:
    """Raise ConfigError unless each feature is computed by every click model or is one of the columns of the data."""
    allowed = tuple(dict.fromkeys((*columns, *CLICK_FEATURES)))
    for name in features:
        if name not in allowed:
            raise ConfigError(
                f"a click model has no feature {name!r}; there are {join_names(allowed)}."
                f"{suggest_sentence(name, allowed)}"
            )
