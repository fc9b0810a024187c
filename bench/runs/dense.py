"""A training step of the quickstart's model beside a plain PyTorch loop of the same model, optimizer and data, and DeepSpeed's.

Ours is the trainer of a run: it reads windows from its source, deduplicates keys, pulls rows from the sparse tables
and pushes gradients. The others pad the same batches, look rows up in nn.Embedding and update them by torch's
Adagrad; DeepSpeed steps the dense part of that loop on a single rank. One thread, in turns; the first losses must
agree before anything is timed.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from itertools import count, pairwise
from pathlib import Path
from typing import Any

import numpy as np

from nonet.bench.runs.plain_decoder import Decoder, Padded, collate
from nonet.timing import LapTimer

_CHANGES = [
    "model.memory=off",
    "model.dropout=0.0",
    "stages.pretrain.ahead=1",
    "stages.pretrain.smoothing=0.0",
    "stages.pretrain.optimizer={use: adamw}",
    "sparse.defaults={optimizer: adagrad, lr: 0.02, eps: 1.0e-10}",
]
_LEARN, _CLIP, _DECAY, _BETAS = 1e-3, 1.0, 0.1, (0.9, 0.98)


def bench_dense(steps: int = 20, rounds: int = 7, changes: str = "") -> dict[str, Any]:
    """Time the steps of all sides.

    CPU times are compared, since every side works in one thread, and the wall clock of a busy machine includes other
    processes.

    Args:
        steps: Steps of a round.
        rounds: Timed rounds of each side.
        changes: Changes of the scenario, separated by `;`.

    Returns:
        Milliseconds of a step of each side, medians over rounds, as wall and CPU time; ratios of CPU times, ours /
        theirs.
    """
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with tempfile.TemporaryDirectory() as folder:
            ours = _Ours(Path(folder), steps * (rounds + 1), [each for each in changes.split(";") if each])
            sides: dict[str, Callable[[int], list[float]]] = {"plain": _Plain(ours, None).train}
            if find_spec("deepspeed"):
                sides["DeepSpeed"] = _Plain(ours, _wrap_deepspeed).train
            sides = {"ours": ours.train, **sides}
            times = {name: LapTimer() for name in sides}
            apart = 0.0
            for turn in range(rounds + 1):
                losses = {}
                for name in list(sides)[turn % len(sides) :] + list(sides)[: turn % len(sides)]:
                    with times[name]:
                        losses[name] = sides[name](steps)
                if turn == 0:
                    apart = max(
                        abs(a / b - 1)
                        for name in sides
                        for a, b in zip(losses[name], losses["ours"], strict=True)
                    )
                    if apart > 1e-4:
                        raise RuntimeError(
                            f"losses of {steps} steps are {apart:.2g} apart: not the same model"
                        )
    finally:
        torch.set_num_threads(threads)
    later = {name: taken.drop_laps_before(1) for name, taken in times.items()}
    each = {name: taken.compute_cpu_us() / 1000 / steps for name, taken in later.items()}
    row = {f"{name} ms": value for name, value in each.items()}
    row |= {
        f"{name} ms by the wall": 1000 * taken.compute_median_s() / steps for name, taken in later.items()
    }
    row |= {"losses apart": apart}
    ratio = {f"ours / {name}": each["ours"] / value for name, value in each.items() if name != "ours"}
    return {"rows": [row], "ratio": ratio}


class _Ours:
    """Trainer and shard in this process, at a constant learning rate."""

    def __init__(self, folder: Path, steps: int, changes: list[str]):
        from nonet.controller.scenario import load_scenario
        from nonet.controller.setup import make_data_setup, make_run_setup, make_stage_setups
        from nonet.workers.roles import EmbeddingShard, Tokeniser, Trainer
        from nonet.workers.runtime import Place

        rate = f"stages.pretrain.lr={{peak: {_LEARN}, warmup: 0.0, decay: none}}"
        scenario, beside = load_scenario(
            "quickstart", [*_CHANGES, rate, f"stages.pretrain.epochs={steps}", *changes]
        )
        facts: dict[str, Any] = Tokeniser().prepare(make_data_setup(scenario, beside), str(folder))
        run, shard = make_run_setup(scenario), EmbeddingShard(make_run_setup(scenario))
        self.trainer = Trainer(run)
        self.trainer.place = Place(role="trainer", peers={"embedding": shard})
        self.trainer.open({kind: artifact["path"] for kind, artifact in facts["artifacts"].items()})
        seq = self.trainer.corpus.seq
        self.stage = make_stage_setups(scenario, len(seq), int(seq.count_events()["train"]))["pretrain"]
        self.dims, self.options, self.steps, self._at = (
            run.get_feature_dims(),
            scenario.model.get_options(),
            steps,
            0,
        )
        self.trainer.begin(self.stage)
        self.batches, self.keys = self._read_batches()
        self.trainer.begin(self.stage)  # for reading leased its rows

    def train(self, steps: int) -> list[float]:
        """Run so many steps. Returns the loss of each."""
        start, self._at = self._at, self._at + steps
        return [record["loss"] for record in self.trainer.train(self.stage, start, self._at)]

    def _read_batches(self) -> tuple[list[list[dict[str, Any]]], dict[str, Any]]:
        """Return the sequences of all steps as tensors, and the keys of items and users by their position in nn.Embedding."""
        from nonet.workers.roles.learners import SupervisedLearner

        learner = self.trainer.get_learner(self.stage)
        assert isinstance(learner, SupervisedLearner)
        steps = [[chunk.batch for chunk in learner.read_batch(step)] for step in range(self.steps)]
        seq = self.trainer.corpus.seq
        user = np.unique(np.concatenate([batch.context["user"].numpy() for step in steps for batch in step]))
        items = len(self.trainer.corpus.sids)
        keys = {"item": seq.get_item_keys(np.arange(items)), "user": user}
        return [[row for batch in step for row in _split_sequences(batch, user)] for step in steps], keys


class _Plain:
    """The plain loop; `wrap` maps (model, optimizer) to the engine that steps them."""

    def __init__(self, ours: _Ours, wrap: Callable[[Any, Any], Any] | None):
        import torch

        self.steps, keys = ours.batches, ours.keys
        corpus, o = ours.trainer.corpus, ours.options
        model = Decoder(corpus.codes, ours.dims, o["width"], o["layers"], o["heads"])
        model.load_state_dict(ours.trainer.model.state_dict())
        self.rows = torch.nn.ModuleDict()
        for table, known in keys.items():
            embedding = torch.nn.Embedding(len(known), ours.dims[table], sparse=True)
            with torch.no_grad():
                embedding.weight.copy_(ours.trainer.sparse.pull(table, torch.from_numpy(known)))
            self.rows[table] = embedding
        self.legal = _list_legal_codes(corpus.trie, corpus.sids)
        groups = [
            {"params": [p for p in model.parameters() if p.ndim > 1], "weight_decay": _DECAY},
            {"params": [p for p in model.parameters() if p.ndim <= 1], "weight_decay": 0.0},
        ]
        self.model: Any = model
        self.optimizer: Any = torch.optim.AdamW(groups, lr=_LEARN, betas=_BETAS)
        self.of_rows = torch.optim.Adagrad(self.rows.parameters(), lr=0.02, eps=1e-10)
        self.engine = wrap(model, self.optimizer) if wrap else None
        self.next = count()

    def train(self, steps: int) -> list[float]:
        """Run so many steps. Returns the loss of each."""
        return [self._step(collate(self.steps[next(self.next)])) for _ in range(steps)]

    def _step(self, batch: Padded) -> float:
        """Run one step. Returns its loss."""
        import torch

        targets = int(batch.target.sum())
        loss = (self.engine or self.model)(batch, self.rows, self.legal) / max(targets, 1)
        if self.engine is None:
            loss.backward()
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), _CLIP)
            self.optimizer.step()
            self.optimizer.zero_grad()
        else:
            self.engine.backward(loss)
            self.engine.step()
        self.of_rows.step()
        self.of_rows.zero_grad()
        return float(loss.detach())


def _wrap_deepspeed(model: Any, optimizer: Any) -> Any:
    """Make DeepSpeed's engine on one rank with ZeRO 1."""
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    for name, value in (
        ("MASTER_ADDR", "127.0.0.1"),
        ("MASTER_PORT", "0"),
        ("RANK", "0"),
        ("WORLD_SIZE", "1"),
    ):
        os.environ.setdefault(name, value)
    os.environ.setdefault("LOCAL_RANK", "0")
    import deepspeed  # pyright: ignore[reportMissingImports]
    import torch

    if not torch.distributed.is_initialized():
        torch.distributed.init_process_group(
            "gloo", store=torch.distributed.HashStore(), rank=0, world_size=1
        )
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": _CLIP,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "zero_optimization": {"stage": 1},
    }
    return deepspeed.initialize(model=model, optimizer=optimizer, config=config, dist_init_required=False)[0]


def _split_sequences(batch: Any, users: Any) -> Iterator[dict[str, Any]]:
    """Yield the sequences of a packed batch, with users as positions in `users`."""
    offsets = batch.item.offsets.tolist()
    user = np.searchsorted(users, batch.context["user"].numpy())
    half_stars = (2 * batch.context["rating"].values).round().long().clamp(0, 20)
    named = {
        "item": batch.item.values,
        "sid": batch.sid,
        "time": batch.time.values,
        "kind": batch.event.values,
        "half_stars": half_stars,
        "target": batch.loss_mask.values,
    }
    for number, (start, stop) in enumerate(pairwise(offsets)):
        sequence = {name: values[start:stop].clone() for name, values in named.items()}
        yield {**sequence, "user": int(user[number]), "length": stop - start}


def _list_legal_codes(trie: Any, sids: Any) -> list[Any]:
    """Return by level which codes the prefix of each item allows [I, K]."""
    import torch

    sid_IL = torch.from_numpy(np.asarray(sids)).long()
    node_I, legal = torch.zeros(len(sid_IL), dtype=torch.int64), []
    for level in range(sid_IL.shape[1]):
        child_IK = trie.find_children(level, node_I)
        legal.append(child_IK >= 0)
        node_I = child_IK.gather(1, sid_IL[:, level, None]).squeeze(1)
    return legal
