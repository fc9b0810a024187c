"""Where `nonet plan` takes its cluster view from: a file, a live Ray, or this machine."""

from __future__ import annotations

import json
import logging
import socket
from pathlib import Path
from typing import Any

from nonet.controller.cluster import ClusterView, read_view, this_machine
from nonet.controller.plan import Plan, plan
from nonet.controller.predict import DataFacts, Prediction, check_covered, predict, prediction_text
from nonet.controller.scenario import Scenario
from nonet.errors import ConfigError, PlacementError

_KNOCK_S = 3.0
__all__ = ["data_facts", "knock", "predicted", "prediction_text", "searched", "view"]


def view(cluster: Path | None, address: str | None) -> ClusterView:
    """The view to plan on. Raises ConfigError where both are given, PlacementError where no Ray answers."""
    if cluster and address:
        raise ConfigError("give --cluster (a file) or --address (a live Ray), not both")
    if address:
        return _live(address)
    return read_view(cluster) if cluster else this_machine()


def searched(source: Any, view: ClusterView, as_json: bool) -> str:
    """Placements of a scenario file ranked by prediction, as text or JSON."""
    from nonet.controller.predict import calibration, search, search_dict, search_text

    check_covered(source.scenario, plan(source.scenario, view))
    plans = search(source.scenario, view, data_facts(source.scenario, source.folder), calibration.load())
    return json.dumps(search_dict(plans), indent=1) if as_json else search_text(plans)


def predicted(source: Any, made: Plan) -> Prediction:
    """How fast each stage of a scenario file should be under this plan. Raises ConfigError where nothing can be said."""
    from nonet.controller.predict import calibration

    check_covered(source.scenario, made)
    return predict(source.scenario, made, data_facts(source.scenario, source.folder), calibration.load())


def data_facts(scenario: Scenario, folder: Path) -> DataFacts:
    """Users and trained events, from the tables themselves. Raises DataError where they cannot be read from here."""
    import numpy as np

    from nonet.controller.setup import data_setup
    from nonet.samples.sequences import TEST, TRAIN, VALID

    seq, items = data_setup(scenario, folder).build()
    train = seq.split == TRAIN
    lengths = np.add.reduceat(train, seq.offsets[:-1]) if len(seq) else np.ones(1)
    shares = {name: float(mask[train].mean()) for name, mask in seq.targets.items()}
    spread = float(lengths.std() / max(1e-9, lengths.mean()))
    prompts = int(((seq.split == VALID) | (seq.split == TEST)).sum())
    return DataFacts(len(seq), int(train.sum()), spread, shares, len(items), prompts)


def knock(address: str) -> None:
    """Fail within seconds where nobody listens: Ray itself would try for minutes. Raises OSError or ValueError."""
    host, colon, port = address.removeprefix("ray://").rpartition(":")
    if colon:
        socket.create_connection((host, int(port)), timeout=_KNOCK_S).close()


def _live(address: str) -> ClusterView:
    import ray

    from nonet.controller.cluster import live_view

    try:
        knock(address)
        ray.init(address=address, namespace="nonet", log_to_driver=False, logging_level=logging.ERROR)
    except (ConnectionError, RuntimeError, ValueError, OSError) as error:
        raise PlacementError(
            f"no Ray answers at {address}: {' '.join(str(error).split())[:200]}. "
            "Start one with `ray start --head`, or plan on a file with --cluster"
        ) from None
    try:
        return live_view()
    finally:
        ray.shutdown()
