"""Training a ranker leaves the weights that `fit` of Keras leaves on equal batches, and a checkpoint goes on from them.

The backend is JAX; `test_tensorflow.py` runs this file with TensorFlow (`NONET_KERAS_BACKEND`).
"""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
import torch

from nonet.errors import ConfigError
from nonet.models import build_model
from nonet.models.keras import KerasRanker
from nonet.models.keras.backends import load_keras
from nonet.models.keras.builder import describe_inputs
from nonet.models.keras.compiled import CompiledModel, LayerLoss
from nonet.models.keras.ranker import write_keras_file
from nonet.plugins import HERE, load_reference
from nonet.workers.engines import make_engine
from nonet.workers.runtime import Membership

BACKEND = os.environ.get("NONET_KERAS_BACKEND", "jax")
MODELS = Path(__file__).parents[1] / "keras_models.py"
FEATURES = {"user": 5, "item": 5, "liked": 5, "year": 5}
ROWS, STEPS, RATE = 40, 5, 0.05
OPTIMIZERS = (
    *("Adadelta", "Adafactor", "Adagrad", "Adam", "AdamW", "Adamax", "Ftrl", "Lamb", "Lion", "Nadam"),
    *("RMSprop", "SGD", "Muon"),
)


def make(name: str, **options) -> KerasRanker:
    config = {"path": f"{MODELS}:{name}", "backend": BACKEND, "sequences": [], "length": 1}
    return build_model({"use": "keras", **config, **options}, (), FEATURES, 7)


def draw(step: int, count: int = ROWS) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """Draw the rows and labels of a step."""
    generator = torch.Generator().manual_seed(step)
    rows = {name: torch.randn(count, width, generator=generator) for name, width in FEATURES.items()}
    return rows, (torch.rand(count, generator=generator) > 0.5).float()


def compute_step(ranker: KerasRanker, step: int, *, parts: tuple[slice, ...] = (slice(None),)) -> float:
    """Add the gradients of a step, in parts as ranks compute them, and return its loss."""
    rows, label = draw(step)
    losses = [
        ranker.compute_loss({name: value[part] for name, value in rows.items()}, label[part], None, ROWS)
        for part in parts
    ]
    loss = sum(losses) / ROWS
    loss.backward()
    return loss.item()


def train(ranker: KerasRanker, optimizer: torch.optim.Optimizer, steps: range, **options) -> list[float]:
    losses = []
    for step in steps:
        torch.manual_seed(step)
        optimizer.zero_grad()
        losses.append(compute_step(ranker, step, **options))
        optimizer.param_groups[0]["lr"] = RATE
        optimizer.step()
    return losses


def get_values(ranker: KerasRanker) -> dict[str, np.ndarray]:
    """Return copies of the weights as a checkpoint has them."""
    return {path: value.numpy().copy() for path, value in ranker.state_dict().items()}


def fit_plain(name: str, ranker: KerasRanker, steps: int, from_logits: bool = True):
    """Train the same model with `fit` from the weights of a ranker, and return it with the losses of its steps."""
    keras, _ = load_keras(BACKEND, 1)
    keras.backend.clear_session(free_memory=False)
    model = load_reference(f"{MODELS}:{name}", HERE, "test")(describe_inputs(FEATURES, [], 1))
    for variable in (*model.trainable_variables, *model.non_trainable_variables):
        if variable.path in (values := get_values(ranker)):
            variable.assign(values[variable.path])
    optimizer = model.optimizer
    optimizer.learning_rate = RATE
    model.compile(optimizer, keras.losses.BinaryCrossentropy(from_logits=from_logits))
    model._clear_losses()  # With JAX, Keras would drop a loss that has the address of one from the model's creation.
    batches = [draw(step) for step in range(steps)]
    rows = {key: np.concatenate([rows[key].numpy() for rows, _ in batches]) for key in FEATURES}
    label = np.concatenate([label.numpy() for _, label in batches])
    losses: list[float] = []

    class Losses(keras.callbacks.Callback):
        """Keras shows the mean loss since the start of the epoch."""

        def on_train_batch_end(self, batch, logs=None):
            losses.append((batch + 1) * float(logs["loss"]) - sum(losses))

    model.fit(rows, label[:, None], ROWS, epochs=1, shuffle=False, verbose=0, callbacks=[Losses()])
    return model, losses


def check_equal_to_fit(name: str, ranker: KerasRanker, steps: int = STEPS, **options) -> None:
    """Check that training leaves the losses and the weights of `fit`."""
    model, expected_losses = fit_plain(name, ranker, steps, **options)
    before = get_values(ranker)
    losses = train(ranker, ranker.make_optimizer(0.1), range(steps))
    np.testing.assert_allclose(losses, expected_losses, rtol=1e-4)
    after = get_values(ranker)
    for variable in model.trainable_variables:
        # fp32, whose sums differ by their order
        np.testing.assert_allclose(after[variable.path], np.asarray(variable), rtol=1e-4, atol=1e-5)
        assert not np.array_equal(after[variable.path], before[variable.path])
    for variable in ranker.compiled.frozen:
        np.testing.assert_array_equal(after[variable.path], before[variable.path])


def test_penalties_exclusions_averages_constraints_and_frozen_layers_do_what_fit_does():
    ranker = make("build_penalties")
    assert {path for path, _ in ranker.named_buffers()} == {"frozen/kernel", "frozen/bias"}
    kinds = ranker.compiled.layer_losses
    assert (kinds.count(LayerLoss.CONSTANT), kinds.count(LayerLoss.SUM)) == (1, 2 + _is_activity_summed())
    check_equal_to_fit("build_penalties", ranker)


def _is_activity_summed() -> bool:
    """Return whether this version of Keras sums the losses of activity regularizers over rows; later ones average them."""
    keras, _ = load_keras(BACKEND, 1)
    layer = keras.layers.Dense(1, kernel_initializer="ones", activity_regularizer="l2")
    layer(np.ones((2, 1), np.float32))
    return float(layer.losses[0]) > 0.015


def test_accumulated_gradients_scaled_losses_and_overwriting_averages_do_what_fit_does():
    check_equal_to_fit("build_accumulated", make("build_accumulated"), steps=7)


@pytest.mark.parametrize("name", ["build_relu", "build_zeros"])
def test_rows_whose_logit_is_exactly_0_are_trained_as_fit_trains_them(name):
    ranker = make(name)
    assert (ranker(draw(0)[0]) == 0).any()
    check_equal_to_fit(name, ranker)


def test_probabilities_are_trained_as_fit_trains_them_and_are_what_the_model_predicts():
    ranker = make("build_probabilities", from_logits=False)
    check_equal_to_fit("build_probabilities", ranker, from_logits=False)
    rows, _ = draw(99)
    keras, _ = load_keras(BACKEND, 1)
    model = ranker.compiled._model
    for path, value in get_values(ranker).items():
        next(variable for variable in model.variables if variable.path == path).assign(value)
    expected = keras.ops.convert_to_numpy(model({name: value.numpy() for name, value in rows.items()}))
    np.testing.assert_allclose(torch.sigmoid(ranker(rows)).numpy(), expected[:, 0], rtol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_optimizer_of_keras_steps_as_fit_does_and_continues_from_its_state(name):
    ranker = make(f"build_{name}")
    check_equal_to_fit(f"build_{name}", ranker, steps=3)
    check_continues(f"build_{name}")


def test_dropout_is_that_of_keras_for_the_seeds_of_the_step():
    """48 rows, which are not padded: a mask of dropout depends on the number of rows."""
    ranker = make("build_dropout")
    rows, label = draw(3, 48)
    torch.manual_seed(5)
    loss = ranker.compute_loss(rows, label).item()
    compiled = ranker.compiled

    def call(weights, seeds, inputs):
        states = [
            compiled.keras.ops.cast(seed, variable.dtype)
            for seed, variable in zip(seeds, variables, strict=True)
        ]
        by_name = dict(zip(rows, inputs, strict=True))
        return compiled._model.stateless_call(weights, states, by_name, training=True)[0]

    variables = compiled._model.non_trainable_variables
    arguments = compiled.import_all(list(ranker.parameters()), compiled.make_seeds(5), list(rows.values()))
    output = compiled.backend.compile(call)(*arguments)
    logit = torch.from_numpy(compiled.keras.ops.convert_to_numpy(output).copy())[:, 0]
    expected = torch.nn.functional.binary_cross_entropy_with_logits(logit, label, reduction="sum")
    assert loss == pytest.approx(expected.item(), rel=1e-5)
    assert loss != pytest.approx(
        torch.nn.functional.binary_cross_entropy_with_logits(ranker(rows), label, reduction="sum").item()
    )


def test_losses_of_layers_are_those_of_the_real_rows_on_any_number_of_ranks():
    ranker = make("build_penalties")
    gradients, losses = [], []
    for parts in (
        (slice(None),),
        (slice(0, 33), slice(33, ROWS)),
        tuple(slice(i, i + 10) for i in range(0, ROWS, 10)),
    ):
        losses.append(compute_step(ranker, 1, parts=parts))
        gradients.append([weight.grad.clone() for weight in ranker.parameters()])
        for weight in ranker.parameters():
            weight.grad = None
    np.testing.assert_allclose(losses, losses[0], rtol=1e-5)
    for other in gradients[1:]:
        for ours, theirs in zip(other, gradients[0], strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


def test_a_layer_that_is_called_twice_adds_both_of_its_losses():
    ranker = make("build_shared")
    assert ranker.compiled.layer_losses == [LayerLoss.MEAN] * 2
    rows, label = draw(1)
    with_losses = ranker.compute_loss(rows, label).item()
    ranker.compiled.layer_losses = []
    plain = torch.nn.functional.binary_cross_entropy_with_logits(ranker(rows), label, reduction="sum").item()
    squares = sum(
        float((value @ ranker.get_parameter("twice/kernel").detach()).square().mean())
        for value in (rows["user"], rows["item"])
    )
    assert with_losses == pytest.approx(plain + ROWS * squares, rel=1e-5)


def test_a_batch_is_padded_unless_a_loss_of_a_layer_depends_on_its_rows(monkeypatch):
    traced = []
    plain = CompiledModel._make_keras_inputs

    def count(self, rows, masks):
        traced.append(rows[0].shape[0])
        return plain(self, rows, masks)

    monkeypatch.setattr(CompiledModel, "_make_keras_inputs", count)
    for name in ("build_dropout", "build_mean"):
        ranker = make(name)
        traced.clear()
        compute_step(ranker, 1)
        ranker(draw(1)[0])
        assert traced == [48 if name == "build_dropout" else 40, 48]
    assert ranker.compiled.layer_losses == [LayerLoss.MEAN]


def test_a_loss_that_is_0_for_ordinary_rows_is_no_constant():
    """On JAX and TensorFlow, the loss of the weights and that of the rows are told apart."""
    ranker = make("build_large")
    assert sorted(ranker.compiled.layer_losses) == [LayerLoss.CONSTANT, LayerLoss.MEAN]


def test_a_rank_without_rows_adds_nothing():
    ranker = make("build_mean")
    rows = {name: value[:0].requires_grad_() for name, value in draw(1)[0].items()}
    loss = ranker.compute_loss(rows, torch.zeros(0), None, ROWS)
    loss.backward()
    assert loss.item() == 0
    assert all((weight.grad == 0).all() for weight in ranker.parameters())
    assert all(value.grad.shape == value.shape for value in rows.values())


def test_a_feature_whose_name_ends_as_that_of_a_mask_is_trained():
    config = {"path": f"{MODELS}:build_plain", "backend": BACKEND, "sequences": [], "length": 1}
    ranker = build_model({"use": "keras", **config}, (), {"user": 5, "ad_mask": 5}, 7)
    assert ranker.compiled.features == ["user", "ad_mask"]
    rows = {name: torch.randn(8, 5).requires_grad_() for name in ("user", "ad_mask")}
    ranker.compute_loss(rows, torch.ones(8)).backward()
    assert all((value.grad != 0).any() for value in rows.values())


def check_continues(name: str) -> None:
    """Check that a ranker and its optimizer continue from their state with the same bits."""
    ranker, again = make(name), make(name)
    optimizer, optimizer_again = ranker.make_optimizer(0.1), again.make_optimizer(0.1)
    train(ranker, optimizer, range(3))
    again.load_state_dict(ranker.state_dict())
    optimizer_again.load_state_dict(optimizer.state_dict())
    for one, its_optimizer in ((ranker, optimizer), (again, optimizer_again)):
        train(one, its_optimizer, range(3, 6))
    for path, value in get_values(ranker).items():
        np.testing.assert_array_equal(get_values(again)[path], value)


@pytest.mark.parametrize("name", ["build_accumulated", "build_Nadam", "build_Adafactor"])
def test_a_checkpoint_goes_on_with_the_same_bits(name):
    check_continues(name)


def make_ddp(ranker: KerasRanker):
    return make_engine({"use": "ddp"}, ranker, Membership(0, 1))


def step_engine(engine, steps: range) -> None:
    for step in steps:
        compute_step(engine.model, step)
        engine.step(RATE)


def test_a_checkpoint_has_averages_as_fit_ends_with_and_training_goes_on_from_the_weights(tmp_path):
    ranker = make("build_average")
    first = get_values(ranker)
    model, _ = fit_plain("build_average", ranker, 3)
    engine = make_ddp(ranker)
    assert all(map(np.array_equal, get_values(ranker).values(), first.values())), "before the first step"
    step_engine(engine, range(3))
    for path in engine.snapshot()(tmp_path / "dense"):
        assert path.exists()
    other = make_ddp(make("build_average"))
    other.load(tmp_path / "dense", optimizer=False)
    for variable in model.trainable_variables:
        average = other.model.get_parameter(variable.path).detach().numpy()
        np.testing.assert_allclose(average, np.asarray(variable), rtol=1e-4, atol=1e-6)
        assert not np.allclose(average, ranker.get_parameter(variable.path).detach().numpy())
    resumed = make_ddp(make("build_average"))
    resumed.load(tmp_path / "dense", optimizer=True)
    for path, weight in ranker.named_parameters():
        assert torch.equal(resumed.model.get_parameter(path), weight)
    for each in (engine, resumed):
        step_engine(each, range(3, 5))
    for path, value in get_values(ranker).items():
        np.testing.assert_array_equal(get_values(resumed.model)[path], value)


def test_the_next_stage_begins_with_the_averages_whether_or_not_a_checkpoint_is_loaded_between(tmp_path):
    engine = make_ddp(make("build_average"))
    step_engine(engine, range(3))
    engine.snapshot()(tmp_path / "dense")
    ended = get_values(engine.model)
    engine.restart()
    loaded = make_ddp(make("build_average"))
    step_engine(loaded, range(5, 7))  # later steps, which the selected checkpoint is without
    loaded.load(tmp_path / "dense", optimizer=False)
    loaded.restart()
    for each in (engine, loaded):
        for path, weight in each.model.named_parameters():
            np.testing.assert_array_equal(weight.detach().numpy(), ended[path])


def test_an_export_has_averages_and_frozen_weights(tmp_path):
    keras, _ = load_keras(BACKEND, 1)
    for name in ("build_average", "build_penalties", "build_probabilities"):
        options = {"from_logits": name != "build_probabilities"}
        ranker = make(name, **options)
        train(ranker, ranker.make_optimizer(0.1), range(3))
        loaded = make("build_other", **ranker.stored_options, **options)
        loaded.load_state_dict(ranker.state_dict())
        write_keras_file(loaded, {}, 0, tmp_path)
        exported = keras.saving.load_model(tmp_path / "model.keras", compile=False)
        rows, _ = draw(9)
        expected = exported.predict({key: value.numpy() for key, value in rows.items()}, verbose=0)[:, 0]
        output = loaded(rows) if options["from_logits"] else torch.sigmoid(loaded(rows))
        np.testing.assert_allclose(output.numpy(), expected, rtol=1e-5, atol=1e-6)
        values = get_values(ranker)
        for variable in exported.variables:
            np.testing.assert_allclose(np.asarray(variable), values[variable.path], rtol=1e-6)


def test_a_checkpoint_of_a_version_that_left_out_penalties_is_refused_with_what_it_left_out():
    ranker = make("build_penalties")
    optimizer = ranker.make_optimizer(0.1)
    old = optimizer.state_dict()
    del old["param_groups"][0]["rules"]
    with pytest.raises(
        ConfigError, match="left out losses of layers and exclude_from_weight_decay and use_ema of"
    ):
        optimizer.load_state_dict(old)
    plain = make("build_plain").make_optimizer(0.1)
    old = plain.state_dict()
    del old["param_groups"][0]["rules"]
    plain.load_state_dict(old)
