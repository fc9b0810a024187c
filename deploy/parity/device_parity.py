"""`nonet parity SCENARIO --pools a,b`: run the same weights, batches and seeds in two pools and compare the results.

Compared are every module's output in the order of execution, the loss and its gradients, the distribution
over the catalogue, and the ranking with its metrics. The limits are printed beside the results; if one is
exceeded, the command exits with code 1.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from nonet.controller.cluster import Pool
from nonet.controller.record import Checkpoints, find_run
from nonet.controller.scenario import Scenario
from nonet.controller.setup import make_data_setup, make_run_setup, make_stage_setups
from nonet.deploy.parity.compare import ParityResult, compare, get_limits
from nonet.deploy.run import ScenarioFile
from nonet.errors import ConfigError, PlacementError
from nonet.models.baselines import Popularity
from nonet.models.generation import Corpus
from nonet.models.ranking import make_tie_order, select_event_metrics
from nonet.samples.batches import list_prompts
from nonet.samples.sequences import TEST, TRAIN
from nonet.workers.devices import HOST, PRECISIONS, PoolEnvironment, get_device
from nonet.workers.runtime import ActorGroup, Place, RoleSpec, WorkerGroup, WorkerResources, ensure_ray

_WAIT_S = 600.0
_READY_S = 30.0
_SCORES = 16_000_000  # compared scores per side: 64 MB
_PROMPTS = 512


@dataclass(frozen=True, slots=True)
class ParitySide:
    """One side of the comparison: a pool of the scenario (or the name of a device) and a precision."""

    name: str
    pool: Pool
    precision: str


@dataclass(frozen=True, slots=True)
class ParityInputs:
    """The inputs of both sides.

    Attributes:
        folders: Folders of artifacts by kind.
        commit: The folder of the checkpoint.
        weights: A description of the weights' origin.
    """

    folders: Mapping[str, str]
    commit: str
    weights: str


def compare_pools(
    scenario_file: ScenarioFile,
    pools: str = f"{HOST},{HOST}",
    precision: str = "fp32,fp32",
    *,
    run: str | None = None,
    steps: int = 50,
    limits: Mapping[str, float] | None = None,
) -> ParityResult:
    """Compare two pools on a scenario.

    Args:
        scenario_file: The scenario.
        pools: Two names of pools or devices, separated by a comma.
        precision: The precision of each side, separated by a comma.
        run: The run whose newest checkpoint is used; None to train weights here.
        steps: Supervised steps to train without `run`.
        limits: Limits by name that override the default ones.

    Raises:
        ConfigError: A pool, a precision, a limit or the run is wrong.
        PlacementError: The cluster lacks a device.
    """
    scenario = scenario_file.scenario
    sides = _parse_sides(scenario, pools, precision)
    bounds = get_limits([side.precision for side in sides], limits)
    _check_devices(sides)
    with tempfile.TemporaryDirectory(prefix="nonet-parity-") as scratch:
        material = _load_run_inputs(run) if run else _train_inputs(scenario_file, Path(scratch), steps)
        corpus = Corpus.load(material.folders)
        users, positions = _select_prompts(corpus)
        answers = _run_sides(scenario, sides, material, corpus, users, positions)
    tie = make_tie_order(Popularity(len(corpus.items)).fit(corpus.seq).popularity, scenario.seed)
    return compare(
        answers,
        corpus.seq,
        users,
        positions,
        tie,
        metrics=select_event_metrics(scenario.evaluate.metrics),
        limits=bounds,
        weights=material.weights,
        seed=scenario.seed,
    )


def parse_limits(given: Sequence[str]) -> dict[str, float]:
    """Parse limits: ["kl=1e-3"] becomes {"kl": 1e-3}. Raises ConfigError if a value is not a number."""
    limits = {}
    for text in given:
        name, _, value = text.partition("=")
        try:
            limits[name] = float(value)
        except ValueError:
            raise ConfigError(f"--limit {text!r}: must be NAME=NUMBER, such as kl=1e-3") from None
    return limits


def _parse_sides(scenario: Scenario, pools: str, precision: str) -> list[ParitySide]:
    """Parse the two sides. Raises ConfigError if a pool or precision does not exist."""
    names, precisions = _parse_pair("--pools", pools), _parse_pair("--precision", precision)
    for word in precisions:
        if word not in PRECISIONS:
            raise ConfigError(f"--precision {word!r} is not one of {', '.join(PRECISIONS)}")
    return [
        ParitySide(name, _find_pool(scenario, name), word)
        for name, word in zip(names, precisions, strict=True)
    ]


def _parse_pair(option: str, text: str) -> Sequence[str]:
    """Split an option into two values; a single value is used for both sides. Raises ConfigError for other numbers of values."""
    parts = [part.strip() for part in text.split(",")]
    if len(parts) == 1:
        parts *= 2
    if len(parts) != 2 or not all(parts):
        raise ConfigError(f"{option} {text!r}: give two values, such as a,b, or one for both sides")
    return parts


def _find_pool(scenario: Scenario, name: str) -> Pool:
    """Return the pool of the scenario or, if there is none, a pool of the device with this name.

    Raises:
        ConfigError: There is neither a pool nor a device with this name.
    """
    if name in scenario.pools:
        return scenario.pools[name]
    try:
        get_device(name)
    except ConfigError:
        known = ", ".join(scenario.pools) or "none"
        raise ConfigError(
            f"--pools: {name!r} is neither a pool of {scenario.name} ({known}) nor a device"
        ) from None
    return Pool(device=name)


def _check_devices(sides: Sequence[ParitySide]) -> None:
    """Raise PlacementError unless the cluster has the devices of both sides."""
    import ray

    ensure_ray()
    there = ray.cluster_resources()
    for side in sides:
        resource = get_device(side.pool.device).resource or "CPU"
        if there.get(resource, 0.0) < 1:
            raise PlacementError(
                f"pool {side.name!r} needs 1 {resource}, the cluster has {there.get(resource, 0.0):g}: "
                "use a cluster that has it (RAY_ADDRESS), or compare other pools"
            )


def _load_run_inputs(run: str) -> ParityInputs:
    """Return the artifacts and the newest checkpoint of a run. Raises ConfigError if it has no checkpoint."""
    folder = find_run(run)
    facts = folder.read_facts()
    newest = Checkpoints(folder.checkpoints).find_newest()
    if facts is None or newest is None:
        raise ConfigError(
            f"{folder.id} has no checkpoint to compare with; omit --run to train a few steps here"
        )
    path, manifest = newest
    folders = {kind: artifact["path"] for kind, artifact in facts["artifacts"].items()}
    return ParityInputs(folders, str(path), f"{folder.id}, step {manifest.step} ({manifest.stage})")


def _train_inputs(made: ScenarioFile, scratch: Path, steps: int) -> ParityInputs:
    """Make artifacts and train a few supervised steps in this process.

    The steps run on the host with one thread, as in a planned run.
    """
    import torch

    torch.set_num_threads(1)
    from nonet.workers.roles import EmbeddingShard, Tokeniser, Trainer

    facts = Tokeniser().prepare(make_data_setup(made.scenario, made.folder), str(scratch))
    folders = {kind: artifact["path"] for kind, artifact in facts["artifacts"].items()}
    setup = make_run_setup(made.scenario)
    trainer, shard = Trainer(setup), EmbeddingShard(setup)
    trainer.place = Place(role="trainer", peers={"embedding": shard})
    trainer.open(folders)
    stages = make_stage_setups(made.scenario, facts["data"]["users"], facts["data"]["trained_events"])
    stage = next(iter(stages.values()))
    done = 0 if stage.rolls_out else min(steps, stage.steps)
    trainer.begin(stage)
    trainer.train(stage, 0, done)
    commit = scratch / "commit"
    trainer.save(str(commit))
    shard.save(str(commit))
    return ParityInputs(
        folders, str(commit), f"{done} steps of {stage.name} on {HOST} in fp32, seed {setup.seed}"
    )


def _select_prompts(corpus: Corpus) -> tuple[np.ndarray, np.ndarray]:
    """Select held-out test events, evenly spread, so that the scores of a side take at most 64 MB."""
    users, positions = list_prompts(corpus.seq, TEST)
    most = min(_PROMPTS, max(8, _SCORES // max(1, len(corpus.items))), len(users))
    chosen = np.linspace(0, len(users) - 1, most).round().astype(int)
    return users[chosen], positions[chosen]


def _run_sides(
    scenario: Scenario,
    sides: Sequence[ParitySide],
    material: ParityInputs,
    corpus: Corpus,
    users: np.ndarray,
    positions: np.ndarray,
) -> list[dict[str, Any]]:
    """Run both sides.

    Returns:
        For each side: its description, the modules, loss and gradients of a step, and scores of the
            prompts.
    """
    trained = int((corpus.seq.split == TRAIN).sum())
    stage = next(iter(make_stage_setups(scenario, len(corpus.seq), trained).values()))
    answers = []
    for side in sides:
        with _start_probe(scenario, side) as probe:
            what = probe.open(dict(material.folders), material.commit).get(_WAIT_S)[0]
            learnt = probe.learn(stage, 0).get(_WAIT_S)
            scores = probe.score(users, positions).get(_WAIT_S)
            answers.append({"side": {"pool": side.name, **what}, **learnt, "scores": scores})
    return answers


@contextmanager
def _start_probe(scenario: Scenario, side: ParitySide) -> Iterator[WorkerGroup]:
    """Start a worker in the side's pool: on its device, with its labels and its environment."""
    import ray
    from ray.util.placement_group import placement_group, placement_group_table, remove_placement_group

    from nonet.workers.roles.evaluation import Probe

    kind = get_device(side.pool.device)
    bundle = {kind.resource or "CPU": 1.0}
    spot = placement_group([bundle], bundle_label_selector=[dict(side.pool.labels)])
    try:
        if not spot.wait(_READY_S):
            raise PlacementError(
                f"pool {side.name!r} needs 1 {next(iter(bundle))}"
                + (f" on a node with labels {dict(side.pool.labels)}" if side.pool.labels else "")
                + f"; free now: {ray.available_resources()}"
            )
        env = side.pool.env.model_dump() if side.pool.env else None
        nodes = placement_group_table(spot)["bundles_to_node_id"].values()
        PoolEnvironment.from_options(env).check_interpreter(side.name, nodes)
        hosts = ActorGroup(
            {"probe": RoleSpec(Probe, (make_run_setup(scenario), side.precision))},
            name=f"probe of {side.name}",
            seat=WorkerResources(
                device=side.pool.device,
                cpus=0.0 if kind.resource else 1.0,
                devices=1.0 if kind.resource else 0.0,
                placement_group=spot,
                env=env,
            ),
        )
        hosts.wait_until_ready()
        yield WorkerGroup.from_actors(hosts, "probe")
        hosts.stop()
    finally:
        remove_placement_group(spot)
