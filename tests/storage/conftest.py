"""Fixtures of a stored run on several nodes, each with a disk of its own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from nonet.storage import MountedRun, RunCopy, RunView
from tests.s3 import serve_s3
from tests.storage.memory_storage import MemoryStorage

ADDRESS = "s3://feed-runs/run-1"


@pytest.fixture(scope="session")
def s3() -> Iterator[dict[str, str]]:
    """Serve an empty bucket."""
    with serve_s3() as variables:
        yield variables


@pytest.fixture
def memory() -> MemoryStorage:
    return MemoryStorage()


@pytest.fixture
def make_copy(memory: MemoryStorage, tmp_path: Path) -> Callable[..., RunCopy]:
    """Return a function that makes the work folder of one stored run on a node, for a worker if an epoch is given."""

    def make(node: str, epoch: int = 0, generation: int = 0) -> RunCopy:
        mounted = MountedRun(ADDRESS, str(tmp_path / node / "work/run-1"), epoch, generation)
        copy = RunCopy(mounted, memory)
        if epoch:
            copy.enter_epoch()
        return copy

    return make


@pytest.fixture
def make_view(memory: MemoryStorage, tmp_path: Path) -> Callable[..., RunView]:
    """Return a function that makes a view of the stored run, of a process of a node."""

    def make(node: str, process: str = "p1", *, fetches: bool = True) -> RunView:
        root = tmp_path / node
        view = RunView(MountedRun(ADDRESS, str(root / "views" / process / "run-1")), memory, root=root)
        if fetches:
            view.fetch(view.path)
        return view

    return make
