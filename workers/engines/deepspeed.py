"""DeepSpeed ZeRO: `zero` is the stage.

Ranks divide the optimizer under stage 1, under stage 2 also gradients once they are summed, under stage 3 also the weights of
the blocks and their gradients. `deepspeed:` passes keys on to DeepSpeed's own configuration.
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
ZERO_BUCKET_ELEMENTS = 1 << 22
"""Elements that ranks gather or reduce together: 16 MB in fp32."""
ZERO_GROUP_ELEMENTS = 1 << 20
"""Elements of a rank that ZeRO 3 steps together: 4 MB in fp32."""
# Copies that a step of AdamW makes of what it steps together: the gradient in one piece and two temporaries.
_STEP_COPIES = 3


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
    """Return 3 under ZeRO 3, and 1 else: gradients are whole until they are summed."""
    return 3 if options["zero"] == 3 else 1


def _has_whole_around(options: Options) -> bool:
    """Return whether only the blocks are divided."""
    return options["zero"] == 3


def _count_copies(options: Options, ranks: int) -> tuple[float, float]:
    """Return the fp32 copies of a rank's part of the weights that it keeps, and those that a step makes.

    ZeRO 3 steps a few weights at a time (`_count_step_bytes`).
    """
    if ranks == 1 or _has_host_optimizer(options):
        return 0.0, 0.0
    return 1.0, 0.0 if options["zero"] == 3 else float(_STEP_COPIES)


def _count_step_bytes(options: Options, ranks: int) -> float:
    """Return the bytes of a bucket of gradients, or of the weights that ZeRO 3 steps together."""
    if ranks == 1:
        return 0.0
    return 4.0 * (ZERO_GROUP_ELEMENTS * _STEP_COPIES if options["zero"] == 3 else ZERO_BUCKET_ELEMENTS)


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
    "nonet.workers.engines._zero:Deepspeed",
    DeepspeedOptions,
    divides=_get_division,
    keeps_around=_has_whole_around,
    copies=_count_copies,
    step_bytes=_count_step_bytes,
    aside=_has_host_optimizer,
    unsupported=_find_unsupported,
    optimizers=("adamw",),
    needs="deepspeed",
)
