"""Finished runs of the stranger's shop, made in this process without Ray: stages, checkpoints, results and report."""

from __future__ import annotations

from pathlib import Path

from ring_world import Prepared, World, get_role, scores_of

from nonet.background import seal_files
from nonet.controller.record import Checkpoints, Manifest, RunFolder
from nonet.controller.report import make_report
from nonet.controller.scenario import check_scenario, load_scenario
from nonet.controller.session.artifacts import list_artifact_hashes
from nonet.controller.setup import (
    find_warm_start,
    fix_sources,
    make_baseline_options,
    make_run_setup,
    preflight,
    read_copies,
    write_run,
)
from nonet.workers.roles.evaluation import Evaluator


def make_run(scenario_path: Path, folder: Path) -> RunFolder:
    """Train, evaluate and report a scenario into the folder of a run, as `nonet run` does.

    Raises:
        ConfigError: The scenario cannot be run.
        DataError: The data cannot be used.
    """
    loaded, beside = load_scenario(scenario_path)
    check_scenario(loaded)
    preflight.check(loaded, beside)
    loaded = fix_sources(loaded, resume=False, run=None)
    run = RunFolder(folder)
    sha256 = write_run(loaded, beside, run)
    warm_start = find_warm_start(loaded)
    prepared = Prepared(run.scenario, run.path, warm_start and warm_start.known, beside)
    if warm_start is not None:
        prepared.facts["init"] = warm_start.as_dict() | prepared.facts.get("init", {})
    run.write_facts(prepared.facts)
    scenario = loaded.relocate(read_copies(run))
    world = prepared.world()
    if warm_start is not None:
        world.load(Path(warm_start.commit))
    evaluator = get_role(scenario, "evaluator", Evaluator)(
        make_run_setup(scenario), scenario.evaluate.locate_baselines()
    )
    evaluator.open(prepared.folders, str(run.results))
    for name in make_baseline_options(scenario):
        while "fitting" in (result := evaluator.evaluate_baseline(name)):
            pass
        run.write_json(f"results/{name}.json", result)
    step = warm_start.step if warm_start else 0
    for name, stage in world.stages.items():
        if stage.rolls_out:
            _reinforce(world, name)
        else:
            world.train(name)
            if scenario.model.list_voters():
                world.trainer.fit_memory()
        step += stage.steps
        facts = (step, name, stage.steps, True, 1, sha256, list_artifact_hashes(prepared.facts), {}, 0)
        checkpoint = _write_checkpoint(run, world, Manifest(run.id, *facts))
        run.write_json(f"results/{name}.json", evaluator.evaluate(name, str(checkpoint)))
    pairs = [(stage, other) for stage in world.stages for other in make_baseline_options(scenario)]
    comparison = {"paired": evaluator.compare(pairs), "shown": evaluator.list_shown_users()}
    run.write_json("results/comparison.json", comparison)
    run.metrics.touch()
    make_report(run, scenario, {}, {}, {"idle": {}, "bytes_out": {}, "moved": {}, "published": {}})
    return run


def _write_checkpoint(run: RunFolder, world: World, manifest: Manifest) -> Path:
    """Write the checkpoint that ends a stage, and return its folder."""
    checkpoints = Checkpoints(run.checkpoints)
    staging = checkpoints.create_staging_dir(manifest.step)
    world.save(staging)
    files = seal_files(staging, [path for path in staging.rglob("*") if path.is_file()])
    return checkpoints.complete(staging, manifest, files)


def _reinforce(world: World, name: str) -> None:
    """Train an RL stage with scores that are drawn from the number of the step."""
    world.trainer.begin(world.stages[name])
    for step in range(world.stages[name].steps):
        beams = world.beams(step, stage=name)
        scores = dict(zip(("hit", "cheap"), scores_of(beams, step).values(), strict=True))
        world.update(beams, scores, step)
