"""Building a model on the meta device, and computing its first weights one at a time with the bits of a whole build.

`record_build` runs the build on the meta device, where tensors have no memory, and records every operation. `replay` repeats
the operations in memory in the same order, with the same states of the random generator. A tensor is released as soon as no
operation needs its value, so that never more than a few weights exist at once.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map

_OVERWRITES = {
    *("normal_", "uniform_", "zero_", "fill_", "copy_", "random_", "bernoulli_", "log_normal_"),
    "read_stored",  # `models/hf/language_model.py`
}
"""Names of operations whose result does not depend on the earlier value of the tensor that they change."""


_FACTORIES = {
    *(torch.empty, torch.zeros, torch.ones, torch.full, torch.eye, torch.arange, torch.linspace),
    *(torch.rand, torch.randn, torch.randint, torch.randperm),
}
"""Functions that are called on the meta device; tensors of given values are made on the CPU."""


_IS_META = torch.Tensor.is_meta.__get__  # type: ignore[attr-defined]
_FIRST_MARK = 0x6E6F6E65 << 24
"""The first seed of the states by which the recorder recognises that nothing has seeded the generator."""


class _OnMeta(TorchFunctionMode):
    """Makes new tensors on the meta device, and hides it from functions of torch.nn.init that do nothing for a meta tensor."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func == _IS_META:
            return False
        device = {"device": "meta"} if func in _FACTORIES else {}
        return func(
            *args, **device, **{k: v for k, v in (kwargs or {}).items() if not (device and k == "device")}
        )


@dataclass(frozen=True)
class _Operation:
    """A recorded operation.

    Attributes:
        function: The operator.
        args: Its arguments, with meta tensors.
        named: Its named arguments.
        result: What it returned on the meta device.
        rng_state: State of the random generator before it; None if it draws nothing, or goes on after the one before.
    """

    function: Any
    args: Any
    named: Any
    result: Any
    rng_state: Tensor | None

    def list_storages(self) -> list[int]:
        """Return the identities of the storages of its meta tensors."""
        leaves, _ = tree_flatten((self.args, self.named, self.result))
        return [_get_storage_id(leaf) for leaf in leaves if isinstance(leaf, Tensor) and leaf.is_meta]

    def find_overwritten_storage(self) -> int | None:
        """Return the identity of the storage whose values it replaces as a whole, without reading them."""
        name, target = self.function.overloadpacket.__name__, self.args[0] if self.args else None
        if name not in _OVERWRITES or not isinstance(target, Tensor):
            return None
        is_whole = target.numel() * target.element_size() == target.untyped_storage().nbytes()
        return _get_storage_id(target) if is_whole and target.is_contiguous() else None


class _Recorder(TorchDispatchMode):
    """Records all operations of a build."""

    def __init__(self) -> None:
        super().__init__()
        self.operations: list[_Operation] = []
        self._rng_state = torch.empty(0)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if torch.Tag.inplace_view in func.tags:
            raise NotImplementedError(
                f"{func} changes the shape of a tensor that earlier operations refer to"
            )
        result, state = func(*args, **(kwargs or {})), None
        if torch.Tag.nondeterministic_seeded in func.tags:
            now = torch.get_rng_state()
            if not torch.equal(now, self._rng_state):
                state = now
            # Meta tensors draw nothing, so the generator gets a state that only an operation which draws next can find.
            torch.default_generator.manual_seed(_FIRST_MARK + len(self.operations))
            self._rng_state = torch.get_rng_state()
        self.operations.append(_Operation(func, args, kwargs or {}, result, state))
        return result


@dataclass(frozen=True)
class RecordedBuild:
    """A model on the meta device, and the operations that compute its first weights.

    Attributes:
        model: The model.
    """

    model: nn.Module
    _operations: list[_Operation]
    _meta_tensors: dict[str, Tensor]  # Parameters and buffers by path, before they are replaced in the model.

    def replay(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the first values of the parameters and buffers that are on the meta device, one at a time, on the CPU."""
        names_by_storage: dict[int, list[str]] = {}
        for name, tensor in self._meta_tensors.items():
            names_by_storage.setdefault(_get_storage_id(tensor), []).append(name)
        ends, dead = _find_ends(self._operations)
        storages: dict[int, Tensor] = {}

        def realise(leaf: Any) -> Any:
            if isinstance(leaf, Tensor):
                return _view_as(leaf, storages) if leaf.is_meta else leaf
            return torch.device("cpu") if isinstance(leaf, torch.device) and leaf.type == "meta" else leaf

        with torch.random.fork_rng(devices=[]), torch.no_grad():
            for index, operation in enumerate(self._operations):
                if operation.rng_state is not None:
                    torch.set_rng_state(operation.rng_state)
                made = operation.function(
                    *tree_map(realise, operation.args), **tree_map(realise, operation.named)
                )
                for leaf, value in zip(tree_flatten(operation.result)[0], tree_flatten(made)[0], strict=True):
                    if isinstance(leaf, Tensor) and leaf.is_meta:
                        storages.setdefault(_get_storage_id(leaf), value)
                for storage in ends.get(index, ()):
                    for name in names_by_storage.get(storage, ()):
                        yield name, _view_as(self._meta_tensors[name], storages)
                for storage in (*ends.get(index, ()), *dead.get(index, ())):
                    storages.pop(storage, None)


def record_build(build: Callable[[], nn.Module]) -> RecordedBuild | None:
    """Build a model on the meta device.

    Returns:
        The build; None if the model reads values of its weights while it is built, or keeps tensors that are neither
        parameters nor buffers, so that it must be built whole.
    """
    recorder = _Recorder()
    try:
        with torch.random.fork_rng(devices=[]), warnings.catch_warnings(), _OnMeta(), recorder:
            warnings.simplefilter("ignore")
            model = build()
    except (
        Exception
    ):  # A model reads values in many ways; an error of the model itself comes again when it is built whole.
        return None
    tensors = dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers())
    plain = [
        value for module in model.modules() for value in vars(module).values() if isinstance(value, Tensor)
    ]
    if plain or not all(parameter.is_meta for parameter in model.parameters()):
        return None
    meta_tensors = {name: tensor for name, tensor in tensors.items() if tensor.is_meta}
    return RecordedBuild(model, recorder.operations, meta_tensors)


def _find_ends(operations: list[_Operation]) -> tuple[dict[int, list[int]], dict[int, list[int]]]:
    """Return, by operation, the storages whose last value it leaves, and those whose value the next operation replaces."""
    ends: dict[int, list[int]] = {}
    dead: dict[int, list[int]] = {}
    next_use: dict[int, _Operation] = {}
    for index in range(len(operations) - 1, -1, -1):
        for storage in set(operations[index].list_storages()):
            following = next_use.get(storage)
            if following is None:
                ends.setdefault(index, []).append(storage)
            elif following.find_overwritten_storage() == storage:
                dead.setdefault(index, []).append(storage)
            next_use[storage] = operations[index]
    return ends, dead


def _get_storage_id(tensor: Tensor) -> int:
    """Return the identity of a tensor's storage, which is unique as long as the tensor exists."""
    return tensor.untyped_storage()._cdata


def _view_as(meta: Tensor, storages: dict[int, Tensor]) -> Tensor:
    """Return the tensor in memory that a meta tensor stands for; new memory if its values are replaced next."""
    storage = _get_storage_id(meta)
    if storage not in storages:
        elements = meta.untyped_storage().nbytes() // meta.element_size()
        storages[storage] = torch.empty(elements, dtype=meta.dtype)
    return storages[storage].as_strided(meta.size(), meta.stride(), meta.storage_offset())
