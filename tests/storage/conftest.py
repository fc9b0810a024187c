"""Fixtures of a stored run on two nodes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path

import pytest

from nonet.storage import MountedRun, RunCopy, open_storage
from tests.s3 import BUCKET, serve_s3

_numbers = count()


@pytest.fixture(scope="session")
def s3() -> Iterator[dict[str, str]]:
    """Serve an empty bucket."""
    with serve_s3() as variables:
        yield variables


@pytest.fixture
def make_copy(s3: dict[str, str], tmp_path: Path) -> Callable[[str], RunCopy]:
    """Return a function that makes the copy of one stored run on a node with a disk of its own."""
    address = f"{BUCKET}/run-{next(_numbers)}"

    def make(node: str) -> RunCopy:
        return RunCopy(MountedRun(address, str(tmp_path / node)), open_storage(address))

    return make
