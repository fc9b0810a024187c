"""torch.npu: what torch and Nonet ask of a vendor's module. One device, one queue, host memory."""

from __future__ import annotations

import contextlib

import torch


class Stream:
    """A queue that is always empty."""

    def synchronize(self) -> None:
        pass


class Npu:
    """The module object; torch wants these names."""

    Stream = Stream

    def is_initialized(self) -> bool:
        return True

    def is_available(self) -> bool:
        return True

    def _is_in_bad_fork(self) -> bool:
        return False

    def device_count(self) -> int:
        return 1

    def current_device(self) -> int:
        return 0

    def set_device(self, device: int) -> None:
        if torch.device("npu", device).index:
            raise RuntimeError(f"the stand-in has one device, npu:0; asked for {device}")

    def synchronize(self, device: int = 0) -> None:
        pass

    def stream(self, stream: Stream) -> contextlib.AbstractContextManager:
        return contextlib.nullcontext(stream)

    def manual_seed_all(self, seed: int) -> None:
        """Random numbers are drawn by the CPU's generator, which torch.manual_seed has seeded."""

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16]
