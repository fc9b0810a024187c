"""What is refused before a process starts, on the ring."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from tests_ring import make_ring

from nonet.controller.record import RunFolder
from nonet.controller.scenario.scenario import load_scenario
from nonet.controller.setup.preflight import check, check_free_space
from nonet.errors import ConfigError, DataError


@pytest.fixture(scope="module")
def ring(tmp_path_factory):
    return make_ring(tmp_path_factory.mktemp("ring"))


def checked(ring, *changes):
    scenario, folder = load_scenario(ring / "ring.yaml", list(changes))
    check(scenario, folder)


def test_the_ring_is_fine(ring):
    checked(ring)


def test_a_disk_without_room_for_a_checkpoint_is_refused_before_the_run(ring, tmp_path, monkeypatch):
    scenario, _ = load_scenario(ring / "ring.yaml", [])
    run = RunFolder(tmp_path / "runs" / "new")
    check_free_space(scenario, run)
    monkeypatch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(free=1000))
    with pytest.raises(
        ConfigError, match=r"runs/new has 1 KB free, and a checkpoint of the model takes at least"
    ):
        check_free_space(scenario, run)


@pytest.mark.parametrize(
    ("change", "error", "said"),
    [
        # the sixteenth hour is a test event of everybody: true of some events, and of none that is trained on
        ("stages.finetune.target='timestamp >= 54000'", DataError, "holds for none of the 720"),
        (
            "data.split={use: leave_last_out, test: 9, valid: 4, rl: 4}",
            DataError,
            "needs users with at least 18 events",
        ),
        ("data.split={use: leave_last_out, test: 1, valid: 1}", ConfigError, "needs events held out for RL"),
        ("evaluate.metrics=[auc]", ConfigError, "unknown metric 'auc'"),
        ("stages.rl.rewards.own.ceilling=3", ConfigError, "ceilling"),
        ("sparse.tables.shop={dim: 8}", ConfigError, "sid_decoder has no feature 'shop'"),
        ("tokenizer.vectors=[colour]", ConfigError, "colour"),
    ],
)
def test_what_cannot_run_is_refused_in_one_line(ring, change, error, said):
    with pytest.raises(error, match=said) as raised:
        checked(ring, change)
    assert "\n" not in str(raised.value)


def test_the_footers_of_the_items_tell_whether_a_baseline_fits_data_that_are_prepared_on_disk(
    ring, monkeypatch
):
    monkeypatch.setattr("nonet.workers.roles.artifacts.data_setup._BLOCK_ROWS", 3)
    on_disk = ("data.prepare=disk", "evaluate.baselines=[ease, attribute_counter]")
    checked(ring, *on_disk)
    monkeypatch.setattr("nonet.models.baselines.kinds.ease.MAX_ITEMS", 5)
    with pytest.raises(
        DataError, match=r"^evaluate\.baselines: ease: [1-9]\d* items, and it allows at most 5"
    ):
        checked(ring, *on_disk)
    with pytest.raises(DataError, match="ease"):
        checked(ring, on_disk[1])
    checked(
        ring, *on_disk, "data.keep={item_events: 2}"
    )  # which leaves fewer items, but how many is not known
