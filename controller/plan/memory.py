"""Estimates of the bytes that one worker keeps on its device in a stage, by part, and of the chunk sizes that fit.

A chunk is the amount of work that is computed at once: positions of a supervised step, or prompts of an RL step. It starts
at the scenario's value and is halved until activations and key/value caches fit into the share of the device that is left
for them. Trainers and rollouts compute chunks of this size at run time, so every number is an upper bound that follows from
shapes; nothing is measured here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from nonet.controller.plan.resolved import ResolvedRun, count_hot_row_bytes
from nonet.controller.scenario import Role, Scenario, StageOptions
from nonet.models import ModelSize
from nonet.workers.engines import ENGINES

RUNTIME_BYTES = 1_500_000_000  # device context and collective buffers of one process
PROCESS_BYTES = 400_000_000  # host memory of one process for Python, torch and Ray
# What a step of an engine that divides weights has of a block at once: the weights of two blocks and the buffer that one
# is gathered in, then the gradients of one and the buffer that they are reduced in; and of the weights around the blocks.
_GATHERED_BLOCKS, _GATHERED_AROUND = 4, 3
# What a pass without gradients has of them: its weights and the buffer that they are gathered in.
_READ_BLOCKS, _READ_AROUND = 3, 2
# Share of the remaining bytes that a chunk may fill: its size is estimated from shapes, and allocators need slack.
_FILLED_SHARE = 0.8


@dataclass(frozen=True, slots=True)
class WorkerMemory:
    """Memory that one worker needs in a stage, in bytes by part.

    Attributes:
        fixed: Bytes that the worker holds during its whole lifetime, by part, such as "weights".
        working: Bytes that it holds only while its phase runs, by part, such as "activations".
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
        budget_bytes: Bytes that the worker may use; 0 if unknown, in which case chunks are as large as the scenario allows.
    """
    all_roles = run.get_roles(stage)
    # The name of the role that keeps each kind of content ("training", "weights", "rows") on the device.
    keepers = {all_roles[name].find_kind(name).keeps: name for name in roles if name in all_roles}
    fixed: dict[str, float] = {}
    working: dict[str, float] = {}
    if "training" in keepers:
        fixed, working = _estimate_training(run, stage, all_roles[keepers["training"]], workers)
    elif "weights" in keepers:
        fixed = _estimate_read_bytes(all_roles, keepers["weights"], workers, run.size)
    if "rows" in keepers and (hot_row_bytes := count_hot_row_bytes(run.scenario)):
        fixed["hot rows"] = float(hot_row_bytes)
    room_bytes = max(1.0, budget_bytes - sum(fixed.values()) - sum(working.values())) if budget_bytes else 0.0
    trainer = all_roles[keepers["training"]] if "training" in keepers else None
    chunks, chunk_bytes = _choose_chunks(run, stage, trainer, "rollout" in roles, workers, room_bytes)
    return WorkerMemory(fixed, working | chunk_bytes, chunks)


def _estimate_training(
    run: ResolvedRun, stage: str, role: Role, workers: int
) -> tuple[dict[str, float], dict[str, float]]:
    """Estimate the bytes of a trainer besides its chunks: those of its whole lifetime, and those of a step, by part."""
    scenario, size = run.scenario, run.size
    options, kind = scenario.stages[stage], run.kinds[stage]
    copies = {
        "reference": int(kind.needs_reference(options)),
        "old versions": kind.count_old_versions(options),
    }
    part = _divide_matrices(size, role)
    fixed = _estimate_trained_bytes(role, copies, workers, part, options.optimizer.use)
    if old_row_bytes := _estimate_stored_row_bytes(run, stage):
        fixed["rows before they changed"] = old_row_bytes
    working = _estimate_step_bytes(role, workers, part)
    if _has_divided_weights(role, workers):
        # The optimizer steps when no weights are gathered; AdamW then has a temporary copy of its part.
        temporaries = _count_moment_bytes(part, options.optimizer.use) - part.learned * 4.0
        # Engines that divide the blocks alone step a few weights at a time, in the buffer.
        working["gathered weights"] = (
            max(0.0, _estimate_gathered_bytes(part, keeps_around=True) - working.get("buffer", 0.0))
            if _has_whole_around(role)
            else max(_estimate_gathered_bytes(part), temporaries / _count_shards(role, workers))
        )
    return fixed, working


def _choose_chunks(
    run: ResolvedRun, stage: str, trainer: Role | None, is_rollout: bool, workers: int, room_bytes: float
) -> tuple[dict[str, int], dict[str, float]]:
    """Choose the largest chunks that fit.

    Args:
        run: The scenario with everything that follows from it.
        stage: The name of the stage.
        trainer: The role of a worker that trains, else None.
        is_rollout: Whether the worker generates rollouts.
        workers: The number of workers in its group.
        room_bytes: Bytes that chunks may use; 0 if unknown.

    Returns:
        The chunk of each role, and the bytes of activations and beams.
    """
    scenario, size = run.scenario, run.size
    options, kind = scenario.stages[stage], run.kinds[stage]
    recompute = (
        trainer is not None
        and trainer.engine is not None
        and bool(trainer.engine.get_options().get("recompute"))
    )
    chunks: dict[str, int] = {}
    working: dict[str, float] = {}
    # A supervised chunk must have room for the longest history.
    largest, smallest = compute_largest_chunk(scenario, options, size), scenario.data.history + 2
    shares = workers // scenario.tensor_ranks if trainer is not None else workers
    prompts = kind.count_units(options, shares)
    if prompts is not None:
        largest, smallest = min(largest, prompts), 1
    if trainer is not None and (prompts is not None or scenario.model.spec.cuts_steps):
        unit_tokens = kind.count_unit_tokens(scenario, options, size)
        chunks["trainer"] = _halve_until_fits(
            largest,
            lambda units: _estimate_activation_bytes(run, recompute, units * unit_tokens),
            smallest,
            room_bytes,
        )
        working["activations"] = _estimate_activation_bytes(run, recompute, chunks["trainer"] * unit_tokens)
    elif trainer is not None:
        working["activations"] = _estimate_activation_bytes(
            run, recompute, kind.count_step_tokens(scenario, options, size) / shares
        )
    if is_rollout and kind.rolls_out:
        width = kind.get_width(options)
        chunks["rollout"] = _halve_until_fits(
            largest, lambda count: _estimate_beam_bytes(run, width, count), smallest=1, room_bytes=room_bytes
        )
        working["beams"] = _estimate_beam_bytes(run, width, chunks["rollout"])
    return chunks, working


def estimate_usual_share(run: ResolvedRun, stage: str, workers: int) -> float:
    """Return one worker's share of a step in which every user has one full history, or the largest chunk if that is smaller.

    Args:
        run: The scenario with everything that follows from it.
        stage: The name of the stage.
        workers: The number of trainers.

    Returns:
        Positions of a supervised step, or prompts of an RL step.
    """
    options, kind = run.scenario.stages[stage], run.kinds[stage]
    shares = workers // run.scenario.tensor_ranks
    prompts = kind.count_units(options, 1)
    if prompts is not None:
        return prompts / shares
    step_tokens = kind.count_step_tokens(run.scenario, options, run.size)
    return min(step_tokens / shares, options.chunk.tokens)


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
    role: Role, model_copies: Mapping[str, int], workers: int, size: ModelSize, optimizer: str
) -> dict[str, float]:
    """Estimate the bytes of a model that is being trained.

    Args:
        role: The trainers' role, with its engine.
        model_copies: The number of whole copies of the model, by purpose.
        workers: The number of trainers.
        size: The shape of the model.
        optimizer: The name of the dense optimizer.
    """
    zero_stage, is_divided = _get_zero_stage(role), _has_divided_weights(role, workers)
    shards = _count_shards(role, workers)
    part = size.learned * 4.0 / shards  # In fp32.
    weights = copied = size.parameters * size.weight_bytes
    if is_divided:  # Copies are parts in fp32 and share frozen weights.
        copied = part
        weights = part + size.frozen * size.weight_bytes / shards
    if is_divided and _has_whole_around(role):
        _, around = _find_unit_sizes(size)
        weights = ((size.learned - around) / shards + around + size.frozen) * size.weight_bytes
    parts = {"weights": weights}
    copy_count = _count_copies(role, workers)[0]
    if not _has_host_optimizer(role):
        optimizer_used = (
            optimizer if role.engine is None or optimizer in role.engine.spec.optimizers else "adamw"
        )
        parts["optimizer"] = _count_moment_bytes(size, optimizer_used) / (shards if zero_stage else 1)
        if not (is_divided or copy_count) and (master_bytes := _count_master_bytes(role, workers, size)):
            parts["optimizer"] += master_bytes
    parts |= {name: float(copied * count) for name, count in model_copies.items() if count}
    if copy_count:
        parts["copy"] = part * copy_count
    return parts | {
        "gradients": _count_gradient_bytes(role, workers, size)
    }  # they stay allocated between steps, as zeros


def _estimate_stored_row_bytes(run: ResolvedRun, stage: str) -> float:
    """Estimate an upper bound of the bytes of sparse rows that a trainer stores before they change.

    A table with a budget counts at most its budget; a table without one counts a row and a key for every event of the
    histories.
    """
    scenario, kind, dims = run.scenario, run.kinds[stage], run.feature_dims
    stage_options = scenario.stages[stage]
    steps, users = kind.count_stored_row_steps(stage_options), kind.find_least_users(stage_options)[0] or 0
    events, total_bytes = steps * users * scenario.data.history, 0.0
    for name, budget in run.table_budgets.items():
        row_bytes = sum(
            events * (dims[feature] * 4 + 8) for feature in scenario.sparse.tables[name].features or [name]
        )
        total_bytes += min(row_bytes, budget) if budget else row_bytes
    return total_bytes


def _count_master_bytes(role: Role, workers: int, size: ModelSize) -> float:
    """Return the bytes of the fp32 master copies of weights of reduced precision."""
    shards = _count_shards(role, workers) if _get_zero_stage(role) else 1
    return size.learned * 4 / shards if size.weight_bytes < 4 else 0.0


def _count_moment_bytes(size: ModelSize, optimizer: str) -> float:
    """Return the bytes of the optimizer's fp32 moments: two per weight, and one per weight that Muon updates."""
    muon_weights = size.matrices if optimizer == "muon" else 0
    return size.learned * 8.0 - min(muon_weights, size.learned) * 4.0


def _estimate_step_bytes(role: Role, workers: int, size: ModelSize) -> dict[str, float]:
    """Estimate the bytes of temporary copies, and of fp32 copies of gradients of reduced precision, during a step."""
    parts = {}
    if copy_count := _count_copies(role, workers)[1]:
        step_bytes = copy_count * size.learned * 4.0 / _count_shards(role, workers)
        parts["copies"] = max(0.0, step_bytes - _count_gradient_bytes(role, workers, size))
    spec, options = (role.engine.spec, role.engine.get_options()) if role.engine else (ENGINES.get("ddp"), {})
    copied_bytes = 4.0 * size.learned if size.weight_bytes < 4 else 0.0
    buffer_bytes = min(spec.bucket_bytes(options, workers), copied_bytes)
    # A rank has copies when the gradients have been summed, and so never together with buffers.
    step_bytes = min(spec.step_bytes(options, workers), 4.0 * size.learned) - parts.get("copies", 0.0)
    buffer_bytes = max(buffer_bytes, step_bytes)
    return parts | ({"buffer": buffer_bytes} if buffer_bytes else {})


def _count_gradient_bytes(role: Role, workers: int, size: ModelSize) -> float:
    """Return the bytes of gradients on each rank, which ZeRO divides from stage 2 on; in fp32 if weights are divided."""
    gradient_bytes = 4 if _has_divided_weights(role, workers) else size.weight_bytes
    shards = _count_shards(role, workers) if _get_zero_stage(role) >= 2 else 1
    return size.learned * gradient_bytes / shards


def _estimate_gathered_bytes(size: ModelSize, keeps_around: bool = False) -> float:
    """Estimate the bytes of weights and gradients that a step of an engine that divides them gathers at once.

    Passes without gradients, such as those of rollouts, gather less. With `keeps_around`, the weights around the blocks are whole
    at all times, so only their gradients count.
    """
    block, around = _find_unit_sizes(size)
    return size.weight_bytes * (block * _GATHERED_BLOCKS + around * (1 if keeps_around else _GATHERED_AROUND))


def _estimate_read_bytes(
    roles: Mapping[str, Role], name: str, workers: int, size: ModelSize
) -> dict[str, float]:
    """Estimate the bytes of a model that a role reads and does not train.

    Args:
        roles: All roles, by name.
        name: The role.
        workers: The number of workers in its group.
        size: The shape of the model.
    """
    role = roles[name]
    if not _has_divided_weights(roles["trainer"], workers) or not (role.find_kind(name).divides or role.fuse):
        return {"weights": float(size.parameters * size.weight_bytes)}
    block, around = _find_unit_sizes(size)
    shards = _count_shards(roles["trainer"], workers) if role.fuse else workers
    return {
        "weights": (size.learned * 4.0 + size.frozen * size.weight_bytes) / shards,
        "gathered weights": size.weight_bytes
        * (block * _READ_BLOCKS + around * _READ_AROUND + _count_frozen_around(size)),
    }


def _find_unit_sizes(size: ModelSize) -> tuple[float, float]:
    """Return the number of weights of one block, and of trained ones around the blocks."""
    in_blocks = size.learned + size.frozen - _count_frozen_around(size)
    block = (size.matrices or in_blocks) / max(1, size.layers)
    return block, max(0.0, size.learned - block * size.layers)


def _count_frozen_around(size: ModelSize) -> int:
    """Return the number of frozen weights around the blocks: word embeddings, or none if LoRA freezes the blocks too."""
    return size.frozen if size.matrices else 0


def _get_zero_stage(role: Role) -> int:
    """Return the ZeRO stage of the role's engine; 0 if it has no engine."""
    return role.engine.spec.divides(role.engine.get_options()) if role.engine else 0


def _count_shards(role: Role, workers: int) -> int:
    """Return the number of workers among which the role's engine divides what it divides."""
    return workers // math.prod(role.engine.get_axes().values()) if role.engine else workers


def _divide_matrices(size: ModelSize, role: Role) -> ModelSize:
    """Return the size of what a tensor rank of the role's engine has: a part of the blocks' matrices, and all other weights."""
    ranks = role.engine.get_axes().get("tensor", 1) if role.engine else 1
    if ranks == 1:
        return size
    matrices = size.matrices // ranks
    return replace(size, parameters=size.parameters - size.matrices + matrices, matrices=matrices)


def _has_divided_weights(role: Role, workers: int) -> bool:
    """Return whether each of several ranks keeps a part of the weights, in fp32."""
    return workers > 1 and _get_zero_stage(role) == 3


def _has_whole_around(role: Role) -> bool:
    """Return whether the role's engine divides the blocks alone."""
    return role.engine is not None and role.engine.spec.keeps_around(role.engine.get_options())


def _count_copies(role: Role, workers: int) -> tuple[float, float]:
    """Return how many fp32 copies of its part of the weights a rank of the engine has: (permanently, during a step)."""
    return role.engine.spec.copies(role.engine.get_options(), workers) if role.engine else (0.0, 0.0)


def _has_host_optimizer(role: Role) -> bool:
    """Return whether the role's engine keeps the optimizer in host memory."""
    return role.engine is not None and role.engine.spec.aside(role.engine.get_options())


def estimate_host_optimizer_bytes(
    run: ResolvedRun, stage: str, roles: tuple[str, ...], workers: int
) -> float:
    """Return the bytes of a worker's share of an optimizer in host memory: two moments, weights and gradients, all fp32.

    Args:
        run: The scenario with everything that follows from it.
        stage: The name of the stage.
        roles: The roles that the worker holds.
        workers: The number of workers in its group.

    Returns:
        Bytes; 0 if no role of the worker steps on the host.
    """
    roles_by_name = run.get_roles(stage)
    if not any(role in roles_by_name and _has_host_optimizer(roles_by_name[role]) for role in roles):
        return 0.0
    return run.size.parameters * 16 / workers


def _estimate_activation_bytes(run: ResolvedRun, recompute: bool, tokens: float) -> float:
    """Estimate the bytes of a chunk's activations, and of its sparse rows with their gradients."""
    events = tokens / run.size.positions_an_event
    return (
        run.size.estimate_activation_bytes(tokens, recompute=recompute)
        + events * sum(run.feature_dims.values()) * 8
    )


def _estimate_beam_bytes(run: ResolvedRun, width: int, prompts: float) -> float:
    """Estimate the bytes of a chunk of prompts: keys and values of each history and its beams, and one level's logits."""
    size = run.size
    cached_positions = size.count_history_positions(run.scenario.data.history) + width * size.levels
    logits_per_beam = (
        size.vocabulary / max(1, size.levels) if size.positions_an_event == 1 else size.vocabulary
    )
    return prompts * (size.estimate_kv_bytes(cached_positions) + width * logits_per_beam * 8)


def _halve_until_fits(
    largest: int, estimate_bytes: Callable[[float], float], smallest: int, room_bytes: float
) -> int:
    """Return the largest chunk, halved until its estimated bytes fit or it would become smaller than the smallest one.

    Args:
        largest: The largest chunk.
        estimate_bytes: Estimates the bytes of a chunk.
        smallest: The smallest chunk that may be returned.
        room_bytes: Bytes that are available; 0 if unknown, in which case `whole` is returned.
    """
    while room_bytes and estimate_bytes(largest) > _FILLED_SHARE * room_bytes and largest // 2 >= smallest:
        largest //= 2
    return largest
