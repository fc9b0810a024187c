"""What things cost on this kind of node: measured by `nonet doctor --calibrate`, corrected by every finished run.

A JSON file in the user's cache. Without one, predictions use the figures of one core of a 2024 server and say so; a run's
error is learned only where a calibration is there to be moved. What is learned is the median of the newest runs, so that
one odd run in three moves nothing.
"""

from __future__ import annotations

import json
import math
import os
import statistics
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from nonet.atomic import write_whole
from nonet.controller.predict.cost_model import UnitCosts
from nonet.errors import ConfigError

_FORMAT = 2
_KEPT = 7  # newest runs
_LINES = ("pull", "push", "exchange", "reduce", "call", "hop", "weights", "publish")
LIMITS = (0.2, 5.0)  # beyond them it is not this node that differs, but the measure, the run or the model


@dataclass(frozen=True, slots=True)
class LinearCost:
    """Cost of something that has a start and a length: seconds a call, seconds a unit."""

    call_s: float
    unit_s: float = 0.0

    def seconds(self, units: float = 0.0) -> float:
        return self.call_s + units * self.unit_s


@dataclass(frozen=True, slots=True)
class Calibration:
    """One node's costs. Compute is one thread's on a core.

    train, update, decode   of the SID decoder (nonet.controller.predict.cost_model)
    pull, push   a sparse table in process, unit: a row; exchange: pull and push by all-to-all between two processes, unit: a key
    reduce   all-reduce, unit: a byte; call: a Ray call and its answer, unit: a byte; process_s: starting a worker
    hop   an answer that goes from one worker to the next unfetched, unit: a byte; weights: the same, packed and loaded there
    publish   rows to a replica, through Ray, unit: a row
    crowded   (processes that compute at once, slowdown of each), by kind of step; up to the cores there are
    threads   (torch threads, speed over one) of a train step, an update and a decode; more may well be slower
    matmul_gflops, copy_gbps   for people
    seen   measured over uncorrected predicted seconds of the newest finished runs, by kind of stage
    """

    source: str
    train: UnitCosts
    update: UnitCosts
    decode: UnitCosts
    pull: LinearCost
    push: LinearCost
    exchange: LinearCost
    reduce: LinearCost
    call: LinearCost
    hop: LinearCost
    weights: LinearCost
    publish: LinearCost
    crowded: Mapping[str, tuple[tuple[float, float], ...]]
    process_s: float
    threads: Mapping[str, tuple[tuple[float, float], ...]]
    matmul_gflops: float
    copy_gbps: float
    seen: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    runs: int = 0

    def factor(self, kind: str) -> float:
        """What predictions of this kind of stage are multiplied by: the median of the newest runs, in logarithms."""
        errors = self.seen.get(kind)
        return math.exp(statistics.median(map(math.log, errors))) if errors else 1.0

    def slowdown(self, kind: str, processes: float, threads: float, cores: float) -> float:
        """How much longer a "train", "update" or "decode" step takes than alone: so many processes, and threads of all, on cores.

        Processes slow each other down by caches, memory and waiting for the slowest, as measured; threads beyond the cores wait.
        """
        return _at(self.crowded.get(kind, ()), min(processes, cores)) * max(1.0, threads / cores)

    def speed(self, kind: str, threads: float) -> float:
        """Of a "train", "update" or "decode" step with so many torch threads, over one thread's."""
        return _at(self.threads.get(kind, ()), threads)

    def learned(self, errors: Mapping[str, float]) -> Calibration:
        """With a run's measured over predicted seconds, by kind of stage; what lies beyond LIMITS teaches nothing."""
        seen = dict(self.seen)
        for kind, error in errors.items():
            if sound(error):
                seen[kind] = (*seen.get(kind, ()), self.factor(kind) * error)[-_KEPT:]
        return replace(self, seen=seen, runs=self.runs + 1)


def _at(points: Iterable[tuple[float, float]], where: float) -> float:
    """Between measured points by a straight line, beyond the last as the last; 1 at 1."""
    curve = [(1.0, 1.0), *points]
    where = min(max(1.0, where), max(curve)[0])
    below, above = max(p for p in curve if p[0] <= where), min(p for p in curve if p[0] >= where)
    share = (where - below[0]) / (above[0] - below[0]) if above[0] > below[0] else 0.0
    return below[1] + share * (above[1] - below[1])


def _points(pairs: Iterable[Iterable[float]]) -> tuple[tuple[float, float], ...]:
    return tuple((float(count), float(factor)) for count, factor in pairs)


def sound(error: float) -> bool:
    """Whether measured over predicted seconds is an error to learn from, and not one to look into."""
    return math.isfinite(error) and LIMITS[0] <= error <= LIMITS[1]


# One core of an AVX-512 server at 2.5 GHz, torch 2.13: what `nonet doctor --calibrate` found there.
NOMINAL = Calibration(
    source="nominal (run `nonet doctor --calibrate`)",
    train=UnitCosts(5e-3, 6e-4, 2.2e-11, 1.4e-10),
    update=UnitCosts(5e-3, 6e-4, 2.2e-11, 1.4e-10),
    decode=UnitCosts(2e-3, 3e-4, 2.2e-11, 1.4e-10),
    pull=LinearCost(1e-4, 1e-7),
    push=LinearCost(2e-4, 4e-7),
    exchange=LinearCost(4e-3, 8e-7),
    reduce=LinearCost(8e-4, 1e-9),
    call=LinearCost(2e-3, 1e-9),
    hop=LinearCost(4e-3, 1e-9),
    weights=LinearCost(8e-3, 5e-9),
    publish=LinearCost(6e-3, 1e-6),
    crowded=dict.fromkeys(("train", "update", "decode"), ((2.0, 1.1),)),
    process_s=4.0,
    threads=dict.fromkeys(("train", "update", "decode"), ((2.0, 1.15), (8.0, 2.0))),
    matmul_gflops=60.0,
    copy_gbps=8.0,
)


def path() -> Path:
    """Where the calibration of this user's nodes is."""
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(home) / "nonet" / "calibration.json"


def load() -> Calibration:
    """The user's calibration, NOMINAL where there is none. Raises ConfigError for a file that is none."""
    file = path()
    if not file.exists():
        return NOMINAL
    try:
        stored = json.loads(file.read_text(encoding="utf-8"))
        if stored.pop("format") != _FORMAT:
            raise ValueError(f"format is not {_FORMAT}")
        rates = {name: UnitCosts(**stored.pop(name)) for name in ("train", "update", "decode")}
        lines = {name: LinearCost(**stored.pop(name)) for name in _LINES}
        threads, crowded = (
            {kind: _points(points) for kind, points in stored.pop(name).items()}
            for name in ("threads", "crowded")
        )
        seen = {kind: tuple(map(float, errors)) for kind, errors in stored.pop("seen").items()}
        return Calibration(**rates, **lines, **stored, crowded=crowded, threads=threads, seen=seen)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ConfigError(
            f"{file} is no calibration ({error}): write it again with `nonet doctor --calibrate`"
        ) from None


def save(calibration: Calibration) -> Path:
    """Write it, whole or not at all; its path."""
    file = path()
    file.parent.mkdir(parents=True, exist_ok=True)
    write_whole(file, json.dumps({"format": _FORMAT, **asdict(calibration)}, indent=1).encode())
    return file
