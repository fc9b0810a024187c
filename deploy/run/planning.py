"""Where `nonet plan` takes its cluster view from: a file, a live Ray, or this machine."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

from nonet.controller.cluster import ClusterView, read_view, this_machine
from nonet.controller.plan import Plan, feature_dims, plan
from nonet.controller.predict import DataFacts, Prediction, check_covered, predict, prediction_text
from nonet.controller.scenario import Scenario
from nonet.errors import ConfigError, PlacementError
from nonet.workers import check_address

_MOST_BYTES = 1 << 28  # of a table that a plan reads to warn
__all__ = ["data_facts", "data_warnings", "predicted", "prediction_text", "searched", "view"]


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
    checked(source)
    plans = search(source.scenario, view, data_facts(source.scenario, source.folder), calibration.load())
    return json.dumps(search_dict(plans), indent=1) if as_json else search_text(plans)


def shown(source: Any, made: Plan, predict: bool, as_json: bool) -> str:
    """A scenario file's plan with warnings about its data and, if asked for, the prediction, as text or JSON."""
    warnings = checked(source)
    prediction = predicted(source, made) if predict else None
    if as_json:
        answer = made.as_dict() | ({"data_warnings": warnings} if warnings else {})
        return json.dumps(answer | ({"prediction": prediction.as_dict()} if prediction else {}), indent=1)
    parts = [made.text(), "\n".join(f"warning: {warning}" for warning in warnings)]
    return "\n\n".join(filter(None, [*parts, prediction and prediction_text(prediction)]))


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

    data = data_setup(scenario, folder)
    if data.on_disk():
        return _facts_of_sample(scenario, folder)
    seq, items = data.build()
    train = seq.split == TRAIN
    lengths = np.add.reduceat(train, seq.offsets[:-1]) if len(seq) else np.ones(1)
    shares = {name: float(mask[train].mean()) for name, mask in seq.targets.items()}
    spread = float(lengths.std() / max(1e-9, lengths.mean()))
    prompts = int(((seq.split == VALID) | (seq.split == TEST)).sum())
    return DataFacts(len(seq), int(train.sum()), spread, shares, len(items), prompts)


def _facts_of_sample(scenario: Scenario, folder: Path) -> DataFacts:
    """As `data_facts`, of data that are too many to read: from a profile of some of the users."""
    import numpy as np

    from nonet.controller.scenario.settings import held_out_of, profile_of
    from nonet.controller.setup import targets

    data = scenario.data
    profile = profile_of(data.model_dump(exclude_none=True), folder, data.keep.model_dump())
    split = {"use": data.split.use, **data.split.options()}
    held_out = held_out_of(split)
    lengths = np.arange(len(profile.users_of))
    lengths = np.where(lengths > held_out, lengths - held_out, lengths)
    mean = np.average(lengths, weights=profile.users_of)
    spread = float(np.sqrt(np.average((lengths - mean) ** 2, weights=profile.users_of)) / max(1e-9, mean))
    asked = int(split.get("test", 1) or 0) + int(split.get("valid", 0) or 0) if held_out else 0
    prompts = asked * profile.users_above(held_out)
    shares = dict.fromkeys(targets(scenario), 1.0)
    return DataFacts(profile.users, profile.trained(held_out), spread, shares, profile.items, prompts)


def checked(source: Any) -> list[str]:
    """Check a scenario file as a run does before it starts, the tables too where they can be read from here.

    Args:
        source: The scenario file.

    Returns:
        Warnings in sentences: of stores that are joined, of the data.

    Raises:
        ConfigError: A key, a reward, its options or a column is wrong.
        DataError: The tables cannot be read, or hold too little.
    """
    from nonet.controller.scenario import check_runnable
    from nonet.controller.setup import preflight

    scenario, folder = source.scenario, source.folder
    try:
        check_runnable(scenario)
    except ConfigError:  # the plan's own notes say which keys
        return data_warnings(source)
    warnings = preflight.check_definition(scenario, folder)
    return warnings + (preflight.check_data(scenario, folder) if _has_tables_here(source) else [])


def data_warnings(source: Any) -> list[str]:
    """What is dangerous in a scenario file's data, in sentences; none where the tables are not files of this machine, or
    larger than a plan should read."""
    from nonet.controller.scenario.settings import data_warnings, profile_of

    data = source.scenario.data
    if not _has_tables_here(source):
        return []
    profile = profile_of(data.model_dump(exclude_none=True), source.folder, data.keep.model_dump())
    split = {"use": data.split.use, **data.split.options()}
    return list(data_warnings(profile, split, feature_dims(source.scenario)))


def _has_tables_here(source: Any) -> bool:
    """Return whether the tables are files of this machine that are small enough to be read by a plan. Raises DataError."""
    from nonet.samples.tables import find_parquet

    data = source.scenario.data
    for path in (data.interactions, data.items or data.interactions):
        if "://" in path:
            return False
        place = path if ":" in path else str(source.folder / path)
        system, files = find_parquet(place, "interactions")
        if sum(info.size for info in system.get_file_info(files)) > _MOST_BYTES:
            return False
    return True


def _live(address: str) -> ClusterView:
    import ray

    from nonet.controller.cluster import live_view

    way_out = "start one with `ray start --head`, or plan on a file with --cluster"
    check_address(address, "--address", way_out)
    try:
        ray.init(address=address, namespace="nonet", log_to_driver=False, logging_level=logging.ERROR)
    except (ConnectionError, RuntimeError, ValueError, OSError) as error:
        raise PlacementError(
            f"no Ray answers at {address}: {' '.join(str(error).split())[:200]}; {way_out}"
        ) from None
    try:
        return live_view()
    finally:
        ray.shutdown()
