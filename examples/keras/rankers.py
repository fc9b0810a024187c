"""Click models in Keras: DeepFM, DIN, a DLRM-shaped one, and one of two tasks. Run one with `nonet run examples/keras/ctr.yaml`.

A function gets the shape of each feature by name, without the batch: (dim,) of a pooled feature, (history, dim) of a sequence and
(history,) of its mask. It returns a model with one input for each, by name, and one logit as output, or one for the target and
each task of the stage. Nonet steps the rows of sparse tables; the optimizer that the model is compiled with steps all other
weights, at the learning rate of the stage.
"""

from __future__ import annotations

import keras
from keras import layers, ops

Shapes = dict[str, tuple[int, ...]]


def build_deepfm(features: Shapes) -> keras.Model:
    """Build DeepFM (Guo et al., IJCAI 2017); a row is [first-order weight, factors]."""
    inputs = make_inputs(features)
    rows = ops.stack(list(inputs.values()), axis=1)
    factors = rows[..., 1:]
    square_of_sum, sum_of_squares = ops.square(ops.sum(factors, 1)), ops.sum(ops.square(factors), 1)
    pairs = 0.5 * ops.sum(square_of_sum - sum_of_squares, -1)
    hidden = add_hidden_layers(layers.Flatten()(factors), (64, 32), dropout=0.3)
    logit = layers.Dense(1)(hidden)[:, 0] + ops.sum(rows[..., 0], 1) + pairs
    return compile_model(keras.Model(inputs, logit))


def build_din(features: Shapes) -> keras.Model:
    """Build DIN (Zhou et al., KDD 2018): the events of a sequence are weighted by their fit to the item, then summed."""
    inputs = make_inputs(features)
    item, pooled = (
        inputs["item"],
        [inputs[name] for name, shape in features.items() if is_pooled(name, shape)],
    )
    for name, shape in features.items():
        if len(shape) == 2:
            events = inputs[name]
            query = ops.repeat(ops.expand_dims(item, 1), shape[0], axis=1)
            pairs = ops.concatenate([query, events, query - events, query * events], -1)
            fit = layers.Dense(16, activation="sigmoid")(pairs)
            weights = layers.Dense(1)(fit)[..., 0] * inputs[f"{name}_mask"]
            pooled.append(ops.sum(events * ops.expand_dims(weights, -1), 1))
    hidden = add_hidden_layers(ops.concatenate(pooled, -1), (64, 32), dropout=0.3)
    return compile_model(keras.Model(inputs, layers.Dense(1)(hidden)))


def build_dlrm(features: Shapes) -> keras.Model:
    """Build a model like DLRM (Naumov et al., 2019): hidden layers over the rows and the dot products of all pairs of them."""
    inputs = make_inputs(features)
    rows = ops.stack(list(inputs.values()), axis=1)
    count = len(inputs)
    products = layers.Flatten()(ops.matmul(rows, ops.transpose(rows, (0, 2, 1))))
    lower = ops.take(products, [i * count + j for i in range(count) for j in range(i)], axis=1)
    hidden = add_hidden_layers(ops.concatenate([layers.Flatten()(rows), lower], -1), (64, 32), dropout=0.3)
    return compile_model(keras.Model(inputs, layers.Dense(1)(hidden)))


def build_two_tasks(features: Shapes) -> keras.Model:
    """Build a shared bottom with two towers (Caruana, 1997): a logit of the target and one of a task, of the pooled rows."""
    inputs = make_inputs({name: shape for name, shape in features.items() if is_pooled(name, shape)})
    shared = add_hidden_layers(ops.concatenate(list(inputs.values()), -1), (64,), dropout=0.3)
    logits = [layers.Dense(1)(add_hidden_layers(shared, (32,), dropout=0.3)) for _ in range(2)]
    return compile_model(keras.Model(inputs, ops.concatenate(logits, -1)))


def make_inputs(features: Shapes) -> dict[str, keras.KerasTensor]:
    """Make one input for each feature."""
    return {name: keras.Input(shape, name=name) for name, shape in features.items()}


def is_pooled(name: str, shape: tuple[int, ...]) -> bool:
    """Return whether an input has one row, and is not the mask of a sequence."""
    return len(shape) == 1 and not name.endswith("_mask")


def add_hidden_layers(
    hidden: keras.KerasTensor, widths: tuple[int, ...], dropout: float
) -> keras.KerasTensor:
    """Add layers of these widths with ReLU and dropout."""
    for width in widths:
        hidden = layers.Dense(width, activation="relu", kernel_initializer="he_normal")(hidden)
        hidden = layers.Dropout(dropout)(hidden)
    return hidden


def compile_model(model: keras.Model) -> keras.Model:
    """Compile with the optimizer that steps the dense weights."""
    model.compile(optimizer=keras.optimizers.AdamW(weight_decay=0.1))
    return model
