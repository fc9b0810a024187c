"""TrainEngine: how a trainer's dense part steps; facts that a plan reads, and the class that trainers make.

A trainer joins its process group, builds its model, makes the engine from both, and calls it in this order:

    restart                          as a stage begins
    backward*, clip, step            a training step; a rank whose share is empty may call no `backward`
    outline, tensors*                a version for rollouts, bucket by bucket
    snapshot, load                   a commit, written beside later steps
    change_process_group             ranks came or went: the model stays, a commit may be loaded after it

Every rank makes every call but `backward` at the same time, so all of them may be collective.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Protocol

from pydantic import Field

from nonet.options import StrictModel
from nonet.plugins import PluginRegistry, load_heavy

if TYPE_CHECKING:
    from torch import Tensor
    from torch.nn import Module

    from nonet.workers import SaveOptions
    from nonet.workers.runtime import Membership

Options = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class OptimizerSettings:
    """How gradients become moves: of muon (and AdamW for what is no hidden matrix) or adamw. The rate comes with a step.
    `clip_rows`: the norm is that of dense and sparse gradients together, and both are cut."""

    weight_decay: float = 0.1
    clip_norm: float = 1.0
    optimizer: str = "muon"
    clip_rows: bool = False


def parse_optimizer_settings(optimizer_options: Options) -> OptimizerSettings:
    """Of a stage's `optimizer:` keys; left out, what they are by default."""
    names = {"use": "optimizer", "clip": "clip_norm"}
    return OptimizerSettings(**{names.get(key, key): value for key, value in optimizer_options.items()})


class EngineRuntime(Protocol):
    """The class behind an engine, made with (options, model, learning, member).

    model   what losses are computed with (a SidModel, or a click model): the one that was given, or what the engine made of it
    member  this rank's place in the trainers' process group; `member.trainers` is the group, None for a rank alone
    learning  as a stage says it, set before `restart` or `load`
    """

    model: Any
    member: Membership
    learning: OptimizerSettings

    def change_process_group(self, member: Membership) -> None:
        """Go on in another process group, between steps."""
        ...

    def restart(self) -> None:
        """A fresh optimizer over the weights as they are, and gradients at zero."""
        ...

    def backward(self, loss: Tensor) -> None:
        """Add the gradients of a loss, which is divided by the count of all ranks already: gradients are summed over them."""
        ...

    def clip(self, sparse_norm: float = 0.0) -> float:
        """Gradients of all ranks added up, and cut to `learning.clip_norm`; their norm before.

        `rows`: the norm of the sparse gradients of all ranks, which counts with theirs where a stage says `clip_rows`.
        """
        ...

    def step(self, lr: float) -> None:
        """Move the weights at this rate; gradients are at zero after it."""
        ...

    def collect_gradients(self) -> Sequence[Tensor]:
        """Return this rank's gradients as they are, to be scaled in place before `clip`; an engine may leave this out, then
        they are the parameters' own."""
        ...

    def skip(self) -> None:
        """Drop the gradients of a step that is not taken, after `clip`; an engine may leave this out, then the parameters' own
        gradients are set to zero."""
        ...

    def describe_weights(self) -> dict[str, Tensor]:
        """Names, shapes and dtypes of the whole weights, as meta tensors; the same on every rank, in the same order."""
        ...

    def gather_weights(self, names: Sequence[str]) -> dict[str, Tensor]:
        """Some of the whole weights by name; what other ranks than 0 give is not looked at."""
        ...

    def snapshot(self, saving: SaveOptions) -> Callable[[Path], list[Path]]:
        """The state as it is, copied to host memory, or as it lies where nothing steps until it is written (`saving.copy`).
        Called with a folder, on any thread, it writes this rank's files.

        It returns their paths: model.safetensors, or its shards and their index, and the optimizer's, each rank its own.
        """
        ...

    def load(self, folder: Path, *, optimizer: bool) -> None:
        """Read what a snapshot wrote, by whatever number of ranks; the optimizer too when the same stage goes on."""
        ...

    def list_device_tensors(self) -> Iterable[Tensor]:
        """What this rank keeps on its device between steps: weights, gradients, optimizer."""
        ...


class EngineOptions(StrictModel):
    """What every shipped engine has."""

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


def _count_no_copies(options: Options, ranks: int) -> tuple[float, float]:
    return 0.0, 0.0


def _count_no_buffer(options: Options, ranks: int) -> float:
    return 0.0


def _accept_all(options: Options, device: str, ranks: int) -> str | None:
    return None


def _keep_on_device(options: Options) -> bool:
    return False


@dataclass(frozen=True)
class TrainEngine:
    """One engine.

    cls      the EngineRuntime, or its dotted path `package.module:Name`
    options  its keys in a scenario
    divides  what ranks divide among them, by its options: 0 nothing, 1 the optimizer, 2 gradients too, 3 weights too
    copies   by its options and the number of ranks: copies of the whole weights that a rank keeps beside the model, and those
             that a step makes besides
    buffer   by its options and the number of ranks: fp32 gradients of all weights that a step has besides `copies`
    aside    by its options, whether a rank keeps the optimizer in host memory
    runs     whether this version runs it, or only plans it; unsupported: by its options, the kind of device and the least number
             of ranks, what it does not do
    optimizers  those of a stage that it steps
    needs    a module of the extra of its name, which must be installed
    """

    cls: str | Callable[..., EngineRuntime]
    options: type[StrictModel] = StrictModel
    divides: Callable[[Options], int] = _divide_nothing
    copies: Callable[[Options, int], tuple[float, float]] = _count_no_copies
    buffer: Callable[[Options, int], float] = _count_no_buffer
    aside: Callable[[Options], bool] = _keep_on_device
    runs: bool = True
    unsupported: Callable[[Options, str, int], str | None] = _accept_all
    optimizers: tuple[str, ...] = ("muon", "adamw")
    needs: str | None = None


ENGINES = PluginRegistry("engine", TrainEngine, "nonet.workers.engines")


def make_engine(
    config: Options, model: Module, member: Membership, learning: OptimizerSettings | None = None
) -> EngineRuntime:
    """The engine that `config["use"]` names (ddp when left out) over a model that is on its device. Raises ConfigError."""
    options = dict(config)
    cls = load_heavy(ENGINES.get(options.pop("use", "ddp")).cls)
    load_heavy("nonet.workers.engines._blocks:prepare")(model, options)
    return cls(options, model, learning or OptimizerSettings(), member)
