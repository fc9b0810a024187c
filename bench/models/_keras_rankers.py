"""The Keras models of `bench rankers`: DeepFM as `nonet.models.deepfm` has it, and a plain Keras loop with tables of its own."""

# keras.ops may return None by their types.
# pyright: reportOptionalSubscript=false, reportOptionalOperand=false, reportOperatorIssue=false

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import keras
import numpy as np
from keras import layers, ops
from torch import Tensor

Shapes = Mapping[str, tuple[int, ...]]
_HIDDEN = (64, 32)


def build(features: Shapes, optimizer: keras.Optimizer, activation: str) -> keras.Model:
    """Build DeepFM without dropout, compiled with an optimizer."""
    inputs = {name: keras.Input(shape, name=name) for name, shape in features.items()}
    model = keras.Model(inputs, compute_logit(list(inputs.values()), activation))
    model.compile(optimizer=optimizer)
    return model


def _make_builder(optimizer: str, activation: str) -> Callable[[Shapes], keras.Model]:
    """Make the function that builds DeepFM with an optimizer and an activation."""
    make = {
        "sgd": keras.optimizers.SGD,
        "adagrad": partial(keras.optimizers.Adagrad, initial_accumulator_value=0.1, epsilon=1e-7),
        "adam": partial(keras.optimizers.Adam, epsilon=1e-7),
    }[optimizer]
    return lambda features: build(features, make(), activation)


build_sgd_relu, build_sgd_tanh = _make_builder("sgd", "relu"), _make_builder("sgd", "tanh")
build_adagrad_relu, build_adagrad_tanh = _make_builder("adagrad", "relu"), _make_builder("adagrad", "tanh")
build_adam_relu, build_adam_tanh = _make_builder("adam", "relu"), _make_builder("adam", "tanh")


def compute_logit(rows: Sequence[Any], activation: str = "relu") -> Any:
    """Compute the logit [B, 1] of DeepFM from a row [B, D] per feature."""
    stacked = ops.stack(list(rows), axis=1)
    factors = stacked[..., 1:]
    square_of_sum, sum_of_squares = ops.square(ops.sum(factors, 1)), ops.sum(ops.square(factors), 1)
    pairs = 0.5 * ops.sum(square_of_sum - sum_of_squares, -1)
    hidden = layers.Flatten()(factors)
    for width in _HIDDEN:
        hidden = layers.Dense(width, activation=activation)(hidden)
    return layers.Dense(1)(hidden) + ops.expand_dims(ops.sum(stacked[..., 0], 1) + pairs, 1)


def make_plain_step(
    features: Sequence[str],
    n_ids: int,
    dim: int,
    rate: float,
    batches: Sequence[tuple[Mapping[str, Tensor], Tensor]],
) -> Callable[[int], None]:
    """Make the function that takes a step of a plain Keras loop: `Embedding` layers, `train_on_batch`, Adagrad for all weights.

    Args:
        features: Names of the features.
        n_ids: Number of ids of a feature.
        dim: Width of a row.
        rate: The learning rate.
        batches: The batches, ids [B] by feature from 1 and labels [B].
    """
    inputs = {name: keras.Input((), dtype="int32", name=name) for name in features}
    rows = [layers.Embedding(n_ids + 1, dim)(inputs[name]) for name in features]
    model = keras.Model(inputs, compute_logit(rows))
    model.compile(
        optimizer=keras.optimizers.Adagrad(rate), loss=keras.losses.BinaryCrossentropy(from_logits=True)
    )
    arrays = [
        ({name: ids.numpy().astype(np.int32) for name, ids in batch.items()}, label.numpy()[:, None])
        for batch, label in batches
    ]

    def step(turn: int) -> None:
        ids, label = arrays[turn % len(arrays)]
        model.train_on_batch(ids, label)

    return step
