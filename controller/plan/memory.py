"""Bytes that one worker keeps on its device in a stage, part by part, and in what chunks it computes so that they fit.

A chunk is what the scenario says, positions of a supervised step and prompts of an RL one, halved until activations and
key/value caches fit the share of the device that is theirs. Trainer and rollout compute such chunks, whatever comes: so
everything is an upper bound from shapes; nothing is measured here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from nonet.controller.plan.resolved import ResolvedRun, hot_row_bytes
from nonet.controller.scenario import Role, Scenario, StageOptions
from nonet.models import ModelSize

RUNTIME_BYTES = 1_500_000_000  # a device's context and collective buffers, a process
PROCESS_BYTES = 400_000_000  # Python, torch and Ray in host memory, a process
_CUT_TO = 0.8  # of the room: the estimate is from shapes, and allocators need slack


@dataclass(frozen=True, slots=True)
class Need:
    """What one worker keeps: `fixed` while it lives, `working` only while its phase runs; bytes by part.

    chunks   what is computed at once, by role: positions of a supervised step, prompts of an RL one
    """

    fixed: Mapping[str, float] = field(default_factory=dict)
    working: Mapping[str, float] = field(default_factory=dict)
    chunks: Mapping[str, int] = field(default_factory=dict)

    @property
    def idle_bytes(self) -> float:
        return sum(self.fixed.values())


def need(run: ResolvedRun, stage: str, roles: tuple[str, ...], workers: int, budget_bytes: float) -> Need:
    """What a worker of a group with these roles keeps in a stage, in chunks that fit `budget_bytes` (0: unknown, then as large
    as the scenario says)."""
    scenario, size = run.scenario, run.size
    body, kind = scenario.stages[stage], run.kinds[stage]
    fixed: dict[str, float] = {}
    working: dict[str, float] = {}
    chunks: dict[str, int] = {}
    named = run.roles_at(stage)
    keeps = {named[role].kind(role).keeps: role for role in roles if role in named}
    if "training" in keeps:
        role = named[keeps["training"]]
        copies = {"reference": int(kind.needs_reference(body)), "old versions": kind.count_old_versions(body)}
        fixed |= _trained(role, copies, workers, size, body.optimizer.use)
        if stored := _stored_rows(run, stage):
            fixed["rows before they changed"] = stored
        working |= _of_a_step(role, workers, size)
    elif "weights" in keeps:
        fixed["weights"] = float(size.parameters * size.weight_bytes)
    if "rows" in keeps and (hot := hot_row_bytes(scenario)):
        fixed["hot rows"] = float(hot)
    room = max(1.0, budget_bytes - sum(fixed.values()) - sum(working.values())) if budget_bytes else 0.0
    whole, least = largest_chunk(scenario, body, size), scenario.data.history + 2
    units = kind.count_units(body, workers)
    if units is not None:
        whole, least = min(whole, units), 1
    if "training" in keeps and (units is not None or scenario.model.spec.cuts_steps):
        unit = kind.count_unit_tokens(scenario, body, size)
        chunks["trainer"] = _chunk(whole, lambda n: _stepping(run, n * unit), least, room)
        working["activations"] = _stepping(run, chunks["trainer"] * unit)
    elif "training" in keeps:
        working["activations"] = _stepping(run, kind.step_tokens(scenario, body, size) / workers)
    if "rollout" in roles and kind.rolls_out:
        width = kind.get_width(body)
        chunks["rollout"] = _chunk(whole, lambda p: _beams(run, width, p), 1, room)
        working["beams"] = _beams(run, width, chunks["rollout"])
    return Need(fixed, working, chunks)


def usual_share(run: ResolvedRun, stage: str, workers: int) -> float:
    """What a worker has of a step in which every user has one full history: positions, or prompts of an RL step."""
    body, kind = run.scenario.stages[stage], run.kinds[stage]
    units = kind.count_units(body, 1)
    if units is not None:
        return units / workers
    return min(kind.step_tokens(run.scenario, body, run.size) / workers, body.chunk.tokens)


def largest_chunk(scenario: Scenario, body: StageOptions, size: ModelSize) -> int:
    """What the scenario lets a worker compute at once, in the stage's units: positions, or prompts of an RL one."""
    return max(1, int(body.chunk.tokens / body.kind.count_unit_tokens(scenario, body, size)))


def sequence(scenario: Scenario, size: ModelSize) -> float:
    """Positions of one full history."""
    return float(scenario.data.history * size.positions_an_event + 1)


def _trained(
    role: Role, policies: Mapping[str, int], workers: int, size: ModelSize, optimizer: str
) -> dict[str, float]:
    """Return the bytes of the model while it is trained; `policies`: whole copies of it, by what they are for."""
    zero = _zero(role)
    weights = size.parameters * size.weight_bytes
    parts = {"weights": weights / (workers if zero == 3 else 1)}
    if not _aside(role):
        moved = optimizer if role.engine is None or optimizer in role.engine.spec.optimizers else "adamw"
        parts["optimizer"] = _moments(size, moved) / (workers if zero else 1)
        if master := _masters(role, workers, size):
            parts["optimizer"] += master
    parts |= {name: float(weights * count) for name, count in policies.items() if count}
    if copies := _copies(role, workers)[0]:
        parts["copy"] = weights * copies
    return parts | {"gradients": _gradients(role, workers, size)}  # kept between steps, as zeros


def _stored_rows(run: ResolvedRun, stage: str) -> float:
    """Return the bytes of sparse rows that a trainer stores before they change, at most: a table's budget, where it has one,
    else a row and its key for every event of the histories of those steps."""
    scenario, kind, dims = run.scenario, run.kinds[stage], run.feature_dims
    body = scenario.stages[stage]
    steps, users = kind.count_stored_row_steps(body), kind.find_least_users(body)[0] or 0
    events, total = steps * users * scenario.data.history, 0.0
    for name, budget in run.table_budgets.items():
        rows = sum(events * (dims[each] * 4 + 8) for each in scenario.sparse.tables[name].features or [name])
        total += min(rows, budget) if budget else rows
    return total


def _masters(role: Role, workers: int, size: ModelSize) -> float:
    """Bytes of the fp32 copies of weights of reduced precision."""
    return size.learned * 4 / (workers if _zero(role) else 1) if size.weight_bytes < 4 else 0.0


def _moments(size: ModelSize, optimizer: str) -> float:
    """Bytes of the moments in fp32: two of a weight, one of those that Muon moves."""
    single = size.matrices if optimizer == "muon" else 0
    return size.learned * 8.0 - min(single, size.learned) * 4.0


def _of_a_step(role: Role, workers: int, size: ModelSize) -> dict[str, float]:
    """What a step has besides: copies, and the buffer that gradients are summed in."""
    parts = {}
    if copies := _copies(role, workers)[1]:
        parts["copies"] = copies * size.parameters * size.weight_bytes
    buffer = role.engine.spec.buffer(role.engine.options(), workers) if role.engine else float(workers > 1)
    return parts | ({"buffer": buffer * size.learned * 4} if buffer else {})


def _gradients(role: Role, workers: int, size: ModelSize) -> float:
    return size.learned * size.weight_bytes / (workers if _zero(role) >= 2 else 1)


def _zero(role: Role) -> int:
    return role.engine.spec.divides(role.engine.options()) if role.engine else 0


def _copies(role: Role, workers: int) -> tuple[float, float]:
    """Copies of the weights that the engine keeps on each rank, and those of a step."""
    return role.engine.spec.copies(role.engine.options(), workers) if role.engine else (0.0, 0.0)


def _aside(role: Role) -> bool:
    return role.engine is not None and role.engine.spec.aside(role.engine.options())


def stepped_on_host(run: ResolvedRun, stage: str, roles: tuple[str, ...], workers: int) -> float:
    """Bytes of a worker's share of an optimizer in host memory: moments, weights in fp32 and their gradients."""
    named = run.roles_at(stage)
    if not any(role in named and _aside(named[role]) for role in roles):
        return 0.0
    return run.size.parameters * 16 / workers


def _stepping(run: ResolvedRun, tokens: float) -> float:
    """Activations of a chunk, and its sparse rows with their gradients."""
    events = tokens / run.size.positions_an_event
    return run.size.estimate_activation_bytes(tokens) + events * sum(run.feature_dims.values()) * 8


def _beams(run: ResolvedRun, width: int, users: float) -> float:
    """Caches of a chunk of prompts: every history once, every beam's own tokens, and one level's logits."""
    size = run.size
    cached = sequence(run.scenario, size) + width * size.levels
    codes = size.vocabulary / max(1, size.levels) if size.positions_an_event == 1 else size.vocabulary
    return users * (size.estimate_kv_bytes(cached) + width * codes * 8)


def _chunk(whole: int, bytes_of: Callable[[float], float], least: int, room: float) -> int:
    """`whole`, halved until it fits the room (0: not known), never below `least`."""
    while room and bytes_of(whole) > _CUT_TO * room and whole // 2 >= least:
        whole //= 2
    return whole
