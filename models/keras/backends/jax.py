"""JAX as a backend: functions are compiled by XLA for the CPU."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any, ClassVar

from nonet.models.keras.backends.base import Function, KerasBackend


class JaxBackend(KerasBackend):
    """Compiles with `jax.jit`. Arguments are NumPy views of torch tensors, results come by DLPack."""

    package: ClassVar[str] = "jax"
    extra: ClassVar[str] = "keras-jax"

    def configure(self, threads: int) -> None:
        """Compute on the CPU; with one thread unless more are asked for."""
        os.environ["JAX_PLATFORMS"] = "cpu"
        if threads == 1:
            flags = os.environ.get("XLA_FLAGS", "")
            os.environ["XLA_FLAGS"] = f"{flags} --xla_cpu_multi_thread_eigen=false".strip()

    def import_tensor(self, tensor: Any) -> Any:
        """Return a NumPy view; jax copies it if its address is not a multiple of 64."""
        return tensor.detach().numpy()

    def export_tensor(self, tensor: Any) -> Any:
        """Return a torch tensor in the same memory, after the computation has ended."""
        import torch

        return torch.from_dlpack(tensor)

    def compile(self, function: Function) -> Function:
        """Compile a function with `jax.jit`."""
        import jax

        return _wait_for(jax.jit(function))

    def compile_gradient(self, function: Function) -> Function:
        """Compile the value and gradient of a function with `jax.value_and_grad`."""
        import jax

        compiled = _wait_for(jax.jit(jax.value_and_grad(function, argnums=(0, 1))))

        def compute(*arguments: Any) -> Any:
            value, (weights, rows) = compiled(*arguments)
            return value, weights, rows

        return compute

    def compile_step(self, optimizer: Any, variables: Sequence[Any]) -> Function:
        """Compile Keras's stateless step."""

        def step(weights: Any, gradients: Any, state: Any) -> Any:
            return optimizer.stateless_apply(state, gradients, weights)

        return self.compile(step)


def _wait_for(function: Function) -> Function:
    """Return a function that returns when its results are computed, since jax would still read its arguments' memory."""
    import jax

    return lambda *arguments: jax.block_until_ready(function(*arguments))


SPEC = JaxBackend()
