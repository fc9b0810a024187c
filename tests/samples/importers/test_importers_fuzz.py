"""Damaged files of every format: an importer writes valid tables or raises one readable error, nothing else."""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path

import pytest

from nonet.errors import ConfigError
from nonet.samples.importers.formats import get_importer
from nonet.samples.tables.tables import read_tables

GENRES = "|".join("1" if i in (3, 5) else "0" for i in range(19))
FILES = {
    "csv": {
        "interactions.csv": "user_id,item_id,timestamp,rating,event\n1,7,100,4.5,view\n1,9,200,3,buy\n2,7,300,1,view\n",
        "items.csv": "item_id,title,categories,price\n7,One,a|b,1.5\n9,Two,,2.5\n",
    },
    "movielens csv": {
        "ratings.csv": "userId,movieId,rating,timestamp\n1,31,2.5,1260759144\n1,7,3.0,1260759179\n2,7,4.5,835355493\n",
        "movies.csv": 'movieId,title,genres\n7,"Usual Suspects, The (1995)",Crime|Thriller\n31,Plain,(no genres listed)\n',
    },
    "movielens 1m": {
        "ratings.dat": "1::7::5::978300760\n2::31::3::978302109\n",
        "movies.dat": "7::Story (1994)::Comedy|Drama\n31::Other (2000)::War\n",
    },
    "movielens 100k": {
        "u.data": "196\t1\t3\t881250949\n186\t1\t4\t881250950\n",
        "u.item": f"1|Toy Story (1995)|01-Jan-1995||http://x|{GENRES}\n",
    },
    "sequences": {
        "sequences.txt": "u1 3 4 5\nu2 4 3\nu3 5\n",
        "timestamps.txt": "u1 10 20 30\nu2 5 -1\nu3 7\n",
        "item_text.tsv": "item_id\ttext\tcategories\n3\tthree\ta|b\n4\tfour\t\n5\tfive\tc\n",
        "item2attributes.json": json.dumps({"3": ["b", "z"], "4": [1, 2], "5": []}),
    },
}
# fmt: off
WORDS = [
    "", " ", "nan", "NaN", "inf", "-inf", "-1", "0", "1e400", "9" * 18, "9" * 19, "9" * 40, "-" + "9" * 30, "007", "1.5", "1e3",
    "\u0663", "\u00e9", "\u65e5\u672c", "\U0001f600", "a|b", "|", '"', '"unclosed', "'", ",", "\t", ";", "::", "\x00", "\ufeff",
    "null", "None", "true", "{}", "[]", "a\rb", "\u2028", "x" * 5000, "2026-11-23", "2026-11-23T00:00:00Z", "1700000000000",
    "1700000000000000000",
]
KINDS = [
    "bom", "crlf", "cr", "utf16", "latin", "binary", "empty", "blank", "cut", "word", "drop_cell", "add_cell", "drop_line",
    "twice_line", "twice_cell", "swap", "no_header", "only_header", "insert", "mark", "big",
]
# fmt: on


def damaged(draw: random.Random, content: bytes) -> bytes:
    """One damage to a file's bytes."""
    text = content.decode("utf-8", "replace")
    lines = text.splitlines(keepends=True) or [""]
    at = draw.randrange(len(lines))
    marks = [mark for mark in (",", "\t", "::", "|", " ", '"') if mark in lines[at]] or [","]
    mark = draw.choice(marks)
    cells = lines[at].rstrip("\n").split(mark)
    kind = draw.choice(KINDS)
    if kind == "bom":
        return b"\xef\xbb\xbf" + content
    if kind in ("crlf", "cr"):
        return content.replace(b"\n", b"\r\n" if kind == "crlf" else b"\r")
    if kind == "utf16":
        return text.encode("utf-16")
    if kind == "latin":
        return content.replace(b"o", b"\xf3")
    if kind == "binary":
        return draw.randbytes(draw.choice([1, 30, 3000]))
    if kind in ("empty", "blank"):
        return b"" if kind == "empty" else b"\n\n \n"
    if kind == "cut":
        return content[: draw.randrange(len(content) + 1)]
    if kind == "insert":
        where = draw.randrange(len(content) + 1)
        return content[:where] + draw.choice(WORDS).encode() + content[where:]
    if kind == "no_header":
        return "".join(lines[1:]).encode()
    if kind == "only_header":
        return lines[0].encode()
    if kind == "drop_line":
        return "".join(lines[:at] + lines[at + 1 :]).encode()
    if kind == "twice_line":
        return "".join([*lines, lines[at]]).encode()
    if kind == "mark":
        return text.replace(mark, draw.choice([",", ";", "\t", "|", " ", "::"])).encode()
    if kind == "big":
        return (text + lines[-1] * 200).encode()
    cell = draw.randrange(len(cells))
    if kind == "word":
        cells[cell] = draw.choice(WORDS)
    elif kind == "drop_cell":
        del cells[cell]
    elif kind == "add_cell":
        cells.insert(cell, draw.choice(WORDS))
    elif kind == "twice_cell":
        cells.insert(cell, cells[cell])
    else:
        draw.shuffle(cells)
    lines[at] = mark.join(cells) + "\n"
    return "".join(lines).encode()


def write_damaged(draw: random.Random, files: dict[str, str], folder: Path) -> None:
    contents = {name: text.encode() for name, text in files.items()}
    for _ in range(draw.choice([1, 1, 1, 2, 3])):
        name = draw.choice(sorted(contents))
        contents[name] = damaged(draw, contents[name])
    folder.mkdir()
    odd = draw.choice(["", "", "", "", "", "", "", "gone", "folder"])
    name = draw.choice(sorted(contents))
    for each, content in contents.items():
        if each != name or not odd:
            (folder / each).write_bytes(content)
        elif odd == "folder":
            (folder / each).mkdir()


def check(form: str, source: Path, target: Path) -> bool:
    """Whether the import gave tables, which are then valid; any error that is not for the caller is raised."""
    try:
        counts = get_importer(form.split()[0])(source, target)
    except ConfigError:
        assert not target.exists() or not list(target.glob("*.parquet")), (
            "an error leaves nothing half-written"
        )
        return False
    log, items = read_tables(target / "interactions.parquet", target / "items.parquet")
    assert items is not None
    assert (len(log), len(items)) == (counts["events"], counts["items"])
    assert len(set(items.column_names)) == len(items.column_names)
    return True


@pytest.mark.parametrize("form", FILES)
def test_an_importer_gives_valid_tables_or_a_readable_error(form, tmp_path):
    told = 0
    for seed in range(150):
        source, target = tmp_path / "in", tmp_path / "out"
        write_damaged(random.Random(f"{form} {seed}"), FILES[form], source)
        try:
            told += check(form, source, target)
        except Exception as error:
            raise AssertionError(f"seed {seed}: {type(error).__name__}: {error}") from error
        shutil.rmtree(source)
        shutil.rmtree(target, ignore_errors=True)
    assert 10 < told < 140, "both happen"


@pytest.mark.parametrize("form", FILES)
def test_undamaged_files_are_taken(form, tmp_path):
    (tmp_path / "in").mkdir()
    for name, text in FILES[form].items():
        (tmp_path / "in" / name).write_text(text)
    assert check(form, tmp_path / "in", tmp_path / "out")


@pytest.mark.parametrize("form", ["csv", "movielens", "sequences"])
def test_a_folder_or_a_missing_path_where_a_file_is_wanted_is_an_error(form, tmp_path):
    (tmp_path / "empty").mkdir()
    for source in (tmp_path / "empty", tmp_path / "gone", tmp_path):
        assert not check(form, source, tmp_path / "out")
