"""An RL loop of one's own: the quickstart's rl stage, with its loss printed.

Run it after `nonet run quickstart`, from the folder that holds `runs`. It starts from the newest run there, as its stage
`finetune` left it, and makes a run of its own. Another scenario, and the run to start from, may be named:

    python examples/own_loop.py my.yaml runs/my-20261101-120000-abcd
"""

from __future__ import annotations

import sys

import nonet


def main(scenario: str = "quickstart", finished: str = "last") -> None:
    """Train the RL stage of a scenario from a finished run."""
    with nonet.Session(scenario, from_run=finished, stage="finetune") as s:
        for step, prompts in s.iterate_prompts("rl"):
            beams = s.rollout.generate(prompts)
            record = s.trainer.update(s.stage, step, beams, s.reward.score(beams))
            s.publish()
            s.commit(step)
            print(f"step {step}: loss {record['loss']:.4f}, kl {record['kl']:.5f}")


if __name__ == "__main__":
    main(*sys.argv[1:])
