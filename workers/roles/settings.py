"""What a run tells its workers once: plain data, no torch, no Ray.

Everything here comes from the scenario and the plan; a worker never sees the scenario itself.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from nonet.deadlines import DEFAULTS, Deadlines
from nonet.errors import ConfigError

if TYPE_CHECKING:
    from nonet.models.generation import Corpus

SUPERVISED = "nonet.workers.roles.learners:SupervisedLearner"
CHUNK_TOKENS = 1 << 14  # positions at once where a scenario does not say


@dataclass(frozen=True, slots=True)
class SceneSetup:
    """Scenes of an RL stage: values `names` of a column of the events ("event": their kind); all others are one scene more.

    catalogue  of each scene, the others' last: a condition on items, or a column of them that is true; None for all items
    weights    of each named scene: what its rewards count instead
    """

    column: str
    names: tuple[str, ...]
    catalogue: tuple[str | None, ...]
    weights: tuple[Mapping[str, float], ...]

    def of(self, seq: Any, events: np.ndarray) -> np.ndarray:
        """The scene of each event [n] int64, `len(names)` for what none of them names. Raises ConfigError without the column."""
        from nonet.samples.tables import as_numbers

        if not self.names:
            return np.zeros(len(events), np.int64)
        if self.column == "event":
            known = [seq.event_names.index(name) if name in seq.event_names else -1 for name in self.names]
            values = seq.event[events]
        else:
            if self.column not in seq.columns:
                there = ", ".join(("event", *seq.columns))
                raise ConfigError(f"scenes.column: events have no {self.column!r}; they have {there}")
            known, values = as_numbers(np.array(self.names)).tolist(), seq.columns[self.column][events]
        scene = np.full(len(events), len(self.names), np.int64)
        for index, value in enumerate(known):
            scene[values == value] = index
        return scene

    def weights_of(self, reward: str, weight: float, scene: np.ndarray) -> np.ndarray:
        """What a reward counts in each scene [n] float64, `weight` where the scene says nothing."""
        each = np.array([*(own.get(reward, weight) for own in self.weights), weight], np.float64)
        return each[scene]

    def allowed(self, items: Any) -> np.ndarray | None:
        """Which items [C, I] each scene's catalogue has; None where all have all of them. Raises ConfigError."""
        if not any(self.catalogue):
            return None
        rows = [_allowed(items, text) for text in self.catalogue]
        for text, row in zip(self.catalogue, rows, strict=True):
            if not row.any():
                raise ConfigError(
                    f"catalogue: {text!r} holds for none of the {len(row)} items: nothing is left"
                )
        return np.stack(rows)


def _allowed(items: Any, text: str | None) -> np.ndarray:
    """Items [I] that a condition holds for, or whose column of this name is true or above 0."""
    from nonet.samples.tables import match_rows

    if text is None:
        return np.ones(len(items), bool)
    if text in items.column_names:
        values = items[text].to_numpy(zero_copy_only=False)
        return np.array([bool(value) and value == value for value in values], bool)
    return match_rows(text, items, name="catalogue")


@dataclass(frozen=True, slots=True)
class RunSetup:
    """Seed, history length, model configuration, sparse tables (name -> TableSpec arguments), feature -> table,
    of tables whose features are bags how a bag is pooled, how many batches are in flight (None: the trainer decides),
    of tables in tiers what each may hold, how long waits may take, the codec of rows between processes, the train engine and
    the source of the trainers' samples, each with its options, how votes of a memory are taken (None: without one), what is
    joined to samples (JoinSetup), how dense weights move (publish, bucket, block, shard), and scenes by RL stage."""

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
    joins: Sequence[Any] = ()
    stored: Any = None
    weights: Mapping[str, Any] = field(default_factory=dict)
    scenes: Mapping[str, SceneSetup] = field(default_factory=dict)

    def corpus(self, folders: Mapping[str, str]) -> Corpus:
        """The run's artifacts, opened; events of users get what is joined to them."""
        from nonet.models.generation import Corpus
        from nonet.samples.stores import StoreJoins

        corpus = Corpus.load(folders).attach_store(self.stored)
        return corpus.attach_joins(StoreJoins(self.joins)) if self.joins else corpus

    def specs(self) -> dict[str, Any]:
        """The TableSpec of each sparse table."""
        from nonet.embedding.tables import TableSpec

        return {name: TableSpec(**spec) for name, spec in self.tables.items()}

    def voters(self, corpus: Any) -> Any:
        """Who votes in a memory over a corpus; None without one."""
        from nonet.models.generation import VoteOptions, Voters

        if self.memory is None:
            return None
        return Voters(corpus.transitions, corpus.trie, VoteOptions(**self.memory))

    def feature_dims(self) -> dict[str, int]:
        """Width of each sparse feature."""
        return {feature: self.tables[table]["dim"] for feature, table in self.features.items()}


@dataclass(frozen=True, slots=True)
class RolloutRequest:
    """How prompts are answered; it passes unchanged from the controller to each rollout rank.

    Attributes:
        stage: Name of the RL stage.
        step: Number of the step in the stage.
        width: Beams per prompt.
        version: Published version of the weights that must answer.
        chunk: Prompts that are computed at once; None for all of them.
        draw: Options of a rollout that draws; empty for the `width` most likely items.
        blind: Whether beams leave out what the user took next, as where lists are served.
    """

    stage: str
    step: int
    width: int
    version: int
    chunk: int | None = None
    draw: Mapping[str, Any] = field(default_factory=dict)
    blind: bool = False


@dataclass(frozen=True, slots=True)
class LearningRate:
    """peak, share of the steps spent warming up, then cosine or linear decay to zero, or none."""

    peak: float
    warmup: float = 0.05
    decay: str = "cosine"

    def at(self, step: int, steps: int) -> float:
        """The rate of a step in [0, steps)."""
        warm = max(1, round(self.warmup * steps))
        if step < warm:
            return self.peak * (step + 1) / warm
        left = (steps - step) / max(1, steps - warm)
        shape = {"cosine": 0.5 * (1 - math.cos(math.pi * left)), "linear": left}
        return self.peak * shape.get(self.decay, 1.0)


@dataclass(frozen=True, slots=True)
class StageSetup:
    """One training stage.

    first      global number of the stage's first step: sparse steps count over the whole run
    steps      of the whole stage; users: rows (users or prompts) a global step; epochs: how many its steps are
    lr         peak, warmup share and decay of the dense rate
    base       the dense rate at which tables learn at their own: the first stage's peak; sparse rates follow the dense one
    ahead      how many events ahead are targets too, weighted 1 / distance
    smoothing  share of a target that the legal siblings of its codes get
    weight     what a target counts by its kind of event, 1 for kinds left out, before they are made 1 on average
    propensity column of the interactions and the largest inverse (`most`): targets count 1 / its values too; empty: they do not
    target     name of the stage's target mask in the sequences, None for all events
    frozen_rows whether a supervised stage reads sparse rows and does not move them
    rl_targets whether its targets are not training events but those held out for RL, of the users that RL trains on
    algorithm  of RL: `use`, and its options; weights: reward -> weight
    mismatch   of RL: correct, cap, stop_at_kl and staleness; empty: rollouts are taken at their word
    sparse_lr  of RL: the peak rate that rows learn at, on the dense schedule; None: they are frozen
    rolls_out  whether rollouts work in it: then its rows are frozen, and what it trains is published to them
    align      of a stage that aligns words and codes: items a step, what they count (weight), the column of their words
    optimizer  of the dense part: use, weight_decay, clip, and clip_rows: whether rows are cut with it
    precision  in what supervised losses are computed: use, scale, grow_every
    learner    dotted path of the StageLearner that trains the stage
    phases     of the trainer: when it learns; when it is saved, loaded or published
    chunk      of a supervised step the positions, of an RL update the prompts that are computed at once, on each rank
    """

    name: str
    first: int
    steps: int
    users: int
    lr: Mapping[str, Any]
    base: float
    target: str | None = None
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
    optimizer: Mapping[str, Any] = field(default_factory=dict)
    align: Mapping[str, Any] = field(default_factory=dict)
    precision: Mapping[str, Any] = field(default_factory=dict)
    frozen_rows: bool = False
    learner: str = SUPERVISED


@dataclass(frozen=True, slots=True)
class UpdateRequest:
    """What one RL step learns with, besides beams and scores; it passes unchanged from the controller to each trainer rank.

    Attributes:
        stage: The RL stage.
        step: Number of the step in the stage.
        weights: Weight of each reward at this step; None for those of the stage.
        version: Version as which the weights before the step were published, where the stage measures `mismatch`.
    """

    stage: StageSetup
    step: int
    weights: Mapping[str, float] | None = None
    version: int | None = None
