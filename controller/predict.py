"""A plan's receipt before the purchase: seconds, rows/s, idle shares, bytes and memory of every stage, from a calibration.

A stage's step is a chain of parts (lookup, compute, exchange, decode, reward, update, publish, calls); parts of different groups
follow each other, ranks of one group run at once and share the node's cores. Every part is work from shapes times measured
rates, and stands in the answer by name. The model covers the SID decoder on cpu; for anything else it says so instead.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from nonet.controller.calibration import Calibration
from nonet.controller.options import Reinforced, Supervised
from nonet.controller.plan import GroupPlan, Plan
from nonet.controller.scenario import Scenario
from nonet.controller.sizes import feature_dims, model_size
from nonet.controller.work import Shape, Work, decode_work, train_work, update_work
from nonet.errors import ConfigError

CHUNK_STEPS = 10  # nonet.controller.stages asks for as many steps a call
_TARGETED = 0.5  # share of events that a `target:` condition keeps, where the data has not said
_CHOICES = 0.3  # inner nodes with a choice over items of a catalogue
_DISTINCT = 0.7  # distinct keys over events of a batch
_USUAL = {"block": "attention", "depth": "mlp"}  # the SID decoder that calibration runs


@dataclass(frozen=True, slots=True)
class DataFacts:
    """What the sequences hold.

    spread     standard deviation over mean of the training events of a user
    targeted   share of the training events that a stage's `target:` keeps, by stage
    items, asked   of the catalogue; held-out prompts that every evaluation ranks
    """

    users: int
    trained_events: int
    spread: float = 1.5
    targeted: Mapping[str, float] = field(default_factory=dict)
    items: int = 0
    asked: int = 0


@dataclass(frozen=True, slots=True)
class StagePrediction:
    """One stage. parts: seconds a step by name; idle: share of the stage each group waits; rows: trained events or prompts."""

    stage: str
    kind: str
    steps: int
    rows: int
    step_s: float
    parts: Mapping[str, float]
    idle: Mapping[str, float]
    bytes_a_step: int
    memory_bytes: int

    @property
    def wall_s(self) -> float:
        return self.steps * self.step_s

    @property
    def rows_per_s(self) -> float:
        return self.rows / self.wall_s if self.wall_s else 0.0


@dataclass(frozen=True, slots=True)
class Prediction:
    """All stages of a plan; evaluate_s: what evaluations add to the run's time."""

    source: str
    stages: tuple[StagePrediction, ...]
    start_s: float
    evaluate_s: float = 0.0

    @property
    def wall_s(self) -> float:
        return self.start_s + sum(stage.wall_s for stage in self.stages) + self.evaluate_s

    def as_dict(self) -> dict[str, Any]:
        stages = {s.stage: asdict(s) | {"wall_s": s.wall_s, "rows_per_s": s.rows_per_s} for s in self.stages}
        return {
            "source": self.source,
            "start_s": self.start_s,
            "evaluate_s": self.evaluate_s,
            "wall_s": self.wall_s,
            "stages": stages,
        }


def predict(scenario: Scenario, plan: Plan, facts: DataFacts, calibration: Calibration) -> Prediction:
    """Predict every stage. Raises ConfigError for a model or device that the cost model does not know."""
    check_covered(scenario, plan)
    size, options = model_size(scenario), scenario.tokenizer.options()
    shape = Shape(size.width, size.layers, size.levels, int(options.get("codes", 64)))
    here = _Here(scenario, plan, facts, calibration, shape, size.parameters)
    stages = []
    for name, body in scenario.stages.items():
        stages.append(
            here.supervised(name, body) if isinstance(body, Supervised) else here.reinforced(name, body)
        )
    start_s = calibration.process_s * _waves(plan)
    return Prediction(calibration.source, tuple(stages), start_s, here.evaluations(len(stages)))


def check_covered(scenario: Scenario, plan: Plan) -> None:
    """Raises ConfigError for a model or device that the cost model does not know."""
    model, other = scenario.model, sorted({group.device for group in plan.groups} - {"cpu"})
    options = model.options()
    changed = [
        f"model.{key}: {options[key]}" for key, usual in _USUAL.items() if options.get(key, usual) != usual
    ]
    what = f"model {model.use}" if model.use != "sid_decoder" else ", ".join(changed)
    what = what or (f"device {', '.join(other)}" if other else "")
    if what:
        raise ConfigError(
            f"no prediction for {what}: the cost model is calibrated for sid_decoder on cpu; the plan itself stands"
        )


def _waves(plan: Plan) -> float:
    """Workers that start one after another on a core of the fullest node."""
    busiest = 1.0
    for node in {name for group in plan.groups for name in group.nodes}:
        count = sum(group.on_nodes().get(node, 0) for group in plan.groups)
        busiest = max(busiest, count / max(1.0, plan.cores[node]))
    return busiest


@dataclass(frozen=True, slots=True)
class _Here:
    scenario: Scenario
    plan: Plan
    facts: DataFacts
    cost: Calibration
    shape: Shape
    parameters: int

    def supervised(self, name: str, body: Supervised) -> StagePrediction:
        trainer, shards = self.plan.group_of("trainer"), self.plan.group_of("embedding")
        users = min(self.facts.users, body.batch.users or self._users_of(body))
        epoch_steps = -(-self.facts.users // users)
        steps = epoch_steps * body.epochs if body.epochs else self._steps_of(body, epoch_steps)
        events = self.facts.trained_events / epoch_steps
        share = self.facts.targeted.get(name, _TARGETED) if body.target else 1.0
        rank = events / trainer.workers * self._widest(users, trainer.workers)
        positions = rank * (1 + 1 / self.scenario.data.history) + users / trainer.workers
        work = train_work(self.shape, positions, rank * share, body.ahead)
        parts = {
            "compute": self.cost.train.seconds(work) * self._crowding(trainer) / self._speed(trainer),
            **self._sparse(trainer, shards, rank * _DISTINCT, users / trainer.workers),
            "reduce": self._reduce(trainer),
            "calls": self.cost.call.seconds() / CHUNK_STEPS,
        }
        factor = self.cost.factor("supervised")
        parts = {part: factor * seconds for part, seconds in parts.items()}
        waits = {trainer.name: 0.0}
        if shards.name != trainer.name:
            waits[shards.name] = 1 - parts["exchange"] / sum(parts.values())
        rows = round(events * share * steps)
        moved = self._moved(trainer, shards, rank * _DISTINCT)
        return self._answer(name, "supervised", steps, rows, parts, waits, moved)

    def reinforced(self, name: str, body: Reinforced) -> StagePrediction:
        trainer, rollout = self.plan.group_of("trainer"), self.plan.group_of("rollout")
        width = int(body.rollout.options().get("width", 16))
        history = min(self.scenario.data.history, self.facts.trained_events / max(1, self.facts.users))
        decode = decode_work(self.shape, body.users / rollout.workers, history, width)
        update = update_work(self.shape, body.users / trainer.workers, history, width)
        rewards = len(body.rewards)
        parts = {
            "rollout": self.cost.decode.seconds(decode) * self._crowding(rollout) / self._speed(rollout),
            "reward": self.cost.call.seconds(body.users * width * 30) * rewards,
            "update": self.cost.update.seconds(update) * self._crowding(trainer) / self._speed(trainer),
            "lookup": 2 * self.cost.pull.seconds(body.users * history),
            "reduce": self._reduce(trainer),
            "publish": self._publish(trainer, rollout),
            "calls": 4 * self.cost.call.seconds(),
        }
        factor = self.cost.factor("rl")
        parts = {part: factor * seconds for part, seconds in parts.items()}
        whole = sum(parts.values())
        waits = {trainer.name: 1 - (parts["update"] + parts["reduce"]) / whole}
        if rollout.name == trainer.name:
            waits[trainer.name] -= parts["rollout"] / whole
        else:
            waits[rollout.name] = 1 - parts["rollout"] / whole
        for reward in body.rewards:
            waits[f"{name}.reward.{reward}"] = 1 - parts["reward"] / rewards / whole
        beams = body.users * width * (self.shape.levels * 8 + 30)
        apart = 4 * self.parameters * rollout.workers if rollout.name != trainer.name else 0
        return self._answer(name, "rl", body.steps, body.steps * body.users, parts, waits, beams + apart)

    def evaluations(self, models: int) -> float:
        """Seconds that ranking every held-out prompt after each stage adds: all of them in the trainer's process; beside it the
        last, and of the others what they take from busy cores.
        """
        trainer, evaluator = self.plan.group_of("trainer"), self.plan.group_of("evaluator")
        nodes = self.shape.codes + _CHOICES * self.facts.items
        history = min(self.scenario.data.history, self.facts.trained_events / max(1, self.facts.users))
        beams = decode_work(self.shape, self.facts.asked, history, self.scenario.evaluate.width)
        whole = Work(
            flops=self.facts.asked * nodes * (4 * self.shape.width + 2 * self.shape.codes) * self.shape.width
        )
        whole += Work(bytes=self.facts.asked * nodes * (10 * self.shape.width + 4 * self.shape.codes) * 4.0)
        one = self.cost.factor("evaluate") * self.cost.decode.seconds(beams + whole)
        if evaluator.name == trainer.name:
            return models * one
        cores = self._cores(evaluator)
        apart = evaluator.nodes[0] not in trainer.nodes
        busy = trainer.on_nodes()[trainer.nodes[0]] * max(1, trainer.threads)
        return one + (0.0 if apart or busy < cores else (models - 1) * one / cores)

    def _answer(
        self,
        name: str,
        kind: str,
        steps: int,
        rows: int,
        parts: dict[str, float],
        waits: dict[str, float],
        moved: float,
    ) -> StagePrediction:
        lines = [line for line in self.plan.ledger.lines if line.stage == name]
        memory = max((line.needed for line in lines), default=0)
        parts = {part: seconds for part, seconds in parts.items() if seconds}
        return StagePrediction(name, kind, steps, rows, sum(parts.values()), parts, waits, int(moved), memory)

    def _sparse(self, trainer: GroupPlan, shards: GroupPlan, keys: float, users: float) -> dict[str, float]:
        """A step's pulls and pushes: in process where one rank holds all rows, by all-to-all otherwise."""
        tables = len(feature_dims(self.scenario))
        if not tables:
            return {"lookup": 0.0, "exchange": 0.0}
        local = self.cost.pull.seconds(keys) + self.cost.push.seconds(keys)
        local += (tables - 1) * (self.cost.pull.seconds(users) + self.cost.push.seconds(users))
        if trainer.workers == 1 and shards.name == trainer.name:
            return {"lookup": local, "exchange": 0.0}
        ranks = trainer.workers + (shards.workers if shards.name != trainer.name else 0)
        wire = self.cost.exchange.seconds(keys) + (tables - 1) * self.cost.exchange.seconds(users)
        return {"lookup": local, "exchange": wire * max(1.0, ranks / self._cores(trainer))}

    def _reduce(self, trainer: GroupPlan) -> float:
        if trainer.workers == 1:
            return 0.0
        return self.cost.reduce.seconds(4 * self.parameters) + 2 * self.cost.reduce.seconds()

    def _publish(self, trainer: GroupPlan, rollout: GroupPlan) -> float:
        """Fused on one rank nothing moves; else rows are exported, and dense weights where the process is another."""
        fused, shards = rollout.name == trainer.name, self.plan.group_of("embedding")
        if fused and trainer.workers == 1 and shards.name == trainer.name:
            return self.cost.call.seconds()
        rows = 4.0 * (self.facts.users + 5 * self.facts.users) * sum(feature_dims(self.scenario).values()) / 2
        dense = 0.0 if fused else 4.0 * self.parameters
        return 3 * self.cost.call.seconds() + (rows + dense) * self.cost.call.unit_s * (1 + rollout.workers)

    def _moved(self, trainer: GroupPlan, shards: GroupPlan, keys: float) -> float:
        """Bytes between processes a step: keys and rows both ways, and the dense gradients."""
        if trainer.workers == 1 and shards.name == trainer.name:
            return 0.0
        dims = sum(feature_dims(self.scenario).values())
        dense = 8 * self.parameters * (trainer.workers - 1)
        return trainer.workers * keys * (16 + 8 * dims) + dense

    def _crowding(self, group: GroupPlan) -> float:
        """Threads over cores on the group's fullest node, at least 1."""
        return max(1.0, max(group.on_nodes().values()) * max(1, group.threads) / self._cores(group))

    def _cores(self, group: GroupPlan) -> float:
        return max(1.0, self.plan.cores[group.nodes[0]])

    def _speed(self, group: GroupPlan) -> float:
        return 1 + (max(1, group.threads) - 1) * self.cost.threads_gain

    def _widest(self, users: float, workers: int) -> float:
        """The largest rank's share over the mean: expected maximum of `workers` sums of users of unequal length."""
        if workers == 1:
            return 1.0
        deviation = self.facts.spread / max(1.0, users / workers) ** 0.5
        return 1 + deviation * {2: 0.56, 3: 0.85, 4: 1.03}.get(workers, 1.2)

    def _users_of(self, body: Supervised) -> int:
        mean = self.facts.trained_events / max(1, self.facts.users)
        return max(1, round((body.batch.tokens or 1) / max(1.0, mean)))

    def _steps_of(self, body: Supervised, epoch_steps: int) -> int:
        return max(1, round((body.tokens or 1) / max(1, self.facts.trained_events) * epoch_steps))
