"""Run parity on the ring in one Ray of its own: python parity_process.py FOLDER [POOLS...]; prints what it found as JSON.

Without POOLS the pairs that need no accelerator, by name.
"""

from __future__ import annotations

import json
import logging
import os
import sys
from pathlib import Path

import ray

from nonet.deploy.parity.device_parity import compare_pools
from nonet.deploy.run import api

STANDIN = Path(__file__).parent.parent / "npu_standin"


def main(folder: Path, pairs: list[str]) -> None:
    os.environ["NONET_ATTENTION"] = "reference"  # else each device takes the kernel made for it
    ray.init(
        address="local",
        num_cpus=2,
        resources={"NPU": 1},
        namespace="nonet",
        include_dashboard=False,
        log_to_driver=False,
        logging_level=logging.ERROR,
        object_store_memory=200_000_000,
    )
    path = f"{STANDIN}:${{PYTHONPATH}}"
    made = api.scenario(folder / "ring.yaml")
    pools = {
        "npu": {"device": "npu", "env": {"vars": {"PYTHONPATH": path}}},
        "broken": {
            "device": "npu",
            "env": {"vars": {"PYTHONPATH": path, "NONET_NPU_BROKEN": "aten::native_layer_norm"}},
        },
    }
    made = made.set("pools", pools)
    told = {pair: compare_pools(made, pair) for pair in pairs} or {
        "same": compare_pools(made, "cpu,cpu"),
        "half": compare_pools(made, "cpu,cpu", "fp32,bf16"),
        "npu": compare_pools(made, "cpu,npu"),
        "broken": compare_pools(made, "cpu,broken"),
        "tight": compare_pools(made, "cpu", "fp32,bf16", limits={"kl": 1e-12}),
    }
    print(json.dumps({name: found.as_dict() | {"text": found.to_text()} for name, found in told.items()}))
    ray.shutdown()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
