"""KerasBackend: what a backend of Keras must implement, so that a Keras model is trained on our rows.

A backend is one file of this folder with a `SPEC`. It compiles functions that are written with `keras.ops`, and moves tensors
from torch, in which rows, weights and gradients are stored, to its own library and back. A tensor shares its memory with the
other library where both sides allow that, and is copied otherwise. The arguments of a compiled function are not changed while it
runs, and it has returned when its results are read.
"""

from __future__ import annotations

import os
import re
import sys
from abc import abstractmethod
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from typing import Any, ClassVar

from nonet.errors import ConfigError
from nonet.plugins import PluginRegistry

Function = Callable[..., Any]
# Earlier versions load code of a configuration in safe mode (CVE-2025-9906, CVE-2025-8747, CVE-2026-1462).
_OLDEST = (3, 13, 2)


class KerasBackend:
    """A backend of Keras.

    Attributes:
        package: The package that must be installed besides keras.
        extra: The extra of nonet that installs both.
    """

    package: ClassVar[str] = ""
    extra: ClassVar[str] = ""

    @abstractmethod
    def configure(self, threads: int) -> None:
        """Set up the backend before keras is imported: computations repeat their bits and use a number of threads."""
        raise NotImplementedError

    @abstractmethod
    def import_tensor(self, tensor: Any) -> Any:
        """Return a torch tensor in host memory as an argument of compiled functions."""
        raise NotImplementedError

    @abstractmethod
    def export_tensor(self, tensor: Any) -> Any:
        """Return a result of a compiled function as a torch tensor, which may not be changed in place."""
        raise NotImplementedError

    @abstractmethod
    def compile(self, function: Function) -> Function:
        """Compile a function of lists of tensors; it is traced once for arguments of the same shapes."""
        raise NotImplementedError

    @abstractmethod
    def compile_gradient(self, function: Function) -> Function:
        """Compile the value and gradient of a function (weights, rows, ...) -> scalar.

        Returns:
            A function of the same arguments that returns the value, the gradients of the weights and those of the rows. The
            gradient is zeros where the value does not depend on a tensor.
        """
        raise NotImplementedError

    @abstractmethod
    def compile_step(self, optimizer: Any, variables: Sequence[Any]) -> Function:
        """Compile a step of a Keras optimizer that was built for variables.

        Returns:
            A function (weights, gradients, state) -> (weights, state); the state is in the order of `optimizer.variables`.
        """
        raise NotImplementedError

    def find_missing_package(self) -> str | None:
        """Return the first package that is not installed for this interpreter; None if all are."""
        return next((name for name in ("keras", self.package) if find_spec(name) is None), None)


BACKENDS = PluginRegistry("backend", KerasBackend, "nonet.models.keras.backends")


def load_keras(name: str, threads: int) -> tuple[Any, KerasBackend]:
    """Import keras with a backend, and return the module and the backend.

    Args:
        name: The name of the backend.
        threads: The number of threads for its computations.

    Raises:
        ConfigError: A package is not installed or too old, or this process uses Keras with another backend already.
    """
    backend: KerasBackend = BACKENDS.get(name)
    if (package := backend.find_missing_package()) is not None:
        raise ConfigError(
            f"model.backend: {package} is not installed: pip install 'nonet[{backend.extra}]', "
            "or name an interpreter that has it in pools.<name>.env.python"
        )
    if "keras" not in sys.modules:
        if find_spec("triton") is not None:
            import triton  # noqa: F401  # The process crashes if TensorFlow's LLVM is loaded before Triton's.
        os.environ["KERAS_BACKEND"] = name
        backend.configure(threads)
    import keras

    if tuple(map(int, re.findall(r"\d+", keras.__version__)[:3])) < _OLDEST:
        oldest = ".".join(map(str, _OLDEST))
        raise ConfigError(
            f"model.backend: Keras {keras.__version__} is installed, which may run code in the configuration of a model; install "
            f"{oldest} or later: pip install 'nonet[{backend.extra}]'"
        )
    if keras.backend.backend() != name:
        raise ConfigError(
            f"model.backend: this process has imported Keras with {keras.backend.backend()}, so it cannot use {name}; a process "
            "has one backend"
        )
    return keras, backend
