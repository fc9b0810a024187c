"""Imports MovieLens folders as GroupLens publishes them: CSV (latest, 20M and larger), 1M and 10M (.dat files) and 100K (u.data).

Movies without ratings stay in the items table. The README of the folder, which has the licence, is copied beside the tables. The
readers return a table of ratings with the columns of `write_tables`, and a table of movies.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import pyarrow as pa

from nonet.errors import DataError
from nonet.samples.importers.importers import (
    Counts,
    PathLike,
    parse_integers,
    parse_years,
    read_csv,
    split_genres,
    write_tables,
)
from nonet.samples.importers.text_form import read_whole_text, split_lines

_RATINGS = pa.schema(
    {"user_id": pa.int64(), "item_id": pa.int64(), "rating": pa.float32(), "timestamp": pa.int64()}
)
_GENRES_100K = [
    "unknown",
    "Action",
    "Adventure",
    "Animation",
    "Children",
    "Comedy",
    "Crime",
    "Documentary",
    "Drama",
    "Fantasy",
    "Film-Noir",
    "Horror",
    "Musical",
    "Mystery",
    "Romance",
    "Sci-Fi",
    "Thriller",
    "War",
    "Western",
]


def import_movielens(src: PathLike, dst: PathLike) -> Counts:
    """Import a MovieLens folder to dst/interactions.parquet and dst/items.parquet."""
    folder = Path(src)
    readers = {"ratings.csv": _read_csv_folder, "ratings.dat": _read_dat_folder, "u.data": _read_100k_folder}
    ratings_file = next((name for name in readers if (folder / name).is_file()), None)
    if ratings_file is None:
        raise DataError(
            f"movielens {src}: this folder has none of {', '.join(readers)}; pass the path of the unpacked MovieLens folder."
        )
    ratings, movies = readers[ratings_file](folder)
    counts = write_tables(ratings, movies, dst, f"movielens {src}")
    for readme in ("README.txt", "README.html", "README"):
        if (folder / readme).is_file() and folder.resolve() != Path(dst).resolve():
            shutil.copyfile(folder / readme, Path(dst) / readme)
    return counts


def _read_csv_folder(folder: Path) -> tuple[pa.Table, pa.Table]:
    """Read the CSV sets (latest, 20M and larger)."""
    types = {"userId": pa.int64(), "movieId": pa.int64(), "rating": pa.float32(), "timestamp": pa.int64()}
    ratings = _select_columns(
        read_csv(folder / "ratings.csv", "movielens", types=types), list(types), folder / "ratings.csv"
    )
    types = {"movieId": pa.int64(), "title": pa.string(), "genres": pa.string()}
    movies = _select_columns(
        read_csv(folder / "movies.csv", "movielens", types=types), list(types), folder / "movies.csv"
    )
    ratings = ratings.rename_columns(["user_id", "item_id", "rating", "timestamp"])
    return _select_ratings(ratings), _make_movies(
        movies["movieId"], movies["title"], split_genres(movies["genres"])
    )


def _read_dat_folder(folder: Path) -> tuple[pa.Table, pa.Table]:
    """Read the 1M or 10M set."""
    ratings = _split_lines(folder / "ratings.dat", "::", 4)
    movies = _split_lines(folder / "movies.dat", "::", 3)
    genres = split_genres(pa.chunked_array([pa.array(movies[2], pa.string())]))
    return _select_ratings(_make_ratings(ratings, folder / "ratings.dat")), _make_movies(
        _parse_ids(movies[0], folder), movies[1], genres
    )


def _read_100k_folder(folder: Path) -> tuple[pa.Table, pa.Table]:
    """Read the 100K set."""
    user, item, rating, time = _split_lines(folder / "u.data", "\t", 4)
    # Columns of u.item: id, title, two dates and a URL, then one flag per genre.
    columns = _split_lines(folder / "u.item", "|", 5 + len(_GENRES_100K))
    flags_by_movie = zip(*columns[5:], strict=True)
    genres = [
        [name for name, flag in zip(_GENRES_100K, flags, strict=True) if flag == "1"]
        for flags in flags_by_movie
    ]
    genres = [[name for name in names if name != "unknown"] for names in genres]
    ratings = _make_ratings([user, item, rating, time], folder / "u.data")
    return _select_ratings(ratings), _make_movies(
        _parse_ids(columns[0], folder), columns[1], pa.array(genres, pa.list_(pa.string()))
    )


def _select_ratings(table: pa.Table) -> pa.Table:
    return table.select(["user_id", "item_id", "timestamp", "rating"])


def _make_movies(item_id, title, categories: pa.Array) -> pa.Table:
    """Build the table of movies, with the year from the title."""
    table = pa.table({"item_id": item_id, "title": title, "categories": categories})
    return table.append_column("year", parse_years(table["title"]))


def _make_ratings(columns: list[list[str]], path: Path) -> pa.Table:
    """Build the table of ratings from four columns of text."""
    names = ("user_id", "item_id", "rating", "timestamp")
    arrays = {
        name: pa.array(tokens, pa.string())
        if name == "rating"
        else parse_integers(tokens, f"movielens {path}")
        for name, tokens in zip(names, columns, strict=True)
    }
    try:
        return pa.table(arrays).cast(_RATINGS)
    except pa.ArrowException as error:
        raise DataError(f"movielens {path}: a rating is not a number: {str(error).splitlines()[0]}") from None


def _parse_ids(tokens: list[str], folder: Path) -> pa.Array:
    return pa.array(parse_integers(tokens, f"movielens {folder}"))


def _select_columns(table: pa.Table, names: list[str], path: Path) -> pa.Table:
    """Select columns of a table; raise DataError that names the file if one is missing."""
    for name in names:
        if name not in table.column_names:
            raise DataError(f"movielens {path}: no column {name!r}; it has {', '.join(table.column_names)}.")
    return table.select(names)


def _split_lines(path: Path, separator: str, field_count: int) -> list[list[str]]:
    """Read a file of the older sets, whose lines have `field_count` fields, and return its columns as text."""
    text = read_whole_text(path, "movielens")
    rows = [line.split(separator) for line in split_lines(text) if line]
    bad_line = next((number for number, row in enumerate(rows, 1) if len(row) != field_count), None)
    if bad_line:
        raise DataError(
            f"movielens {path}: line {bad_line} has {len(rows[bad_line - 1])} fields; it must have {field_count}."
        )
    return [list(column) for column in zip(*rows, strict=True)] if rows else [[] for _ in range(field_count)]
