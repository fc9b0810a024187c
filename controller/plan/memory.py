"""Estimates of the bytes that one worker keeps on its device in a stage, by part, and of the chunk sizes that fit.

A chunk is the amount of work that is computed at once: positions of a supervised step, or prompts of an RL step. It starts
at the scenario's value and is halved until activations and key/value caches fit into the share of the device that is left
for them. Trainers and rollouts compute chunks of this size at run time, so every number is an upper bound that follows from
shapes; nothing is measured here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from nonet.controller.plan.resolved import ResolvedRun, count_hot_row_bytes
from nonet.controller.scenario import Role, Scenario, StageOptions
from nonet.models import ModelSize

RUNTIME_BYTES = 1_500_000_000  # device context and collective buffers of one process
PROCESS_BYTES = 400_000_000  # host memory of Python, torch and Ray in one process
# Share of the room that a chunk may take: its size is estimated from shapes, and allocators need slack.
_CUT_TO = 0.8


@dataclass(frozen=True, slots=True)
class WorkerMemory:
    """Memory that one worker needs in a stage, in bytes by part.

    Attributes:
        fixed: Bytes that the worker holds during its whole lifetime.
        working: Bytes that are held only while the worker's phase runs.
        chunks: By role, how much is computed at once: positions of a supervised step, or prompts of an RL step.
    """

    fixed: Mapping[str, float] = field(default_factory=dict)
    working: Mapping[str, float] = field(default_factory=dict)
    chunks: Mapping[str, int] = field(default_factory=dict)

    @property
    def idle_bytes(self) -> float:
        """Bytes that the worker holds while it does not compute."""
        return sum(self.fixed.values())


def estimate_worker_memory(
    run: ResolvedRun, stage: str, roles: tuple[str, ...], workers: int, budget_bytes: float
) -> WorkerMemory:
    """Estimate the memory of a worker in a stage, with chunks that fit the budget.

    Args:
        run: The scenario with everything that follows from it.
        stage: The name of the stage.
        roles: The roles that the worker holds.
        workers: The number of workers in its group.
        budget_bytes: Bytes that the worker may use; 0 if unknown, in which case chunks are as large as the scenario says.
    """
    scenario, size = run.scenario, run.size
    body, kind = scenario.stages[stage], run.kinds[stage]
    fixed: dict[str, float] = {}
    working: dict[str, float] = {}
    chunks: dict[str, int] = {}
    named = run.get_roles(stage)
    keeps = {named[role].find_kind(role).keeps: role for role in roles if role in named}
    if "training" in keeps:
        role = named[keeps["training"]]
        copies = {"reference": int(kind.needs_reference(body)), "old versions": kind.count_old_versions(body)}
        fixed |= _estimate_trained_bytes(role, copies, workers, size, body.optimizer.use)
        if stored := _estimate_stored_row_bytes(run, stage):
            fixed["rows before they changed"] = stored
        working |= _estimate_step_bytes(role, workers, size)
    elif "weights" in keeps:
        fixed["weights"] = float(size.parameters * size.weight_bytes)
    if "rows" in keeps and (hot := count_hot_row_bytes(scenario)):
        fixed["hot rows"] = float(hot)
    room = max(1.0, budget_bytes - sum(fixed.values()) - sum(working.values())) if budget_bytes else 0.0
    whole, least = compute_largest_chunk(scenario, body, size), scenario.data.history + 2
    units = kind.count_units(body, workers)
    if units is not None:
        whole, least = min(whole, units), 1
    if "training" in keeps and (units is not None or scenario.model.spec.cuts_steps):
        unit = kind.count_unit_tokens(scenario, body, size)
        chunks["trainer"] = _halve_until_fits(
            whole, lambda n: _estimate_activation_bytes(run, n * unit), least, room
        )
        working["activations"] = _estimate_activation_bytes(run, chunks["trainer"] * unit)
    elif "training" in keeps:
        working["activations"] = _estimate_activation_bytes(
            run, kind.count_step_tokens(scenario, body, size) / workers
        )
    if "rollout" in roles and kind.rolls_out:
        width = kind.get_width(body)
        chunks["rollout"] = _halve_until_fits(whole, lambda p: _estimate_beam_bytes(run, width, p), 1, room)
        working["beams"] = _estimate_beam_bytes(run, width, chunks["rollout"])
    return WorkerMemory(fixed, working, chunks)


def estimate_usual_share(run: ResolvedRun, stage: str, workers: int) -> float:
    """Estimate one worker's share of a step in which every user has one full history.

    Args:
        run: The scenario with everything that follows from it.
        stage: The name of the stage.
        workers: The number of trainers.

    Returns:
        Positions of a supervised step, or prompts of an RL step.
    """
    body, kind = run.scenario.stages[stage], run.kinds[stage]
    units = kind.count_units(body, 1)
    if units is not None:
        return units / workers
    return min(kind.count_step_tokens(run.scenario, body, run.size) / workers, body.chunk.tokens)


def compute_largest_chunk(scenario: Scenario, stage_options: StageOptions, size: ModelSize) -> int:
    """Return the most that the scenario lets a worker compute at once.

    Args:
        scenario: The scenario.
        stage_options: The options of the stage.
        size: The shape of the model.

    Returns:
        Positions of a supervised step, or prompts of an RL step; at least 1.
    """
    return max(
        1,
        int(stage_options.chunk.tokens / stage_options.kind.count_unit_tokens(scenario, stage_options, size)),
    )


def _estimate_trained_bytes(
    role: Role, policies: Mapping[str, int], workers: int, size: ModelSize, optimizer: str
) -> dict[str, float]:
    """Estimate the bytes of a model that is being trained.

    Args:
        role: The trainers' role, with its engine.
        policies: The number of whole copies of the model, by purpose.
        workers: The number of trainers.
        size: The shape of the model.
        optimizer: The name of the dense optimizer.
    """
    zero = _get_zero_stage(role)
    weights = size.parameters * size.weight_bytes
    parts = {"weights": weights / (workers if zero == 3 else 1)}
    if not _has_host_optimizer(role):
        moved = optimizer if role.engine is None or optimizer in role.engine.spec.optimizers else "adamw"
        parts["optimizer"] = _count_moment_bytes(size, moved) / (workers if zero else 1)
        if master := _count_master_bytes(role, workers, size):
            parts["optimizer"] += master
    parts |= {name: float(weights * count) for name, count in policies.items() if count}
    if copies := _count_copies(role, workers)[0]:
        parts["copy"] = weights * copies
    return parts | {
        "gradients": _count_gradient_bytes(role, workers, size)
    }  # they stay allocated between steps, as zeros


def _estimate_stored_row_bytes(run: ResolvedRun, stage: str) -> float:
    """Estimate an upper bound of the bytes of sparse rows that a trainer stores before they change.

    A table with a budget counts at most its budget; a table without one counts a row and a key for every event of the
    histories.
    """
    scenario, kind, dims = run.scenario, run.kinds[stage], run.feature_dims
    body = scenario.stages[stage]
    steps, users = kind.count_stored_row_steps(body), kind.find_least_users(body)[0] or 0
    events, total = steps * users * scenario.data.history, 0.0
    for name, budget in run.table_budgets.items():
        rows = sum(events * (dims[each] * 4 + 8) for each in scenario.sparse.tables[name].features or [name])
        total += min(rows, budget) if budget else rows
    return total


def _count_master_bytes(role: Role, workers: int, size: ModelSize) -> float:
    """Return the bytes of the fp32 master copies of weights of reduced precision."""
    return size.learned * 4 / (workers if _get_zero_stage(role) else 1) if size.weight_bytes < 4 else 0.0


def _count_moment_bytes(size: ModelSize, optimizer: str) -> float:
    """Return the bytes of the optimizer's fp32 moments: two per weight, and one per weight that Muon updates."""
    single = size.matrices if optimizer == "muon" else 0
    return size.learned * 8.0 - min(single, size.learned) * 4.0


def _estimate_step_bytes(role: Role, workers: int, size: ModelSize) -> dict[str, float]:
    """Estimate the bytes of temporary copies and of the gradient buffer during a step."""
    parts = {}
    if copies := _count_copies(role, workers)[1]:
        parts["copies"] = copies * size.parameters * size.weight_bytes
    buffer = (
        role.engine.spec.buffer(role.engine.get_options(), workers) if role.engine else float(workers > 1)
    )
    return parts | ({"buffer": buffer * size.learned * 4} if buffer else {})


def _count_gradient_bytes(role: Role, workers: int, size: ModelSize) -> float:
    """Return the bytes of gradients on each rank."""
    return size.learned * size.weight_bytes / (workers if _get_zero_stage(role) >= 2 else 1)


def _get_zero_stage(role: Role) -> int:
    """Return the ZeRO stage of the role's engine; 0 if it has no engine."""
    return role.engine.spec.divides(role.engine.get_options()) if role.engine else 0


def _count_copies(role: Role, workers: int) -> tuple[float, float]:
    """Return how many copies of the weights the engine keeps on each rank: permanently, and during a step."""
    return role.engine.spec.copies(role.engine.get_options(), workers) if role.engine else (0.0, 0.0)


def _has_host_optimizer(role: Role) -> bool:
    """Return whether the role's engine keeps the optimizer in host memory."""
    return role.engine is not None and role.engine.spec.aside(role.engine.get_options())


def estimate_host_optimizer_bytes(
    run: ResolvedRun, stage: str, roles: tuple[str, ...], workers: int
) -> float:
    """Return the bytes of a worker's share of an optimizer in host memory: moments, fp32 weights and their gradients.

    Args:
        run: The scenario with everything that follows from it.
        stage: The name of the stage.
        roles: The roles that the worker holds.
        workers: The number of workers in its group.

    Returns:
        Bytes; 0 if no role of the worker steps on the host.
    """
    named = run.get_roles(stage)
    if not any(role in named and _has_host_optimizer(named[role]) for role in roles):
        return 0.0
    return run.size.parameters * 16 / workers


def _estimate_activation_bytes(run: ResolvedRun, tokens: float) -> float:
    """Estimate the bytes of a chunk's activations, and of its sparse rows with their gradients."""
    events = tokens / run.size.positions_an_event
    return run.size.estimate_activation_bytes(tokens) + events * sum(run.feature_dims.values()) * 8


def _estimate_beam_bytes(run: ResolvedRun, width: int, users: float) -> float:
    """Estimate the bytes of a chunk of prompts: one cached history per user, the tokens of every beam, and one level's logits."""
    size = run.size
    cached = size.count_history_positions(run.scenario.data.history) + width * size.levels
    codes = size.vocabulary / max(1, size.levels) if size.positions_an_event == 1 else size.vocabulary
    return users * (size.estimate_kv_bytes(cached) + width * codes * 8)


def _halve_until_fits(whole: int, estimate_bytes: Callable[[float], float], least: int, room: float) -> int:
    """Halve a chunk until its estimated bytes fit.

    Args:
        whole: The largest chunk.
        estimate_bytes: Estimates the bytes of a chunk.
        least: The smallest chunk that may be returned.
        room: Bytes that are available; 0 if unknown, in which case `whole` is returned.
    """
    while room and estimate_bytes(whole) > _CUT_TO * room and whole // 2 >= least:
        whole //= 2
    return whole
