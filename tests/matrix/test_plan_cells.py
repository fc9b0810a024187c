"""Every kind of run with every variant is planned as something that runs, or is refused by the plan in one line."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
from covering import ROWS
from stranger import MODEL_USES, VARIANTS, Shop
from test_finished_runs import NO_FOLDER, PLAIN

from nonet.controller.scenario import check_scenario, load_scenario
from nonet.controller.scenario.stage import STAGES
from nonet.errors import ConfigError
from nonet.models import MODELS
from nonet.models.tokenizer.kinds.base import TOKENIZERS
from nonet.samples.sources.base import SOURCES
from nonet.workers.engines.base import ENGINES

REFUSED: dict[tuple[str, str], str] = {
    ("decoder", "align"): "it has no words",
    ("hstu", "align"): "it has no words",
    ("click", "align"): "it has no words",
    ("click", "memory"): "model.memory: deepfm recommends no lists",
    ("click", "no tables"): "sparse.tables: deepfm needs one dim",
    ("click", "rl"): "stages.rl with rewards for deepfm, which makes no lists",
    ("click", "parquet"): "data.source: parquet with model.use: deepfm (the model reads events",
    ("hstu", "tensor"): "tensor: 2 and model.block: hstu (choose block: attention, or leave tensor out)",
    ("hf-lora", "tensor"): "tensor: 2 and model.lora (leave tensor or lora out)",
    ("click", "tensor"): "tensor: 2 and this model (its blocks cannot be divided; leave tensor out)",
    ("decoder", "graph"): "data.graph with model.use: sid_decoder (a click model reads neighbours",
    ("hstu", "graph"): "data.graph with model.use: sid_decoder",
    ("hf", "graph"): "data.graph with model.use: hf",
    ("hf-lora", "graph"): "data.graph with model.use: hf",
    (
        "decoder",
        "tasks",
    ): "stages.pretrain.tasks with model.use: sid_decoder (a click model predicts further labels",
    ("hstu", "tasks"): "stages.pretrain.tasks with model.use: sid_decoder",
    ("hf", "tasks"): "stages.pretrain.tasks with model.use: hf",
    ("hf-lora", "tasks"): "stages.pretrain.tasks with model.use: hf",
    ("click", "streams"): "data.source: parquet with model.use: deepfm (the model reads events",
    ("keras", "align"): "it has no words",
    ("keras", "memory"): "model.memory: a Keras model recommends no lists",
    ("keras", "no tables"): "sparse.tables: a Keras model needs at least one",
    ("keras", "rl"): "stages.rl with rewards for keras, which makes no lists",
    ("keras", "parquet"): "data.source: parquet with model.use: keras (the model reads events",
    ("keras", "streams"): "data.source: parquet with model.use: keras (the model reads events",
    ("keras", "tensor"): "tensor: 2 and this model (its blocks cannot be divided; leave tensor out)",
    **{
        ("keras", engine): f"roles.trainer.engine: a Keras model is trained by ddp, got {use}"
        for engine, use in (("fsdp2", "fsdp2"), ("replicate", "fsdp2"), ("deepspeed", "deepspeed"))
    },
}
"""What the line says, for the combinations of a kind and a variant that no run has."""
HOLES: dict[tuple[str, str], int] = {}
"""Refused combinations that are to run, with the item of the plan that makes them run."""


@pytest.fixture(scope="module")
def shops(tmp_path_factory):
    made = {}
    for text_ids in (True, False):
        made[text_ids] = Shop(tmp_path_factory.mktemp("shop"), text_ids)
        made[text_ids].earlier_run = tmp_path_factory.mktemp("earlier")
    return made


@pytest.mark.parametrize("variant", [variant for variant in VARIANTS if variant != "warm"])
@pytest.mark.parametrize("kind", MODEL_USES)
def test_a_variant_is_planned_or_refused_in_one_line(shops, kind, variant, command, capsys, monkeypatch):
    monkeypatch.setattr("nonet.models.keras.check.check_ranker", lambda *_: 0)  # seconds for every variant
    scenario = shops[variant != "integers"].write_scenario(kind, [variant])
    capsys.readouterr()  # what a backbone prints when it is written
    code, out, err = command("plan", scenario)
    if words := REFUSED.get((kind, variant)):
        line = next(line for line in (out + err).splitlines() if words in line)
        assert line.startswith(("nonet: ", "warning: "))
        assert code == (0 if (kind, variant) in HOLES else 2)
        assert err.count("\n") <= 1
    else:
        unchecked = "not checked from here: data.join.trend.use: redis://" if variant == "redis" else ""
        assert (code, err[: len(unchecked)], err.count("\n")) == (0, unchecked, int(bool(unchecked)))
        assert "does not run" not in out


def test_every_shipped_kind_is_in_the_matrix(shops):
    """A kind that is shipped without a row of the matrix fails here."""
    assert set(MODELS.list_shipped()) == set(MODEL_USES.values())
    scenarios = [
        load_scenario(shops[True].write_scenario(kind, variants))[0]
        for kind, variants in [*PLAIN, *ROWS, *NO_FOLDER]
    ]
    stages = {stage.use or stage.kind_name for scenario in scenarios for stage in scenario.stages.values()}
    assert set(STAGES.list_shipped()) == stages
    assert set(SOURCES.list_shipped()) == {scenario.data.source.use for scenario in scenarios}
    assert set(TOKENIZERS.list_shipped()) == {scenario.tokenizer.use for scenario in scenarios}
    engines = {role.engine.use for s in scenarios for role in s.roles.values() if role.engine}
    assert set(ENGINES.list_shipped()) == engines


@pytest.mark.slow
def test_every_pair_that_can_be_run_is_in_a_row(shops):
    """Each kind with each variant, and each two variants for some kind, are in a row of `ROWS` unless they are refused."""
    variants = [variant for variant in VARIANTS if (("decoder", (variant,)) not in NO_FOLDER)]
    covered = {(kind, variant) for kind, row in ROWS for variant in row}
    covered |= {pair for _, row in ROWS for pair in itertools.combinations(row, 2)}
    missing = [
        (kind, variant)
        for kind, variant in itertools.product(MODEL_USES, variants)
        if (kind, variant) not in covered and _can_run(shops[True], kind, [variant])
    ]
    missing += [
        pair
        for pair in itertools.combinations(variants, 2)
        if pair not in covered and any(_can_run(shops[True], kind, pair) for kind in MODEL_USES)
    ]
    assert missing == [("parquet", "streams")]  # both name the source


def _can_run(shop: Shop, kind: str, variants) -> bool:
    """Return whether a kind with variants is neither refused nor only planned."""
    scenario = load_scenario(Path(shop.write_scenario(kind, variants)))[0]
    try:
        check_scenario(scenario)
    except ConfigError:
        return False
    return True
