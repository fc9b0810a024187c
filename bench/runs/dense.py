"""Compares a training step of the quickstart's model with plain PyTorch loops for the same model, optimizer and data.

The side "ours" is the trainer of a run: it reads windows from its source, deduplicates keys, pulls rows from the sparse tables
and pushes gradients. The side "plain" pads the same batches, looks up rows in nn.Embedding and updates them with torch's
Adagrad. The side "DeepSpeed" is the same loop, in which DeepSpeed updates the dense weights on a single rank. The sides take
turns in one thread. Their losses must agree in the first round, which is not timed.
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
from nonet.bench.timing import LapTimer

# Changes of the quickstart that the plain loop can repeat: no dropout, one optimizer for all dense weights, Adagrad for rows.
_CHANGES = [
    "model.memory=off",
    "model.dropout=0.0",
    "stages.pretrain.ahead=1",
    "stages.pretrain.smoothing=0.0",
    "stages.pretrain.optimizer={use: adamw}",
    "sparse.defaults={optimizer: adagrad, lr: 0.02, eps: 1.0e-10}",
]
_LEARNING_RATE, _MAX_GRAD_NORM, _WEIGHT_DECAY, _BETAS = 1e-3, 1.0, 0.1, (0.9, 0.98)


def bench_dense(steps: int = 20, rounds: int = 7, changes: str = "") -> dict[str, Any]:
    """Time the steps of all sides.

    The ratios are those of CPU times, because every side uses one thread, and wall-clock times on a busy machine depend on
    other processes.

    Args:
        steps: Number of steps of a round.
        rounds: Number of timed rounds of each side.
        changes: Changes of the scenario, separated by `;`.

    Returns:
        Milliseconds of a step of each side as CPU and wall-clock time, medians over rounds; and the CPU time of "ours" divided
        by that of each other side.

    Raises:
        RuntimeError: The losses of the first round differ.
    """
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with tempfile.TemporaryDirectory() as folder:
            change_list = [change for change in changes.split(";") if change]
            ours = _Ours(Path(folder), steps * (rounds + 1), change_list)
            sides: dict[str, Callable[[int], list[float]]] = {"plain": _Plain(ours, None).train}
            if find_spec("deepspeed"):
                sides["DeepSpeed"] = _Plain(ours, _wrap_deepspeed).train
            sides = {"ours": ours.train, **sides}
            times = {name: LapTimer() for name in sides}
            loss_difference = 0.0
            for turn in range(rounds + 1):
                losses = {}
                first = turn % len(sides)  # another side begins in every round
                for name in list(sides)[first:] + list(sides)[:first]:
                    with times[name]:
                        losses[name] = sides[name](steps)
                if turn == 0:
                    loss_difference = max(
                        abs(a / b - 1)
                        for name in sides
                        for a, b in zip(losses[name], losses["ours"], strict=True)
                    )
                    if loss_difference > 1e-4:
                        raise RuntimeError(
                            f"the losses of {steps} steps differ by {loss_difference:.2g}: the sides do not train the same model"
                        )
    finally:
        torch.set_num_threads(threads)
    timers = {name: timer.drop_laps_before(1) for name, timer in times.items()}
    cpu_ms = {name: timer.compute_cpu_us() / 1000 / steps for name, timer in timers.items()}
    row = {f"{name} ms": value for name, value in cpu_ms.items()}
    row |= {
        f"{name} ms by the wall": 1000 * timer.compute_median_s() / steps for name, timer in timers.items()
    }
    row |= {"losses apart": loss_difference}
    ratio = {f"ours / {name}": cpu_ms["ours"] / value for name, value in cpu_ms.items() if name != "ours"}
    return {"rows": [row], "ratio": ratio}


class _Ours:
    """The trainer of a run and its embedding shard in this process, at a constant learning rate.

    Args:
        folder: Folder of the artifacts.
        steps: Number of epochs, so that the stage has enough steps for all rounds.
        changes: Changes of the scenario, `a.b=c`.
    """

    def __init__(self, folder: Path, steps: int, changes: list[str]):
        from nonet.controller.scenario import load_scenario
        from nonet.controller.setup import make_data_setup, make_run_setup, make_stage_setups
        from nonet.workers.roles import EmbeddingShard, Trainer
        from nonet.workers.roles.artifacts import Tokeniser
        from nonet.workers.runtime import Place

        rate = f"stages.pretrain.lr={{peak: {_LEARNING_RATE}, warmup: 0.0, decay: none}}"
        scenario, scenario_dir = load_scenario(
            "quickstart", [*_CHANGES, rate, f"stages.pretrain.epochs={steps}", *changes]
        )
        prepared: dict[str, Any] = Tokeniser().prepare(make_data_setup(scenario, scenario_dir), str(folder))
        run_setup, shard = make_run_setup(scenario), EmbeddingShard(make_run_setup(scenario))
        self.trainer = Trainer(run_setup)
        self.trainer.place = Place(role="trainer", peers={"embedding": shard})
        self.trainer.open({kind: artifact["path"] for kind, artifact in prepared["artifacts"].items()})
        seq = self.trainer.corpus.seq
        self.stage = make_stage_setups(scenario, len(seq), int(seq.count_events()["train"]))["pretrain"]
        self.dims, self.options = run_setup.get_feature_dims(), scenario.model.get_options()
        self.steps, self._next_step = steps, 0
        self.trainer.begin(self.stage)
        self.batches, self.keys = self._read_batches()
        self.trainer.begin(self.stage)  # again, because reading the batches has leased rows of the tables

    def train(self, steps: int) -> list[float]:
        """Run a number of steps and return the loss of each."""
        start, self._next_step = self._next_step, self._next_step + steps
        return [record["loss"] for record in self.trainer.train(self.stage, start, self._next_step)]

    def _read_batches(self) -> tuple[list[list[dict[str, Any]]], dict[str, Any]]:
        """Return the sequences of each step, and the keys of items and of users in the order of the rows of nn.Embedding."""
        from nonet.workers.roles.learners import SupervisedLearner

        learner = self.trainer.get_learner(self.stage)
        assert isinstance(learner, SupervisedLearner)
        steps = [[chunk.batch for chunk in learner.read_batch(step)] for step in range(self.steps)]
        seq = self.trainer.corpus.seq
        user_keys = np.unique(
            np.concatenate([batch.context["user"].numpy() for step in steps for batch in step])
        )
        items = len(self.trainer.corpus.sids)
        keys = {"item": seq.get_item_keys(np.arange(items)), "user": user_keys}
        return [[row for batch in step for row in _split_sequences(batch, user_keys)] for step in steps], keys


class _Plain:
    """The plain PyTorch loop.

    Args:
        ours: The trainer whose model, rows and batches the loop copies.
        make_engine: Makes the engine that updates the model from (model, optimizer); None for plain PyTorch.
    """

    def __init__(self, ours: _Ours, make_engine: Callable[[Any, Any], Any] | None):
        import torch

        self.steps, keys_by_table = ours.batches, ours.keys
        corpus, options = ours.trainer.corpus, ours.options
        model = Decoder(corpus.codes, ours.dims, options["width"], options["layers"], options["heads"])
        model.load_state_dict(ours.trainer.model.state_dict())
        self.rows = torch.nn.ModuleDict()
        for table, keys in keys_by_table.items():
            embedding = torch.nn.Embedding(len(keys), ours.dims[table], sparse=True)
            with torch.no_grad():
                embedding.weight.copy_(ours.trainer.sparse.pull(table, torch.from_numpy(keys)))
            self.rows[table] = embedding
        self.valid_codes = _list_valid_codes(corpus.trie, corpus.sids)
        groups = [
            {"params": [p for p in model.parameters() if p.ndim > 1], "weight_decay": _WEIGHT_DECAY},
            {"params": [p for p in model.parameters() if p.ndim <= 1], "weight_decay": 0.0},
        ]
        self.model: Any = model
        self.optimizer: Any = torch.optim.AdamW(groups, lr=_LEARNING_RATE, betas=_BETAS)
        self.row_optimizer = torch.optim.Adagrad(self.rows.parameters(), lr=0.02, eps=1e-10)
        self.engine = make_engine(model, self.optimizer) if make_engine else None
        self.step_numbers = count()

    def train(self, steps: int) -> list[float]:
        """Run a number of steps and return the loss of each."""
        return [self._step(collate(self.steps[next(self.step_numbers)])) for _ in range(steps)]

    def _step(self, batch: Padded) -> float:
        """Run one step and return its loss."""
        import torch

        targets = int(batch.target.sum())
        loss = (self.engine or self.model)(batch, self.rows, self.valid_codes) / max(targets, 1)
        if self.engine is None:
            loss.backward()
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), _MAX_GRAD_NORM)
            self.optimizer.step()
            self.optimizer.zero_grad()
        else:
            self.engine.backward(loss)
            self.engine.step()
        self.row_optimizer.step()
        self.row_optimizer.zero_grad()
        return float(loss.detach())


def _wrap_deepspeed(model: Any, optimizer: Any) -> Any:
    """Make a DeepSpeed engine on one rank, with ZeRO stage 1."""
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
        "gradient_clipping": _MAX_GRAD_NORM,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "zero_optimization": {"stage": 1},
    }
    return deepspeed.initialize(model=model, optimizer=optimizer, config=config, dist_init_required=False)[0]


def _split_sequences(batch: Any, user_keys: Any) -> Iterator[dict[str, Any]]:
    """Yield the sequences of a packed batch; `user` is the index of the key in `user_keys`."""
    offsets = batch.item.offsets.tolist()
    user = np.searchsorted(user_keys, batch.context["user"].numpy())
    half_stars = (2 * batch.context["rating"].values).round().long().clamp(0, 20)
    values_by_name = {
        "item": batch.item.values,
        "sid": batch.sid,
        "time": batch.time.values,
        "kind": batch.event.values,
        "half_stars": half_stars,
        "target": batch.loss_mask.values,
    }
    for number, (start, stop) in enumerate(pairwise(offsets)):
        sequence = {name: values[start:stop].clone() for name, values in values_by_name.items()}
        yield {**sequence, "user": int(user[number]), "length": stop - start}


def _list_valid_codes(trie: Any, sids: Any) -> list[Any]:
    """Return for each level which codes may follow the prefix of each item: bool masks [I, K]."""
    import torch

    sid_IL = torch.from_numpy(np.asarray(sids)).long()
    node_I, masks = torch.zeros(len(sid_IL), dtype=torch.int64), []
    for level in range(sid_IL.shape[1]):
        child_IK = trie.find_children(level, node_I)
        masks.append(child_IK >= 0)
        node_I = child_IK.gather(1, sid_IL[:, level, None]).squeeze(1)
    return masks
