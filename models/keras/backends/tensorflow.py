"""TensorFlow as a backend: functions are graphs of deterministic operations, compiled by XLA."""

# TensorFlow is in an interpreter of its own.
# pyright: reportMissingModuleSource=false

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any, ClassVar

from nonet.models.keras.backends.base import Function, KerasBackend

_ALIGNMENT = 64  # Bytes: TensorFlow aborts the process if a tensor begins elsewhere.


class TensorFlowBackend(KerasBackend):
    """Compiles with `tf.function`. Tensors are exchanged by DLPack, copied if they are not aligned for TensorFlow."""

    package: ClassVar[str] = "tensorflow"
    extra: ClassVar[str] = "keras"

    def configure(self, threads: int) -> None:
        """Choose deterministic operations, and a number of threads for each operation and for independent ones."""
        os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")  # its notes on the processor hide our messages
        import tensorflow as tf

        tf.config.set_visible_devices([], "GPU")  # They are left to torch.
        tf.config.threading.set_intra_op_parallelism_threads(threads)
        tf.config.threading.set_inter_op_parallelism_threads(1)
        tf.config.experimental.enable_op_determinism()

    def import_tensor(self, tensor: Any) -> Any:
        """Return a tensor in the same memory, or a copy if the address or the layout does not allow that."""
        import tensorflow as tf
        import torch

        tensor = tensor.detach()
        if tensor.numel() and tensor.is_contiguous() and tensor.data_ptr() % _ALIGNMENT == 0:
            return tf.experimental.dlpack.from_dlpack(torch.utils.dlpack.to_dlpack(tensor))  # type: ignore[attr-defined]
        return tf.convert_to_tensor(tensor.numpy())

    def export_tensor(self, tensor: Any) -> Any:
        """Return a torch tensor in the same memory."""
        import tensorflow as tf
        import torch

        return torch.from_dlpack(tf.experimental.dlpack.to_dlpack(tensor))

    def compile(self, function: Function) -> Function:
        """Compile a function by XLA, once for arguments of the same shapes."""
        import tensorflow as tf

        return tf.function(function, reduce_retracing=False, jit_compile=True)

    def compile_gradient(self, function: Function) -> Function:
        """Compile the value and gradient of a function with a gradient tape."""
        import tensorflow as tf

        def compute(weights: Any, rows: Any, *others: Any) -> Any:
            with tf.GradientTape(watch_accessed_variables=False) as tape:
                tape.watch((weights, rows))
                value = function(weights, rows, *others)
            of_weights, of_rows = tape.gradient(
                value, (weights, rows), unconnected_gradients=tf.UnconnectedGradients.ZERO
            )
            return value, of_weights, of_rows

        return self.compile(compute)

    def compile_step(self, optimizer: Any, variables: Sequence[Any]) -> Function:
        """Compile a step that assigns weights and state to Keras's variables, steps them, and reads them.

        Keras has no stateless step for TensorFlow.
        """
        import tensorflow as tf

        def step(weights: Any, gradients: Any, state: Any) -> Any:
            for variable, value in zip([*variables, *optimizer.variables], [*weights, *state], strict=True):
                variable.assign(value)
            optimizer.apply(gradients, variables)
            return (
                [tf.identity(variable.value) for variable in variables],
                [tf.identity(variable.value) for variable in optimizer.variables],
            )

        return self.compile(step)


SPEC = TensorFlowBackend()
