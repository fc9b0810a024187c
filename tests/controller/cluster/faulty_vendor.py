"""A vendor for tests, named in NONET_DEVICES: `fake` devices compute on the host; the ids in the file $FAULTY fail."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path

from nonet.workers.devices.vendors import Device, register


@dataclass(frozen=True, slots=True)
class FaultyDevice(Device):
    def probe(self, index: int = 0) -> str:
        faulty = Path(os.environ["FAULTY"]).read_text().split()
        return "a link is down" if self.read_visible_ids()[index] in faulty else ""

    def import_torch_module(self):
        import torch

        return torch.cpu


register(FaultyDevice("fake", resource="NPU", visible="ASCEND_RT_VISIBLE_DEVICES", backend="gloo"))


def hang_elsewhere() -> str:
    """Hang in a worker, as the probe of a disk does that does not answer; do nothing in a driver."""
    import ray

    if ray.get_runtime_context().worker.mode == ray.WORKER_MODE:
        time.sleep(3600)
    return ""
