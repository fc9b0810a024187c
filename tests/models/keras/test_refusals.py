"""A Keras model that would be trained otherwise than `fit` trains it is refused by name, and what its outputs are is found.

The backend is JAX; `test_tensorflow.py` runs this file with TensorFlow (`NONET_KERAS_BACKEND`).
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from nonet.errors import ConfigError
from nonet.models import build_model
from nonet.models.keras import KerasRanker
from nonet.models.keras.backends import load_keras
from nonet.models.keras.check import build_and_step
from nonet.models.keras.compiled import LayerLoss

BACKEND = os.environ.get("NONET_KERAS_BACKEND", "jax")
FEATURES = {"user": 3, "item": 3}
FILE = """
import keras
from keras import layers, ops, optimizers


class Own(layers.Layer):
    def __init__(self, kind, **options):
        super().__init__(**options)
        self.kind = kind
        self.count = self.add_weight((), "zeros", trainable=False, name="count")

    def call(self, x, training=None):
        if self.kind == "centred" and training:
            return x - ops.mean(x, axis=0)
        if self.kind == "counted":
            return x / ops.cast(ops.shape(x)[0], "float32")
        if self.kind == "counts" and training:
            self.count.assign(self.count + 1)
        if self.kind == "spread":
            self.add_loss(ops.mean(ops.var(x, axis=0)))
        if self.kind == "penalty" and training:
            self.add_loss(ops.mean(ops.square(x)))
        return x


@keras.saving.register_keras_serializable()
class Forgetful(layers.Layer):
    def __init__(self, factor=1.0, **options):
        super().__init__(**options)
        self.factor = factor

    def call(self, x):
        return self.factor * x

    def get_config(self):
        return {"name": self.name}


def own_metric(label, output):
    return ops.mean(output)


class Stepped(keras.Model):
    def train_step(self, *arguments):
        return super().train_step(*arguments)


class Lossy(keras.Model):
    def compute_loss(self, *arguments, **options):
        return super().compute_loss(*arguments, **options)


class Fitted(keras.Model):
    def fit(self, *arguments, **options):
        return super().fit(*arguments, **options)


def build(features):
    inputs = {name: keras.Input(shape, name=name) for name, shape in features.items()}
    rows = layers.Concatenate()(list(inputs.values()))
    hidden = layers.Dense(4, "tanh", name="hidden")(rows)
    logit = layers.Dense(1, name="out")(hidden)
    model = keras.Model(inputs, logit)
    LINES
    return model
"""


def make(folder: Path, lines: str, **options) -> KerasRanker:
    """Build the ranker of a file with these lines at its end, separated by semicolons."""
    path = folder / "rankers.py"
    path.write_text(FILE.replace("LINES", "\n    ".join(line.strip() for line in lines.split(";"))))
    config = {"path": f"{path}:build", "backend": BACKEND, "sequences": [], "length": 1}
    return build_model({"use": "keras", **config, **options}, (), FEATURES, 7)


def end_with(output: str) -> str:
    return f"model = keras.Model(inputs, {output})"


PROBABILITIES = {
    "a sigmoid of keras.ops": "ops.sigmoid(logit)",
    "a layer with a sigmoid before another one": "layers.Reshape((1,))(layers.Dense(1, 'sigmoid')(hidden))",
    "a hard sigmoid": "layers.Dense(1, 'hard_sigmoid')(hidden)",
    "an activation layer": "layers.Activation('sigmoid')(logit)",
    "a mixture": "0.3 * ops.sigmoid(logit) + 0.7 * ops.sigmoid(-logit)",
    "clipped": "ops.clip(logit, 0.0, 1.0)",
    "a sigmoid after zeros": "layers.Dense(1, 'sigmoid', kernel_initializer='zeros')(hidden)",
}


@pytest.mark.parametrize("name", PROBABILITIES)
def test_probabilities_are_found_by_their_range_and_taken_for_logits_never(name, tmp_path):
    line = end_with(PROBABILITIES[name])
    with pytest.raises(
        ConfigError, match=r"the output is always between 0 and 1 .* or set model.from_logits: false"
    ):
        make(tmp_path, line)
    make(tmp_path, line, from_logits=False)


def test_a_softmax_is_found_by_task_and_one_logit_beside_a_probability_too(tmp_path):
    tasks = ["a", "b"]
    softmax = end_with("layers.Dense(3, 'softmax')(hidden)")
    with pytest.raises(ConfigError, match="the output of the target is always between 0 and 1"):
        make(tmp_path, softmax, tasks=tasks)
    make(tmp_path, softmax, tasks=tasks, from_logits=False)
    mixed = end_with("layers.Concatenate()([layers.Dense(2)(hidden), layers.Dense(1, 'sigmoid')(hidden)])")
    with pytest.raises(ConfigError, match="the output of the task 'b' is always between 0 and 1"):
        make(tmp_path, mixed, tasks=tasks)
    with pytest.raises(
        ConfigError, match=r"the output of the target is between -.* and .*wants probabilities"
    ):
        make(tmp_path, mixed, tasks=tasks, from_logits=False)


LOGITS = {
    "zeros at first": "layers.Dense(1, kernel_initializer='zeros')(hidden)",
    "never negative": "ops.relu(logit)",
    "bounded": "layers.Dense(1, 'tanh')(hidden)",
    "a product of rows": "ops.sum(inputs['user'] * inputs['item'], -1) + logit[:, 0]",
    "a gate inside": "logit * ops.sigmoid(layers.Dense(1)(hidden))",
}


@pytest.mark.parametrize("name", LOGITS)
def test_logits_are_accepted_whatever_the_untrained_weights_are_and_refused_as_probabilities(name, tmp_path):
    line = end_with(LOGITS[name])
    make(tmp_path, line)
    with pytest.raises(ConfigError, match=r"model.from_logits: false wants probabilities, between 0 and 1"):
        make(tmp_path, line, from_logits=False)


OTHER_ROWS = {
    "a mean over rows": "layers.Dense(1)(hidden - ops.mean(hidden, axis=0))",
    "a mean over rows before zeros": "layers.Dense(1, kernel_initializer='zeros')(rows - ops.mean(rows, axis=0))",
    "a maximum over rows": "layers.Dense(1)(hidden / (1 + ops.max(ops.abs(rows), axis=0, keepdims=True)[:, :1]))",
    "the number of rows": "Own('counted')(logit)",
    "the row before": "logit + ops.roll(logit, 1, axis=0)",
    "a mean in training": "layers.Dense(1)(Own('centred')(hidden))",
    "attention between rows": "layers.Dense(1)(ops.softmax(hidden @ ops.transpose(hidden)) @ hidden)",
}


@pytest.mark.parametrize("name", OTHER_ROWS)
def test_an_output_that_depends_on_other_rows_is_refused(name, tmp_path):
    with pytest.raises(ConfigError, match="depends on the other rows of its batch"):
        make(tmp_path, end_with(OTHER_ROWS[name]))


REFUSED = {
    "layers.BatchNormalization": (
        end_with("layers.Dense(1)(layers.BatchNormalization(name='norm')(hidden))"),
        r"norm/moving_mean is changed by a call .*LayerNormalization in place of BatchNormalization",
    ),
    "own state": (
        end_with("layers.Dense(1)(Own('counts', name='own')(hidden))"),
        "own/count is changed by a call",
    ),
    "a loss of the spread": (
        end_with("layers.Dense(1)(Own('spread')(hidden))"),
        r"model.losses\[0\] is neither a mean",
    ),
    "a loss in training beside dropout": (
        end_with("layers.Dense(1)(Own('penalty')(layers.Dropout(0.1)(hidden)))"),
        "neither a mean nor a sum .* with and without training",
    ),
    "mixed precision": (
        end_with("layers.Dense(1, dtype='mixed_bfloat16', name='half')(hidden)"),
        "the layer 'half' has the dtype policy 'mixed_bfloat16', .* without mixed precision",
    ),
    "half precision": (
        end_with("layers.Dense(1, dtype='float16', name='half')(hidden)"),
        "the dtype policy 'float16'",
    ),
    "a loss scale": (
        "model.compile(optimizers.LossScaleOptimizer(optimizers.Adam()))",
        "LossScaleOptimizer, .* without mixed precision; use the optimizer inside",
    ),
    "a schedule": (
        "model.compile(optimizers.Adam(optimizers.schedules.CosineDecay(0.1, 10)))",
        "stages have a schedule",
    ),
    "a train_step": ("model = Stepped(inputs, logit)", "Stepped.train_step is not called"),
    "a compute_loss": ("model = Lossy(inputs, logit)", "Lossy.compute_loss is not called"),
    "a fit": ("model = Fitted(inputs, logit)", "Fitted.fit is not called"),
    "a train_step of the instance": (
        "model.train_step = lambda *arguments: {}",
        r"Functional.train_step is not called",
    ),
    "a compute_loss of the instance": (
        "model.compute_loss = lambda *arguments, **options: 0.0",
        r"Functional.compute_loss is not called",
    ),
    "whole numbers": (
        "inputs['user'] = keras.Input(features['user'], dtype='int32', name='user');"
        + end_with("layers.Dense(1)(ops.cast(inputs['user'], 'float32'))"),
        "the input 'user' is int32, and rows are float32, .*; leave out dtype",
    ),
    "a weight of a loss that is none": (
        "model.compile('adam', loss_weights=[3.0])",
        r"is compiled with loss_weights=\[3.0\], and Nonet .*; compile without loss and loss_weights",
    ),
    "another loss": (
        "model.compile('adam', 'mse')",
        "compiled with the loss mse, and Nonet computes the log loss",
    ),
    "probabilities": (
        "model.compile('adam', 'binary_crossentropy')",
        "with the loss binary_crossentropy, from_logits=False",
    ),
    "smoothing": (
        "model.compile('adam', keras.losses.BinaryCrossentropy(True, label_smoothing=0.1))",
        "compiled with the loss binary_crossentropy, label_smoothing=0.1, and Nonet",
    ),
    "probabilities by the name of a class": (
        "model.compile('adam', 'BinaryCrossentropy')",
        "with the loss BinaryCrossentropy, from_logits=False, and Nonet",
    ),
    "a loss that Keras does not know": (
        "model.compile('adam', 'no_such_loss')",
        "compiled with the loss no_such_loss, and Nonet",
    ),
    "a sum": (
        "model.compile('adam', keras.losses.BinaryCrossentropy(True, reduction='sum'))",
        "compiled with the loss binary_crossentropy, reduction=sum, and Nonet",
    ),
    "a weight of the loss": (
        "model.compile('adam', keras.losses.BinaryCrossentropy(True), loss_weights=2.0)",
        "compile without loss and loss_weights",
    ),
    "only frozen layers": ("model.trainable = False", "has no weights to train; unfreeze a layer"),
    "the same name twice": (
        "x, y = keras.Input((4,)), keras.Input((4,));"
        "parts = [keras.Model(i, layers.Dense(2, name='part')(i), name=n) for i, n in ((x, 'a'), (y, 'b'))];"
        + end_with("layers.Dense(1)(parts[0](hidden) + parts[1](hidden))"),
        "2 weights have the path 'part/kernel'.*give its layer another name",
    ),
    "a dot in a name": (end_with("layers.Dense(1, name='a.b')(hidden)"), "the weight 'a.b/kernel' has a dot"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_honoured_is_refused_in_one_line(name, tmp_path):
    lines, message = REFUSED[name]
    with pytest.raises(ConfigError, match=message) as refused:
        make(tmp_path, lines)
    assert "\n" not in str(refused.value)


ACCEPTED = {
    "the loss that is computed": "model.compile('adam', keras.losses.BinaryCrossentropy(from_logits=True), metrics=['auc'])",
    "frozen normalization": end_with("layers.Dense(1)(layers.BatchNormalization(trainable=False)(hidden))"),
    "a frozen layer": "model.get_layer('hidden').trainable = False",
    "a loss in training": end_with("layers.Dense(1)(Own('penalty')(hidden))"),
    "layer normalization": end_with("layers.Dense(1)(layers.LayerNormalization()(hidden))"),
    "settings of compile that change no weight": (
        "model.compile('adam', run_eagerly=True, jit_compile=False, steps_per_execution=3)"
    ),
    "dropout and noise": end_with("layers.Dense(1)(layers.GaussianNoise(0.1)(layers.Dropout(0.5)(hidden)))"),
}


@pytest.mark.parametrize("name", ACCEPTED)
def test_what_is_honoured_is_accepted(name, tmp_path):
    ranker = make(tmp_path, ACCEPTED[name])
    assert ranker.compiled.layer_losses == ([LayerLoss.MEAN] if name == "a loss in training" else [])


@pytest.mark.parametrize(
    "loss",
    [
        "'bce'",
        "'binary_crossentropy'",
        "'BinaryCrossentropy'",
        "keras.losses.binary_crossentropy",
        "keras.losses.BinaryCrossentropy()",
    ],
)
def test_the_log_loss_of_probabilities_is_accepted_however_it_is_spelled(loss, tmp_path):
    lines = f"{end_with('ops.sigmoid(logit)')};model.compile('adam', {loss})"
    assert not make(tmp_path, lines, from_logits=False).compiled.from_logits


def test_an_optimizer_of_several_rates_is_refused(tmp_path):
    keras, _ = load_keras(BACKEND, 1)
    if not hasattr(keras.optimizers, "MultiOptimizer"):
        pytest.skip("this Keras has no MultiOptimizer")
    several = "optimizers.MultiOptimizer(optimizers.OptimizerMap(optimizers.Adam(), {'hidden.*': optimizers.SGD()}))"
    with pytest.raises(ConfigError, match="several; give a number"):
        make(tmp_path, f"model.compile({several})")


# --- the check before a run -------------------------------------------------------------------------------------------


def check(folder: Path, lines: str, weight_decay: dict[str, float] | None = None) -> int:
    make_file = folder / "rankers.py"
    make_file.write_text(FILE.replace("LINES", "\n    ".join(line.strip() for line in lines.split(";"))))
    config = {"path": f"{make_file}:build", "backend": BACKEND, "sequences": [], "length": 1}
    return build_and_step(config, FEATURES, weight_decay or {})


def test_a_plan_steps_the_model_and_builds_it_again(tmp_path):
    assert check(tmp_path, "model.compile(optimizers.Adam(use_ema=True))") == 6 * 4 + 4 + 4 + 1
    with pytest.raises(
        ConfigError,
        match=r"stored model cannot be made; layers of your own .*get_config: TypeError: Could not locate class .Own",
    ):
        check(tmp_path, end_with("layers.Dense(1)(Own('none')(hidden))"))


def test_functions_that_only_metrics_and_models_inside_are_compiled_with_need_not_be_registered(tmp_path):
    metrics = "metrics=[own_metric], weighted_metrics=[own_metric]"
    compiled = f"model.compile(optimizers.Adam(0.5), {metrics})"
    assert check(tmp_path, compiled)
    ranker = make(tmp_path, compiled)
    again = make(tmp_path, "pass", **ranker.stored_options)
    assert again.architecture == ranker.architecture
    assert float(again.compiled.optimizer.learning_rate.numpy()) == 0.5
    # An earlier version stored the metrics too.
    stored = json.loads(ranker.architecture)
    stored["compile_config"]["metrics"] = ["no_such_metric"]
    make(tmp_path, "pass", **{**ranker.stored_options, "architecture": json.dumps(stored)})
    inner = (
        "x = keras.Input((4,)); inner = keras.Model(x, layers.Dense(2)(x));"
        "inner.compile('adam', own_metric);" + end_with("layers.Dense(1)(inner(hidden))")
    )
    assert check(tmp_path, inner)


def test_a_model_that_its_configuration_does_not_make_again_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="Keras makes another model from the model's configuration"):
        check(tmp_path, end_with("layers.Dense(1)(Forgetful(3.0)(hidden))"))


def test_a_model_with_code_in_its_configuration_is_refused_by_a_plan_and_where_it_is_loaded(tmp_path):
    line = end_with("layers.Lambda(lambda x: x, output_shape=(1,))(logit)")
    with pytest.raises(ConfigError, match=r"stored model cannot be made; .*`Lambda` layer"):
        check(tmp_path, line)
    ranker = make(tmp_path, line)
    with pytest.raises(ConfigError, match=r"stored model cannot be made; .*`Lambda` layer"):
        make(tmp_path, "pass", **ranker.stored_options)


def test_a_weight_decay_without_effect_is_refused_and_that_of_the_default_optimizer_is_not(tmp_path):
    decay = {"stages.train.optimizer.weight_decay": 0.3}
    with pytest.raises(
        ConfigError, match=r"stages.train.optimizer.weight_decay: 0.3 has no effect, .* with SGD"
    ):
        check(tmp_path, "model.compile(optimizers.SGD())", weight_decay=decay)
    check(tmp_path, "pass", weight_decay=decay)
