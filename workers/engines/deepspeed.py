"""DeepSpeed ZeRO: `zero` is the stage, and weights are whole between steps.

Ranks divide the optimizer under stage 1, under stage 2 also gradients while they are summed, under stage 3 also the
copy of the weights. `deepspeed:` passes keys on to DeepSpeed's own configuration.
"""

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from nonet.suggest import suggest_sentence
from nonet.workers.engines.base import EngineOptions, Options, TrainEngine

# Keys of https://www.deepspeed.ai/docs/config-json that a user may set, and those inside `zero_optimization`.
_USER_KEYS = (
    "zero_optimization",
    "comms_logger",
    "wall_clock_breakdown",
    "flops_profiler",
    "steps_per_print",
)
_USER_ZERO_KEYS = ("reduce_bucket_size", "allgather_bucket_size", "allgather_partitions", "overlap_comm")
# Upper limit of what a step of ZeRO 3 gathers at once, in units of the whole weights: a parameter, its gradient and the
# bucket that is reduced.
_GATHERED = 0.5


class DeepspeedOptions(EngineOptions):
    """Options of the engine in a scenario."""

    zero: Annotated[int, Field(ge=1, le=3)] = 1
    offload: Annotated[
        Literal["none", "optimizer"],
        Field(description="`optimizer`: moments and fp32 weights are in host memory, and are stepped there"),
    ] = "none"
    deepspeed: Annotated[
        dict[str, Any], Field(description="keys of DeepSpeed's own configuration, such as zero_optimization")
    ] = {}

    @model_validator(mode="after")
    def _check_keys(self) -> "DeepspeedOptions":
        """Check that the user may set all keys."""
        _check_keys(self.deepspeed, _USER_KEYS, "deepspeed")
        _check_keys(
            self.deepspeed.get("zero_optimization") or {}, _USER_ZERO_KEYS, "deepspeed.zero_optimization"
        )
        return self


def _check_keys(options: Options, allowed: tuple[str, ...], key_path: str) -> None:
    """Raise ValueError for a key that is not allowed."""
    for key in options:
        if key not in allowed:
            raise ValueError(
                f"{key_path}: there is no key {key!r} to pass; there are {', '.join(allowed)}.{suggest_sentence(key, allowed)}"
            )


def _get_division(options: Options) -> int:
    """Return 1: ranks divide the optimizer, while weights and gradients of the model are whole between steps."""
    return 1


def _count_copies(options: Options, ranks: int) -> tuple[float, float]:
    """Return the copies that a rank keeps and those that a step adds, in units of the whole weights.

    ZeRO 1 and 2 keep flat weights and a rank's part of them in fp32; a step adds ZeRO's gradients and a rank's part
    of them. ZeRO 3 keeps a rank's part of the weights, of their fp32 copy and of the gradients; a step adds some
    whole parameters, then the temporaries of AdamW for the part.
    """
    if ranks == 1:
        return 0.0, 0.0
    part, offloaded = 1 / ranks, _has_host_optimizer(options)
    if options["zero"] == 3:
        return (part if offloaded else 3 * part), max(_GATHERED, 0.0 if offloaded else 3 * part)
    return (1.0 if offloaded else 1 + part), 1 + part


def _has_host_optimizer(options: Options) -> bool:
    """Return whether the optimizer is in host memory."""
    return options["offload"] == "optimizer"


def _find_unsupported(options: Options, device: str, ranks: int) -> str | None:
    """Return which combination of options, device and number of ranks is not supported, or None."""
    if not _has_host_optimizer(options):
        return None
    if device == "cpu":
        return "offload: optimizer on device cpu, where the optimizer is in host memory anyway (say offload: none)"
    if ranks == 1:
        return "offload: optimizer with 1 trainer, where DeepSpeed divides nothing (say workers: 2 or offload: none)"
    return None


SPEC = TrainEngine(
    "nonet.workers.engines._deepspeed:Deepspeed",
    DeepspeedOptions,
    divides=_get_division,
    copies=_count_copies,
    aside=_has_host_optimizer,
    unsupported=_find_unsupported,
    optimizers=("adamw",),
    needs="deepspeed",
)
