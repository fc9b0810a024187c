"""Saves that are written while later steps go on, by trainer and shard of the ring."""

from __future__ import annotations

import os
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path
from threading import Event

import pytest
from ring_world import Ring, scores_of

from nonet import background
from nonet.background import BackgroundWrite, seal_files
from nonet.errors import CheckpointError, DeadlineExceeded


@pytest.fixture(scope="module")
def ring(tmp_path_factory):
    return Ring(tmp_path_factory.mktemp("ring"))


@contextmanager
def no_write_yet():
    """Keep the writing thread busy until the block ends."""
    end = Event()
    background.get_writer_thread().submit(end.wait)
    try:
        yield
    finally:
        end.set()


def files_of(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def saved_beside(world, folder: Path, steps) -> dict:
    """Save while `steps` are taken; return what both roles say they wrote."""
    with no_write_yet():
        assert world.trainer.save(str(folder), wait=False) is None
        assert world.shard.save(str(folder), wait=False) is None
        steps()
        assert (world.trainer.poll_save(), world.shard.poll_save()) == (None, None)
    return world.trainer.poll_save(True) | world.shard.poll_save(True)


def test_a_save_beside_steps_has_the_bits_of_one_that_is_waited_for(ring, tmp_path):
    world = ring.world()
    world.train("pretrain", 0, 6)
    still = world.trainer.save(str(tmp_path / "still")) | world.shard.save(str(tmp_path / "still"))
    before = world.weights()
    written = saved_beside(world, tmp_path / "beside", lambda: world.train("pretrain", 6, 12))
    assert not before.equal(world.weights())
    assert files_of(tmp_path / "beside") == files_of(tmp_path / "still")
    assert written == still == seal_files(tmp_path / "still", sorted((tmp_path / "still").rglob("*.*")))
    assert {Path(name).parts[0] for name in written} == {"dense", "samples", "sparse"}


def test_in_rl_the_reference_is_saved_as_it_was_too(ring, tmp_path):
    world = ring.world()
    world.train("pretrain", 0, 4)
    world.trainer.begin(world.stages["rl"])
    beams = world.beams()
    world.save(tmp_path / "still")

    def steps():
        world.update(beams, scores_of(beams))
        world.trainer.begin(world.stages["rl"])  # another reference

    written = saved_beside(world, tmp_path / "beside", steps)
    assert "reference/model.safetensors" in written
    assert files_of(tmp_path / "beside") == files_of(tmp_path / "still")


def test_a_disk_that_refuses_is_told_when_it_is_asked_for(ring, tmp_path):
    world = ring.world()
    for name, role in (("dense", world.trainer), ("sparse", world.shard)):
        (tmp_path / name).write_text("in the way")
        with no_write_yet():
            assert role.save(str(tmp_path), wait=False) is None
        for _ in range(2):
            with pytest.raises(CheckpointError, match=f"{name} .* could not be written to .*Error: "):
                role.poll_save(True)
    assert not any(history.snapshots for history in world.shard.sparse.histories.values())


def test_a_write_that_takes_too_long_is_told():
    with no_write_yet():
        writing = BackgroundWrite(Path("commit"), "dense weights", dict)
        assert writing.poll_result(False, 9) is None
        with pytest.raises(
            DeadlineExceeded, match=r"dense weights are still being written to commit after 0\.01 s"
        ):
            writing.wait(0.01)
    assert writing.wait() == {}


@pytest.mark.skipif(sys.platform != "linux", reason="threads have priorities of their own on Linux")
def test_the_writing_thread_lets_steps_go_first():
    code = "import os; from nonet.background import get_writer_thread as thread; "
    code += "print(thread().submit(os.nice, 0).result(), os.nice(0))"
    said = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env=os.environ
    )
    writer, own = map(int, said.stdout.split())
    assert writer == min(own + 5, 19)
