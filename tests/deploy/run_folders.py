"""Folders of runs that were made in this process, without Ray: the ring's data, ranks, a commit."""

from __future__ import annotations

import shutil

import numpy as np

from nonet.background import seal_files
from nonet.controller.record.checkpoint import Checkpoints, Manifest
from nonet.controller.record.run_folder import RunFolder

END = 18  # step of the commit that ends the ring's first stage


def folder_of(ring, path, **ranks):
    """Make a run's folder with the ring's data; ranks: subject -> ranks of its test events."""
    run = RunFolder(path)
    path.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(ring.scenario, run.scenario)
    run.write_json("results/tokenise.json", ring.facts)
    for subject, values in ranks.items():
        np.savez(run.results / f"{subject}.npz", **{"test.exhaustive": np.asarray(values)})
    return run


def commit(run, world):
    """Put what a world is into the run, as the commit that ends pretrain; its folder."""
    checkpoints = Checkpoints(run.checkpoints)
    aside = checkpoints.create_staging_dir(END)
    world.save(aside)
    files = seal_files(aside, [path for path in aside.rglob("*") if path.is_file()])
    return checkpoints.complete(aside, Manifest("run", END, "pretrain", END, True, 1, "s", {}, {}, 0), files)
