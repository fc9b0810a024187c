"""KerasOptimizer: a Keras optimizer that steps torch parameters, so that engines step, save and load it as any other."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from nonet.errors import ConfigError

if TYPE_CHECKING:
    from nonet.models.keras.ranker import KerasRanker

_RATE = "learning_rate"  # The last part of the path of the variable that has the learning rate.


class KerasOptimizer(torch.optim.Optimizer):
    """Steps the weights of a ranker with a Keras optimizer.

    The variables of the optimizer are kept as torch tensors, as the state of the first parameter, under their Keras paths.

    Args:
        ranker: The ranker.
        weight_decay: Weight decay of AdamW, if the model was compiled with no optimizer.

    Raises:
        ConfigError: The optimizer has a schedule of learning rates.
    """

    def __init__(self, ranker: KerasRanker, weight_decay: float):
        self._ranker, compiled, keras = ranker, ranker.compiled, ranker.compiled.keras
        parameters = list(ranker.parameters())
        super().__init__(parameters, {"lr": 0.0})
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
        self._first = parameters[0]
        self.state[self._first] = {
            variable.path: torch.from_numpy(keras.ops.convert_to_numpy(variable)).clone()
            for variable in optimizer.variables
        }
        self._step = compiled.backend.compile_step(optimizer, compiled.variables)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Step the parameters with their gradients and the learning rate of the first group."""
        backend, state = self._ranker.compiled.backend, self.state[self._first]
        parameters = list(self._ranker.parameters())
        state[self._rate].fill_(self.param_groups[0]["lr"])
        arguments = [
            [backend.import_tensor(tensor) for tensor in tensors]
            for tensors in (
                parameters,
                [parameter.grad for parameter in parameters],
                [state[path] for path in self._paths],
            )
        ]
        results = self._step(*arguments)
        for tensors, stepped in zip(
            (parameters, [state[path] for path in self._paths]), results, strict=True
        ):
            for tensor, value in zip(tensors, stepped, strict=True):
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
