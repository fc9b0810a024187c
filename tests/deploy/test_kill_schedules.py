"""Seeded schedules kill and hang a reward's actor, a rollout and a server of scores.

The run ends, what has no score is named, and every prompt of an applied step has been asked and scored once.
"""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections import Counter
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import numpy as np
import pytest
from tests_ring import make_ring

import nonet
from nonet.controller.record.journal import read_journal
from nonet.controller.record.run_folder import RunFolder
from nonet.errors import NonetError

STEPS, USERS = 5, 12
OWN = """
import nonet


@nonet.reward
async def later(item):
    return item * 0.5
"""
FAULTS = (
    "kill reward",
    "freeze reward",
    "kill rollout",
    "server refuses",
    "server hangs",
    "server says no JSON",
)


class Server:
    """A server of scores that notes which prompts it answered, and misbehaves when told to."""

    def __init__(self):
        self.answered: Counter = Counter()
        self.fault, noted = "", self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self):
                message = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                if noted.fault == "server hangs":
                    time.sleep(3)
                body = json.dumps(
                    {"scores": [[1.0 * (i % 2 == 0) for i in row] for row in message["item_id"]]}
                )
                body = "sorry" if noted.fault == "server says no JSON" else body
                self.send_response(503 if noted.fault == "server refuses" else 200)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                try:
                    self.wfile.write(body.encode())
                except OSError:
                    return  # whoever asked has gone
                if not noted.fault:
                    noted.answered.update((message["step"], uid) for uid in message["uid"])

            def log_message(self, format, *args):
                """Says nothing."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.port = self._server.server_port
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def close(self):
        self._server.shutdown()
        self._server.server_close()


def pid_of(session, group):
    return session.groups.hosts[group].wait_until_ready()[0]["pid"]


def applied(run):
    """Return the steps of the stage that count, in the order of the journal."""
    return [each["applied"] for each in read_journal(run.journal) if "applied" in each]


def schedule(folder, run, server, seed):
    """Run to the end, whatever a seed breaks at which steps; (lost prompts by reward, quarantined by the journal)."""
    draw = np.random.default_rng(seed)
    kinds = draw.permutation(
        [draw.choice(FAULTS[:2]), draw.choice(FAULTS[2:])]
    ).tolist()  # a process is broken once a session
    faults = dict(zip(draw.choice(STEPS, 2, replace=False).tolist(), kinds, strict=True))
    even = f"even: {{use: 'http://127.0.0.1:{server.port}/x', timeout_s: 1}}"
    rewards = f"{{hit: {{}}, later: {{use: 'own.py:later', timeout_s: 2}}, {even}}}"
    changes = [
        f"stages.rl.steps={STEPS}",
        f"stages.rl.users={USERS}",
        "checkpoint.every=1",
        "checkpoint.background=false",
        "stages.rl.best=last",
        f"stages.rl.rewards={rewards}",
        "roles={rollout: {workers: 1}, embedding: {workers: 1}}",
    ]
    lost: dict[int, dict[str, set[str]]] = {}
    told: dict[int, dict[str, set[str]]] = {}
    seen, lives = Counter(), 0
    while True:
        lives += 1
        assert lives <= 4, "every life ends a fault"
        if lives == 1:
            session = nonet.Session(folder / "ring.yaml", changes=changes, run=run)
        else:
            session = nonet.Session(run.path / "scenario.yaml", run=run, resume=True)
        try:
            with session:
                for step, prompts in session.iterate_prompts("rl"):
                    fault = faults.pop(step, "")
                    if fault == "kill rollout":
                        os.kill(pid_of(session, "rollout"), signal.SIGKILL)
                    beams = session.rollout.generate(prompts)
                    users = beams.get(60.0)["user_id"].astype(str)
                    uids = beams.get(60.0)["uid"].tolist()
                    if fault.endswith("reward"):
                        how = signal.SIGKILL if fault.startswith("kill") else signal.SIGSTOP
                        os.kill(pid_of(session, "rl.reward.later"), how)
                    server.fault = fault if fault.startswith("server") else ""
                    scores = session.reward.score(beams)
                    server.fault = ""
                    values = {name: future.get(60.0) for name, future in scores.items()}
                    lost[step] = {
                        name: set(users[np.isnan(score).any(1)].tolist()) for name, score in values.items()
                    }
                    told[step] = {each.reward: set(each.users) for each in session.reward.quarantined}
                    record = session.trainer.update(session.stage, step, beams, scores)
                    assert np.isfinite(record["loss"])
                    session.publish()
                    session.commit(step)
                    seen.update((step, uid) for uid in uids)
                return lost, told, seen
        except NonetError:
            session.close(at_once=True)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 20))])
def test_a_run_ends_whatever_dies_and_nothing_is_scored_twice(ray_local, tmp_path, monkeypatch, seed):
    monkeypatch.setattr("nonet.controller.groups.reward_handles._GRACE_S", 1.0)
    folder, run, server = make_ring(tmp_path), RunFolder(tmp_path / "run"), Server()
    (folder / "own.py").write_text(OWN)
    try:
        lost, told, seen = schedule(folder, run, server, seed)
    finally:
        server.close()
    steps = applied(run)
    assert len(steps) == len(set(steps)) == STEPS, "each step is applied once"
    assert set(seen.values()) == {1}
    assert len(seen) == STEPS * USERS
    for step, by in lost.items():
        assert {name: users for name, users in by.items() if users} == told[step], "who has no score is named"
    twice = {
        each: count for each, count in server.answered.items() if count > 1 and not lost[each[0]]["even"]
    }
    assert not twice, "the server answers a prompt of a step once"
