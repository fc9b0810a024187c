"""Tables as public bug reports describe them, each a small input: `nonet new` reads it whole, warns, or refuses it in one line.

The numbers are those of the cases in the issue's reports.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from nonet.controller.scenario import load_scenario
from nonet.samples.sequences import build_sequences
from nonet.samples.tables import read_interactions, read_items

from .test_new_from_data import as_csv

SPLIT = {"use": "leave_last_out", "test": 1, "valid": 1, "rl": 0}


def events(users: int = 12, each: int = 8, items: int = 15, step: int = 3600) -> dict[str, list]:
    """Columns of 96 events of 12 users over 15 items; no user has an item twice."""
    user = np.repeat(np.arange(1, users + 1), each)
    place = np.tile(np.arange(each), users)
    return {
        "user_id": user.tolist(),
        "item_id": ((user * 4 + place) % items + 1).tolist(),
        "timestamp": (1_600_000_000 + user * 10_000_000 // users + place * step).tolist(),
    }


def imported(name: str, table: str = "interactions") -> pa.Table:
    """Return an imported table as a run reads it."""
    data = load_scenario(f"{name}/mine.yaml")[0].data
    read = read_interactions if table == "interactions" else read_items
    return read(f"{name}/mine-data/{table}.parquet", data.table_format)


def test_01_a_file_without_a_header_is_refused_and_numbers_of_columns_lose_no_event(new, refused):
    columns = events()
    rows = zip(*columns.values(), strict=True)
    Path("clicks.dat").write_text("".join(f"{user},{time},{item},0\n" for user, item, time in rows))
    assert "the file has no header" in refused("a/mine.yaml", "--data", "clicks.dat")
    named = [word for role in ("user=1", "time=2", "item=3") for word in ("--column", role)]
    assert new("b/mine.yaml", "--data", "clicks.dat", *named)[0] == 0
    assert imported("b")["user_id"].to_pylist() == columns["user_id"]


def test_02_json_lines_are_read_with_times_in_milliseconds(new):
    columns = events()
    with Path("Soap.jsonl").open("w") as file:
        for user, item, time in zip(*columns.values(), strict=True):
            review = {"user_id": f"U{user}", "parent_asin": f"B{item}", "asin": f"V{user}{item}"}
            file.write(json.dumps(review | {"timestamp": time * 1000 + 7, "text": 'a "b", c'}) + "\n")
    meta = [{"parent_asin": f"B{item}", "title": f"Soap {item}"} for item in range(1, 16)]
    Path("meta.jsonl").write_text("".join(json.dumps(each) + "\n" for each in meta))
    words = ("--data", "Soap.jsonl", "--items", "meta.jsonl")
    code, _, err = new("a/mine.yaml", *words)
    assert (code, err.count("\n"), "read as JSON lines" in err, "U1" in err) == (2, 1, True, False)
    code, _, err = new("a/mine.yaml", *words, "--column", "item=parent_asin")
    assert code == 0, err
    table = imported("a")
    assert (len(table), len(set(table["item_id"].to_pylist()))) == (96, 15)
    assert table["timestamp"].to_pylist() == columns["timestamp"]


@pytest.mark.parametrize(("time", "code"), [(-86_400_000, 0), (-62_135_596_800_000, 2)])
def test_03_a_day_before_1970_among_milliseconds_is_kept_and_a_year_1_is_told(new, time, code):
    columns = events()
    columns["timestamp"] = [each * 1000 for each in columns["timestamp"]]
    columns["timestamp"][5] = time
    as_csv(pa.table(columns), "reviews.csv")
    found, out, err = new("a/mine.yaml", "--data", "reviews.csv")
    assert "look like s " not in err
    assert found == 2 or "before 1990" in out + err
    if found == 0:
        assert time // 1000 in imported("a")["timestamp"].to_pylist()
    assert code == 2 or found == 0


def test_05_token_seq_is_a_list_cut_at_blanks_and_a_title_stays_whole(new):
    columns = events() | {"rating": [4.0] * 96}
    names = ["user_id:token", "item_id:token", "timestamp:float", "rating:float"]
    as_csv(pa.table(dict(zip(names, columns.values(), strict=True))), "mini.inter", "\t")
    genres = [("Comedy", "Drama", "War", "Crime")[i % 4] + " Short" for i in range(15)]
    films = {"item_id:token": list(range(1, 16)), "title:token_seq": [f"The Film {i}" for i in range(1, 16)]}
    as_csv(pa.table(films | {"genre:token_seq": genres}), "mini.item", "\t")
    code, _, err = new("a/mine.yaml", "--data", "mini.inter", "--items", "mini.item")
    assert code == 0, err
    assert set(imported("a").column_names) == {"user_id", "item_id", "rating", "timestamp"}
    films = imported("a", "items")
    assert films["title"][0].as_py() == "The Film 1"
    assert films["categories"][0].as_py() == ["Comedy", "Short"]


@pytest.mark.parametrize("form", ["['{}', '{}']", '["{}", "{}"]', "{}, {}"])
def test_06_lists_as_text_are_lists(new, form):
    as_csv(pa.table(events()), "plays.csv")
    words = [["Indie", "Action"], ["RPG", "Indie"], ["Action", "RPG"]] * 5
    texts = [form.format(*pair).replace('"', '""') for pair in words]
    rows = [f'{item},Game {item},"{text}"' for item, text in enumerate(texts, 1)]
    Path("items.csv").write_text("\n".join(["item_id,title,categories", *rows]) + "\n")
    assert new("a/mine.yaml", "--data", "plays.csv", "--items", "items.csv")[0] == 0
    assert imported("a", "items")["categories"].to_pylist() == words


@pytest.mark.parametrize("name", ["genres", "mechanics", "x7"])
@pytest.mark.parametrize("form", ["['{}', '{}']", "{}, {}", "{}|{}"])
@pytest.mark.parametrize("verb", ["new", "import"])
def test_06_whether_a_column_is_a_list_does_not_depend_on_its_name(new, command, name, form, verb):
    as_csv(pa.table(events()), "plays.csv")
    words = [["Indie", "Action"], ["RPG", "Indie"], ["Action", "RPG"]] * 5
    rows = [f'{item},Game {item},"{form.format(*pair)}"' for item, pair in enumerate(words, 1)]
    Path("items.csv").write_text("\n".join([f"item_id,title,{name}", *rows]) + "\n")
    if verb == "new":
        code, out, err = new("a/mine.yaml", "--data", "plays.csv", "--items", "items.csv")
        assert imported("a", "items")["categories"].to_pylist() == words
    else:
        code, out, err = command("import", "csv", "plays.csv", "out", "--items", "items.csv")
        assert pq.read_table("out/items.parquet")["categories"].to_pylist() == words
    assert code == 0, err
    assert f"categories = {name}, whose texts are" in out + err


@pytest.mark.parametrize("form", ["csv", "parquet"])
def test_06_dates_are_texts_and_keep_their_column(new, form):
    as_csv(pa.table(events()), "plays.csv")
    pq.write_table(pa.table(events()), "plays.parquet")
    days = [f"{('Oct', 'Nov')[i % 2]} 0{i % 3 + 1}, {2015 + i % 2}" for i in range(15)]
    genres = ["Indie, RPG" if i % 2 else "RPG, Action" for i in range(15)]
    items = {"item_id": list(range(1, 16)), "release_date": days, "x7": genres}
    pq.write_table(pa.table(items), "items.parquet")
    rows = [f'{i},"{day}","{genre}"' for i, day, genre in zip(*items.values(), strict=True)]
    Path("items.csv").write_text("\n".join(["item_id,release_date,x7", *rows]) + "\n")
    code, out, err = new("a/mine.yaml", "--data", f"plays.{form}", "--items", f"items.{form}")
    assert code == 0, err
    assert "note: categories = x7, whose texts are split at ', ' into words" in out
    if form == "csv":
        assert imported("a", "items")["release_date"].to_pylist() == days


def test_06_texts_that_may_be_lists_are_warned_of(new):
    as_csv(pa.table(events()), "plays.csv")
    rows = [f'{item},Game {item},"Town {item}, OR"' for item in range(1, 16)]
    Path("items.csv").write_text("\n".join(["item_id,title,genres", *rows]) + "\n")
    code, out, err = new("a/mine.yaml", "--data", "plays.csv", "--items", "items.csv")
    assert code == 0, err
    assert "warning: categories: each text is treated as one word, although most contain ', '" in out


def test_08_users_that_are_missing_are_refused_with_the_ties_of_the_others(new, refused):
    day = [f"2016-05-{1 + session % 28:02d}" for session in range(120) for _ in range(5)]
    views = {
        "sessionId": np.repeat(np.arange(120), 5),
        "userId": [f"{session}" if session % 4 == 0 else "NA" for session in range(120) for _ in range(5)],
        "itemId": np.arange(600) * 7 % 40,
        "eventdate": day,
    }
    as_csv(pa.table(views), "item-views.csv", ";")
    said = refused("a/mine.yaml", "--data", "item-views.csv")
    assert "450 of 600 rows have no userId: it is 'NA' there" in said
    assert "80% of its other rows share a timestamp" in said
    code, out, _ = new("b/mine.yaml", "--data", "item-views.csv", "--column", "user=sessionId")
    assert code == 0
    assert "users    120; events each: 5 to 5" in out
    assert "share a timestamp: their order is that of the rows in the file" in out


def test_09_what_spark_leaves_beside_its_parts_is_no_data(new):
    table = pa.table(events())
    for name in (
        "part-0.parquet",
        "_temporary/0/part-1.parquet",
        ".hidden/part-0.parquet",
        "_delta/x.parquet",
    ):
        place = Path("log/events") / name
        place.parent.mkdir(parents=True, exist_ok=True)
        pq.write_table(table, place)
    code, out, err = new("a/mine.yaml", "--data", "log")
    assert code == 0, err
    assert "events   96," in out
    assert "there twice" not in out
    assert read_interactions("log/events").num_rows == 96


@pytest.mark.parametrize("place", ["clicks", "."])
def test_10_a_folder_of_parts_is_one_table(new, place):
    Path("data/clicks").mkdir(parents=True)
    table = pa.table(events())
    for number in range(3):
        pq.write_table(table.slice(32 * number, 32), f"data/clicks/part-0000{number}-6f.snappy.parquet")
    Path("data/clicks/_SUCCESS").write_text("")
    code, out, err = new("a/mine.yaml", "--data", str(Path("data") / place))
    assert code == 0, err
    assert "events   96," in out


@pytest.mark.parametrize("kind", ["lists", "structs"])
def test_12_nested_categories_are_flattened(new, kind):
    nested = [[["Games", "Indie"]], [["Games"], ["Action"]], []] * 5
    structs = [[{"id": 1, "name": "Games"}], [{"id": 2, "name": "Indie"}], []] * 5
    Path("data").mkdir()
    pq.write_table(pa.table(events()), "data/interactions.parquet")
    items = {"item_id": list(range(1, 16)), "categories": nested if kind == "lists" else structs}
    pq.write_table(pa.table(items), "data/items.parquet")
    code, out, err = new("a/mine.yaml", "--data", "data")
    assert code == 0 or (code, err.count("\n")) == (2, 1), err
    assert code == 0 or not Path("a").exists()
    assert "Traceback" not in out + err


def test_14_an_empty_part_decides_nothing_and_a_category_beside_text_is_text(new):
    table = pa.table(events() | {"event": ["view", "buy"] * 48})
    Path("empty").mkdir()
    pq.write_table(table, "empty/part-1.parquet")
    floats = pa.schema([(name, pa.float64()) for name in table.column_names])
    pq.write_table(floats.empty_table(), "empty/part-0.parquet")
    code, out, err = new("a/mine.yaml", "--data", "empty")
    assert (code, "events   96," in out) == (0, True), err
    Path("mixed").mkdir()
    pq.write_table(table, "mixed/part-0.parquet")
    later = pa.table(events() | {"timestamp": [each + 9 for each in events()["timestamp"]]})
    pq.write_table(later.append_column("event", table["event"].dictionary_encode()), "mixed/part-1.parquet")
    code, out, err = new("b/mine.yaml", "--data", "mixed")
    assert (code, "events   192," in out) == (0, True), err


def test_18_rows_twice_are_counted_and_turn_no_repeats_on(new):
    columns = events(users=100, each=16, items=400)
    twice = {name: [each for each in values for _ in range(2)] for name, values in columns.items()}
    as_csv(pa.table(twice), "clicks.csv")
    code, out, _ = new("a/mine.yaml", "--data", "clicks.csv")
    assert code == 0
    assert "warning: 1,600 of 3,200 events are duplicates" in out
    some = {name: values + values[:640:16] for name, values in columns.items()}
    seq, _ = build_sequences(pa.table(some), None, split=SPLIT)
    assert seq.repeats == "mask"


def test_19_ids_stay_as_they_are_and_zeros_on_one_side_are_refused(new, refused):
    columns = events()
    sales = {"user": columns["user_id"], "t": columns["timestamp"]}
    as_csv(pa.table(sales | {"article": [f"0{item:05d}" for item in columns["item_id"]]}), "sales.csv")
    words = ("--column", "user=user", "--column", "time=t", "--column", "item=article")
    as_csv(pa.table({"article": [f"0{item:05d}" for item in range(1, 16)]}), "zeros.csv")
    assert new("a/mine.yaml", "--data", "sales.csv", "--items", "zeros.csv", *words)[0] == 0
    assert imported("a", "items")["item_id"][0].as_py() == "000001"
    as_csv(pa.table({"article": list(range(1, 16))}), "plain.csv")
    assert "name an item that is not in the items table" in refused(
        "b/mine.yaml", "--data", "sales.csv", "--items", "plain.csv", *words
    )
    large = columns | {"user_id": [(1 << 53) + each for each in columns["user_id"]]}
    large["item_id"] = [-each for each in columns["item_id"]]
    as_csv(pa.table(large), "large.csv")
    assert new("c/mine.yaml", "--data", "large.csv")[0] == 0
    assert imported("c").select(["user_id", "item_id"]).to_pydict() == {
        name: large[name] for name in ("user_id", "item_id")
    }


def test_20_events_seconds_apart_come_in_that_order_and_ties_keep_the_order_of_the_file(new):
    columns = events(step=3)
    order = np.random.default_rng(0).permutation(96)
    mixed = {name: [values[row] for row in order] for name, values in columns.items()}
    names = ["user_id:token", "item_id:token", "timestamp:float"]
    as_csv(pa.table(dict(zip(names, mixed.values(), strict=True))), "near.inter", "\t")
    assert new("a/mine.yaml", "--data", "near.inter")[0] == 0
    seq, items = build_sequences(read_interactions("a/mine-data/interactions.parquet"), None, split=SPLIT)
    ids = items["item_id"].to_pylist()
    assert [ids[item] for item in seq.item] == columns["item_id"]
    as_csv(pa.table(columns | {"timestamp": [1_600_000_000] * 96}), "ties.csv")
    code, out, _ = new("b/mine.yaml", "--data", "ties.csv")
    assert (code, "100% of neighbouring events of a user share a timestamp" in out) == (0, True)
    seq, items = build_sequences(read_interactions("b/mine-data/interactions.parquet"), None, split=SPLIT)
    assert [items["item_id"].to_pylist()[item] for item in seq.item] == columns["item_id"]


def test_22_ids_that_a_spreadsheet_has_rewritten_are_warned_of_by_new_plan_and_import(new, command):
    columns = events()
    columns["item_id"] = [f"9.780{item % 7}E+12" for item in columns["item_id"]]
    as_csv(pa.table(columns), "books.csv")
    code, out, err = new("a/mine.yaml", "--data", "books.csv")
    assert code == 0, err
    sentence = "7 of 7 distinct item ids are written as a spreadsheet writes"
    assert f"warning: {sentence}" in out
    for words in (("plan", "a/mine.yaml"), ("import", "csv", "books.csv", "imported")):
        code, out, err = command(*words)
        assert (code, sentence in out + err) == (0, True), out + err
    columns["item_id"] = [f"{item}E{item}A" for item in columns["item_id"]]
    as_csv(pa.table(columns), "codes.csv")
    assert "spreadsheet" not in "".join(map(str, new("b/mine.yaml", "--data", "codes.csv")))
