"""Keras rankers compute what the same models in torch do, with padding, repeated dropout and a state that can be stored.

The backend is JAX; `test_tensorflow.py` runs this file with TensorFlow (`NONET_KERAS_BACKEND`).
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
import torch
from torch.nn import functional
from torch_rankers import COMPUTE

from nonet.errors import ConfigError
from nonet.models import build_model
from nonet.models.keras import KerasRanker, builder
from nonet.models.keras.backends import load_keras
from nonet.models.keras.compiled import CompiledModel, choose_size

BACKEND = os.environ.get("NONET_KERAS_BACKEND", "jax")
EXAMPLE = Path(__file__).parents[3] / "examples" / "keras" / "rankers.py"
FEATURES = {"user": 5, "item": 5, "liked": 5, "year": 5}
HISTORY = 4


def make(reference: str | Path, sequences: tuple[str, ...] = (), seed: int = 7, **options) -> KerasRanker:
    """Build a ranker from `file.py:NAME`."""
    config = {"path": str(reference), "backend": BACKEND, "sequences": list(sequences), "length": HISTORY}
    return build_model({"use": "keras", **config, **options}, (), FEATURES, seed)


def make_example(name: str, **options) -> KerasRanker:
    return make(f"{EXAMPLE}:{name}", ("liked",) if name == "build_din" else (), **options)


def draw_inputs(name: str, count: int) -> dict[str, torch.Tensor]:
    """Draw inputs of an example; all but masks collect gradients."""
    generator = torch.Generator().manual_seed(count)
    rows = {key: torch.randn(count, width, generator=generator) for key, width in FEATURES.items()}
    inputs = {key: value.requires_grad_() for key, value in rows.items()}
    if name == "build_din":
        inputs["liked"] = torch.randn(count, HISTORY, FEATURES["liked"], generator=generator).requires_grad_()
        inputs["liked_mask"] = (torch.rand(count, HISTORY, generator=generator) > 0.3).float()
    return inputs


def draw_labels(count: int) -> torch.Tensor:
    return (torch.rand(count, generator=torch.Generator().manual_seed(count)) > 0.5).float()


def collect_gradients(ranker: KerasRanker, inputs: dict[str, torch.Tensor]) -> list[torch.Tensor]:
    """Return copies of the gradients of all inputs and weights, and set them to None."""
    tensors = [*(value for value in inputs.values() if value.requires_grad), *ranker.parameters()]
    gradients = [tensor.grad.clone() for tensor in tensors]
    for tensor in tensors:
        tensor.grad = None
    return gradients


def replace_dropout(folder: Path) -> Path:
    """Write the examples without dropout."""
    path = folder / "rankers.py"
    path.write_text(EXAMPLE.read_text().replace("dropout=0.3", "dropout=0.0"))
    return path


@pytest.mark.parametrize("name", COMPUTE)
def test_a_model_in_keras_has_the_logits_loss_and_gradients_of_the_same_model_in_torch(name, tmp_path):
    ranker = make(f"{replace_dropout(tmp_path)}:{name}", ("liked",) if name == "build_din" else ())
    inputs, label = draw_inputs(name, 45), draw_labels(45)
    logits = COMPUTE[name](ranker, inputs)
    torch.testing.assert_close(ranker(inputs), logits.detach(), rtol=1e-5, atol=1e-5)
    expected_loss = functional.binary_cross_entropy_with_logits(logits, label, reduction="sum")
    if name != "build_deepfm":  # whose torch module has copies of the weights
        expected_loss.backward()
        expected = collect_gradients(ranker, inputs)
    else:
        expected = list(
            torch.autograd.grad(expected_loss, [inputs[feature] for feature in FEATURES], retain_graph=True)
        )
    loss = ranker.compute_loss(inputs, label)
    loss.backward()
    torch.testing.assert_close(loss, expected_loss, rtol=1e-5, atol=1e-5)
    for ours, theirs in zip(collect_gradients(ranker, inputs), expected, strict=False):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


def test_the_loss_of_two_tasks_is_the_weighted_sum_over_known_labels(tmp_path):
    ranker = make(f"{replace_dropout(tmp_path)}:build_two_tasks", tasks=["bought"])
    inputs, label = draw_inputs("build_two_tasks", 45), draw_labels(90).reshape(45, 2)
    weight = torch.stack([torch.ones(45), 0.5 * draw_labels(45)], 1)
    logits = ranker(inputs)
    assert logits.shape == (45, 2)
    expected = functional.binary_cross_entropy_with_logits(logits, label, weight, reduction="sum")
    loss = ranker.compute_loss(inputs, label, weight)
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-5)
    loss.backward()
    gradients = collect_gradients(ranker, inputs)
    unknown = torch.where(weight > 0, label, 1.0 - label)
    ranker.compute_loss(inputs, unknown, weight).backward()
    assert all(map(torch.equal, collect_gradients(ranker, inputs), gradients))
    with pytest.raises(
        ConfigError, match=r"a logit of the target and of each task, a tensor of \(None, 3\), got"
    ):
        make(f"{EXAMPLE}:build_two_tasks", tasks=["bought", "returned"])
    with pytest.raises(ConfigError, match="wanted one logit for each row"):
        make(f"{EXAMPLE}:build_two_tasks")


def test_padding_changes_neither_the_loss_nor_a_gradient(tmp_path):
    ranker = make(f"{replace_dropout(tmp_path)}:build_deepfm")
    inputs, label = draw_inputs("build_deepfm", 50), draw_labels(50)
    whole = ranker.compute_loss(inputs, label)
    whole.backward()
    gradients = collect_gradients(ranker, inputs)
    parts = [
        ranker.compute_loss({name: value[chosen] for name, value in inputs.items()}, label[chosen])
        for chosen in (slice(0, 33), slice(33, 50))
    ]
    sum(parts).backward()
    torch.testing.assert_close(sum(parts), whole)
    for ours, theirs in zip(collect_gradients(ranker, inputs), gradients, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


def test_a_function_is_compiled_once_per_size_of_a_batch(monkeypatch, tmp_path):
    traced = []
    plain = CompiledModel._make_keras_inputs

    def count(self, rows, masks):
        traced.append(rows[0].shape[0])
        return plain(self, rows, masks)

    monkeypatch.setattr(CompiledModel, "_make_keras_inputs", count)
    ranker = make(f"{replace_dropout(tmp_path)}:build_deepfm")
    for rows in (1, 31, 32, 33, 40, 48, 49, 64, 50, 5):
        ranker(draw_inputs("build_deepfm", rows))
    assert sorted(traced) == [32, 48, 64]
    other = make(f"{tmp_path / 'rankers.py'}:build_deepfm", **ranker.stored_options)
    traced.clear()
    for _ in range(2):  # the second version of the weights compiles nothing
        other = make(f"{tmp_path / 'rankers.py'}:build_deepfm", **ranker.stored_options)
        other(draw_inputs("build_deepfm", 40))
    assert traced == [48]


def test_sizes_are_powers_of_two_or_one_and_a_half_times_one():
    assert [choose_size(count) for count in (0, 1, 32, 33, 48, 49, 65, 97, 1024, 1025)] == [
        *(32, 32, 32, 48, 48, 64, 96, 128, 1024, 1536)
    ]


def test_a_checkpoint_needs_no_file_of_the_user(tmp_path):
    file = tmp_path / "gone.py"
    shutil.copy(EXAMPLE, file)
    ranker = make(f"{file}:build_dlrm")
    file.unlink()
    again = make(f"{file}:build_dlrm", **ranker.stored_options)
    inputs = draw_inputs("build_dlrm", 20)
    assert not torch.equal(again(inputs), ranker(inputs))  # it has no weights yet
    again.load_state_dict(ranker.state_dict())
    assert torch.equal(again(inputs), ranker(inputs))


OWN_LAYER = """
import keras


@keras.saving.register_keras_serializable()
class Scaled(keras.layers.Dense):
    def call(self, values):
        return FACTOR * super().call(values)


def build(features):
    user = keras.Input(features["user"], name="user")
    return keras.Model({"user": user}, Scaled(1)(user))
"""


def write_run(folder: Path, **factors: int) -> Path:
    """Write a run with a file own.py in each of these folders of its sources, whose layer multiplies by a factor."""
    for name, factor in factors.items():
        file = folder / "sources" / name.strip("_") / "own.py"
        file.parent.mkdir(parents=True)
        file.write_text(OWN_LAYER.replace("FACTOR", str(factor)))
    (folder / "sources.json").write_text("[]")
    return folder / "sources"


def make_again(ranker: KerasRanker, sources: Path, **options) -> KerasRanker:
    """Make a ranker again as a checkpoint of it does."""
    again = make("", **{**ranker.stored_options, "sources": str(sources), **options})
    again.load_state_dict(ranker.state_dict())
    return again


@pytest.mark.parametrize("line", ["import factors", "from factors import Scaled"])
def test_runs_with_equal_configurations_and_other_code_have_their_own_layers(line, tmp_path):
    """The layer is in a file beside the one that the scenario names, so that its configuration has no trace of the run."""
    rankers, inputs = [], draw_inputs("build_deepfm", 8)
    folders = [write_run(tmp_path / name, _=factor) for name, factor in (("a", 2), ("b", 3))]
    for sources in folders:
        (sources / "own.py").rename(sources / "factors.py")
        (sources / "own.py").write_text(
            f"{line}\n\n\ndef build(features):\n    import factors\n    return factors.build(features)"
        )
        rankers.append(make(f"{sources / 'own.py'}:build"))
    assert rankers[0].architecture == rankers[1].architecture
    for clear in (False, True):
        for ranker, sources in zip(rankers, folders, strict=True):
            if clear:  # The layers of the other run are registered, and no functions are kept.
                builder._compile_architecture.cache_clear()
            assert torch.equal(make_again(ranker, sources)(inputs), ranker(inputs))


def test_a_checkpoint_names_the_one_file_that_has_its_layers(tmp_path):
    sources = write_run(tmp_path / "run", _=2, a=3, z=4)
    inputs = draw_inputs("build_deepfm", 8)
    for folder in ("", "a/", "z/"):
        ranker = make(f"{sources}/{folder}own.py:build")
        assert ranker.stored_options["path"] == f"sources/{folder}own.py:build"
        again = make_again(ranker, sources)
        assert torch.equal(again(inputs), ranker(inputs))
        assert again.stored_options == ranker.stored_options
        with pytest.raises(
            ConfigError, match=r"which of 3 files .*: a/own.py, own.py, z/own.py. Remove all but"
        ):
            make_again(ranker, sources, path="own.py:build")  # as earlier versions named it
    with pytest.raises(ConfigError, match="leads out of"):
        make_again(ranker, sources, path="sources/../../own.py:build")


def test_layers_of_the_user_are_made_from_the_copy_of_the_file_in_the_run(tmp_path):
    (tmp_path / "sources").mkdir()
    file = tmp_path / "sources" / "own.py"
    file.write_text(
        "import keras\n\n\n@keras.saving.register_keras_serializable()\nclass Twice(keras.layers.Dense):\n"
        "    def call(self, values):\n        return 2 * super().call(values)\n\n\ndef build(features):\n"
        "    user = keras.Input(features['user'], name='user')\n    return keras.Model({'user': user}, Twice(1)(user))\n"
    )
    ranker = make(f"{file}:build")
    assert ranker.stored_options["path"] == "own.py:build"
    again = make("own.py:build", **{**ranker.stored_options, "sources": str(tmp_path / "sources")})
    again.load_state_dict(ranker.state_dict())
    inputs = draw_inputs("build_deepfm", 8)
    assert torch.equal(again(inputs), ranker(inputs))
    with pytest.raises(ConfigError, match="layers of your own are in a file"):
        make(
            "own.py:build",
            **{**ranker.stored_options, "architecture": ranker.architecture.replace("Twice", "Thrice")},
        )


def test_dropout_is_a_function_of_the_seed_of_the_step():
    ranker, inputs, label = make_example("build_deepfm"), draw_inputs("build_deepfm", 40), draw_labels(40)

    def compute(seed: int) -> float:
        torch.manual_seed(seed)
        return ranker.compute_loss(inputs, label).item()

    assert compute(1) == compute(1) != compute(2)
    assert torch.equal(ranker(inputs), ranker(inputs))


def take_steps(ranker: KerasRanker, optimizer: torch.optim.Optimizer, steps: range) -> None:
    for step in steps:
        torch.manual_seed(step)
        loss = ranker.compute_loss(draw_inputs("build_deepfm", 40), draw_labels(40)) / 40
        optimizer.zero_grad()
        loss.backward()
        optimizer.param_groups[0]["lr"] = 0.01
        optimizer.step()


def test_weights_and_optimizer_continue_from_their_state_with_the_same_bits():
    ranker = make_example("build_deepfm")
    optimizer = ranker.make_optimizer(0.1)
    take_steps(ranker, optimizer, range(3))
    again = make_example("build_deepfm", seed=8)
    optimizer_again = again.make_optimizer(0.1)
    again.load_state_dict(ranker.state_dict())
    optimizer_again.load_state_dict(optimizer.state_dict())
    before = [weight.clone() for weight in ranker.parameters()]
    for one, its_optimizer in ((ranker, optimizer), (again, optimizer_again)):
        take_steps(one, its_optimizer, range(3, 6))
    for ours, theirs, old in zip(ranker.parameters(), again.parameters(), before, strict=True):
        assert torch.equal(ours, theirs)
        assert not torch.equal(ours, old)


def test_the_optimizer_is_the_one_that_the_model_was_compiled_with(tmp_path):
    path = tmp_path / "sgd.py"
    path.write_text(EXAMPLE.read_text().replace("AdamW(weight_decay=0.1)", "SGD()"))
    ranker = make(f"{path}:build_deepfm")
    optimizer = ranker.make_optimizer(0.1)
    before = [weight.clone() for weight in ranker.parameters()]
    ranker.compute_loss(draw_inputs("build_deepfm", 40), draw_labels(40)).backward()
    optimizer.param_groups[0]["lr"] = 0.25
    optimizer.step()
    for weight, old in zip(ranker.parameters(), before, strict=True):
        torch.testing.assert_close(weight.detach(), old - 0.25 * weight.grad)
    with pytest.raises(ConfigError, match="was written with another optimizer"):
        optimizer.load_state_dict(make_example("build_deepfm").make_optimizer(0.1).state_dict())


WRONG = {
    "raise ValueError('no such layer')": "rankers.py:build: ValueError: no such layer",
    "return 5": "wanted a keras.Model, got int",
    "return keras.Model(list(inputs.values()), logit)": "not a dictionary by feature",
    "return keras.Model(inputs, layers.Dense(2)(rows))": r"one logit for each row, .* got \(None, 2\)",
    "return keras.Model(inputs, layers.Dense(1, activation='sigmoid')(rows))": "always between 0 and 1 .*Return logits",
    "return keras.Model(inputs, layers.Dense(1)(layers.BatchNormalization()(rows)))": "LayerNormalization",
    "return keras.Model(inputs | {'age': (age := keras.Input((1,), name='age'))}, logit + age)": "'age', which is no feature",
    "return keras.Model({'user': (two := keras.Input((2,), name='user'))}, layers.Dense(1)(two))": r"the shape \(2,\)",
}


@pytest.mark.parametrize("line", WRONG)
def test_a_model_that_cannot_be_trained_is_refused_in_one_line(line, tmp_path):
    path = tmp_path / "rankers.py"
    path.write_text(
        "import keras\nfrom keras import layers\n\n\ndef build(features):\n"
        "    inputs = {name: keras.Input(shape, name=name) for name, shape in features.items()}\n"
        "    rows = layers.Concatenate()(list(inputs.values()))\n"
        f"    logit = layers.Dense(1)(rows)\n    {line}\n"
    )
    with pytest.raises(ConfigError, match=WRONG[line]) as refused:
        make(f"{path}:build")
    assert "\n" not in str(refused.value)


def test_a_schedule_of_learning_rates_is_refused(tmp_path):
    path = tmp_path / "rankers.py"
    schedule = "AdamW(keras.optimizers.schedules.CosineDecay(0.1, 10))"
    path.write_text(EXAMPLE.read_text().replace("AdamW(weight_decay=0.1)", schedule))
    with pytest.raises(ConfigError, match="stages have a schedule"):
        make(f"{path}:build_deepfm").make_optimizer(0.1)


@pytest.mark.parametrize("version", ["3.13.1", "3.9.0", "3.13.2", "4.0.0rc1"])
def test_a_keras_that_runs_code_in_configurations_is_refused(monkeypatch, version):
    keras, _ = load_keras(BACKEND, 1)
    monkeypatch.setattr(keras, "__version__", version)
    if version in ("3.13.2", "4.0.0rc1"):
        load_keras(BACKEND, 1)
        return
    with pytest.raises(ConfigError, match=rf"Keras {version} is installed, .*; install 3\.13\.2 or later"):
        load_keras(BACKEND, 1)


def test_a_process_has_one_backend():
    make_example("build_deepfm")
    other = {"jax": "tensorflow", "tensorflow": "jax"}[BACKEND]
    with pytest.raises(ConfigError, match=rf"has imported Keras with {BACKEND}|{other} is not installed"):
        load_keras(other, 1)
