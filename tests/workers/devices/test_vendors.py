"""Devices by name, in one process: what Ray is told, what torch is asked, and a vendor of one's own."""

from __future__ import annotations

import subprocess
import sys
import types

import pytest
import torch

from nonet.errors import ConfigError
from nonet.workers.devices import vendors
from nonet.workers.devices.environment import PoolEnvironment
from nonet.workers.devices.vendors import Device, get_device, register

VENDOR = """
from nonet.workers.devices.vendors import Device, register

register(Device("maia", "MAIA", "MAIA_VISIBLE_DEVICES", "gloo", "vendor_torch", vars={"MAIA_EXACT": "1"}))
"""


class FakeModule(types.ModuleType):
    """What torch keeps of a vendor, as torch.cuda is for NVIDIA."""

    def __init__(self):
        super().__init__("torch.fake")
        self.calls = []

    def is_available(self):
        return True

    def device_count(self):
        return 2

    def set_device(self, index):
        self.calls.append(("set_device", index))

    def synchronize(self):
        self.calls.append(("synchronize",))

    def manual_seed_all(self, seed):
        self.calls.append(("seed", seed))


@pytest.fixture
def vendor(monkeypatch):
    module = FakeModule()
    monkeypatch.setattr("nonet.workers.devices.vendors._DEVICES", {})
    monkeypatch.setattr(torch, "maia", module, raising=False)
    monkeypatch.setitem(sys.modules, "vendor_torch", types.ModuleType("vendor_torch"))
    register(Device("maia", "MAIA", "MAIA_VISIBLE_DEVICES", "gloo", "vendor_torch"))
    return get_device("maia:1"), module


def test_ray_is_asked_for_gpus_by_number_and_for_others_by_name():
    assert get_device("cuda").get_ray_options(0.5) == {"num_gpus": 0.5}
    assert get_device("npu").get_ray_options(2) == {"resources": {"NPU": 2}}
    assert get_device("cpu").get_ray_options(2) == {} == get_device("npu").get_ray_options(0)


def test_each_device_has_its_backend_and_host_tensors_keep_gloo():
    found = {name: get_device(name).get_collective_backends() for name in ("cpu", "cuda", "npu")}
    assert found == {"cpu": "gloo", "cuda": "cpu:gloo,cuda:nccl", "npu": "cpu:gloo,npu:hccl"}


def test_visible_ids_are_those_that_ray_set():
    environment = {"CUDA_VISIBLE_DEVICES": "3,5", "ASCEND_RT_VISIBLE_DEVICES": ""}
    assert get_device("cuda").read_visible_ids(environment) == ("3", "5")
    assert (
        get_device("npu").read_visible_ids(environment)
        == ()
        == get_device("cpu").read_visible_ids(environment)
    )


def test_unknown_device_lists_the_known_and_the_way_to_register():
    with pytest.raises(ConfigError, match=r"no device 'tpu'; known: cpu, cuda, npu\..*NONET_DEVICES"):
        get_device("tpu")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_a_device_that_is_not_there_is_said_before_torch_says_it():
    with pytest.raises(
        ConfigError, match=r"finds no cuda device here; CUDA_VISIBLE_DEVICES is .*Give the role"
    ):
        get_device("cuda").claim()
    with pytest.raises(ConfigError, match="no collective backend 'nccl' for cuda; it has gloo"):
        get_device("cuda").check_collectives()


def test_a_missing_vendor_package_names_the_interpreter_that_lacks_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch_npu", None)
    with pytest.raises(ConfigError, match=r"needs the package torch_npu, which .*python.* cannot import"):
        get_device("npu").claim()


def test_the_host_is_always_there():
    host = get_device("cpu")
    assert host.claim() == "cpu"
    host.check_collectives()
    host.synchronize()
    host.seed(5)
    first = torch.rand(3)
    host.seed(5)
    assert torch.equal(first, torch.rand(3))


def test_autocast_changes_matrix_products_alone():
    x = torch.ones(4, 4)
    with get_device("cpu").autocast("bf16"):
        assert (x @ x).dtype == torch.bfloat16
        assert (x + x).dtype == torch.float32
    with get_device("cpu").autocast():
        assert (x @ x).dtype == torch.float32
    with pytest.raises(ConfigError, match="precision 'fp8' is not one of fp32, bf16, fp16"):
        get_device("cpu").autocast("fp8")


def test_a_registered_vendor_is_used_as_the_shipped_ones_are(vendor):
    kind, module = vendor
    assert kind.get_ray_options(3) == {"resources": {"MAIA": 3}}
    assert kind.claim() == "maia:0"
    assert kind.get_collective_backends() == "cpu:gloo,maia:gloo"
    kind.synchronize()
    kind.seed(9)
    assert module.calls == [("set_device", 0), ("synchronize",), ("seed", 9)]


def test_a_module_named_in_the_environment_registers_in_every_process(tmp_path, monkeypatch):
    (tmp_path / "maia_devices.py").write_text(VENDOR)
    code = (
        "import sys; from nonet.workers.devices.vendors import get_device; d = get_device('maia'); "
        "assert not {'torch', 'ray'} & set(sys.modules); print(d.get_ray_options(2), d.vars)"
    )
    monkeypatch.setenv("NONET_DEVICES", "maia_devices")
    monkeypatch.syspath_prepend(tmp_path)
    told = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        env={"NONET_DEVICES": "maia_devices", "PYTHONPATH": ":".join(sys.path)},
    )
    assert told.stdout.strip() == "{'resources': {'MAIA': 2}} {'MAIA_EXACT': '1'}"


def test_a_module_that_cannot_be_imported_is_named_each_time(monkeypatch):
    monkeypatch.setenv("NONET_DEVICES", "no_such_vendor")
    for _ in range(2):
        with pytest.raises(ConfigError, match="NONET_DEVICES or an entry point names 'no_such_vendor'"):
            get_device("xpu")


def test_a_module_of_the_user_replaces_a_shipped_device_from_the_first_call(tmp_path, monkeypatch):
    (tmp_path / "own_cuda.py").write_text(VENDOR.replace('"maia"', '"cuda"'))
    monkeypatch.setattr(vendors, "_DEVICES", dict(vendors._DEVICES))
    monkeypatch.setenv("NONET_DEVICES", "own_cuda")
    monkeypatch.syspath_prepend(tmp_path)
    assert get_device("cuda").vars == {"MAIA_EXACT": "1"}


def test_a_device_adds_its_variables_and_the_pool_may_overrule_them():
    told = PoolEnvironment(vars={"HCCL_DETERMINISTIC": "false", "A": 1}).to_runtime_env(get_device("npu"))
    assert told == {"env_vars": {"HCCL_DETERMINISTIC": "false", "A": "1"}}
    assert PoolEnvironment().to_runtime_env(get_device("cpu")) == {}
