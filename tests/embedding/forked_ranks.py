"""Ranks of a sparse world as forked processes: one import of torch for all of them.

    python forked_ranks.py SCENARIOS.py WORLD FOLDER

Every rank runs `main(rank, world, folder)` of the scenarios file and writes its result as FOLDER/<rank>.json.
"""

import importlib.util
import json
import os
import sys
import time
import traceback
from datetime import timedelta
from pathlib import Path


def _rank(rank, world, folder, main):
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    store = f"file://{folder}/store"
    timeout = timedelta(seconds=30)
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=world, timeout=timeout)
    (Path(folder) / f"{rank}.json").write_text(json.dumps(main(rank, world, Path(folder))))


def forked(work):
    """Fork a child that does `work` and ends with 0, or 1 and a traceback on stderr; return its process id."""
    child = os.fork()
    if child:
        return child
    code = 1
    try:
        work()
        code = 0
    except BaseException:
        traceback.print_exc()
    sys.stderr.flush()
    os._exit(code)


def codes_of(children, wait_s, *, stop_at_failure=False):
    """Exit codes by child, of those that ended in time; the others are killed."""
    until, codes = time.monotonic() + wait_s, {}
    while len(codes) < len(children) and time.monotonic() < until:
        for child in set(children) - codes.keys():
            done, status = os.waitpid(child, os.WNOHANG)
            if done:
                codes[child] = os.waitstatus_to_exitcode(status)
        if stop_at_failure and any(codes.values()):
            break
        time.sleep(0.02)
    for child in set(children) - codes.keys():
        os.kill(child, 9)
    return codes


def _main(scenarios, world, folder):
    spec = importlib.util.spec_from_file_location("scenarios", scenarios)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    children = [forked(lambda rank=rank: _rank(rank, world, folder, module.main)) for rank in range(world)]
    codes = codes_of(children, 600)
    return 0 if len(codes) == world and all(code in (0, -9) for code in codes.values()) else 1


if __name__ == "__main__":
    sys.exit(_main(sys.argv[1], int(sys.argv[2]), sys.argv[3]))
