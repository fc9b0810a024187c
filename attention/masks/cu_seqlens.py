"""Checks of cu_seqlens (cumulative sequence lengths, also called cuts), so that errors are reported before anything is computed.

Values are read only where this is free: on the host, outside torch.compile. On an accelerator only shapes, types and devices are
checked, since reading a value would wait for the device.
"""

from __future__ import annotations

import itertools

import torch
from torch import Tensor

from nonet.errors import ConfigError


def check_cuts(cu_q: Tensor, cu_k: Tensor, tokens_q: int | None, tokens_k: int | None) -> None:
    """Raise ConfigError unless both are [B + 1] integers that rise from 0 to the number of tokens, of equally many sequences.

    A number of tokens that is None is not checked.
    """
    for name, cuts, tokens in (("q", cu_q, tokens_q), ("k", cu_k, tokens_k)):
        if cuts.ndim != 1 or not len(cuts) or cuts.dtype not in (torch.int32, torch.int64):
            raise ConfigError(
                f"cu_seqlens_{name} has shape {list(cuts.shape)} and type {cuts.dtype}; wanted [sequences + 1] of int32 "
                "or int64."
            )
        if cu_q is cu_k and name == "k":
            break
        if cuts.device.type == "cpu" and not torch.compiler.is_compiling():
            _check_values(name, cuts.tolist(), tokens)
    if len(cu_q) != len(cu_k):
        raise ConfigError(
            f"cu_seqlens_q has {len(cu_q) - 1} query sequences but cu_seqlens_k {len(cu_k) - 1} key sequences; "
            "both cut the same sequences."
        )


def _check_values(name: str, cuts: list[int], tokens: int | None) -> None:
    """Check that cuts rise from 0 to the number of tokens."""
    tokens = cuts[-1] if tokens is None else tokens
    if cuts[0] or cuts[-1] != tokens or any(a > b for a, b in itertools.pairwise(cuts)):
        raise ConfigError(
            f"cu_seqlens_{name} must rise from 0 to the {tokens} tokens of {name}; got {cuts[:8]}"
            f"{' ...' if len(cuts) > 8 else ''}, which ends at {cuts[-1]}."
        )
