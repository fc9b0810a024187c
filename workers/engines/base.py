"""TrainEngine: the interface of engines, which step a trainer's dense weights, and the facts about them that a plan reads.

A trainer joins its process group, builds its model, makes the engine from both, and calls it in this order:

    restart                            when a stage begins
    backward*, clip, step              in a training step; a rank with an empty share may call no `backward`, and the last
                                       one may be `backward_last`
    describe_weights, gather_weights*  to publish a version for rollouts, bucket by bucket
    snapshot, load                     to write a checkpoint, while later steps run, and to read one
    change_process_group               after ranks were added or removed: the model stays, a checkpoint may be loaded then

Every rank makes every call except `backward` at the same time, so all of them may be collective. A model with the attribute
`division` (`division/divided_model.py`) has divided weights: its passes are collective too, and every rank takes equally many.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Protocol

from pydantic import Field, model_validator

from nonet.contracts import mark_optional
from nonet.options import Positive, Rate, StrictModel
from nonet.plugins import PluginRegistry, load_heavy
from nonet.replaceable import Replaceable
from nonet.verbs import ALL_VERBS, SupportedVerbs

if TYPE_CHECKING:
    import torch
    from torch import Tensor
    from torch.nn import Module

    from nonet.workers import SaveOptions
    from nonet.workers.runtime import Membership

Options = Mapping[str, Any]


class OptimizerOptions(StrictModel):
    """Options of a stage's dense optimizer. A single word, such as `optimizer: adamw`, means `{use: adamw}`."""

    use: Annotated[
        Literal["muon", "adamw", "keras"],
        Field(
            description="muon for hidden matrices and AdamW for the rest, AdamW for all, or the optimizer of a Keras model; by "
            "default muon, or adamw if the engine does not support muon"
        ),
    ] = "muon"
    weight_decay: Annotated[float, Field(ge=0, lt=1)] = 0.1
    clip: Annotated[Rate, Field(description="the norm to which gradients are clipped")] = 1.0
    clip_rows: Annotated[
        bool,
        Field(
            description="whether the norm is that of dense and sparse gradients together, and both are clipped"
        ),
    ] = False

    @model_validator(mode="before")
    @classmethod
    def _from_word(cls, value: Any) -> Any:
        return {"use": value} if isinstance(value, str) else value


class PrecisionOptions(StrictModel):
    """The precision in which a stage's losses are computed; weights, gradients and optimizer stay fp32."""

    use: Literal["fp32", "bf16", "fp16"] = "fp32"
    scale: Annotated[
        Rate,
        Field(description="the initial loss scale of fp16; it is halved when gradients overflow"),
    ] = 65536.0
    grow_every: Annotated[
        Positive, Field(description="applied steps after which the loss scale is doubled")
    ] = 2000


class EngineRuntime(Protocol):
    """The runtime class of an engine, constructed with (options, model, learning, member).

    Attributes:
        model: The module that computes losses (a SidModel or a click model): the one that was given, or a wrapped
            one.
        member: The membership in the trainers' process group; `member.trainers` is None for a single rank.
        learning: Optimizer settings of the stage, set before `restart` or `load`.
    """

    model: Any
    member: Membership
    learning: OptimizerOptions

    def change_process_group(self, member: Membership) -> None:
        """Continue in another process group, between steps."""
        ...

    def restart(self) -> None:
        """Create a new optimizer over the current weights, and set gradients to zero."""
        ...

    def backward(self, loss: Tensor) -> None:
        """Add the gradients of a loss that was divided by the count of all ranks, so gradients are summed over ranks."""
        ...

    @mark_optional
    def backward_last(self, loss: Tensor) -> None:
        """Do what `backward` does for the last loss of a step on this rank, and begin to sum gradients over ranks.

        Optional: without it, `backward` is called. Until `clip`, the first gradient of `collect_gradients` may still be set
        to NaN, which all ranks must then see. It is not called if the loss is scaled.
        """
        ...

    def clip(self, sparse_norm: float = 0.0) -> float:
        """Sum the gradients of all ranks and clip them to `learning.clip`. Returns their norm before clipping.

        Args:
            sparse_norm: Norm of the sparse gradients of all ranks, which is combined with the dense norm if a stage
                says `clip_rows`.
        """
        ...

    def step(self, lr: float) -> None:
        """Update the weights with a learning rate, and set gradients to zero."""
        ...

    @mark_optional
    def collect_gradients(self) -> Sequence[Tensor]:
        """Return this rank's gradients, to be scaled in place before `clip`.

        Optional: without it, they are the gradients of the parameters.
        """
        ...

    @mark_optional
    def skip(self) -> None:
        """Drop the gradients of a step that is skipped, after `clip`.

        Optional: without it, the gradients of the parameters are set to zero.
        """
        ...

    def describe_weights(self) -> dict[str, Tensor]:
        """Return names, shapes and dtypes of the whole weights as meta tensors, in the same order on every rank."""
        ...

    def gather_weights(self, names: Sequence[str]) -> dict[str, Tensor]:
        """Return some of the whole weights by name; only the result of rank 0 is used."""
        ...

    def snapshot(self, saving: SaveOptions) -> Callable[[Path], list[Path]]:
        """Snapshot the state: copied to host memory, or by reference if no step runs until it is written (`saving.copy`).

        Returns:
            A function that writes this rank's files into a folder, on any thread, and returns their paths:
            model.safetensors, or its shards and their index, and those of the optimizer.
        """
        ...

    def load(self, folder: Path, *, optimizer: bool) -> None:
        """Read a snapshot that any number of ranks wrote; the optimizer too if the same stage continues."""
        ...

    def device_tensors(self) -> Iterable[Tensor]:
        """Return the tensors that this rank keeps on its device between steps: weights, gradients, optimizer states."""
        ...


class EngineOptions(StrictModel):
    """Options of every shipped engine."""

    recompute: Annotated[
        bool,
        Field(description="keep no activations of the model's blocks: the backward pass makes them again"),
    ] = False
    compile: Annotated[
        bool,
        Field(description="the model's blocks by torch.compile where they learn, in any length of sequence"),
    ] = False


def _divide_nothing(options: Options) -> int:
    return 0


def _have_no_axes(options: Options) -> Mapping[str, int]:
    return {}


def _count_no_copies(options: Options, ranks: int) -> tuple[float, float]:
    return 0.0, 0.0


def _count_no_buckets(options: Options, ranks: int) -> float:
    return 0.0


def _accept_all(options: Options, device: str, ranks: int) -> str | None:
    return None


def _return_false(options: Options) -> bool:
    return False


@dataclass(frozen=True)
class TrainEngine:
    """A kind of train engine.

    Attributes:
        cls: The EngineRuntime, or its dotted path `package.module:Name`.
        options: Its keys in a scenario.
        divides: Returns, for its options, what ranks divide among them: 0 nothing, 1 the optimizer, 2 gradients too,
            3 weights too.
        axes: Returns, for its options, the sizes of the axes of its device mesh by name, besides the axis `shard`, whose
            ranks divide what `divides` says.
        keeps_around: Returns, for its options, whether it divides the blocks alone if `divides` is 3, so that frozen weights and
            those around the blocks are whole on every rank.
        copies: Returns, for its options and the number of ranks, the fp32 copies of a rank's part of the weights that it keeps
            besides the model, and those that a step makes when gradients are no longer needed.
        bucket_bytes: Returns, for its options and the number of ranks, the bytes of the fp32 copies of gradients of bf16 or
            fp16 that a step makes at a time, if all gradients have as many.
        step_bytes: Returns, for its options and the number of ranks, the bytes of the buffers of a step in any precision, if
            the weights have as many.
        aside: Returns, for its options, whether a rank keeps the optimizer in host memory.
        unsupported: Returns, for its options, the kind of device and the least number of ranks, what it does not
            support, or None.
        optimizers: Optimizers of a stage that it can step.
        needs: Module that must be installed, by the extra of the same name.
        verbs: The verbs that work for runs with the engine.
    """

    cls: str | Callable[..., EngineRuntime]
    options: type[StrictModel] = StrictModel
    divides: Callable[[Options], int] = _divide_nothing
    axes: Callable[[Options], Mapping[str, int]] = _have_no_axes
    keeps_around: Callable[[Options], bool] = _return_false
    copies: Callable[[Options, int], tuple[float, float]] = _count_no_copies
    bucket_bytes: Callable[[Options, int], float] = _count_no_buckets
    step_bytes: Callable[[Options, int], float] = _count_no_buckets
    aside: Callable[[Options], bool] = _return_false
    unsupported: Callable[[Options, str, int], str | None] = _accept_all
    optimizers: tuple[str, ...] = ("muon", "adamw")
    needs: str | None = None
    verbs: SupportedVerbs = ALL_VERBS


ENGINES = PluginRegistry("engine", TrainEngine, "nonet.workers.engines", contract={"cls": EngineRuntime})


class Engine(Replaceable):
    """The engine that steps the trainers' dense weights."""

    default: ClassVar[str] = "ddp"
    registry: ClassVar[PluginRegistry[Any] | None] = ENGINES

    def get_axes(self) -> Mapping[str, int]:
        """Return the sizes of the axes of the engine's device mesh by name, besides the axis `shard`."""
        return self.spec.axes(self.get_options())


def can_divide_model(config: Options) -> bool:
    """Return whether the engine that `config["use"]` names divides the weights of the model itself among several ranks."""
    return ENGINES.get(config.get("use", "ddp")).divides(config) == 3


def get_axes(config: Options) -> Mapping[str, int]:
    """Return the sizes of the axes of an engine's device mesh by name, besides the axis `shard`.

    Args:
        config: `use` and the options of the engine.
    """
    return ENGINES.get(config.get("use", "ddp")).axes(config)


def build_engine(
    config: Options, build: Callable[[], Module], device: torch.device, member: Membership
) -> EngineRuntime:
    """Make the engine of a model that is not built yet, with the optimizer settings of `OptimizerOptions`.

    An engine with the class method `build` is called with (options, build, device, learning, member) instead of its
    constructor, so that it need not hold the whole model.

    Args:
        config: `use` and the options of the engine.
        build: Builds the model on the host.
        device: The device of the model.
        member: The process group.

    Raises:
        ConfigError: The engine is unknown, or its options do not fit the model.
    """
    cls = load_heavy(ENGINES.get(config.get("use", "ddp")).cls)
    if not hasattr(cls, "build"):
        return make_engine(config, build().to(device), member)
    options = {key: value for key, value in config.items() if key != "use"}
    kept = dict(options)

    def build_prepared() -> Module:
        model = build()
        load_heavy("nonet.workers.engines._blocks:prepare")(model, kept)
        return model

    return cls.build(options, build_prepared, device, OptimizerOptions(), member)


def make_engine(
    config: Options, model: Module, member: Membership, learning: OptimizerOptions | None = None
) -> EngineRuntime:
    """Make the engine that `config["use"]` names, ddp by default.

    Args:
        config: `use` and the options of the engine.
        model: The model, on its device.
        member: The process group.
        learning: Optimizer settings; by default those of `OptimizerOptions`.

    Raises:
        ConfigError: The engine is unknown, or its options do not fit the model.
    """
    options = dict(config)
    cls = load_heavy(ENGINES.get(options.pop("use", "ddp")).cls)
    load_heavy("nonet.workers.engines._blocks:prepare")(model, options)
    return cls(options, model, learning or OptimizerOptions(), member)
