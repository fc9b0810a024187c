"""KerasOptimizer: a Keras optimizer that steps torch parameters, so that engines step, save and load it as any other."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from nonet.errors import ConfigError
from nonet.models.keras.compiled import CompiledModel
from nonet.muon import EagerOptimizer

_RATE = "learning_rate"  # The last part of the path of the variable that has the learning rate.


class KerasOptimizer(EagerOptimizer):
    """Steps the weights of a model with a Keras optimizer.

    The variables of the optimizer are kept as torch tensors, as the state of the first parameter, under their Keras paths.

    Args:
        weights: The weights, in the order of the model's variables.
        compiled: The compiled functions of the model.
        weight_decay: Weight decay of AdamW, if the model was compiled with no optimizer.

    Raises:
        ConfigError: The optimizer has a schedule of learning rates.
    """

    def __init__(self, weights: Sequence[torch.nn.Parameter], compiled: CompiledModel, weight_decay: float):
        self._weights, self._backend, keras = list(weights), compiled.backend, compiled.keras
        super().__init__(self._weights, {"lr": 0.0})
        config = keras.optimizers.serialize(
            compiled.optimizer or keras.optimizers.AdamW(weight_decay=weight_decay, beta_2=0.98)
        )
        config["config"]["name"] = "optimizer"  # Keras counts the optimizers of a process in their names.
        optimizer = keras.optimizers.deserialize(config)
        optimizer.build(compiled.variables)
        self._paths: list[str] = [variable.path for variable in optimizer.variables]
        rates = [path for path in self._paths if path.rpartition("/")[2] == _RATE]
        if len(rates) != 1:
            raise ConfigError(
                "model.path: the model is compiled with a schedule of learning rates; give a number: stages have a schedule"
            )
        (self._rate,) = rates
        self._first = self._weights[0]
        self.state[self._first] = {
            variable.path: torch.from_numpy(keras.ops.convert_to_numpy(variable)).clone()
            for variable in optimizer.variables
        }
        self._step = compiled.backend.compile_step(optimizer, compiled.variables)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Step the parameters with their gradients and the learning rate of the first group."""
        backend, weights, state = self._backend, self._weights, self.state[self._first]
        state[self._rate].fill_(self.param_groups[0]["lr"])
        slots = [state[path] for path in self._paths]
        gradients = [weight.grad for weight in weights]
        stepped = self._step(*([*map(backend.import_tensor, each)] for each in (weights, gradients, slots)))
        for tensors, values in zip((weights, slots), stepped, strict=True):
            for tensor, value in zip(tensors, values, strict=True):
                tensor.copy_(backend.export_tensor(value))

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the values of the optimizer's variables.

        Raises:
            ConfigError: They are those of another optimizer.
        """
        stored: dict[str, Tensor] = state_dict["state"].get(0, {})
        if sorted(stored) != sorted(self._paths):
            raise ConfigError("model.path: the checkpoint was written with another optimizer")
        for path, value in stored.items():
            self.state[self._first][path].copy_(value)
