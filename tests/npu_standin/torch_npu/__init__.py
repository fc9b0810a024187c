"""A stand-in for torch_npu: an `npu` device on host memory, through torch's PrivateUse1 key, in Python alone.

Test equipment, never on the package's own import path: a pool whose env has this folder in PYTHONPATH believes that it runs
on an NPU. Its tensors are real torch tensors of device `npu` with storage and strides of their own (made by DLPack with the
device type of extensions); every operation arrives at the PrivateUse1 key and is done by the CPU's kernel on the same bytes.
So results are the CPU's bits, and what a real NPU would refuse is refused: mixing tensors of two devices, `.numpy()`.
It proves placement, transfers, seeds and autograd on a second device; nothing of Ascend's kernels, speed or HCCL.
An operation costs about 10 us more than on the CPU.
"""

from __future__ import annotations

from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

from torch_npu import device_module, hccl, kernels

__version__ = "0.0-stand-in"

_setup_privateuseone_for_python_backend("npu", backend_module=device_module.Npu())
kernels.register()
hccl.register()

COUNTS = kernels.COUNTS
"""How often each operation was asked of the device, by name."""


def npu_fusion_attention(*args: object, **options: object) -> None:
    """Refuse to compute: transformers imports the name from the package, but the stand-in has no fused kernel."""
    raise RuntimeError("the stand-in has no fused attention; choose attention sdpa or eager")
