"""Runs whose trainers read the user's own files: the same bits by the trainer's threads and on Ray Data, cut in two or not."""

from __future__ import annotations

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import nonet
from nonet.controller.record.checkpoint import read_manifest
from nonet.controller.record.run_folder import RunFolder

STEPS = 6


@pytest.fixture(scope="module")
def ring(ray_local, tmp_path_factory):
    from tests_ring import make_ring

    folder = make_ring(tmp_path_factory.mktemp("ring"))
    table = pq.read_table(folder / "interactions.parquet").sort_by(
        [("user_id", "ascending"), ("timestamp", "ascending")]
    )
    rows: dict[int, list[int]] = {}
    for user, item in zip(table["user_id"].to_pylist(), table["item_id"].to_pylist(), strict=True):
        rows.setdefault(user, []).append(item)
    pq.write_table(
        pa.table({"user_id": list(rows), "item_id": list(rows.values())}),
        folder / "sequences.parquet",
        row_group_size=8,
    )
    return folder


def trained(ring, engine: str, name: str, *, resume: bool = False, steps: int = STEPS) -> dict[str, str]:
    """Files of the last commit of so many steps."""
    run = RunFolder(ring / name)
    source = f"data.source={{use: parquet, path: {ring / 'sequences.parquet'}}}"
    stages = "stages={pretrain: {epochs: 3, batch: {users: 10}, lr: 3e-3}}"
    changes = [source, f"data.engine={engine}", stages]
    with nonet.Session(ring / "ring.yaml", folder=ring, run=run, changes=changes, resume=resume) as s:
        for step in range(s.begin("pretrain"), steps):
            s.trainer.train(s.stage, step, step + 1)
            path = s.commit(step, now=True)
    return read_manifest(path).files


@pytest.mark.slow
def test_a_run_on_ray_data_gives_the_bits_of_one_in_the_trainers_own_threads_cut_in_two_or_not(ring):
    local = trained(ring, "local", "local")
    assert trained(ring, "ray", "ray") == local
    trained(ring, "ray", "cut", steps=3)
    assert trained(ring, "ray", "cut", resume=True) == local
