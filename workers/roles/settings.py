"""What a run tells its workers once: plain data, no torch, no Ray.

Everything here comes from the scenario and the plan; a worker never sees the scenario itself.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from nonet.deadlines import DEFAULTS, Deadlines

if TYPE_CHECKING:
    from nonet.models.generation import Corpus

CHUNK_TOKENS = 1 << 14  # positions at once where a scenario does not say


@dataclass(frozen=True, slots=True)
class RunSetup:
    """Seed, history length, model configuration, sparse tables (name -> TableSpec arguments), feature -> table,
    of tables whose features are bags how a bag is pooled, how many batches are in flight (None: the trainer decides),
    of tables in tiers what each may hold, how long waits may take, the codec of rows between processes, the train engine and
    the source of the trainers' samples, each with its options, how votes of a memory are taken (None: without one), and what is
    joined to samples (JoinSetup)."""

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

    def corpus(self, folders: Mapping[str, str]) -> Corpus:
        """The run's artifacts, opened; events of users get what is joined to them."""
        from nonet.models.generation import Corpus
        from nonet.samples.stores import Joins

        corpus = Corpus.load(folders).stored_in(self.stored)
        return corpus.with_joins(Joins(self.joins)) if self.joins else corpus

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
    algorithm  of RL: `use`, and its options; weights: reward -> weight
    sparse_lr  of RL: the peak rate that rows learn at, on the dense schedule; None: they are frozen
    rolls_out  whether rollouts work in it: then its rows are frozen, and what it trains is published to them
    align      of a stage that aligns words and codes: items a step, what they count (weight), the column of their words
    optimizer  of the dense part: use, weight_decay, clip, and clip_rows: whether rows are cut with it
    precision  in what supervised losses are computed: use, scale, grow_every
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
    ahead: int = 1
    smoothing: float = 0.0
    weight: Mapping[str, float] = field(default_factory=dict)
    propensity: Mapping[str, Any] = field(default_factory=dict)
    algorithm: Mapping[str, Any] = field(default_factory=dict)
    weights: Mapping[str, float] = field(default_factory=dict)
    sparse_lr: float | None = None
    chunk: int = CHUNK_TOKENS
    rolls_out: bool = False
    phases: tuple[str, str] = ("train", "train")
    epochs: float = 0.0
    optimizer: Mapping[str, Any] = field(default_factory=dict)
    align: Mapping[str, Any] = field(default_factory=dict)
    precision: Mapping[str, Any] = field(default_factory=dict)
