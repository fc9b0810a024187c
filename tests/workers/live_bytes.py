"""LiveBytes: counts the bytes of all tensors that exist in a thread, whatever holds them, and the largest number at a time."""

from __future__ import annotations

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveBytes(TorchDispatchMode):
    """Counts while it is entered; more than `limit` bytes at a time are an error."""

    def __init__(self, limit=None):
        super().__init__()
        self.limit, self.peak, self._bytes, self._storages = limit, 0, 0, {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves((args, kwargs, result)):
            if (
                isinstance(tensor, torch.Tensor)
                and tensor.device.type == "cpu"
                and type(tensor) is torch.Tensor
            ):
                self._add(tensor.untyped_storage())
        return result

    def _add(self, storage):
        size, known = storage.nbytes(), self._storages.get(storage._cdata)
        if known is not None and known[1] == size:
            return
        self._storages[storage._cdata] = StorageWeakRef(storage), size
        self._bytes += size - (known[1] if known else 0)
        if self._bytes > self.peak:
            self._drop_expired()
            self.peak = max(self.peak, self._bytes)
            if self.limit is not None and self.peak > self.limit:
                raise MemoryError(f"the tensors of a rank have {self.peak} bytes; {self.limit} are allowed")

    def _drop_expired(self):
        """Forget storages that were freed, and read the sizes of others again: FSDP empties storages that it keeps."""
        live = {}
        for address, (reference, _) in self._storages.items():
            if not reference.expired():
                storage = torch.UntypedStorage._new_with_weak_ptr(reference.cdata)
                if storage is not None:
                    live[address] = reference, storage.nbytes()
        self._storages, self._bytes = live, sum(size for _, size in live.values())
