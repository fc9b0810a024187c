"""CompiledModel: the functions of a Keras model, compiled by a backend, with the weights as arguments.

Rankers of the same configuration share them, so a new version of the weights compiles nothing. The rows of a batch are padded to
one of a few sizes, since a function is compiled once per shape. Padded rows have no weight in the loss, so their gradients are
zeros.
"""

# Shapes: B rows, P rows with padding, T tasks, D width of a feature, L events of a sequence, C width of all pooled features
# together. Logits, labels and weights of one task have no axis T.

from __future__ import annotations

from collections.abc import Mapping, Sequence
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


class CompiledModel:
    """The compiled functions of a Keras model.

    Args:
        model: The Keras model, whose inputs are named after features and whose output is one logit per row.
        keras: The module keras.
        backend: The backend that computes it.
        shapes: Shape of each input without the rows, by name: (D,) of a pooled feature, (L, D) of a sequence, (L,) of a mask.

    Attributes:
        keras: The module keras.
        backend: The backend.
        architecture: The configuration of the model as JSON.
        variables: The Keras variables of the weights; their values mean nothing.
        optimizer: The optimizer that the model was compiled with; None for none.
        features: The features that the model reads, pooled ones before sequences.
    """

    def __init__(self, model: Any, keras: Any, backend: KerasBackend, shapes: Mapping[str, tuple[int, ...]]):
        self.keras, self.backend, self._model = keras, backend, model
        self.architecture: str = model.to_json()
        self.optimizer = getattr(model, "optimizer", None)
        self.variables: Sequence[Any] = model.trainable_variables
        inputs = [name for name in shapes if name in model.input]
        self._pooled = [name for name in inputs if len(shapes[name]) == 1 and not name.endswith(MASK)]
        self._widths = [shapes[name][0] for name in self._pooled]
        self._sequences = [name for name in inputs if len(shapes[name]) == 2]
        self._masks = [name for name in inputs if name.endswith(MASK)]
        self.features = [*self._pooled, *self._sequences]
        self._seed_types = [variable.dtype for variable in model.non_trainable_variables]
        self._gradient = backend.compile_gradient(self._compute_keras_loss)
        self._logits = backend.compile(self._compute_keras_logits)

    def compute_logits(self, weights: Sequence[Tensor], pooled: Mapping[str, Tensor]) -> Tensor:
        """Compute the logits [B] or [B, T] without dropout, from rows by feature."""
        rows, masks, count = self._pad(pooled)
        logits = self._logits([self.backend.import_tensor(weight) for weight in weights], rows, masks)
        return self.backend.export_tensor(logits)[:count].clone()

    def compute_gradients(
        self,
        weights: Sequence[Tensor],
        pooled: Mapping[str, Tensor],
        label: Tensor,
        loss_weight: Tensor | None = None,
    ) -> tuple[Tensor, list[Tensor]]:
        """Compute the sum of the log losses with dropout, and its gradients: of the pooled rows together, sequences and weights.

        They share memory with Keras and may not be changed in place. `split_rows` divides the gradient of the pooled rows.
        """
        rows, masks, count = self._pad(pooled)
        label_and_weight = torch.zeros(2, len(rows[0]), *label.shape[1:])
        label_and_weight[0, :count] = label
        label_and_weight[1, :count] = 1.0 if loss_weight is None else loss_weight
        import_tensor, export_tensor = self.backend.import_tensor, self.backend.export_tensor
        loss, of_weights, of_rows = self._gradient(
            [import_tensor(weight) for weight in weights],
            rows,
            masks,
            import_tensor(label_and_weight),
            [import_tensor(seed) for seed in self._make_seeds()],
        )
        return export_tensor(loss), [export_tensor(gradient) for gradient in (*of_rows, *of_weights)]

    def split_rows(self, gradients: Sequence[Tensor], count: int) -> list[Tensor]:
        """Return the gradients of the rows [B, ...] of each feature in `features`, then those of the weights."""
        of_pooled, *others = gradients
        n_sequences = len(self._sequences)
        of_sequences = [gradient[:count] for gradient in others[:n_sequences]]
        return [*of_pooled[:count].split(self._widths, 1), *of_sequences, *others[n_sequences:]]

    def save(self, weights: Sequence[Tensor], path: Path) -> None:
        """Write the Keras model with weights to a `.keras` file."""
        for variable, weight in zip(self.variables, weights, strict=True):
            variable.assign(weight.detach().numpy())
        self._model.save(path)

    def _make_seeds(self) -> list[Tensor]:
        """Return the states of Keras's seed generators: functions of the seed that torch's generator was given for the step."""
        return [
            torch.tensor(
                [hash_words(torch.initial_seed(), "keras", index) % (1 << _SEED_BITS), 0], dtype=torch.int32
            )
            for index in range(len(self._seed_types))
        ]

    def _pad(self, pooled: Mapping[str, Tensor]) -> tuple[list[Any], list[Any], int]:
        """Return the rows (pooled ones [P, C] as one tensor, then sequences) and masks with padding, and the number of rows."""
        count = len(next(iter(pooled.values())))
        size = choose_size(count)
        parts = [pooled[name].detach() for name in self._pooled]
        joined = torch.zeros(size, sum(self._widths))
        if parts:
            torch.cat(parts, 1, out=joined[:count])
        others = [pooled[name].detach() for name in self._sequences], [pooled[name] for name in self._masks]
        sequences, masks = ([_pad_rows(tensor, size) for tensor in tensors] for tensors in others)
        import_tensor = self.backend.import_tensor
        return [import_tensor(rows) for rows in (joined, *sequences)], list(map(import_tensor, masks)), count

    # --- functions that a backend compiles ----------------------------------------------------------------------

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
            | dict(zip(self._masks, masks, strict=True))
        )

    def _compute_keras_logits(self, weights: Sequence[Any], rows: Sequence[Any], masks: Sequence[Any]) -> Any:
        """Compute logits [P] or [P, T] without dropout."""
        inputs = self._make_keras_inputs(rows, masks)
        output, _ = self._model.stateless_call(
            weights,
            [variable.value for variable in self._model.non_trainable_variables],
            inputs,
            training=False,
        )
        return self._shape_logits(output)

    def _shape_logits(self, output: Any) -> Any:
        """Return the output of the Keras model as logits [P], or [P, T] of several tasks."""
        has_tasks = len(output.shape) == 2 and output.shape[1] > 1
        return output if has_tasks else self.keras.ops.reshape(output, (-1,))

    def _compute_keras_loss(
        self,
        weights: Sequence[Any],
        rows: Sequence[Any],
        masks: Sequence[Any],
        targets: Any,
        seeds: Sequence[Any],
    ) -> Any:
        """Compute the weighted sum of log losses for labels and weights [2, P] or [2, P, T], with dropout drawn from seeds."""
        ops = self.keras.ops
        states = [ops.cast(seed, dtype) for seed, dtype in zip(seeds, self._seed_types, strict=True)]
        inputs = self._make_keras_inputs(rows, masks)
        output, _ = self._model.stateless_call(weights, states, inputs, training=True)
        logit, label, weight = self._shape_logits(output), targets[0], targets[1]
        losses = ops.maximum(logit, 0.0) - logit * label + ops.log1p(ops.exp(-ops.abs(logit)))
        return ops.sum(losses * weight)


def choose_size(count: int) -> int:
    """Return the number of rows to which `count` rows are padded: a power of two, or one and a half times one."""
    size = _LEAST_ROWS
    while size < count:
        if size * 3 // 2 >= count:
            return size * 3 // 2
        size *= 2
    return size


def _pad_rows(tensor: Tensor, size: int) -> Tensor:
    """Return a tensor [size, ...] with zeros after its rows."""
    padded = tensor.new_zeros(size, *tensor.shape[1:])
    padded[: len(tensor)] = tensor
    return padded
