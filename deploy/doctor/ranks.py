"""Other processes of this node, for measures that several make together."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from nonet.workers.runtime import open_store

_END_S = 60


@contextmanager
def beside(function: Callable[[str, int, int, int], Any], ranks: int) -> Iterator[tuple[str, int]]:
    """Host and port where this process, rank 0, meets the others; each calls `function(host, port, rank, ranks)`.

    What has not ended a minute after this process left is killed.
    """
    host, port, store = open_store()
    module, name = function.__module__, function.__name__
    code = f"from {module} import {name}; {name}({host!r}, {port}, {{}}, {ranks})"
    others = [subprocess.Popen([sys.executable, "-c", code.format(rank)]) for rank in range(1, ranks)]
    try:
        yield host, port
    finally:
        for other in others:
            try:
                other.wait(_END_S)
            except subprocess.TimeoutExpired:
                other.kill()
        del store
