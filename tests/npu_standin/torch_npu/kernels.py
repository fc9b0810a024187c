"""Every operation of the npu device: a kernel that hands the same bytes to the CPU's kernel.

Some need more: copies between devices, `resize_`, outputs that a kernel sizes, views (which must keep the base's storage and
their offset in it, or autograd writes to the wrong place), matrix products under autocast, and two that torch composes
otherwise for an accelerator than for the CPU (attention, dropout), which are composed as the CPU does.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from torch_npu.memory import to_host, to_npu

COUNTS: Counter[str] = Counter()
_FOLDER = os.environ.get("NONET_NPU_COUNTS", "")  # a file a process with what was asked, for tests
_EVERY = 500
_BROKEN = os.environ.get("NONET_NPU_BROKEN", "")  # an operation that is 1 % off, as a wrong kernel would be

_libraries: list[torch.library.Library] = []
_aten = torch.ops.aten
_HOST = torch.device("cpu")
_AUTOCAST = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastPrivateUse1)
_HALVED = ("mm", "addmm", "bmm", "baddbmm", "addbmm", "linear", "matmul", "scaled_dot_product_attention")


def register() -> None:
    """Put the kernels behind the PrivateUse1 key: one for every operation that the CPU has a kernel of its own for.

    What torch composes of those for any device it composes here too, as it does for the CPU.
    """
    aten = torch.library.Library("aten", "IMPL")
    for name in torch._C._dispatch_get_all_op_names():
        if (
            name.startswith("aten::")
            and torch._C._dispatch_has_kernel_for_dispatch_key(name, "CPU")
            and name not in _OWN
        ):
            packet, _, overload = name.removeprefix("aten::").partition(".")
            operation = getattr(getattr(_aten, packet), overload or "default")
            aten.impl(name, _Kernel(operation, name), "PrivateUse1")
    for name, (kernel, key) in _OWN.items():
        aten.impl(name, kernel, key)
    autocast = torch.library.Library("_", "IMPL")
    autocast.fallback(torch.library.fallthrough_kernel, "AutocastPrivateUse1")
    for name in _HALVED:
        packet, _, overload = name.partition(".")
        aten.impl(
            name, _Halved(getattr(getattr(_aten, packet), overload or "default")), "AutocastPrivateUse1"
        )
    _libraries.extend([aten, autocast])


def count(name: str) -> None:
    """Note that an operation was asked of the device."""
    COUNTS[name] += 1
    if _FOLDER and COUNTS.total() % _EVERY == 0:
        Path(_FOLDER, f"{os.getpid()}.json").write_text(json.dumps(COUNTS))


class _Kernel:
    """One operation: run by the CPU's kernel on the same bytes. What it writes in place is what was given."""

    def __init__(self, operation: Any, name: str):
        self.operation, self.name = operation, name
        schema = operation._schema
        self.outputs = [argument.name for argument in schema.arguments if argument.is_out]
        self.tensors = {place for place, a in enumerate(schema.arguments) if str(a.type) == "Tensor"}
        self.views = any(r.alias_info and not r.alias_info.is_write for r in schema.returns)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        count(self.name)
        given: dict[int, tuple[Tensor, Tensor]] = {}
        args = [
            torch.tensor(value)  # torch hands a number that stands for a tensor to Python as a number
            if place in self.tensors and isinstance(value, int | float)
            else self._lower(value, given)
            for place, value in enumerate(args)
        ]
        kwargs = {key: self._lower(value, given) for key, value in kwargs.items()}
        fresh = {key: kwargs[key].new_empty(0) for key in self.outputs if not kwargs[key].numel()}
        answer = self.operation(*args, **(kwargs | fresh) if fresh else kwargs)
        for key, made in fresh.items():  # the kernel sized it: the caller's tensor takes its bytes
            theirs = given[id(kwargs[key])][1]
            theirs.data = to_npu(made)
            given[id(made)] = made, theirs
        if self.views:
            ((host, base), *_) = given.values()
            return _views(answer, host, base)
        if self.name == _BROKEN:
            first = answer[0] if isinstance(answer, tuple) else answer
            first.mul_(1.01)
        return self._lift(answer, given)

    def _lower(self, value: Any, given: dict[int, tuple[Tensor, Tensor]]) -> Any:
        if isinstance(value, Tensor):
            if value.device.type == "npu":
                host = to_host(value)
                given[id(host)] = host, value
                return host
            if value.dim():
                raise RuntimeError(
                    f"Expected all tensors to be on the same device, but {self.name} got npu:0 and {value.device} "
                    f"(a tensor of shape {list(value.shape)})"
                )
        elif isinstance(value, torch.device):
            return _HOST
        elif isinstance(value, list | tuple):
            return [self._lower(part, given) for part in value]
        return value

    def _lift(self, value: Any, given: dict[int, tuple[Tensor, Tensor]]) -> Any:
        if isinstance(value, Tensor):
            return given[id(value)][1] if id(value) in given else to_npu(value)
        if isinstance(value, list | tuple):
            return type(value)(self._lift(part, given) for part in value)
        return value


class _Halved:
    """A matrix product under autocast: its float32 arguments in the chosen half precision."""

    def __init__(self, operation: Any):
        self.operation = operation

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        chosen = torch.get_autocast_dtype("npu")
        lowered = [
            value.to(chosen) if isinstance(value, Tensor) and value.dtype == torch.float32 else value
            for value in args
        ]
        with torch._C._ExcludeDispatchKeyGuard(_AUTOCAST):
            return self.operation(*lowered, **kwargs)


def _views(answer: Any, host: Tensor, base: Tensor) -> Any:
    """Return the same places of the base's own storage: autograd finds what is written to a view by its offset there."""
    if not isinstance(answer, Tensor):
        return type(answer)(_views(part, host, base) for part in answer)
    if answer.dtype != base.dtype:
        return to_npu(answer)
    moved = (answer.data_ptr() - host.data_ptr()) // base.element_size() if answer.numel() else 0
    return _aten.alias(base).as_strided_(answer.shape, answer.stride(), base.storage_offset() + moved)


def _on_npu(tensor: Tensor) -> bool:
    return tensor.device.type == "npu"


def _copy_from(source: Tensor, target: Tensor, non_blocking: bool = False) -> Tensor:
    count("aten::_copy_from")
    host = to_host(target) if _on_npu(target) else target
    host.copy_(to_host(source) if _on_npu(source) else source)
    return target


def _as_strided(
    base: Tensor, size: list[int], stride: list[int], storage_offset: int | None = None
) -> Tensor:
    """Offsets count from the storage's begin, which a host alias of a view has not."""
    count("aten::as_strided")
    offset = base.storage_offset() if storage_offset is None else storage_offset
    return _aten.alias(base).as_strided_(size, stride, offset)


def _resize(tensor: Tensor, size: list[int], *, memory_format: Any = None) -> Tensor:
    count("aten::resize_")
    host = to_host(tensor)
    larger = torch.empty(size, dtype=tensor.dtype)
    kept = min(host.numel(), larger.numel())
    larger.view(-1)[:kept] = host.reshape(-1)[:kept]
    tensor.data = to_npu(larger)
    return tensor


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Attention as the CPU chooses it: its flash kernel or the plain products, with their own derivatives."""
    host = [None if t is None else to_host(t.detach()) for t in (query, key, value, attn_mask)]
    for mine, theirs in zip(host[:3], (query, key, value), strict=True):
        mine.requires_grad_(theirs.requires_grad)  # the choice depends on it
    chosen = torch._fused_sdp_choice(*host, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        attn_mask = torch.zeros_like(attn_mask, dtype=query.dtype).masked_fill(~attn_mask, -torch.inf)
    if chosen == torch.nn.attention.SDPBackend.FLASH_ATTENTION.value:
        return _aten._scaled_dot_product_flash_attention_for_cpu(
            query, key, value, dropout_p, is_causal, attn_mask=attn_mask, scale=scale
        )[0]
    return _aten._scaled_dot_product_attention_math(
        query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
    )[0]


def _dropout(x: Tensor, p: float, train: bool) -> Tensor:
    if not train or p == 0 or not x.numel():
        return x
    return x * torch.empty_like(x).bernoulli_(1 - p).div_(1 - p)


_OWN = {
    "aten::_copy_from": (_copy_from, "PrivateUse1"),
    "aten::_copy_from_and_resize": (_copy_from, "PrivateUse1"),
    "aten::as_strided": (_as_strided, "PrivateUse1"),
    "aten::resize_": (_resize, "PrivateUse1"),
    "aten::scaled_dot_product_attention": (_attention, "AutogradPrivateUse1"),
    "aten::dropout": (_dropout, "AutogradPrivateUse1"),
}
