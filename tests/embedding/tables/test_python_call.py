"""Lookups and steps straight from torch's and NumPy's memory: what the calls through ctypes do, and never another answer."""

import gc
import os
import subprocess
import sys
import threading
import weakref
from contextlib import contextmanager
from inspect import signature

import numpy as np
import pytest
import torch

from nonet.embedding.tables import native_library
from nonet.embedding.tables.factory import get_core_status
from nonet.errors import DataError

pytestmark = pytest.mark.skipif(not get_core_status().native, reason=f"no core: {get_core_status().reason}")


def filled(rows=3000, dim=12, **settings):
    from nonet.embedding.tables.native_table import NativeTable

    table = NativeTable("item", dim, seed=7, **settings)
    table.lookup(torch.arange(rows), train=True)
    return table


@pytest.fixture
def only_direct(monkeypatch):
    """Within it, what is left to Python fails."""

    @contextmanager
    def without_python(table):
        with monkeypatch.context() as patch:
            patch.delattr(type(table), "_general")
            patch.delattr(type(table), "_general_push")
            yield

    return without_python


@pytest.fixture
def direct(only_direct):
    """Make reads fail where they fall back to Python."""

    def read(table, keys, **named):
        with only_direct(table):
            return table.lookup(keys, **({"train": False} | named))

    return read


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("count", [0, 1, 2, 255, 256, 257, 9000])
def test_rows_are_those_of_the_call_through_ctypes_and_absent_keys_are_counted_once(direct, count, dtype):
    table = filled(dtype=dtype, default=0.5)
    keys = torch.randint(0, 4000, (count,))
    expected = table._general(keys, train=False)
    missing = table.absent
    found = table.lookup(keys, train=False)
    assert found.dtype is torch.float32
    assert (tuple(found.shape), found.stride(), found.is_contiguous()) == ((count, 12), (12, 1), True)
    assert torch.equal(found, expected)
    assert torch.equal(direct(table, keys), expected)
    assert torch.equal(direct(table, keys.numpy()), expected)
    room = torch.full((count, 12), 7.0)
    assert direct(table, keys, out=room) is room
    assert torch.equal(room, expected)
    assert missing == int((keys >= 3000).sum())
    assert table.absent == 5 * missing


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("count", [0, 1, 2, 256, 257, 9000])
@pytest.mark.parametrize("form", [torch.Tensor.clone, torch.Tensor.numpy], ids=["torch", "numpy"])
def test_training_makes_and_moves_the_same_rows_as_through_ctypes(only_direct, form, count, dtype):
    ours, theirs = filled(dtype=dtype, optimizer="adam"), filled(dtype=dtype, optimizer="adam")
    for step in range(1, 4):
        keys, grads = torch.randint(0, 4000, (count,)), torch.randn(count, 12)
        with only_direct(ours):
            found = ours.lookup(form(keys), train=True)
            ours.apply(form(keys), grads, step)
        assert torch.equal(found, theirs._general(keys, train=True))
        assert theirs._general_push(keys, grads, theirs.step, step, theirs.spec.lr) >= 0
        theirs.step = step
    assert (ours.step, ours.hash_state()) == (3, theirs.hash_state())


def test_rows_are_made_at_the_step_named_else_at_the_next(direct):
    table = filled(10)
    table.step = 6
    direct(table, torch.arange(20), train=True)
    direct(table, torch.arange(30), train=True, step=9)
    direct(table, torch.arange(30, 40).numpy(), train=True, step=None, out=torch.empty(10, 12))
    assert [len(table.list_touched_since(step)) for step in (0, 1, 6, 7, 9)] == [40, 30, 30, 10, 0]


def test_keys_that_do_not_lie_plainly_go_the_other_way_with_the_same_rows(direct):
    table = filled()
    keys = torch.arange(100)
    views = {
        "every other": (keys[::2], keys[::2].clone()),
        "every other, numpy": (keys.numpy()[::2], keys[::2].clone()),
        "a parameter's": (torch.nn.Parameter(keys, requires_grad=False), keys),
        "a kind of array": (keys.numpy().view(np.memmap), keys),
    }
    for wanted, plain in views.values():
        with pytest.raises(AttributeError, match="_general"):
            direct(table, wanted)
        assert torch.equal(table.lookup(wanted, train=False), direct(table, plain))
    tail = keys[90:]  # begins within its storage
    for wanted in (tail, tail.numpy()):
        assert torch.equal(direct(table, wanted), table.lookup(keys, train=False)[90:])
    fixed = keys.numpy().copy()
    fixed.flags.writeable = False
    assert torch.equal(direct(table, fixed), table.lookup(keys, train=False))


def test_an_array_can_be_let_go_after_its_call(direct):
    table, keys = filled(), np.arange(50)
    before = sys.getrefcount(keys)
    for train in (False, True):
        direct(table, keys, train=train)
    table.apply(keys, torch.zeros(50, 12), 1)
    assert sys.getrefcount(keys) == before
    keys.resize(60)  # refused while a view of its memory is out


def gradients(count=50, dim=12):
    whole = torch.randn(count, dim)
    return {
        "every other column": torch.randn(count, 2 * dim)[:, ::2],
        "transposed": torch.randn(dim, count).T,
        "doubles": whole.double(),
        "a parameter's": torch.nn.Parameter(whole),
    }


@pytest.mark.parametrize("kind", gradients())
def test_gradients_that_do_not_lie_plainly_go_the_other_way_with_the_same_steps(only_direct, kind):
    ours, theirs, keys = filled(), filled(), torch.arange(50)
    grads = gradients()[kind]
    with only_direct(ours), pytest.raises(AttributeError, match="_general_push"):
        ours.apply(keys, grads, 1)
    ours.apply(keys, grads, 1)
    with only_direct(theirs):
        theirs.apply(keys, grads.detach().float().contiguous(), 1)
    assert ours.hash_state() == theirs.hash_state()


def test_a_step_refused_says_why_and_changes_nothing():
    table = filled(20)
    before = table.hash_state()
    for keys in (torch.arange(15, 25), np.arange(15, 25)):
        with pytest.raises(DataError, match="5 keys that have no row"):
            table.apply(keys, torch.zeros(10, 12), 1)
    with pytest.raises(DataError, match=r"needs gradients of shape \[10, 12\], got \[10, 6\]"):
        table.apply(torch.arange(10), torch.zeros(10, 6), 1)
    with pytest.raises(DataError, match="real gradients"):
        table.apply(torch.arange(10), torch.zeros(10, 12, dtype=torch.complex64), 1)
    with pytest.raises(DataError, match="needs `out` as contiguous float32"):
        table.lookup(torch.arange(10), train=False, out=torch.empty(10, 6))
    assert (table.step, table.hash_state()) == (0, before)


@pytest.mark.parametrize(
    "keys",
    [
        torch.arange(4, dtype=torch.int32),
        torch.arange(4.0),
        torch.zeros(2, 2, dtype=torch.int64),
        np.arange(4, dtype=">i8"),
        np.arange(4, dtype=np.uint64),
        np.array(3),
    ],
)
def test_keys_of_another_type_or_shape_are_refused_as_before(direct, keys):
    table = filled()
    with pytest.raises(AttributeError, match="_general"):
        direct(table, keys)
    with pytest.raises(DataError, match=r"int64 \[n\]"):
        table.lookup(keys, train=False)


def test_the_method_looks_like_the_one_in_python_and_refuses_what_it_refuses():
    table, keys = filled(), torch.arange(3)
    method, general = type(table).lookup, type(table)._general
    assert list(signature(method).parameters) == list(signature(general).parameters)
    assert method.__doc__ == general.__doc__.splitlines()[0]
    with pytest.raises(TypeError, match="required keyword-only argument: 'train'"):
        table.lookup(keys)
    with pytest.raises(TypeError, match="unexpected keyword argument 'trian'"):
        table.lookup(keys, train=False, trian=True)
    with pytest.raises(TypeError, match="positional"):
        table.lookup(keys, False)
    with pytest.raises(TypeError, match="doesn't apply to a 'int' object"):
        method(3, keys, train=False)


def test_a_method_taken_from_a_table_holds_it():
    table, keys = filled(), torch.arange(3)
    expected, gone = table.lookup(keys, train=False), weakref.ref(table)
    read = table.lookup
    del table
    gc.collect()
    assert torch.equal(read(keys, train=False), expected)
    del read
    gc.collect()
    assert gone() is None


def test_a_table_that_takes_the_place_of_one_that_ended_is_the_one_that_is_read():
    from nonet.embedding.tables.native_table import NativeTable

    keys, other = torch.arange(6), filled(6, 4, init_scale=0.5)
    for seed in range(40):
        table = NativeTable("item", 4, seed=seed)
        made = table.lookup(keys, train=True)
        for _ in range(2):
            assert torch.equal(table.lookup(keys, train=False), made)
        if seed % 2:
            assert not torch.equal(other.lookup(keys, train=False), made)
            assert torch.equal(table.lookup(keys, train=False), made)
        del table


def test_a_table_in_a_cycle_can_be_read_by_its_finalizers():
    code = """
import gc, torch
from nonet.embedding.tables.native_table import NativeTable
class Holder:
    def __del__(self): print(self.table.lookup(torch.arange(3), train=False).shape[0])
table, holder = NativeTable("item", 4, seed=7), Holder()
table.lookup(torch.arange(100_000), train=True)
holder.table, table.holder = table, holder
del table, holder
gc.collect()
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=800)
    assert (done.returncode, done.stdout) == (0, "3\n")


@pytest.mark.parametrize("form", [torch.Tensor.clone, torch.Tensor.numpy], ids=["torch", "numpy"])
def test_rows_are_not_written_over_their_keys(form):
    table, keys = filled(8, 2), form(torch.arange(4))
    before = table.hash_state()
    over = torch.as_tensor(keys).view(torch.float32).view(4, 2)
    for train in (False, True):
        with pytest.raises(DataError, match="over their keys"):
            table.lookup(keys, train=train, out=over)
    assert table.lookup(keys, train=True, out=torch.empty(4, 2)).shape == (4, 2)
    assert table.hash_state() == before


def test_steps_are_whole_numbers_of_any_kind():
    table, keys = filled(8), torch.arange(8)
    for wanted in (keys, keys.numpy(), keys.repeat_interleave(2)[::2]):  # the last is left to Python
        table.lookup(wanted, train=True, step=np.int64(3))
        table.apply(wanted, torch.zeros(8, 12), np.int64(3))
        assert (table.step, type(table.step)) == (3, int)
        for step in (2.5, "3"):
            with pytest.raises(TypeError, match="integer"):
                table.apply(wanted, torch.zeros(8, 12), step)


def test_rows_can_be_written_and_outlive_their_table():
    table = filled()
    keys = torch.arange(50)
    rows = table.lookup(keys, train=False)
    expected = rows.clone()
    rows += 1
    assert torch.equal(table.lookup(keys, train=False), expected)
    del table
    gc.collect()
    assert torch.equal(rows, expected + 1)
    assert rows.data_ptr() % 64 == 0


def test_memory_used_again_is_never_that_of_rows_still_held():
    table = filled()
    held, expected = [], []
    for turn in range(60):
        keys = torch.arange(turn, turn + (20, 20, 30)[turn % 3])
        held.append(table.lookup(keys, train=False)[1:])  # a view holds its rows too
        expected.append(table.lookup(keys, train=True)[1:])
        if turn % 4 == 3:
            del held[turn % 7 % len(held)], expected[turn % 7 % len(expected)]
    assert len({rows.data_ptr() for rows in held}) == len(held) == len(expected) == 45
    assert all(torch.equal(rows, other) for rows, other in zip(held, expected, strict=True))


def test_rows_take_gradients_and_travel_like_any_tensor():
    table = filled()
    rows = table.lookup(torch.arange(5), train=False).requires_grad_()
    (rows * 2).sum().backward()
    assert torch.equal(rows.grad, torch.full((5, 12), 2.0))
    assert torch.equal(torch.from_numpy(rows.detach().numpy().copy()), rows)


def test_memory_of_rows_is_given_back():
    code = """
import resource, torch
from nonet.embedding.tables.native_table import NativeTable
table = NativeTable("item", 64, seed=7)
keys = torch.arange(4096)
table.lookup(keys, train=True)
for _ in range(50): table.lookup(keys, train=False)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
for _ in range(400): table.lookup(keys, train=False)  # 400 MiB
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""
    grown = int(
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    )
    assert grown < 20_000  # KiB


def test_readers_and_a_writer_in_threads_see_whole_rows():
    table = filled(2000, 64, optimizer="sgd", lr=1.0, init_scale=0.0)
    keys, stop, torn = torch.arange(2000), threading.Event(), []

    def read(count):
        while not stop.is_set():
            rows = table.lookup(keys[:count], train=False)
            torn.extend(row for row in rows.tolist() if len(set(row)) > 1)

    readers = [threading.Thread(target=read, args=(count,)) for count in (64, 64, 2000)]
    for reader in readers:
        reader.start()
    for step in range(1, 40):
        table.apply(keys, torch.ones(2000, 64), step)
    stop.set()
    for reader in readers:
        reader.join()
    assert not torn
    assert np.unique(table.lookup(keys[:64], train=False)).tolist() == [-39.0]


@pytest.mark.skipif(native_library.find_compiler() is None, reason="no C++ compiler on this machine")
@pytest.mark.parametrize(
    "without",
    [
        "native.list_packaged = native._get_python_include = lambda: []",
        "native.Tensor = type('Other', (), {})",
    ],
)
def test_without_pythons_headers_or_torchs_exchange_lookups_go_through_ctypes(tmp_path, without):
    code = f"""
import torch
import nonet.embedding.tables.native_library as native
{without}
from nonet.embedding.tables.native_table import NativeTable
table = NativeTable("item", 4, seed=7)
made = table.lookup(torch.arange(9), train=True)
print(hasattr(NativeTable.lookup, "__code__"), torch.equal(made, table.lookup(torch.arange(9), train=False)))
"""
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | {"NONET_CACHE": str(tmp_path)},
        capture_output=True, text=True, check=True, timeout=800,
    )  # fmt: skip
    assert done.stdout.split() == ["True", "True"]
