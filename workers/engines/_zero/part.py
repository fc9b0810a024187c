"""ZeroPart: parameters of a model that one DeepSpeed engine divides among the trainers and updates.

Under ZeRO 1 and 2 a rank adds up the gradients of its passes, and DeepSpeed sums them over the ranks once for each step, in
the order of the parameters (`coalesce_grad_reduction`): ranks may take different numbers of passes and use different parameters.
Under ZeRO 3 each block is one of DeepSpeed's leaf modules: it is gathered when it runs, and its gradients are divided when its
backward pass ends. So all ranks must take the same passes.
"""

from __future__ import annotations

import math
import os
import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from nonet.errors import ConfigError
from nonet.workers.engines import ZERO_BUCKET_ELEMENTS, ZERO_GROUP_ELEMENTS, OptimizerOptions
from nonet.workers.engines._zero.pieces import RankPieces
from nonet.workers.runtime import Membership

_SUPPORTED = (
    (0, 19),
    (0, 20),
)  # The oldest supported version and the first unsupported one, as in pyproject.toml.


class ZeroPart:
    """Some parameters of a model, with the DeepSpeed engine that updates them.

    Args:
        module: The module that has these parameters and no others; under ZeRO 3 a list of blocks.
        parameters: The parameters by their names in the model.
        zero: The stage of ZeRO.
        options: Options of the train engine.
        learning: The optimizer settings.
        member: The process group.
        device: The device of the weights.

    Attributes:
        parameters: The parameters by name.
        pieces: The pieces of their fp32 weights and moments.
    """

    def __init__(
        self,
        module: Any,
        parameters: Mapping[str, Any],
        zero: int,
        options: Mapping[str, Any],
        learning: OptimizerOptions,
        member: Membership,
        device: torch.device,
    ):
        self.parameters, self._stage, self._options, self._member = parameters, zero, options, member
        self._is_offloaded = options.get("offload", "none") == "optimizer"
        shapes = {name: parameter.shape for name, parameter in parameters.items()}
        optimizer = torch.optim.AdamW(self._group_parameters(), lr=0.0, betas=(0.9, 0.98))
        topology, deepspeed = _TrainerTopology(member), _import_deepspeed(device.type)
        for block in module if zero == 3 else ():
            deepspeed.utils.set_z3_leaf_module(block, True)
        scalars = [parameter for parameter in parameters.values() if not parameter.ndim]
        for scalar in scalars:
            scalar.ds_optim_param = (
                True  # DeepSpeed cannot broadcast it, and all ranks have the same first weights.
            )
        with _restrict_barriers(deepspeed, member):
            self._engine: Any = deepspeed.initialize(
                model=module,
                optimizer=optimizer,
                config=self._build_config(shapes.values()),
                mpu=topology,
                dist_init_required=False,
            )[0]
        for scalar in scalars:
            del scalar.ds_optim_param
        self._zero: Any = self._engine.optimizer
        self.pieces = RankPieces(self._zero, parameters, shapes, member, device)
        if zero < 3:
            for hook in self._zero._grad_acc_hooks:
                hook.remove()  # Gradients are summed after the last pass of a step, and not in each.
        for block in module if zero == 3 else ():  # A graph may contain several passes of a block.
            block.register_full_backward_hook(self._divide_gradients)
        self.restart(learning)

    def _group_parameters(self) -> list[dict[str, Any]]:
        """Return the optimizer's groups: parameters of one dtype, fp32 first, and matrices apart from vectors."""
        groups: dict[tuple[bool, bool], list[Any]] = {}
        for parameter in self.parameters.values():
            key = parameter.dtype.itemsize < 4, parameter.ndim <= 1
            groups.setdefault(key, []).append(parameter)
        return [{"params": groups[key], "decays": not key[1]} for key in sorted(groups)]

    def _build_config(self, shapes: Iterable[torch.Size]) -> dict[str, Any]:
        """Return DeepSpeed's configuration: the defaults of this engine, overridden by the option `deepspeed`."""
        sizes = [shape.numel() for shape in shapes]
        # DeepSpeed needs an even number of elements that holds the largest parameter: round up to a multiple of 64.
        bucket = math.ceil(max(*sizes, min(sum(sizes), ZERO_BUCKET_ELEMENTS)) / 64) * 64
        zero: dict[str, Any] = {"stage": self._stage, "overlap_comm": False, "contiguous_gradients": False}
        zero |= {"reduce_bucket_size": bucket, "allgather_bucket_size": bucket}
        if self._stage == 3:  # No parameter stays whole, and none is gathered before it is used.
            zero |= {"stage3_param_persistence_threshold": 0, "stage3_prefetch_bucket_size": 0}
            zero |= {"stage3_max_reuse_distance": 0, "sub_group_size": ZERO_GROUP_ELEMENTS}
            zero["memory_efficient_linear"] = (
                False  # It replaces torch's function, and rounds otherwise under autocast.
            )
        if self._is_offloaded:
            zero["offload_optimizer"] = {"device": "cpu"}
        overrides = dict(self._options.get("deepspeed") or {})
        zero |= overrides.pop("zero_optimization", {})
        return {
            "train_micro_batch_size_per_gpu": 1,
            "gradient_accumulation_steps": 1,
            "gradient_allreduce_op": "mean" if self._stage == 3 else "sum",
            "gradient_clipping": 0.0,  # The engine clips.
            "fp16": {"loss_scale": 1.0},  # The loss is scaled already.
            "zero_allow_untested_optimizer": True,
            "zero_force_ds_cpu_optimizer": False,
            **overrides,
            "zero_optimization": zero,
        }

    def restart(self, learning: OptimizerOptions) -> None:
        """Forget the moments and the gradients, and set the weight decay."""
        self._zero.optimizer.state.clear()
        self._zero._hp_optimizer_states_linked = False  # DeepSpeed's views of the moments are made again.
        for group in self._zero.param_groups:
            group["weight_decay"] = learning.weight_decay if group["decays"] else 0.0
        self.drop_gradients()

    def _divide_gradients(self, *_: Any) -> None:
        """Divide the gradients of a block of ZeRO 3, whose backward pass has ended."""
        self._zero.independent_gradient_partition_epilogue()

    def finish_pass(self) -> None:
        """Release the blocks of ZeRO 3 whose backward passes have ended unnoticed, because their inputs have no gradients."""
        if self._stage == 3:
            self._zero.parameter_offload.release_backward_leftovers()

    def gather_and_release(self, block: Any) -> None:
        """Take part in gathering the weights of a block under ZeRO 3."""
        coordinator = self._zero.parameter_offload.get_param_coordinator()
        coordinator.fetch_sub_module(block, forward=True)
        coordinator.release_sub_module(block, forward=True)

    def collect_gradients(self) -> list[Tensor]:
        """Return this rank's gradients: under ZeRO 3 those of its pieces, else those of its passes until they are summed."""
        if self._stage == 3 or self._is_summed:
            return self._list_piece_gradients()
        for parameter in self.parameters.values():
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        return [parameter.grad for parameter in self.parameters.values()]

    def sum_gradients(self) -> list[Tensor]:
        """Sum the gradients of all ranks, and return those of this rank's pieces. All ranks must call it."""
        if self._stage == 3:  # They are averaged already; here DeepSpeed cannot sum.
            torch._foreach_mul_(self._list_piece_gradients(), float(self._member.n_trainers))
        else:
            self.collect_gradients()
            with self._engine.coalesce_grad_reduction():
                pass  # At its end, DeepSpeed sums what the passes have added up.
        self._is_summed = True
        return self._list_piece_gradients()

    def _list_piece_gradients(self) -> list[Tensor]:
        """Return the gradients of this rank's pieces, which are summed or averaged."""
        if self._is_offloaded:
            return [flat.grad for flat in self.pieces.flat_weights if flat.grad is not None]
        if self._stage == 3:
            return [self._zero.grad_partitions_flat_buffer]
        return [gradient for group in self._zero.averaged_gradients.values() for gradient in group or ()]

    def step(self, lr: float) -> None:
        """Update the weights with a learning rate, and forget the gradients. All ranks must call it."""
        for group in self._zero.param_groups:
            group["lr"] = lr
        self._engine.step()
        self.drop_gradients()

    def drop_gradients(self) -> None:
        """Forget the gradients since the last step."""
        self._is_summed = False
        self._zero.zero_grad()
        # Under ZeRO 3, gradients are added to those of earlier passes, which are zeros at first; else a step has one sum.
        self._zero.micro_step_id = 1 if self._stage == 3 else -1
        if self._stage == 3:
            self._zero.grad_partitions_flat_buffer.zero_()
        if self._is_offloaded:
            self._zero.reset_cpu_buffers()
            torch._foreach_zero_(self._list_piece_gradients())
        elif self._stage < 3:
            self._zero.averaged_gradients.clear()
            self._zero.all_grad_tensors.clear()

    def copy_weights_to_masters(self) -> None:
        """Set the fp32 weights of this rank's pieces to the model's weights."""
        self._zero.refresh_fp32_params()

    @torch.no_grad()
    def copy_weights_from(self, other: ZeroPart, keeps_part: bool) -> None:
        """Copy the weights of the same part in another process group; pieces only if this rank keeps its pieces."""
        for name, parameter in self.parameters.items():
            old = other.parameters[name]
            if self._stage < 3:
                parameter.copy_(old)
            elif keeps_part:
                parameter.ds_tensor.copy_(old.ds_tensor)
        self.copy_weights_to_masters()

    def list_tensors(self) -> Iterator[Tensor]:
        """Yield what this rank keeps on its device: weights, whole or in pieces, their fp32 copies, moments and gradients."""
        for parameter in self.parameters.values():
            yield getattr(parameter, "ds_tensor", parameter)
            if parameter.grad is not None:
                yield parameter.grad
        yield from self.pieces.iterate_tensors()
        yield from (g for g in self._list_piece_gradients() if not self._is_offloaded)

    def destroy(self) -> None:
        """Remove DeepSpeed's hooks from the model."""
        self._engine.destroy()


def _import_deepspeed(device: str) -> Any:
    """Import DeepSpeed for a device.

    Raises:
        ConfigError: It is not installed, or in a version that was not tested.
    """
    if device == "cpu":
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    os.environ.setdefault("LOCAL_RANK", "0")  # A worker sees only its own device.
    try:
        import deepspeed  # pyright: ignore[reportMissingImports]
    except ImportError:
        raise ConfigError("engine deepspeed needs DeepSpeed: pip install 'nonet[deepspeed]'") from None
    version = tuple(int(part) for part in deepspeed.__version__.split("+")[0].split(".")[:2])
    if not _SUPPORTED[0] <= version < _SUPPORTED[1]:
        oldest, untested = (".".join(map(str, bound)) for bound in _SUPPORTED)
        raise ConfigError(
            f"engine deepspeed reads DeepSpeed's own attributes and was tested with {oldest} up to, but not with, {untested}; "
            f"{deepspeed.__version__} is installed: pip install 'nonet[deepspeed]'"
        )
    # It calls collectives by the names that they had before torch 2.13.
    warnings.filterwarnings("ignore", "`torch.distributed", FutureWarning)
    # Its collective in shared memory serves inference only. On a CPU DeepSpeed would compile it first, for a minute.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    return deepspeed


@contextmanager
def _restrict_barriers(deepspeed: Any, member: Membership) -> Iterator[None]:
    """Restrict the barriers in the constructor of ZeRO 3 to the trainers, since shards in separate processes do not take part."""
    comm = deepspeed.comm
    barrier = comm.barrier
    if member.world > member.n_trainers:
        comm.barrier = lambda group=None, **more: barrier(member.trainers if group is None else group, **more)
    try:
        yield
    finally:
        comm.barrier = barrier


class _TrainerTopology:
    """The trainers' group in the form that DeepSpeed expects (`mpu`)."""

    def __init__(self, member: Membership):
        self._member = member

    def get_data_parallel_group(self) -> Any:
        """Return the group of all trainers."""
        return self._member.trainers

    def get_data_parallel_world_size(self) -> int:
        """Return the number of trainers."""
        return self._member.n_trainers

    def get_data_parallel_rank(self) -> int:
        """Return the rank among the trainers."""
        return torch.distributed.get_rank(self._member.trainers)

    def get_model_parallel_group(self) -> Any:
        """Return None, since the model is not split."""
        return None

    def get_model_parallel_world_size(self) -> int:
        """Return 1, since the model is not split."""
        return 1

    def get_model_parallel_rank(self) -> int:
        """Return 0, since the model is not split."""
        return 0
