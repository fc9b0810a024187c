"""Make the exhibits of the museum with the version of Nonet that is installed in this environment.

    python -m tests.museum.make_exhibits NONET FOLDER [GROUP...]

NONET is the `nonet` command of the version to be kept, FOLDER a place that does not exist yet, and GROUP one of those in
`GROUPS`, by default all. The script runs that command as a user would and packs what it leaves: runs that finished, a run that
was stopped inside RL, a registry with two versions, exports, a packed store, prepared data, a serving journal, the plug-ins of
docs/how-to/extend.md, and buckets with stored runs.
Each exhibit becomes one archive, FOLDER/NAME.tar.xz, with the placeholder `@MUSEUM@` where a file had the absolute path of the
place of work. The archive of a bucket has a file for each object, named by its key, and no placeholder: the tables of a stored
run are in its bucket too.

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
from collections.abc import Callable
from pathlib import Path

from tests.museum.buckets import fill_bucket, save_bucket
from tests.museum.exhibit_scenarios import BACKBONE, CLICKS, DATA, LABELS, REWARD, SHOP, write_tables
from tests.s3 import BUCKET, serve_s3

REPOSITORY = Path(__file__).parents[2]
DECODER = "{use: sid_decoder, width: 8, layers: 1, heads: 2, dropout: 0.0, memory: on}"
PORT = 18431
START_WITH_RAY = """
import ray
ray.init(address="local", num_cpus={cpus}, namespace="nonet", include_dashboard=False, log_to_driver=False)
from nonet.deploy.cli import main
main()
"""


class Workshop:
    """A folder in which the command makes exhibits."""

    def __init__(self, nonet: str, root: Path):
        self.nonet, self.root = nonet, root
        self.environment = {**os.environ, "NONET_RUNS": str(root / "runs"), "HF_HUB_OFFLINE": "1"}

    def run(self, *words: object) -> None:
        """Run the command in the folder, and fail where it fails."""
        print("$ nonet", *words, flush=True)
        subprocess.run([self.nonet, *map(str, words)], cwd=self.root, env=self.environment, check=True)

    def start(self, *words: object, ray_cpus: int = 0) -> subprocess.Popen[bytes]:
        """Start the command without waiting for it; `ray_cpus` is the size of its Ray, by default that of the machine."""
        print("$ nonet", *words, "&", flush=True)
        command = [self.nonet]
        if ray_cpus:
            command = [str(Path(self.nonet).with_name("python")), "-c", START_WITH_RAY.format(cpus=ray_cpus)]
        return subprocess.Popen(
            [*command, *map(str, words)], cwd=self.root, env=self.environment, start_new_session=True
        )

    def write(self, name: str, text: str) -> None:
        """Write a text file of the folder."""
        path = self.root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def make_first(shop: Workshop) -> None:
    """Make the exhibits that the first version in the museum has."""
    root = shop.root
    data = DATA.format(root=root)
    backbone = f"{{use: hf, path: {root}/backbone, lora: {{rank: 2, alpha: 4}}}}"
    shop.write("shop.yaml", SHOP.format(data=data, more="prepare: memory", model=DECODER, steps=4))
    joined = f"prepare: disk\n  join: {{item: {{use: {root}/discounts.store, columns: [discount]}}}}"
    usual = data.replace("catalogue.parquet", "catalogue_usual.parquet").replace(
        ", title: name, categories: kinds", ""
    )
    shop.write("stopped.yaml", SHOP.format(data=usual, more=joined, model=DECODER, steps=400))
    shop.write("backbone.yaml", SHOP.format(data=data, more="prepare: memory", model=backbone, steps=2))
    shop.write("clicks.yaml", CLICKS.format(data=data))
    page = (REPOSITORY / "docs" / "how-to" / "extend.md").read_text(encoding="utf-8")
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

    publish_first(shop, "shop")
    post_events(shop, "shop")
    shop.run("export", "shop", "export")
    shop.run("export", "hugging_face", "export_hugging_face")


def make_stored(shop: Workshop) -> None:
    """Make two buckets with a stored run each: one that finished, and one whose machine was lost inside RL."""
    for name, steps in (("stored", 2), ("stored_stopped", 400)):
        text = SHOP.format(
            data=DATA.format(root="s3://feed-runs"), more="prepare: memory", model=DECODER, steps=steps
        )
        text = text.replace("name: shop", f"name: {name}\nstorage: {BUCKET}/runs")
        shop.write(f"{name}.yaml", text.replace(f"steps: {steps}", f"steps: {steps}\n    control: false"))
        tables, cache = shop.root / f"tables_{name}", shop.root / f"cache_{name}"
        shutil.copytree(shop.root / "data", tables / "data")
        with serve_s3() as variables:
            fill_bucket(variables["AWS_ENDPOINT_URL"], tables)
            shop.environment |= variables | {"NONET_CACHE": str(cache)}
            process = shop.start("run", f"{name}.yaml")
            if name == "stored_stopped":
                wait_for_rl(process, cache, "*/*/checkpoints/step-*/manifest.json")
                time.sleep(6)  # a commit in the background follows the checkpoint
                os.killpg(process.pid, signal.SIGKILL)
                time.sleep(30)  # Ray ends after its driver, and nothing is written to the bucket any more
            process.wait()
            save_bucket(variables["AWS_ENDPOINT_URL"], shop.root / f"bucket_{name}")


def make_labels(shop: Workshop) -> None:
    """Make a click model with several files of labels that arrive later."""
    shop.write("labels.yaml", LABELS.format(data=DATA.format(root=shop.root), root=shop.root))
    shop.run("run", "labels.yaml", "--run-dir", "labels")


def make_keras(shop: Workshop) -> None:
    """Make a click model in Keras."""
    shutil.copy(REPOSITORY / "examples/keras/rankers.py", shop.root)
    text = CLICKS.format(data=DATA.format(root=shop.root)).replace("name: clicks", "name: keras")
    model = "{use: keras, path: 'rankers.py:build_din', backend: jax, sequences: [liked]}"
    shop.write("keras.yaml", text.replace("{use: deepfm, hidden: [8]}", model))
    shop.run("run", "keras.yaml", "--run-dir", "keras")


def make_scaled(shop: Workshop) -> None:
    """Make a run whose trainers were scaled inside RL."""
    text = SHOP.format(data=DATA.format(root=shop.root), more="prepare: memory", model=DECODER, steps=200)
    shop.write(
        "scaled.yaml",
        text.replace("name: shop", "name: scaled").replace(
            "steps: 200", "steps: 200\n    control: false\n    best: {by: last}"
        ),
    )
    process = shop.start("run", "scaled.yaml", "--run-dir", "scaled", ray_cpus=6)
    wait_for_rl(process, shop.root, "scaled/checkpoints/step-*/manifest.json")
    shop.run("scale", "scaled", "trainer=2", "hit=2")
    if process.wait(timeout=400):
        raise SystemExit("the scaled run failed")


def make_served(shop: Workshop) -> None:
    """Make a run with two published versions, of which the older one is promoted, and with posted events."""
    text = SHOP.format(data=DATA.format(root=shop.root), more="prepare: memory", model=DECODER, steps=2)
    shop.write("served.yaml", text.replace("name: shop", "name: served"))
    shop.run("run", "served.yaml", "--run-dir", "served")
    publish_first(shop, "served")
    post_events(shop, "served")
    shop.run("rollback", "served@1")


def publish_first(shop: Workshop, run: str) -> None:
    """Publish the oldest checkpoint of a run."""
    first = sorted(path.name for path in (shop.root / run / "checkpoints").iterdir())[0]
    shop.run("publish", run, "--step", int(first.removeprefix("step-")))


def stop_inside_rl(shop: Workshop) -> None:
    """Kill the driver of a run once it has a commit inside RL."""
    process = shop.start("run", "stopped.yaml", "--run-dir", "stopped")
    wait_for_rl(process, shop.root, "stopped/checkpoints/step-*/manifest.json")
    process.send_signal(signal.SIGKILL)
    process.wait()
    time.sleep(15)  # the controller notices that the lease ran out, commits and ends


def wait_for_rl(process: subprocess.Popen[bytes], folder: Path, pattern: str) -> None:
    """Wait until a run has a checkpoint inside RL; `pattern` finds the manifests of its checkpoints."""
    deadline = time.monotonic() + 240
    while time.monotonic() < deadline and process.poll() is None:
        stages = [json.loads(path.read_text()) for path in folder.glob(pattern)]
        if any(body["stage"] == "rl" and not body["last"] and body["stage_step"] >= 2 for body in stages):
            break
        time.sleep(0.1)
    else:
        raise SystemExit("the run got no commit inside RL")


def post_events(shop: Workshop, run: str) -> None:
    """Serve the run, publish its newest commit, and post events of two users."""
    process = shop.start("serve", run, "--port", PORT)
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
            event = {"item": item, "time": (1_700_100_000 + number) * 1000, "values": {"rating": 5.0}}
            body = {"user": user, "events": [event], "id": f"post {number}"}
            request = urllib.request.Request(
                f"{address}/events", json.dumps(body).encode(), {"Content-Type": "application/json"}
            )
            print(urllib.request.urlopen(request, timeout=30).read().decode(), flush=True)
    finally:
        process.send_signal(signal.SIGINT)
        process.wait(timeout=60)


def pack(root: Path, origin: Path, target: Path, exhibits: dict[str, list[str]]) -> None:
    """Write an archive of each exhibit, with a placeholder where its files had the path of the place of work (`origin`).

    Buckets are packed as they are.
    """
    left_out = ("runs", "__pycache__", "tensorboard", "report.html", "trace.json", "native")
    target.mkdir(parents=True, exist_ok=True)
    for path in root.rglob("*"):
        is_stored = path.relative_to(root).parts[0].startswith("bucket_")
        if not is_stored and path.is_file() and str(origin).encode() in (body := path.read_bytes()):
            path.write_bytes(body.replace(str(origin).encode(), b"@MUSEUM@"))

    def leave_out(info: tarfile.TarInfo) -> tarfile.TarInfo | None:
        is_stored = info.name.startswith("bucket_")
        return None if not is_stored and Path(info.name).name in left_out else info

    for name, parts in exhibits.items():
        with tarfile.open(target / f"{name}.tar.xz", "w:xz", preset=9) as archive:
            for part in parts:
                archive.add(root / part, part, filter=leave_out)
        print(name, (target / f"{name}.tar.xz").stat().st_size, flush=True)


GROUPS: dict[str, tuple[Callable[[Workshop], None], dict[str, list[str]]]] = {
    "first": (
        make_first,
        {
            "shop": ["shop", "data", "rewards", "shop.yaml"],
            "stopped": ["stopped", "data", "rewards", "discounts.store", "stopped.yaml"],
            "clicks": ["clicks", "data", "clicks.yaml"],
            "hugging_face": ["hugging_face", "data", "backbone", "rewards", "backbone.yaml"],
            "mine": ["mine", "data", "mine.py", "mine.yaml"],
            "exports": ["export", "export_hugging_face", "backbone"],
            "store": ["discounts.store"],
        },
    ),
    "stored": (
        make_stored,
        {"stored": ["bucket_stored"], "stored_stopped": ["bucket_stored_stopped"]},
    ),
    "labels": (make_labels, {"labels": ["labels", "data", "labels.yaml"]}),
    "keras": (make_keras, {"keras": ["keras", "data", "rankers.py", "keras.yaml"]}),
    "scaled": (make_scaled, {"scaled": ["scaled", "data", "rewards", "scaled.yaml"]}),
    "served": (make_served, {"served": ["served", "data", "rewards", "served.yaml"]}),
}


def main(nonet: str, folder: Path, groups: list[str]) -> None:
    """Make the exhibits of some groups, and pack them."""
    work = folder / "work"
    work.mkdir(parents=True)
    shop = Workshop(nonet, work)
    write_tables(work / "data")
    shop.write("rewards/own.py", REWARD)
    exhibits = {}
    for group in groups:
        make, parts = GROUPS[group]
        make(shop)
        exhibits |= parts
    kept = work.with_name("kept")
    shutil.copytree(work, kept, symlinks=True)
    pack(kept, work, work.with_name("archives"), exhibits)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]).absolute(), sys.argv[3:] or list(GROUPS))
