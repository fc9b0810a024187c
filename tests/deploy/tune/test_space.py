"""Spaces: what a file may say, and every corner of it against a scenario."""

from __future__ import annotations

from fractions import Fraction

import pytest
from likes_world import make_likes
from tests_ring import make_ring

from nonet.controller.scenario import load_scenario
from nonet.deploy.tune.space import MOST_CORNERS, SearchKey, SearchSpace, read_space
from nonet.deploy.tune.subject import TunedScenario
from nonet.errors import ConfigError
from nonet.workers.roles.artifacts import DataSetup


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_ring(tmp_path_factory.mktemp("ring"))


def _space(folder, text):
    path = folder / "space.yaml"
    path.write_text(text)
    return read_space(path)


def _subject(folder, *changes, metric=None):
    return TunedScenario.read(folder / "ring.yaml", list(changes), metric)


def test_a_file_says_choices_ranges_logarithms_and_whole_numbers(folder):
    space = _space(
        folder,
        "metric: recall@5\nstages.pretrain.lr: {log: [1e-3, 1e-2]}\nmodel.dropout: [0.1, 0.3]\n"
        "model.width: {int: [32, 128], step: 32}\nx.y: {range: [0, 1]}\n",
    )
    assert space.metric == "recall@5"
    assert space.keys == (
        SearchKey("stages.pretrain.lr", "log", (), 1e-3, 1e-2),
        SearchKey("model.dropout", "choice", (0.1, 0.3)),
        SearchKey("model.width", "int", (), 32, 128, 32),
        SearchKey("x.y", "range", (), 0.0, 1.0),
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("metric: ndcg@5", "must be keys of the scenario with their values"),
        ("metric: 3\nmodel.width: [1, 2]", "metric: must be the name of a metric such as ndcg@10, got 3"),
        ("model.dropout: 0.1", "model.dropout: a single value cannot be searched, got 0.1; must be"),
        ("model.dropout: [0.1]", r"must have at least two choices, got \[0.1\]"),
        ("model.dropout: [0.1, 0.2, 0.1]", "the choice 0.1 occurs twice"),
        ("model.width: {int: [64, 32]}", "the lower end 64 is not below the upper end 32"),
        ("model.width: {int: [32, 64.5]}", r"must be \[low, high\] of whole numbers, got \[32, 64.5\]"),
        ("model.width: {int: [32, 128], step: 40}", "steps of 40 lead from 32 to 112, not to 128"),
        (
            "model.width: {int: [32, 64], step: 0}",
            "step: must be a whole number above 0 and at most 32, got 0",
        ),
        ("a.lr: {log: [0, 1]}", "the lower end must be above 0 to have a logarithm, got 0; or use range"),
        ("a.lr: {log: [1, 2], step: 1}", "a logarithmic range has no steps"),
        ("a.lr: {range: [0, 1], log: true}", "must be .* got a map of range, log"),
        ("a.lr: {lgo: [1, 2]}", "got a map of lgo. Did you mean 'log'"),
        ("model: {width: [1, 2]}", r"written with dots: model\.width\."),
        ("a.lr: {range: [0, 1], to: 3}", "unknown key 'to' beside range"),
        ("seed: [1, 2]", "seed: scores of trials with different seed cannot be compared"),
        ("data.split.valid: [1, 2]", "scores of trials with different data.split cannot be compared"),
        (
            "data.labels.within: [1d, 7d]",
            "scores of trials with different data.labels cannot be compared; set it for all trials with --set",
        ),
        ("data.where: ['rating > 1', 'rating > 2']", "scores of trials with different data.where cannot be"),
        ("a.lr: {range: [0, .inf]}", r"must be \[low, high\] of numbers"),
    ],
)
def test_what_is_wrong_with_a_space_is_one_line(folder, text, message):
    with pytest.raises(ConfigError, match=message) as caught:
        _space(folder, text)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("model.widht: [16, 32]", r"with model\.widht=16: .*model.*widht"),
        ("model.width: [16, 17]", r"with model\.width=17: "),
        (
            "stages.pretrian.lr: [1e-3, 1e-2]",
            "stages has no 'pretrian'; it has pretrain, finetune, rl. Did you mean 'pretrain'",
        ),
        ("sparse.tables.itm.dim: [8, 16]", "sparse.tables has no 'itm'"),
        ("stages.rl.lr: [1e-5, 1e-4]", "is the validation of stages.finetune, and rl comes after it"),
        ("model.dropout: {range: [0.0, 1.5]}", r"with model\.dropout=1\.5: .*dropout"),
        ("stages.pretrain.lr.peak.x: [1, 2]", "lr holds 0.003, which has no keys"),
    ],
)
def test_every_corner_is_loaded_before_anything_starts(folder, text, message):
    with pytest.raises(ConfigError, match=message):
        _subject(folder).check(_space(folder, text))


def test_the_data_are_checked_with_every_listed_value_and_read_once(folder, monkeypatch):
    reads = []
    build = DataSetup.build_with_facts
    monkeypatch.setattr(DataSetup, "build_with_facts", lambda data: reads.append(data) or build(data))
    _subject(folder).check(_space(folder, "model.width: [16, 32]\nstages.pretrain.lr: {log: [1e-3, 1e-2]}"))
    assert len(reads) == 1
    space = _space(folder, "stages.finetune.target: ['rating >= 4', 'rating >= 9']")
    with pytest.raises(ConfigError, match=r"with stages\.finetune\.target=rating >= 9: .*holds for none"):
        _subject(folder).check(space)


def test_trials_of_a_click_model_that_predict_other_labels_are_refused(folder, tmp_path):
    targets = "['rating >= 4', 'rating >= 3']"
    _subject(folder).check(
        _space(folder, f"stages.finetune.target: {targets}")
    )  # what a ranking model trains on
    clicks = TunedScenario.read(make_likes(tmp_path) / "likes.yaml")
    clicks.check(_space(folder, "stages.train.lr: {log: [1e-3, 1e-2]}"))
    with pytest.raises(
        ConfigError, match=r"stages\.train\.target: .* predict different labels cannot be compared"
    ):
        clicks.check(_space(folder, f"stages.train.target: {targets}"))


def test_a_space_that_fits_is_accepted(folder):
    space = _space(folder, "stages.pretrain.lr: {log: [1e-3, 1e-2]}\nmodel.width: {int: [16, 32], step: 16}")
    assert isinstance(_subject(folder).check(space), list)


def test_corners_are_all_combinations_and_pairs_where_those_are_too_many():
    few = SearchSpace(
        (SearchKey("a", "choice", (1, 2, 3)), SearchKey("b", "range", (), 0.0, 1.0)), None, "space.yaml"
    )
    assert len(list(few.iterate_corners())) == 6
    many = SearchSpace(tuple(SearchKey(f"k{at}", "int", (), 0, 1, 1) for at in range(10)), None, "space.yaml")
    corners = list(many.iterate_corners())
    assert len(corners) == 45 * 4 < 2**10
    assert MOST_CORNERS < 2**10
    assert {(each["k3"], each["k7"]) for each in corners} == {(0, 0), (0, 1), (1, 0), (1, 1)}


def test_a_metric_that_is_not_measured_is_one_line(folder):
    with pytest.raises(ConfigError, match=r"metric: checkpoint\.keep\.best: 'ndgc@10' is not measured"):
        _subject(folder, metric="ndgc@10")


def test_a_scenario_without_validation_cannot_be_searched(folder):
    with pytest.raises(
        ConfigError, match="a search needs validation, and no stage of this scenario is validated"
    ):
        _subject(folder, "data.split.valid=0")


def test_a_trial_ends_with_the_stage_that_is_judged_and_trains_its_share(folder):
    subject = _subject(folder, "evaluate.every=9", "evaluate.baselines=[sasrec]")
    assert subject.judged == "finetune"
    quarter = subject.build_trial({"model.width": 32}, Fraction(1, 4)).scenario
    assert list(quarter.stages) == ["pretrain", "finetune"]
    assert [getattr(body, "epochs", None) for body in quarter.stages.values()] == [1, 1]
    assert quarter.evaluate.every == 3
    assert quarter.evaluate.baselines is None
    whole = subject.build_trial({}).scenario
    assert [getattr(body, "epochs", None) for body in whole.stages.values()] == [3, 1]


def test_the_metric_of_a_search_is_what_names_the_best_commit_of_its_trials(folder):
    subject = _subject(folder, metric="nats")
    assert subject.rule.metric == "nats"
    assert subject.rule.lower
    assert subject.build_trial({}).scenario.checkpoint.keep.best == "nats"
    assert _subject(folder).rule.metric == "ndcg@10"


def test_a_search_reads_the_scenario_that_another_one_extends_and_stores_beside_it(folder):
    (folder / "prices.store").mkdir(exist_ok=True)
    join = "join: {item: {use: prices.store, columns: [price]}}"
    (folder / "child.yaml").write_text(f"extends: ring.yaml\nseed: 9\ndata: {{{join}}}\n")
    document = TunedScenario.read(folder / "child.yaml").document
    assert document["data"]["join"]["item"]["use"] == str(folder / "prices.store")
    assert (document["seed"], document["model"]["width"]) == (9, 16)


def test_what_settings_leave_to_the_data_is_settled_once(folder):
    (folder / "open.yaml").write_text(
        "name: open\nsettings: data\ndata: {interactions: interactions.parquet, items: items.parquet}\n"
        "stages: {pretrain: {}}\n"
    )
    subject = TunedScenario.read(folder / "open.yaml")
    settings = subject.build_scenario({"model.width": 16}).settings
    assert isinstance(settings, dict)
    assert "model.width" not in settings
    assert settings.items() <= subject.document["settings"].items()


def test_the_winner_loads_from_any_folder(folder, tmp_path):
    subject = _subject(folder, "model.dropout=0.2")
    (tmp_path / "best.yaml").write_text(subject.to_yaml({"stages.pretrain.lr": 0.007}))
    best, _ = load_scenario(tmp_path / "best.yaml")
    assert best.stages["pretrain"].lr == 0.007
    assert best.data.interactions == str(folder / "interactions.parquet")
    assert best.stages["rl"].rewards["own"].use == str(folder / "rewards" / "own.py")  # type: ignore[attr-defined]
    assert list(best.stages) == ["pretrain", "finetune", "rl"]


def test_the_winner_names_folders_patterns_and_missing_tables_by_absolute_paths(folder, tmp_path):
    subject = _subject(folder, "data.interactions=data/*.parquet", "data.items=../ring/items")
    (tmp_path / "best.yaml").write_text(subject.to_yaml({}))
    best, _ = load_scenario(tmp_path / "best.yaml")
    assert best.data.interactions == str(folder / "data" / "*.parquet")
    assert best.data.items == str(folder / "../ring/items")


def test_the_winner_keeps_texts_that_only_look_like_a_file_beside_it(folder, tmp_path):
    (folder / "n.a").write_text("")
    subject = _subject(folder, "data.missing=[n.a]")
    (tmp_path / "best.yaml").write_text(subject.to_yaml({}))
    assert load_scenario(tmp_path / "best.yaml")[0].data.missing == ["n.a"]


def test_files_of_the_same_name_in_two_folders_are_told_apart(folder):
    (folder / "other").mkdir()
    (folder / "other" / "own.py").write_text((folder / "rewards" / "own.py").read_text() + "\n# other\n")
    hashes = _subject(folder, "stages.rl.rewards.hit.use=other/own.py:own").as_json()["files"]
    assert set(hashes) == {"rewards/own.py", "other/own.py"}
    assert len(set(hashes.values())) == 2


def test_a_scenario_whose_data_is_not_there_is_refused_by_its_data(folder):
    space = _space(folder, "model.dropout: [0.0, 0.2]")
    with pytest.raises(ConfigError, match="amazon-sid is shipped without data"):
        TunedScenario.read("amazon-sid").check(space)
