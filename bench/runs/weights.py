"""Measures the memory that saving dense weights in shards, and publishing them to another process, needs in addition.

The private memory of a process (RssAnon in /proc) is sampled twice per millisecond, relative to its value at the start.
Buckets that are being sent are in Ray's object store, which all processes share, and are not counted.
"""

from __future__ import annotations

import shutil
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

_SAMPLE_INTERVAL_S = 0.0005
_COLUMNS = 1024  # a matrix of 512 rows has 2 MiB


def bench_weights(megabytes: int = 64, bucket_mb: float = 4.0, block_kb: int = 64) -> dict[str, Any]:
    """Measure a save and two publications: of all weights, and of a version in which 1 % of the weights changed.

    Args:
        megabytes: Size of the model.
        bucket_mb: Size of a bucket in megabytes.
        block_kb: Size of the blocks of a delta in kilobytes.

    Returns:
        Rows with the peak of additional private megabytes of each process, seconds, and megabytes sent.

    Raises:
        RuntimeError: The reader's weights differ from the sender's.
    """
    import ray

    from nonet.workers.runtime import ensure_ray

    ensure_ray()
    side_actor: Any = ray.remote(num_cpus=0)(_WeightsSide)
    sender, reader = (side_actor.remote(megabytes, int(bucket_mb * 2**20), block_kb * 1024) for _ in range(2))
    folder = tempfile.mkdtemp()
    try:
        saved: Any = ray.get(sender.save.remote(folder))
    finally:
        shutil.rmtree(folder)
    rows = [{"what": "save", **saved}]
    for version, what in ((1, "publish"), (2, "publish, 1 % changed")):
        bucket_count: Any = ray.get(sender.begin.remote(0.01 if version == 2 else 0.0))
        ray.get(reader.begin.remote())
        buckets = [
            sender.pack_bucket.remote(index, version, version - 1 or None) for index in range(bucket_count)
        ]
        received = [reader.take.remote(version, bucket) for bucket in buckets]
        began = time.perf_counter()
        sizes = ray.get(received)
        ray.get(reader.swap.remote(version))
        seconds = time.perf_counter() - began
        sender_peak, reader_peak = ray.get([sender.measure_peak.remote(), reader.measure_peak.remote()])
        rows.append(
            {
                "what": what,
                "sender_mb": sender_peak,
                "reader_mb": reader_peak,
                "seconds": seconds,
                "sent_mb": sum(sizes) / 2**20,
            }
        )
        del buckets, received
    if ray.get(sender.compute_digest.remote()) != ray.get(reader.compute_digest.remote()):
        raise RuntimeError("the reader's weights differ from those that were sent")
    peak_mb = max(row[key] for row in rows for key in ("save_mb", "sender_mb", "reader_mb") if key in row)
    return {"rows": rows, "ratio": {"peak extra megabytes of a process": peak_mb}}


class _WeightsSide:
    """A model in a process of its own, which sends weights as a trainer with one rank does, or receives them."""

    def __init__(self, megabytes: int, bucket_bytes: int, block_bytes: int):
        import torch

        from nonet.workers import IncomingWeights, OutgoingWeights

        torch.set_num_threads(1)
        self.model = torch.nn.ParameterList(
            torch.nn.Parameter(torch.randn(512, _COLUMNS)) for _ in range(megabytes // 2)
        )
        self.bucket_bytes = bucket_bytes
        self.outgoing = OutgoingWeights(self.model.state_dict(), bucket_bytes, block_bytes)
        self.incoming = IncomingWeights(self.model)
        self._watch: Any = None

    def save(self, folder: str) -> dict[str, float]:
        """Save model and optimizer as a trainer does between two steps.

        Returns:
            The peak of additional megabytes, the seconds, the number of files, and their megabytes.
        """
        from nonet.workers import SaveOptions
        from nonet.workers.engines import OptimizerOptions, make_engine
        from nonet.workers.runtime import Membership

        engine = make_engine({"use": "ddp"}, self.model, Membership(0, 1), OptimizerOptions(use="adamw"))
        with _watch_peak() as peak:
            began = time.perf_counter()
            paths = engine.snapshot(SaveOptions(copy=False, shard_bytes=16 << 20))(Path(folder))
            seconds = time.perf_counter() - began
        size = sum(path.stat().st_size for path in paths)
        for parameter in self.model:
            parameter.grad = None
        return {"save_mb": peak[0], "seconds": seconds, "files": len(paths), "written_mb": size / 2**20}

    def begin(self, share: float = 0.0) -> int:
        """Change a share of the weights, start to measure memory, and return the number of buckets."""
        import torch

        with torch.no_grad():
            for parameter in self.model:
                parameter[: int(share * len(parameter))] += 1
        self._watch = _watch_peak()
        self._peak = self._watch.__enter__()
        return len(self.outgoing.buckets)

    def pack_bucket(self, number: int, version: int, base: int | None) -> Any:
        """Pack a bucket: all of it, or its difference to the version `base`."""
        tensors = self.model.state_dict()
        return self.outgoing.pack_bucket(
            number, {name: tensors[name] for name in self.outgoing.list_tensor_names(number)}, version, base
        )

    def take(self, version: int, bucket: Any) -> int:
        """Store a received bucket and return its size in bytes."""
        self.incoming.take(version, bucket)
        return len(bucket)

    def swap(self, version: int) -> None:
        """Copy the buckets of a version into the model."""
        self.incoming.swap(version)

    def measure_peak(self) -> float:
        """Stop to measure memory, and return the peak of additional megabytes since `begin`."""
        self._watch.__exit__(None, None, None)
        return self._peak[0]

    def compute_digest(self) -> str:
        """Return a checksum of the model."""
        import hashlib

        digest = hashlib.sha256()
        for parameter in self.model:
            digest.update(parameter.detach().numpy().tobytes())
        return digest.hexdigest()


@contextmanager
def _watch_peak() -> Iterator[list[float]]:
    """Yield a list whose one element is the peak of private megabytes relative to the start; it is final after the context."""
    stopped, peak, before = threading.Event(), [0.0], _read_private_mb()

    def sample() -> None:
        while not stopped.wait(_SAMPLE_INTERVAL_S):
            peak[0] = max(peak[0], _read_private_mb() - before)

    watcher = threading.Thread(target=sample, daemon=True)
    watcher.start()
    try:
        yield peak
    finally:
        stopped.set()
        watcher.join()


def _read_private_mb() -> float:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon"):
            return int(line.split()[1]) / 1024
    return 0.0
