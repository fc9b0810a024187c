"""The same bytes under another device: `to_host` and `to_npu` make aliases, never copies.

DLPack carries a tensor's pointer, sizes and strides with a device type; a capsule is written for the host and read back with
the type of extensions (torch's PrivateUse1), or the other way round. The alias keeps the tensor it was made from alive.
"""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

_HOST, _EXTENSION = 1, 12  # DLDeviceType kDLCPU, kDLExtDev


class _Head(ctypes.Structure):
    """The first fields of a DLManagedTensor."""

    _fields_ = [("data", ctypes.c_void_p), ("device_type", ctypes.c_int), ("device_id", ctypes.c_int)]


_pointer = ctypes.pythonapi.PyCapsule_GetPointer
_pointer.restype, _pointer.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]


def to_host(tensor: Tensor) -> Tensor:
    """Copy the npu tensor's bytes into a CPU tensor."""
    return _alias(tensor, _HOST)


def to_npu(tensor: Tensor) -> Tensor:
    """Copy the CPU tensor's bytes into an npu tensor."""
    return _alias(tensor, _EXTENSION)


def _alias(tensor: Tensor, device_type: int) -> Tensor:
    capsule = torch._C._to_dlpack(tensor)
    head = _Head.from_address(_pointer(capsule, b"dltensor"))
    head.device_type, head.device_id = device_type, 0
    return torch._C._from_dlpack(capsule)
