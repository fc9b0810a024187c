"""Run the ring scenario in a Ray of its own: python ring_process.py FOLDER NAME RESOURCES CHANGE...; prints its state.

RESOURCES is what the node has beside CPUs, as JSON; NONET_SCENARIO names another scenario. With NONET_WIRE every process refuses
torch objects on the wire.
"""

from __future__ import annotations

import io
import json
import logging
import os
import sys
from pathlib import Path

import ray

WIRE = str(Path(__file__).parent.parent / "workers")
sys.path.insert(0, WIRE)


def main(folder: Path, name: str, resources: dict[str, float], changes: list[str]) -> None:
    environment: dict = {}
    os.environ["PYTHONPATH"] = ":".join([WIRE, *filter(None, [os.environ.get("PYTHONPATH")])])
    if "NONET_WIRE" in os.environ:
        import strict_wire

        environment["worker_process_setup_hook"] = "strict_wire.install"
    ray.init(
        address="local",
        num_cpus=4,
        resources=resources,
        namespace="nonet",
        include_dashboard=False,
        log_to_driver=False,
        logging_level=logging.ERROR,
        object_store_memory=200_000_000,
        runtime_env=environment,
    )
    if "NONET_WIRE" in os.environ:
        strict_wire.install()
    from nonet.deploy.run import api
    from nonet.deploy.run.panel import Panel

    made = api.scenario(os.environ.get("NONET_SCENARIO", folder / "ring.yaml"), changes)
    finished = api.run(made, run_dir=folder / name, panel=Panel(io.StringIO(), live=False))
    print(json.dumps({"state": finished.state}))
    ray.shutdown()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], json.loads(sys.argv[3]), sys.argv[4:])
