"""ClickSpec: what all click models share. They predict the probability that an event is a click, and recommend no lists."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

from nonet.errors import ConfigError
from nonet.models import MODELS, ModelContext, ModelSize, ModelSpec, Options
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
    makes_lists: ClassVar[bool] = False
    rows: ClassVar[str] = "events"
    cuts_steps: ClassVar[bool] = False
    blocks: ClassVar[bool] = False
    lower_is_better: ClassVar[frozenset[str]] = frozenset({"log_loss"})
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

    def size(self, options: Options, around: ModelContext) -> ModelSize:
        """Return the size of the SID decoder, which is an upper bound for click models of the usual widths."""
        size = MODELS.get("sid_decoder").size(options, around)
        return replace(size, assumed=f"{self.name} is at most as large as the SID decoder")

    def list_baselines(self, graphs: Collection[str] = ()) -> Sequence[str]:
        """Return the names of the baselines for clicks, of which one needs graphs."""
        from nonet.models.clicks.baselines import CLICK_BASELINES, NEIGHBOURS

        return (*CLICK_BASELINES, NEIGHBOURS) if graphs else CLICK_BASELINES

    def check_metric(self, metric: str, width: int) -> None:
        """Raise ConfigError unless the metric is a click metric."""
        from nonet.models.clicks.metrics import check_metric

        check_metric(metric)

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
            self._check_features(scenario, name, stage.target)
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

    def _check_features(self, scenario: Any, stage: str, target: str) -> None:
        """Raise ConfigError if a feature reveals the label: a column in the target condition, or that of `data.labels`."""
        from nonet.models.clicks.leaks import find_columns

        labels = scenario.data.labels
        label_columns = find_columns(target) | ({labels.name} if labels is not None else set())
        for table, table_options in scenario.sparse.tables.items():
            for feature in table_options.features or [table]:
                if feature in label_columns:
                    source = f"stages.{stage}.target" if feature in find_columns(target) else "data.labels"
                    raise ConfigError(
                        f"sparse.tables.{table}: the feature {feature!r} is the label ({source} names it): the model would "
                        "read what it must predict. Remove it; liked, disliked and taste have the labels of earlier events"
                    )
