"""How often the controller waits in an RL step whose roles are all apart: for the scores, for the update, for the new version."""

from __future__ import annotations

import pytest
from tests_ring import make_ring

import nonet
from nonet.controller.record.run_folder import RunFolder
from nonet.controller.stages._reinforced_loop import run_reinforced
from nonet.workers.runtime import future

APART = "roles={rollout: {workers: 1}, embedding: {workers: 1}}"
SHORT = ("stages.pretrain.epochs=1", "stages.finetune.epochs=1", "checkpoint.every=1000", "stages.rl.steps=6")


class Trips:
    """Waits for what is not there yet. Asking again for what was waited for before is no new one.

    The row counts of results come from control threads that no work keeps busy, so they count as a part of the wait for the
    results. On a fast machine they are there when that wait ends, and on a slow one they follow it.
    """

    def __init__(self, ray, monkeypatch):
        self.waits: list[set] = []
        self._row_counts: set = set()
        request = future.GroupFuture.request_row_counts

        def note_row_counts(results):
            refs = request(results)
            self._row_counts.update(refs)
            return refs

        monkeypatch.setattr(future.GroupFuture, "request_row_counts", note_row_counts)
        for name in ("get", "wait"):
            monkeypatch.setattr(future.ray, name, self._noted(ray, getattr(ray, name)))

    def _noted(self, ray, call):
        look = ray.wait

        def noted(refs, **options):
            asked = refs if isinstance(refs, list) else [refs]
            pending = set(look(asked, num_returns=len(asked), timeout=0)[1]) - self._row_counts
            if (
                pending
                and options.get("timeout") != 0
                and not any(pending <= before for before in self.waits)
            ):
                self.waits.append(set(asked))
            return call(refs, **options)

        return noted


class Steps:
    """A recorder that counts the trips of each step."""

    def __init__(self, trips):
        self.trips, self.counts = trips, []

    def begin(self, *stage):
        self.trips.waits.clear()

    def record_step(self, *shown):
        self.counts.append(len(self.trips.waits))
        self.trips.waits.clear()

    def add_event(self, *told, **more):
        """Ignore a message to listeners."""

    def record_tables(self, *counts):
        """They came along with the update."""

    def record_metrics(self, *values, **more):
        """They came along with the version."""


@pytest.mark.timeout(300)
def test_an_rl_step_waits_three_times(ray_local, tmp_path, monkeypatch):
    folder = make_ring(tmp_path)
    with nonet.Session(
        folder / "ring.yaml", changes=[APART, *SHORT], run=RunFolder(tmp_path / "run")
    ) as session:
        steps = Steps(Trips(ray_local, monkeypatch))
        assert run_reinforced(session, "rl", steps, lambda: False)
    assert len(steps.counts) == 6
    assert max(steps.counts[1:-1]) <= 3  # the first settles what the stage begins with, the last commits
    assert min(steps.counts) >= 1
