"""ModelSpec: what plans and runs know of a model before torch is there. A model is a folder `models/<name>/` with a `spec.py`.

Sizes are exact where a test counts the real module's parameters, else estimated and said to be so.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from nonet.options import StrictModel
from nonet.plugins import PluginRegistry, load_heavy

Options = Mapping[str, Any]

NATS = "nats"
"""The measure that every validation has: the mean negative log-likelihood of held-out events."""


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What a model is built into: levels and codes a level of the semantic ids, events of a history, width of every feature."""

    levels: int
    codes: int
    history: int
    features: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ModelSize:
    """A model's shape. `levels` and `codes` are those of the semantic ids; `assumed` says what was guessed, "" if nothing;
    `frozen`: parameters that nothing learns; `matrices`: those between hidden states, of which Muon keeps one moment, 0 where
    that is not known.
    """

    parameters: int
    layers: int
    width: int
    feed_forward: int
    kv_width: int
    vocabulary: int
    levels: int
    positions_an_event: int
    weight_bytes: int
    assumed: str = ""
    depth_vectors: int = 0
    frozen: int = 0
    matrices: int = 0

    @property
    def learned(self) -> int:
        """Parameters that have gradients and an optimizer."""
        return self.parameters - self.frozen

    def activation_bytes(self, tokens: float) -> float:
        """Kept for the backward pass of this many positions; attention without its score matrix.

        A layer keeps about 10 vectors of the width, 2 of the feed-forward and 2 of keys and values; the head keeps its
        logits twice in fp32 (softmax and gradient). `depth_vectors` are those that a level of the depth decoder adds.
        """
        layer = 10 * self.width + 2 * self.feed_forward + 2 * self.kv_width
        numbers = self.layers * layer + self.levels * self.depth_vectors * self.width
        return tokens * (numbers * self.weight_bytes + 8 * self.vocabulary)

    def kv_bytes(self, tokens: float) -> float:
        """Keys and values of this many cached tokens."""
        return tokens * self.layers * 2 * self.kv_width * self.weight_bytes


class ModelSpec:
    """A model, by default one that recommends by semantic ids with the shipped roles.

    options      its keys in a scenario
    build        (options, codes, features, seed) -> module, or the dotted path of that function
    roles        classes of the roles that train, rank and prepare data for it, by role, where they are not the shipped ones
    learner      dotted path of the learner of stages whose kind names none, where it is not that of histories of users
    features     sparse features it reads; None: whatever tables say
    makes_lists  whether it recommends: then there are rollouts, RL, and a policy on repeats
    rows         what a step's batch counts: "users" or "events"
    cuts_steps   whether trainers compute a step in chunks
    aligns       whether stages can teach it what semantic ids mean in words: the module has `alignment_loss(sids, texts)`
    exports      (module, options, seed, folder): what an export holds besides, in the form of its own library; or the dotted path
    blocks       whether it has `blocks`, which an engine may recompute or compile
    ahead        how many events ahead its stages teach where they do not say
    lower_is_better  of its metrics, those of which less is better
    runs         whether this version runs it, or only plans it
    """

    options: ClassVar[type[StrictModel]] = StrictModel
    build: ClassVar[Any] = ""
    roles: ClassVar[Mapping[str, Any]] = {}
    learner: ClassVar[str] = ""
    features: ClassVar[tuple[str, ...] | None] = None
    makes_lists: ClassVar[bool] = True
    rows: ClassVar[str] = "users"
    cuts_steps: ClassVar[bool] = True
    blocks: ClassVar[bool] = True
    ahead: ClassVar[int] = 3
    aligns: ClassVar[bool] = False
    exports: ClassVar[Any] = ""
    runs: ClassVar[bool] = True
    lower_is_better: ClassVar[frozenset[str]] = frozenset()

    def size(self, options: Options, around: Surroundings) -> ModelSize:
        """How large it is."""
        raise NotImplementedError

    def built_with(self, options: Options, around: Surroundings) -> dict[str, Any]:
        """Options that its builder takes."""
        return dict(options)

    def base_sha256(self, options: Options) -> str | None:
        """Return the SHA-256 of the folder of weights that it is built on; None where it is built on none.

        Raises:
            ConfigError: The folder is not there.
        """
        return None

    def baselines(self) -> Sequence[str]:
        """Names of what it is measured against where `evaluate.baselines` is left out."""
        return ("popularity", "transition_counter")

    def check_metric(self, metric: str, width: int) -> None:
        """Raise ConfigError for a metric that it cannot be measured by; `width`: of the evaluator's beams."""
        from nonet.errors import ConfigError
        from nonet.models.ranking import parse_metric

        _, k = parse_metric(metric)
        if k and k > width:
            raise ConfigError(
                f"evaluate.width: a beam of {width} recommends {width} items, which {metric} looks beyond; "
                f"set evaluate.width to {k} or more, or ask for fewer items"
            )

    def check(self, scenario: Any) -> None:
        """Raise ConfigError where a scenario asks what the model cannot do."""

    def unsupported(self, scenario: Any) -> Iterator[str]:
        """Keys of a scenario that can be planned and not run with it."""
        return iter(())


MODELS = PluginRegistry("model", ModelSpec, "nonet.models", "spec")


def build_model(config: Options, codes: Sequence[int], features: Mapping[str, int], seed: int) -> Any:
    """The module that `config["use"]` names (sid_decoder when left out), with weights drawn from `seed`.

    codes: K of every level, collision level included. features: sparse feature -> width of its rows. With `memory`, the
    voters of one, it also has its weights (`nonet.models.generation.memory`). Raises ConfigError.
    """
    options = dict(config)
    memory = options.pop("memory", None)
    model = load_heavy(MODELS.get(options.pop("use", "sid_decoder")).build)(options, codes, features, seed)
    if memory:
        row_width = features["item"] if "nearest" in memory else None
        load_heavy("nonet.models.generation:attach")(model, seed, row_width)
    return model
