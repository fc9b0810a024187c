"""What a Keras model computes on probes: drawn rows and weights, which show what its configuration does not say.

- A row's output depends on no other row of its batch, neither in training nor without dropout. Else it would depend on padding,
  on the number of trainers, and on which questions are scored together. A batch is compared with one that has padding in place
  of some of its rows, and with the other rows alone.
- Outputs that are always in [0, 1] are probabilities; others are logits. Weights are drawn too, because those of an untrained
  model may be zeros.
- Training changes no variable but weights, as BatchNormalization does.
- Each loss of a layer is a constant, a mean or a sum over the rows, so that several trainers compute what one does.
"""

# Shapes: K rows, N rows of both halves of a batch, T tasks.

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from nonet.errors import ConfigError
from nonet.models.keras.compiled import CompiledModel, LayerLoss

_SCALES = (0.1, 1.0, 1.0, 10.0, 100.0, 1000.0)
"""Scales of the K rows of a probe, so that outputs reach their extremes."""
_ROWS = len(_SCALES)
_WEIGHT_NOISE = (0.0, 0.3, 1.0)
"""Standard deviation of what is added to the initial weights, by probe."""
_TOLERANCE = 1e-4  # Relative difference of results that are the same but for rounding.
_SIZE_TOLERANCE = 1e-2  # The same for another number of rows, which changes the order of sums.
_SEED = 7

Rows = dict[str, Tensor]


@dataclass(frozen=True)
class ModelCall:
    """The result of a call of a Keras model.

    Attributes:
        output: Outputs [N, T].
        frozen: Values of the variables that are not weights.
        losses: Losses of layers, one scalar each.
    """

    output: Tensor
    frozen: list[Tensor]
    losses: list[Tensor]


class ModelProbe:
    """Evaluates a model on probes.

    Args:
        compiled: The model.
        weights: The initial weights.
        frozen: The initial values of its other variables.
    """

    def __init__(self, compiled: CompiledModel, weights: Sequence[Tensor], frozen: Sequence[Tensor]):
        self._compiled, self._initial, self._frozen = compiled, weights, frozen
        self._generator = torch.Generator().manual_seed(_SEED)

    def predict(self, rows: Rows) -> Tensor:
        """Compute outputs [K, T] without dropout."""
        return self._call(self._initial, rows, None, training=False).output

    def check_outputs(self, title: str, names: Sequence[str]) -> None:
        """Check that outputs depend on their own row alone, and are what `from_logits` says.

        Args:
            title: The text that messages begin with.
            names: What the columns of the output are, in words.

        Raises:
            ConfigError: They are not.
        """
        outputs, padding = [], {name: torch.zeros_like(values) for name, values in self._draw_rows().items()}
        for noise in _WEIGHT_NOISE:
            weights, rows, others = self._draw_weights(noise), self._draw_rows(), self._draw_rows()
            for training in (False, True):
                whole, padded = (self._call(weights, rows, half, training) for half in (others, padding))
                self._check_frozen(title, whole.frozen)
                if not _are_close(whole.output[:_ROWS], padded.output[:_ROWS]):
                    raise ConfigError(f"{title}: {_OTHER_ROWS}")
                outputs.append(whole.output)
        # Another number of rows changes the masks of dropout.
        weights, rows = self._draw_weights(_WEIGHT_NOISE[1]), self._draw_rows(ordinary=True)
        for training in (False,) if self._compiled.has_seeds else (False, True):
            alone, padded = (self._call(weights, rows, half, training).output for half in (None, padding))
            if not _are_close(alone, padded[:_ROWS], alone.abs().max(), _SIZE_TOLERANCE):
                raise ConfigError(f"{title}: {_OTHER_ROWS}")
        self._check_range(title, names, torch.cat(outputs))

    def find_layer_losses(self, title: str) -> list[LayerLoss]:
        """Return how each loss of a layer depends on the rows.

        Raises:
            ConfigError: One is neither a constant nor a mean or sum over the rows.
        """
        found = self._classify_losses(title, self._draw_weights(_WEIGHT_NOISE[1]), ordinary=True)
        # One that is 0 for ordinary rows, such as a penalty of large values, may depend on other rows.
        for noise in _WEIGHT_NOISE if LayerLoss.CONSTANT in found else ():
            found = self._classify_losses(title, self._draw_weights(noise), ordinary=False, known=found)
        return found

    def _classify_losses(
        self, title: str, weights: Sequence[Tensor], *, ordinary: bool, known: Sequence[LayerLoss] = ()
    ) -> list[LayerLoss]:
        """Return how each loss of a layer depends on drawn rows, unless it is `known` to be a mean or a sum.

        Raises:
            ConfigError: One is neither a constant nor a mean or sum over the rows.
        """
        a, b = self._draw_rows(ordinary=ordinary), self._draw_rows(ordinary=ordinary)
        of_halves = [[self._call(weights, x, y, True).losses for y in (a, b)] for x in (a, b)]
        count = len(of_halves[0][0])
        # Without dropout, the losses of K rows can be compared with those of twice as many.
        training = not self._compiled.has_seeds
        of_pair = [self._call(weights, x, x, training).losses for x in (a, b)]
        of_one = [self._call(weights, x, None, training).losses for x in (a, b)]
        found = []
        for index in range(count):
            if known and known[index] != LayerLoss.CONSTANT:
                found.append(known[index])
                continue
            (aa, ab), (ba, bb) = ([losses[index] for losses in row] for row in of_halves)
            kind = None
            if bool(aa == ab == ba == bb):
                kind = LayerLoss.CONSTANT
            elif all(len(losses) == count for losses in (*of_pair, *of_one)) and _are_close(aa + bb, ab + ba):
                one, pair = (left[index] - right[index] for left, right in (of_one, of_pair))
                scale = max(of_one[0][index].abs(), of_one[1][index].abs())
                if one.abs() > _TOLERANCE * scale:
                    kind = LayerLoss.MEAN if _are_close(pair, one, scale) else None
                    kind = LayerLoss.SUM if _are_close(pair, 2 * one, scale) else kind
            if kind is None:
                raise ConfigError(
                    f"{title}: model.losses[{index}] is neither a mean nor a sum over the rows of a batch, so that it would "
                    "depend on the number of trainers; compute it from each row alone, and the same with and without training"
                )
            found.append(kind)
        return found

    def _check_frozen(self, title: str, values: Sequence[Tensor]) -> None:
        """Raise ConfigError if a call in training has changed a variable that is no weight."""
        for variable, before, after in zip(self._compiled.frozen, self._frozen, values, strict=True):
            if not torch.equal(before, after):
                raise ConfigError(
                    f"{title}: {variable.path} is changed by a call in training and not by gradients, and would depend on the "
                    "padding of batches and on the number of trainers. Use LayerNormalization in place of BatchNormalization, or "
                    "set trainable=False"
                )

    def _check_range(self, title: str, names: Sequence[str], output_NT: Tensor) -> None:
        """Raise ConfigError unless each column of the outputs has the range of logits or probabilities, as `from_logits` says."""
        for name, column in zip(names, output_NT.T, strict=True):
            finite = column[column.isfinite()]
            if not len(finite):
                raise ConfigError(
                    f"{title}: {name} is not finite for any drawn rows; look for a division by 0"
                )
            low, high = float(finite.min()), float(finite.max())
            is_probability = low >= -_TOLERANCE and high <= 1 + _TOLERANCE
            if self._compiled.from_logits and is_probability:
                raise ConfigError(
                    f"{title}: {name} is always between 0 and 1 ({low:.3g} to {high:.3g}), as probabilities are, and the loss is "
                    "computed from logits. Return logits, without a sigmoid or softmax at the end, or set model.from_logits: "
                    "false"
                )
            if not self._compiled.from_logits and not is_probability:
                raise ConfigError(
                    f"{title}: {name} is between {low:.3g} and {high:.3g}, and model.from_logits: false wants probabilities, "
                    "between 0 and 1. End with a sigmoid, or remove model.from_logits"
                )

    def _call(self, weights: Sequence[Tensor], rows: Rows, others: Rows | None, training: bool) -> ModelCall:
        """Call the model on K rows, followed by K others if there are any. Dropout is the same in all calls of a size.

        It is not compiled: compiling takes longer than all calls together.
        """
        model, export = self._compiled, self._compiled.backend.export_tensor
        parts = [
            values if others is None else torch.cat([values, others[name]]) for name, values in rows.items()
        ]
        own_weights, frozen, seeds, inputs = model.import_all(
            weights, self._frozen, model.make_seeds(_SEED), parts
        )
        output, frozen, losses = model.call_keras_model(
            own_weights, frozen, seeds, dict(zip(rows, inputs, strict=True)), training=training
        )
        output, frozen, losses = (
            [export(value).clone() for value in values] for values in ([output], frozen, losses)
        )
        return ModelCall(output[0].reshape(len(output[0]), -1), frozen, losses)

    def _draw_weights(self, noise: float) -> list[Tensor]:
        """Return the initial weights with noise, within their constraints."""
        ops, weights = self._compiled.keras.ops, []
        for variable, value in zip(self._compiled.variables, self._initial, strict=True):
            drawn = value + noise * torch.randn(value.shape, generator=self._generator)
            if variable.constraint is not None and noise:
                constrained = variable.constraint(ops.convert_to_tensor(drawn.numpy()))
                drawn = torch.from_numpy(ops.convert_to_numpy(constrained).copy())
            weights.append(drawn)
        return weights

    def _draw_rows(self, *, ordinary: bool = False) -> Rows:
        """Draw K rows of each input, of several scales or ordinary ones."""
        scales = None if ordinary else torch.tensor(_SCALES)
        return self.draw_rows(self._compiled, self._generator, scales)

    @staticmethod
    def draw_rows(
        compiled: CompiledModel,
        generator: torch.Generator | None = None,
        scales: Tensor | None = None,
    ) -> Rows:
        """Draw K rows of the inputs of a model.

        Args:
            compiled: The model.
            generator: A generator of random numbers; None for one with a fixed seed.
            scales: The scale of each row [K]; None for 1.
        """
        generator = generator or torch.Generator().manual_seed(_SEED)
        scales, rows = torch.ones(_ROWS) if scales is None else scales, {}
        for name, shape in compiled.shapes.items():
            drawn = torch.randn((_ROWS, *shape), generator=generator)
            is_mask = name in compiled.masks
            rows[name] = (drawn > 0).float() if is_mask else drawn * scales.view(-1, *[1] * len(shape))
        return rows


_OTHER_ROWS = (
    "the output of a row depends on the other rows of its batch, and so would depend on padding, on the number of trainers and "
    "on what is scored together. Compute means and maxima over the values of a row, such as ops.mean(x, axis=-1), and not over "
    "rows"
)


def _are_close(a: Tensor, b: Tensor, scale: Tensor | float = 0.0, tolerance: float = _TOLERANCE) -> bool:
    """Return whether two results are the same but for rounding, relative to the larger one of them and `scale`."""
    scales = torch.maximum(torch.maximum(a.abs(), b.abs()).nan_to_num(), torch.as_tensor(scale))
    same = (a - b).abs() <= tolerance * scales.clamp_min(1e-30)
    return bool((same | (a == b) | (a.isnan() & b.isnan())).all())
