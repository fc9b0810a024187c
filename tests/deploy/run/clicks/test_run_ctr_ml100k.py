"""The shipped ctr scenario on MovieLens-100K with its user features: NONET_ML100K names the folder of RecBole's atomic files."""

from __future__ import annotations

import io
import os
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq
import pytest

from nonet.deploy.run import api
from nonet.deploy.run.panel import Panel

FOLDER = os.environ.get("NONET_ML100K", "")


def read(kind):
    options = pa.csv.ParseOptions(delimiter="\t", quote_char=False)
    table = pa.csv.read_csv(Path(FOLDER) / f"ml-100k.{kind}", parse_options=options)
    return {name.split(":")[0]: table[name].to_pylist() for name in table.column_names}


def write_tables(folder):
    """Ratings with the rater's age, gender and occupation as numbers; films with year and genres."""
    rating, film, user = read("inter"), read("item"), read("user")
    place = {number: row for row, number in enumerate(user["user_id"])}
    who = [place[number] for number in rating["user_id"]]
    codes = {name: {v: n for n, v in enumerate(sorted(set(user[name])))} for name in ("gender", "occupation")}
    columns = {
        "age": [int(user["age"][row]) // 5 for row in who],
        "gender": [codes["gender"][user["gender"][row]] for row in who],
        "occupation": [codes["occupation"][user["occupation"][row]] for row in who],
    }
    table = {
        "user_id": rating["user_id"],
        "item_id": rating["item_id"],
        "timestamp": [int(at) for at in rating["timestamp"]],
        "rating": np.asarray(rating["rating"], np.float32),
        **columns,
    }
    pq.write_table(pa.table(table), folder / "interactions.parquet")
    titles = [
        f"{title} ({year})" for title, year in zip(film["movie_title"], film["release_year"], strict=True)
    ]
    genres = [str(genres).split(" ") for genres in film["class"]]
    films = pa.table({"item_id": film["item_id"], "title": titles, "categories": genres})
    pq.write_table(films, folder / "items.parquet")


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.skipif(not FOLDER, reason="NONET_ML100K does not name a folder with MovieLens-100K")
def test_the_ctr_scenario_holds_on_movielens_100k_with_user_features(ray_local, tmp_path):
    write_tables(tmp_path)
    changes = [
        f"data.interactions={tmp_path / 'interactions.parquet'}",
        f"data.items={tmp_path / 'items.parquet'}",
        "sparse.tables.person={features: [age, gender, occupation]}",
    ]
    for seed in os.environ.get("NONET_ML100K_SEEDS", "7").split(","):
        scenario = api.scenario("ctr", [*changes, f"seed={seed}"])
        finished = api.run(scenario, run_dir=tmp_path / f"run{seed}", panel=Panel(io.StringIO(), live=False))
        report = finished.report
        scores = report["baselines"] | report["stages"]
        print(seed, scores, report["paired"])
        assert scores["train"]["auc"] > scores["popularity"]["auc"] + 0.03
        assert report["paired"]["train-logistic_regression"]["auc"]["high"] > -0.005
