"""Weights of a folder: those of its config, or refused by name; the same bits in every process; the base of a checkpoint."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from backbones import CODES, FEATURES, QWEN3
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from nonet.errors import CheckpointError, ConfigError
from nonet.models.spec import MODELS, build_model
from nonet.workers.weight_files import load_weights, write_base, write_tensors


@pytest.fixture
def folder(tmp_path):
    """Make a folder that save_pretrained wrote."""
    config = AutoConfig.for_model(**QWEN3, vocab_size=40, tie_word_embeddings=False)
    torch.manual_seed(1)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "base")
    return tmp_path / "base"


def change(folder, edit):
    path = folder / "model.safetensors"
    tensors = load_file(path)
    edit(tensors)
    save_file(tensors, path, metadata={"format": "pt"})


def built(folder, **options):
    return build_model({"use": "hf", "path": str(folder), **options}, CODES, FEATURES, 3)


LAYER = "model.layers.0.mlp.up_proj.weight"


@pytest.mark.parametrize(
    ("edit", "told"),
    [
        (lambda tensors: tensors.pop(LAYER), rf"it lacks {LAYER}"),
        (lambda tensors: tensors.update({"extra.weight": torch.zeros(2)}), "does not, extra.weight"),
        (
            lambda tensors: tensors.update({LAYER: torch.zeros(3, 5)}),
            rf"another shape than the config of {LAYER}",
        ),
    ],
)
def test_weights_that_are_not_those_of_the_config_are_refused_by_name(folder, edit, told):
    change(folder, edit)
    with pytest.raises(ConfigError, match=told):
        built(folder)


def test_an_output_layer_may_be_missing_and_adapters_are_made_by_the_scenario(folder):
    change(folder, lambda tensors: tensors.pop("lm_head.weight"))
    built(folder, lora={"rank": 2, "alpha": 4, "targets": None})


def test_two_processes_that_load_one_folder_have_the_same_bits(folder):
    change(folder, lambda tensors: tensors.pop("lm_head.weight"))
    script = (
        "import sys, hashlib; from nonet.models.spec import build_model\n"
        "model = build_model({'use': 'hf', 'path': sys.argv[1]}, (5, 7), {'item': 8}, 3)\n"
        "whole = hashlib.sha256()\n"
        "for name, value in sorted(model.state_dict().items()):\n"
        "    whole.update(name.encode() + value.numpy().tobytes())\n"
        "for value in model.parameters():\n"
        "    whole.update(value.detach().numpy().tobytes())\n"
        "print(whole.hexdigest())\n"
    )
    found = {
        subprocess.run(
            [sys.executable, "-c", script, str(folder)], capture_output=True, text=True, check=True
        ).stdout
        for _ in range(2)
    }
    assert len(found) == 1


def test_a_checkpoint_of_another_base_is_refused_and_one_that_names_none_is_read(folder, tmp_path):
    model = built(folder)
    commit = tmp_path / "commit"
    write_tensors(commit / "dense" / "model.safetensors", model.state_dict())
    load_weights(model, commit / "dense" / "model.safetensors")
    write_base(model.base_sha256, commit)
    load_weights(model, commit / "dense" / "model.safetensors")
    change(folder, lambda tensors: tensors[LAYER].add_(1.0))
    with pytest.raises(CheckpointError, match=r"SHA-256 .*put the base folder back"):
        load_weights(built(folder), commit / "dense" / "model.safetensors")


def test_the_spec_names_the_base_without_building_it_and_refuses_a_folder_that_is_gone(folder, tmp_path):
    spec = MODELS.get("hf")
    assert spec.hash_base({"path": str(folder)}) == built(folder).base_sha256
    assert spec.hash_base({"config": {}}) is None
    with pytest.raises(ConfigError, match="put back the folder"):
        spec.hash_base({"path": str(tmp_path / "gone")})
