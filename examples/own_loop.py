"""An RL loop of one's own: the quickstart's rl stage, with its loss printed.

Run it after `nonet run quickstart`, from the folder that holds `runs`: it goes on from that run's finetuned model in a
folder of its own.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import nonet
from nonet.controller.record import RunFolder, find_run


def main() -> None:
    finished = find_run("last")
    own = Path("runs-own") / "rl"
    if not own.exists():
        shutil.copytree(finished.path, own)
        for commit in sorted(
            (own / "checkpoints").iterdir()
        ):  # forget the shipped rl stage: keep what ends finetune
            if commit.name > _end_of(own, "finetune"):
                shutil.rmtree(commit)
    with nonet.Session(
        own / "scenario.yaml", folder=own / "sources", run=RunFolder(own.absolute()), resume=True
    ) as s:
        for step, prompts in s.prompts("rl"):
            beams = s.rollout.generate(prompts)
            record = s.trainer.update(beams, s.reward.score(beams))
            s.publish()
            s.commit(step)
            print(f"step {step}: loss {record['loss']:.4f}, kl {record['kl']:.5f}")


def _end_of(run: Path, stage: str) -> str:
    from nonet.controller.record import Checkpoints

    return Checkpoints(run / "checkpoints").end_of(stage).name


if __name__ == "__main__":
    main()
