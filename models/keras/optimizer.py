"""KerasOptimizer: a Keras optimizer that steps torch parameters, so that engines step, save and load it as any other.

It is the optimizer object of the user's model, with all that the user has set in it. With `use_ema`, Keras's `fit` ends with
averages of the weights in place of the weights. A checkpoint is such an end: the ranker has the averages, and the state of the
optimizer has the weights that training continues with.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from nonet.errors import ConfigError
from nonet.models.keras.compiled import CompiledModel
from nonet.models.keras.structure import LEARNING_RATE
from nonet.muon import EagerOptimizer

_NAME = "optimizer"  # Replaces the name of an optimizer in the paths of its variables.
_STEPS = "iteration"  # The last part of the path of the variable that counts steps.
_WEIGHTS = "weights/"  # Before the paths of weights in a state that has averages.
RULES = 2
"""Number of the rules by which a checkpoint was trained; 1 left out losses of layers, exclude_from_weight_decay and use_ema."""


class CompiledOptimizer:
    """A Keras optimizer that was built for a model, with its compiled step.

    Args:
        compiled: The model.
        weight_decay: Weight decay of AdamW, if the model was compiled with no optimizer.

    Attributes:
        keys: The names under which the values of its variables are stored.
        initial: Their initial values.
        step: A function (weights, gradients, values) -> (weights, values).
        gradient_scale: What gradients are multiplied by before a step, which divides them by it.
        has_averages: Whether it keeps averages of the weights.
    """

    def __init__(self, compiled: CompiledModel, weight_decay: float):
        keras, self._variables = compiled.keras, compiled.variables
        self._keras, self._backend = keras, compiled.backend
        self._optimizer = optimizer = compiled.optimizer or keras.optimizers.AdamW(
            weight_decay=weight_decay, beta_2=0.98
        )
        if not optimizer.built:
            optimizer.build(compiled.variables)
        self.keys = _make_keys(optimizer)
        self.initial = [_to_tensor(keras, variable) for variable in optimizer.variables]
        self.step = compiled.backend.compile_step(optimizer, compiled.variables)
        self.gradient_scale = float(optimizer.loss_scale_factor or 1.0)
        self.has_averages = bool(optimizer.use_ema)

    @classmethod
    def get_shared(cls, compiled: CompiledModel, weight_decay: float) -> CompiledOptimizer:
        """Return the compiled optimizer of a model, which all of its rankers share."""
        key = None if compiled.optimizer is not None else weight_decay
        if key not in compiled.compiled_optimizers:
            compiled.compiled_optimizers[key] = cls(compiled, weight_decay)
        return compiled.compiled_optimizers[key]

    @property
    def excludes_weights(self) -> bool:
        """Whether some weights have no weight decay."""
        uses_decay = self._optimizer._use_weight_decay
        return bool(self._optimizer.weight_decay) and not all(map(uses_decay, self._variables))

    def compute_final_weights(self, weights: Sequence[Tensor], values: Sequence[Tensor]) -> list[Tensor]:
        """Return the weights with which `fit` would end: the averages, if the optimizer keeps any.

        Args:
            weights: The weights.
            values: The values of the optimizer's variables.
        """
        variables = (*self._variables, *self._optimizer.variables)
        for variable, tensor in zip(variables, (*weights, *values), strict=True):
            variable.assign(self._backend.import_tensor(tensor))
        self._optimizer.finalize_variable_values(self._variables)
        return [_to_tensor(self._keras, variable) for variable in self._variables]


class KerasOptimizer(EagerOptimizer):
    """Steps the weights of a model with a Keras optimizer.

    The variables of the optimizer are kept as torch tensors, as the state of the first parameter, under their Keras paths.

    Args:
        weights: The weights by path, in the order of the model's variables.
        compiled: The compiled functions of the model.
        weight_decay: Weight decay of AdamW, if the model was compiled with no optimizer.
    """

    def __init__(
        self, weights: Mapping[str, torch.nn.Parameter], compiled: CompiledModel, weight_decay: float
    ):
        self._weights, self._paths, self._backend = list(weights.values()), list(weights), compiled.backend
        super().__init__(self._weights, {"lr": 0.0, "rules": RULES})
        self._optimizer = CompiledOptimizer.get_shared(compiled, weight_decay)
        self._has_layer_losses = bool(compiled.layer_losses)
        self._rate, self._steps = (_find_key(self._optimizer.keys, name) for name in (LEARNING_RATE, _STEPS))
        self._first = self._weights[0]
        self.reset()

    def reset(self) -> None:
        """Set the variables of the optimizer to their initial values."""
        values = zip(self._optimizer.keys, self._optimizer.initial, strict=True)
        self.state[self._first] = {key: value.clone() for key, value in values}

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Step the parameters with their gradients and the learning rate of the first group."""
        backend, weights, state = self._backend, self._weights, self.state[self._first]
        state[self._rate].fill_(self.param_groups[0]["lr"])
        slots = [state[key] for key in self._optimizer.keys]
        gradients: Sequence[Any] = [weight.grad for weight in weights]
        if self._optimizer.gradient_scale != 1.0:
            gradients = torch._foreach_mul(gradients, self._optimizer.gradient_scale)
        stepped = self._optimizer.step(
            *([*map(backend.import_tensor, each)] for each in (weights, gradients, slots))
        )
        for tensors, values in zip((weights, slots), stepped, strict=True):
            for tensor, value in zip(tensors, values, strict=True):
                tensor.copy_(backend.export_tensor(value))

    @torch.no_grad()
    def compute_averages(self) -> dict[str, Tensor]:
        """Return the averages of the weights by path, with which `fit` would end; {} without averages or before a step."""
        state = self.state[self._first]
        if not self._optimizer.has_averages or not state[self._steps].item():
            return {}
        values = [state[key] for key in self._optimizer.keys]
        averages = self._optimizer.compute_final_weights([weight.data for weight in self._weights], values)
        return dict(zip(self._paths, averages, strict=True))

    def state_dict(self) -> dict[str, Any]:
        """Return the values of the optimizer's variables; with averages also the weights, which a checkpoint has averages of."""
        packed = super().state_dict()
        if self._optimizer.has_averages:
            packed["state"] = {0: {**packed["state"][0], **self._name_weights()}}
        return packed

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the values of the optimizer's variables, and the weights if the state has them.

        Raises:
            ConfigError: They are those of another optimizer, or of a version of Nonet that trained the model otherwise.
        """
        stored: dict[str, Tensor] = state_dict["state"].get(0, {})
        self._check_rules(state_dict["param_groups"])
        weights = self._name_weights() if self._optimizer.has_averages else {}
        if sorted(stored) != sorted((*self._optimizer.keys, *weights)):
            raise ConfigError("model.path: the checkpoint was written with another optimizer")
        for key, value in stored.items():
            (weights[key] if key in weights else self.state[self._first][key]).copy_(value)

    def _name_weights(self) -> dict[str, Tensor]:
        """Return the weights by their key in a state."""
        return {
            f"{_WEIGHTS}{path}": weight.data for path, weight in zip(self._paths, self._weights, strict=True)
        }

    def _check_rules(self, groups: Sequence[Mapping[str, Any]]) -> None:
        """Raise ConfigError if a version of Nonet wrote a state that left out what this one counts."""
        if groups[0].get("rules", 1) >= RULES:
            return
        left_out = {
            "losses of layers": self._has_layer_losses,
            "exclude_from_weight_decay": self._optimizer.excludes_weights,
            "use_ema": self._optimizer.has_averages,
        }
        if names := [name for name, is_used in left_out.items() if is_used]:
            raise ConfigError(
                f"model.path: the checkpoint was written by a version of Nonet that left out {' and '.join(names)} of the model, "
                "which count now; start a new run, whose `init` may name this one"
            )


def _make_keys(optimizer: Any) -> list[str]:
    """Return a key for each variable of an optimizer that does not depend on what was built before in the process.

    It is the variable's path after the optimizer's name. A variable whose path is not unique or has another name is numbered.
    """
    paths = [variable.path for variable in optimizer.variables]
    counts, prefix = Counter(paths), f"{optimizer.name}/"
    return [
        f"{_NAME}/{path.removeprefix(prefix)}"
        if path.startswith(prefix) and counts[path] == 1
        else f"{_NAME}/{index}"
        for index, path in enumerate(paths)
    ]


def _find_key(keys: Sequence[str], name: str) -> str:
    """Return the key of the only variable of this name."""
    (found,) = [key for key in keys if key == f"{_NAME}/{name}"]
    return found


def _to_tensor(keras: Any, variable: Any) -> Tensor:
    """Return a copy of the value of a Keras variable."""
    return torch.from_numpy(keras.ops.convert_to_numpy(variable).copy())
