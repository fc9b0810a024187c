"""The example rankers once more in torch, with weights from a Keras model."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor
from torch.nn import functional

from nonet.models.deepfm import DeepFM
from nonet.models.keras import KerasRanker

Rows = Mapping[str, Tensor]


def make_deepfm(ranker: KerasRanker, dims: Mapping[str, int]) -> DeepFM:
    """Make DeepFM, without dropout."""
    model = DeepFM(dims, hidden=(64, 32), dropout=0.0)
    weights = dict(ranker.named_parameters())
    linears = [layer for layer in model.mlp if isinstance(layer, torch.nn.Linear)]
    with torch.no_grad():
        for layer, name in zip(linears, ("dense", "dense_1", "dense_2"), strict=True):
            layer.weight.copy_(weights[f"{name}/kernel"].T)
            layer.bias.copy_(weights[f"{name}/bias"])
    return model


def compute_deepfm(ranker: KerasRanker, rows: Rows) -> Tensor:
    """Compute the logits [B] of `build_deepfm`."""
    return make_deepfm(ranker, {name: value.shape[1] for name, value in rows.items()}).eval()(rows)


def compute_din(ranker: KerasRanker, rows: Rows) -> Tensor:
    """Compute the logits [B] of `build_din` with the sequence `liked`."""
    weights = dict(ranker.named_parameters())
    events, query = rows["liked"], rows["item"][:, None].expand_as(rows["liked"])
    pairs = torch.cat([query, events, query - events, query * events], -1)
    score = _apply(weights, "dense_1", torch.sigmoid(_apply(weights, "dense", pairs)))[..., 0]
    interest = (events * (score * rows["liked_mask"])[..., None]).sum(1)
    pooled = [value for name, value in rows.items() if value.dim() == 2 and not name.endswith("_mask")]
    return _apply_hidden(weights, torch.cat([*pooled, interest], -1), ("dense_2", "dense_3", "dense_4"))


def compute_dlrm(ranker: KerasRanker, rows: Rows) -> Tensor:
    """Compute the logits [B] of `build_dlrm`."""
    weights, stacked = dict(ranker.named_parameters()), torch.stack(list(rows.values()), 1)
    i, j = torch.tril_indices(len(rows), len(rows), -1)
    products = (stacked @ stacked.transpose(1, 2))[:, i, j]
    return _apply_hidden(
        weights, torch.cat([stacked.flatten(1), products], -1), ("dense", "dense_1", "dense_2")
    )


COMPUTE: dict[str, Callable[[KerasRanker, Rows], Tensor]] = {
    "build_deepfm": compute_deepfm,
    "build_din": compute_din,
    "build_dlrm": compute_dlrm,
}


def _apply(weights: Mapping[str, Tensor], name: str, values: Tensor) -> Tensor:
    """Apply the layer of a name, without activation."""
    return values @ weights[f"{name}/kernel"] + weights[f"{name}/bias"]


def _apply_hidden(weights: Mapping[str, Tensor], values: Tensor, names: tuple[str, str, str]) -> Tensor:
    """Apply two layers with ReLU and the output layer; return logits [B]."""
    for name in names[:2]:
        values = functional.relu(_apply(weights, name, values))
    return _apply(weights, names[2], values)[:, 0]
