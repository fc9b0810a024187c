"""Settings that a run sends to its workers once, when they are created. They are plain data and import neither torch nor Ray.

All values come from the scenario and the plan; workers never read the scenario itself.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass, field
from typing import TYPE_CHECKING, Annotated, Any, Literal

import numpy as np
from pydantic import Field

from nonet.deadlines import DEFAULTS, Deadlines
from nonet.errors import ConfigError
from nonet.options import Rate, Share, StrictModel
from nonet.units import Bytes
from nonet.workers.engines import OptimizerOptions, PrecisionOptions

if TYPE_CHECKING:
    from nonet.models.generation import Corpus
    from nonet.samples.stores import Join
    from nonet.samples.tokenised import StoredSequences

SUPERVISED = "nonet.workers.roles.learners:SupervisedLearner"  # Default of `StageSetup.learner`.
CHUNK_TOKENS = 1 << 14  # Default number of positions per forward pass.


@dataclass(frozen=True, slots=True)
class SceneSetup:
    """The scenes of an RL stage: groups of prompts with their own catalogues and reward weights.

    Events with the value `names[i]` in the column belong to scene i; all other events belong to one further scene, the last.

    Attributes:
        column: Column of the events that decides the scene; "event" is the kind of an event.
        names: Values of the column that have a scene.
        catalogue: Catalogue of each scene, that of other events last: a condition on items, or an item column that is true; None
            for all items.
        weights: Weights of the rewards in each named scene, where they differ from the stage's.
    """

    column: str
    names: tuple[str, ...]
    catalogue: tuple[str | None, ...]
    weights: tuple[Mapping[str, float], ...]

    def find_scenes(self, seq: Any, events: np.ndarray) -> np.ndarray:
        """Return the scene of each event, [n] int64; `len(names)` for events without a named scene.

        Raises:
            ConfigError: The events have no such column.
        """
        from nonet.samples.tables import as_numbers

        if not self.names:
            return np.zeros(len(events), np.int64)
        if self.column == "event":
            # -1, which no event has, for a name that does not occur.
            scene_values = [
                seq.event_names.index(name) if name in seq.event_names else -1 for name in self.names
            ]
            values = seq.event[events]
        else:
            if self.column not in seq.columns:
                column_names = ", ".join(("event", *seq.columns))
                raise ConfigError(f"scenes.column: events have no {self.column!r}; they have {column_names}")
            scene_values = as_numbers(np.array(self.names)).tolist()
            values = seq.columns[self.column][events]
        scene = np.full(len(events), len(self.names), np.int64)
        for index, scene_value in enumerate(scene_values):
            scene[values == scene_value] = index
        return scene

    def get_weights(self, reward: str, default_weight: float, scene: np.ndarray) -> np.ndarray:
        """Return the weight of a reward for each scene index, [n] float64.

        Args:
            reward: Name of the reward.
            default_weight: Weight in scenes that define none.
            scene: Scene indices [n], as `find_scenes` returns them.
        """
        weights_by_scene = np.array(
            [*(weights.get(reward, default_weight) for weights in self.weights), default_weight], np.float64
        )
        return weights_by_scene[scene]

    def find_allowed_items(self, items: Any) -> np.ndarray | None:
        """Return the mask of the items in each scene's catalogue, [C, I] bool; None if every scene has all items.

        Raises:
            ConfigError: The catalogue of a scene is empty, although there are items, or names an unknown column.
        """
        if not any(self.catalogue):
            return None
        masks = [_match_items(items, condition) for condition in self.catalogue]
        for condition, mask_I in zip(self.catalogue, masks, strict=True):
            if len(mask_I) and not mask_I.any():
                raise ConfigError(
                    f"catalogue: {condition!r} holds for none of the {len(mask_I)} items; it must hold for at least one"
                )
        return np.stack(masks)


def _match_items(items: Any, condition: str | None) -> np.ndarray:
    """Return the mask [I] of the items that fulfil a condition, or whose column of this name is true and not NaN."""
    from nonet.samples.tables import match_rows

    if condition is None:
        return np.ones(len(items), bool)
    if condition in items.column_names:
        values = items[condition].to_numpy(zero_copy_only=False)
        return np.array(
            [bool(value) and value == value for value in values], bool
        )  # NaN differs from itself.
    return match_rows(condition, items, name="catalogue")


class Weights(StrictModel):
    """How dense weights are sent to rollouts and written into checkpoints."""

    publish: Annotated[
        Literal["full", "delta"],
        Field(
            description="what is sent to rollouts in other processes: all weights, or only the blocks that changed"
        ),
    ] = "full"
    bucket: Annotated[Bytes, Field(ge=4096, description="weights that are sent to rollouts at once")] = (
        64 << 20
    )
    block: Annotated[Bytes, Field(ge=64, description="the size of the blocks of a delta")] = 65536
    shard: Annotated[
        Bytes, Field(ge=4096, description="the size of one weights or optimizer file of a checkpoint")
    ] = 2 << 30


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSetup:
    """Settings of a run that its roles share.

    Attributes:
        seed: Seed of the run.
        history: Maximum number of events of a history.
        model: Configuration of the model.
        tables: Arguments of `TableSpec` by sparse table.
        features: Sparse table by feature.
        combiners: How a bag is pooled ("sum", "mean"), by table whose features are bags.
        in_flight: Number of batches in flight; None lets the trainer choose.
        tiers: Tier settings of each table that is stored in tiers.
        deadlines: Time limits of calls.
        wire: Codec of rows that are sent between processes.
        engine: Train engine and its options.
        source: Source of the training samples and its options.
        memory: Options of the votes of a memory (`VoteOptions`); None without a memory.
        joins: Stores whose columns are joined to samples, by name.
        stored: The store that holds the sequences; None if they are read from files.
        weights: How dense weights are published and stored.
        scenes: Scenes by RL stage.
        target: Stage whose target condition defines the group `target` of evaluations; None for no such group.
    """

    seed: int
    history: int
    model: Mapping[str, Any]
    tables: Mapping[str, Mapping[str, Any]]
    features: Mapping[str, str]
    combiners: Mapping[str, str] = field(default_factory=dict)
    in_flight: int | None = None
    tiers: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    deadlines: Deadlines = DEFAULTS
    wire: str = "fp32"
    engine: Mapping[str, Any] = field(default_factory=dict)
    source: Mapping[str, Any] = field(default_factory=dict)
    memory: Mapping[str, Any] | None = None
    joins: Mapping[str, Join] = field(default_factory=dict)
    stored: StoredSequences | None = None
    weights: Weights = field(default_factory=Weights)
    scenes: Mapping[str, SceneSetup] = field(default_factory=dict)
    target: str | None = None

    def open_corpus(self, folders: Mapping[str, str]) -> Corpus:
        """Open the artifacts of the run and attach the stores that are joined to them."""
        from nonet.models.generation import Corpus
        from nonet.samples.stores import StoreJoins

        corpus = Corpus.load(folders).attach_store(self.stored)
        return corpus.attach_joins(StoreJoins(self.joins)) if self.joins else corpus

    def make_table_specs(self) -> dict[str, Any]:
        """Return the `TableSpec` of each sparse table."""
        from nonet.embedding.tables import TableSpec

        return {name: TableSpec(**spec) for name, spec in self.tables.items()}

    def make_voters(self, corpus: Any) -> Any:
        """Create the voters of the memory over a corpus; None without a memory."""
        from nonet.models.generation import VoteOptions

        return None if self.memory is None else corpus.open_voters(VoteOptions(**self.memory))

    def get_feature_dims(self) -> dict[str, int]:
        """Return the width of each sparse feature's rows."""
        return {feature: self.tables[table]["dim"] for feature, table in self.features.items()}


@dataclass(frozen=True, slots=True)
class RolloutRequest:
    """Options of a rollout. The controller passes them unchanged to each rollout rank.

    Attributes:
        stage: Name of the RL stage.
        step: Number of the step in the stage.
        width: Beams per prompt.
        version: Published version of the weights that must be used.
        chunk: Number of prompts per forward pass; None for all of them.
        draw: Options of sampling; empty for the `width` most likely items.
        blind: Whether to leave out the target items from the rollouts, as in serving.
    """

    stage: str
    step: int
    width: int
    version: int
    chunk: int | None = None
    draw: Mapping[str, Any] = field(default_factory=dict)
    blind: bool = False


class Schedule(StrictModel):
    """The learning rate of a stage over its steps: `warmup` is the share of the steps in which it rises to `peak`."""

    peak: Rate
    warmup: Share = 0.05
    decay: Literal["cosine", "linear", "none"] = "cosine"

    def compute_rate(self, step: int, steps: int) -> float:
        """Return the learning rate of a step in [0, steps): linear warm-up over a share of the steps, then the decay."""
        warmup_steps = max(1, round(self.warmup * steps))
        if step < warmup_steps:
            return self.peak * (step + 1) / warmup_steps
        # Share of the decay that is still to come, in (0, 1].
        remaining = (steps - step) / max(1, steps - warmup_steps)
        factors = {"cosine": 0.5 * (1 - math.cos(math.pi * remaining)), "linear": remaining}
        return self.peak * factors.get(self.decay, 1.0)


@dataclass(frozen=True, slots=True)
class StageSetup:
    """Settings of one training stage.

    Attributes:
        name: Name of the stage.
        first: Global number of the stage's first step; sparse steps are counted over the whole run.
        steps: Number of steps of the stage.
        users: Number of users or prompts per step, over all ranks.
        lr: The dense learning rate.
        base: Dense rate at which tables learn at their configured rate: the first stage's peak. Sparse rates scale with the dense
            one.
        target: Name of the stage's target mask in the sequences; None for all events.
        tasks: Weight of the loss of each task of a click model besides the target.
        rl_targets: Whether the targets are the events held out for RL (of the users that RL trains on) instead of training
            events.
        ahead: Number of future events that are targets of a position, weighted by 1 / distance.
        smoothing: Share of a target's probability that is spread over the legal siblings of its codes.
        weight: Weight of a target by kind of event, 1 for other kinds, before weights are normalised to a mean of 1.
        propensity: Column of the interactions with propensities, whose inverse is the weight of a target, and the largest such
            weight (`most`); empty for no such weights.
        algorithm: RL algorithm (`use`) and its options.
        weights: Weight by reward, for RL.
        mismatch: Correction for differences between rollout and trainer: correct, cap, stop_at_kl and staleness; empty for none.
        sparse_lr: Peak learning rate of sparse rows during RL, with the dense schedule; None freezes them.
        chunk: Positions of a supervised step, or prompts of an RL update, per forward pass on each rank.
        rolls_out: Whether rollouts take part. Then sparse rows are frozen, and trained weights are published to the rollouts.
        phases: The trainer's phase for training, and that for saving, loading and publishing.
        epochs: Number of epochs that the steps make up.
        optimizer: Options of the dense optimizer.
        align: Alignment of words and codes: items per step, weight of the loss, and the text column; empty for none.
        precision: Precision of the supervised losses.
        frozen_rows: Whether a supervised stage reads sparse rows without updating them.
        learner: Dotted path of the `StageLearner` class of the stage.
        continues: Folder of the checkpoint with whose dense optimizer the stage begins; "" for a new optimizer.
    """

    name: str
    _: KW_ONLY
    first: int
    steps: int
    users: int
    lr: Schedule
    base: float
    target: str | None = None
    tasks: Mapping[str, float] = field(default_factory=dict)
    rl_targets: bool = False
    ahead: int = 1
    smoothing: float = 0.0
    weight: Mapping[str, float] = field(default_factory=dict)
    propensity: Mapping[str, Any] = field(default_factory=dict)
    algorithm: Mapping[str, Any] = field(default_factory=dict)
    weights: Mapping[str, float] = field(default_factory=dict)
    mismatch: Mapping[str, Any] = field(default_factory=dict)
    sparse_lr: float | None = None
    chunk: int = CHUNK_TOKENS
    rolls_out: bool = False
    phases: tuple[str, str] = ("train", "train")
    epochs: float = 0.0
    optimizer: OptimizerOptions = field(default_factory=OptimizerOptions)
    align: Mapping[str, Any] = field(default_factory=dict)
    precision: PrecisionOptions = field(default_factory=PrecisionOptions)
    frozen_rows: bool = False
    learner: str = SUPERVISED
    continues: str = ""


@dataclass(frozen=True, slots=True)
class UpdateRequest:
    """Settings of one RL step besides beams and scores. The controller passes them unchanged to each trainer rank.

    Attributes:
        stage: The RL stage.
        step: Number of the step in the stage.
        weights: Weight of each reward at this step; None for those of the stage.
        version: Version under which the weights before the step were published, if the stage measures `mismatch`.
    """

    stage: StageSetup
    step: int
    weights: Mapping[str, float] | None = None
    version: int | None = None


def make_ranks_name(stage: str, checkpoint: str) -> str:
    """Return the name of the file in RUN/results with what the validation of a checkpoint of a stage found for each event."""
    return f"{stage}.valid.{checkpoint}.npz"
