"""The C++ core beside threads, forked children and the end of Python."""

import os
import signal
import subprocess
import sys
import threading
from contextlib import suppress

import pytest
import torch

from nonet.embedding.tables.factory import get_core_status

pytestmark = pytest.mark.skipif(not get_core_status().native, reason=f"no core: {get_core_status().reason}")


def native(dim, **settings):
    from nonet.embedding.tables.native_table import NativeTable

    return NativeTable("item", dim, seed=7, **settings)


def test_readers_beside_a_writer_see_whole_rows_only():
    core = native(32, optimizer="sgd", lr=1.0, init_scale=0.0)
    keys, torn, stop = torch.arange(4000), [], threading.Event()
    core.lookup(keys, train=True)

    def read():
        while not stop.is_set():
            rows = core.lookup(keys, train=False)
            torn.append(bool((rows != rows[:, :1]).any()))

    readers = [threading.Thread(target=read) for _ in range(2)]
    for reader in readers:
        reader.start()
    for step in range(1, 60):
        core.lookup(torch.arange(step * 5000, step * 5000 + 500), train=True)
        core.apply(keys, torch.ones(4000, 32), step)
    stop.set()
    for reader in readers:
        reader.join(timeout=30)
    assert len(torn) > 2
    assert not any(torn)


FORKS = """
import os, time, torch
from nonet.embedding.tables.native_table import NativeTable

def grow(tables):  # 6 MB each, of which a part is asked to be made ready
    for number in range(tables):
        table = NativeTable("item", 256, seed=1)
        table.lookup(torch.arange(6_000), train=True)
        time.sleep(0.02)  # that thread waits again

grow(2)
child = os.fork()
if not child:
    grow(6)
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
"""


def test_tables_grow_in_a_forked_child_whose_parent_has_a_thread_that_makes_memory_ready():
    with subprocess.Popen([sys.executable, "-W", "ignore", "-c", FORKS], start_new_session=True) as parent:
        try:
            assert parent.wait(60) == 0
        finally:
            with suppress(ProcessLookupError):
                os.killpg(parent.pid, signal.SIGKILL)


def test_python_ends_while_a_daemon_thread_is_in_the_core():
    code = """
import threading, time, numpy as np, torch
from nonet.embedding.tables.native_table import NativeTable
table = NativeTable("item", 64, seed=7)
keys = torch.from_numpy(np.random.default_rng(1).integers(0, 200_000, 200_000))
table.lookup(keys, train=True)
outs = [torch.empty(200_000, 64) for _ in range(2)]  # a tensor that such a thread frees ends the process, ours or not
def read(out):
    while True: table.lookup(keys, train=False, out=out)
for out in outs: threading.Thread(target=read, args=(out,), daemon=True).start()
time.sleep(0.3)
"""
    for _ in range(3):
        assert subprocess.run([sys.executable, "-c", code], timeout=800).returncode == 0


def test_readers_that_follow_each_other_let_a_step_between():
    table, keys, stop, reads = native(32), torch.arange(100_000), threading.Event(), []
    table.lookup(keys, train=True)

    def read():
        while not stop.is_set():
            table.lookup(keys, train=False)
            reads.append(1)

    readers = [threading.Thread(target=read) for _ in range(3)]
    for reader in readers:
        reader.start()
    between = []
    for step in range(1, 60):
        before = len(reads)
        table.apply(keys[:8], torch.ones(8, 32), step)
        between.append(len(reads) - before)
    stop.set()
    for reader in readers:
        reader.join()
    # Those under way, 0 to 3, and more while a busy machine holds this thread up; a lock that prefers readers lets hundreds by.
    assert sorted(between)[len(between) // 2] <= 30
