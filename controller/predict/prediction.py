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
from nonet.controller.predict.cost_model import Shape, StepCost, decode_cost
from nonet.controller.predict.step_costs import DataFacts, StepCosts
from nonet.controller.scenario import Scenario
from nonet.errors import ConfigError

__all__ = ["DataFacts", "Prediction", "StagePrediction", "check_covered", "predict"]

_CHOICES = 0.3  # inner nodes with a choice over items of a catalogue


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
    here = StageCosts(scenario, plan, facts, calibration, shape, costs)
    stages = []
    for name, body in scenario.stages.items():
        stages.append(body.kind.predict(here, name, body))
    start_s = calibration.process_s * _waves(plan)
    return Prediction(calibration.source, tuple(stages), start_s, here.evaluations(len(stages)))


def check_covered(scenario: Scenario, plan: Plan) -> None:
    """Raises ConfigError for a model or device that the cost model does not know."""
    model, other = scenario.model, sorted({group.device for group in plan.groups} - {"cpu"})
    unknown = model.spec.uncalibrated(model.options())
    what = f"model {model.use}" if unknown == "" else unknown
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
class StageCosts:
    """What a kind of stage predicts from. steps: what groups pay beside their arithmetic; shape: of the model."""

    scenario: Scenario
    plan: Plan
    facts: DataFacts
    cost: Calibration
    shape: Shape
    steps: StepCosts

    def evaluations(self, models: int) -> float:
        """Seconds that ranking every held-out prompt after each stage adds: all of them in the trainer's process; beside it the
        last, and of the others what they take from busy cores.
        """
        trainer, evaluator = self.plan.group_of("trainer"), self.plan.group_of("evaluator")
        nodes = self.shape.codes + _CHOICES * self.facts.items
        history = min(self.scenario.data.history, self.facts.trained_events / max(1, self.facts.users))
        beams = decode_cost(self.shape, self.facts.asked, history, self.scenario.evaluate.width)
        whole = StepCost(
            flops=self.facts.asked * nodes * (4 * self.shape.width + 2 * self.shape.codes) * self.shape.width
        )
        whole += StepCost(
            bytes=self.facts.asked * nodes * (10 * self.shape.width + 4 * self.shape.codes) * 4.0
        )
        one = self.cost.factor("evaluate") * self.cost.decode.seconds(beams + whole)
        if evaluator.name == trainer.name:
            return models * one
        cores = self.steps.cores(evaluator)
        apart = evaluator.nodes[0] not in trainer.nodes
        busy = trainer.on_nodes()[trainer.nodes[0]] * max(1, trainer.threads)
        return one + (0.0 if apart or busy < cores else (models - 1) * one / cores)

    def answer(
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
        """A prediction with the memory that the plan's ledger has for the stage."""
        lines = [line for line in self.plan.ledger.lines if line.stage == name]
        memory = max((line.needed for line in lines), default=0)
        parts = {part: seconds for part, seconds in parts.items() if seconds}
        step_s = sum(parts.values()) - hidden
        return StagePrediction(name, kind, steps, rows, step_s, parts, waits, int(moved), memory, hidden)
