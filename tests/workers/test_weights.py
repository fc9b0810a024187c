"""Weights in buckets: bounded, whole or not at all; files are those of the safetensors library."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import save_file

from nonet.errors import CheckpointError, StaleVersion
from nonet.stored_tensors import StoredTensors, TensorSlice
from nonet.workers.weight_files import SavedTensors, TensorFiles, merge_shards, write_tensors
from nonet.workers.weights import (
    IncomingWeights,
    OutgoingWeights,
    pack,
    plan_buckets,
    to_meta_tensors,
    unpack,
)

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
    return [pack(bucket, named) for bucket in plan_buckets(named, MOST)]


def same(one, other):
    return all(
        torch.equal(a, b) for a, b in zip(one.state_dict().values(), other.state_dict().values(), strict=True)
    )


def test_buckets_hold_every_element_once_and_no_more_than_their_bytes():
    named = Model().state_dict()
    found = plan_buckets(named, MOST)
    assert found == plan_buckets(to_meta_tensors(named), MOST)
    assert len(found) > 5
    counts = {name: torch.zeros(tensor.numel(), dtype=torch.int64) for name, tensor in named.items()}
    for bucket in found:
        assert 0 < sum(piece.select_from(named).nbytes for piece in bucket) <= MOST
        for piece in bucket:
            counts[piece.name][piece.start : piece.stop] += 1
    assert all(bool((count == 1).all()) for count in counts.values())


def test_a_model_of_many_buckets_is_taken_over_when_the_last_has_come_in_whatever_order():
    source, model = Model(1), Model(0)
    incoming = IncomingWeights(model)
    for part in reversed(parts(source)):
        assert not same(model, source)
        incoming.take(3, part)
    incoming.swap(3)
    assert same(model, source)
    assert model.head.weight is model.table


def test_a_set_that_lacks_a_bucket_is_never_served():
    source, model = Model(1), Model(0)
    incoming = IncomingWeights(model)
    first, *others = parts(source)
    for part in others:
        incoming.take(3, part)
        incoming.take(3, part)  # one that comes again is no other
    with pytest.raises(StaleVersion, match=r"version 3 are not whole: 2,437 of 2,465 bytes came"):
        incoming.swap(3)
    assert same(model, Model(0))
    with pytest.raises(StaleVersion, match="version 4"):
        incoming.swap(4)
    incoming.take(3, first)
    incoming.swap(3)
    assert same(model, source)


def test_buckets_of_two_versions_are_never_mixed():
    model = Model(0)
    incoming = IncomingWeights(model)
    for part in parts(Model(1))[:-1]:
        incoming.take(3, part)
    incoming.take(4, parts(Model(2))[-1])
    with pytest.raises(StaleVersion):
        incoming.swap(4)
    assert same(model, Model(0))


def test_weights_of_another_model_are_refused():
    other = torch.nn.Linear(400, 1)
    with pytest.raises(CheckpointError, match="of weight do not fit this model"):
        IncomingWeights(Model()).take(1, parts(other)[0])


@pytest.mark.parametrize("bound", [64, 1 << 20])
def test_files_are_those_of_the_library_byte_for_byte(tmp_path, monkeypatch, bound):
    monkeypatch.setattr("nonet.workers.weight_files.BUCKET_BYTES", bound)
    named = {
        f"{i}.{name}": value
        for i in range(12)
        for name, value in Model(i).state_dict().items()
        if name != "head.weight"
    }
    write_tensors(tmp_path / "ours" / "model.safetensors", named)
    save_file(named, tmp_path / "theirs")
    assert (tmp_path / "ours" / "model.safetensors").read_bytes() == (tmp_path / "theirs").read_bytes()
    found = StoredTensors(tmp_path / "ours" / "model.safetensors")
    assert all(torch.equal(found[name], value) for name, value in named.items())


def test_weights_that_were_sent_and_written_can_still_be_offloaded(tmp_path):
    named = Model().state_dict()
    write_tensors(tmp_path / "model.safetensors", named)
    assert all(len(pack(bucket, named)) for bucket in plan_buckets(named, MOST))
    assert all(tensor.untyped_storage().resizable() for tensor in named.values())


def sent(outgoing, model, version, base=None):
    named = model.state_dict()
    return [outgoing.pack_bucket(number, named, version, base) for number in range(len(outgoing.buckets))]


def test_a_delta_holds_the_blocks_that_changed_and_makes_the_same_model():
    source, model = Model(1), Model(0)
    outgoing, incoming = OutgoingWeights(source.state_dict(), MOST, 64), IncomingWeights(model)
    sizes = []
    for version in (1, 2, 3):
        parts = sent(outgoing, source, version, incoming.version)
        sizes.append(sum(len(part) for part in parts))
        for part in parts:
            assert not same(model, source) or version == 3  # whose source did not change
            incoming.take(version, part)
        incoming.swap(version)
        assert same(model, source)
        if version == 1:
            with torch.no_grad():
                source.table[3, 4] += 1
    whole, changed, nothing = sizes
    assert changed - nothing < whole / 10
    assert whole > sum(tensor.nbytes for tensor in source.state_dict().values())


def test_a_reader_that_missed_a_version_is_told_and_catches_up_by_a_whole_one():
    source, model = Model(1), Model(0)
    outgoing, late = OutgoingWeights(source.state_dict(), MOST, 64), IncomingWeights(model)
    sent(outgoing, source, 1)
    for part in sent(outgoing, source, 2, 1)[:1]:
        with pytest.raises(
            StaleVersion, match="version 2 is a change of version 1, here is None: publish it whole"
        ):
            late.take(2, part)
    for part in sent(outgoing, source, 3, late.version):
        late.take(3, part)
    late.swap(3)
    assert same(model, source)
    assert late.version == 3
    assert "base" not in unpack(sent(outgoing, source, 4, 2)[0]).facts  # checksums are of version 3 alone
    half = sent(outgoing, source, 5, 4)[1:]
    late.version = 4
    for part in half:
        late.take(5, part)
    with pytest.raises(StaleVersion, match=r"\d+ of \d+ buckets came"):
        late.swap(5)


def test_a_bucket_whose_bytes_changed_on_the_way_is_refused():
    data = parts(Model(1))[0].copy()
    data[-1] ^= 1
    with pytest.raises(CheckpointError, match="came with other bytes than were sent"):
        IncomingWeights(Model()).take(1, data)


def test_shards_are_of_bounded_bytes_and_read_as_one_file(tmp_path):
    named = {name: value for name, value in Model(2).state_dict().items() if name != "head.weight"}
    files = TensorFiles.from_tensors("model", named, 100, ranks=2)
    assert len(files.files) > 2
    for rank in range(2):
        for path in SavedTensors(files, named).make_writer(rank, copy=False)(tmp_path):
            if path.suffix == ".safetensors":
                stored = StoredTensors(path)
                assert len(stored) == 1 or sum(named[name].nbytes for name in stored) <= 100
    path = tmp_path / "model.safetensors"
    found = StoredTensors(path)
    assert found.keys() == named.keys()
    assert all(torch.equal(found[name], value) for name, value in named.items())
    assert merge_shards(path, tmp_path / "whole").read_bytes() == _one_file(tmp_path / "one", named)
    (tmp_path / files.get_file_name(1)).unlink()
    with pytest.raises(
        CheckpointError, match=r"model.safetensors.index.json names model-00002-of-0000\d.safetensors"
    ):
        StoredTensors(path)
    with pytest.raises(
        CheckpointError, match=r"there is no .*/other.safetensors, and no other.safetensors.index.json"
    ):
        StoredTensors(tmp_path / "other.safetensors")


def test_slices_of_several_ranks_are_read_as_whole_tensors_and_in_other_slices(tmp_path):
    named = {"matrix": torch.arange(12.0).view(4, 3), "number": torch.tensor(5), "empty": torch.empty(0, 3)}
    own = [
        [TensorSlice("matrix", (0, 0), (4, 2))],
        [TensorSlice("matrix", (0, 2), (1, 1)), TensorSlice("number", (), ())],
        [TensorSlice("matrix", (1, 2), (3, 1)), TensorSlice("empty", (0, 0), (0, 3))],
    ]
    files = TensorFiles.from_slices("model", named, own, max_bytes=1)
    for rank, slices in enumerate(own):
        tensors = {piece.key: piece.select_from(named[piece.name]).clone() for piece in slices}
        SavedTensors(files, tensors).make_writer(rank, copy=False)(tmp_path)
    path = tmp_path / "model.safetensors"
    stored = StoredTensors(path)
    assert stored.keys() == named.keys()
    assert all(torch.equal(stored[name], value) for name, value in named.items())
    assert all(stored.get_shape(name) == tuple(value.shape) for name, value in named.items())
    wanted = TensorSlice("matrix", (0, 1), (3, 2))
    assert torch.equal(stored.read_slice(wanted), named["matrix"][:3, 1:])
    assert merge_shards(path, tmp_path / "whole").read_bytes() == _one_file(tmp_path / "one", named)


def test_a_part_is_read_from_any_neighbouring_slices(tmp_path):
    named = {"matrix": torch.arange(24.0).view(8, 3)}
    own = [TensorSlice("matrix", (row, 0), (2, 3)) for row in (0, 2, 4, 6)]
    files = TensorFiles.from_slices("model", named, [own], max_bytes=100)
    tensors = {piece.key: piece.select_from(named["matrix"]).clone() for piece in own}
    SavedTensors(files, tensors).make_writer(0, copy=False)(tmp_path)
    stored = StoredTensors(tmp_path / "model.safetensors")
    for first in range(8):
        for rows in range(1, 9 - first):
            part = stored.read_slice(TensorSlice("matrix", (first, 1), (rows, 2)))
            assert torch.equal(part, named["matrix"][first : first + rows, 1:])


def test_slices_that_do_not_make_a_whole_tensor_are_an_error(tmp_path):
    named = {"matrix": torch.arange(12.0).view(4, 3)}
    own = [TensorSlice("matrix", (0, 0), (3, 3))]
    files = TensorFiles.from_slices("model", named, [own], max_bytes=100)
    SavedTensors(files, {own[0].key: named["matrix"][:3]}).make_writer(0, copy=False)(tmp_path)
    with pytest.raises(CheckpointError, match="3 elements of matrix are not there"):
        StoredTensors(tmp_path / "model.safetensors")["matrix"]


def _one_file(path, named):
    write_tensors(path, named)
    return path.read_bytes()
