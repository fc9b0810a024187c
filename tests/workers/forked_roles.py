"""Trainers and embedding shards of a run as forked processes, without Ray: one import of torch for all of them.

    python forked_roles.py

reads lines {"ask": path of ASK, "errors": file for stderr, "env": environment} and answers each with an exit code.

ASK: scenario, changes, trainers, shards apart (0: fused), folder, acts. Acts are done in order by every rank:
["begin", stage], ["train", stage, start, stop], ["fit_memory"], ["rejoin", epoch], ["save", name], ["load", name, stage],
["evaluate", name of a checkpoint], ["publish", name of a checkpoint], ["reshard", shards], ["disturb"]; and RL steps with
rollouts that are fused with the trainers: ["generate", stage, step], ["beams", stage, step, draw], ["update", stage, start,
stop]. Rank r writes FOLDER/<r>.json: what `train`, `beams`, `update` and `evaluate` gave and what the tables counted.
`played` runs it from a test.
"""

from __future__ import annotations

import json
import os
import select
import shutil
import subprocess
import sys
import time
from contextlib import nullcontext
from functools import cache
from importlib import import_module
from pathlib import Path

WAIT_S = 600
IMPORTED = ("nonet.workers.roles.trainer", "nonet.workers.roles.rollout", "nonet.workers.roles.artifacts.tokenizer",
            "nonet.workers.engines._fsdp2", "nonet.workers.roles.evaluation.evaluator",
            "nonet.workers.roles.learners.policy", "nonet.models.sid_decoder.decoder")  # fmt: skip


@cache
def _server():
    """Start the process that all ranks of this session's tests are forked from; `end_server` ends it."""
    return subprocess.Popen(
        [sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )


def end_server():
    if _server.cache_info().currsize:
        _server().communicate()
        _server.cache_clear()


def _serve():
    """Answer the lines of stdin: each is done by a fork of this process, which has imported what it needs."""
    sys.path.insert(0, str(Path(__file__).parent.parent / "embedding"))
    from forked_ranks import codes_of, forked

    for name in IMPORTED:
        import_module(name)
    for line in sys.stdin:
        (code,) = codes_of([forked(lambda line=line: _answer(**json.loads(line)))], WAIT_S).values() or (1,)
        print(code, flush=True)


def _answer(ask, errors, env):
    with open(errors, "w") as file:
        os.dup2(file.fileno(), 2)
    os.dup2(2, 1)
    os.environ.clear()
    os.environ.update(env)
    sys.path[:0] = [
        path for path in env.get("PYTHONPATH", "").split(os.pathsep) if path and path not in sys.path
    ]
    if _main(json.loads(Path(ask).read_text())):
        raise SystemExit(1)


def played(
    scenario, folder, acts, *, changes=(), trainers=1, shards=0, data=None, counts_bytes=False, limit=None
):
    """Return the ranks' results.

    Args:
        scenario: The scenario's file.
        folder: A folder for the results.
        acts: What every rank does.
        changes: Changes of the scenario.
        trainers: Number of trainers.
        shards: Number of embedding shards apart.
        data: A folder with artifacts of an earlier call, by default made in this one.
        counts_bytes: Whether each rank counts its tensors: "peak" is their largest size over that of the fp32 weights.
        limit: Bytes that the tensors of a rank may have at a time, if they are counted; None without a limit.
    """
    folder.mkdir(parents=True, exist_ok=True)
    ask = {"scenario": str(scenario), "changes": list(changes), "trainers": trainers, "shards": shards,
           "folder": str(folder), "data": str(data or folder), "acts": acts,
           "counts_bytes": counts_bytes, "limit": limit}  # fmt: skip
    (folder / "ask.json").write_text(json.dumps(ask))
    (folder / "store.json").unlink(missing_ok=True)  # of ranks that met in this folder before
    server, errors = _server(), folder / "errors.txt"
    line = {"ask": str(folder / "ask.json"), "errors": str(errors), "env": dict(os.environ)}
    server.stdin.write(json.dumps(line) + "\n")
    server.stdin.flush()
    waiting = select.poll()  # a long session has more files open than `select` can name
    waiting.register(server.stdout, select.POLLIN)
    answered = waiting.poll((WAIT_S + 60) * 1000)
    assert answered and server.stdout.readline() == "0\n", errors.read_text()[-4000:]  # noqa: PT018
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(trainers + shards)]


class Rank:
    """One process: a trainer, with its shard where fused, or a shard."""

    def __init__(self, ask, rank, material):
        from nonet.workers.roles.embedding import EmbeddingShard
        from nonet.workers.roles.trainer import Trainer
        from nonet.workers.runtime.worker import Place

        self.ask, self.rank = ask, rank
        self.setup, self.stages, folders, ttl, trainer_class, self.options = material
        trains = rank < ask["trainers"]
        self.shard = None if trains and ask["shards"] else EmbeddingShard(self.setup)
        self.trainer = (trainer_class or Trainer)(self.setup) if trains else None
        self.rollout, self.folders = None, folders
        peers = {"embedding": self.shard} if self.shard else {}
        for role in filter(None, (self.trainer, self.shard)):
            apart = rank - ask["trainers"]
            name, at, world = (
                ("trainer", rank, ask["trainers"]) if trains else ("embedding", apart, ask["shards"])
            )
            role.place = Place(role=name, rank=at, world=world, peers=peers)
            role.set_ttl_steps(ttl)
        self._join_process_group()
        if self.trainer:
            self.trainer.open(folders)

    def _join_process_group(self, epoch=0):
        from nonet.workers.runtime.rendezvous import Rendezvous, StoreAddress

        trainers, shards = self.ask["trainers"], self.ask["shards"]
        if trainers + shards == 1:
            return
        where = Path(self.ask["folder"]) / ("store.json" if not epoch else f"store-{epoch}.json")
        if self.rank == 0:
            where.with_suffix(".tmp").write_text(json.dumps(self.trainer.open_rendezvous().name))
            where.with_suffix(".tmp").rename(where)
        until = time.monotonic() + WAIT_S
        while not where.exists() and time.monotonic() < until:
            time.sleep(0.01)
        store = StoreAddress(json.loads(where.read_text()))
        (self.trainer or self.shard).join_process_group(Rendezvous(store, epoch, trainers, shards))

    def rejoin(self, epoch):
        self._join_process_group(epoch)

    def play(self):
        from nonet.workers.engines import MEASURED

        found = {"records": [], "counts": []}
        for what, *args in self.ask["acts"]:
            answer = getattr(self, what)(*args)
            if what in ("train", "update", "beams", "evaluate") and self.trainer:
                found["records"] += [{k: v for k, v in r.items() if k not in MEASURED} for r in answer]
            if self.shard:
                found["counts"].append(self.shard.pop_counts())
        if self.trainer:
            found["held"] = sum(tensor.nbytes for tensor in self.trainer.device_tensors())
        return found

    def begin(self, stage):
        if self.trainer:
            self.trainer.begin(self.stages[stage])

    def train(self, stage, start, stop):
        return self.trainer.train(self.stages[stage], start, stop) if self.trainer else self.shard.serve()

    def fit_memory(self):
        self.trainer.fit_memory()

    def beams(self, stage, step, draw):
        """Return this rank's beams of an RL step, drawn with the options `draw`."""
        made = self.generate(stage, step, draw=draw)
        return [{name: made[name].tolist() for name in ("user", "item", "logp") if name in made}]

    def disturb(self):
        """Change the weights outside the blocks on the ranks that do not lead a tensor group, as much rounding would."""
        import torch

        if self.trainer.dense.member.leads_tensor_group:
            return
        draw = torch.Generator().manual_seed(1)
        for name, weight in self.trainer.model.named_parameters():
            part = getattr(weight, "to_local", lambda weight=weight: weight)().detach()
            if not name.startswith(("blocks.", "backbone.")):
                part.add_(torch.randn(part.shape, generator=draw))

    def generate(self, stage, step, width=4, draw=None):
        """Publish the trainers' rows and generate this rank's share of the beams of an RL step, fused with the trainer."""
        from nonet.workers.roles import RolloutRequest
        from nonet.workers.roles.rollout import Rollout
        from nonet.workers.runtime.worker import Place

        if self.rollout is None:
            self.rollout = Rollout(self.setup)
            peers = {"trainer": self.trainer, **({"embedding": self.shard} if self.shard else {})}
            self.rollout.place = Place("rollout", self.rank, self.ask["trainers"], peers=peers)
            self.rollout.open(self.folders)
        self.rollout.apply(step, sparse=self._export_all(step))
        n_ranks = self.trainer.ranks_per_share
        part = self.rank // n_ranks, self.ask["trainers"] // n_ranks
        # Ranks have different numbers of chunks.
        request = RolloutRequest(stage, step, width, step, chunk=3, draw=draw or {})
        return self.rollout.generate_group(self.stages[stage].users, part, request)

    def update(self, stage, start, stop):
        """Take RL steps on this rank's share of the prompts, with rewards that follow from the prompts and items alone."""
        import numpy as np

        from nonet.workers.roles import UpdateRequest

        records = []
        for step in range(start, stop):
            beams = self.generate(stage, step)
            score = ((beams["item"] * 7 + beams["user"][:, None]) % 5).astype(np.float32) * beams["valid"]
            scores = {name: score + index for index, name in enumerate(self.stages[stage].weights)}
            records.append(self.trainer.update(UpdateRequest(self.stages[stage], step), beams, scores))
        return records

    def evaluate(self, name):
        """Rank the held-out events with a checkpoint, each rank its share; rank 0 returns the metrics."""
        import torch

        from nonet.workers.roles.evaluation import Evaluator
        from nonet.workers.runtime.worker import Place

        evaluator = Evaluator(self.setup, self.options)
        peers = {"trainer": self.trainer}
        evaluator.place = Place("evaluator", self.rank, self.ask["trainers"], peers=peers)
        evaluator.open(self.folders, str(Path(self.ask["folder"]) / "results"))
        folder = str(Path(self.ask["data"]) / name)
        shares = [evaluator.evaluate_share(folder)] * self.ask["trainers"]
        if torch.distributed.is_initialized():
            torch.distributed.all_gather_object(shares, shares[0])
        validated = evaluator.validate("pretrain", folder)
        if self.rank:
            return []
        detail = evaluator.combine_shares(name, [part for parts in shares for part in parts])["detail"]
        ranked = {
            f"{split}.{way}": metrics["all"]
            for split, ways in detail.items()
            for way, metrics in ways.items()
        }
        ranked["validated"] = validated["metrics"] | {"nats": validated["nats"]}
        return [
            {f"{way}.{name}": value for way, metrics in ranked.items() for name, value in metrics.items()}
        ]

    def _export_all(self, version):
        import torch

        own, trainers = self.shard.export(version), self.ask["trainers"]
        if trainers == 1:
            return own
        updates = [None] * trainers
        torch.distributed.all_gather_object(updates, own)
        return [update for updates_of_rank in updates for update in updates_of_rank]

    def publish(self, name):
        """Pack the weights for rollouts in other processes; rank 0 publishes a checkpoint and copies its weights."""
        from nonet.workers.registry import VersionContents, VersionRegistry

        for bucket in range(len(self.trainer._outgoing.buckets)):
            self.trainer.export_weights(bucket)
        if self.rank:
            return
        registry = VersionRegistry(Path(self.ask["folder"]) / "registry")
        version = self.trainer.corpus.trie.version
        commit = Path(self.ask["data"]) / name
        contents = VersionContents.from_commit(commit, self.setup, self.folders, version, {"commit": name})
        dense, _ = registry.locate_files(registry.publish(contents))
        shutil.copyfile(dense, Path(self.ask["folder"]) / "exported.safetensors")

    def reshard(self, shards):
        return self.trainer.reshard(shards) if self.trainer else self.shard.serve()

    def save(self, name):
        import torch

        for role in filter(None, (self.trainer, self.shard)):
            role.save(str(Path(self.ask["data"]) / name))
        if torch.distributed.is_initialized():
            torch.distributed.barrier()  # A rank may read what others have written.

    def load(self, name, stage):
        if self.trainer:
            self.trainer.load(str(Path(self.ask["data"]) / name), self.stages[stage])
        if self.shard:
            self.shard.load(str(Path(self.ask["data"]) / name))


def _material(ask):
    from nonet.controller.scenario.scenario import load_scenario
    from nonet.controller.scenario.table_options import compute_ttl_steps
    from nonet.controller.setup.run_files import make_data_setup
    from nonet.controller.setup.worker_setup import make_run_setup, make_stage_setups
    from nonet.workers.roles.artifacts.tokenizer import Tokeniser
    from nonet.workers.roles.click.tokenizer import ClickTokeniser
    from nonet.workers.roles.click.trainer import ClickTrainer

    scenario, beside = load_scenario(ask["scenario"], ask["changes"])
    clicks = scenario.model.use == "deepfm"
    kept = Path(ask["data"]) / "facts.json"
    if not kept.exists():
        tokeniser = ClickTokeniser() if clicks else Tokeniser()
        kept.write_text(json.dumps(tokeniser.prepare(make_data_setup(scenario, beside), ask["data"])))
    facts = json.loads(kept.read_text())
    folders = {kind: artifact["path"] for kind, artifact in facts["artifacts"].items()}
    stages = make_stage_setups(scenario, facts["data"]["users"], facts["data"]["trained_events"])
    ttl = compute_ttl_steps(scenario, facts["data"], {name: stage.steps for name, stage in stages.items()})
    trainer_class = ClickTrainer if clicks else None
    return make_run_setup(scenario), stages, folders, ttl, trainer_class, scenario.evaluate


def _play(ask, rank, material):
    from live_bytes import LiveBytes

    with LiveBytes(ask["limit"]) if ask["counts_bytes"] else nullcontext() as live:
        ranked = Rank(ask, rank, material)
        found = ranked.play()
    if live is not None:
        named, whole = ranked.trainer.model.named_parameters(), ranked.trainer.dense.describe_weights()
        weights = sum(whole.get(name, p).numel() for name, p in named) * 4
        found["peak"] = live.peak / weights
    (Path(ask["folder"]) / f"{rank}.json").write_text(json.dumps(found))


def _main(ask):
    import torch

    sys.path.insert(0, str(Path(__file__).parent.parent / "embedding"))
    from forked_ranks import codes_of, forked

    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False
    material = _material(ask)
    ranks = range(ask["trainers"] + ask["shards"])
    children = [forked(lambda rank=rank: _play(ask, rank, material)) for rank in ranks]
    codes = codes_of(children, WAIT_S, stop_at_failure=True)
    return 0 if len(codes) == len(children) and not any(codes.values()) else 1


if __name__ == "__main__":
    _serve()
