"""The quickstart's decoder in plain PyTorch, without Nonet: padded batches, SDPA, nn.Embedding.

Parameters have the names of `SidDecoder`, so it starts from the same weights; the bench checks that losses are the
same.
"""

# Shapes: B sequences, S events, M targets, L levels, K codes, D width, H heads, R rank.

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

GAPS, RATINGS, TYPES = 28, 21, 32
RANK, ROWS = 16, 1 << 14
_MIX, _SPREAD = 1_000_003, 0x9E3779B97F4A7C15 - (1 << 64)


@dataclass(frozen=True)
class Padded:
    """A padded batch.

    Attributes:
        item: Items [B, S].
        sid: Semantic ids [B, S, L].
        time: Times [B, S].
        kind: Kinds of events [B, S].
        half_stars: Ratings in half stars [B, S].
        target: Which events are targets [B, S].
        user: Users [B].
        length: Lengths [B].
    """

    item: Tensor
    sid: Tensor
    time: Tensor
    kind: Tensor
    half_stars: Tensor
    target: Tensor
    user: Tensor
    length: Tensor


def collate(rows: Sequence[dict[str, Any]]) -> Padded:
    """Pad the sequences of one batch at the end."""

    def pad_column(name: str) -> Tensor:
        return nn.utils.rnn.pad_sequence([row[name] for row in rows], batch_first=True)

    jagged = {name: pad_column(name) for name in ("item", "sid", "time", "kind", "half_stars", "target")}
    whole = {name: torch.tensor([row[name] for row in rows]) for name in ("user", "length")}
    return Padded(**jagged, **whole)


class PlainBlock(nn.Module):
    """A transformer block: causal attention and a perceptron."""

    def __init__(self, width: int, heads: int):
        super().__init__()
        self.heads = heads
        self.attend_norm, self.think_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.merge = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.widen, self.narrow = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x_BSD: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
        """Return the states [B, S, D] after attention and perceptron."""
        q, k, v = self.qkv(self.attend_norm(x_BSD)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        q, k = (z * cosine + z.roll(z.shape[-1] // 2, -1) * sine for z in (q, k))
        seen = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x_BSD = x_BSD + self.merge(seen.transpose(1, 2).flatten(2))
        return x_BSD + self.narrow(functional.relu(self.widen(self.think_norm(x_BSD))))


class Depth(nn.Module):
    """The decoder of an item's codes from one state, level by level."""

    def __init__(self, codes: Sequence[int], width: int):
        super().__init__()
        hidden = 2 * width
        self.codes = tuple(codes)
        self.read = nn.ModuleList(nn.Linear(width, hidden) for _ in codes)
        self.skip = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in codes)
        self.write = nn.ModuleList(nn.Linear(hidden, width) for _ in codes)
        self.norm = nn.ModuleList(nn.LayerNorm(width) for _ in codes)
        self.out = nn.ModuleList(nn.Linear(width, k) for k in codes)
        self.chosen = nn.ModuleList(
            nn.ModuleList(nn.Embedding(k, hidden) for k in codes[:level]) for level in range(len(codes))
        )
        self.child = nn.Embedding(ROWS, RANK)
        self.ask = nn.ModuleList(nn.Linear(width, RANK, bias=False) for _ in codes[1:])

    def forward(self, state_MD: Tensor, sid_ML: Tensor, level: int) -> Tensor:
        """Return logits [M, K]."""
        hidden = self.read[level](state_MD)
        for place, table in enumerate(self.chosen[level]):  # type: ignore[arg-type]
            hidden = hidden + table(sid_ML[:, place])
        wide = self.skip[level](state_MD) + self.write[level](functional.relu(hidden))
        logits = self.out[level](self.norm[level](wide))
        if level == 0:
            return logits
        path = torch.full_like(sid_ML[:, 0], level)
        for place in range(level):
            path = path * _MIX + sid_ML[:, place] + 1
        code = torch.arange(self.codes[level])
        row_MK = ((path[:, None] * _MIX + code + 1) * _SPREAD >> 40) & (ROWS - 1)
        return logits + (self.child(row_MK) @ self.ask[level - 1](state_MD)[..., None]).squeeze(-1)


class Decoder(nn.Module):
    """The dense part; `rows` are separate nn.Embedding with an optimizer of their own."""

    def __init__(self, codes: Sequence[int], dims: dict[str, int], width: int, layers: int, heads: int):
        super().__init__()
        self.codes, self.head_width = tuple(codes), width // heads
        self.code = nn.ModuleList(nn.Embedding(k, width) for k in codes)
        self.row = nn.ModuleDict(
            {f"of_{name}": nn.Linear(dim, width, bias=False) for name, dim in dims.items()}
        )
        self.gap, self.rating = nn.Embedding(GAPS, width), nn.Embedding(RATINGS, width)
        self.kind = nn.Embedding(TYPES, width)
        self.start = nn.Parameter(torch.zeros(width))
        self.blocks = nn.ModuleList(PlainBlock(width, heads) for _ in range(layers))
        self.norm, self.depth = nn.LayerNorm(width), Depth(codes, width)

    def forward(self, batch: Padded, rows: nn.ModuleDict, legal_ILK: Sequence[Tensor]) -> Tensor:
        """Return the summed nats of the targets.

        Args:
            batch: The padded batch.
            rows: By table, its nn.Embedding.
            legal_ILK: By level, the codes [I, K] that an item's prefix allows.
        """
        x_BSD = self.gap(_bucket_gaps(batch.time)) + self.kind(batch.kind.clamp(0, TYPES - 1))
        x_BSD = x_BSD + self.rating(batch.half_stars) + self.row["of_item"](rows["item"](batch.item))
        for level, table in enumerate(self.code):
            x_BSD = x_BSD + table(batch.sid[..., level])
        start_BD = self.start + self.row["of_user"](rows["user"](batch.user))
        x_BSD = torch.cat([start_BD[:, None], x_BSD], 1)
        cosine, sine = _compute_rotary(x_BSD.shape[1], self.head_width)
        for block in self.blocks:
            x_BSD = block(x_BSD, cosine, sine)
        state_MD = self.norm(x_BSD)[:, :-1][batch.target]  # an event is asked of the position before it
        item_M, sid_ML = batch.item[batch.target], batch.sid[batch.target]
        total = state_MD.new_zeros(())
        for level, legal_IK in enumerate(legal_ILK):
            legal_MK = legal_IK[item_M]
            asked = (legal_MK.sum(1) > 1).nonzero().squeeze(1)
            logits = self.depth(state_MD[asked], sid_ML[asked], level)
            logits = logits.masked_fill(~legal_MK[asked], -torch.inf)
            total = total + functional.cross_entropy(logits, sid_ML[asked, level], reduction="sum")
        return total


def _bucket_gaps(time_BS: Tensor) -> Tensor:
    since = time_BS.diff(dim=1).clamp_min(0)
    bucket = 2 + since.clamp_min(1).double().log2().floor().long().clamp_max(GAPS - 3)
    return functional.pad(bucket.masked_fill(since == 0, 1), (1, 0))


def _compute_rotary(positions: int, width: int) -> tuple[Tensor, Tensor]:
    half = width // 2
    angle = torch.arange(positions)[:, None] * 1000.0 ** (-torch.arange(half) / half)
    cosine, sine = angle.cos(), angle.sin()
    return torch.cat([cosine, cosine], -1), torch.cat([-sine, sine], -1)
