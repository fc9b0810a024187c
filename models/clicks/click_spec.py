"""ClickSpec: what all click models share. They predict the probability that an event is a click, and recommend no lists."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

from nonet.errors import ConfigError
from nonet.models import MODELS, ModelContext, ModelSize, ModelSpec, Options
from nonet.suggest import join_names
from nonet.verbs import COMPARING_VERBS, TRAINING_VERBS, VERBS, SupportedVerbs

_VERBS = (*TRAINING_VERBS, *COMPARING_VERBS, "serve", "/score", "publish", "export", "score")
_REASON = "predicts clicks and recommends no lists; score items: /score of nonet serve, or nonet score RUN --data FILE --out FILE"


class ClickSpec(ModelSpec):
    """Spec of a click model. It has roles of its own, and a training row is one event instead of a user's history.

    Attributes:
        name: The name of the model in messages.
    """

    name: ClassVar[str] = "a click model"
    roles: ClassVar[Mapping[str, str]] = {
        "trainer": "nonet.workers.roles.click:ClickTrainer",
        "evaluator": "nonet.workers.roles.click:ClickEvaluator",
        "tokenise": "nonet.workers.roles.click:ClickTokeniser",
    }
    learner: ClassVar[str] = "nonet.workers.roles.click:ClickLearner"
    reads_graphs: ClassVar[bool] = True
    has_tasks: ClassVar[bool] = True
    lower_is_better: ClassVar[frozenset[str]] = frozenset({"log_loss"})
    makes_lists: ClassVar[bool] = False
    rows: ClassVar[str] = "events"
    cuts_steps: ClassVar[bool] = False
    blocks: ClassVar[bool] = False
    results: ClassVar[str] = "nonet.models.clicks:ClickResults"
    engine: ClassVar[str] = "nonet.models.inference:ClickEngine"
    version_files: ClassVar[Mapping[str, str]] = {
        "click_model": "clicks/model.json",
        "click_events": "clicks/events.npz",
    }
    export_folder: ClassVar[str] = "nonet.deploy.serving.offline:write_click_folder"
    request_features: ClassVar[str] = "nonet.deploy.opened:ClickRequestFeatures"

    @property
    def verbs(self) -> SupportedVerbs:
        """The verbs that work for runs of a click model."""
        return SupportedVerbs(_VERBS, {verb: _REASON for verb in VERBS if verb not in _VERBS})

    def make_build_options(self, options: Options, around: ModelContext) -> dict[str, Any]:
        """Return the options that are passed to `build`, with the names of tasks if there are any."""
        return {**options, "tasks": list(around.tasks)} if around.tasks else dict(options)

    def size(self, options: Options, around: ModelContext) -> ModelSize:
        """Return the size of the SID decoder, which is an upper bound for click models of the usual widths."""
        size = MODELS.get("sid_decoder").size(options, around)
        return replace(size, assumed=f"{self.name} is at most as large as the SID decoder")

    def list_baselines(self, graphs: Collection[str] = ()) -> Sequence[str]:
        """Return the names of the baselines for clicks, of which one needs graphs."""
        from nonet.models.clicks.baselines import CLICK_BASELINES, NEIGHBOURS

        return (*CLICK_BASELINES, NEIGHBOURS) if graphs else CLICK_BASELINES

    def check_metric(self, metric: str, width: int, tasks: Sequence[str] = ()) -> None:
        """Raise ConfigError unless the metric is a click metric, of the target or a task."""
        from nonet.models.clicks.metrics import check_metric

        check_metric(metric, tasks)

    def is_lower_better(self, metric: str) -> bool:
        """Return whether lower values of a metric of the target or a task are better."""
        from nonet.models.clicks.metrics import split_metric

        return super().is_lower_better(split_metric(metric)[0])

    def check(self, scenario: Any) -> None:
        """Check that stages define a label and a batch of events, and that no feature is the label.

        Raises:
            ConfigError: One of these does not hold, or the scenario has an option that only lists need.
        """
        if scenario.data.repeats is not None:
            raise ConfigError(
                f"data.repeats: {self.name} recommends no lists from which seen items could be masked; remove it"
            )
        if scenario.model.list_voters():
            raise ConfigError(
                f"model.memory: {self.name} recommends no lists to which a memory could add items; remove it"
            )
        if scenario.evaluate.baselines is not None:
            names = " and ".join(self.list_baselines(scenario.data.graph))
            raise ConfigError(f"evaluate.baselines: {self.name} is compared with {names}; remove it")
        if scenario.evaluate.shuffle_ties:
            raise ConfigError(f"evaluate.shuffle_ties: {self.name} ranks no lists; remove it")
        for name, stage in scenario.stages.items():
            if stage.chunk != type(stage.chunk)():
                raise ConfigError(
                    f"stages.{name}.chunk: a step of {self.name} is one batch of events, which is not divided; remove it"
                )
            if not getattr(stage, "target", None):
                raise ConfigError(
                    f'stages.{name}: {self.name} needs target: a condition that says what a click is, e.g. "rating >= 4"'
                )
            self._check_tasks(scenario, name, stage.tasks)
            conditions = {f"stages.{name}.target": stage.target} | {
                f"stages.{name}.tasks.{task}": options.target for task, options in stage.tasks.items()
            }
            for key, condition in conditions.items():
                self._check_features(scenario, key, condition)
            batch = getattr(stage, "batch", None)
            if batch is None or batch.tokens is None:
                raise ConfigError(
                    f"stages.{name}: {self.name} needs batch: {{tokens: N}}, the events of a step, e.g. 256"
                )

    def check_columns(self, scenario: Any, log_columns: Sequence[str], items: Any) -> None:
        """Raise ConfigError unless each feature is computed by the model, or is a column of the data or of a joined store."""
        from nonet.samples.batches import CLICK_FEATURES, ItemFacts, check_click_features
        from nonet.samples.batches.graphs import list_graph_features

        joined = [column for join in scenario.data.join.values() for column in join.sources]
        columns = (*log_columns, *ItemFacts.list_columns(items), *joined)
        for name in scenario.data.graph:
            if taken := set(list_graph_features([name])) & {*columns, *CLICK_FEATURES}:
                raise ConfigError(
                    f"data.graph.{name}: {min(taken)!r} is a feature or column already; give the graph another name"
                )
        columns = (*columns, *list_graph_features(scenario.data.graph))
        for name, table in scenario.sparse.tables.items():
            try:
                check_click_features(table.features or [name], columns)
            except ConfigError as error:
                raise ConfigError(f"sparse.tables.{name}: {error}") from None

    def check_events(self, scenario: Any, seq: Any) -> Sequence[str]:
        """Check that test events have labels, and return a sentence for each target or task whose metrics are not defined."""
        from nonet.models.clicks.results import check_labels, count_labels

        for stage in scenario.stages:
            check_labels(seq, stage)
        return self.list_data_notes(scenario, {"labels": count_labels(seq)})

    def list_data_notes(self, scenario: Any, facts: Mapping[str, Any]) -> Sequence[str]:
        """Return a sentence for each split in which a target or task has one class of labels."""
        from nonet.models.clicks.results import describe_undefined_metrics

        labels = facts.get("labels") or {}
        return [
            text
            for stage in scenario.stages
            if stage in labels
            for text in describe_undefined_metrics(labels, stage, scenario.evaluate.metrics)
        ]

    def _check_tasks(self, scenario: Any, stage: str, tasks: Collection[str]) -> None:
        """Raise ConfigError unless a stage has the tasks of the first one, and each task has a metric."""
        expected = self.list_tasks(scenario)
        if tuple(tasks) != expected:
            raise ConfigError(
                f"stages.{stage}.tasks: got {join_names(tasks) if tasks else 'none'}, and the first stage has "
                f"{join_names(expected) if expected else 'none'}; all stages of a model have the same tasks, in the same order"
            )
        from nonet.models.clicks.metrics import split_metric

        measured = {split_metric(metric)[1] for metric in scenario.evaluate.metrics}
        if unmeasured := [task for task in tasks if task not in measured]:
            raise ConfigError(
                f"stages.{stage}.tasks.{unmeasured[0]}: no metric measures it; add auc@{unmeasured[0]} or "
                f"log_loss@{unmeasured[0]} to evaluate.metrics"
            )

    def _check_features(self, scenario: Any, key: str, target: str) -> None:
        """Raise ConfigError if a feature reveals a label: a column in the condition at a key, or one of `data.labels`."""
        from nonet.samples.tables import list_names

        label_columns = list_names(target) | {labels.name for labels in scenario.data.labels}
        for table, table_options in scenario.sparse.tables.items():
            for feature in table_options.features or [table]:
                if feature in label_columns:
                    source = key if feature in list_names(target) else "data.labels"
                    raise ConfigError(
                        f"sparse.tables.{table}: the feature {feature!r} is the label ({source} names it): the model would "
                        "read what it must predict. Remove it; liked, disliked and taste have the labels of earlier events"
                    )
