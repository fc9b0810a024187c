"""Small Keras models of the features user, item, liked and year, as a user's file has them."""

from __future__ import annotations

import keras
from keras import layers, ops, optimizers, regularizers

Shapes = dict[str, tuple[int, ...]]


@keras.saving.register_keras_serializable("keras_models")
class Penalty(layers.Layer):
    """Adds a loss of its inputs: "mean" of squares, their "sum", or one "per_row", which Keras sums; "spread"; "large" values."""

    def __init__(self, kind: str, scale: float = 0.1, **options):
        super().__init__(**options)
        self.kind, self.scale = kind, scale

    def call(self, inputs, training=None):
        squares = ops.square(inputs)
        losses = {
            "mean": lambda: ops.mean(squares),
            "sum": lambda: ops.sum(squares),
            "per_row": lambda: ops.sum(squares, axis=-1),
            "spread": lambda: ops.mean(ops.var(inputs, axis=0)),
            "large": lambda: ops.mean(ops.relu(ops.abs(inputs) - 20.0)),
        }
        if self.kind != "training" or training:
            self.add_loss(self.scale * losses.get(self.kind, losses["mean"])())
        return inputs

    def get_config(self):
        return {**super().get_config(), "kind": self.kind, "scale": self.scale}


def make_rows(features: Shapes):
    """Return the inputs by name, and their rows side by side."""
    inputs = {name: keras.Input(shape, name=name) for name, shape in features.items()}
    return inputs, layers.Concatenate()(list(inputs.values()))


def finish(inputs, hidden, optimizer=None, **last):
    """Return the model that ends with one logit."""
    model = keras.Model(inputs, layers.Dense(1, name="out", **last)(hidden))
    model.compile(optimizer=optimizer or optimizers.SGD(0.1))
    return model


def build_plain(features: Shapes, optimizer=None):
    inputs, rows = make_rows(features)
    return finish(inputs, layers.Dense(8, "tanh", name="hidden")(rows), optimizer)


def build_penalties(features: Shapes):
    """Every kind of loss of a layer, a frozen layer, a constraint, and an optimizer with many arguments."""
    inputs, rows = make_rows(features)
    frozen = layers.Dense(12, "relu", name="frozen", trainable=False, kernel_regularizer="l2")
    hidden = layers.Dense(
        8,
        "tanh",
        name="hidden",
        kernel_regularizer=regularizers.L2(0.5),
        activity_regularizer=regularizers.L1(0.3),
        kernel_constraint=keras.constraints.MaxNorm(0.8),
        bias_initializer="ones",
    )(frozen(rows))
    for kind in ("mean", "sum", "per_row"):
        hidden = Penalty(kind)(hidden)
    optimizer = optimizers.AdamW(0.1, weight_decay=0.5, use_ema=True, ema_momentum=0.7, global_clipnorm=2.0)
    optimizer.exclude_from_weight_decay(var_names=["bias"])
    return finish(inputs, hidden, optimizer, bias_initializer="ones")


def build_accumulated(features: Shapes):
    optimizer = optimizers.SGD(
        0.1,
        momentum=0.9,
        loss_scale_factor=64.0,
        gradient_accumulation_steps=2,
        use_ema=True,
        ema_momentum=0.5,
        ema_overwrite_frequency=3,
        clipvalue=0.05,
    )
    return build_plain(features, optimizer)


def build_probabilities(features: Shapes):
    inputs, rows = make_rows(features)
    hidden = layers.Dense(8, "tanh", name="hidden")(rows)
    logit = layers.Dense(1, name="out")(hidden)
    model = keras.Model(inputs, layers.Reshape((1,))(ops.sigmoid(logit)))
    model.compile(optimizer=optimizers.Adam(), loss=keras.losses.BinaryCrossentropy())
    return model


def build_dropout(features: Shapes):
    inputs, rows = make_rows(features)
    return finish(inputs, layers.Dropout(0.3)(layers.Dense(64, "relu", name="hidden")(rows)))


def build_mean(features: Shapes):
    inputs, rows = make_rows(features)
    return finish(inputs, Penalty("mean")(layers.Dense(8, "tanh")(layers.Dropout(0.2)(rows))))


def build_relu(features: Shapes):
    """Few units, so that none is active for some rows, whose logits are exactly 0."""
    inputs, rows = make_rows(features)
    return finish(inputs, layers.Dense(4, "relu")(rows))


def build_zeros(features: Shapes):
    """All logits are 0 at first."""
    inputs, rows = make_rows(features)
    return finish(inputs, rows, kernel_initializer="zeros")


def build_large(features: Shapes):
    inputs, rows = make_rows(features)
    hidden = layers.Dense(8, name="hidden", kernel_regularizer="l2")(rows)
    return finish(inputs, Penalty("large")(hidden))


def build_shared(features: Shapes):
    """A layer without bias that is called twice, and adds the mean of the squares of its outputs each time."""
    inputs, rows = make_rows(features)
    twice, penalty = layers.Dense(4, name="twice", use_bias=False), Penalty("mean", 1.0)
    parts = [penalty(twice(inputs[name])) for name in ("user", "item")]
    return finish(inputs, layers.Concatenate()([*parts, rows]))


def build_average(features: Shapes):
    return build_plain(features, optimizers.Adam(use_ema=True, ema_momentum=0.9))


def build_frozen_normalization(features: Shapes):
    """BatchNormalization with trainable=False computes with its stored averages, in training too."""
    inputs, rows = make_rows(features)
    return finish(inputs, layers.Dense(8, "tanh")(layers.BatchNormalization(trainable=False)(rows)))


def build_with(name: str):
    """Return a function that builds the plain model with an optimizer of this name."""

    def build(features: Shapes):
        return build_plain(features, getattr(optimizers, name)(learning_rate=0.01))

    return build


OPTIMIZERS = (
    *("Adadelta", "Adafactor", "Adagrad", "Adam", "AdamW", "Adamax", "Ftrl", "Lamb", "Lion", "Nadam"),
    *("RMSprop", "SGD"),
    *(name for name in ("Muon", "ScheduleFreeAdamW") if hasattr(optimizers, name)),
)
globals().update({f"build_{name}": build_with(name) for name in OPTIMIZERS})
