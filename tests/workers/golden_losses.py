"""Losses of the first steps of every stage on the ring, with dropout: what test_golden_losses.py holds a build to.

    python tests/workers/golden_losses.py --write

writes golden/losses.json anew. Do so only where a change means to change numbers, and say in its note why.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "deploy"))

from ring_world import Ring, scores_of

FILE = Path(__file__).parent / "golden" / "losses.json"
# RL at ten times the ring's rate: its policy then leaves the reference within three steps.
CHANGES = ("model.dropout=0.1", "stages.rl.lr=1e-3")
STEPS = {"pretrain": 5, "finetune": 3, "rl": 3}
KEPT = {
    "pretrain": ("loss", "norm", "events"),
    "finetune": ("loss", "norm", "events"),
    "rl": ("loss", "kl", "ratio", "norm"),
}


def first_losses(folder: Path) -> dict[str, list[dict[str, float]]]:
    """Return records of the first steps of pretrain, then finetune, then rl on real beams, by stage."""
    world = Ring(folder).world(*CHANGES)
    found = {name: world.train(name, 0, STEPS[name]) for name in ("pretrain", "finetune")}
    world.trainer.begin(world.stages["rl"])
    found["rl"] = []
    for step in range(STEPS["rl"]):
        beams = world.beams(step)
        found["rl"].append(world.update(beams, scores_of(beams, step), step))
    return {
        name: [{key: record[key] for key in KEPT[name]} for record in records]
        for name, records in found.items()
    }


def _main() -> None:
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        text = json.dumps(first_losses(Path(folder)), indent=1)
    if "--write" in sys.argv:
        FILE.parent.mkdir(exist_ok=True)
        FILE.write_text(text + "\n")
    print(text)


if __name__ == "__main__":
    _main()
