from __future__ import annotations

import resource
import threading
from pathlib import Path

import pytest
import torch

from nonet.errors import ConfigError, PlacementError
from nonet.workers.devices import offload as residency
from nonet.workers.devices.offload import (
    MemoryAccount,
    OffloadableBuffers,
    ResidencyState,
    list_training_tensors,
)


def trained(steps: int, *, offload_between: bool, tmp_path) -> list[torch.Tensor]:
    """Parameters of a small model after some Adam steps, with or without a trip to the shelf before each."""
    torch.manual_seed(7)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 4))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    here = OffloadableBuffers(
        "trainer", lambda: list_training_tensors(model, optimizer), mapped_file_dir=tmp_path
    )
    for step in range(steps):
        torch.manual_seed(step)
        optimizer.zero_grad(set_to_none=False)
        model(torch.randn(32, 8)).square().mean().backward()
        optimizer.step()
        if offload_between:
            here.offload()
            assert all(p.untyped_storage().nbytes() == 0 for p in model.parameters())
            here.resume()
    return [p.detach().clone() for p in model.parameters()]


def own_bytes() -> int:
    """Resident memory that is no mapped file."""
    _, resident, shared, *_ = map(int, Path("/proc/self/statm").read_text().split())
    return (resident - shared) * resource.getpagesize()


def test_training_with_trips_to_the_shelf_between_steps_is_bit_equal(tmp_path):
    plain = trained(4, offload_between=False, tmp_path=tmp_path)
    travelled = trained(4, offload_between=True, tmp_path=tmp_path)
    assert all(torch.equal(a, b) for a, b in zip(plain, travelled, strict=True))
    assert list(tmp_path.iterdir()) == [], "parked files have no name, so nothing is left behind"


def test_the_memory_of_what_is_offloaded_is_really_given_back(tmp_path):
    block = torch.ones(64 << 20, dtype=torch.uint8)
    here = OffloadableBuffers("rollout", lambda: [block], mapped_file_dir=tmp_path)
    before = own_bytes()
    assert here.offload() == 64 << 20
    assert before - own_bytes() > 56 << 20
    assert here.resume() == 64 << 20
    assert bool((block == 1).all())


def test_tied_tensors_and_views_move_once_and_stay_themselves(tmp_path):
    whole = torch.arange(100.0)
    view, tied = whole[10:20], torch.nn.Parameter(whole)
    here = OffloadableBuffers("model", lambda: [whole, view, tied], mapped_file_dir=tmp_path)
    assert here.resident_bytes == 400
    here.offload()
    assert (here.resident_bytes, here.offloaded_bytes) == (0, 400)
    here.resume()
    assert view.tolist() == list(range(10, 20))
    view[0] = -1
    assert tied[10] == whole[10] == -1


def test_moves_that_the_state_does_not_allow_are_refused(tmp_path):
    block = torch.ones(10)
    here = OffloadableBuffers("trainer", lambda: [block], mapped_file_dir=tmp_path)
    with pytest.raises(PlacementError, match="cannot resume trainer: it is resident, not offloaded"):
        here.resume()
    here.offload()
    with pytest.raises(PlacementError, match="cannot offload trainer: it is offloaded"):
        here.offload()


def test_groups_that_do_not_fit_together_take_turns_and_cannot_do_otherwise(tmp_path):
    account = MemoryAccount(capacity_bytes=1000)
    a, b = torch.ones(600, dtype=torch.uint8), torch.ones(600, dtype=torch.uint8)
    trainer = OffloadableBuffers("trainer", lambda: [a], account, mapped_file_dir=tmp_path)
    with pytest.raises(
        PlacementError, match="rollout needs 600 resident bytes, the device has 1000 and trainer 600"
    ):
        OffloadableBuffers("rollout", lambda: [b], account, mapped_file_dir=tmp_path)
    trainer.offload()
    rollout = OffloadableBuffers("rollout", lambda: [b], account, mapped_file_dir=tmp_path)
    with pytest.raises(PlacementError, match="offload one of them first"):
        trainer.resume()
    assert trainer.state is ResidencyState.OFFLOADED
    assert a.untyped_storage().nbytes() == 0
    rollout.offload()
    trainer.resume()
    assert account.held == {"trainer": 600}
    assert bool((a == 1).all())


def test_a_move_that_fails_half_way_is_undone(tmp_path, monkeypatch):
    first, second = torch.arange(50.0), torch.arange(50.0, 100.0)
    here = OffloadableBuffers(
        "trainer", lambda: [first, second], MemoryAccount(10_000), mapped_file_dir=tmp_path
    )
    real, calls = residency._copy_to_host, []

    def breaks(storage, folder):
        calls.append(storage)
        if len(calls) == 2:
            raise OSError("no space left on device")
        return real(storage, folder)

    monkeypatch.setattr(residency, "_copy_to_host", breaks)
    with pytest.raises(OSError, match="no space left"):
        here.offload()
    assert here.state is ResidencyState.RESIDENT
    assert torch.equal(torch.cat([first, second]), torch.arange(100.0))
    monkeypatch.setattr(residency, "_copy_to_host", real)
    here.offload()
    monkeypatch.setattr(
        residency, "_view_bytes", lambda storage: (_ for _ in ()).throw(MemoryError("device"))
    )
    with pytest.raises(MemoryError):
        here.resume()
    assert here.state is ResidencyState.OFFLOADED
    assert here.resident_bytes == 0
    monkeypatch.undo()
    here.resume()
    assert torch.equal(torch.cat([first, second]), torch.arange(100.0))


def test_two_moves_at_once_are_refused(tmp_path, monkeypatch):
    block, started, go = torch.ones(10), threading.Event(), threading.Event()
    here = OffloadableBuffers("trainer", lambda: [block], mapped_file_dir=tmp_path)
    real = residency._copy_to_host

    def slow(storage, folder):
        started.set()
        assert go.wait(10)
        return real(storage, folder)

    monkeypatch.setattr(residency, "_copy_to_host", slow)
    mover = threading.Thread(target=here.offload)
    mover.start()
    assert started.wait(10)
    try:
        assert here.state is ResidencyState.MOVING
        with pytest.raises(PlacementError, match="trainer is moving"):
            here.resume()
    finally:
        go.set()
        mover.join(10)
    assert here.state is ResidencyState.OFFLOADED


def test_memory_that_is_not_ours_is_refused_before_anything_moves(tmp_path):
    import numpy as np

    ours, theirs = torch.ones(10), torch.from_numpy(np.ones(10))
    here = OffloadableBuffers("trainer", lambda: [ours, theirs], mapped_file_dir=tmp_path)
    with pytest.raises(ConfigError, match="clone it first"):
        here.offload()
    assert bool((ours == 1).all())
    assert here.state is ResidencyState.RESIDENT


def test_buffers_that_could_not_be_listed_can_be_moved_later(tmp_path):
    tensors = {"weight": torch.ones(10)}
    here = OffloadableBuffers("trainer", lambda: [tensors["weight"]], mapped_file_dir=tmp_path)
    weight = tensors.pop("weight")
    with pytest.raises(KeyError, match="weight"):
        here.offload()
    tensors["weight"] = weight
    assert here.offload() == 40
