"""The collective backend "hccl": gloo on the same bytes. Sums between npu tensors of several processes, as Nonet asks them."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch import Tensor

from torch_npu.kernels import count
from torch_npu.memory import to_host


class Hccl(dist.ProcessGroup):
    """A group whose all-reduce takes npu tensors, and the host's beside them."""

    def __init__(self, store: Any, rank: int, size: int, timeout: Any):
        super().__init__(rank, size)
        self._gloo = dist.ProcessGroupGloo(store, rank, size, timeout)

    def getBackendName(self) -> str:
        return "hccl"

    def allreduce(self, tensors: list[Tensor], options: Any) -> Any:
        if any(tensor.device.type == "npu" for tensor in tensors):
            count("hccl::allreduce")
        return self._gloo.allreduce([_bytes_of(tensor) for tensor in tensors], options)

    def shutdown(self) -> None:
        pass


def register() -> None:
    """Make torch.distributed know the backend."""
    dist.Backend.register_backend("hccl", Hccl, devices=["npu"])


def _bytes_of(tensor: Tensor) -> Tensor:
    return to_host(tensor) if tensor.device.type == "npu" else tensor
