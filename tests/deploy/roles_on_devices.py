"""Train the ring on cpu and on the stand-in of an NPU, then ask probes on both: python roles_on_devices.py FOLDER.

Prints what it found as JSON.
One process and no Ray: what whole runs and `nonet parity` do on devices, in seconds.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

STEPS = 4


def trained(setup, stage, folders, device: str, folder: Path) -> dict[str, bytes]:
    """Return the checkpoint of a fused trainer after a few steps: bytes by file."""
    from nonet.workers.roles.embedding import EmbeddingShard
    from nonet.workers.roles.trainer import Trainer
    from nonet.workers.runtime.worker import Place

    trainer, shard = Trainer(setup), EmbeddingShard(setup)
    trainer.place = Place(role="trainer", device=device, peers={"embedding": shard})
    trainer.open(folders)
    trainer.begin(stage)
    trainer.train(stage, 0, STEPS)
    for role in (trainer, shard):
        role.save(str(folder))
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def asked(setup, stage, folders, commit: Path, device: str, precision: str, prompts) -> dict:
    """Return what `nonet parity` asks of one side."""
    from nonet.workers.roles.evaluation.probe import Probe
    from nonet.workers.runtime.worker import Place

    probe = Probe(setup, precision)
    probe.place = Place(role="probe", device=device)
    side = {"pool": device, **probe.open(folders, str(commit))}
    return {"side": side, **probe.learn(stage, 0), "scores": probe.score(*prompts)}


def main(folder: Path) -> None:
    os.environ["NONET_ATTENTION"] = "reference"  # else each device takes the kernel made for it
    import torch
    import torch_npu  # before the first backward: autograd makes its queues once

    from nonet.controller.scenario.scenario import load_scenario
    from nonet.controller.setup.run_files import make_data_setup
    from nonet.controller.setup.worker_setup import make_run_setup, make_stage_setups
    from nonet.deploy.parity.compare import compare, get_limits
    from nonet.models.baselines.kinds import Popularity
    from nonet.models.generation.corpus import Corpus
    from nonet.models.ranking.metrics import make_tie_order
    from nonet.samples.batches.prompt_rows import list_prompts
    from nonet.samples.sequences.sequences import TEST
    from nonet.workers.roles.artifacts.tokenizer import Tokeniser

    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    scenario, beside = load_scenario(folder / "ring.yaml")
    facts = Tokeniser().prepare(make_data_setup(scenario, beside), str(folder))
    folders = {kind: artifact["path"] for kind, artifact in facts["artifacts"].items()}
    setup, stage = (
        make_run_setup(scenario),
        make_stage_setups(scenario, facts["data"]["users"], facts["data"]["trained_events"])["pretrain"],
    )
    files = {
        device: trained(setup, stage, folders, device, folder / device[:3]) for device in ("cpu", "npu:0")
    }
    counts = dict(torch_npu.COUNTS)
    corpus = Corpus.load(folders)
    users, positions = list_prompts(corpus.seq, TEST)
    tie = make_tie_order(Popularity(len(corpus.items)).fit(corpus.seq).popularity, scenario.seed)

    def pair(*sides: tuple[str, str]) -> dict:
        answers = [asked(setup, stage, folders, folder / "cpu", *side, (users, positions)) for side in sides]
        found = compare(
            answers, corpus.seq, users, positions, tie, metrics=list(scenario.evaluate.metrics),
            limits=get_limits([precision for _, precision in sides], None), weights="", seed=scenario.seed,
        )  # fmt: skip
        return found.as_dict()

    print(
        json.dumps(
            {
                "files": sorted(files["cpu"]),
                "different": [
                    name for name in files["cpu"] if files["cpu"][name] != files["npu:0"].get(name)
                ],
                "counts": counts,
                "npu": pair(("cpu", "fp32"), ("npu:0", "fp32")),
                "half": pair(("cpu", "fp32"), ("cpu", "bf16")),
            }
        )
    )


if __name__ == "__main__":
    main(Path(sys.argv[1]))
