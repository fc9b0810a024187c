"""BeamCache: the keys and values of decoding beams. Those of a prompt are stored once and shared by its beams.

A step attends the beams' newest tokens to the shared prompt (read once for all beams of a prompt) and to their own tokens, and
merges the two results by log-sum-exp. The result equals attention over every beam's complete sequence, but the prompt's keys are
stored and read once instead of W times. The cache is for inference only: nothing here is differentiable.
"""

from __future__ import annotations

import torch
from torch import Tensor

from nonet.attention.attention import uni_attention
from nonet.attention.masks import UniMask
from nonet.errors import ConfigError

# Shapes: U prompts, W beams per prompt, S packed prompt tokens, L tokens of a beam so far, H query heads, G key heads (H a
# multiple), D width, E value width.


class BeamCache:
    """Keys and values of the prompts and the beams.

    Args:
        keys: The keys [S, G, D] of the packed prompts.
        values: The values [S, G, E] of the packed prompts.
        cu_prefix: The cumulative lengths [U + 1] of the prompts.
        own_keys: The keys [U, W, L, G, D] of tokens that the beams already have, or [1, W, L, G, D] shared by all prompts, to
            which nothing can be appended. None if the beams start empty.
        own_values: The values [U, W, L, G, E] of these tokens.
    """

    def __init__(
        self,
        keys: Tensor,
        values: Tensor,
        cu_prefix: Tensor,
        own_keys: Tensor | None = None,
        own_values: Tensor | None = None,
    ):
        if keys.ndim != 3 or values.ndim != 3 or keys.shape[:2] != values.shape[:2]:
            raise ConfigError(
                f"BeamCache takes prefix keys [S, G, D] and values [S, G, E]; got {list(keys.shape)} and {list(values.shape)}."
            )
        self.keys, self.values, self.cu_prefix = keys, values, cu_prefix
        if own_keys is not None and own_values is not None:
            _check_own(own_keys, own_values, keys, len(cu_prefix) - 1)
        self.own_keys, self.own_values = own_keys, own_values

    def append(self, keys: Tensor, values: Tensor) -> None:
        """Append each beam's newest key [U, W, G, D] and value [U, W, G, E]."""
        prompts, key_shape = len(self.cu_prefix) - 1, self.keys.shape[1:]
        if (
            keys.ndim != 4
            or len(keys) != prompts
            or keys.shape[2:] != key_shape
            or values.shape[:3] != keys.shape[:3]
        ):
            raise ConfigError(
                f"BeamCache.append takes keys [{prompts}, W, {key_shape[0]}, {key_shape[1]}] and matching values; got "
                f"{list(keys.shape)} and {list(values.shape)}."
            )
        if self.own_keys is None or self.own_values is None:
            self.own_keys, self.own_values = keys[:, :, None], values[:, :, None]
            return
        self.own_keys = torch.cat([self.own_keys, keys[:, :, None]], 2)
        self.own_values = torch.cat([self.own_values, values[:, :, None]], 2)

    def reorder_beams(self, parent_UW: Tensor) -> None:
        """Replace each beam's own keys and values by those of its parent, given as beam indices [U, W]."""
        if self.own_keys is None or self.own_values is None:
            return
        prompt = torch.arange(len(parent_UW), device=parent_UW.device)[:, None]
        self.own_keys, self.own_values = self.own_keys[prompt, parent_UW], self.own_values[prompt, parent_UW]

    @torch.no_grad()
    def attend(self, q: Tensor, scale: float | None = None, backend: str = "auto") -> Tensor:
        """Attend each beam's newest query [U, W, H, D] to its prompt and its own tokens and return [U, W, H, E]."""
        prompts, beams, heads = q.shape[:3]
        groups = heads // self.keys.shape[1]
        # Query heads that share a key head become separate rows: [U, W, H / G, G, D].
        rows = q.unflatten(2, (-1, groups)).transpose(2, 3)
        cu_rows = torch.arange(prompts + 1, device=q.device, dtype=self.cu_prefix.dtype) * beams * groups
        out, lse = uni_attention(
            rows.flatten(0, 2),
            self.keys,
            self.values,
            mask=UniMask.full(),
            cu_seqlens_q=cu_rows,
            cu_seqlens_k=self.cu_prefix,
            scale=scale,
            return_lse=True,
            backend=backend,
        )
        out, lse = (
            x.unflatten(0, (prompts, beams, groups)).transpose(2, 3).flatten(2, 3)
            for x in (out, lse.T)  # uni_attention returns lse as [H, T]
        )
        if self.own_keys is None or self.own_values is None or not self.own_keys.shape[2]:
            return out
        return _merge_softmax(out, lse, *_attend_own(q, self.own_keys, self.own_values, scale))


def _check_own(own_keys: Tensor, own_values: Tensor, keys: Tensor, prompts: int) -> None:
    """Check the shapes of the beams' own keys and values."""
    if (
        own_keys.ndim != 5
        or len(own_keys) not in (1, prompts)
        or own_keys.shape[3:] != keys.shape[1:]
        or own_values.shape[:4] != own_keys.shape[:4]
    ):
        raise ConfigError(
            f"BeamCache takes own keys [{prompts} or 1, W, L, {keys.shape[1]}, {keys.shape[2]}] and matching values; got "
            f"{list(own_keys.shape)} and {list(own_values.shape)}."
        )


def _attend_own(q: Tensor, keys: Tensor, values: Tensor, scale: float | None) -> tuple[Tensor, Tensor]:
    """Compute output [U, W, H, E] and log-sum-exp [U, W, H] of queries over the beams' own tokens, in float32 or float64."""
    groups = q.shape[2] // keys.shape[3]
    acc_dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    q_grouped = q.unflatten(2, (-1, groups)).to(acc_dtype)
    score = torch.einsum("uwghd,uwlgd->uwghl", q_grouped, keys.to(acc_dtype))
    score = score * (q.shape[-1] ** -0.5 if scale is None else scale)
    lse = score.logsumexp(-1)
    out = torch.einsum("uwghl,uwlge->uwghe", (score - lse[..., None]).exp(), values.to(acc_dtype))
    return out.flatten(2, 3), lse.flatten(2, 3)


def _merge_softmax(one: Tensor, lse_one: Tensor, other: Tensor, lse_other: Tensor) -> Tensor:
    """Merge the outputs of attention over two disjoint sets of keys; an output without keys (log-sum-exp -inf) has weight 0."""
    share = torch.sigmoid(lse_other.to(other.dtype) - lse_one.to(other.dtype))[..., None]
    return (one.to(other.dtype) * (1 - share) + other * share).to(one.dtype)
