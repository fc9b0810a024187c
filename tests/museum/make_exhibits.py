"""Make the exhibits of the museum with the version of Nonet that is installed in this environment.

    python tests/museum/make_exhibits.py NONET FOLDER

NONET is the `nonet` command of the version to be kept, and FOLDER a place that does not exist yet. The script runs that
command as a user would and packs what it leaves: runs that finished, a run that was stopped inside RL, a registry with two
versions, exports, a packed store, prepared data, a serving journal and the plug-ins of docs/how-to/extend.md.
Each exhibit becomes one archive, FOLDER/NAME.tar.xz, with the placeholder `@MUSEUM@` where a file had the absolute path of the
place of work.

`tests/museum/exhibits.py` opens what this script packed. Exhibits are made once per format change and never made again: they
stand for folders that users have on disk.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tarfile
import time
import urllib.request
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

PORT = 18431
USERS, ITEMS, EVENTS = 24, 20, 14

DATA = """
data:
  interactions: {root}/data/log.parquet
  items: {root}/data/catalogue.parquet
  columns: {{user: member, item: sku, time: ts, title: name, categories: kinds}}
  history: 8
"""

SHOP = """
name: shop
seed: 5
{data}
  split: {{use: leave_last_out, test: 1, valid: 1, rl: 2}}
  {more}
tokenizer: {{use: rq_kmeans, vectors: [title, categories, cooccurrence], levels: 2, codes: 5, dim: 8}}
model: {model}
sparse: {{tables: {{item: {{dim: 4}}, user: {{dim: 4}}}}}}
stages:
  pretrain: {{epochs: 2, batch: {{users: 8}}, lr: 3e-3}}
  finetune: {{epochs: 1, batch: {{users: 8}}, lr: 1e-3, target: "rating >= 4"}}
  rl:
    steps: {steps}
    users: 6
    algorithm: {{use: grpo, kl: 0.01}}
    rollout: {{use: beam, width: 4}}
    rewards:
      hit: {{weight: 1.0}}
      own: {{use: rewards/own.py, weight: 0.5, ceiling: 10}}
evaluate: {{metrics: [recall@5, ndcg@5], width: 5}}
checkpoint: {{every: 2}}
"""

CLICKS = """
name: clicks
seed: 5
{data}
  split: {{use: leave_last_out, test: 2, valid: 2}}
model: {{use: deepfm, hidden: [8]}}
sparse:
  defaults: {{dim: 5, optimizer: adagrad, lr: 0.03}}
  tables: {{user: {{}}, item: {{features: [item, liked]}}, categories: {{}}}}
stages:
  train: {{epochs: 1, batch: {{tokens: 64}}, lr: 3e-3, target: "rating >= 4"}}
evaluate: {{metrics: [auc, log_loss]}}
"""

REWARD = """
import nonet


@nonet.reward
def own(price, *, ceiling: float):
    return price < ceiling
"""

BACKBONE = """
import sys
import torch
from transformers import AutoConfig, AutoModelForCausalLM
torch.manual_seed(3)
sizes = dict(hidden_size=16, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1, head_dim=8,
             intermediate_size=32, vocab_size=32)
AutoModelForCausalLM.from_config(AutoConfig.for_model("qwen3", **sizes)).save_pretrained(sys.argv[1])
"""


def write_tables(folder: Path) -> None:
    """Write a small log with text ids, columns of other names and times in milliseconds."""
    folder.mkdir(parents=True)
    draw = np.random.default_rng(0)
    steps = draw.choice([1, 2, 3], p=[0.7, 0.2, 0.1], size=(USERS, EVENTS))
    item = (draw.integers(0, ITEMS, USERS)[:, None] + steps.cumsum(1)) % ITEMS
    log = {
        "member": np.repeat([f"user_{u:03d}" for u in range(USERS)], EVENTS),
        "sku": [f"SKU-{i:04d}" for i in item.ravel()],
        "ts": (1_700_000_000 + np.tile(np.arange(EVENTS) * 3600, USERS)) * 1000,
        "rating": draw.choice([3.0, 4.0, 5.0], size=USERS * EVENTS).astype(np.float32),
    }
    pq.write_table(pa.table(log), folder / "log.parquet")
    items = {
        "sku": [f"SKU-{i:04d}" for i in range(ITEMS)],
        "name": [f"thing {chr(97 + i)}{i}" for i in range(ITEMS)],
        "kinds": [[f"kind{i % 4}"] for i in range(ITEMS)],
        "price": np.arange(ITEMS).astype(np.float64),
    }
    pq.write_table(pa.table(items), folder / "catalogue.parquet")
    usual = pa.table(items).rename_columns(["sku", "title", "categories", "price"])
    pq.write_table(usual, folder / "catalogue_usual.parquet")  # preparation on disk reads no mapped title
    prices = {
        "sku": np.repeat(items["sku"], 2),
        "updated": np.tile([1_600_000_000, 1_700_010_000], ITEMS),
        "discount": draw.random(2 * ITEMS).round(3),
    }
    pq.write_table(pa.table(prices), folder / "discounts.parquet")


class Workshop:
    """A folder in which the command makes exhibits."""

    def __init__(self, nonet: str, root: Path):
        self.nonet, self.root = nonet, root
        self.environment = {**os.environ, "NONET_RUNS": str(root / "runs"), "HF_HUB_OFFLINE": "1"}

    def run(self, *words: object) -> None:
        """Run the command in the folder, and fail where it fails."""
        print("$ nonet", *words, flush=True)
        subprocess.run([self.nonet, *map(str, words)], cwd=self.root, env=self.environment, check=True)

    def start(self, *words: object) -> subprocess.Popen[bytes]:
        """Start the command without waiting for it."""
        print("$ nonet", *words, "&", flush=True)
        return subprocess.Popen([self.nonet, *map(str, words)], cwd=self.root, env=self.environment)

    def write(self, name: str, text: str) -> None:
        """Write a text file of the folder."""
        path = self.root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def make(nonet: str, root: Path) -> None:
    """Make all exhibits below a folder."""
    shop = Workshop(nonet, root)
    write_tables(root / "data")
    data = DATA.format(root=root)
    decoder = "{use: sid_decoder, width: 8, layers: 1, heads: 2, dropout: 0.0, memory: on}"
    backbone = f"{{use: hf, path: {root}/backbone, lora: {{rank: 2, alpha: 4}}}}"
    shop.write("rewards/own.py", REWARD)
    shop.write("shop.yaml", SHOP.format(data=data, more="prepare: memory", model=decoder, steps=4))
    joined = f"prepare: disk\n  join: {{item: {{use: {root}/discounts.store, columns: [discount]}}}}"
    usual = data.replace("catalogue.parquet", "catalogue_usual.parquet").replace(
        ", title: name, categories: kinds", ""
    )
    shop.write("stopped.yaml", SHOP.format(data=usual, more=joined, model=decoder, steps=400))
    shop.write("backbone.yaml", SHOP.format(data=data, more="prepare: memory", model=backbone, steps=2))
    shop.write("clicks.yaml", CLICKS.format(data=data))
    page = (Path(__file__).parent.parent.parent / "docs" / "how-to" / "extend.md").read_text(encoding="utf-8")
    shop.write("mine.py", "\n".join(re.findall(r"```python\n(.*?)```", page, re.DOTALL)))
    plugged = re.findall(r"```yaml\n(.*?)```", page, re.DOTALL)[0]
    plugged = plugged.replace("interactions: interactions.parquet", f"interactions: {root}/data/log.parquet")
    plugged = plugged.replace("items: items.parquet", f"items: {root}/data/catalogue.parquet")
    plugged = plugged.replace(
        "  history: 8",
        "  columns: {user: member, item: sku, time: ts, title: name, categories: kinds}\n  history: 8",
    )
    shop.write("mine.yaml", plugged)

    shop.run(
        "pack", root / "data/discounts.parquet", root / "discounts.store", "--key", "sku", "--time", "updated"
    )
    shop.run("run", "shop.yaml", "--run-dir", "shop")
    shop.run("run", "clicks.yaml", "--run-dir", "clicks")
    shop.run("run", "mine.yaml", "--run-dir", "mine")
    subprocess.run([sys.executable, "-c", BACKBONE, str(root / "backbone")], check=True)
    shop.run("run", "backbone.yaml", "--run-dir", "hugging_face")
    stop_inside_rl(shop)

    first = sorted(path.name for path in (root / "shop/checkpoints").iterdir())[0]
    shop.run("publish", "shop", "--step", int(first.removeprefix("step-")))
    post_events(shop)
    shop.run("export", "shop", "export")
    shop.run("export", "hugging_face", "export_hugging_face")


def stop_inside_rl(shop: Workshop) -> None:
    """Kill the driver of a run once it has a commit inside RL."""
    process = shop.start("run", "stopped.yaml", "--run-dir", "stopped")
    manifests = shop.root / "stopped/checkpoints"
    deadline = time.monotonic() + 240
    while time.monotonic() < deadline and process.poll() is None:
        stages = [json.loads(path.read_text()) for path in manifests.glob("step-*/manifest.json")]
        if any(body["stage"] == "rl" and not body["last"] and body["stage_step"] >= 2 for body in stages):
            break
        time.sleep(0.1)
    else:
        raise SystemExit("the run got no commit inside RL")
    process.send_signal(signal.SIGKILL)
    process.wait()
    time.sleep(15)  # the controller notices that the lease ran out, commits and ends


def post_events(shop: Workshop) -> None:
    """Serve the run, publish its newest commit, and post events of two users."""
    process = shop.start("serve", "shop", "--port", PORT)
    try:
        address = f"http://127.0.0.1:{PORT}"
        deadline = time.monotonic() + 120
        while time.monotonic() < deadline:
            try:
                with urllib.request.urlopen(f"{address}/readyz", timeout=2) as answer:
                    if answer.status == 200:
                        break
            except OSError:
                time.sleep(0.5)
        for number, (user, item) in enumerate([("user_001", "SKU-0003"), ("stranger", "SKU-0004")]):
            event = {"item": item, "time": 1_700_100_000 + number, "values": {"rating": 5.0}}
            body = {"user": user, "events": [event], "id": f"post {number}"}
            request = urllib.request.Request(
                f"{address}/events", json.dumps(body).encode(), {"Content-Type": "application/json"}
            )
            print(urllib.request.urlopen(request, timeout=30).read().decode(), flush=True)
    finally:
        process.send_signal(signal.SIGINT)
        process.wait(timeout=60)


def pack(root: Path, origin: Path, target: Path) -> None:
    """Write an archive of each exhibit, with a placeholder where its files had the path of the place of work (`origin`)."""
    left_out = ("runs", "__pycache__", "tensorboard", "report.html", "trace.json", "native")
    target.mkdir(parents=True, exist_ok=True)
    for path in root.rglob("*"):
        if path.is_file() and str(origin).encode() in (body := path.read_bytes()):
            path.write_bytes(body.replace(str(origin).encode(), b"@MUSEUM@"))
    exhibits = {
        "shop": ["shop", "data", "rewards", "shop.yaml"],
        "stopped": ["stopped", "data", "rewards", "discounts.store", "stopped.yaml"],
        "clicks": ["clicks", "data", "clicks.yaml"],
        "hugging_face": ["hugging_face", "data", "backbone", "rewards", "backbone.yaml"],
        "mine": ["mine", "data", "mine.py", "mine.yaml"],
        "exports": ["export", "export_hugging_face", "backbone"],
        "store": ["discounts.store"],
    }
    for name, parts in exhibits.items():
        with tarfile.open(target / f"{name}.tar.xz", "w:xz", preset=9) as archive:
            for part in parts:
                archive.add(
                    root / part, part, filter=lambda info: None if Path(info.name).name in left_out else info
                )
        print(name, (target / f"{name}.tar.xz").stat().st_size, flush=True)


if __name__ == "__main__":
    work = Path(sys.argv[2]).absolute() / "work"
    work.mkdir(parents=True)
    make(sys.argv[1], work)
    kept = work.with_name("kept")
    shutil.copytree(work, kept, symlinks=True)
    pack(kept, work, work.with_name("archives"))
