"""The contenders of `nonet bench samples`, which read the same Parquet files into torch tensors.

Each contender yields the values of the list column and the number of rows, batch by batch. `time_pass` sums all values, so
that views of memory-mapped files are read too.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch

from nonet.samples.tables import pack_files

ROWS = 4096


@dataclass(frozen=True)
class ReadPass:
    """One pass over files.

    Attributes:
        seconds: Wall seconds.
        cpu_s: CPU seconds.
        first_s: Seconds to the first batch.
        total: Sum of all values.
        rows: Number of rows.
    """

    seconds: float
    cpu_s: float
    first_s: float
    total: int
    rows: int


def time_pass(
    batches: Callable[[Sequence[str]], Iterable[tuple[torch.Tensor, int]]], files: Sequence[str]
) -> ReadPass:
    """Time a pass over files.

    Args:
        batches: Yields the batches of files as (values [N], number of rows).
        files: The files.
    """
    began, cpu_began, first_s, total, rows = time.perf_counter(), time.process_time(), 0.0, 0, 0
    for values, count in batches(files):
        first_s = first_s or time.perf_counter() - began
        total, rows = total + int(values.sum()), rows + count
    return ReadPass(time.perf_counter() - began, time.process_time() - cpu_began, first_s, total, rows)


def make_nonet_reader(
    *, order: str = "groups", ledger: bool = True, packed: bool = False
) -> Callable[[Sequence[str]], Iterator[tuple[torch.Tensor, int]]]:
    """Return Nonet's reader.

    Args:
        order: The order of rows: "files" (not shuffled), "groups" (shuffled row groups) or "rows" (also shuffled within row
            groups).
        ledger: Whether a ledger records the rows.
        packed: Whether to read the packed Arrow files that `pack_beside` makes instead of the Parquet files.
    """

    def read_batches(files: Sequence[str]) -> Iterator[tuple[torch.Tensor, int]]:
        from nonet.samples.streams import read

        stream = read([pack_beside(file) for file in files] if packed else files).prefetch(4)
        stream = stream if order == "files" else stream.shuffle(7, in_group=order == "rows")
        feed = stream.open(rows=ROWS)
        sample_ledger = feed.make_ledger() if ledger else None
        for batch in feed.iterate_batches(
            (s for step in range(feed.steps.steps_per_epoch) for s in feed.get_slices(step)), sample_ledger
        ):
            yield batch["items"].values, len(batch)
            if sample_ledger is not None:
                feed.apply_batch(batch, sample_ledger)

    return read_batches


def pack_beside(file: str) -> str:
    """Return the path of the packed Arrow file of a Parquet file, which is made if it does not exist."""
    folder = Path(file).parent / "packed"
    target = folder / f"{Path(file).stem}.arrow"
    if not target.exists():
        pack_files(file, folder)
    return str(target)


def read_arrow_batches(files: Sequence[str]) -> Iterator[tuple[torch.Tensor, int]]:
    """Read with pyarrow's iter_batches on one thread; the tensors are views of Arrow's memory."""
    for file in files:
        for batch in pq.ParquetFile(file).iter_batches(ROWS, use_threads=False):
            values, _ = _to_jagged(batch.column("items"))
            yield values, len(batch)


def read_ray_batches(files: Sequence[str]) -> Iterator[tuple[torch.Tensor, int]]:
    """Read with Ray Data's iter_torch_batches, collated from Arrow to jagged tensors."""
    import ray.data
    from ray.data.collate_fn import ArrowBatchCollateFn

    class Collate(ArrowBatchCollateFn):
        def __call__(self, batch: pa.Table) -> Any:
            values, offsets = _to_jagged(batch["items"].combine_chunks())
            return {"values": values, "offsets": offsets}

    data = ray.data.read_parquet(list(files))
    for batch in data.iter_torch_batches(batch_size=ROWS, collate_fn=Collate(), prefetch_batches=2):
        yield batch["values"], len(batch["offsets"]) - 1


class _Vectorised(torch.utils.data.IterableDataset):
    """Iterates over the Arrow batches of a worker's share of the files."""

    def __init__(self, files: Sequence[str]):
        self.files = list(files)

    def __iter__(self) -> Iterator[tuple[torch.Tensor, int]]:
        info = torch.utils.data.get_worker_info()
        own_files = self.files if info is None else self.files[info.id :: info.num_workers]
        for values, rows in read_arrow_batches(own_files):
            yield (
                values.clone(),
                rows,
            )  # a copy, because views of Arrow's memory cannot be moved to shared memory


def read_torch_batches(files: Sequence[str]) -> Iterator[tuple[torch.Tensor, int]]:
    """Read with torch's DataLoader and two workers, which return whole batches."""
    loader = torch.utils.data.DataLoader(
        _Vectorised(files), batch_size=None, num_workers=2, prefetch_factor=2
    )
    yield from loader


def write_files(folder: Path, files: int, rows: int, values: int = 50) -> list[str]:
    """Write files of `rows` rows: user int64, ts int64, items list<int64> of `values`, label int8.

    They are compressed by zstd, with row groups of 50,000.
    """
    paths = []
    for number in range(files):
        path = folder / f"rows-{number:03d}.parquet"
        paths.append(str(path))
        if path.exists():
            continue
        draw = np.random.default_rng(number)
        items = np.minimum(draw.zipf(1.3, rows * values), 1_000_000).astype(np.int64)
        offsets = pa.array(np.arange(0, rows * values + 1, values, dtype=np.int32))
        table = pa.table(
            {
                "user": np.arange(rows) + number * rows,
                "ts": draw.integers(0, 1 << 40, rows),
                "items": pa.ListArray.from_arrays(offsets, pa.array(items)),
                "label": draw.integers(0, 2, rows).astype(np.int8),
            }
        )
        pq.write_table(table, path, compression="zstd", row_group_size=50_000)
    return paths


def _to_jagged(column: pa.Array) -> tuple[torch.Tensor, torch.Tensor]:
    offsets = column.offsets.to_numpy()
    values = column.values.slice(int(offsets[0]), int(offsets[-1] - offsets[0]))
    return torch.from_dlpack(values), torch.from_numpy(offsets.astype(np.int64) - offsets[0])
