"""Probe: the role that records what a model computes on its pool, module by module, so that two pools can be compared.

Results depend only on the checkpoint and the seeds: both sides use the same training windows and prompts, and no dropout.
Recorded outputs and gradients are NumPy float32 arrays with at most their first 65,536 numbers, which are all of them for small
models.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from nonet.embedding.reading import SparseReader
from nonet.models.generation import get_keys, move_batch
from nonet.models.sid_decoder import compute_sid_loss
from nonet.samples.batches import make_training_batch, select_step_rows
from nonet.workers.devices import claim, get_device
from nonet.workers.roles import RunSetup, StageSetup
from nonet.workers.roles.evaluation.model_of_commit import load_recommender
from nonet.workers.runtime import DistributeWorker, Replicate, method

# Shapes: P prompts, I items.

_MAX_NUMBERS = 1 << 16  # Of each recorded output or gradient.
_CHUNK_PROMPTS = 256  # Prompts per forward pass.


class Probe(DistributeWorker):
    """One side of a comparison: the model of a checkpoint on this worker's device, in one precision."""

    def __init__(self, run: RunSetup, precision: str = "fp32"):
        self.run, self._precision = run, precision

    @method(folders=Replicate)
    def open(self, folders: Mapping[str, str], commit: str) -> dict[str, str]:
        """Load the artifacts and the checkpoint.

        Returns:
            The "device", "precision", "torch" version and "python" executable of this side.
        """
        self.corpus = self.run.open_corpus(folders)
        self.recommender = load_recommender(self.run, self.corpus, Path(commit), claim(self.device))
        return {
            "device": self.device,
            "precision": self._precision,
            "torch": f"torch {torch.__version__}",
            "python": sys.executable,
        }

    @method(collect="first", stage=Replicate)
    def learn(self, stage: StageSetup, step: int) -> dict[str, Any]:
        """Run forward and backward passes on the windows of a training step, without dropout.

        Returns:
            "loss": nats per target; "modules": outputs by "module name#number of its call", in order of execution; "gradients":
            gradients by parameter and by sparse feature.
        """
        seq = self.corpus.seq
        epoch, rows = select_step_rows(len(seq), stage.users, self.run.seed, stage.name, step)
        batch = make_training_batch(
            seq,
            self.corpus.sids,
            rows,
            history=self.run.history,
            stage=stage.name,
            epoch=epoch,
            seed=self.run.seed,
            target=None,
        )
        model = self.recommender.model.eval()
        rows_by_feature = {
            feature: _read_rows(self.recommender.reader, table, get_keys(batch, feature), self.device)
            for feature, table in self.run.features.items()
        }
        model.zero_grad()
        with _OutputRecorder(model) as recorder, get_device(self.device).autocast(self._precision):
            loss, count = compute_sid_loss(
                model, move_batch(batch, self.device), rows_by_feature, self.corpus.trie, ahead=stage.ahead
            )
        (loss / max(1, count)).backward()
        tensors = dict(model.named_parameters())
        tensors |= {f"rows of {feature}": rows for feature, rows in rows_by_feature.items()}
        gradients = {name: _to_array(t.grad) for name, t in tensors.items() if t.grad is not None}
        return {
            "loss": float(loss.detach()) / max(1, count),
            "modules": recorder.outputs,
            "gradients": gradients,
        }

    @method(collect="first", users=Replicate, positions=Replicate)
    def score(self, users: np.ndarray, positions: np.ndarray) -> np.ndarray:
        """Return the log-probability of every catalogue item for each prompt, [P, I] float32, in nats."""
        scores = []
        with get_device(self.device).autocast(self._precision):
            for prompts in self.recommender.iterate_batches(users, positions, _CHUNK_PROMPTS):
                scores.append(self.recommender.score_catalogue(*prompts).float().numpy())
        return np.concatenate(scores)


class _OutputRecorder:
    """Records the outputs of all submodules in a context.

    Attributes:
        outputs: Outputs by "module name#number of its call", in order of execution.
    """

    def __init__(self, model: torch.nn.Module):
        self.outputs: dict[str, np.ndarray] = {}
        self._call_counts: Counter[str] = Counter()
        self._submodules = [(name, module) for name, module in model.named_modules() if name]

    def __enter__(self) -> _OutputRecorder:
        self._hooks = [
            module.register_forward_hook(lambda _, __, output, name=name: self._record_output(name, output))
            for name, module in self._submodules
        ]
        return self

    def __exit__(self, *_: object) -> None:
        for hook in self._hooks:
            hook.remove()

    def _record_output(self, name: str, output: Any) -> None:
        """Record an output of a module if it is a tensor."""
        if isinstance(output, Tensor):
            self.outputs[f"{name}#{self._call_counts[name]}"] = _to_array(output)
            self._call_counts[name] += 1


def _read_rows(reader: SparseReader, table: str, keys: Tensor, device_name: str) -> Tensor:
    """Return the rows [N, D] of keys [N] on a device, as a leaf with gradients."""
    return reader.read_rows(table, keys).to(device_name).requires_grad_()


def _to_array(tensor: Tensor | None) -> np.ndarray:
    """Return the first numbers of a tensor, [at most `_MAX_NUMBERS`] float32."""
    assert tensor is not None
    return tensor.detach().reshape(-1)[:_MAX_NUMBERS].float().cpu().numpy()
