from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from nonet import yaml
from nonet.controller.cluster import read_local_view
from nonet.controller.plan import plan
from nonet.controller.scenario import load_scenario, make_scenario, make_validation_rule, to_document
from nonet.controller.scenario.settings import list_data_warnings, rule
from nonet.errors import ConfigError, DataError
from nonet.plugins import PluginFiles
from nonet.samples.profiles import ItemColumn, measure_profile, read_profile


def profile(users: int, each: int, items: int, columns: tuple[ItemColumn, ...] = ()):
    """Users with `each` events, a minute apart, going round the items."""
    offsets = np.arange(users + 1) * each
    return measure_profile(
        offsets,
        np.arange(users * each) % items,
        np.tile(np.arange(each), users) * 60 + 1000,
        items,
        columns=columns,
    )


def chosen(profile, rl: int = 0, supervised=("pretrain",), metrics=None, test: int = 1) -> dict:
    return {s.path: s.value for s in rule.choose_rest(profile, last_out(test, rl), supervised, metrics)}


def last_out(test: int, rl: int = 0) -> dict:
    return {"use": "leave_last_out", "test": test, "valid": 1, "rl": rl}


def write(folder: Path, users: int, each: int, items: int, **columns) -> None:
    draw = np.random.default_rng(3)
    table = {
        "user_id": np.repeat(np.arange(users), each),
        "item_id": draw.integers(0, items, users * each),
        "timestamp": np.tile(np.arange(each) * 60, users) + 1_500_000_000,
    }
    pq.write_table(pa.table(table | columns), folder / "log.parquet")


def document_of(**more) -> dict:
    base = {
        "name": "mine",
        "settings": "data",
        "data": {"interactions": "log.parquet"},
        "stages": {"pretrain": None},
    }
    return base | more


def made(folder: Path, stored=None, **more):
    return make_scenario(document_of(**more), "mine", PluginFiles(str(folder)), stored)


def refused(folder: Path, **more) -> str:
    with pytest.raises(ConfigError) as caught:
        made(folder, **more)
    assert "\n" not in str(caught.value)
    return str(caught.value)


# --- the rule -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("each", "test"), [(3, 1), (8, 1), (29, 1), (30, 5), (70, 5)])
def test_five_events_are_tested_only_of_long_users(each, test):
    short = rule.choose_split(profile(50, each, 40), rolls_out=False).value
    assert short == {"use": "leave_last_out", "test": test, "valid": 1, "rl": 0}
    assert rule.choose_split(profile(50, each, 40), rolls_out=True).value["rl"] == test


@pytest.mark.parametrize(
    ("each", "held_out", "has"), [(8, 2, False), (21, 2, False), (22, 2, True), (70, 11, True)]
)
def test_a_user_row_needs_a_median_of_20_training_events(each, held_out, has):
    settings = list(rule.choose_rest(profile(50, each, 40), last_out(held_out - 1), (), None))
    tables = next(setting for setting in settings if setting.path == "sparse.tables")
    assert ("user" in tables.value) is has
    assert f"the median user has {each - held_out} training events; 20 are needed" in tables.reason


@pytest.mark.parametrize(("items", "codes"), [(16, 8), (200, 32), (3_500, 64), (12_000, 128), (40_000, 256)])
def test_codes_grow_with_the_catalogue_and_reach_far_beyond_it(items, codes):
    settings = chosen(profile(100, 400, items))
    assert settings["tokenizer.codes"] == codes
    assert codes ** settings["tokenizer.levels"] >= 16 * items


@pytest.mark.parametrize("users", [5, 500, 2_000, 20_000])
def test_a_step_has_512_to_2048_events_and_training_an_end(users):
    settings = chosen(profile(users, 8, 40), supervised=("pretrain", "finetune"))
    tokens = settings["stages.pretrain.batch"]["tokens"]
    assert 512 <= tokens <= 2048
    assert tokens == 512 or users * 6 / tokens >= 45
    assert 4 <= settings["stages.pretrain.epochs"] <= 10
    assert settings["stages.finetune.epochs"] == 2
    assert settings["stages.finetune.lr"] < settings["stages.pretrain.lr"]


def test_the_first_stage_ends_by_nats_where_it_is_validated():
    settings = chosen(profile(500, 8, 40), supervised=("pretrain", "finetune"))
    assert settings["stages.pretrain.stop.by"] == "nats"
    assert "stages.finetune.stop.by" not in settings
    unvalidated = rule.choose_rest(profile(500, 8, 40), {**last_out(1), "valid": 0}, ("pretrain",), None)
    assert "stages.pretrain.stop.by" not in {setting.path for setting in unvalidated}


@pytest.mark.parametrize(
    ("stop", "by"), [(None, "nats"), ({"patience": 5}, "nats"), ({"by": "recall@10"}, "recall@10")]
)
def test_the_end_of_the_first_stage_keeps_what_is_given(tmp_path, stop, by):
    write(tmp_path, users=60, each=8, items=40)
    stage = made(tmp_path, stages={"pretrain": {} if stop is None else {"stop": stop}}).stages["pretrain"]
    assert stage.stop.by == by
    assert stage.stop.patience == (stop or {}).get("patience", 3)
    off = made(tmp_path, stages={"pretrain": {"stop": "off"}}).stages["pretrain"]
    assert off.stop == "off"
    metric = made(tmp_path, stages={"pretrain": {}}, checkpoint={"keep": {"best": "recall@10"}})
    assert make_validation_rule(metric, "pretrain").metric == "recall@10"


@pytest.mark.parametrize(("each", "nearest"), [(4, True), (29, True), (30, False)])
def test_the_voters_of_a_memory_follow_the_length_of_histories(each, nearest):
    memory = chosen(profile(50, each, 40))["model.memory"]
    assert memory["decay"] == "validation"
    assert memory["voters"] == ["transitions", "cooccurrence", *(["nearest"] if nearest else [])]


def test_vectors_are_of_what_the_items_have_in_common():
    columns = (
        ItemColumn("title", "text", 1.0, 0.9),
        ItemColumn("brand", "text", 0.9, 0.1),
        ItemColumn("asin", "text", 1.0, 1.0),
        ItemColumn("price", "number"),
        ItemColumn("categories", "list", 0.1, 0.1),
    )
    assert chosen(profile(50, 8, 40, columns))["tokenizer.vectors"] == [
        "title",
        {"brand": 0.3},
        "cooccurrence",
    ]
    assert chosen(profile(50, 8, 40))["tokenizer.vectors"] == ["cooccurrence"]


def test_rare_items_go_where_most_events_stay():
    assert rule.choose_keep(profile(50, 8, 40)).value["item_events"] == 5
    assert rule.choose_keep(profile(50, 8, 150)).value["item_events"] == 2  # 2 or 3 events an item
    assert rule.choose_keep(profile(50, 8, 400)).value == {"item_events": 0}


def test_a_beam_is_as_wide_as_the_largest_k():
    assert chosen(profile(50, 8, 400), metrics=["recall@50"])["evaluate.width"] == 50
    assert chosen(profile(50, 8, 400))["evaluate.width"] == 20
    assert chosen(profile(50, 8, 8))["evaluate.metrics"] == ["recall@1", "ndcg@1"]


def test_the_rule_is_near_the_quickstart_s_own_settings_on_its_data():
    ours, _ = load_scenario("quickstart")
    data = read_profile(ours.data.interactions, ours.data.items)
    keep, split = rule.choose_keep(data).value, rule.choose_split(data, rolls_out=True).value
    assert keep["item_events"] == ours.data.keep.item_events
    assert {"use": ours.data.split.use, **ours.data.split.get_options()} == {**split, "cold_items": None}
    settings = chosen(read_profile(ours.data.interactions, ours.data.items, keep=keep), rl=5, test=5)
    assert settings["data.history"] == ours.data.history
    assert settings["tokenizer.vectors"] == ours.tokenizer.get_options()["vectors"]
    assert settings["tokenizer.codes"] == ours.tokenizer.get_options()["codes"]
    assert settings["model.layers"] == ours.model.get_options()["layers"]
    assert settings["model.memory"] == ours.model.memory.model_dump(exclude_unset=True)
    assert set(settings["sparse.tables"]) == set(ours.sparse.tables)
    assert settings["stages.pretrain.epochs"] == ours.stages["pretrain"].epochs  # type: ignore[attr-defined]


# --- filling --------------------------------------------------------------------------------------------------------


def test_a_key_that_is_given_stays_and_has_no_reason(tmp_path):
    write(tmp_path, 200, 8, 40)
    ours = made(
        tmp_path,
        model={"dropout": 0.0},
        sparse={"tables": {"user": {}}},
        stages={"pretrain": {"steps": 9, "lr": 1e-2, "ahead": 2}},
    )
    assert ours.model.get_options()["dropout"] == 0.0
    assert list(ours.sparse.tables) == ["user"]
    assert (ours.stages["pretrain"].steps, ours.stages["pretrain"].epochs) == (9, None)  # type: ignore[attr-defined]
    assert isinstance(ours.settings, dict)
    assert not {"model.dropout", "sparse.tables", "stages.pretrain.epochs"} & set(ours.settings)
    assert "model.width" in ours.settings
    assert ours.data.history == 10


def test_a_change_on_the_command_line_overrides_the_rule(tmp_path):
    write(tmp_path, 200, 8, 40)
    (tmp_path / "mine.yaml").write_text(yaml.dump(document_of()))
    ours, _ = load_scenario(tmp_path / "mine.yaml", ["data.split={test: 2, valid: 0}", "tokenizer.codes=4"])
    assert ours.data.split.get_options() == {"test": 2, "valid": 0, "rl": 0, "cold_items": None}
    assert ours.tokenizer.get_options()["codes"] == 4


def test_without_the_word_the_defaults_are_as_they_were(tmp_path):
    plain = document_of(stages={"pretrain": {"epochs": 1}})
    del plain["settings"]
    ours = make_scenario(plain, "mine", PluginFiles(str(tmp_path)))
    assert (ours.settings, ours.data.history, ours.sparse.tables) == (None, 50, {})
    assert "settings" not in to_document(ours)


def test_a_run_s_scenario_has_the_values_and_never_asks_the_data_again(tmp_path):
    write(tmp_path, 200, 8, 40)
    ours = made(tmp_path)
    text = yaml.dump(to_document(ours))
    (tmp_path / "log.parquet").unlink()
    again = make_scenario(yaml.parse(text), "mine", PluginFiles(str(tmp_path)))
    assert again == ours
    assert yaml.dump(to_document(again)) == text


def test_a_run_that_goes_on_has_the_settings_it_began_with_whatever_the_data_are_now(tmp_path):
    write(tmp_path, 200, 8, 40)
    stored = to_document(made(tmp_path))
    write(tmp_path, 200, 60, 40)
    assert made(tmp_path).data.split.get_options()["test"] == 5
    on = made(tmp_path, stored)
    assert to_document(on) == stored


def test_an_rl_stage_gets_events_to_ask_for(tmp_path):
    write(tmp_path, 200, 8, 40)
    rl = {"steps": 2, "users": 4, "rewards": {"hit": {"weight": 1.0}}}
    assert made(tmp_path, stages={"pretrain": None, "rl": rl}).data.split.get_options() == {
        "test": 1,
        "valid": 1,
        "rl": 1,
        "cold_items": None,
    }


def test_a_plan_says_what_the_data_chose_and_why(tmp_path):
    write(tmp_path, 200, 8, 40)
    text = plan(made(tmp_path), read_local_view()).format_text()
    assert (
        "sparse.tables: {item: {dim: 64}} (user table: none (the median user has 6 training events; 20 are needed))"
        in text
    )
    assert "data.split: {use: leave_last_out, test: 1, valid: 1, rl: 0} (the median user has 8 events" in text


# --- refusals -------------------------------------------------------------------------------------------------------


def test_users_of_one_event_are_refused_before_anything_starts(tmp_path):
    write(tmp_path, 300, 1, 40)
    assert "each of the 300 users has one event" in refused(tmp_path)


def test_a_catalogue_of_one_item_is_refused(tmp_path):
    write(tmp_path, 30, 5, 1)
    assert "all 150 events are of one item" in refused(tmp_path)


def test_an_empty_table_a_missing_column_and_times_that_are_words_are_one_line(tmp_path):
    write(tmp_path, 30, 5, 9)
    table = pq.read_table(tmp_path / "log.parquet")
    pq.write_table(table.slice(0, 0), tmp_path / "log.parquet")
    assert "the table is empty" in refused(tmp_path)
    pq.write_table(table.drop(["item_id"]), tmp_path / "log.parquet")
    assert "no column 'item_id'" in refused(tmp_path)
    words = pa.array(["soon"] * len(table))
    pq.write_table(table.set_column(2, "timestamp", words), tmp_path / "log.parquet")
    assert "'timestamp' is string; wanted a timestamp" in refused(tmp_path)


def test_another_model_or_word_is_refused(tmp_path):
    write(tmp_path, 30, 5, 9)
    assert "settings: data supports only model.use: sid_decoder" in refused(tmp_path, model={"use": "deepfm"})
    assert "wanted data or no value, got 'auto'" in refused(tmp_path, settings="auto")
    assert "unknown key" in refused(tmp_path, modle={})
    with pytest.raises(DataError, match="no such file"):
        made(tmp_path, data={"interactions": "nowhere.parquet"})


# --- warnings -------------------------------------------------------------------------------------------------------

LAST = {"use": "leave_last_out", "test": 1, "valid": 1}


def test_ties_and_leaks_are_told_with_their_numbers():
    offsets = np.arange(301) * 4
    tied = measure_profile(offsets, np.arange(1200) % 50, np.tile([0, 86400, 172800, 172800], 300), 50)
    said = list(list_data_warnings(tied, LAST, {"item": 32}))
    order = "their order is that of the rows in the file"
    assert f"33% of neighbouring events of a user share a timestamp: {order}" in said
    finer = list(list_data_warnings(replace(tied, time_unit="ms"), LAST, {}))
    order = "their order is that of their milliseconds, or else of the rows in the file"
    assert f"33% of neighbouring events of a user share a second: {order}" in finer
    assert any(
        "100% of the tested users (300 of 300) have a test event at the second" in line for line in said
    )
    assert not [
        line
        for line in list_data_warnings(tied, {"use": "time", "test": "1970-01-03"}, {})
        if "tested users" in line
    ]


def test_users_too_short_and_too_few_are_told():
    lengths = np.array([1] * 900 + [5] * 100)
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    time = np.arange(offsets[-1]) * 60
    said = list(list_data_warnings(measure_profile(offsets, np.arange(offsets[-1]) % 50, time, 50), LAST, {}))
    assert any("900 of 1,000 users have under 3 events" in line for line in said)
    assert any("100 users are tested" in line for line in said)


def test_a_user_table_on_short_users_is_told_where_the_user_forces_it():
    short = profile(300, 8, 40)
    said = list(list_data_warnings(short, LAST, {"item": 32, "user": 32}))
    assert any("the median user has 6 training events" in line for line in said)
    assert not list(list_data_warnings(short, LAST, {"item": 32}))


def test_events_that_repeat_the_one_right_before_are_told_but_not_for_click_models():
    offsets = np.arange(301) * 8
    often = measure_profile(offsets, np.arange(2400) // 2 % 50, np.tile(np.arange(8) * 60, 300), 50)
    assert often.immediate == 0.5
    said = [line for line in list_data_warnings(often, LAST, {}) if "right before" in line]
    assert said == [
        "50% of the events are of the item of the user's event right before, which any list that begins with the newest item "
        "finds; `data.events: {compress: 1d}` makes one event of them"
    ]
    assert not [
        line for line in list_data_warnings(often, LAST, {}, makes_lists=False) if "right before" in line
    ]
    assert not [
        line for line in list_data_warnings(replace(often, immediate=0.09), LAST, {}) if "before" in line
    ]


def test_settings_are_those_of_the_log_that_compression_by_category_makes(tmp_path):
    """A user looks at 24 items on 6 days, those of each day in one category: the compressed log has 6 events."""
    day = np.sort(np.append(np.arange(6), np.tile(np.arange(6), 4)[:22]))
    item = 4 * day + np.arange(28) % 4
    table = {
        "user_id": np.repeat(np.arange(300), 28),
        "item_id": np.tile(item, 300),
        "timestamp": np.tile(1_500_000_000 // 86400 * 86400 + day * 86400 + np.arange(28) * 60, 300),
    }
    pq.write_table(pa.table(table), tmp_path / "log.parquet")
    items = pa.table({"item_id": np.arange(24), "categories": [[f"c{n // 4}"] for n in range(24)]})
    pq.write_table(items, tmp_path / "items.parquet")
    data = {"interactions": "log.parquet", "items": "items.parquet"}
    for by, median in (("item", 22), ("category", 4)):
        events = {"compress": "1d", "by": by}
        scenario = made(tmp_path, data={**data, "events": events, "keep": {"item_events": 1}})
        assert f"the median user has {median} training events" in scenario.settings["sparse.tables"]
        assert ("user" in scenario.sparse.tables) is (median >= 20)


def test_vectors_of_files_are_sources_of_ids_and_signals():
    long = profile(60, 40, 30, (ItemColumn("title", "text", 1.0, 1.0),))
    chosen = {
        s.path: s.value
        for s in rule.choose_rest(long, last_out(1), ["pretrain"], None, vectors=["image", "title"])
    }
    assert chosen["tokenizer.vectors"] == ["title", "image", "cooccurrence"]
    assert chosen["model.memory"]["signals"] == ["title", "image"]


@pytest.mark.parametrize(
    ("vectors", "items", "said"),
    [
        (
            {"image": "a.npy"},
            None,
            r"vectors.image: these are columns of the items table, so name it in data.items",
        ),
        ({"image": "a.csv"}, "i.parquet", r"vectors.image: a.csv must be a .npy or a .parquet file"),
        ({"image": "a.npy?x=1"}, "i.parquet", "must be a .npy or a .parquet file"),
        *(
            ({name: "a.npy"}, "i.parquet", f"vectors.{name}: this name has a meaning of its own")
            for name in ("title", "categories", "events", "item", "item_id", "cooccurrence")
        ),
    ],
)
def test_vectors_that_cannot_be_meant_are_refused(vectors, items, said):
    data = {"interactions": "log.parquet", "vectors": vectors} | ({"items": items} if items else {})
    with pytest.raises(ConfigError, match=said):
        make_scenario(document_of(data=data, settings={}))


def test_an_address_of_vectors_may_have_options():
    data = {
        "interactions": "log.parquet",
        "items": "i.parquet",
        "vectors": {"image": "s3://b/a.npy?region=x"},
    }
    stages = {"pretrain": {"epochs": 1}}
    assert make_scenario(document_of(data=data, settings={}, stages=stages)).data.vectors == data["vectors"]
