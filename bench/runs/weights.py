"""Memory of dense weights in transit: a model saved in shards, and published to a reader in another process.

Private memory of a process (RssAnon of /proc) is sampled two times a millisecond during the work, relative to its
value before. Buckets in transit are in Ray's object store, which processes share; the most that it holds is reported
too.
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

_EVERY_S = 0.0005
_ROWS = 1024  # numbers of a row: a matrix is as many rows as it takes


def bench_weights(megabytes: int = 64, bucket_mb: float = 4.0, block_kb: int = 64) -> dict[str, Any]:
    """Measure a save and two publications: a whole version, and one of which a hundredth changed.

    Args:
        megabytes: Size of the model.
        bucket_mb: Size of a bucket in megabytes.
        block_kb: Size of the blocks of a delta in kilobytes.

    Returns:
        Peak extra private megabytes of each process, seconds, and megabytes sent.
    """
    import ray

    from nonet.workers.runtime import ensure_ray

    ensure_ray()
    sides: Any = ray.remote(num_cpus=0)(_WeightsSide)
    sender, reader = (sides.remote(megabytes, int(bucket_mb * 2**20), block_kb * 1024) for _ in range(2))
    folder = tempfile.mkdtemp()
    try:
        saved: Any = ray.get(sender.save.remote(folder))
    finally:
        shutil.rmtree(folder)
    rows = [{"what": "save", **saved}]
    for version, what in ((1, "publish"), (2, "publish, 1 % changed")):
        number: Any = ray.get(sender.begin.remote(0.01 if version == 2 else 0.0))
        ray.get(reader.begin.remote())
        parts = [sender.pack_bucket.remote(at, version, version - 1 or None) for at in range(number)]
        came = [reader.take.remote(version, part) for part in parts]
        began = time.perf_counter()
        sizes = ray.get(came)
        ray.get(reader.swap.remote(version))
        seconds = time.perf_counter() - began
        out, taken = ray.get([sender.measure_peak.remote(), reader.measure_peak.remote()])
        rows.append(
            {
                "what": what,
                "sender_mb": out,
                "reader_mb": taken,
                "seconds": seconds,
                "sent_mb": sum(sizes) / 2**20,
            }
        )
        del parts, came
    if ray.get(sender.compute_digest.remote()) != ray.get(reader.compute_digest.remote()):
        raise RuntimeError("the reader has other weights than were sent")
    most = max(row[key] for row in rows for key in ("save_mb", "sender_mb", "reader_mb") if key in row)
    return {"rows": rows, "ratio": {"peak extra megabytes of a process": most}}


class _WeightsSide:
    """A model in a process of its own: the trainer of one rank, or a reader."""

    def __init__(self, megabytes: int, bucket_bytes: int, block_bytes: int):
        import torch

        from nonet.workers import IncomingWeights, OutgoingWeights

        torch.set_num_threads(1)
        self.model = torch.nn.ParameterList(
            torch.nn.Parameter(torch.randn(512, _ROWS)) for _ in range(megabytes // 2)
        )
        self.bucket_bytes = bucket_bytes
        self.outgoing = OutgoingWeights(self.model.state_dict(), bucket_bytes, block_bytes)
        self.incoming = IncomingWeights(self.model)
        self._watch: Any = None

    def save(self, folder: str) -> dict[str, float]:
        """Save model and optimizer as a trainer does while no step runs. Returns peak extra megabytes and seconds."""
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
        """Change a share of the weights and begin to watch the memory. Returns the number of buckets."""
        import torch

        with torch.no_grad():
            for parameter in self.model:
                parameter[: int(share * len(parameter))] += 1
        self._watch = _watch_peak()
        self._peak = self._watch.__enter__()
        return len(self.outgoing.buckets)

    def pack_bucket(self, number: int, version: int, base: int | None) -> Any:
        """Pack a bucket."""
        named = self.model.state_dict()
        return self.outgoing.pack_bucket(
            number, {n: named[n] for n in self.outgoing.list_tensor_names(number)}, version, base
        )

    def take(self, version: int, bucket: Any) -> int:
        """Keep a bucket. Returns its bytes."""
        self.incoming.take(version, bucket)
        return len(bucket)

    def swap(self, version: int) -> None:
        """Copy the buckets of a version into the model."""
        self.incoming.swap(version)

    def measure_peak(self) -> float:
        """Return the peak of extra megabytes since `begin`."""
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
    """Yield a list with the peak of private megabytes relative to the start, complete when the context ends."""
    over, most, before = threading.Event(), [0.0], _read_private_mb()

    def look() -> None:
        while not over.wait(_EVERY_S):
            most[0] = max(most[0], _read_private_mb() - before)

    watcher = threading.Thread(target=look, daemon=True)
    watcher.start()
    try:
        yield most
    finally:
        over.set()
        watcher.join()


def _read_private_mb() -> float:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon"):
            return int(line.split()[1]) / 1024
    return 0.0
