"""A plan's receipt before the purchase: seconds, rows/s, idle shares, bytes and memory of every stage, from a calibration.

A stage's step is a chain of parts (lookup, compute, exchange, decode, reward, update, publish, calls); parts of different groups
follow each other, ranks of one group run at once and share the node's cores. With staleness the rollout of a step runs beside
the update of the one before, as far as there are cores: the longer of the two counts. Every part is work from shapes times
measured rates, and stands in the answer by name. The model covers the SID decoder on cpu; for anything else it says so.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from nonet.controller.plan import Plan, model_size
from nonet.controller.predict.calibration import Calibration
from nonet.controller.predict.cost_model import Shape, Work, decode_work, train_work, update_work
from nonet.controller.predict.step_costs import DataFacts, StepCosts
from nonet.controller.scenario import Reinforced, Scenario, Supervised
from nonet.errors import ConfigError

__all__ = ["DataFacts", "Prediction", "StagePrediction", "check_covered", "predict"]

CHUNK_STEPS = 10  # nonet.controller.stages.loops asks for as many steps a call
_TARGETED = 0.5  # share of events that a `target:` condition keeps, where the data has not said
_CHOICES = 0.3  # inner nodes with a choice over items of a catalogue
_USUAL = {"block": "attention", "depth": "mlp"}  # the SID decoder that calibration runs
_BEFORE = ("rollout", "reward")  # of an RL step, what staleness lets run beside the rest


@dataclass(frozen=True, slots=True)
class StagePrediction:
    """One stage. parts: seconds a step by name; idle: share of the stage each group waits; rows: trained events or prompts.

    hidden_s   seconds of a step's parts that run beside its others, by staleness
    """

    stage: str
    kind: str
    steps: int
    rows: int
    step_s: float
    parts: Mapping[str, float]
    idle: Mapping[str, float]
    bytes_a_step: int
    memory_bytes: int
    hidden_s: float = 0.0

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
    costs = StepCosts(scenario, plan, facts, calibration, size.parameters)
    here = _Here(scenario, plan, facts, calibration, shape, costs)
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
    costs: StepCosts

    def supervised(self, name: str, body: Supervised) -> StagePrediction:
        trainer, shards = self.costs.trainer, self.costs.shards
        users = min(self.facts.users, body.batch.users or self._users_of(body))
        epoch_steps = -(-self.facts.users // users)
        steps = epoch_steps * body.epochs if body.epochs else self._steps_of(body, epoch_steps)
        events = self.facts.trained_events / epoch_steps
        share = self.facts.targeted.get(name, _TARGETED) if body.target else 1.0
        rank = events / trainer.workers * self.costs.widest(users, trainer.workers)
        positions = rank * (1 + 1 / self.scenario.data.history) + users / trainer.workers
        work = train_work(self.shape, positions, rank * share, body.ahead)
        parts = {
            "compute": self.cost.train.seconds(work) * self.costs.slowdown(trainer, "train"),
            **self.costs.sparse(rank, users / trainer.workers),
            "reduce": self.costs.reduce(),
            "calls": self.cost.call.seconds() / CHUNK_STEPS,
        }
        factor = self.cost.factor("supervised")
        parts = {part: factor * seconds for part, seconds in parts.items()}
        waits = {trainer.name: 0.0}
        if shards.name != trainer.name:
            waits[shards.name] = 1 - parts.get("exchange", 0.0) / sum(parts.values())
        rows = round(events * share * steps)
        return self._answer(name, "supervised", steps, rows, parts, waits, self.costs.moved(rank))

    def reinforced(self, name: str, body: Reinforced) -> StagePrediction:
        trainer, rollout = self.costs.trainer, self.plan.group_of("rollout")
        options = body.rollout.options()
        width, stale = int(options.get("width", 16)), options.get("staleness", 0) > 0
        history = min(self.scenario.data.history, self.facts.trained_events / max(1, self.facts.users))
        decode = decode_work(self.shape, body.users / rollout.workers, history, width)
        users = body.users / trainer.workers
        update = update_work(self.shape, users, history, width)
        rewards, beams = len(body.rewards), body.users * width * (self.shape.levels * 8 + 30)
        parts = {
            "rollout": self.cost.decode.seconds(decode) * self.costs.slowdown(rollout, "decode"),
            "reward": self.cost.hop.seconds(beams) * rewards,
            "update": self.cost.update.seconds(update) * self.costs.slowdown(trainer, "update"),
            **self.costs.read(users * history, users),
            "reduce": self.costs.reduce(),
            "publish": self.costs.publish(),
            "calls": 2 * self.cost.call.seconds() + self.cost.hop.seconds(beams),
        }
        factor = self.cost.factor("rl")
        parts = {part: factor * seconds for part, seconds in parts.items()}
        hidden = self._hidden(parts) if stale and rollout.name != trainer.name else 0.0
        whole = sum(parts.values()) - hidden
        waits = {trainer.name: 1 - (parts["update"] + parts["reduce"]) / whole}
        if rollout.name == trainer.name:
            waits[trainer.name] -= parts["rollout"] / whole
        else:
            waits[rollout.name] = 1 - parts["rollout"] / whole
        for reward in body.rewards:
            waits[f"{name}.reward.{reward}"] = 1 - parts["reward"] / rewards / whole
        apart = 4 * self.costs.parameters * rollout.workers if rollout.name != trainer.name else 0
        rows, moved = body.steps * body.users, beams + apart
        return self._answer(name, "rl", body.steps, rows, parts, waits, moved, hidden)

    def _hidden(self, parts: Mapping[str, float]) -> float:
        """Seconds that staleness hides: the shorter of the two sides, less what they slow each other down on shared cores.

        Publishing stays between steps: both sides take part in it.
        """
        before = sum(parts[name] for name in _BEFORE)
        after = sum(seconds for name, seconds in parts.items() if name not in (*_BEFORE, "publish", "calls"))
        slower = self.costs.both(self.plan.group_of("rollout"), self.costs.trainer)
        return max(0.0, min(before, after) * (2 - slower))

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
        cores = self.costs.cores(evaluator)
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
        hidden: float = 0.0,
    ) -> StagePrediction:
        lines = [line for line in self.plan.ledger.lines if line.stage == name]
        memory = max((line.needed for line in lines), default=0)
        parts = {part: seconds for part, seconds in parts.items() if seconds}
        step_s = sum(parts.values()) - hidden
        return StagePrediction(name, kind, steps, rows, step_s, parts, waits, int(moved), memory, hidden)

    def _users_of(self, body: Supervised) -> int:
        mean = self.facts.trained_events / max(1, self.facts.users)
        return max(1, round((body.batch.tokens or 1) / max(1.0, mean)))

    def _steps_of(self, body: Supervised, epoch_steps: int) -> int:
        return max(1, round((body.tokens or 1) / max(1, self.facts.trained_events) * epoch_steps))
