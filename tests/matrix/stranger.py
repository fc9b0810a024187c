"""A stranger's shop, for tests of every verb: own names of all columns, milliseconds, text or integer ids, a 0/1 label.

Members walk a ring of articles. An article has a list of categories, a price, a brand and a name, which one article lacks.
"""

from __future__ import annotations

import copy
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from backbones import folder_of

from nonet import yaml

USERS, ITEMS, EVENTS = 24, 30, 12
START_MS, EVENT_MS = 1_750_000_000_000, 3_600_000
COLUMNS = {
    "user": "member",
    "item": "sku",
    "time": "moment",
    "event": "action",
    "rating": "stars",
    "title": "name",
    "categories": "kinds",
}
WITHOUT_TITLE = 7  # the index of the article without a name
_QWEN = {
    "model_type": "qwen3",
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "intermediate_size": 32,
}
_DECODER = {"use": "sid_decoder", "width": 16, "layers": 1, "heads": 2, "dropout": 0.0}
MODELS: dict[str, dict[str, Any]] = {
    "decoder": _DECODER,
    "hstu": {**_DECODER, "block": "hstu"},
    "hf": {"use": "hf", "config": _QWEN},
    "hf-lora": {"use": "hf", "path": "backbone", "lora": {"rank": 2, "alpha": 4.0}},
    "click": {"use": "deepfm", "hidden": [8], "dropout": 0.0},
    "keras": {"use": "keras", "path": "rankers.py:build_din", "backend": "jax", "sequences": ["liked"]},
}
"""The kinds of models, by the name of their column in the matrix."""
CLICKS = ("click", "keras")
"""Those that predict clicks."""
MODEL_USES = {name: model["use"] for name, model in MODELS.items()}

RANKERS = Path(__file__).parents[2] / "examples" / "keras" / "rankers.py"
REWARD = """
import nonet


@nonet.reward
def cheap(price, *, limit: float):
    return price < limit
"""
_BASE: dict[str, Any] = {
    "seed": 5,
    "data": {
        "interactions": "log.parquet",
        "items": "articles.parquet",
        "columns": COLUMNS,
        "history": 8,
        "split": {"use": "leave_last_out", "test": 1, "valid": 1},
    },
    "checkpoint": {"every": 100},
}
_LISTS: dict[str, Any] = {
    "tokenizer": {
        "use": "rq_kmeans",
        "vectors": ["title", "categories", "cooccurrence"],
        "levels": 2,
        "codes": 6,
        "dim": 8,
    },
    "sparse": {"tables": {"item": {"dim": 8}, "user": {"dim": 8}}},
    "stages": {"pretrain": {"steps": 4, "batch": {"users": 8}, "lr": 3e-3}},
    "evaluate": {"metrics": ["recall@5", "ndcg@5"], "width": 10},
}
_CLICKS: dict[str, Any] = {
    "sparse": {
        "defaults": {"dim": 8},
        "tables": {"user": {}, "item": {"features": ["item", "liked"]}, "categories": {}},
    },
    "stages": {"train": {"epochs": 1, "batch": {"tokens": 64}, "lr": 3e-3, "target": "clicked == 1"}},
    "evaluate": {"metrics": ["auc", "log_loss"]},
}


class Shop:
    """The tables of the shop in a folder, with what variants need beside them.

    Args:
        folder: An empty folder.
        text_ids: Whether users and items have text ids, or integers.

    Attributes:
        earlier_run: The run that the variant "warm" starts from.
        redis: The address of a store in a Redis server for the variant "redis"; "" for one that no plan looks for.
    """

    def __init__(self, folder: Path, text_ids: bool = True):
        self.folder, self.earlier_run, self.redis = folder, folder, ""
        self._stores: set[str] = set()
        draw = np.random.default_rng(0)
        users, items = np.arange(USERS), np.arange(ITEMS)
        self.user_ids: list[Any] = [f"user_{i:03d}" if text_ids else int(1001 + i) for i in users]
        self.item_ids: list[Any] = [f"SKU-{i:04d}" if text_ids else int(5001 + i) for i in items]
        steps = draw.choice([1, 2, 3], p=[0.7, 0.2, 0.1], size=(USERS, EVENTS))
        self.item_UE = (draw.integers(0, ITEMS, USERS)[:, None] + steps.cumsum(1)) % ITEMS
        moments = np.tile(START_MS + np.arange(EVENTS) * EVENT_MS, USERS)
        self.log = pa.table(
            {
                "member": np.repeat(self.user_ids, EVENTS),
                "sku": [self.item_ids[i] for i in self.item_UE.ravel()],
                "moment": moments,
                "action": draw.choice(["view", "cart"], size=USERS * EVENTS),
                "stars": draw.choice([2.0, 4.0, 5.0], size=USERS * EVENTS).astype(np.float32),
                "clicked": (self.item_UE.ravel() + np.repeat(users, EVENTS)) % 2,
            }
        )
        pq.write_table(self.log, folder / "log.parquet")
        self.titles = [None if i == WITHOUT_TITLE else f"article {chr(97 + i % 26)}{i}" for i in items]
        self.articles = self.make_articles(items.tolist())
        pq.write_table(self.articles, folder / "articles.parquet")
        shutil.copy(RANKERS, folder)
        (folder / "rewards").mkdir()
        (folder / "rewards" / "cheap.py").write_text(REWARD)

    def make_articles(self, indices: Sequence[int], ids: Sequence[Any] | None = None) -> pa.Table:
        """Return rows of the table of articles.

        Args:
            indices: The indices of the articles.
            ids: Their ids, by default those of the shop.
        """
        return pa.table(
            {
                "sku": [self.item_ids[i] for i in indices] if ids is None else list(ids),
                "name": pa.array(
                    [self.titles[i] if i < ITEMS else f"article new{i}" for i in indices], pa.string()
                ),
                "kinds": [[f"kind{i % 5}", "all"] for i in indices],
                "price": [float(1 + i % 10) for i in indices],
                "brand": [f"brand {i % 3}" for i in indices],
            }
        )

    def write_scenario(self, kind: str, variants: Sequence[str]) -> Path:
        """Write the scenario of a kind of model with variants, and the files that it reads; return its path."""
        name = "_".join([kind, *variants])
        scenario: dict[str, Any] = copy.deepcopy(
            {"name": name.replace(" ", "-"), **_BASE, "model": MODELS[kind]}
        )
        merge(scenario, copy.deepcopy(_CLICKS if kind in CLICKS else _LISTS))
        if scenario["model"].get("path") == "backbone":
            scenario["model"]["path"] = self.make_backbone()
        for variant in variants:
            merge(scenario, copy.deepcopy(VARIANTS[variant](self, kind)))
        if "no tables" in variants:
            del scenario["sparse"]
        path = self.folder / f"{scenario['name']}.yaml"
        path.write_text(yaml.dump(scenario))
        return path

    def write_later_log(self, path: Path, events: int) -> int:
        """Write the log with further events of each user; return their number."""
        first = self.log.slice(0, 0)
        for user in range(USERS):
            last = self.log.slice((user + 1) * EVENTS - events, events)
            moved = pa.array(np.asarray(last["moment"]) + (events + 1) * EVENT_MS)
            first = pa.concat_tables(
                [first, last.set_column(last.column_names.index("moment"), "moment", moved)]
            )
        pq.write_table(pa.concat_tables([self.log, first]), path)
        return len(first)

    def make_backbone(self) -> str:
        """Return the folder of a language model with a tokenizer, which is written once."""
        path = self.folder / "backbone"
        return str(path) if path.exists() else folder_of(path, _QWEN, extra_words=("article",))

    def write_store(self, use: str) -> str:
        """Write the versions of an item's maker and stock into a store once, and return its address."""
        from nonet.samples.stores import StoreFiller

        if use in self._stores:
            return use
        self._stores.add(use)
        path = self.folder / "features.parquet"
        times = START_MS // 1000 + np.repeat([-10, 5 * 3600], ITEMS)
        rows = {
            "sku": self.item_ids * 2,
            "since": times,
            "maker": [f"maker {i % 4}" for i in range(2 * ITEMS)],
        }
        pq.write_table(pa.table(rows | {"stock": np.arange(2 * ITEMS) % 7}), path)
        StoreFiller(str(path), "sku", "since", None, {}).pack(use, lambda done, total: None)
        return use

    def write_sequences(self) -> str:
        """Write the events before the held-out ones as lists by user; return the path of the file."""
        path, cut = self.folder / "sequences.parquet", EVENTS - 2
        moments = [[START_MS + e * EVENT_MS for e in range(cut)]] * USERS
        skus = [[self.item_ids[i] for i in row[:cut]] for row in self.item_UE]
        pq.write_table(pa.table({"member": self.user_ids, "skus": skus, "moments": moments}), path)
        return str(path)

    def write_lines(self) -> str:
        """Write the same events as lines of `user item item ...`; return the path of the file."""
        path = self.folder / "sequences.txt"
        lines = (
            " ".join(map(str, [user, *(self.item_ids[i] for i in row[: EVENTS - 2])]))
            for user, row in zip(self.user_ids, self.item_UE, strict=True)
        )
        path.write_text("".join(f"{line}\n" for line in lines))
        return str(path)

    def write_labels(self) -> str:
        """Write which events ended in a purchase an hour later."""
        table = self.log.select(["member", "sku", "moment"])
        bought = table.filter(pa.array(np.arange(len(table)) % 3 == 0))
        moments = pa.array(bought["moment"].to_numpy() + EVENT_MS)
        bought = bought.set_column(2, "moment", moments)
        pq.write_table(bought, self.folder / "bought.parquet")
        return "bought.parquet"

    def write_edges(self) -> str:
        """Write from which hour on an article goes with the next one."""
        edges = {"a": self.item_ids, "b": [*self.item_ids[1:], self.item_ids[0]]}
        moments = START_MS + np.arange(ITEMS) % EVENTS * EVENT_MS
        pq.write_table(
            pa.table({**edges, "since": moments, "weight": np.arange(1.0, ITEMS + 1)}),
            self.folder / "edges.parquet",
        )
        return "edges.parquet"

    def write_sids(self) -> str:
        """Write semantic ids of all items; return the path of the file."""
        codes = {"l0": [i % 5 for i in range(ITEMS)], "l1": [i // 5 for i in range(ITEMS)]}
        pq.write_table(pa.table({"item_id": self.item_ids, **codes}), self.folder / "sids.parquet")
        return "sids.parquet"


def merge(document: dict[str, Any], changes: Mapping[str, Any]) -> None:
    """Change keys of a scenario; maps with `use` are replaced, other maps are merged."""
    for key, value in changes.items():
        if isinstance(value, dict) and isinstance(document.get(key), dict) and "use" not in value:
            merge(document[key], value)
        else:
            document[key] = value


def _join(shop: Shop, kind: str) -> dict[str, Any]:
    store = shop.write_store(str(shop.folder / "features.store"))
    tables = {} if kind.startswith("hf") else {"maker": {} if kind in CLICKS else {"dim": 8}}
    return {
        "data": {"join": {"item": {"use": store, "columns": ["maker", "stock"]}}},
        "sparse": {"tables": tables},
    }


def _join_from_redis(shop: Shop, kind: str) -> dict[str, Any]:
    store = shop.write_store(shop.redis) if shop.redis else "redis://stores.example:6379/features"
    tables = {} if kind.startswith("hf") else {"depot": {} if kind in CLICKS else {"dim": 8}}
    join = {"on": "item", "use": store, "columns": {"depot": "stock"}}
    return {"data": {"join": {"trend": join}}, "sparse": {"tables": tables}}


def _connect(shop: Shop, kind: str) -> dict[str, Any]:
    table = {"table": shop.write_edges(), "columns": {"source": "a", "target": "b", "time": "since"}}
    graphs = {
        "near": {"edges": "item-item", "half_life": "6h", "k": 3},
        "fans": {"edges": "item-user", "k": 3},
        "mine": {"edges": "user-item", "k": 3},
        "pairs": {"edges": "item-item", "k": 3, **table},
    }
    features = ["near", "fans_1hop", "fans_2hop", "mine", "pairs", "pairs_1hop"]
    tables = {"graphs": {"features": features}} if kind in CLICKS else {}
    return {"data": {"graph": graphs}, "sparse": {"tables": tables}}


def _add_tasks(shop: Shop, kind: str) -> dict[str, Any]:
    stage = "train" if kind in CLICKS else "pretrain"
    model = {"keras": {"path": "rankers.py:build_two_tasks"}, "click": {"experts": 2}}.get(kind, {})
    tasks = {"loved": {"target": "rating >= 5", "weight": 0.5}}
    metrics = {"evaluate": {"metrics": ["auc", "log_loss", "auc@loved"]}} if kind in CLICKS else {}
    return {"model": model, "stages": {stage: {"tasks": tasks}}, **metrics}


def _reinforce(shop: Shop, kind: str) -> dict[str, Any]:
    stage = {
        "steps": 2,
        "users": 4,
        "rollout": {"use": "beam", "width": 4},
        "rewards": {
            "hit": {"weight": 1.0},
            "cheap": {"use": "rewards/cheap.py", "weight": 0.5, "limit": 4.0},
        },
    }
    return {
        "data": {"split": {"use": "leave_last_out", "test": 1, "valid": 1, "rl": 2}},
        "stages": {"rl": stage},
    }


VARIANTS: dict[str, Any] = {
    "join": _join,
    "redis": _join_from_redis,
    "graph": _connect,
    "labels": lambda shop, kind: {
        "data": {"labels": {"path": shop.write_labels(), "within": "2h", "name": "bought"}}
    },
    "tasks": _add_tasks,
    "compressed": lambda shop, kind: {"data": {"events": {"compress": "1d"}}},
    "stored": lambda shop, kind: {"data": {"sequences": {"use": f"lmdb:{shop.folder}/{kind}.lmdb"}}},
    "parquet": lambda shop, kind: {
        "data": {
            "source": {
                "use": "parquet",
                "path": shop.write_sequences(),
                "user": "member",
                "items": "skus",
                "time": "moments",
                "unit": "ms",
            }
        }
    },
    "streams": lambda shop, kind: {
        "data": {"source": {"use": "parquet", "path": shop.write_lines(), "format": "lines"}}
    },
    "disk": lambda shop, kind: {"data": {"prepare": "disk"}},
    "memory": lambda shop, kind: {
        "model": {
            "memory": {
                "last": 10,
                "decay": 1.0,
                "reach": 6,
                "reverse": 0.3,
                "signals": ["title", "categories"],
            }
        }
    },
    "no tables": lambda shop, kind: {},
    "file ids": lambda shop, kind: {"tokenizer": {"use": "file", "path": shop.write_sids()}},
    "rl": _reinforce,
    "align": lambda shop, kind: {
        "model": {"tokenizer": shop.make_backbone()} if kind == "hf" else {},
        "stages": {
            "align": {"use": "align", "steps": 2, "batch": {"users": 4}, "items": 8, "column": "title"}
        },
    },
    "two trainers": lambda shop, kind: {"roles": {"trainer": {"workers": 2}}},
    **{
        engine: lambda shop, kind, engine=engine: {
            "roles": {"trainer": {"workers": 2, "engine": {"use": engine}}}
        }
        for engine in ("ddp", "fsdp2", "deepspeed")
    },
    **{
        axis: lambda shop, kind, axis=axis: {
            "roles": {"trainer": {"workers": 2, "engine": {"use": "fsdp2", axis: 2}}}
        }
        for axis in ("replicate", "tensor")
    },
    "warm": lambda shop, kind: {"init": {"from": str(shop.earlier_run)}},
    "integers": lambda shop, kind: {},
}
"""What each variant changes in the scenario of a shop and a kind; ids are integers where the shop's are."""
