"""What a text file is: its content says, not its name."""

from __future__ import annotations

import gzip
import json

import pyarrow.parquet as pq
import pytest

from nonet.errors import DataError
from nonet.samples.importers.import_csv import import_csv
from nonet.samples.importers.import_movielens import import_movielens
from nonet.samples.importers.import_sequences import import_sequences
from nonet.samples.importers.text_form import detect_text_form, read_whole_text, split_lines

ROWS = [("u1", "7003", 1600000000), ("u1", "7004", 1600000050), ("u2", "7003", 1600000090)]
NAMES = ("user_id", "item_id", "timestamp")


def table(path, delimiter=",", names=NAMES, rows=ROWS, encoding="utf-8"):
    lines = ([delimiter.join(names)] if names else []) + [delimiter.join(map(str, row)) for row in rows]
    path.write_bytes(("\n".join(lines) + "\n").encode(encoding))
    return path


def imported(path, out, **options):
    import_csv(path, out, **options)
    read = pq.read_table(out / "interactions.parquet")
    return sorted(zip(*(read[name].to_pylist() for name in NAMES), strict=True))


EXPECTED = [("u1", 7003, 1600000000), ("u1", 7004, 1600000050), ("u2", 7003, 1600000090)]


@pytest.mark.parametrize("delimiter", [",", "\t", ";", "|", " "])
@pytest.mark.parametrize("name", ["log.csv", "log.dat", "log"])
def test_the_delimiter_follows_from_the_content(tmp_path, name, delimiter):
    assert imported(table(tmp_path / name, delimiter), tmp_path / "out") == EXPECTED


def test_json_lines_are_read_whatever_the_file_is_called(tmp_path):
    path = tmp_path / "log.csv"
    path.write_text("\n".join(json.dumps(dict(zip(NAMES, row, strict=True))) for row in ROWS))
    assert sorted(imported(path, tmp_path / "out")) == EXPECTED


def test_json_lines_whose_columns_mix_types_become_text(tmp_path):
    path = tmp_path / "log.jsonl"
    rows = [
        dict(zip(NAMES, row, strict=True)) | {"price": price}
        for row, price in zip(ROWS, (1.5, "from 10", None), strict=True)
    ]
    path.write_text("\n".join(map(json.dumps, rows)))
    import_csv(path, tmp_path / "out")
    assert pq.read_table(tmp_path / "out" / "interactions.parquet")["price"].to_pylist() == [
        "1.5",
        "from 10",
        None,
    ]


def test_a_file_that_is_compressed_is_read_whatever_its_name_says(tmp_path):
    path = table(tmp_path / "log.csv")
    path.write_bytes(gzip.compress(path.read_bytes()))
    assert imported(path, tmp_path / "out") == EXPECTED


def test_another_encoding_is_read_and_reported(tmp_path):
    notes: list[str] = []
    rows = [*ROWS, ("Zoë", "7004", 1600000099)]
    path = table(tmp_path / "log.csv", rows=rows, encoding="cp1252")
    assert ("Zoë", 7004, 1600000099) in imported(path, tmp_path / "out", notes=notes)
    assert notes == [f"{path} is not UTF-8; it is read as cp1252"]


def test_a_file_without_a_header_is_refused_and_read_by_the_numbers_of_its_columns(tmp_path):
    path = table(tmp_path / "clicks.dat", names=None)
    with pytest.raises(
        DataError, match="the file has no header: its first line is data, of 3 columns"
    ) as caught:
        import_csv(path, tmp_path / "out")
    assert "u1" not in str(caught.value)
    columns = {"user": "1", "item": "2", "time": "3"}
    assert imported(path, tmp_path / "out", columns=columns) == EXPECTED


def test_a_first_line_that_may_be_data_is_not_printed(tmp_path):
    path = table(tmp_path / "x.csv", names=None, rows=[("anna", "bread"), ("bert", "milk"), ("cleo", "eggs")])
    with pytest.raises(DataError, match="the first line does not look like names of columns") as caught:
        import_csv(path, tmp_path / "out")
    assert "anna" not in str(caught.value)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"PK\x03\x04xx", "a zip archive or an Excel file"),
        (b"<html></html>", "HTML or XML"),
        (b'[{"a": 1}]', "not JSON lines"),
        (b"1::2::5::978300760\n1::3::4::978300761\n", "separated by '::'"),
        (b"\x00\x01\x02\x03", "binary data"),
        (b"", "the file is empty"),
    ],
)
def test_what_is_no_table_is_one_line(tmp_path, content, says):
    (tmp_path / "x.csv").write_bytes(content)
    with pytest.raises(DataError, match=says):
        detect_text_form(tmp_path / "x.csv", "csv")


def test_lines_end_at_line_feeds_alone():
    assert split_lines("a\u2028b\x85c\r\nd") == ["a\u2028b\x85c", "d"]


def test_ids_that_are_missing_are_left_out_where_few_and_refused_where_many(tmp_path):
    rows = [("u1", str(item), 1600000000 + item) for item in range(300)]
    notes: list[str] = []
    few = table(tmp_path / "few.csv", rows=[*rows, ("NA", "5", 1600000001)])
    assert len(imported(few, tmp_path / "out", notes=notes)) == 300
    assert notes == [f"1 rows of {few} have no user_id and are left out"]
    many = table(tmp_path / "many.csv", rows=[*rows, *[("\\N", "5", 1600000001)] * 30])
    with pytest.raises(DataError, match=r"30 of 330 rows have no user_id: it is '\\\\N' there"):
        import_csv(many, tmp_path / "out")


def test_declared_lists_are_cut_at_blanks_and_titles_stay_whole(tmp_path):
    log = table(tmp_path / "a.inter", "\t", [f"{name}:token" for name in NAMES])
    items = tmp_path / "a.item"
    items.write_text(
        "item_id:token\tmovie_title:token_seq\tgenre:token_seq\n7003\tThe Film\tComedy Drama\n7004\tB\tDrama\n"
    )
    import_csv(log, tmp_path / "out", items=items)
    read = pq.read_table(tmp_path / "out" / "items.parquet")
    assert read["categories"].to_pylist() == [["Comedy", "Drama"], ["Drama"]]
    assert read["title"].to_pylist() == ["The Film", "B"]


def test_the_parts_of_a_folder_are_one_table(tmp_path):
    for number in range(2):
        table(
            tmp_path / "log" / f"part-{number}.csv"
            if (tmp_path / "log").mkdir(exist_ok=True) is None
            else tmp_path,
            rows=ROWS[number : number + 1],
        )
    (tmp_path / "log" / "_SUCCESS").write_text("")
    assert imported(tmp_path / "log", tmp_path / "out") == EXPECTED[:2]


def test_the_finest_complete_column_of_times_wins_and_is_reported(tmp_path):
    notes: list[str] = []
    rows = [("u1", "1", "2026-01-02", 1767312000 + 60 * n) for n in range(5)]
    path = table(tmp_path / "x.csv", names=("user_id", "item_id", "date", "ts"), rows=rows)
    import_csv(path, tmp_path / "out", notes=notes)
    times = pq.read_table(tmp_path / "out" / "interactions.parquet")["timestamp"].to_pylist()
    assert times == [row[3] for row in rows]
    assert notes == ["time = ts, the finest complete one of ts, date"]


def test_the_item_of_a_review_is_the_one_that_the_table_of_items_has(tmp_path):
    log = table(
        tmp_path / "r.csv",
        names=("asin", "productid", "user_id", "timestamp"),
        rows=[("v1", "p1", "u1", 1600000000)],
    )
    items = table(tmp_path / "i.csv", names=("asin", "title"), rows=[("v1", "One")])
    import_csv(log, tmp_path / "out", items=items)
    assert pq.read_table(tmp_path / "out" / "interactions.parquet")["item_id"].to_pylist() == ["v1"]


@pytest.mark.parametrize("first_line", ["sep=;", '"sep=;"', "SEP=;", "sep=;;;", "\ufeffsep=;"])
@pytest.mark.parametrize("names", [NAMES, None])
def test_the_first_line_of_excel_names_the_delimiter_and_is_no_row(tmp_path, first_line, names):
    path = table(tmp_path / "log.csv", ";", names)
    path.write_text(f"{first_line}\r\n{path.read_text()}")
    columns = None if names else {"user": "1", "item": "2", "time": "3"}
    assert imported(path, tmp_path / "out", columns=columns) == EXPECTED
    path.write_text(f"{first_line}\n")
    with pytest.raises(DataError, match="the file is empty, apart from its line sep="):
        detect_text_form(path, "csv")


def test_numbers_with_a_decimal_comma_are_numbers_and_their_column_is_named(tmp_path):
    rows = [
        ("u1", "7003", 1600000000, "3,5", "1.234,5", "1,2,3", "12 cm", "7,5"),
        ("u1", "7004", 1600000050, "NA", "0,5", "4", "1,5", "8"),
        ("u2", "7003", 1600000090, "-4", "12", "5,6", "2,5", "9"),
    ]
    names = (*NAMES, "rating", "price", "tags", "size", "weight")
    notes: list[str] = []
    path = table(tmp_path / "log.csv", ";", names, rows)
    import_csv(path, tmp_path / "out", notes=notes)
    read = pq.read_table(tmp_path / "out" / "interactions.parquet").sort_by("timestamp")
    assert read["rating"].to_pylist() == [3.5, None, -4.0]
    assert read["price"].to_pylist() == [1234.5, 0.5, 12.0]
    assert read["weight"].to_pylist() == [7.5, 8.0, 9.0]
    assert read["tags"].to_pylist() == ["1,2,3", "4", "5,6"]
    assert read["size"].to_pylist() == ["12 cm", "1,5", "2,5"]
    assert notes == [f"{path}: rating, price, weight is read as numbers with a decimal comma"]


def read_column(tmp_path, parts, name="x"):
    """Import parts of a table with a column of these texts; return the column's values and the notes about it."""
    notes: list[str] = []
    folder = tmp_path / "log"
    folder.mkdir()
    for part, texts in enumerate(parts):
        rows = [(f"u{row}", 7, 1600000000 + 100 * part + row, text) for row, text in enumerate(texts)]
        table(folder / f"part-{part}.csv", ";", (*NAMES, name), rows)
    import_csv(folder if len(parts) > 1 else folder / "part-0.csv", tmp_path / "out", notes=notes)
    read = pq.read_table(tmp_path / "out" / "interactions.parquet").sort_by("timestamp")
    return read[name].to_pylist(), [note for note in notes if "comma" in note]


@pytest.mark.parametrize(
    ("texts", "reason"),
    [
        (["12,5", "7,13", "12,50"], "'12,5' and '12,50' would be the same number"),
        (["1,1", "1,10", "2"], "'1,1' and '1,10' would be the same number"),
        (["1", "1,1", "1,0"], "'1' and '1,0' would be the same number"),
        (["12,5", "7,13", "3,4"], "'12,5' and the others may be pairs of integers"),
        (["1", "1,10", "1,2"], "'1,10' ends with a zero that others lack"),
        (["007", "1,5", "2,5"], "'007' has a leading zero"),
        (["01,5", "1,7"], "'01,5' has a leading zero"),
        (["0.123", "1,5"], "'0.123' has a leading zero"),
        (["12345678901234567", "1,5"], "'12345678901234567' has more than 15 digits"),
        (["1234567890123,456", "1,5"], "'1234567890123,456' has more than 15 digits"),
        (["1.234", "1234", "1,5"], "'1.234' and '1234' would be the same number"),
    ],
)
def test_texts_that_would_lose_something_as_numbers_stay_texts_with_a_note(tmp_path, texts, reason):
    values, notes = read_column(tmp_path, [texts])
    assert values == texts
    assert len(notes) == 1
    assert f"column x is read as text: it looks like numbers with a decimal comma, but {reason};" in notes[0]


@pytest.mark.parametrize(
    ("texts", "numbers"),
    [
        (["12,50", "7,13", "12,05"], [12.5, 7.13, 12.05]),
        (["1,01", "2,10", "3"], [1.01, 2.1, 3.0]),
        (["0,5", "0,25", "1", " 0,5"], [0.5, 0.25, 1.0, 0.5]),
        (["123456789012345", "0,5"], [123456789012345.0, 0.5]),
        (["0,000000000000001", "0,5", "-2"], [1e-15, 0.5, -2.0]),
        (["3,5", "NA", "3,5"], [3.5, None, 3.5]),
    ],
)
def test_numbers_with_a_decimal_comma_that_keep_their_text_are_converted(tmp_path, texts, numbers):
    values, [note] = read_column(tmp_path, [texts])
    assert values == numbers
    assert note.endswith("x is read as numbers with a decimal comma")


def test_a_rating_is_a_number_although_its_texts_may_be_pairs(tmp_path):
    assert read_column(tmp_path, [["4,5", "3,25", "4,50"]], "rating")[0] == [4.5, 3.25, 4.5]


@pytest.mark.parametrize(
    ("parts", "values"),
    [
        ([["1.234", "2.500"], ["1.234,5"]], [1234.0, 2500.0, 1234.5]),
        ([["3", "4"], ["1,5"], ["NA"]], [3.0, 4.0, 1.5, None]),
        ([["12,5", "3"], ["12,50"]], ["12,5", "3", "12,50"]),
        ([["1.5", "3"], ["12,5"]], ["1.5", "3", "12,5"]),
        ([["1,5", "3"], ["good"]], ["1,5", "3", "good"]),
    ],
)
def test_the_parts_of_a_table_agree_on_the_decimal_comma(tmp_path, parts, values):
    found, notes = read_column(tmp_path, parts)
    assert found == values
    assert all("part-0.csv and the other parts: " in note for note in notes)


def test_a_part_with_commas_between_columns_keeps_its_decimal_points(tmp_path):
    folder = tmp_path / "log"
    folder.mkdir()
    table(folder / "part-0.csv", ",", (*NAMES, "x"), [("u1", 7, 1600000000, "1.234")])
    rows = [("u1", 7, 1600000050, "1.234,5"), ("u2", 7, 1600000090, "2")]
    table(folder / "part-1.csv", ";", (*NAMES, "x"), rows)
    import_csv(folder, tmp_path / "out")
    read = pq.read_table(tmp_path / "out" / "interactions.parquet").sort_by("timestamp")
    assert read["x"].to_pylist() == [1.234, 1234.5, 2.0]


def test_texts_of_sequences_may_have_decimal_commas(tmp_path):
    (tmp_path / "sequences.txt").write_text("1 7 8 9\n")
    rows = [("7", "a", "1,5", "12,5"), ("8", "b", "2", "12,50"), ("9", "c", "0,5", "7")]
    table(tmp_path / "item_text.tsv", "\t", ("item_id", "text", "price", "code"), rows)
    import_sequences(tmp_path, tmp_path / "out")
    items = pq.read_table(tmp_path / "out" / "items.parquet").sort_by("item_id")
    assert items["price"].to_pylist() == [1.5, 2.0, 0.5]
    assert items["code"].to_pylist() == ["12,5", "12,50", "7"]


def test_a_column_of_decimal_commas_that_is_there_twice_is_named(tmp_path):
    path = table(tmp_path / "log.csv", ";", (*NAMES, "x", "x"), [(*row, "1,5", "2,5") for row in ROWS])
    with pytest.raises(DataError, match="columns x occur more than once"):
        import_csv(path, tmp_path / "out")


def test_ids_keep_their_commas_and_a_comma_that_may_separate_thousands_is_told(tmp_path):
    rows = [("u1", "7,5", 1600000000, "1,234"), ("u2", "8,5", 1600000050, "12")]
    notes: list[str] = []
    path = table(tmp_path / "log.csv", "\t", (*NAMES, "price"), rows)
    import_csv(path, tmp_path / "out", notes=notes)
    read = pq.read_table(tmp_path / "out" / "interactions.parquet").sort_by("timestamp")
    assert (read["item_id"].to_pylist(), read["price"].to_pylist()) == (["7,5", "8,5"], ["1,234", "12"])
    assert [f"{path}: column price is read as text: '1,234' may have a comma" in note for note in notes] == [
        True
    ]


def test_a_rating_that_is_no_number_is_shown_with_its_row(tmp_path):
    rows = [("u1", "7003", 1600000000, "4"), ("u1", "7004", 1600000050, '"3,5"')]
    path = table(tmp_path / "log.csv", names=(*NAMES, "rating"), rows=rows)
    with pytest.raises(
        DataError, match=r"wanted numbers; row 1 has '3,5', so write a point for the decimal comma"
    ):
        import_csv(path, tmp_path / "out")
    path.write_text(path.read_text().replace('"3,5"', "good"))
    with pytest.raises(DataError, match=r"wanted numbers; row 1 has 'good'\."):
        import_csv(path, tmp_path / "out")


def test_a_row_of_another_width_is_shown_with_its_number(tmp_path):
    path = table(tmp_path / "log.csv", rows=[*ROWS * 20, ("u3", "7003", 5, "more")])
    with pytest.raises(DataError, match=r"Row #62: Expected 3 columns, got 4: u3,7003,5,more"):
        import_csv(path, tmp_path / "out")


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-16-be"])
def test_utf_16_is_named_with_and_without_its_mark(tmp_path, encoding):
    path = table(tmp_path / "log.csv", encoding=encoding)
    for read in (lambda: detect_text_form(path, "csv"), lambda: read_whole_text(path, "csv")):
        with pytest.raises(DataError, match="UTF-16, not UTF-8; save the file as UTF-8 text"):
            read()


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "cp1252", "latin-1"])
def test_every_reader_of_text_finds_the_encoding(tmp_path, encoding):
    title = "Caf\x81é" if encoding == "latin-1" else "Café"  # cp1252 has no byte 0x81
    long = "x" * 70_000  # longer than the beginning of a file by which its format is detected
    folder = tmp_path / "in"
    texts = {
        "ml/ratings.dat": "1::7::5::978300760\n",
        "ml/movies.dat": f"7::{long} {title} (1994)::Comedy\n",
        "ml100/u.data": "1\t7\t3\t881250949\n",
        "ml100/u.item": f"7|{title}|01-Jan-1995||http://x|{'|'.join('0' * 19)}\n",
        "ml20/ratings.csv": "userId,movieId,rating,timestamp\n1,7,2.5,1260759144\n",
        "ml20/movies.csv": f"movieId,title,genres\n7,{long} {title},Drama\n",
        "seq/sequences.txt": "1 7 8\n",
        "seq/item_text.tsv": f"item_id\ttext\n7\t{title}\n",
        "seq/item2attributes.json": json.dumps({"7": [title]}, ensure_ascii=False),
        "log.csv": f"user_id,item_id,timestamp,title\n{'u,7,1600000000,x' + chr(10)}u,8,1600000001,{long} {title}\n",
        "log.jsonl": json.dumps(
            {"user_id": "u", "item_id": 7, "timestamp": 1600000000, "title": title}, ensure_ascii=False
        ),
    }
    for name, text in texts.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(text.encode(encoding))
    for name, read in (("ml", import_movielens), ("ml100", import_movielens), ("ml20", import_movielens)):
        read(folder / name, tmp_path / name)
    import_sequences(folder / "seq", tmp_path / "seq")
    import_csv(folder / "log.jsonl", tmp_path / "json")
    import_csv(folder / "log.csv", tmp_path / "csv")
    assert title in pq.read_table(tmp_path / "csv" / "interactions.parquet")["title"][1].as_py()
    items = {
        name: pq.read_table(tmp_path / name / "items.parquet") for name in ("ml", "ml100", "ml20", "seq")
    }
    assert [title in table["title"][0].as_py() for table in items.values()] == [True] * 4
    assert items["seq"]["categories"].to_pylist() == [[title], []]
    users = [pq.read_table(tmp_path / name / "interactions.parquet")["user_id"][0].as_py() for name in items]
    assert users == [1, 1, 1, 1]
    log = pq.read_table(tmp_path / "json" / "interactions.parquet")
    assert (log["title"].to_pylist(), log["item_id"].to_pylist()) == ([title], [7])
