"""Kinds of devices by name: the only module that contains the names cuda and npu.

A `Device` has the name of its Ray resource, the environment variable that lists the visible devices, its collective
backend, the package that adds it to torch, and methods for memory, streams, seeds and autocast. The device is a
property of a pool, not of the process or the job: one run may have all kinds, and this module does not inspect the
machine until a worker claims its device. It imports torch and Ray only inside methods. To add another vendor, call
`register` in a module that the environment variable `NONET_DEVICES` or an entry point of the group `nonet.devices`
names; every process of the run imports that module (docs/how-to/devices.md).
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import importlib.metadata
import os
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from nonet.errors import ConfigError

HOST = "cpu"
PRECISIONS = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}  # Name in a scenario: torch's dtype.


@dataclass(frozen=True, slots=True)
class Device:
    """One kind of device.

    Attributes:
        name: Name of the device type in torch ("cuda").
        resource: Name of the Ray resource ("GPU", "NPU"), "" if it needs none besides CPU.
        visible: Environment variable in which Ray lists the ids of the devices of a process, "" for none.
        backend: Backend of torch.distributed.
        package: Package that must be imported to add the device to torch, "" if torch has it built in.
        vars: Environment variables for processes that use the device, for example to make sums deterministic.
        pod_resource: Name of the resource on Kubernetes, "" if it is not known.
    """

    name: str
    resource: str
    visible: str
    backend: str
    package: str = ""
    vars: Mapping[str, str] = field(default_factory=dict)
    pod_resource: str = ""

    # --- For Ray -----------------------------------------------------------------------------------------------------

    def get_ray_options(self, count: float) -> dict[str, Any]:
        """Return the keyword arguments of `ray.remote` that request `count` of this device."""
        if not self.resource or not count:
            return {}
        return {"num_gpus": count} if self.resource == "GPU" else {"resources": {self.resource: count}}

    def read_visible_ids(self, environment: Mapping[str, str] = os.environ) -> tuple[str, ...]:
        """Return the device ids that Ray gave to a process, read from its environment; () for none."""
        visible_ids = environment.get(self.visible, "") if self.visible else ""
        return tuple(device_id for device_id in visible_ids.split(",") if device_id)

    # --- For torch ---------------------------------------------------------------------------------------------------

    def to_torch_device(self, index: int = 0) -> str:
        """Return torch's name of a device of this kind; index 0 is the first device that Ray gave to this process."""
        return self.name if self.name == HOST else f"{self.name}:{index}"

    def import_torch_module(self) -> Any:
        """Import and return the module of torch for this device: torch.cpu, torch.cuda, torch.npu, ...

        Raises:
            ConfigError: The package or torch's module is missing.
        """
        import torch

        if self.package:
            try:
                importlib.import_module(self.package)
            except ImportError as error:
                raise ConfigError(
                    f"device {self.name!r} needs the package {self.package}, which {sys.executable} cannot import "
                    f"({error}); install it there, or give the pool an env whose Python has it"
                ) from None
        module = getattr(torch, self.name, None)
        if module is None:
            raise ConfigError(f"torch {torch.__version__} in {sys.executable} has no device {self.name!r}")
        return module

    def explain_unavailable(self) -> str:
        """Return why this process cannot use the device, "" if it can."""
        try:
            module = self.import_torch_module()
        except ConfigError as error:
            return str(error)
        if self.name == HOST or (module.is_available() and module.device_count()):
            return ""
        visible_devices = f"; {self.visible} is {os.environ.get(self.visible)!r}" if self.visible else ""
        return f"torch in {sys.executable} finds no {self.name} device here{visible_devices}"

    def claim(self, index: int = 0) -> str:
        """Make a device of this kind the current device of this process, and return its torch name.

        Raises:
            ConfigError: The device cannot be used.
        """
        reason = self.explain_unavailable()
        if reason:
            raise ConfigError(
                f"{reason}. Give the role a pool with another device, or start Ray on a machine that has this device."
            )
        if self.name != HOST:
            self.import_torch_module().set_device(index)
        return self.to_torch_device(index)

    def probe(self, index: int = 0) -> str:
        """Compute a product with a known result on a device; return what is wrong with it, "" if nothing is."""
        import torch

        name = self.claim(index)
        values = torch.arange(256 * 256).reshape(256, 256) % 7  # exact in every precision of the product
        operand = values.to(torch.float32).to(name)
        product = (operand @ operand).cpu()
        return "" if torch.equal(product.to(torch.int64), values @ values) else "it computed a wrong product"

    def get_collective_backends(self) -> str:
        """Return the backends of a process group whose tensors are on this device, for `init_process_group` and `new_group`.

        Host tensors use gloo in the same group: keys, counts and sparse rows are in host memory on any device.
        """
        return self.backend if self.name == HOST else f"{HOST}:gloo,{self.name}:{self.backend}"

    def check_collectives(self) -> None:
        """Raise ConfigError if this process's torch does not have the device's backend."""
        import torch.distributed as dist

        self.import_torch_module()
        if not (dist.is_available() and dist.is_backend_available(self.backend)):
            raise ConfigError(
                f"torch in {sys.executable} has no collective backend {self.backend!r} for {self.name}; "
                f"it has {', '.join(dist.Backend.backend_list[1:]) if dist.is_available() else 'none'}"
            )

    def synchronize(self) -> None:
        """Wait for all work queued on the device."""
        self.import_torch_module().synchronize()

    def release(self) -> None:
        """Return memory that this process has freed to the device, so that another process can use it.

        torch caches the device memory that it frees. On the host, Arrow's memory pool and glibc's allocator do the same.
        """
        if self.name != HOST:
            getattr(self.import_torch_module(), "empty_cache", lambda: None)()
            return
        if arrow := sys.modules.get("pyarrow"):
            arrow.default_memory_pool().release_unused()
        if trim := getattr(ctypes.CDLL(None), "malloc_trim", None):
            trim(0)

    def seed(self, seed: int) -> None:
        """Seed torch's generators of the host and of all devices of this kind."""
        import torch

        torch.manual_seed(seed)
        if self.name != HOST:
            self.import_torch_module().manual_seed_all(seed)

    def autocast(self, precision: str = "fp32") -> Any:
        """Return a context in which matrix products run in `precision` (fp32, bf16, fp16).

        Raises:
            ConfigError: The precision is unknown.
        """
        import torch

        if precision not in PRECISIONS:
            raise ConfigError(f"precision {precision!r} is not one of {', '.join(PRECISIONS)}")
        if precision == "fp32":
            return contextlib.nullcontext()
        self.import_torch_module()
        return torch.autocast(self.name, dtype=getattr(torch, PRECISIONS[precision]))


_DEVICES: dict[str, Device] = {}


def register(device: Device) -> None:
    """Register a kind of device under its name; replaces a kind that was registered under the same name before."""
    _DEVICES[device.name] = device


def get_device(name: str) -> Device:
    """Return the kind of device with a name, or with a torch name such as "cuda:1".

    Raises:
        ConfigError: The name is unknown.
    """
    kind = name.partition(":")[0]
    # What the user names may replace a shipped device; what is installed adds to them.
    _import_modules(name for name in os.environ.get("NONET_DEVICES", "").split(",") if name)
    if kind not in _DEVICES:
        _import_modules(point.module for point in importlib.metadata.entry_points(group="nonet.devices"))
    try:
        return _DEVICES[kind]
    except KeyError:
        raise ConfigError(
            f"there is no device {kind!r}; known: {', '.join(_DEVICES)}. To add a vendor, name a "
            "module that calls nonet.workers.devices.vendors.register in NONET_DEVICES or in an entry point of nonet.devices"
        ) from None


def claim(torch_name: str) -> str:
    """Make a device ("cuda:0") the current device of this process, and return its name.

    Raises:
        ConfigError: The device cannot be used.
    """
    _, _, index = torch_name.partition(":")
    return get_device(torch_name).claim(int(index or 0))


def _import_modules(names: Iterable[str]) -> None:
    """Import modules that register devices; one that is imported already runs no second time."""
    for name in names:
        try:
            importlib.import_module(name)
        except ImportError as error:
            raise ConfigError(f"NONET_DEVICES or an entry point names {name!r}: {error}") from None


register(Device(HOST, resource="", visible="", backend="gloo"))
register(
    Device(
        "cuda",
        resource="GPU",
        visible="CUDA_VISIBLE_DEVICES",
        backend="nccl",
        vars={"CUBLAS_WORKSPACE_CONFIG": ":4096:8"},
        pod_resource="nvidia.com/gpu",
    )
)
register(
    Device(
        "npu",
        resource="NPU",
        visible="ASCEND_RT_VISIBLE_DEVICES",
        backend="hccl",
        package="torch_npu",
        vars={"HCCL_DETERMINISTIC": "true"},
        pod_resource="huawei.com/Ascend910",
    )
)
