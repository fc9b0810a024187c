"""Weights in buckets: bounded, whole or not at all; files are those of the safetensors library."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import save_file

from nonet.errors import CheckpointError, StaleVersion
from nonet.workers.weights import Incoming, buckets, outline, pack, read_tensors, write_tensors

MOST = 256  # bytes a bucket


class Model(torch.nn.Module):
    """A matrix of five buckets, tied to a second name; small ones beside it, of other dtypes and without elements too."""

    def __init__(self, seed: int = 0):
        super().__init__()
        draw = torch.Generator().manual_seed(seed)
        self.vector = torch.nn.Parameter(torch.randn(7, generator=draw))
        self.table = torch.nn.Parameter(torch.randn(20, 15, generator=draw))
        self.head = torch.nn.Linear(15, 20, bias=False)
        self.head.weight = self.table
        self.narrow = torch.nn.Parameter(torch.randn(3, 5, generator=draw).bfloat16())
        self.scalar = torch.nn.Parameter(torch.randn((), generator=draw))
        self.register_buffer("seen", torch.tensor([True, False, bool(seed % 2)]))
        self.register_buffer("none", torch.zeros(0, 4))


def parts(model):
    named = model.state_dict()
    return [pack(bucket, named) for bucket in buckets(named, MOST)]


def same(one, other):
    return all(
        torch.equal(a, b) for a, b in zip(one.state_dict().values(), other.state_dict().values(), strict=True)
    )


def test_buckets_hold_every_element_once_and_no_more_than_their_bytes():
    named = Model().state_dict()
    found = buckets(named, MOST)
    assert found == buckets(outline(named), MOST)
    assert len(found) > 5
    counts = {name: torch.zeros(tensor.numel(), dtype=torch.int64) for name, tensor in named.items()}
    for bucket in found:
        assert 0 < sum(piece.of(named).nbytes for piece in bucket) <= MOST
        for piece in bucket:
            counts[piece.name][piece.start : piece.stop] += 1
    assert all(bool((count == 1).all()) for count in counts.values())


def test_a_model_of_many_buckets_is_taken_over_when_the_last_has_come_in_whatever_order():
    source, model = Model(1), Model(0)
    incoming = Incoming(model)
    for part in reversed(parts(source)):
        assert not same(model, source)
        incoming.take(3, part)
    incoming.swap(3)
    assert same(model, source)
    assert model.head.weight is model.table


def test_a_set_that_lacks_a_bucket_is_never_served():
    source, model = Model(1), Model(0)
    incoming = Incoming(model)
    first, *others = parts(source)
    for part in others:
        incoming.take(3, part)
        incoming.take(3, part)  # one that comes again is no other
    with pytest.raises(StaleVersion, match=r"version 3 are not whole: \d+ of 6\d\d came"):
        incoming.swap(3)
    assert same(model, Model(0))
    with pytest.raises(StaleVersion, match="version 4"):
        incoming.swap(4)
    incoming.take(3, first)
    incoming.swap(3)
    assert same(model, source)


def test_buckets_of_two_versions_are_never_mixed():
    model = Model(0)
    incoming = Incoming(model)
    for part in parts(Model(1))[:-1]:
        incoming.take(3, part)
    incoming.take(4, parts(Model(2))[-1])
    with pytest.raises(StaleVersion):
        incoming.swap(4)
    assert same(model, Model(0))


def test_weights_of_another_model_are_refused():
    other = torch.nn.Linear(400, 1)
    with pytest.raises(CheckpointError, match="of weight do not fit this model"):
        Incoming(Model()).take(1, parts(other)[0])


@pytest.mark.parametrize("bound", [64, 1 << 20])
def test_files_are_those_of_the_library_byte_for_byte(tmp_path, monkeypatch, bound):
    monkeypatch.setattr("nonet.workers.weights.BUCKET_BYTES", bound)
    named = {
        f"{i}.{name}": value
        for i in range(12)
        for name, value in Model(i).state_dict().items()
        if name != "head.weight"
    }
    write_tensors(tmp_path / "ours" / "model.safetensors", named)
    save_file(named, tmp_path / "theirs")
    assert (tmp_path / "ours" / "model.safetensors").read_bytes() == (tmp_path / "theirs").read_bytes()
    found = read_tensors(tmp_path / "ours" / "model.safetensors")
    assert all(torch.equal(found[name], value) for name, value in named.items())


def test_weights_that_were_sent_and_written_can_still_be_offloaded(tmp_path):
    named = Model().state_dict()
    write_tensors(tmp_path / "model.safetensors", named)
    assert all(pack(bucket, named) for bucket in buckets(named, MOST))
    assert all(tensor.untyped_storage().resizable() for tensor in named.values())
