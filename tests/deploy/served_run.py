"""The ring as a run that can be served, made in this process: its commits, one after the other, and an app that answers."""

from __future__ import annotations

from ring_world import Ring
from run_folders import folder_of

from nonet.background import seal_files
from nonet.controller.record.checkpoint import Checkpoints, Manifest
from nonet.deploy.opened import OpenedRun
from nonet.models.generation import count_cooccurrence
from nonet.models.inference import EventHistory
from nonet.models.tokenizer import compute_signals
from nonet.samples.sequences import CountOptions, Transitions

_MEMORY = "{voters: [transitions, cooccurrence], reverse: 0.3, signals: [title, categories]}"


class TrainedRun:
    """A run's folder with a memory; `commit` trains on and commits."""

    def __init__(self, folder, memory=True, changes=(), edit=None, **sizes):
        (folder / "ring").mkdir()
        self.ring = Ring(folder / "ring", **sizes)
        for change in changes:
            key, _, value = change.removeprefix("model.").partition("=")
            text = self.ring.scenario.read_text().replace("model: {", f"model: {{{key}: {value}, ")
            self.ring.scenario.write_text(text)
        if edit is not None:
            edit(self.ring.scenario)
        if memory:
            text = self.ring.scenario.read_text().replace(
                "use: sid_decoder,",
                f"use: sid_decoder, memory: {_MEMORY},",
            )
            self.ring.scenario.write_text(text)
            corpus = self.ring.corpus()
            home = folder / "transitions"
            options = CountOptions(reverse=0.3)
            Transitions.write(home, corpus.seq, len(corpus.sids), options)
            count_cooccurrence(home, corpus.seq, options, len(corpus.sids))
            compute_signals(corpus.items, ["title", "categories"]).save(home)
            self.ring.folders["transitions"] = str(home)
            self.ring.facts["artifacts"]["transitions"] = {
                "kind": "transitions",
                "path": str(home),
                "sha256": "",
            }
        self.folder = folder_of(self.ring, folder / "run")
        self._world = self.ring.world()
        self._steps = 0

    def commit(self, steps=3, last=True):
        """Train a few more steps and commit, by default as the end of a stage; the step."""
        self._world.train("pretrain", self._steps, self._steps + steps)
        self._steps += steps
        checkpoints = Checkpoints(self.folder.checkpoints)
        aside = checkpoints.create_staging_dir(self._steps)
        self._world.save(aside)
        files = seal_files(aside, [path for path in aside.rglob("*") if path.is_file()])
        manifest = Manifest("run", self._steps, "pretrain", self._steps, last, 1, "s", {}, {}, 0)
        checkpoints.complete(aside, manifest, files)
        return self._steps

    def open(self):
        """Open the run as serving reads it."""
        return OpenedRun.open(self.folder.path)

    def publish(self):
        """Train one more step, and publish it as a version."""
        self.commit(1)
        self.open().publish_newest()


def events_of(seq, user, stop=None):
    """Return the first `stop` events of a user row, by default all."""
    cut = slice(
        int(seq.offsets[user]), int(seq.offsets[user + 1] if stop is None else seq.offsets[user] + stop)
    )
    columns = {name: values[cut] for name, values in seq.columns.items()}
    return EventHistory(seq.item[cut], seq.time[cut], seq.event[cut], columns)


def ask(client, path="/recommend", status=200, **body):
    """Return the answer of an app."""
    answer = client.post(path, json=body)
    assert answer.status_code == status, answer.text
    return answer.json()


def items(answer):
    """Items of an answer, best first."""
    return [row["item"] for row in answer["items"]]
