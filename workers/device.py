"""Devices by name: the only module that names cuda or npu.

A `Device` says how Ray counts it, which variable makes it visible, which collective backend it speaks and where its torch
module is. Another vendor is one `register` call.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from nonet.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Device:
    """One kind of device.

    resource   the name Ray counts it under ("GPU", "NPU"), "" for none beyond CPU
    visible    the environment variable Ray sets to the ids given
    backend    the torch.distributed backend
    """

    name: str
    resource: str
    visible: str
    backend: str

    def ray_options(self, count: float) -> dict[str, Any]:
        """Keyword arguments for `ray.remote` that ask for `count` of this device."""
        if not self.resource or not count:
            return {}
        return {"num_gpus": count} if self.resource == "GPU" else {"resources": {self.resource: count}}

    def torch_device(self, index: int = 0) -> str:
        """The name torch uses for a device of this kind."""
        return self.name if self.name == "cpu" else f"{self.name}:{index}"


_DEVICES: dict[str, Device] = {}


def register(device: Device) -> None:
    """Make a kind of device known under its name."""
    _DEVICES[device.name] = device


def device(name: str) -> Device:
    """The device of that name. Raises ConfigError that lists the known ones."""
    try:
        return _DEVICES[name]
    except KeyError:
        raise ConfigError(
            f"there is no device {name!r}; known: {', '.join(_DEVICES)}. Another vendor: nonet.workers.device.register"
        ) from None


register(Device("cpu", "", "", "gloo"))
register(Device("cuda", "GPU", "CUDA_VISIBLE_DEVICES", "nccl"))
register(Device("npu", "NPU", "ASCEND_RT_VISIBLE_DEVICES", "hccl"))
