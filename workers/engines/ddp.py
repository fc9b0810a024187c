"""Data parallel: every rank has the whole model and optimizer, gradients are summed while the last backward pass goes on."""

from nonet.workers.engines.base import EngineOptions, Options, TrainEngine

BUCKET_ELEMENTS = 1 << 24
"""Elements of a bucket of gradients: 64 MiB in fp32."""
COPIES_IN_FLIGHT = 2
"""fp32 copies of gradients of other dtypes that exist at a time: one is filled while another is summed."""


def _count_bucket_bytes(options: Options, ranks: int) -> float:
    """Return the bytes of the fp32 copies of gradients."""
    return 4.0 * BUCKET_ELEMENTS * COPIES_IN_FLIGHT if ranks > 1 else 0.0


SPEC = TrainEngine("nonet.workers.engines._ddp:Ddp", EngineOptions, bucket_bytes=_count_bucket_bytes)
