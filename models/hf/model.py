"""HfRecommender: a Hugging Face backbone that generates semantic ids, code by code, as tokens of its own vocabulary.

After OneRec and MiniOneRec: an item is L tokens. Their rows are stored next to those of the words, and logits are computed for
them alone, so a step costs K columns, not a whole vocabulary. The other features of an event (sparse rows, rating, type, time
since the event before) are added to the embedding of its last code, which is never used to predict that same item.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from nonet.errors import ConfigError, DataError
from nonet.models.hf.backbone import Backbone
from nonet.models.hf.cache import HfCache, StepNodes
from nonet.models.hf.layout import EventPositions, PromptLayout, bucket_time_gaps
from nonet.models.sid_decoder import GAPS, RATINGS, TYPES
from nonet.plugins import load_heavy
from nonet.types import Jagged, SampleBatch

# Shapes: B sequences, N events, S positions, T = B * S flat positions, M targets, U prompts, W nodes, L levels, K codes of a
# level, D width.
_MOST = 1024  # Maximum number of positions per prompt and pass of a step.


class HfRecommender(nn.Module):
    """See nonet.models.protocol.SidModel for the calls and their shapes."""

    def __init__(
        self,
        backbone: Backbone,
        layout: PromptLayout,
        codes: Sequence[int],
        features: Mapping[str, int],
        *,
        tied: bool | None = None,
    ):
        super().__init__()
        self.codes, self.features = tuple(map(int, codes)), dict(features)
        self.levels, self.width, self.layout = len(self.codes), backbone.width, layout
        self.backbone = backbone
        tokens, width = sum(self.codes), self.width
        self.token, self.start = nn.Embedding(tokens, width), nn.Parameter(torch.empty(width))
        self.out = (
            None
            if (backbone.tied if tied is None else tied)
            else nn.Linear(width, tokens, bias=backbone.bias)
        )
        self.row = nn.ModuleDict(
            {f"of_{name}": nn.Linear(dim, width, bias=False) for name, dim in self.features.items()}
        )
        self.gap, self.rating = nn.Embedding(GAPS, width), nn.Embedding(RATINGS, width)
        self.kind = nn.Embedding(TYPES, width)
        self.options: Mapping[str, Any] = {}
        self.base_sha256: str | None = None  # Hash of the backbone's folder.
        self.tokenizer: Any = None
        self._first = [sum(self.codes[:level]) for level in range(self.levels)]
        self.caches = True
        self.no_cache: str | None = None  # Why the key-value cache is not used.
        self.pass_size: tuple[float, float] | None = (
            None  # Real positions and visible pairs of the current pass, for meters.
        )
        self.draw()

    @torch.no_grad()
    def draw(self) -> None:
        """Initialise the weights: codes as large as words, event features at zero except the projections of rows."""
        std = self.backbone.std
        for weight in (self.token.weight, self.start, *(each.weight for each in self.row.values())):
            nn.init.normal_(weight, std=std)  # type: ignore[arg-type]
        if self.out is not None:
            nn.init.normal_(self.out.weight, std=std)
            if self.out.bias is not None:
                nn.init.zeros_(self.out.bias)
        for table in (self.gap, self.rating, self.kind):
            nn.init.zeros_(table.weight)

    def hidden_matrices(self) -> list[nn.Parameter]:
        """Return the hidden matrices of the backbone."""
        return self.backbone.hidden_matrices()

    # --- training -----------------------------------------------------------------------------------------------

    def states(self, batch: SampleBatch, rows: Mapping[str, Tensor]) -> Tensor:
        """Compute the state [T, D] at every position, including padding."""
        events = self.layout.locate_events(batch)
        x_BSD = self._embed_inputs(batch, rows, events)
        with self._declare_sizes(events.lengths):
            return self.backbone.read(x_BSD).flatten(0, 1)

    @contextmanager
    def _declare_sizes(
        self, lengths: Tensor, before: Tensor | None = None, chains: int = 1
    ) -> Iterator[None]:
        """Set the numbers of real positions and visible pairs of a pass for meters; padding counts as neither.

        Args:
            lengths: New positions of each sequence, or of each of its chains.
            before: Positions [B] that each new one sees besides those of its own chain.
            chains: Chains of each sequence.
        """
        length = lengths.double()
        seen = 0.0 if before is None else before.double() * length
        pairs = chains * float((seen + length * (length + 1) / 2).sum())
        self.pass_size = chains * float(length.sum()), pairs
        try:
            yield
        finally:
            self.pass_size = None

    def targets(self, batch: SampleBatch) -> Tensor:
        """Return the semantic ids of the batch's targets [M, L]."""
        return batch.sid[batch.loss_mask.values]

    def compute_alignment_loss(self, sid_nL: Tensor, texts: Sequence[str]) -> Tensor:
        """Compute the alignment loss of items and their texts (`align.py`)."""
        return load_heavy("nonet.models.hf.align:compute_alignment_loss")(self, sid_nL, texts)

    def target_positions(self, batch: SampleBatch, ahead: int = 1) -> Tensor:
        """Return the positions [M] whose states predict the targets."""
        return self.layout.locate_events(batch).locate_queries(ahead)[batch.loss_mask.values]

    def teacher_forced_logits(
        self,
        batch: SampleBatch,
        state_TD: Tensor,
        position_MA: Tensor,
        sid_ML: Tensor,
        choices: Sequence[Tensor],
    ) -> Iterator[Tensor]:
        """Yield the logits of each level; a target follows its query in the batch, so the states after its codes exist already.

        Args:
            batch: The batch.
            state_TD: States of all positions.
            position_MA: Position of each target's query.
            sid_ML: Semantic ids of the targets.
            choices: Targets by level whose codes are predicted.

        Raises:
            ConfigError: A target has several queries.
        """
        if position_MA.shape[1] != 1:
            raise ConfigError(
                "model.use: hf predicts codes as tokens from the state before them: set ahead: 1 in the stage"
            )
        for level, choice in enumerate(choices):
            yield self.compute_code_logits(state_TD.index_select(0, position_MA[choice, 0] + level), level)[
                :, None
            ]

    # --- answering ----------------------------------------------------------------------------------------------

    def prefill(self, batch: SampleBatch, rows: Mapping[str, Tensor]) -> HfCache:
        """Run the backbone on the prompts and return their cache."""
        events = self.layout.locate_events(batch)
        x_BSD = self._embed_inputs(batch, rows, events)
        kept = None
        with self._declare_sizes(events.lengths):
            if self.caches:
                state_BSD, kept = self.backbone.prefill(x_BSD)
            else:
                state_BSD = self.backbone.read(x_BSD)
        return HfCache(state_BSD.flatten(0, 1)[events.locate_ends()], x_BSD, events.lengths, kept)

    def step(self, cache: HfCache, codes: Tensor | Sequence[Tensor], level: int) -> Tensor:
        """Return the logits [U, W, K] of a level after prefixes of codes."""
        if not level:
            nodes = codes.shape[1] if isinstance(codes, Tensor) else 1
            return self.compute_code_logits(cache.state, 0)[:, None].expand(-1, nodes, -1)
        prefix_UWl = (codes if isinstance(codes, Tensor) else torch.stack(list(codes), -1))[..., :level]
        if cache.kept is None:
            return self.compute_code_logits(self._reread_histories(cache, prefix_UWl), level)
        if (after := self._extend_newest(cache, prefix_UWl)) is not None:
            return self.compute_code_logits(after, level)
        few = max(1, _MOST // level)
        parts = [
            self._from_root(cache, part, keep=prefix_UWl.shape[1] <= few) for part in prefix_UWl.split(few, 1)
        ]
        return self.compute_code_logits(torch.cat(parts, 1), level)

    def _from_root(self, cache: HfCache, prefix_UWl: Tensor, *, keep: bool) -> Tensor:
        """Compute states [U, W, D] after prefixes, each as a chain of its own after the history."""
        users, width, level = prefix_UWl.shape
        device = cache.x.device
        chain = torch.arange(width * level, device=device) // level
        depth = torch.arange(width * level, device=device) % level
        own_QQ = (chain[:, None] == chain) & (depth[:, None] >= depth)
        seen_UQN = torch.cat(
            [cache.mask_history()[:, None].expand(-1, len(chain), -1), own_QQ.expand(users, -1, -1)], 2
        )
        place_UQ = cache.lengths[:, None] + depth
        assert cache.kept is not None
        with self._declare_sizes(torch.full_like(cache.lengths, level), cache.lengths, width):
            state_UQD, kept = self.backbone.compute_next_states(
                self.embed_codes(prefix_UWl).flatten(1, 2), place_UQ, seen_UQN, cache.kept
            )
        history = cache.x.shape[1]
        places = (history + torch.arange(width * level, device=device)).view(width, level)
        cache.nodes = StepNodes(prefix_UWl, places.expand(users, -1, -1), kept) if keep else None
        return state_UQD.unflatten(1, (width, level))[:, :, -1]

    def _extend_newest(self, cache: HfCache, prefix_UWl: Tensor) -> Tensor | None:
        """Compute states after prefixes that all continue nodes of the newest step, from their last codes alone.

        Returns None if they do not continue these nodes.
        """
        nodes = cache.nodes
        if nodes is None or nodes.codes.shape[-1] != prefix_UWl.shape[-1] - 1:
            return None
        parent_UW = nodes.find_parents(prefix_UWl)
        if parent_UW is None:
            return None
        users, width, level = prefix_UWl.shape
        device, keys = cache.x.device, nodes.kept[0][0].shape[2]
        above_UWl = nodes.places.gather(1, parent_UW[..., None].expand(-1, -1, level - 1))
        own_W = keys + torch.arange(width, device=device)
        seen_UWN = torch.zeros(users, width, keys + width, dtype=torch.bool, device=device)
        seen_UWN[:, :, : cache.x.shape[1]] = cache.mask_history()[:, None]
        places_UWl = torch.cat([above_UWl, own_W.expand(users, -1)[..., None]], -1)
        seen_UWN.scatter_(2, places_UWl, True)
        place_UW = (cache.lengths + level - 1)[:, None].expand(-1, width)
        x_UWD = self.embed_codes(prefix_UWl[..., -1:], level - 1)[:, :, 0]
        with self._declare_sizes(torch.ones_like(cache.lengths), cache.lengths + level - 1, width):
            state_UWD, kept = self.backbone.compute_next_states(x_UWD, place_UW, seen_UWN, nodes.kept)
        cache.nodes = StepNodes(prefix_UWl, places_UWl, kept)
        return state_UWD

    def _reread_histories(self, cache: HfCache, prefix_UWl: Tensor) -> Tensor:
        """Compute states after prefixes by reading each history again: for backbones whose caches hold no keys and values."""
        users, width, level = prefix_UWl.shape
        room = functional.pad(cache.x, (0, 0, 0, level))
        at_l = cache.lengths[:, None] + torch.arange(level, device=room.device)
        states = []
        for w in range(width):
            index = at_l[..., None].expand(-1, -1, room.shape[-1])
            x_USD = room.scatter(1, index, self.embed_codes(prefix_UWl[:, w : w + 1])[:, 0].to(room.dtype))
            with self._declare_sizes(cache.lengths + level):
                state_USD = self.backbone.read(x_USD)
            states.append(state_USD[torch.arange(users, device=room.device), at_l[:, -1]])
        return torch.stack(states, 1)

    # --- rows ---------------------------------------------------------------------------------------------------

    def compute_code_logits(self, state: Tensor, level: int) -> Tensor:
        """Compute the logits [..., K] of a level's codes."""
        part = slice(self._first[level], self._first[level] + self.codes[level])
        if self.out is None:
            return self.backbone.cap_logits(functional.linear(state, self.token.weight[part]))
        bias = None if self.out.bias is None else self.out.bias[part]
        return self.backbone.cap_logits(functional.linear(state, self.out.weight[part], bias))

    def embed_codes(self, codes: Tensor, level: int = 0) -> Tensor:
        """Embed codes [..., l] of the levels from `level` on as input of the first layer, [..., l, D]."""
        first = torch.tensor(self._first[level : level + codes.shape[-1]], device=codes.device)
        return self.token(codes + first) * self.backbone.scale

    def _embed_inputs(self, batch: SampleBatch, rows: Mapping[str, Tensor], events: EventPositions) -> Tensor:
        """Build the input of the backbone [B, S, D], padded at the end."""
        sequences, width = len(batch.item), self.width
        word_S = self.layout.get_word_ids(events.most).to(self.start.device)
        frame_SD = self.start.new_zeros(len(word_S), width)
        if bool((word_S >= 0).any()):
            word_position = (word_S >= 0).nonzero().squeeze(1)
            frame_SD = frame_SD.index_copy(
                0, word_position, self.backbone.embed(word_S[word_position]).to(frame_SD.dtype)
            )
        x_TD = frame_SD.expand(sequences, -1, -1).flatten(0, 1)
        event_ND, user_BD = self._embed_context(batch, rows, events)
        token_NLD = self.embed_codes(batch.sid)
        token_NLD = torch.cat([token_NLD[:, :-1], token_NLD[:, -1:] + event_ND[:, None]], 1)
        x_TD = x_TD.index_copy(0, events.locate_starts(), user_BD)
        x_TD = x_TD.index_copy(0, events.locate_codes().flatten(), token_NLD.flatten(0, 1))
        return x_TD.unflatten(0, (sequences, -1))

    def _embed_context(
        self, batch: SampleBatch, rows: Mapping[str, Tensor], events: EventPositions
    ) -> tuple[Tensor, Tensor]:
        """Embed the features of every event besides its codes [N, D], and START of every sequence [B, D]."""
        event_ND = self.gap(bucket_time_gaps(batch, events, GAPS)) + self.kind(
            batch.event.values.clamp(0, TYPES - 1)
        )
        if "rating" in batch.context:
            half_steps = (2 * batch.context["rating"].values).round().long()
            event_ND = event_ND + self.rating(half_steps.clamp(0, RATINGS - 1))
        start_BD = self.start.expand(len(batch.item), -1)
        missing = sorted(set(self.features) - set(rows))
        if missing:
            raise DataError(f"the rows of {', '.join(missing)} are missing; pull them for this batch")
        for name in self.features:
            projected = self.row[f"of_{name}"](rows[name])
            if name == "item" or isinstance(batch.context.get(name), Jagged):
                event_ND = event_ND + projected
            else:
                start_BD = start_BD + projected
        return event_ND, start_BD
