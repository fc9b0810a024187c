"""The ring as a run that can be served, made in this process: its commits, one after the other, and an app that answers."""

from __future__ import annotations

from ring_world import Ring
from run_folders import folder_of

from nonet.background import sealed
from nonet.controller.record.checkpoint import Checkpoints, Manifest
from nonet.deploy.serving.features import OpenRun
from nonet.samples.sequences import Transitions

MEMORY = "model: {use: sid_decoder, memory: on,"


class ServedRun:
    """A run's folder with a memory; `commit` trains on and commits."""

    def __init__(self, folder, memory=True):
        (folder / "ring").mkdir()
        self.ring = Ring(folder / "ring")
        if memory:
            text = self.ring.scenario.read_text().replace("model: {use: sid_decoder,", MEMORY)
            self.ring.scenario.write_text(text)
            corpus = self.ring.corpus()
            home = folder / "transitions"
            Transitions.write(home, corpus.seq, len(corpus.sids))
            self.ring.folders["transitions"] = str(home)
            self.ring.facts["artifacts"]["transitions"] = {
                "kind": "transitions",
                "path": str(home),
                "sha256": "",
            }
        self.folder = folder_of(self.ring, folder / "run")
        self._world = self.ring.world()
        self._steps = 0

    def commit(self, steps=3):
        """Train a few more steps and commit; the step."""
        self._world.train("pretrain", self._steps, self._steps + steps)
        self._steps += steps
        checkpoints = Checkpoints(self.folder.checkpoints)
        aside = checkpoints.aside(self._steps)
        self._world.save(aside)
        files = sealed(aside, [path for path in aside.rglob("*") if path.is_file()])
        manifest = Manifest("run", self._steps, "pretrain", self._steps, False, 1, "s", {}, {}, 0)
        checkpoints.commit(aside, manifest, files)
        return self._steps

    def open(self):
        """The run as serving reads it."""
        return OpenRun.of(self.folder.path)
