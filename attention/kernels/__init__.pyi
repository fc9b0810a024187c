from . import backend as backend
from .backward_pass import AttentionGradients as AttentionGradients
from .backward_pass import backward as backward
from .forward_pass import forward as forward
from .forward_pass import infer_config as infer_config
from .launch import KernelOptions as KernelOptions
from .launch import limit_registers as limit_registers
from .launch import round_to_power_of_two as round_to_power_of_two
from .triton_backward import dkv_kernel as dkv_kernel  # pyright: ignore[reportUnknownVariableType]  Triton has no types
from .triton_backward import dq_kernel as dq_kernel  # pyright: ignore[reportUnknownVariableType]  Triton has no types
from .triton_bias import bias_kernel as bias_kernel  # pyright: ignore[reportUnknownVariableType]  Triton has no types
from .triton_forward import forward_kernel as forward_kernel  # pyright: ignore[reportUnknownVariableType]  Triton has no types
