"""`nonet parity SCENARIO --pools a,b`: run the same weights, batches and seeds in two pools and compare the results.

It compares every module's output in the order of execution, the loss and its gradients, the distribution
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
from nonet.controller.record import Checkpoints, fetch_artifacts, find_run
from nonet.controller.scenario import Scenario
from nonet.controller.setup import make_data_setup, make_run_setup, make_stage_setups
from nonet.deploy.parity.compare import ParityResult, compare, get_limits
from nonet.deploy.run import ScenarioFile
from nonet.errors import ConfigError, PlacementError
from nonet.models.baselines.kinds import Popularity
from nonet.models.generation import Corpus
from nonet.models.ranking import make_tie_order, select_event_metrics
from nonet.samples.batches import list_prompts
from nonet.samples.sequences import TEST, TRAIN
from nonet.workers.devices import HOST, PRECISIONS, PoolEnvironment, get_device
from nonet.workers.runtime import ActorGroup, Place, RoleSpec, WorkerGroup, WorkerResources, ensure_ray

_CALL_TIMEOUT_S = 600.0  # of a call of a worker
_PLACEMENT_TIMEOUT_S = 30.0  # until the cluster must have a free device
_MAX_SCORES = 16_000_000  # compared scores per side: 64 MB
_MAX_PROMPTS = 512


@dataclass(frozen=True, slots=True)
class ParitySide:
    """One side of the comparison.

    Attributes:
        name: The name of the pool or of the device.
        pool: The pool of the scenario, or a pool of the device.
        precision: "fp32", "bf16" or "fp16".
    """

    name: str
    pool: Pool
    precision: str


@dataclass(frozen=True, slots=True)
class ParityInputs:
    """The data and the weights that both sides load.

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
    """Compare the model of a scenario in two pools.

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
        inputs = _load_run_inputs(run) if run else _train_inputs(scenario_file, Path(scratch), steps)
        corpus = Corpus.load(inputs.folders)
        users, positions = _select_prompts(corpus)
        answers = _run_sides(scenario, sides, inputs, corpus, users, positions)
    tie = make_tie_order(Popularity(len(corpus.items)).fit(corpus.seq).popularity, scenario.seed)
    return compare(
        answers,
        corpus.seq,
        users,
        positions,
        tie,
        metrics=select_event_metrics(scenario.evaluate.metrics),
        limits=bounds,
        weights=inputs.weights,
        seed=scenario.seed,
    )


def parse_limits(texts: Sequence[str]) -> dict[str, float]:
    """Parse limits: ["kl=1e-3"] becomes {"kl": 1e-3}. Raises ConfigError if a value is not a number."""
    limits = {}
    for text in texts:
        name, _, value = text.partition("=")
        try:
            limits[name] = float(value)
        except ValueError:
            raise ConfigError(f"--limit {text!r}: must be NAME=NUMBER, such as kl=1e-3") from None
    return limits


def _parse_sides(scenario: Scenario, pools: str, precision: str) -> list[ParitySide]:
    """Parse the two sides. Raises ConfigError if a pool or precision does not exist."""
    names, precisions = _parse_pair("--pools", pools), _parse_pair("--precision", precision)
    for side_precision in precisions:
        if side_precision not in PRECISIONS:
            raise ConfigError(f"--precision {side_precision!r} is not one of {', '.join(PRECISIONS)}")
    return [
        ParitySide(name, _find_pool(scenario, name), side_precision)
        for name, side_precision in zip(names, precisions, strict=True)
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
    resources = ray.cluster_resources()
    for side in sides:
        resource = get_device(side.pool.device).resource or "CPU"
        available = resources.get(resource, 0.0)
        if available < 1:
            raise PlacementError(
                f"pool {side.name!r} needs 1 {resource}, the cluster has {available:g}: "
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
    folders = fetch_artifacts(facts["artifacts"])
    return ParityInputs(folders, str(path), f"{folder.id}, step {manifest.step} ({manifest.stage})")


def _train_inputs(scenario_file: ScenarioFile, scratch: Path, steps: int) -> ParityInputs:
    """Make artifacts and train a few supervised steps in this process, and save both in the folder `scratch`.

    The steps run on the host with one thread, as in a planned run.
    """
    import torch

    torch.set_num_threads(1)
    from nonet.workers.roles import EmbeddingShard, Trainer
    from nonet.workers.roles.artifacts import Tokeniser

    scenario = scenario_file.scenario
    facts = Tokeniser().prepare(make_data_setup(scenario, scenario_file.folder), str(scratch))
    folders = {kind: artifact["path"] for kind, artifact in facts["artifacts"].items()}
    setup = make_run_setup(scenario)
    trainer, shard = Trainer(setup), EmbeddingShard(setup)
    trainer.place = Place(role="trainer", peers={"embedding": shard})
    trainer.open(folders)
    stages = make_stage_setups(scenario, facts["data"]["users"], facts["data"]["trained_events"])
    stage = next(iter(stages.values()))
    step_count = 0 if stage.rolls_out else min(steps, stage.steps)
    trainer.begin(stage)
    trainer.train(stage, start=0, stop=step_count)
    commit = scratch / "commit"
    trainer.save(str(commit))
    shard.save(str(commit))
    return ParityInputs(
        folders, str(commit), f"{step_count} steps of {stage.name} on {HOST} in fp32, seed {setup.seed}"
    )


def _select_prompts(corpus: Corpus) -> tuple[np.ndarray, np.ndarray]:
    """Select held-out test events, evenly spread, so that the scores of a side take about 64 MB or less.

    Returns:
        The user row [P] and the position [P] of each prompt.
    """
    users, positions = list_prompts(corpus.seq, TEST)
    prompts_of_max_scores = max(8, _MAX_SCORES // max(1, len(corpus.items)))
    prompt_count = min(_MAX_PROMPTS, prompts_of_max_scores, len(users))
    selected = np.linspace(0, len(users) - 1, prompt_count).round().astype(int)
    return users[selected], positions[selected]


def _run_sides(
    scenario: Scenario,
    sides: Sequence[ParitySide],
    inputs: ParityInputs,
    corpus: Corpus,
    users: np.ndarray,
    positions: np.ndarray,
) -> list[dict[str, Any]]:
    """Run a training step of the first stage and score the prompts on each side, one side after the other.

    Returns:
        The answer of each side, as `compare` takes it.
    """
    trained_events = int((corpus.seq.split == TRAIN).sum())
    stage = next(iter(make_stage_setups(scenario, len(corpus.seq), trained_events).values()))
    answers = []
    for side in sides:
        with _start_probe(scenario, side) as probe:
            description = probe.open(dict(inputs.folders), inputs.commit).get(_CALL_TIMEOUT_S)[0]
            step_results = probe.learn(stage, 0).get(_CALL_TIMEOUT_S)
            scores = probe.score(users, positions).get(_CALL_TIMEOUT_S)
            answers.append({"side": {"pool": side.name, **description}, **step_results, "scores": scores})
    return answers


@contextmanager
def _start_probe(scenario: Scenario, side: ParitySide) -> Iterator[WorkerGroup]:
    """Run a worker in the side's pool while the context is open: on its device, with its labels and environment.

    Raises:
        PlacementError: The cluster has no free device with these labels.
    """
    import ray
    from ray.util.placement_group import placement_group, placement_group_table, remove_placement_group

    from nonet.workers.roles.evaluation import Probe

    device = get_device(side.pool.device)
    resource = device.resource or "CPU"
    group = placement_group([{resource: 1.0}], bundle_label_selector=[dict(side.pool.labels)])
    try:
        if not group.wait(_PLACEMENT_TIMEOUT_S):
            raise PlacementError(
                f"pool {side.name!r} needs 1 {resource}"
                + (f" on a node with labels {dict(side.pool.labels)}" if side.pool.labels else "")
                + f"; free now: {ray.available_resources()}"
            )
        env = side.pool.env.model_dump() if side.pool.env else None
        node_ids = placement_group_table(group)["bundles_to_node_id"].values()
        PoolEnvironment.from_options(env).check_interpreter(side.name, node_ids)
        actors = ActorGroup(
            {"probe": RoleSpec(Probe, (make_run_setup(scenario), side.precision))},
            name=f"probe of {side.name}",
            seat=WorkerResources(
                device=side.pool.device,
                cpus=0.0 if device.resource else 1.0,
                devices=1.0 if device.resource else 0.0,
                placement_group=group,
                env=env,
            ),
        )
        actors.wait_until_ready()
        yield WorkerGroup.from_actors(actors, "probe")
        actors.stop()
    finally:
        remove_placement_group(group)
