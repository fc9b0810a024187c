from . import backend as backend
from .backward_pass import Gradients as Gradients
from .backward_pass import backward as backward
from .forward_pass import config_of as config_of
from .forward_pass import forward as forward
from .launch import Options as Options
from .launch import power as power
from .launch import registers as registers
from .triton_backward import dkv_kernel as dkv_kernel  # pyright: ignore[reportUnknownVariableType]  Triton has no types
from .triton_backward import dq_kernel as dq_kernel  # pyright: ignore[reportUnknownVariableType]  Triton has no types
from .triton_bias import bias_kernel as bias_kernel  # pyright: ignore[reportUnknownVariableType]  Triton has no types
from .triton_forward import forward_kernel as forward_kernel  # pyright: ignore[reportUnknownVariableType]  Triton has no types
