"""Row groups that several trainers of one machine read are decoded once."""

import os
import subprocess
import sys

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from nonet.samples.streams import node_groups, read
from nonet.samples.streams.leaf import StreamLeaf

RANK = """
import sys
from nonet.samples.streams import node_groups, read
from nonet.samples.streams.leaf import StreamLeaf
path, rank, world = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
decoded, decode = [], StreamLeaf.read
StreamLeaf.read = lambda self, at: decoded.append(at) or decode(self, at)
feed = read(path, where="kept").shuffle(7).open(rows=50, step_rows=400)
rows = [row for batch in feed.iterate_epoch(0, rank=rank, world=world) for row in batch["id"].tolist()]
print(len(decoded), *rows, flush=True)
sys.stdin.read()  # until all have read
"""


def write_groups(path, rows: int = 4000) -> np.ndarray:
    """Four row groups of which a condition keeps two rows in three; the ids of those."""
    ids, kept = np.arange(rows), np.arange(rows) % 3 > 0
    pq.write_table(pa.table({"id": ids, "kept": kept}), path, row_group_size=rows // 4)
    return ids[kept]


def test_four_processes_decode_each_row_group_once_and_leave_no_files(tmp_path):
    kept = write_groups(tmp_path / "a.parquet")
    place = tmp_path / "tmp"
    place.mkdir()
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", RANK, str(tmp_path / "a.parquet"), str(rank), "4"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "TMPDIR": str(place), "OMP_NUM_THREADS": "1"},
        )
        for rank in range(4)
    ]
    answers = [[int(word) for word in rank.stdout.readline().split()] for rank in ranks]
    for rank in ranks:
        rank.communicate(timeout=120)
    assert sum(answer[0] for answer in answers) == 4
    assert sorted(row for answer in answers for row in answer[1:]) == kept.tolist()
    assert list(place.iterdir()) == []


@pytest.mark.parametrize("world", [2, 8])
def test_ranks_of_one_process_share_groups_and_read_the_rows_that_they_read_alone(
    tmp_path, monkeypatch, world
):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    write_groups(tmp_path / "a.parquet")
    stream = read(str(tmp_path / "a.parquet"), where="kept").shuffle(7)
    alone = [
        [batch["id"].tolist() for batch in stream.open(rows=50, step_rows=400).iterate_batches(slices)]
        for slices in (_slices(stream, rank, world) for rank in range(world))
    ]
    decoded, decode = [], StreamLeaf.read
    monkeypatch.setattr(StreamLeaf, "read", lambda self, at: decoded.append(at) or decode(self, at))
    together = [
        [
            batch["id"].tolist()
            for batch in stream.open(rows=50, step_rows=400).iterate_epoch(0, rank=rank, world=world)
        ]
        for rank in range(world)
    ]
    assert sorted(decoded) == [0, 1, 2, 3]
    assert together == alone


def test_only_the_newest_groups_stay(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr("nonet.samples.streams.node_groups._MAX_GROUPS", 2)
    write_groups(tmp_path / "a.parquet")
    feed = read(str(tmp_path / "a.parquet")).shuffle(7).open(rows=50, step_rows=400)
    assert sum(len(batch) for batch in feed.iterate_epoch(0, rank=0, world=2)) == 2000
    (folder,) = tmp_path.glob("nonet-groups-*")
    assert len(list(folder.glob("*.arrow"))) == 2


def _slices(stream, rank: int, world: int):
    feed = stream.open(rows=50, step_rows=400)
    return [part for step in range(feed.steps.steps_per_epoch) for part in feed.get_slices(step, rank, world)]


def test_a_folder_of_somebody_else_is_not_read(tmp_path, monkeypatch):
    monkeypatch.setattr(node_groups.tempfile, "gettempdir", lambda: str(tmp_path))
    monkeypatch.setattr(node_groups.os, "getuid", lambda: os.geteuid() + 1)
    with pytest.raises(PermissionError, match="belongs to another user"):
        node_groups.NodeGroups("digest")
