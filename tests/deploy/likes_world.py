"""A small click model's world: users of two kinds who like items of their own kind; and a finished run without Ray."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from nonet import yaml
from nonet.background import seal_files
from nonet.controller.record.checkpoint import Checkpoints, Manifest
from nonet.controller.record.run_folder import RunFolder
from nonet.controller.scenario import load_scenario
from nonet.controller.setup import make_data_setup, make_run_setup
from nonet.controller.setup.worker_setup import make_stage_setups
from nonet.models.clicks.model import ClickModel
from nonet.models.clicks.scorer import ClickRequest, ClickScorer, convert_values
from nonet.random import rng
from nonet.samples.stores.packed import PackedStore
from nonet.types import Jagged, Rollouts
from nonet.workers.roles.click.data import ClickData
from nonet.workers.roles.click.evaluator import ClickEvaluator
from nonet.workers.roles.click.tokenizer import ClickTokeniser
from nonet.workers.roles.click.trainer import ClickTrainer
from nonet.workers.roles.embedding import EmbeddingShard
from nonet.workers.runtime.worker import Place

HOUR = 3600  # seconds
SCENARIO = """
name: likes
seed: 5
data:
  interactions: interactions.parquet
  items: items.parquet
  history: 8
  split: {use: leave_last_out, test: 4, valid: 2}
model: {use: deepfm, hidden: [16], dropout: 0.1}
sparse:
  defaults: {dim: 8, optimizer: adagrad, lr: 0.1}
  tables: {user: {}, item: {features: [item, liked]}, disliked: {}, categories: {}, moment: {features: [hour, age]}}
stages:
  train: {epochs: 4, batch: {tokens: 128}, lr: 3e-3, target: "rating >= 4"}
evaluate: {metrics: [auc, log_loss]}
checkpoint: {every: 20}
"""


def make_likes(folder, users=80, items=40, events=30):
    """Users of two kinds like items of their own kind: nothing that a sum of a user's and an item's weight can tell."""
    draw = rng(1, "likes")
    item = np.stack([draw.permutation(items)[:events] for _ in range(users)])
    kind_U, kind_I = np.arange(users) % 2, np.arange(items) % 2
    liked = (kind_U[:, None] == kind_I[item]) ^ (draw.random(item.shape) < 0.1)
    table = {
        "user_id": np.repeat(np.arange(100, 100 + users), events),
        "item_id": item.ravel() + 1000,
        "timestamp": np.tile(np.arange(events) * 3600, users),
        "rating": np.where(liked, 5.0, 2.0).astype(np.float32).ravel(),
        "age": np.repeat(np.arange(users) // 10, events).astype(np.float32),
    }
    pq.write_table(pa.table(table), folder / "interactions.parquet")
    names = [f"item {i}" for i in range(items)]
    every = {"item_id": np.arange(1000, 1000 + items), "title": names, "categories": [["a"]] * items}
    pq.write_table(pa.table(every), folder / "items.parquet")
    (folder / "likes.yaml").write_text(SCENARIO)
    return folder


def make_click_run(
    folder, *, steps=None, scenario=None, name="clicks", baselines=("popularity", "logistic_regression")
):
    """Train the click model of a scenario (by default the likes of `make_likes`) and evaluate it; return its folder."""
    if scenario is None:
        scenario = make_likes(folder) / "likes.yaml"
    options, beside = load_scenario(scenario)
    run = RunFolder(folder / name)
    run.path.mkdir()
    shutil.copyfile(scenario, run.scenario)
    facts = ClickTokeniser().prepare(make_data_setup(options, beside), str(run.path))
    run.write_json("results/tokenise.json", facts)
    setup, folders = make_run_setup(options), run.find_artifacts()
    stage = make_stage_setups(options, facts["data"]["users"], facts["data"]["trained_events"])["train"]
    shard, trainer = EmbeddingShard(setup), ClickTrainer(setup)
    trainer.place = Place(role="trainer", peers={"embedding": shard})
    trainer.open(folders)
    trainer.begin(stage)
    steps = steps or stage.steps
    trainer.train(stage, 0, steps)
    checkpoints = Checkpoints(run.checkpoints)
    staging = checkpoints.create_staging_dir(steps)
    trainer.save(str(staging))
    shard.save(str(staging))
    files = seal_files(staging, [path for path in staging.rglob("*") if path.is_file()])
    manifest = Manifest("run", steps, "train", steps, True, 1, "s", {}, {}, 0)
    checkpoint = checkpoints.complete(staging, manifest, files)
    evaluator = ClickEvaluator(setup, options.evaluate)
    evaluator.open(folders, str(run.results))
    subjects = {name: evaluator.evaluate_baseline(name) for name in baselines}
    subjects["train"] = evaluator.evaluate("train", str(checkpoint))
    scores = {name: result["detail"]["test"]["exhaustive"]["all"] for name, result in subjects.items()}
    stages = {"train": scores.pop("train")}
    run.write_json("report.json", {"name": options.name, "baselines": scores, "stages": stages})
    return run


def add_columns(folder):
    """Give the items of `make_likes` a brand and a price, and each item's deal a new value every 5 hours in a store."""
    items = pq.read_table(folder / "items.parquet")
    count = len(items)
    items = items.append_column("brand", pa.array([f"brand {i % 7}" for i in range(count)]))
    items = items.append_column("price", pa.array([float(i % 5) if i % 9 else None for i in range(count)]))
    pq.write_table(items, folder / "items.parquet")
    store = PackedStore.create(
        folder / "deals",
        pa.schema([("deal", pa.int64()), ("discount", pa.float64())]),
        key=pa.int64(),
        versions=True,
    )
    item, time = np.meshgrid(np.arange(1000, 1000 + count), np.arange(0, 40, 5) * HOUR)
    store.put(
        item.ravel(),
        pa.table({"deal": time.ravel() // HOUR, "discount": time.ravel() / HOUR + 0.25}),
        time.ravel(),
    )
    store.close()


def change_scenario(folder, **sections):
    """Write the scenario of `make_likes` with other values in some sections, and return its path."""
    scenario = yaml.read(folder / "likes.yaml")
    for name, values in sections.items():
        scenario[name] |= values
    (folder / "changed.yaml").write_text(json.dumps(scenario))
    return folder / "changed.yaml"


def open_click_data(run):
    """Open the artifacts of a click model's run as its roles do."""
    return ClickData(make_run_setup(load_scenario(run.scenario)[0]), run.find_artifacts())


def load_scorer(folder):
    """Load the scorer of a checkpoint."""
    return ClickScorer(ClickModel(Path(folder)))


def make_request(scorer, user, items, *, time=None, history=(), values=None):
    """Make a request from ids, with past events {"item", "time", "label"} whose label may be missing."""
    known = scorer.model.known
    index = {str(item): position for position, item in enumerate(known.item_id.tolist())}
    labels = [event.get("label") for event in history]
    return ClickRequest(
        item=np.array([index.get(str(item), -1) for item in items], np.int64),
        user=user,
        time=time,
        past=np.array([index.get(str(event["item"]), -1) for event in history], np.int64),
        past_time=np.array([event["time"] for event in history], np.int64),
        label=np.array([-1 if label is None else int(label) for label in labels], np.int64),
        columns=convert_values(values or {}, known.columns),
    )


def make_requests(scorer, clicks, index):
    """Make the request of each event, with all events of its user before it."""
    seq, item_id = clicks.seq, scorer.model.known.item_id
    return [
        make_request(
            scorer,
            seq.user_id[seq.user[at]],
            [item_id[seq.item[at]], "no such item"],
            time=int(seq.time[at]),
            history=[
                {
                    "item": item_id[seq.item[past]],
                    "time": int(seq.time[past]),
                    "label": clicks.label[past] > 0,
                }
                for past in range(seq.offsets[seq.user[at]], at)
            ],
            values={name: values[at].item() for name, values in seq.columns.items()},
        )
        for at in index
    ]


def make_rollouts(clicks, item_id, index):
    """Make rollouts with a beam per event: its item, for a prompt at its time with all events of its user before it."""
    seq = clicks.seq
    history = [item_id[seq.item[seq.offsets[seq.user[at]] : at]] for at in index]
    offsets = np.concatenate([[0], np.cumsum([len(past) for past in history])])
    users, items, n = seq.user_id[seq.user[index]], item_id[seq.item[index]][:, None], len(index)
    return Rollouts(
        uid=users.astype(str), user_id=users, item_id=items, item=items - 1000, sid=items[..., None],
        logp=np.zeros((n, 1, 1), np.float32), valid=np.ones((n, 1), bool),
        target=Jagged(np.zeros(n, np.int64), np.arange(n + 1)), history=Jagged(np.concatenate(history), offsets),
        scene=np.zeros(n, np.int64), weights_version=1, catalogue_version="", step=0, time=seq.time[index],
    )  # fmt: skip


def hash_files(run_folder: RunFolder) -> dict[str, dict[str, str]]:
    """Return the hashes of the files of every checkpoint."""
    manifests = run_folder.checkpoints.glob("step-*/manifest.json")
    return {path.parent.name: json.loads(path.read_text())["files"] for path in manifests}
