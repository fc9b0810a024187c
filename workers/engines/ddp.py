"""Data parallel: every rank has the whole model and optimizer, gradients are summed in all-reduces after a step's passes."""

from nonet.workers.engines.base import EngineOptions, Options, TrainEngine

BUCKET_ELEMENTS = 1 << 24
"""Elements of a bucket of gradients: 64 MiB in fp32."""
BUCKETS_IN_FLIGHT = 2
"""One is filled while another is summed."""


def _count_bucket_bytes(options: Options, ranks: int) -> float:
    """Return the bytes of the buckets in which gradients are summed."""
    return 4.0 * BUCKET_ELEMENTS * BUCKETS_IN_FLIGHT if ranks > 1 else 0.0


SPEC = TrainEngine("nonet.workers.engines._ddp:Ddp", EngineOptions, bucket_bytes=_count_bucket_bytes)
