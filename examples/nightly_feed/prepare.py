"""Stand-ins for everything that the scenario nightly-feed-laptop names, on one machine, until Ctrl-C.

    python examples/nightly_feed/prepare.py build/feed          # prints "ready" after about a minute
    . build/feed/environment.sh                                 # in another shell
    nonet run build/feed/feed.yaml

It serves an S3 API with the tables, semantic ids and models; a Thrift server of HBase with versions of the items' features; and a
Ray cluster of two nodes, one of them with NPUs that are simulated on the CPU, with the actor that computes margins. A node that
is killed is started again. Install Nonet from a checkout with `make setup`, which has the servers.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import logging
import os
import select
import subprocess
import sys
import sysconfig
import tempfile
import urllib.request
import venv
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

REPOSITORY = Path(__file__).resolve().parents[2]
USERS, ITEMS, DAYS, EVENTS_A_DAY = 400, 240, 20, 4
FIRST_ITEM, LEVELS, CODES, WIDTH = 10_000, 3, 8, 16
START = datetime(2026, 11, 1, tzinfo=UTC)
QWEN3 = {
    "model_type": "qwen3",
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 128,
    "vocab_size": 64,
    "max_position_embeddings": 2048,
}


def make_events(rng: np.random.Generator) -> list[pa.Table]:
    """Return the events of each day: users walk through a ring of items, and repeat some of them."""
    position = rng.integers(0, ITEMS, USERS)
    tables = []
    for day in range(DAYS):
        users = np.repeat(np.arange(USERS), EVENTS_A_DAY)
        steps = rng.choice([0, 1, 2, 3], p=[0.15, 0.55, 0.2, 0.1], size=(USERS, EVENTS_A_DAY)).cumsum(1)
        items = (position[:, None] + steps) % ITEMS
        position = items[:, -1]
        seconds = np.sort(rng.integers(0, 86_400, (USERS, EVENTS_A_DAY)), axis=1)
        midnight = int((START + timedelta(days=day)).timestamp())
        tables.append(
            pa.table(
                {
                    "uid": users + 1,
                    "sku": items.ravel() + FIRST_ITEM,
                    "ts_ms": (midnight + seconds.ravel()) * 1000,
                    "action": rng.choice(["view", "cart", "order"], p=[0.7, 0.2, 0.1], size=len(users)),
                    "page": rng.choice(["home", "search"], size=len(users)),
                }
            )
        )
    return tables


def make_items(rng: np.random.Generator) -> pa.Table:
    """Return the items with their list prices and stock."""
    return pa.table(
        {
            "sku": np.arange(FIRST_ITEM, FIRST_ITEM + ITEMS),
            "list_price": rng.lognormal(3.0, 1.0, ITEMS).round(2),
            "in_stock": rng.random(ITEMS) < 0.9,
        }
    )


def make_sids() -> pa.Table:
    """Return semantic ids: neighbours on the ring share codes."""
    number = np.arange(ITEMS)
    codes = {f"l{level}": number // CODES ** (LEVELS - 1 - level) % CODES for level in range(LEVELS)}
    return pa.table({"item_id": number + FIRST_ITEM, **codes})


def make_ranker(rng: np.random.Generator) -> str:
    """Return the ranker of `feed/rewards.py` as JSON: vectors on a circle, so that neighbours are similar."""
    angles = 2 * np.pi * np.arange(ITEMS) / ITEMS
    waves = np.concatenate(
        [np.outer(angles, np.arange(1, WIDTH // 2 + 1)) + shift for shift in (0, np.pi / 2)], axis=1
    )
    vectors = np.sin(waves) / np.sqrt(WIDTH) + rng.normal(0, 0.05, (ITEMS, WIDTH))
    items = list(range(FIRST_ITEM, FIRST_ITEM + ITEMS))
    return json.dumps(
        {"items": items, "vectors": vectors.round(4).tolist(), "bias": -0.5, "price_weight": -0.1}
    )


# The arguments of the node with the stand-ins for NPUs.
NPU_NODE = {
    "num_cpus": 2,
    "resources": {"NPU": 2},
    "labels": {"zone": "b"},
    "object_store_memory": 200_000_000,
}


class ObjectStore:
    """A server with the S3 API in this process, and what the scenario reads from it."""

    def __init__(self) -> None:
        from moto.server import ThreadedMotoServer

        logging.getLogger("werkzeug").setLevel(logging.ERROR)
        self.server = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
        self.server.start()
        self.url = "http://{}:{}".format(*self.server.get_host_and_port())
        self.variables = {
            "AWS_ENDPOINT_URL": self.url,
            "AWS_ACCESS_KEY_ID": "feed",
            "AWS_SECRET_ACCESS_KEY": "feed",
            "AWS_REGION": "us-east-1",
        }

    def put(self, path: str, content: bytes) -> None:
        """Write an object, or create a bucket if the path is only its name."""
        headers = {"Content-Type": "application/octet-stream"}
        request = urllib.request.Request(f"{self.url}/{path}", data=content, headers=headers, method="PUT")
        urllib.request.urlopen(request).close()

    def put_table(self, path: str, table: pa.Table) -> None:
        """Write a table as Parquet."""
        out = io.BytesIO()
        pq.write_table(table, out)
        self.put(path, out.getvalue())

    def fill(self, rng: np.random.Generator, items: pa.Table) -> None:
        """Write the tables, the semantic ids, the backbone and the ranker."""
        for bucket in ("feed", "models", "feed-runs"):
            self.put(bucket, b"")
        for day, events in enumerate(make_events(rng)):
            date = (START + timedelta(days=day)).date().isoformat()
            self.put_table(f"feed/events/dt={date}/part-0.parquet", events)
        self.put_table("feed/items/2026-11-20.parquet", items)
        self.put_table("feed/sids/v41.parquet", make_sids())
        self.put("feed/din/v12/din.json", make_ranker(rng).encode())
        import torch
        from transformers import AutoConfig, AutoModelForCausalLM

        torch.manual_seed(1)
        with tempfile.TemporaryDirectory() as folder:
            AutoModelForCausalLM.from_config(AutoConfig.for_model(**QWEN3)).save_pretrained(folder)
            for file in Path(folder).iterdir():
                self.put(f"models/Qwen3-2M/{file.name}", file.read_bytes())


def serve_profiles(rng: np.random.Generator, items: pa.Table) -> int:
    """Serve HBase's protocol with a version of each item's features a week, and return the port."""
    from nonet.bench.samples.hbase_standin import Standin
    from nonet.samples.stores import open_store

    server = Standin({"item_profile": ["f"]})
    columns = {"price": "f:price float64", "shop": "f:shop", "category": "f:category"}
    store = open_store(f"hbase://127.0.0.1:{server.port}/item_profile", columns)
    skus, list_prices = items["sku"].to_numpy(), items["list_price"].to_numpy()
    for week in range(-1, 2):
        rows = {
            "price": list_prices * rng.uniform(0.8, 1.0, ITEMS),
            "shop": [f"shop{sku % 20}" for sku in skus],
            "category": [f"category{sku % 7}" for sku in skus],
        }
        second = int((START + timedelta(weeks=week)).timestamp())
        store.put(skus, pa.table(rows), np.full(ITEMS, second))
    store.close()
    return server.port


def make_npu_python(folder: Path) -> Path:
    """Create a second Python environment, which also has the stand-in for `torch_npu`, and return its interpreter."""
    venv.create(folder, with_pip=False)
    python = folder / "bin" / "python"
    code = "import sysconfig; print(sysconfig.get_path('purelib'))"
    packages = subprocess.run(
        [str(python), "-c", code], capture_output=True, text=True, check=True
    ).stdout.strip()
    paths = [sysconfig.get_path("purelib"), str(REPOSITORY / "tests" / "npu_standin")]
    (Path(packages) / "shared.pth").write_text("\n".join(paths) + "\n", encoding="utf-8")
    return python


def start_cluster(variables: dict[str, str], items: pa.Table) -> tuple[Any, str]:
    """Start a Ray of a host and an NPU node with the actor of margins, and return the cluster and its address."""
    import ray
    from ray.cluster_utils import Cluster

    os.environ.update(variables)  # all processes of the cluster inherit it
    cluster = Cluster(
        initialize_head=True,
        head_node_args={"num_cpus": 4, "labels": {"zone": "a"}, "object_store_memory": 200_000_000},
    )
    cluster.add_node(**NPU_NODE)
    ray.init(cluster.address, namespace="pricing", log_to_driver=False, logging_level=logging.ERROR)

    class Margin:
        """The share of an item's price that is profit."""

        def __init__(self, first_item: int, margins: list[float]):
            self._margins, self._first_item = margins, first_item

        def score(self, message: dict) -> list[list[float]]:
            """Return the margins [U, W]."""
            last = len(self._margins) - 1
            return [
                [self._margins[min(max(int(item) - self._first_item, 0), last)] for item in row]
                for row in message["item_id"]
            ]

    margins = (0.05 + 0.4 * np.random.default_rng(3).random(len(items))).round(3).tolist()
    actor = ray.remote(num_cpus=0, max_concurrency=4, max_restarts=-1)(
        Margin
    )  # restarted if its node is lost
    actor.options(name="margin", namespace="pricing", lifetime="detached").remote(FIRST_ITEM, margins)
    return cluster, cluster.address


def replace_lost_nodes(cluster: Any) -> None:
    """Start nodes again that were killed, as the operator of a cluster does, until Ctrl-C or the end of the standard input."""
    while not select.select([sys.stdin], [], [], 1.0)[0] or os.read(sys.stdin.fileno(), 4096):
        for node in list(cluster.worker_nodes):
            if node.dead_processes():
                cluster.remove_node(node, allow_graceful=False)
                cluster.add_node(**NPU_NODE)


def write_files(folder: Path, variables: dict[str, str], address: str, port: int, python: Path) -> None:
    """Write the scenario with the addresses of this machine, and the environment of the commands that use it."""
    (folder / "feed.yaml").write_text(
        f"""# nightly-feed-laptop with the addresses of this machine.
extends: nightly-feed-laptop
data: {{join: {{item: {{use: "hbase://127.0.0.1:{port}/item_profile"}}}}}}
pools: {{npu: {{env: {{python: {python}}}}}}}
""",
        encoding="utf-8",
    )
    variables = variables | {"RAY_ADDRESS": address}
    lines = [f"export {name}={value}" for name, value in variables.items()]
    (folder / "environment.sh").write_text("\n".join(lines) + "\n", encoding="utf-8")


def main() -> None:
    """Start everything, print "ready", and wait for Ctrl-C or the end of the standard input."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "folder", type=Path, help="the folder for feed.yaml, environment.sh and the second environment"
    )
    folder: Path = parser.parse_args().folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(7)
    items = make_items(rng)
    store = ObjectStore()
    store.fill(rng, items)
    port = serve_profiles(rng, items)
    python = make_npu_python(folder / "npu")
    variables = store.variables | {"NONET_CACHE": str(folder / "cache"), "NONET_ATTENTION": "sdpa"}
    cluster, address = start_cluster(variables, items)
    write_files(folder, variables, address, port, python)
    print("ready", flush=True)
    with contextlib.suppress(KeyboardInterrupt):
        replace_lost_nodes(cluster)
    import ray

    ray.shutdown()
    cluster.shutdown()
    store.server.stop()


if __name__ == "__main__":
    main()
