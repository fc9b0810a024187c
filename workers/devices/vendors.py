"""Devices by name: the only module that names cuda or npu.

A `Device` says how Ray counts it, which variable makes it visible, which collective backend it speaks, which package gives
torch the device, and what a worker does with it: memory, streams, seeds, autocast. A fact of a *pool*, never of the process
or the job: one run may hold all three kinds, and nothing here asks what this machine has until a worker claims its own.
No torch, no Ray at import. Another vendor is one `register` call in a module that `NONET_DEVICES` or an entry point
`nonet.devices` names, so that every process of the run makes it (docs/how-to/devices.md).
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import importlib.metadata
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from nonet.errors import ConfigError

HOST = "cpu"
PRECISIONS = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """Bytes of a device: what this process uses, the most it has used, and what the device has free and in all."""

    used: int
    peak: int
    free: int
    total: int


@dataclass(frozen=True, slots=True)
class Device:
    """One kind of device.

    name      torch's word for it ("cuda")
    resource  the name Ray counts it under ("GPU", "NPU"), "" for none beyond CPU
    visible   the environment variable Ray sets to the ids given, "" for none
    backend   the torch.distributed backend
    package   what must be imported before torch knows the device, "" for torch alone
    vars      environment variables that a process on it wants, e.g. for sums in a fixed order
    """

    name: str
    resource: str
    visible: str
    backend: str
    package: str = ""
    vars: Mapping[str, str] = field(default_factory=dict)

    # --- for Ray -----------------------------------------------------------------------------------------------------

    def get_ray_options(self, count: float) -> dict[str, Any]:
        """Keyword arguments for `ray.remote` that ask for `count` of this device."""
        if not self.resource or not count:
            return {}
        return {"num_gpus": count} if self.resource == "GPU" else {"resources": {self.resource: count}}

    def read_visible_ids(self, environment: Mapping[str, str] = os.environ) -> tuple[str, ...]:
        """The device ids that Ray gave to a process, from its environment; () for none."""
        listed = environment.get(self.visible, "") if self.visible else ""
        return tuple(part for part in listed.split(",") if part)

    # --- for torch ---------------------------------------------------------------------------------------------------

    def to_torch_device(self, index: int = 0) -> str:
        """The name torch uses for a device of this kind. Ray shows a process only its own, so the first is its own."""
        return self.name if self.name == HOST else f"{self.name}:{index}"

    def import_torch_module(self) -> Any:
        """torch.cpu, torch.cuda, torch.npu, ... Raises ConfigError where the package or torch's part is missing."""
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
            raise ConfigError(f"torch {torch.__version__} in {sys.executable} knows no device {self.name!r}")
        return module

    def explain_unavailable(self) -> str:
        """Why this process cannot use the device; "" when it can."""
        try:
            module = self.import_torch_module()
        except ConfigError as error:
            return str(error)
        if self.name == HOST or (module.is_available() and module.device_count()):
            return ""
        shown = f"; {self.visible} is {os.environ.get(self.visible)!r}" if self.visible else ""
        return f"torch in {sys.executable} finds no {self.name} device here{shown}"

    def claim(self, index: int = 0) -> str:
        """Make a device of this kind the process's own; its torch name. Raises ConfigError that says what is missing."""
        reason = self.explain_unavailable()
        if reason:
            raise ConfigError(
                f"{reason}. Give the role a pool with another device, or start Ray where it is."
            )
        if self.name != HOST:
            self.import_torch_module().set_device(index)
        return self.to_torch_device(index)

    def get_collective_backends(self) -> str:
        """The backends of a process group whose tensors live on this device, for `init_process_group` and `new_group`.

        Host tensors keep gloo beside it: keys, counts and sparse rows live in host memory whatever the device.
        """
        return self.backend if self.name == HOST else f"{HOST}:gloo,{self.name}:{self.backend}"

    def check_collectives(self) -> None:
        """Raises ConfigError where this process's torch does not speak the device's backend."""
        import torch.distributed as dist

        self.import_torch_module()
        if not (dist.is_available() and dist.is_backend_available(self.backend)):
            raise ConfigError(
                f"torch in {sys.executable} has no collective backend {self.backend!r} for {self.name}; "
                f"it has {', '.join(dist.Backend.backend_list[1:]) if dist.is_available() else 'none'}"
            )

    def synchronize(self) -> None:
        """Wait for everything queued on the device."""
        self.import_torch_module().synchronize()

    def measure_memory(self) -> DeviceMemory:
        """Bytes used, peak, free and total of this process's device; of the host for cpu."""
        if self.name == HOST:
            return _measure_host_memory()
        module = self.import_torch_module()
        free, total = module.mem_get_info()
        return DeviceMemory(module.memory_allocated(), module.max_memory_allocated(), int(free), int(total))

    def release(self) -> None:
        """Give memory that this process has freed back to the device, so that another process may have it.

        torch keeps what it frees for itself; on the host glibc does, once it has seen many large blocks.
        """
        if self.name != HOST:
            getattr(self.import_torch_module(), "empty_cache", lambda: None)()
            return
        if arrow := sys.modules.get("pyarrow"):
            arrow.default_memory_pool().release_unused()
        if trim := getattr(ctypes.CDLL(None), "malloc_trim", None):
            trim(0)

    def stream(self) -> Any:
        """A context in which work is queued on a stream of its own; the host has one queue, so nothing changes there."""
        if self.name == HOST:
            return contextlib.nullcontext()
        module = self.import_torch_module()
        return module.stream(module.Stream())

    def seed(self, seed: int) -> None:
        """Seed the host's generator and every device's."""
        import torch

        torch.manual_seed(seed)
        if self.name != HOST:
            self.import_torch_module().manual_seed_all(seed)

    def autocast(self, precision: str = "fp32") -> Any:
        """A context in which matrix products run in `precision` (fp32, bf16, fp16). Raises ConfigError."""
        import torch

        if precision not in PRECISIONS:
            raise ConfigError(f"precision {precision!r} is not one of {', '.join(PRECISIONS)}")
        if precision == "fp32":
            return contextlib.nullcontext()
        self.import_torch_module()
        return torch.autocast(self.name, dtype=getattr(torch, PRECISIONS[precision]))


_DEVICES: dict[str, Device] = {}
_asked: set[str] = set()


def register(device: Device) -> None:
    """Make a kind of device known under its name. The last one of a name wins."""
    _DEVICES[device.name] = device


def get_device(name: str) -> Device:
    """The device of that name, or of a torch name such as "cuda:1". Raises ConfigError that lists the known ones."""
    kind = name.partition(":")[0]
    if kind not in _DEVICES:
        _discover()
    try:
        return _DEVICES[kind]
    except KeyError:
        raise ConfigError(
            f"there is no device {kind!r}; known: {', '.join(_DEVICES)}. Another vendor: a module that calls "
            "nonet.workers.devices.vendors.register, named in NONET_DEVICES or as an entry point of the group nonet.devices"
        ) from None


def claim(torch_name: str) -> str:
    """Make the device of a worker's place ("cuda:0") its process's own; the name again. Raises ConfigError."""
    index = torch_name.partition(":")[2]
    return get_device(torch_name).claim(int(index or 0))


def _discover() -> None:
    """Import every module that says it registers devices, once."""
    modules = [name for name in os.environ.get("NONET_DEVICES", "").split(",") if name]
    modules += [point.module for point in importlib.metadata.entry_points(group="nonet.devices")]
    for name in modules:
        if name not in _asked:
            _asked.add(name)
            try:
                importlib.import_module(name)
            except ImportError as error:
                raise ConfigError(f"NONET_DEVICES or an entry point names {name!r}: {error}") from None


def _measure_host_memory() -> DeviceMemory:
    import resource

    page = os.sysconf("SC_PAGE_SIZE")
    with open("/proc/self/statm") as statm:
        used = int(statm.read().split()[1]) * page
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return DeviceMemory(
        used, max(used, peak), os.sysconf("SC_AVPHYS_PAGES") * page, os.sysconf("SC_PHYS_PAGES") * page
    )


register(Device(HOST, "", "", "gloo"))
register(Device("cuda", "GPU", "CUDA_VISIBLE_DEVICES", "nccl", vars={"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}))
register(
    Device(
        "npu", "NPU", "ASCEND_RT_VISIBLE_DEVICES", "hccl", "torch_npu", vars={"HCCL_DETERMINISTIC": "true"}
    )
)
