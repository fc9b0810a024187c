"""`nonet bench agreement --set run=RUN`: beams of a run's newest checkpoint beside the trainer's log-probabilities of them.

Beams are those of rollouts; `compute_policy_log_prob` after a separate prefill is what an RL step trains with.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from nonet.controller.record import Checkpoints
from nonet.deploy.opened import OpenedRun
from nonet.models.generation import compute_policy_log_prob
from nonet.samples.batches import sample_prompts
from nonet.samples.sequences import TEST
from nonet.workers.roles.evaluation import load_recommender

# Shapes: U prompts, W beams, L levels.


@torch.no_grad()
def bench_agreement(
    run: str = "last", prompts: int = 256, width: int = 16, chunk: int = 64
) -> dict[str, Any]:
    """Return the number of beams of drawn test prompts, how many are illegal, and the largest difference in nats."""
    torch.set_num_threads(1)
    opened = OpenedRun.open(run)
    folder, _ = Checkpoints(opened.folder.checkpoints).find_newest() or (None, None)
    assert folder is not None, "a run that can be opened has a commit"
    recommender, corpus = load_recommender(opened.setup, opened.corpus, folder), opened.corpus
    users, positions = sample_prompts(corpus.seq, TEST, prompts, opened.setup.seed)
    beams, illegal, apart = 0, 0, 0.0
    for batch, u, p in recommender.iterate_batches(users, positions, chunk):
        answer = recommender.generate_beams(batch, width, u, p)
        cache, votes = recommender.prefill(batch), recommender.compute_votes(u, p)
        again = compute_policy_log_prob(recommender.model, cache, answer.sid, corpus.trie, votes)
        there = answer.valid.numpy()
        item, sid = answer.item.numpy()[there], answer.sid.numpy()[there]
        beams, illegal = beams + len(item), illegal + int((corpus.sids[item] != sid).any(-1).sum())
        twice = sum(
            len(row) - len(np.unique(row))
            for row in (r[t] for r, t in zip(answer.item.numpy(), there, strict=True))
        )
        illegal, apart = illegal + twice, max(apart, float((again - answer.logp).abs().max()))
    row = {
        "run": opened.folder.id,
        "prompts": len(users),
        "beams": beams,
        "illegal": illegal,
        "nats apart": apart,
    }
    return {"rows": [row], "ratio": {}}
