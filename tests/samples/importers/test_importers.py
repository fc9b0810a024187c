import json

import pyarrow.parquet as pq
import pytest

from nonet.errors import ConfigError, DataError
from nonet.samples.importers.formats import get_importer
from nonet.samples.importers.import_csv import import_csv
from nonet.samples.importers.import_movielens import import_movielens
from nonet.samples.importers.import_sequences import import_sequences
from nonet.samples.tables.tables import read_tables


def _files(folder, **texts):
    folder.mkdir(exist_ok=True)
    for name, text in texts.items():
        (folder / name.replace("__", ".")).write_text(text, encoding="latin-1" if "é" in text else "utf-8")
    return folder


def _both(dst):
    log, items = read_tables(dst / "interactions.parquet", dst / "items.parquet")
    assert items is not None
    return log.to_pylist(), items.to_pylist()


@pytest.fixture
def movielens(tmp_path):
    return _files(
        tmp_path / "ml",
        ratings__csv="userId,movieId,rating,timestamp\n1,31,2.5,1260759144\n1,7,3.0,1260759179\n2,7,4.5,835355493\n",
        movies__csv='movieId,title,genres\n7,"Usual Suspects, The (1995)",Crime|Thriller\n'
        "31,Plain,(no genres listed)\n40,Nobody Saw It (2001),Drama\n",
        README__txt="terms",
    )


def test_movielens_csv_becomes_two_tables_with_the_licence_beside_them(movielens, tmp_path):
    dst = tmp_path / "out"
    assert import_movielens(movielens, dst) == {"users": 2, "items": 3, "events": 3}
    log, items = _both(dst)
    assert log[0] == {"user_id": 1, "item_id": 31, "timestamp": 1260759144, "rating": 2.5}
    assert items == [
        {
            "item_id": 7,
            "title": "Usual Suspects, The (1995)",
            "categories": ["Crime", "Thriller"],
            "year": 1995,
        },
        {"item_id": 31, "title": "Plain", "categories": [], "year": None},
        {"item_id": 40, "title": "Nobody Saw It (2001)", "categories": ["Drama"], "year": 2001},
    ]
    assert sorted(p.name for p in dst.iterdir()) == ["README.txt", "interactions.parquet", "items.parquet"]
    assert str(pq.read_schema(dst / "items.parquet").field("year").type) == "int32"


def test_movielens_1m_and_100k_layouts_are_read(tmp_path):
    million = _files(
        tmp_path / "1m",
        ratings__dat="1::7::5::978300760\n2::31::3::978302109\n",
        movies__dat="7::Café: a Story (1994)::Comedy|Drama\n31::Other (2000)::War\n",
    )
    import_movielens(million, tmp_path / "a")
    log, items = _both(tmp_path / "a")
    assert log == [
        {"user_id": 1, "item_id": 7, "timestamp": 978300760, "rating": 5.0},
        {"user_id": 2, "item_id": 31, "timestamp": 978302109, "rating": 3.0},
    ]
    assert items[0] == {
        "item_id": 7,
        "title": "Café: a Story (1994)",
        "categories": ["Comedy", "Drama"],
        "year": 1994,
    }
    flags = "|".join("1" if i in (3, 5) else "0" for i in range(19))
    hundred = _files(
        tmp_path / "100k",
        u__data="196\t1\t3\t881250949\n",
        u__item=f"1|Toy Story (1995)|01-Jan-1995||http://x|{flags}\n",
    )
    import_movielens(hundred, tmp_path / "b")
    log, items = _both(tmp_path / "b")
    assert log == [{"user_id": 196, "item_id": 1, "timestamp": 881250949, "rating": 3.0}]
    assert items == [
        {"item_id": 1, "title": "Toy Story (1995)", "categories": ["Animation", "Comedy"], "year": 1995}
    ]


def test_csv_names_are_guessed_and_other_columns_kept(tmp_path):
    src = _files(
        tmp_path / "shop",
        interactions__csv="userId;SKU;ts_ms;Action;price\n007;A1;1700000000500;click;3.5\n12;B2;1700000001000;order;4\n",
        items__csv='ProductId,Name,Genre\nA1,"Hat, red",clothes|hats\nB2,Shoe,\n',
    )
    assert import_csv(src, tmp_path / "out") == {"users": 2, "items": 2, "events": 2}
    log, items = _both(tmp_path / "out")
    assert log[0] == {
        "user_id": "007",
        "item_id": "A1",
        "timestamp": 1700000000,
        "event": "click",
        "price": 3.5,
    }
    assert items == [
        {"item_id": "A1", "title": "Hat, red", "categories": ["clothes", "hats"]},
        {"item_id": "B2", "title": "Shoe", "categories": []},
    ]


def test_csv_times_keep_their_unit_unless_only_the_name_of_their_column_shows_it(tmp_path):
    for number, (times, written) in enumerate(
        {
            ("1700000000999", "1700000000123"): [1700000000123, 1700000000999],
            ("1700000000999000001", "1700000000999000000"): [1700000000999000000, 1700000000999000001],
            ("1700000001", "1700000000"): [1700000001, 1700000000],  # rows with seconds stay in order
            ("2023-11-14T22:13:20.9", "2023-11-14T22:13:20.1"): [1700000000, 1700000000],
            ("5000", "4000"): [4, 5],
        }.items()
    ):
        name = "ts_ms" if times[0] == "5000" else "ts"
        path = tmp_path / f"{number}.csv"
        path.write_text(f"user,item,{name}\n" + "".join(f"1,{i},{time}\n" for i, time in enumerate(times)))
        import_csv(path, tmp_path / f"{number}")
        log = pq.read_table(tmp_path / f"{number}" / "interactions.parquet")
        assert log["timestamp"].to_pylist() == written


def test_csv_columns_given_win_over_guesses(tmp_path):
    src = (
        _files(tmp_path / "s", x__csv="user_id,buyer,item,date\n1,9,5,2026-11-19\n1,8,4,2026-11-20\n")
        / "x.csv"
    )
    import_csv(src, tmp_path / "out", columns={"user": "buyer"})
    log, items = _both(tmp_path / "out")
    assert [row["user_id"] for row in log] == [9, 8]
    assert [row["timestamp"] for row in log] == [1795046400, 1795132800]
    assert [row["item_id"] for row in items] == [4, 5]


def test_csv_of_recbole_loses_its_type_endings(tmp_path):
    src = _files(
        tmp_path / "r",
        ml__inter="user_id:token\titem_id:token\trating:float\ttimestamp:float\n196\t242\t3\t881250949\n",
        ml__item="item_id:token\tmovie_title:token_seq\trelease_year:token\n242\tKolya\t1996\n",
    )
    import_csv(src / "ml.inter", tmp_path / "out", items=src / "ml.item")
    log, items = _both(tmp_path / "out")
    assert log == [{"user_id": 196, "item_id": 242, "rating": 3.0, "timestamp": 881250949}]
    assert items == [{"item_id": 242, "title": "Kolya", "release_year": 1996}]


def test_csv_item_ids_are_text_in_both_tables_when_one_needs_it(tmp_path):
    src = _files(
        tmp_path / "m", interactions__csv="user,item,time\n1,5,10\n", items__csv="item,title\n5,Five\nx,Ex\n"
    )
    import_csv(src, tmp_path / "out")
    log, items = _both(tmp_path / "out")
    assert (log[0]["item_id"], [row["item_id"] for row in items]) == ("5", ["5", "x"])


def test_sequences_folder_keeps_its_order_times_text_and_attributes(tmp_path):
    src = _files(
        tmp_path / "beauty",
        sequences__txt="1 10 11 12\n2 11 13\n3 10 12\n",
        timestamps__txt="1 100 90 120\n2 -1 50\n3 70 -1\n",
        item_text__tsv="item_id\tasin\ttext\n10\tB0\tred hat\n11\tB1\tblue hat\n12\tB2\tshoe\n13\tB3\tsock\n",
        item2attributes__json=json.dumps({"10": [3, 1, 3], "12": [2]}),
    )
    counts = import_sequences(src, tmp_path / "out")
    assert counts == {"users": 3, "items": 4, "events": 7, "raised_times": 3}
    log, items = _both(tmp_path / "out")
    assert [(row["user_id"], row["item_id"], row["timestamp"]) for row in log] == [
        *((1, 10, 100), (1, 11, 100), (1, 12, 120), (2, 11, 50), (2, 13, 50), (3, 10, 70), (3, 12, 70))
    ]
    assert items[0] == {"item_id": 10, "asin": "B0", "title": "red hat", "categories": ["3", "1"]}
    assert items[1]["categories"] == []


def test_sequences_file_alone_uses_positions_as_times(tmp_path):
    src = _files(tmp_path / "s", a__txt="u1 x y z\n\nu2 z\n") / "a.txt"
    assert import_sequences(src, tmp_path / "out")["events"] == 4
    log, items = _both(tmp_path / "out")
    assert [(row["user_id"], row["item_id"], row["timestamp"]) for row in log] == [
        *(("u1", "x", 0), ("u1", "y", 1), ("u1", "z", 2), ("u2", "z", 0))
    ]
    assert [row["item_id"] for row in items] == ["x", "y", "z"]


BAD = [
    (import_movielens, {"x__txt": ""}, "", "this folder has none of ratings.csv, ratings.dat, u.data"),
    (
        import_movielens,
        {"ratings__csv": "userId,movieId,rating,timestamp\n1,2,3,4\n"},
        "",
        "movies.csv: no such file",
    ),
    (
        import_movielens,
        {"ratings__csv": "userId,movieId,rating\n1,2,3\n"},
        "",
        "ratings.csv: no column 'timestamp'",
    ),
    (
        import_movielens,
        {
            "ratings__csv": "userId,movieId,rating,timestamp\n1,x,3,4\n",
            "movies__csv": "movieId,title,genres\n2,a,b\n",
        },
        "",
        "not a readable CSV: .*'x'",
    ),
    (
        import_movielens,
        {
            "ratings__csv": "userId,movieId,rating,timestamp\n1,9,3,4\n",
            "movies__csv": "movieId,title,genres\n2,a,b\n",
        },
        "",
        "1 of 1 interactions name an item that is not in the items table; 1 ids, the first: 9",
    ),
    (
        import_movielens,
        {"ratings__dat": "1::2::3\n", "movies__dat": "2::a::b\n"},
        "",
        "ratings.dat: line 1 has 3 fields; it must have 4",
    ),
    (
        import_csv,
        {"x__csv": "a,b\n1,2\n"},
        "/x.csv",
        "no column 'user_id'; it has a, b.*columns: {user: <column>}",
    ),
    (import_csv, {"x__csv": "user,item,time\n"}, "/x.csv", "the table is empty"),
    (import_csv, {"x__csv": ""}, "/x.csv", "x.csv: the file is empty"),
    (import_csv, {"x__csv": "user,item,time\n1,2\n"}, "/x.csv", "not a readable CSV"),
    (import_csv, {"x__csv": "user,item,time\n1,,3\n"}, "/x.csv", "1 of 1 rows have no item"),
    (
        import_csv,
        {"x__csv": "user,item,time\n1,2,noon\n"},
        "/x.csv",
        "column 'time' is string; wanted a timestamp",
    ),
    (import_csv, {}, "/gone.csv", "gone.csv: no such file"),
    (import_sequences, {"sequences__txt": ""}, "", "the file has no line"),
    (import_sequences, {"sequences__txt": "1\n2\n"}, "", "no line has an item"),
    (import_sequences, {"sequences__txt": "1 2\n1 3\n"}, "", "user 1 has more than one line"),
    (
        import_sequences,
        {"sequences__txt": "1 2 3\n2 4\n", "timestamps__txt": "1 5 6\n2 7 8\n"},
        "",
        "line 2 has user 2 and 2 times, wanted user 2 and 1 times",
    ),
    (
        import_sequences,
        {"sequences__txt": "1 2\n", "timestamps__txt": "1 x\n"},
        "",
        "'x' is not a whole number",
    ),
    (import_sequences, {"sequences__txt": "1 2\n", "item2attributes__json": "[1]"}, "", "not a JSON object"),
    (import_sequences, {}, "/gone.txt", "gone.txt: no such file"),
]


@pytest.mark.parametrize(("run", "texts", "path", "says"), BAD)
def test_bad_source_is_one_line_and_nothing_is_written(tmp_path, run, texts, path, says):
    src = _files(tmp_path / "src", **texts)
    with pytest.raises(DataError, match=says) as caught:
        run(f"{src}{path}", tmp_path / "out")
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "out").exists()


def test_csv_with_a_column_twice_says_which(tmp_path):
    src = _files(tmp_path / "s", x__csv="user,user,item,time\n1,1,2,3\n") / "x.csv"
    with pytest.raises(DataError, match=r"x.csv: columns user occur more than once"):
        import_csv(src, tmp_path / "out")


def test_csv_that_mixes_seconds_and_milliseconds_says_so(tmp_path):
    src = _files(tmp_path / "s", x__csv="user,item,ts\n1,a,1700000000\n1,b,1700000000000\n") / "x.csv"
    with pytest.raises(DataError, match=r"column 'ts': 1 of 2 values look like s and the others like ms"):
        import_csv(src, tmp_path / "out")


def test_csv_column_that_is_not_there_is_named(tmp_path):
    src = _files(tmp_path / "s", x__csv="uid,item,time\n1,2,3\n") / "x.csv"
    with pytest.raises(
        DataError, match="columns says user: uidd, which is not there; it has uid, item, time"
    ):
        import_csv(src, tmp_path / "out", columns={"user": "uidd"})


def test_failure_while_writing_leaves_the_earlier_tables(movielens, tmp_path, monkeypatch):
    dst = tmp_path / "out"
    import_movielens(movielens, dst)
    before = {p.name: p.read_bytes() for p in dst.iterdir()}
    write = pq.write_table

    def torn(table, path, **kwargs):
        if "items" in path.name:
            raise OSError("disk full")
        write(table, path, **kwargs)

    monkeypatch.setattr(pq, "write_table", torn)
    with pytest.raises(OSError, match="disk full"):
        import_movielens(movielens, dst)
    assert {p.name: p.read_bytes() for p in dst.iterdir()} == before


def test_formats_are_found_by_name():
    assert get_importer("movielens") is import_movielens
    assert get_importer("csv") is import_csv
    assert get_importer("sequences") is import_sequences
    with pytest.raises(ConfigError, match=r"there are movielens, csv, sequences\. Did you mean 'movielens'"):
        get_importer("movielen")


def test_categories_of_the_text_and_attributes_are_one_column_each_word_once(tmp_path):
    source = _files(
        tmp_path / "seq",
        sequences__txt="1 3 4 5 6\n2 4 3\n",
        item_text__tsv="item_id\ttext\tcategories\n3\tthree\ta|b|a\n4\tfour\t\n5\tfive\tc\n",
        item2attributes__json='{"3": ["z", "b", 7], "4": ["z"], "6": [1, 1]}',
    )
    import_sequences(source, tmp_path / "out")
    _, items = _both(tmp_path / "out")
    assert [(item["item_id"], item["categories"]) for item in items] == [
        (3, ["a", "b", "z", "7"]),
        (4, ["z"]),
        (5, ["c"]),
        (6, ["1"]),
    ]


def test_a_column_that_is_there_twice_and_a_file_in_another_encoding_are_named(tmp_path):
    twice = _files(
        tmp_path / "twice", sequences__txt="1 3\n", item_text__tsv="item_id\ttext\ttext\n3\tx\ty\n"
    )
    with pytest.raises(DataError, match=r"item_text\.tsv: columns text occur more than once"):
        import_sequences(twice, tmp_path / "out")
    (tmp_path / "utf16.csv").write_text("user,item,time\n1,2,3\n", encoding="utf-16")
    with pytest.raises(DataError, match="not UTF-8"):
        import_csv(tmp_path / "utf16.csv", tmp_path / "out")
