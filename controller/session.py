"""Session: a run's groups, artifacts and commits, for a loop of your own. The shipped stages are such loops.

    with nonet.Session("quickstart") as s:
        for step, prompts in s.prompts("rl"):
            beams = s.rollout.generate(prompts)      # references: nothing passes through here
            s.trainer.update(beams, s.reward.score(beams))
            s.publish()
            s.commit(step)

Entering plans, binds, tokenises and opens; leaving stops every process. A killed loop resumes from its newest whole commit.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any

from nonet.controller import yaml
from nonet.controller.checkpoint import Checkpoints, Manifest
from nonet.controller.journal import Journal, cut_journal, read_journal
from nonet.controller.life import keep_alive
from nonet.controller.options import Reinforced
from nonet.controller.placement import Binding, plan_live
from nonet.controller.players import EmbeddingPlayer, Prompts, RewardPlayers, RolloutPlayer, TrainerPlayer
from nonet.controller.publish import publish
from nonet.controller.run_folder import RunFolder, new_run
from nonet.controller.scenario import Scenario, document, load_scenario
from nonet.controller.setups import reward_options, role_specs, stage_setups, targets
from nonet.controller.sources import copy_own_files, data_setup
from nonet.controller.support import check_runnable
from nonet.controller.tables import ttl_steps
from nonet.controller.trace import CONTROLLER, open_trace
from nonet.errors import CheckpointError, ConfigError, NonetError, WorkerLost
from nonet.workers.evaluator import EvaluateSetup
from nonet.workers.gang import STEP_DEADLINE_S
from nonet.workers.group import WorkerGroup
from nonet.workers.hosts import Life, ensure_ray
from nonet.workers.setup import StageSetup

_OPEN_S = 300.0


class Session:
    """A run under way.

    scenario   a Scenario, a path or a shipped name; folder: where its `file.py` references are (its own by default)
    run        the run's folder; a new one by default. With `resume` it must hold a commit.
    life_s     above 0: processes are detached and end themselves after so long without a sign of this one; 0: they
               end with the process that holds the session
    """

    def __init__(
        self,
        scenario: Scenario | str | Path,
        *,
        folder: Path | None = None,
        run: RunFolder | None = None,
        resume: bool = False,
        changes: list[str] | None = None,
        life_s: float = 0.0,
    ):
        loaded, beside = (
            (scenario, Path.cwd()) if isinstance(scenario, Scenario) else load_scenario(scenario, changes)
        )
        check_runnable(loaded)
        self.scenario, self.folder = loaded, folder or beside
        self.run = run or new_run(loaded.name)
        self.resume = resume
        self._life_s = life_s
        self.checkpoints = Checkpoints(self.run.checkpoints)
        self.version = 0
        self.restored: Manifest | None = None
        self.seconds: dict[str, float] = {}
        self.dead: list[str] = []
        self._stage: str | None = None

    # --- entering and leaving ---------------------------------------------------------------------------------------

    def __enter__(self) -> Session:
        try:
            for step in (self.bind, self.tokenise, self.open, self.restore):
                began = time.time()
                step()
                self.seconds[step.__name__] = time.time() - began
                self.trace.add(CONTROLLER, step.__name__, began, time.time())
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        if value is not None and hasattr(self, "binding"):
            self.dead = self.binding.dead()
        self.close(at_once=bool(self.dead))

    def bind(self) -> None:
        """Write the folder, plan on the live cluster, start every process."""
        ensure_ray()
        self._write_folder()
        self.plan = plan_live(self.scenario)
        self.run.write_json("plan.json", self.plan.as_dict())
        ask = self.scenario.evaluate
        stage = next(iter(targets(self.scenario)), None)
        specs = role_specs(
            self.scenario, self.run.sources, EvaluateSetup(tuple(ask.metrics), ask.width, stage)
        )
        life = Life(self.run.id, self._life_s)
        envs = {name: pool.env.model_dump() for name, pool in self.scenario.pools.items() if pool.env}
        self.binding = Binding(self.plan, specs, life, envs)
        if self._life_s:
            self._pulse = keep_alive(self.binding.hosts.values(), self._life_s)

    def close(self, *, at_once: bool = False) -> None:
        """Stop every process of the run, `at_once` without a word to its roles; the folder stays resumable."""
        if hasattr(self, "_pulse"):
            self._pulse.stop()
        if hasattr(self, "binding"):
            if not at_once:
                self.trace.collect(self.binding.hosts.values())
            self.binding.stop(at_once=at_once)
        if hasattr(self, "journal"):
            self.journal.close()
            self.trace.close()

    def lost_because(self, error: NonetError) -> str | None:
        """What to say of a failure that a lost worker caused; None where all workers are well."""
        if isinstance(error, WorkerLost):
            return str(error)
        dead = self.dead
        return f"{', '.join(dead)} died: {error}" if dead else None

    def _write_folder(self) -> None:
        text = yaml.dump(document(self.scenario))
        self.scenario_hash = hashlib.sha256(text.encode()).hexdigest()
        if self.run.scenario.exists():
            if self.run.scenario.read_text(encoding="utf-8") != text:
                raise ConfigError(
                    f"{self.run.path} is a run of another scenario ({self.run.scenario}); "
                    "choose another --run-dir, or resume it with `nonet resume`"
                )
        else:
            self.run.path.mkdir(parents=True, exist_ok=True)
            self.run.sources.mkdir(exist_ok=True)
            copy_own_files(self.scenario, self.folder, self.run.sources)
            self.run.scenario.write_text(text, encoding="utf-8")
        self.journal = Journal(self.run.journal)
        self.trace = open_trace(self.run.trace)

    # --- artifacts --------------------------------------------------------------------------------------------------

    def tokenise(self) -> dict[str, Any]:
        """Sequences, semantic ids and catalogue; made once a run."""
        self.facts = self.run.read_json("results/tokenise.json")
        if self.facts is None:
            found = (
                self._group("tokenise")
                .prepare(data_setup(self.scenario, self.folder), str(self.run.path))
                .get(_OPEN_S * 12)
            )
            self.run.write_json("results/tokenise.json", found)
            self.facts = found
        return self.facts

    def open(self) -> None:
        """Open the artifacts everywhere, let gangs meet, publish version 0."""
        folders = {kind: artifact["path"] for kind, artifact in self.facts["artifacts"].items()}
        trained = self.facts["data"]["trained_events"]
        self.stages = stage_setups(self.scenario, self.facts["data"]["users"], trained)
        self.trainer = TrainerPlayer(self._group("trainer"), self._group("embedding"))
        self.embedding = EmbeddingPlayer(self.trainer)
        self.rollout = RolloutPlayer(self._group("rollout"), self._width())
        self.evaluator = self._group("evaluator")
        self._rewards = self._reward_players()
        self._settle()
        first = self.trainer.group.open(folders)
        waits = [self.evaluator.open(folders, str(self.run.results))]
        waits += [
            group.open(folders) for players in self._rewards.values() for group in players.groups.values()
        ]
        self.weights = first.get(_OPEN_S)[0]
        self.trainer.gather()
        self.rollout.group.open(folders).get(_OPEN_S)
        for wait in waits:
            wait.get(_OPEN_S)

    def _settle(self) -> None:
        steps = {name: stage.steps for name, stage in self.stages.items()}
        found = ttl_steps(self.scenario, self.facts["data"], steps)
        for group in (self.trainer.group, self.trainer.shards) if found else ():
            group.settle(found).get(_OPEN_S)

    def _reward_players(self) -> dict[str, RewardPlayers]:
        groups: dict[str, dict[str, WorkerGroup]] = {}
        timeouts: dict[str, dict[str, float]] = {}
        for stage, name, options in reward_options(self.scenario):
            groups.setdefault(stage, {})[name] = self._group(f"{stage}.reward.{name}")
            timeouts.setdefault(stage, {})[name] = options.timeout_s
        return {stage: RewardPlayers(named, timeouts[stage]) for stage, named in groups.items()}

    def _width(self) -> int:
        widths = [
            body.rollout.options().get("width", 16)
            for body in self.scenario.stages.values()
            if isinstance(body, Reinforced)
        ]
        return widths[0] if widths else 16

    def _group(self, role: str) -> WorkerGroup:
        return WorkerGroup.of(self.binding.hosts[self.plan.group_of(role).name], role)

    def size(self) -> dict[str, int]:
        """Dense parameters and sparse rows there are now."""
        rows = self.trainer.shards.rows().get(STEP_DEADLINE_S)
        return {
            "parameters": self.weights["parameters"],
            "sparse_rows": sum(sum(shard.values()) for shard in rows),
        }

    # --- stages -----------------------------------------------------------------------------------------------------

    @property
    def stage(self) -> StageSetup:
        """The stage under way. Raises ConfigError before the first."""
        if self._stage is None:
            raise ConfigError("no stage has begun: call begin(stage) or iterate prompts(stage) first")
        return self.stages[self._stage]

    @property
    def reward(self) -> RewardPlayers:
        """The rewards of the stage under way."""
        return self.rewards_of(self.stage.name)

    def rewards_of(self, stage: str) -> RewardPlayers:
        """The rewards of a stage."""
        return self._rewards[stage]

    def begin(self, name: str) -> int:
        """Enter a stage, afresh or where the restored commit left it; its next step."""
        if name not in self.stages:
            raise ConfigError(f"there is no stage {name!r}; stages: {', '.join(self.stages)}")
        self._stage = name
        if self.restored is not None and self.restored.stage == name:
            return self.restored.stage_step
        self.trainer.begin(self.stage)
        return 0

    def prompts(self, name: str) -> Iterator[tuple[int, Prompts]]:
        """(step, prompts) of an RL stage, from where it stands to its end."""
        start = self.begin(name)
        self.publish()
        for step in range(start, self.stage.steps):
            self.trainer.at = self.stage, step
            users, positions = self.rollout.group.lease(name, step, self.stage.users).get(STEP_DEADLINE_S)
            yield step, Prompts(name, step, users, positions)

    def publish(self) -> int:
        """Give rollout the trainer's weights and rows under a new version; it serves that version only."""
        began = time.time()
        self.version += 1
        facts = publish(self.trainer, self.rollout, self.version, self.scenario.sparse.replica_bytes)
        self.trace.add(CONTROLLER, "publish", began, time.time(), **facts)
        return self.version

    # --- commits ----------------------------------------------------------------------------------------------------

    def commit(self, step: int, *, now: bool = False) -> Path | None:
        """Note step `step` of the stage as applied; write a commit when one is due, or `now`. Its folder, or None."""
        stage, done = self.stage, step + 1
        self.journal.write(applied=stage.first + step, stage=stage.name)
        last = done == stage.steps
        if not (now or last or done % self.scenario.checkpoint.every == 0):
            return None
        with self.trace.span("commit", step=stage.first + done):
            return self._commit(done, last)

    def _commit(self, done: int, last: bool) -> Path:
        stage = self.stage
        aside = self.checkpoints.aside(stage.first + done)
        writes = [self.trainer.group.save(str(aside)), self.trainer.shards.save(str(aside))]
        for write in writes:
            write.get(_OPEN_S)
        path = self.checkpoints.commit(aside, self._manifest(done, last))
        self.journal.write(committed=stage.first + done, stage=stage.name)
        self.checkpoints.prune(self.scenario.checkpoint.keep.last)
        return path

    def _manifest(self, done: int, last: bool) -> Manifest:
        stage = self.stage
        return Manifest(
            run_id=self.run.id,
            step=stage.first + done,
            stage=stage.name,
            stage_step=done,
            last=last,
            version=self.version,
            scenario=self.scenario_hash,
            artifacts={kind: artifact["sha256"] for kind, artifact in self.facts["artifacts"].items()},
            participants={"trainer": self.trainer.group.world, "embedding": self.trainer.shards.world},
            journal=sum(1 for _ in read_journal(self.run.journal)),
        )

    def restore(self) -> Manifest | None:
        """Load the newest whole commit when resuming; what came after it is forgotten."""
        if not self.resume:
            return None
        found = self.checkpoints.newest()
        if found is None:
            raise ConfigError(f"{self.run.path} has no whole commit to resume from; run it afresh")
        path, manifest = found
        mine = {kind: artifact["sha256"] for kind, artifact in self.facts["artifacts"].items()}
        if (manifest.scenario, manifest.artifacts) != (self.scenario_hash, mine):
            raise CheckpointError(
                f"{path} was trained from another scenario or other artifacts than {self.run.path} holds"
            )
        going_on = None if manifest.last else self.stages[manifest.stage]
        waits = [self.trainer.group.load(str(path), going_on), self.trainer.shards.load(str(path))]
        for wait in waits:
            wait.get(_OPEN_S)
        self._forget_after(manifest)
        self.version, self.restored = manifest.version, manifest
        return manifest

    def _forget_after(self, manifest: Manifest) -> None:
        """Drop commits, results and journal records that the restored commit does not know of."""
        self.checkpoints.drop_after(manifest.step)
        names = list(self.stages)
        for name in names[names.index(manifest.stage) + manifest.last :]:
            for path in (
                *self.run.results.glob(f"{name}.json"),
                *self.run.results.glob(f"{name}.npz"),
                *self.run.results.glob(f"{name}.rewards.after.npz"),
            ):
                path.unlink()
        self.journal.close()
        cut_journal(self.run.journal, manifest.journal)
        self.journal = Journal(self.run.journal)
