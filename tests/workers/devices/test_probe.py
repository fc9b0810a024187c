"""Probes of a node and of devices find a disk and a device that do not work."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from nonet.workers.devices import probe
from nonet.workers.devices.vendors import Device, get_device


@dataclass(frozen=True, slots=True)
class OnHost(Device):
    """A device whose tensors are on the host, of which the device with id 2 fails and id 3 computes wrongly."""

    def claim(self, index: int = 0) -> str:
        if self.read_visible_ids()[index] == "2":
            raise RuntimeError("ECC error\non page 7")
        return "cpu"


@pytest.fixture
def standin(monkeypatch):
    monkeypatch.setattr(probe, "get_device", lambda kind: OnHost("fake", "FAKE", "FAKE_VISIBLE", "gloo"))


def test_a_node_with_a_writable_disk_is_healthy_and_keeps_no_file(tmp_path):
    assert probe.probe_host(tmp_path / "cache") == ""
    assert list((tmp_path / "cache").iterdir()) == []


def test_a_disk_that_cannot_be_written_is_found(tmp_path):
    (tmp_path / "file").touch()
    assert probe.probe_host(tmp_path / "file") == f"{tmp_path}/file cannot be written: File exists"
    assert "cannot be written" in probe.probe_host(tmp_path / "file" / "cache")


def test_a_disk_that_loses_what_was_written_is_found(tmp_path, monkeypatch):
    monkeypatch.setattr("pathlib.Path.read_bytes", lambda self: b"")
    assert probe.probe_host(tmp_path) == f"{tmp_path} does not return what was written"


def test_each_visible_device_is_probed_and_a_broken_one_named(standin, monkeypatch):
    monkeypatch.setenv("FAKE_VISIBLE", "0,2,5")
    assert probe.probe_devices("fake") == {"0": "", "2": "RuntimeError: ECC error on page 7", "5": ""}


def test_a_device_that_computes_wrongly_is_found(standin, monkeypatch):
    import torch

    monkeypatch.setenv("FAKE_VISIBLE", "3")
    right = torch.Tensor.__matmul__
    monkeypatch.setattr(torch.Tensor, "__matmul__", lambda a, b: right(a, b) + (a.dtype == torch.float32))
    assert probe.probe_devices("fake") == {"3": "it computed a wrong product"}


def test_a_host_has_no_devices_and_computes_the_product_of_a_device_rightly():
    assert probe.probe_devices("cpu") == {}
    assert get_device("cpu").probe() == ""
