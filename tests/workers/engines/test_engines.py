"""Engines are found by name and in files of one's own; one from a file trains the ring, commits it and is published."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from forked_roles import played
from ring_world import Ring

from nonet.controller.scenario import check_scenario
from nonet.controller.scenario.scenario import load_scenario, make_scenario
from nonet.controller.setup.own_files import list_named_files
from nonet.errors import ConfigError
from nonet.workers.engines import ENGINES, OptimizerOptions, TrainEngine, make_engine
from nonet.workers.roles import RolloutRequest
from nonet.workers.roles.rollout import Rollout
from nonet.workers.runtime.rendezvous import Membership

EXTEND = Path(__file__).parents[3] / "docs" / "how-to" / "extend.md"

# Nothing of the shipped engine is in it: the whole protocol, with plain gradient descent.
WHOLE = """
import torch

from nonet.options import Rate, StrictModel
from nonet.workers import copy_to_host, load_model, to_meta_tensors, write_tensors
from nonet.workers.engines import TrainEngine


class Options(StrictModel):
    speed: Rate = 1.0


class Descent:
    def __init__(self, options, model, learning, member):
        self.options, self.model, self.learning, self.member = options, model, learning, member

    def change_process_group(self, member):
        self.member = member

    def restart(self):
        self.model.zero_grad()

    def backward(self, loss):
        loss.backward()

    def clip(self, sparse_norm=0.0):
        return float(torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.learning.clip))

    def step(self, lr):
        with torch.no_grad():
            for p in self.model.parameters():
                if p.grad is not None:
                    p -= self.options["speed"] * lr * p.grad
        self.model.zero_grad()

    def describe_weights(self):
        return to_meta_tensors(self.model.state_dict())

    def gather_weights(self, names):
        state = self.model.state_dict()
        return {name: state[name] for name in names}

    def snapshot(self, saving):
        weights = copy_to_host(self.model.state_dict())

        def write(folder):
            write_tensors(folder / "model.safetensors", weights)
            return [folder / "model.safetensors"]

        return write

    def load(self, folder, *, optimizer):
        load_model(self.model, folder)

    def device_tensors(self):
        return self.model.parameters()


SPEC = TrainEngine(Descent, Options)
"""

# The shipped engine with another optimizer.
SHORT = """
import torch

from nonet.options import Rate, StrictModel
from nonet.workers.engines import Ddp, TrainEngine


class Options(StrictModel):
    speed: Rate = 1.0


class Plain(Ddp):
    def make_optimizer(self):
        return torch.optim.SGD(self.model.parameters(), lr=0.0)

    def step(self, lr):
        super().step(self.options["speed"] * lr)


SPEC = TrainEngine(Plain, Options)
"""

# Stands in for a library that divides weights and owns their optimizer: momentum, of which each rank keeps its own tensors.
LIBRARY = """
import torch
from safetensors.torch import load_file


class Wrapped:
    def __init__(self, model, group):
        self.model = model
        self.join(group)
        self.reset_optimizer()

    def join(self, group):
        self.group = group
        self.rank, self.ranks = (group.rank(), group.size()) if group else (0, 1)
        self.own = list(self.model.named_parameters())[self.rank :: self.ranks]

    def reset_optimizer(self):
        self.momentum = {name: torch.zeros_like(p) for name, p in self.own}
        self.model.zero_grad()

    def backward(self, loss):
        loss.backward()

    def sum_and_clip(self, clip):
        for p in self.model.parameters():
            p.grad = torch.zeros_like(p) if p.grad is None else p.grad
            if self.group:
                torch.distributed.all_reduce(p.grad, group=self.group)
        return float(torch.nn.utils.clip_grad_norm_(self.model.parameters(), clip))

    @torch.no_grad()
    def step(self, lr):
        for name, p in self.own:
            p -= 30 * lr * self.momentum[name].mul_(0.5).add_(p.grad)
        for index, p in enumerate(self.model.parameters()):
            if self.group:
                torch.distributed.broadcast(p.data, group=self.group, group_src=index % self.ranks)
        self.model.zero_grad()

    def gather(self, names):
        state = self.model.state_dict()
        return {name: state[name].clone() for name in names}

    def copy_optimizer(self):
        return {name: value.clone() for name, value in self.momentum.items()}

    def load_optimizer(self, file):
        self.momentum = load_file(file)

    def list_tensors(self):
        return [*self.model.parameters(), *self.momentum.values()]


wrap = Wrapped
"""

# The shipped engine, which counts whom it meets before it is made.
MEETS = """
import torch.distributed as dist

from nonet.workers.engines import Ddp, TrainEngine
from nonet.workers.roles import RolloutRequest


class Meets(Ddp):
    def __init__(self, options, model, learning, member):
        assert dist.get_world_size(member.trainers) == member.n_trainers == 2
        super().__init__(options, model, learning, member)


SPEC = TrainEngine(Meets)
"""


@pytest.fixture(scope="module")
def ring(tmp_path_factory):
    made = Ring(tmp_path_factory.mktemp("ring"))
    (made.scenario.parent / "whole.py").write_text(WHOLE)
    (made.scenario.parent / "short.py").write_text(SHORT)
    (made.scenario.parent / "meets.py").write_text(MEETS)
    return made


def engine(name: str, **options: float) -> str:
    told = "".join(f", {key}: {value}" for key, value in options.items())
    return f"roles.trainer={{engine: {{use: {name}{told}}}}}"


def apart_from(ring, world):
    """Make a separate rollout, moved to what the world's trainer publishes."""
    rollout = Rollout(world.run)
    rollout.open(ring.folders)
    for number in range(len(world.trainer._outgoing.buckets)):
        rollout.receive(1, world.trainer.export_weights(number))
    rollout.apply(1, dense=True, sparse=world.shard.export(1))
    return rollout


@pytest.mark.parametrize("name", ["whole.py:SPEC", "short.py:SPEC"])
def test_an_engine_from_a_file_trains_commits_and_publishes(ring, tmp_path, name):
    world = ring.world(engine(name, speed=300.0), "stages.pretrain.lr=1e-3")
    before = world.weights()
    records = world.train("pretrain", 0, 6)
    assert records[-1]["loss"] < records[0]["loss"] - 0.1
    assert not torch.equal(world.weights(), before)
    again = ring.world(engine(name, speed=300.0), "stages.pretrain.lr=1e-3")
    again.load(world.save(tmp_path / "commit"))
    assert torch.equal(again.weights(), world.weights())
    rollout, beams = apart_from(ring, world), world.beams()
    asked = {"stage": "rl", "step": 0, "width": beams["valid"].shape[1], "version": 1}
    assert np.array_equal(
        rollout.generate(beams["user"], beams["position"], RolloutRequest(**asked))["sid"], beams["sid"]
    )


def test_an_engine_is_made_where_the_trainers_have_met(ring, tmp_path):
    acts = [["begin", "pretrain"], ["train", "pretrain", 0, 2]]
    ranks = played(ring.scenario, tmp_path / "two", acts, changes=[engine("meets.py:SPEC")], trainers=2)
    losses = [[record["loss"] for record in rank["records"]] for rank in ranks]
    assert losses[0] == losses[1]
    expected = [record["loss"] for record in ring.world().train("pretrain", 0, 2)]
    assert losses[0] == pytest.approx(expected, rel=1e-5)  # another order of sums


def test_an_engine_that_leaves_everything_to_a_library_steps_on_two_ranks_and_goes_on_from_its_commit(
    ring, tmp_path, monkeypatch
):
    """The engine is the one of the how-to; a stand-in takes the place of the library."""
    (page,) = re.findall(r'```python title="library_engine.py"\n(.*?)```', EXTEND.read_text(), re.DOTALL)
    (ring.scenario.parent / "library_engine.py").write_text(page)
    (tmp_path / "parallel_library.py").write_text(LIBRARY)
    paths = [str(tmp_path), os.environ.get("PYTHONPATH", "")]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(path for path in paths if path))
    monkeypatch.syspath_prepend(tmp_path)
    change, half = engine("library_engine.py:LIBRARY"), tmp_path / "two"
    first, rest = ["train", "pretrain", 0, 3], ["train", "pretrain", 3, 5]
    acts = [["begin", "pretrain"], first, ["save", "half"], rest, ["load", "half", "pretrain"], rest]
    ranks = played(ring.scenario, half, acts, changes=[change], trainers=2)
    two = [record["loss"] for record in ranks[0]["records"]]
    assert two[5:] == two[3:5]
    assert two[:3] == pytest.approx([r["loss"] for r in ring.world(change).train("pretrain", 0, 3)], rel=1e-5)


def test_both_toys_go_the_same_way(ring):
    ends = []
    for name in ("whole.py:SPEC", "short.py:SPEC"):
        world = ring.world(engine(name, speed=30.0))
        world.train("pretrain", 0, 3)
        ends.append(world.weights())
    torch.testing.assert_close(*ends, rtol=0, atol=1e-6)


def test_the_shipped_engine_is_that_of_a_scenario_that_names_none(ring):
    ends = []
    for changes in ((), (engine("ddp"),)):
        world = ring.world(*changes)
        records = world.train("pretrain", 0, 3)
        ends.append((records, world.weights()))
    assert ends[0][0] == ends[1][0]
    assert torch.equal(ends[0][1], ends[1][1])


def test_trainers_are_told_the_engine_by_an_address_that_any_process_finds(ring, tmp_path, monkeypatch):
    change = engine("short.py:SPEC", speed=2.0)
    assert "short.py" in list_named_files(
        load_scenario(ring.scenario, [change])[0]
    )  # a run works from its copy
    world = ring.world(change)
    assert world.run.engine == {"use": f"{ring.scenario.parent.resolve()}/short.py:SPEC", "speed": 2.0}
    monkeypatch.chdir(tmp_path)
    made = make_engine(world.run.engine, torch.nn.Linear(2, 2), Membership(0, 1), OptimizerOptions(clip=5.0))
    assert (made.options, made.learning.clip) == ({"speed": 2.0}, 5.0)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (
            engine("dpd"),
            r"engine.*'dpd' \(did you mean 'ddp'\?\) does not exist; choose one of: ddp, deepspeed, fsdp2",
        ),
        (engine("short.py:SPEC", sped=2.0), r"sped"),
        (engine("short.py:Plain"), "expected an object of type TrainEngine"),
        (engine("ddp", zero=1), "zero"),
    ],
)
def test_what_is_no_engine_is_said_where_the_scenario_is_read(ring, change, says):
    with pytest.raises(ConfigError, match=says):
        load_scenario(ring.scenario, [change])


@pytest.mark.parametrize(
    ("roles", "says"),
    [
        (
            {"trainer": {"workers": 2, "engine": {"use": "deepspeed", "offload": "optimizer"}}},
            r"offload: optimizer on device cpu, .* \(say offload: none\)",
        ),
        (
            {"trainer": {"pool": "gpu", "engine": {"use": "deepspeed", "zero": 3, "offload": "optimizer"}}},
            r"offload: optimizer with 1 trainer, .*workers: 2",
        ),
        ({"evaluator": {"engine": "ddp"}}, r"roles\.evaluator\.engine \(a run has one engine"),
    ],
)
def test_engines_that_no_run_would_use_are_refused(roles, says):
    body = {
        "name": "own",
        "data": {"interactions": "x"},
        "pools": {"gpu": {"device": "cuda"}},
        "roles": roles,
        "stages": {"pretrain": {"epochs": 1}},
    }
    with pytest.raises(ConfigError, match=says):
        check_scenario(make_scenario(body))


def test_a_named_optimizer_that_the_engine_has_not_is_refused_and_the_default_is_one_that_it_has():
    body = {
        "name": "own",
        "data": {"interactions": "x"},
        "roles": {"trainer": {"engine": {"use": "deepspeed", "zero": 2}}},
        "stages": {"pretrain": {"epochs": 1}},
    }
    made = make_scenario(body)
    check_scenario(made)
    assert made.stages["pretrain"].optimizer.use == "adamw"
    with pytest.raises(ConfigError, match="muon with engine deepspeed"):
        check_scenario(make_scenario({**body, "stages": {"pretrain": {"epochs": 1, "optimizer": "muon"}}}))


def test_facts_are_read_without_torch():
    read = "from nonet.workers.engines import ENGINES as e; [e.get(n) for n in e.list_names()]"
    code = f"import sys; {read}; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, env=os.environ)
    assert all(isinstance(ENGINES.get(name), TrainEngine) for name in ENGINES.list_names())
    assert [ENGINES.get("deepspeed").divides({"zero": zero}) for zero in (1, 2, 3)] == [1, 1, 3]
    assert ENGINES.get("ddp").divides({}) == 0
