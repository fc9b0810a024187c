"""Deepspeed: DeepSpeed's ZeRO over a shadow of the parameters (`pip install 'nonet[deepspeed]'`).

ZeRO cuts the parameters into flat pieces, so Muon, which wants whole matrices, is refused. DeepSpeed averages over the ranks; the
gradients go in times their number, which makes it the sum. Source: Rajbhandari et al. 2020, arXiv 1910.02054.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nonet.errors import ConfigError
from nonet.workers import Saving
from nonet.workers.engines._ddp import BESIDE, Ddp
from nonet.workers.engines._shadow import Shadow
from nonet.workers.engines.base import Learning
from nonet.workers.runtime import Membership

_MOMENTS = {"first": "exp_avg", "second": "exp_avg_sq"}


class Deepspeed(Ddp):
    """options: `zero`, and `deepspeed`, keys of DeepSpeed's own configuration. Alone it is AdamW on one rank.

    A commit is that of `Ddp`: any engine and any number of ranks reads it. Raises ConfigError for an optimizer other than AdamW.
    """

    def __init__(
        self, options: Mapping[str, Any], model: torch.nn.Module, learning: Learning, member: Membership
    ):
        super().__init__(
            options, model, replace(learning, optimizer="adamw"), member
        )  # until a stage says its own

    def change_process_group(self, member: Membership) -> None:
        self.member = member
        self.restart()

    def restart(self) -> None:
        if self.learning.optimizer != "adamw":
            raise ConfigError(
                "engine deepspeed cuts parameters into flat pieces and muon wants whole matrices; say optimizer: {use: adamw} in "
                "every stage, or engine: {use: fsdp2}"
            )
        super().restart()
        if self.member.n_trainers > 1:
            self._divide()

    def _divide(self) -> None:
        """A new engine over the weights as they are."""
        if next(self.model.parameters()).device.type == "cpu":
            os.environ.setdefault("DS_ACCELERATOR", "cpu")
        os.environ.setdefault("LOCAL_RANK", "0")  # a worker sees the device that is its own
        try:
            import deepspeed  # pyright: ignore[reportMissingImports]
        except ImportError:
            raise ConfigError("engine deepspeed wants DeepSpeed: pip install 'nonet[deepspeed]'") from None
        shadow = Shadow(list(self.model.parameters()))
        self._shadows: list[Any] = list(shadow.parameters())
        # in the order of `Ddp`'s optimizer, whose files a commit holds
        groups = [
            {"params": [p for p in self._shadows if p.ndim > 1], "weight_decay": self.learning.weight_decay},
            {"params": [p for p in self._shadows if p.ndim <= 1], "weight_decay": 0.0},
        ]
        optimizer = torch.optim.AdamW(
            [group for group in groups if group["params"]], lr=0.0, betas=(0.9, 0.98)
        )
        self._engine: Any = deepspeed.initialize(
            model=shadow,
            optimizer=optimizer,
            config=self._config(),
            mpu=_Group(self.member),
            dist_init_required=False,
        )[0]
        self._steps = 0

    def _config(self) -> dict[str, Any]:
        zero = {"stage": self.options.get("zero", 1)}
        own = dict(self.options.get("deepspeed") or {})
        zero |= own.pop("zero_optimization", {})
        return {
            "train_micro_batch_size_per_gpu": 1,
            "gradient_accumulation_steps": 1,
            "gradient_clipping": self.learning.clip_norm,
            "zero_allow_untested_optimizer": True,
            "zero_force_ds_cpu_optimizer": False,
            **own,
            "zero_optimization": zero,
        }

    def clip(self, rows: float = 0.0) -> float:
        """The norm; the cut is made by DeepSpeed as it steps, by the dense norm and what is allowed of it."""
        if self.member.n_trainers == 1:
            return super().clip(rows)
        count = self.member.n_trainers
        gradients = [
            torch.zeros_like(p) if p.grad is None else p.grad * count for p in self.model.parameters()
        ]
        self._engine.backward(self._engine(gradients))
        dense = float(self._engine.optimizer.scaled_global_norm())
        norm, most = math.hypot(dense, rows), self.learning.clip_norm
        self._engine.optimizer.clip_grad = most * (dense + 1e-6) / (norm + 1e-6) if rows else most
        return norm

    @torch.no_grad()
    def step(self, lr: float) -> None:
        if self.member.n_trainers == 1:
            super().step(lr)
            return
        for group in self._engine.optimizer.param_groups:
            group["lr"] = lr
        self._engine.step()
        self._steps += 1
        for p, shadow in zip(self.model.parameters(), self._shadows, strict=True):
            p.copy_(shadow)
            if p.grad is not None:
                p.grad.zero_()

    def snapshot(self, saving: Saving = BESIDE) -> Callable[[Path], list[Path]]:
        """Moments are gathered, one group after the other; a rank keeps those that it writes."""
        if self.member.n_trainers == 1:
            return super().snapshot(saving)
        place = {id(shadow): at for at, shadow in enumerate(self._ordered())}
        pieces = list(self._pieces()) if self._steps else []
        shape = {
            f"{place[id(shadow)]}.{slot}": torch.empty(
                () if slot == "step" else shadow.shape, dtype=flat.dtype, device="meta"
            )
            for flat, shadows in pieces
            for shadow in shadows
            for slot in (*_MOMENTS, "step")
        }
        own, moments = self.own_names("optimizer", shape, saving), {}
        for flat, shadows in pieces:
            sizes = [p.numel() for p in shadows]
            for slot, theirs in _MOMENTS.items():
                mine = self._engine.optimizer.optimizer.state[flat][theirs]
                parts = [torch.empty_like(mine) for _ in range(self.member.n_trainers)]
                torch.distributed.all_gather(parts, mine, group=self.member.trainers)
                whole = torch.cat(parts)[: sum(sizes)]
                for shadow, value in zip(shadows, whole.split(sizes), strict=True):
                    if (name := f"{place[id(shadow)]}.{slot}") in own:
                        moments[name] = value.view_as(shadow).clone()
            for shadow in shadows:
                moments[f"{place[id(shadow)]}.step"] = torch.tensor(float(self._steps))
        return self.written(shape, moments, self.optimizer.state_dict()["param_groups"], saving)

    def load(self, folder: Path, *, optimizer: bool) -> None:
        super().load(folder, optimizer=optimizer)
        if self.member.n_trainers == 1:
            return
        self._divide()  # of the weights that were read
        state = self.optimizer.state_dict()["state"]
        if not optimizer or not state:
            return
        self._steps = int(state[0]["step"])
        place = {id(shadow): at for at, shadow in enumerate(self._ordered())}
        for flat, shadows in self._pieces():
            theirs = {"step": torch.tensor(float(self._steps))}
            for slot, name in _MOMENTS.items():
                whole = torch.cat([state[place[id(shadow)]][slot].reshape(-1) for shadow in shadows])
                padded = torch.zeros(flat.numel() * self.member.n_trainers)
                padded[: len(whole)] = whole
                mine = torch.distributed.get_rank(self.member.trainers) * flat.numel()
                theirs[name] = padded[mine : mine + flat.numel()].clone().to(flat.device)
            self._engine.optimizer.optimizer.state[flat] = theirs

    def _pieces(self) -> Iterable[tuple[Tensor, list[Any]]]:
        """Of each of ZeRO's groups this rank's flat piece of the parameters, and the parameters that were laid end to end."""
        zero = self._engine.optimizer
        return zip(zero.single_partition_of_fp32_groups, zero.bit16_groups, strict=True)

    def _ordered(self) -> list[Any]:
        """Shadows in the order of the optimizer."""
        return [p for p in self._shadows if p.ndim > 1] + [p for p in self._shadows if p.ndim <= 1]


class _Group:
    """The trainers' group, as DeepSpeed asks for it (`mpu`)."""

    def __init__(self, member: Membership):
        self._member = member

    def get_data_parallel_group(self) -> Any:
        """All trainers."""
        return self._member.trainers

    def get_data_parallel_world_size(self) -> int:
        """How many they are."""
        return self._member.n_trainers

    def get_data_parallel_rank(self) -> int:
        """This one's place."""
        return torch.distributed.get_rank(self._member.trainers)

    def get_model_parallel_group(self) -> Any:
        """Nobody shares a part of the model."""
        return None

    def get_model_parallel_world_size(self) -> int:
        """Of that group."""
        return 1

    def get_model_parallel_rank(self) -> int:
        """In that group."""
        return 0
