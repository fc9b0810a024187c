"""A reader's lookup straight from torch's tensors: the rows that the call through ctypes gives, and never another answer."""

import gc
import os
import subprocess
import sys
import threading
import weakref
from inspect import signature

import numpy as np
import pytest
import torch

from nonet.embedding import native_library
from nonet.embedding.core import core_status
from nonet.errors import DataError

pytestmark = pytest.mark.skipif(not core_status().native, reason=f"no core: {core_status().reason}")


def filled(rows=3000, dim=12, **settings):
    from nonet.embedding.native_table import NativeTable

    table = NativeTable("item", dim, seed=7, **settings)
    table.lookup(torch.arange(rows), train=True)
    return table


@pytest.fixture
def direct(monkeypatch):
    """Reads that fail where they are left to Python."""

    def read(table, keys):
        with monkeypatch.context() as patch:
            patch.delattr(type(table), "_general")
            return table.lookup(keys, train=False)

    return read


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("count", [0, 1, 2, 255, 256, 257, 9000])
def test_rows_are_those_of_the_call_through_ctypes_and_absent_keys_are_counted_once(direct, count, dtype):
    table = filled(dtype=dtype, default=0.5)
    keys = torch.randint(0, 4000, (count,))
    expected = table.lookup(keys, train=False, out=torch.empty(count, 12))
    missing = table.absent
    found = table.lookup(keys, train=False)
    assert found.dtype is torch.float32
    assert (tuple(found.shape), found.stride(), found.is_contiguous()) == ((count, 12), (12, 1), True)
    assert torch.equal(found, expected)
    assert torch.equal(direct(table, keys), expected)
    assert missing == int((keys >= 3000).sum())
    assert table.absent == 3 * missing


def test_keys_that_do_not_lie_plainly_go_the_other_way_with_the_same_rows(direct):
    table = filled()
    keys = torch.arange(100)
    views = {
        "every other": (keys[::2], keys[::2].clone()),
        "numpy": (keys.numpy(), keys),
        "a parameter's": (torch.nn.Parameter(keys, requires_grad=False), keys),
    }
    for wanted, plain in views.values():
        with pytest.raises(AttributeError, match="_general"):
            direct(table, wanted)
        assert torch.equal(table.lookup(wanted, train=False), direct(table, plain))
    tail = keys[90:]  # begins within its storage
    assert torch.equal(direct(table, tail), table.lookup(keys, train=False)[90:])


@pytest.mark.parametrize(
    "keys", [torch.arange(4, dtype=torch.int32), torch.arange(4.0), torch.zeros(2, 2, dtype=torch.int64)]
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
    from nonet.embedding.native_table import NativeTable

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
from nonet.embedding.native_table import NativeTable
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


@pytest.mark.skipif(native_library.compiler() is None, reason="no C++ compiler on this machine")
@pytest.mark.parametrize(
    "without",
    ["native.packaged = native._python_headers = lambda: []", "native.Tensor = type('Other', (), {})"],
)
def test_without_pythons_headers_or_torchs_exchange_lookups_go_through_ctypes(tmp_path, without):
    code = f"""
import torch
import nonet.embedding.native_library as native
{without}
from nonet.embedding.native_table import NativeTable
table = NativeTable("item", 4, seed=7)
made = table.lookup(torch.arange(9), train=True)
print(hasattr(NativeTable.lookup, "__code__"), torch.equal(made, table.lookup(torch.arange(9), train=False)))
"""
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | {"NONET_CACHE": str(tmp_path)},
        capture_output=True, text=True, check=True, timeout=120,
    )  # fmt: skip
    assert done.stdout.split() == ["True", "True"]
