"""Benches that run as two processes over gloo: each is `python -m MODULE RANK FOLDER WORDS...`, with one thread."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

_LIMIT_S = 300


def run_both_ranks(module: str, *words: object) -> list[Any]:
    """Run both processes and return their results by rank.

    Raises:
        RuntimeError: A process failed.
    """
    with tempfile.TemporaryDirectory() as folder:
        started = [
            subprocess.Popen([sys.executable, "-m", module, str(rank), folder, *map(str, words)])
            for rank in range(2)
        ]
        for process in started:
            if process.wait(timeout=_LIMIT_S):
                raise RuntimeError(f"a rank of the bench failed with exit code {process.returncode}")
        return [json.loads((Path(folder) / f"{rank}.json").read_text()) for rank in range(2)]


def run_as_rank(work: Callable[..., Any]) -> None:
    """Run as one of the two processes.

    Args:
        work: Takes the rank and the words of the command line, and returns the result.
    """
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    rank, folder, *words = sys.argv[1:]
    store = f"file://{folder}/store"
    dist.init_process_group(
        "gloo", init_method=store, rank=int(rank), world_size=2, timeout=timedelta(seconds=60)
    )
    result = work(int(rank), *words)
    (Path(folder) / f"{rank}.json").write_text(json.dumps(result))
    dist.barrier()
    dist.destroy_process_group()
