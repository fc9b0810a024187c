"""CompiledModel: the functions of a Keras model, compiled by a backend, with the weights as arguments.

Rankers of the same configuration share them, so a new version of the weights compiles nothing. The rows of a batch are padded to
one of a few sizes, since a function is compiled once per shape. Padded rows have no weight in the loss, so their gradients are
zeros. If a loss of a layer (`model.losses`) depends on the rows, such as an activity regularizer, gradients are computed without
padding.
"""

# Shapes: B rows, P rows with padding, T tasks, D width of a feature, L events of a sequence, C width of all pooled features
# together. Logits, labels and weights of one task have no axis T.

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from enum import StrEnum
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nonet.models.keras.backends import KerasBackend
from nonet.random import hash_words

MASK = "_mask"
"""The end of the name of the input that says which events of a sequence exist: 1 or 0, [B, L]."""
_LEAST_ROWS = 32  # The smallest number of rows that functions are compiled for.
_SEED_BITS = 31  # Seeds are positive int32, the integers that every backend has.
_SEED_STATE = "seed_generator_state"  # The last part of the path of the variable of a seed generator.


class LayerLoss(StrEnum):
    """How a loss of a layer depends on the rows of a batch: not at all, as their mean, or as their sum."""

    CONSTANT = "constant"
    MEAN = "mean"
    SUM = "sum"


class CompiledModel:
    """The compiled functions of a Keras model.

    Args:
        model: The Keras model, whose inputs are named after features, and whose output is one logit or probability for each row
            and task.
        keras: The module keras.
        backend: The backend that computes it.
        shapes: Shape of each input without the rows, by name: (D,) of a pooled feature, (L, D) of a sequence, (L,) of a mask.
        from_logits: Whether the outputs are logits; otherwise they are probabilities.

    Attributes:
        keras: The module keras.
        backend: The backend.
        shapes: Shape of each input of the model without the rows, by name.
        from_logits: Whether the outputs are logits.
        n_outputs: The number of outputs T.
        architecture: The configuration of the model as JSON, without metrics.
        variables: The Keras variables of the weights; their values mean nothing.
        frozen: The Keras variables that training does not change, such as the weights of layers with trainable=False.
        layer_losses: How each of the model's `losses` depends on the rows, in their order; set after `find_layer_losses`.
        optimizer: The optimizer that the model was compiled with; None for none.
        compiled_optimizers: The `CompiledOptimizer` of `optimizer` under None, or those of AdamW by weight decay.
        features: The features that the model reads, pooled ones before sequences.
        masks: The masks of sequences that it reads.
    """

    def __init__(
        self,
        model: Any,
        keras: Any,
        backend: KerasBackend,
        shapes: Mapping[str, tuple[int, ...]],
        from_logits: bool,
    ):
        self.keras, self.backend, self.from_logits, self._model = keras, backend, from_logits, model
        self.n_outputs = 1 if len(model.output.shape) == 1 else int(model.output.shape[1])
        self.architecture = json.dumps(remove_metrics(model.to_json()))
        self.optimizer = getattr(model, "optimizer", None)
        self.variables: Sequence[Any] = model.trainable_variables
        self._seeds = [is_seed(variable) for variable in model.non_trainable_variables]
        self.frozen, seeds = _divide(model.non_trainable_variables, self._seeds)
        self.layer_losses: Sequence[LayerLoss] = ()
        self.shapes = {name: shape for name, shape in shapes.items() if name in model.input}
        masks = {f"{name}{MASK}" for name, shape in shapes.items() if len(shape) == 2}
        self._pooled = [name for name, shape in self.shapes.items() if len(shape) == 1 and name not in masks]
        self._widths = [shapes[name][0] for name in self._pooled]
        self._sequences = [name for name, shape in self.shapes.items() if len(shape) == 2]
        self.masks = [name for name in self.shapes if name in masks]
        self.features = [*self._pooled, *self._sequences]
        self._seed_types = [variable.dtype for variable in seeds]
        self.compiled_optimizers: dict[float | None, Any] = {}
        self._gradient = backend.compile_gradient(self._compute_keras_loss)
        self._logits = backend.compile(self._compute_keras_logits)

    def compute_logits(
        self, weights: Sequence[Tensor], frozen: Sequence[Tensor], pooled: Mapping[str, Tensor]
    ) -> Tensor:
        """Compute the logits [B] or [B, T] without dropout, from rows by feature."""
        count = _count_rows(pooled)
        rows, masks = self._pad(pooled, choose_size(count))
        logits = self._logits(*self.import_all(weights, frozen), rows, masks)
        return self.backend.export_tensor(logits)[:count].clone()

    def compute_gradients(
        self,
        weights: Sequence[Tensor],
        frozen: Sequence[Tensor],
        pooled: Mapping[str, Tensor],
        label: Tensor,
        loss_weight: Tensor | None = None,
        step_rows: int | None = None,
    ) -> tuple[Tensor, list[Tensor]]:
        """Compute the sum of the losses with dropout, and its gradients: of the pooled rows together, sequences and weights.

        They share memory with Keras and may not be changed in place. `split_rows` divides the gradient of the pooled rows.

        Args:
            weights: The weights, in the order of `variables`.
            frozen: The values of `frozen`.
            pooled: Rows by feature.
            label: Labels [B] or [B, T].
            loss_weight: Weights of the log losses, of the same shape; None for 1.
            step_rows: Number of rows of the step on all ranks; None for B. Losses of layers that are a mean over rows are
                multiplied by B and those that are a sum by `step_rows`, because the caller divides the result by `step_rows`.
        """
        count = _count_rows(pooled)
        if not count:  # The mean of a layer's loss over no rows would be NaN.
            like = [torch.zeros(0, sum(self._widths)), *(pooled[name] for name in self._sequences), *weights]
            return torch.zeros(()), [torch.zeros_like(tensor) for tensor in like]
        needs_rows = any(loss != LayerLoss.CONSTANT for loss in self.layer_losses)
        rows, masks = self._pad(pooled, count if needs_rows else choose_size(count))
        label_and_weight = torch.zeros(2, len(rows[0]), *label.shape[1:])
        label_and_weight[0, :count] = label
        label_and_weight[1, :count] = 1.0 if loss_weight is None else loss_weight
        row_counts = torch.tensor([count, step_rows or count], dtype=torch.float32)
        import_tensor, export_tensor = self.backend.import_tensor, self.backend.export_tensor
        loss, of_weights, of_rows = self._gradient(
            *self.import_all(weights),
            rows,
            masks,
            import_tensor(label_and_weight),
            # The seed that torch's generator was given for the step.
            *self.import_all(self.make_seeds(torch.initial_seed()), frozen),
            import_tensor(row_counts),
        )
        return export_tensor(loss), [export_tensor(gradient) for gradient in (*of_rows, *of_weights)]

    def split_rows(self, gradients: Sequence[Tensor], count: int) -> list[Tensor]:
        """Return the gradients of the rows [B, ...] of each feature in `features`, then those of the weights."""
        of_pooled, *others = gradients
        n_sequences = len(self._sequences)
        of_sequences = [gradient[:count] for gradient in others[:n_sequences]]
        return [*of_pooled[:count].split(self._widths, 1), *of_sequences, *others[n_sequences:]]

    def save(self, weights: Sequence[Tensor], frozen: Sequence[Tensor], path: Path) -> None:
        """Write the Keras model with weights to a `.keras` file."""
        for variable, weight in zip((*self.variables, *self.frozen), (*weights, *frozen), strict=True):
            variable.assign(weight.detach().numpy())
        self._model.save(path)

    def import_all(self, *lists: Sequence[Tensor]) -> list[list[Any]]:
        """Return lists of tensors as arguments of compiled functions."""
        return [[self.backend.import_tensor(tensor) for tensor in tensors] for tensors in lists]

    def make_seeds(self, seed: int) -> list[Tensor]:
        """Return the states of Keras's seed generators, functions of a seed."""
        return [
            torch.tensor([hash_words(seed, "keras", index) % (1 << _SEED_BITS), 0], dtype=torch.int32)
            for index in range(len(self._seed_types))
        ]

    @property
    def has_seeds(self) -> bool:
        """Whether a call in training draws random numbers, such as those of Dropout."""
        return bool(self._seed_types)

    def _pad(self, pooled: Mapping[str, Tensor], size: int) -> tuple[list[Any], list[Any]]:
        """Return the rows (pooled ones [P, C] as one tensor, then sequences) and masks with padding to a size P."""
        parts = [pooled[name].detach() for name in self._pooled]
        joined = torch.zeros(size, sum(self._widths))
        if parts:
            torch.cat(parts, 1, out=joined[: len(parts[0])])
        others = [pooled[name].detach() for name in self._sequences], [pooled[name] for name in self.masks]
        sequences, masks = ([_pad_rows(tensor, size) for tensor in tensors] for tensors in others)
        rows, masks = self.import_all([joined, *sequences], masks)
        return rows, masks

    # --- functions that a backend compiles ----------------------------------------------------------------------

    def call_keras_model(
        self,
        weights: Sequence[Any],
        frozen: Sequence[Any],
        seeds: Sequence[Any] | None,
        inputs: Mapping[str, Any],
        *,
        training: bool,
    ) -> tuple[Any, list[Any], list[Any]]:
        """Call the Keras model.

        Args:
            weights: The weights.
            frozen: The values of `frozen`.
            seeds: The states of seed generators, int32; None for those that they were created with.
            inputs: The inputs of the model by name, of P rows.
            training: Whether in training, with dropout.

        Returns:
            The output [P], [P, 1] or [P, T]; the values of `frozen` after the call; and the losses of layers, one scalar each.
        """
        ops, model, variables = self.keras.ops, self._model, self._model.non_trainable_variables
        own_seeds = [variable.value for variable in _divide(variables, self._seeds)[1]]
        if seeds is not None:
            own_seeds = [ops.cast(seed, dtype) for seed, dtype in zip(seeds, self._seed_types, strict=True)]
        values, rest = iter(own_seeds), iter(frozen)
        states = [next(values if is_seed_state else rest) for is_seed_state in self._seeds]
        mapping = [
            *zip(model.trainable_variables, weights, strict=True),
            *zip(variables, states, strict=True),
        ]
        # `stateless_call` would drop losses: of a layer that is called twice, and those with the address of an earlier one.
        with self.keras.StatelessScope(state_mapping=mapping, collect_losses=True) as scope:
            output = model(dict(inputs), training=training)
            losses = [ops.sum(ops.cast(loss, "float32")) for loss in model.losses]
        return output, [scope.get_current_value(variable) for variable in self.frozen], losses

    def _make_keras_inputs(self, rows: Sequence[Any], masks: Sequence[Any]) -> dict[str, Any]:
        """Return the inputs of the Keras model by name."""
        joined, *sequences = rows
        inputs, start = {}, 0
        for name, width in zip(self._pooled, self._widths, strict=True):
            inputs[name] = joined[:, start : start + width]
            start += width
        return (
            inputs
            | dict(zip(self._sequences, sequences, strict=True))
            | dict(zip(self.masks, masks, strict=True))
        )

    def _compute_keras_logits(
        self, weights: Sequence[Any], frozen: Sequence[Any], rows: Sequence[Any], masks: Sequence[Any]
    ) -> Any:
        """Compute logits [P] or [P, T] without dropout."""
        ops, inputs = self.keras.ops, self._make_keras_inputs(rows, masks)
        output, _, _ = self.call_keras_model(weights, frozen, None, inputs, training=False)
        if not self.from_logits:
            least = self.keras.config.epsilon()
            probability = ops.clip(output, least, 1 - least)
            output = ops.log(probability) - ops.log1p(-probability)
        return self._remove_single_task(output)

    def _remove_single_task(self, output: Any) -> Any:
        """Return values [P], or [P, T] of several tasks, as [P] or [P, T]: without an axis of one task."""
        has_tasks = len(output.shape) == 2 and output.shape[1] > 1
        return output if has_tasks else self.keras.ops.reshape(output, (-1,))

    def _compute_keras_loss(
        self,
        weights: Sequence[Any],
        rows: Sequence[Any],
        masks: Sequence[Any],
        targets: Any,
        seeds: Sequence[Any],
        frozen: Sequence[Any],
        row_counts: Any,
    ) -> Any:
        """Compute the weighted sum of log losses for labels and weights [2, P] or [2, P, T], with dropout drawn from seeds.

        The losses of layers are added, multiplied by one of the `row_counts` [2]: those of the batch and of the step.
        """
        ops, inputs = self.keras.ops, self._make_keras_inputs(rows, masks)
        output, _, layer_losses = self.call_keras_model(weights, frozen, seeds, inputs, training=True)
        label, weight = targets[0], targets[1]
        if self.from_logits:
            logit = self._remove_single_task(output)
            losses = ops.softplus(logit) - logit * label
        else:
            losses = ops.binary_crossentropy(ops.reshape(label, output.shape), output)
        total = ops.sum(self._remove_single_task(losses) * weight)
        for kind, loss in zip(self.layer_losses, layer_losses, strict=True):
            total = total + loss * row_counts[1 if kind == LayerLoss.SUM else 0]
        return total


def remove_metrics(architecture: str) -> dict[str, Any]:
    """Return the configuration of a model without what it was compiled with and Nonet does not use.

    These are its metrics, and all that models inside it were compiled with. Their functions need not be registered.
    """

    def remove_compile_configs(value: Any) -> Any:
        """Return a part of the configuration without `compile_config` at any depth."""
        if isinstance(value, dict):
            return {
                key: remove_compile_configs(child) for key, child in value.items() if key != "compile_config"
            }
        return [remove_compile_configs(child) for child in value] if isinstance(value, list) else value

    stored = json.loads(architecture)
    compile_config = stored.get("compile_config") or {}
    used = {key: value for key, value in compile_config.items() if key not in ("metrics", "weighted_metrics")}
    return remove_compile_configs(stored) | ({"compile_config": used} if used else {})


def is_seed(variable: Any) -> bool:
    """Return whether a Keras variable is the state of a seed generator."""
    return variable.path.endswith(_SEED_STATE)


def choose_size(count: int) -> int:
    """Return the number of rows to which `count` rows are padded: a power of two, or one and a half times one."""
    size = _LEAST_ROWS
    while size < count:
        if size * 3 // 2 >= count:
            return size * 3 // 2
        size *= 2
    return size


def _divide(values: Sequence[Any], is_chosen: Sequence[bool]) -> tuple[list[Any], list[Any]]:
    """Return the values that are not chosen, and those that are."""
    pairs = list(zip(values, is_chosen, strict=True))
    return [value for value, chosen in pairs if not chosen], [value for value, chosen in pairs if chosen]


def _count_rows(pooled: Mapping[str, Tensor]) -> int:
    """Return the number of rows B of a batch."""
    return len(next(iter(pooled.values())))


def _pad_rows(tensor: Tensor, size: int) -> Tensor:
    """Return a tensor [size, ...] with zeros after its rows."""
    padded = tensor.new_zeros(size, *tensor.shape[1:])
    padded[: len(tensor)] = tensor
    return padded
