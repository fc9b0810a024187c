"""Checks of a Keras model that need no computation: inputs and outputs, precision, names, and what it is compiled with.

What Nonet does not do as `fit` of Keras does is refused by name, here or in `probes.py`.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from nonet.errors import ConfigError
from nonet.models.keras.compiled import is_seed

LEARNING_RATE = "learning_rate"
"""The last part of the path of the variable that has an optimizer's learning rate."""
_REPLACED_METHODS = ("train_step", "compute_loss", "make_train_function", "fit")
"""Methods of keras.Model that Nonet does not call, so that a model's own would have no effect."""


def check_structure(
    title: str, keras: Any, model: Any, shapes: Mapping[str, tuple[int, ...]], n_outputs: int
) -> Any:
    """Return the model if it has inputs of these shapes by name and so many outputs in fp32.

    Raises:
        ConfigError: It is not so.
    """
    if not isinstance(model, keras.Model):
        raise ConfigError(f"{title}: wanted a keras.Model, got {type(model).__name__}")
    _check_inputs(title, model, shapes)
    output = getattr(model, "output", None)
    allowed: list[tuple[int | None, ...]] = [(None, n_outputs)]
    wanted = f"a logit of the target and of each task, a tensor of (None, {n_outputs})"
    if n_outputs == 1:
        allowed.append((None,))
        wanted = "one logit for each row, a tensor of the shape (None,) or (None, 1)"
    if tuple(getattr(output, "shape", ())) not in allowed:
        raise ConfigError(f"{title}: wanted {wanted}, got {getattr(output, 'shape', type(output).__name__)}")
    _check_precision(title, model)
    _check_names(title, model)
    return model


def _check_inputs(title: str, model: Any, shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Raise ConfigError unless the inputs of a model are features by name, of their shapes."""
    inputs = getattr(model, "input", None)
    if not isinstance(inputs, dict):
        raise ConfigError(
            f"{title}: the inputs of the model are not a dictionary by feature; write keras.Model({{name: input, ...}}, logit)"
        )
    for name, tensor in inputs.items():
        if name not in shapes:
            raise ConfigError(
                f"{title}: the model has an input {name!r}, which is no feature; features: {', '.join(shapes)}"
            )
        if tuple(tensor.shape[1:]) != shapes[name]:
            raise ConfigError(
                f"{title}: the input {name!r} has the shape {tuple(tensor.shape[1:])}, its rows have {shapes[name]}"
            )


def _check_precision(title: str, model: Any) -> None:
    """Raise ConfigError if a layer computes in another precision than fp32."""
    for layer in model._flatten_layers():
        policy: Any = getattr(layer, "dtype_policy", None)
        dtype = getattr(policy, "compute_dtype", None) or "float32"
        if getattr(policy, "quantization_mode", None) is not None:
            raise ConfigError(
                f"{title}: the layer {layer.name!r} is quantized, and Keras models are trained in fp32"
            )
        if dtype != "float32" and dtype.startswith(("float", "bfloat")):
            raise ConfigError(
                f"{title}: the layer {layer.name!r} has the dtype policy {policy.name!r}, and Keras models are trained in fp32, "
                "without mixed precision; leave out dtype and keras.config.set_dtype_policy"
            )


def _check_names(title: str, model: Any) -> None:
    """Raise ConfigError unless each weight has a path of its own, under which checkpoints have it."""
    variables = (*model.trainable_variables, *model.non_trainable_variables)
    paths = Counter(variable.path for variable in variables if not is_seed(variable))
    for path, count in paths.items():
        if count > 1 or "." in path:
            what = (
                f"{count} weights have the path {path!r}" if count > 1 else f"the weight {path!r} has a dot"
            )
            raise ConfigError(
                f"{title}: {what}, under which checkpoints have weights; give its layer another name"
            )


def check_training(title: str, keras: Any, model: Any, tasks: Sequence[str], from_logits: bool) -> None:
    """Check that a model trains weights, in the way that Nonet trains models.

    Args:
        title: The text that messages begin with.
        keras: The module keras.
        model: The model.
        tasks: Names of the tasks besides the target.
        from_logits: Whether the loss is computed from logits.

    Raises:
        ConfigError: The model has methods or arguments of `compile` that Nonet does not honour.
    """
    if not model.trainable_variables:
        raise ConfigError(
            f"{title}: the model has no weights to train; unfreeze a layer, or add one such as layers.Dense(1)"
        )
    for name in _REPLACED_METHODS:
        if getattr(getattr(model, name), "__func__", None) is not getattr(keras.Model, name):
            raise ConfigError(
                f"{title}: {type(model).__name__}.{name} is not called: Nonet computes the loss and takes the steps itself. Use "
                "add_loss for further losses, and remove it"
            )
    for name, tensor in model.input.items():
        if tensor.dtype != "float32":
            raise ConfigError(
                f"{title}: the input {name!r} is {tensor.dtype}, and rows are float32, which would lose their fractions and "
                "gradients; leave out dtype"
            )
    _check_loss(title, keras, model, tasks, from_logits)
    if (optimizer := getattr(model, "optimizer", None)) is not None:
        _check_optimizer(title, keras, optimizer)


def _check_loss(title: str, keras: Any, model: Any, tasks: Sequence[str], from_logits: bool) -> None:
    """Raise ConfigError if a model was compiled with another loss than the log loss that Nonet computes."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Keras warns of functions in the other arguments.
        weights = (model.get_compile_config() or {}).get("loss_weights")
    loss = _get_loss(model)
    if loss is None and weights is None:
        return
    try:
        computed: Any = keras.losses.get(loss)
    except (TypeError, ValueError):  # Keras does not know it.
        computed = loss
    expected = {"from_logits": from_logits, "label_smoothing": 0.0, "reduction": "sum_over_batch_size"}
    compiled: dict[str, Any] = {}
    if isinstance(computed, keras.losses.BinaryCrossentropy):
        config = computed.get_config()
        compiled = {key: config.get(key) for key in expected}
    elif computed is keras.losses.binary_crossentropy:
        compiled = {**expected, "from_logits": False}
    if compiled != expected or tasks or weights is not None:
        given = getattr(loss, "name", None) or getattr(loss, "__name__", None) or loss
        different = [f"{key}={value}" for key, value in compiled.items() if value != expected[key]]
        given = (
            f"the loss {', '.join([str(given), *different])}"
            if loss is not None
            else f"loss_weights={weights}"
        )
        raise ConfigError(
            f"{title}: the model is compiled with {given}, and Nonet computes the log loss with "
            f"from_logits={from_logits}, and the weights of the stage's tasks; compile without loss and loss_weights"
        )


def _get_loss(model: Any) -> Any:
    """Return the loss that a model was compiled with; None for none."""
    loss = getattr(model, "loss", None)
    losses = list(loss.values() if isinstance(loss, dict) else loss) if isinstance(loss, list | dict) else []
    return losses[0] if len(losses) == 1 else loss


def _check_optimizer(title: str, keras: Any, optimizer: Any) -> None:
    """Raise ConfigError for an optimizer of mixed precision, or one whose learning rate is not one number."""
    if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        raise ConfigError(
            f"{title}: the model is compiled with LossScaleOptimizer, and Keras models are trained in fp32, without mixed "
            "precision; use the optimizer inside it"
        )
    several = getattr(keras.optimizers, "MultiOptimizer", ())
    rates = [
        variable for variable in optimizer.variables if variable.path.rpartition("/")[2] == LEARNING_RATE
    ]
    if isinstance(optimizer, several) or len(rates) != 1:
        raise ConfigError(
            f"{title}: the model is compiled with a schedule of learning rates, or with several; give a number: stages have a "
            "schedule"
        )
