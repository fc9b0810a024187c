"""HfRecommender: a Hugging Face backbone that generates semantic ids, code by code, as tokens.

After OneRec and MiniOneRec: an item is L tokens. The embeddings of codes are separate from those of the backbone's words, and
logits are computed for the K codes of a level only, not for the whole vocabulary. The other features of an event (sparse rows,
rating, type, time since the event before) are added to the embedding of its last code, which is never used to predict that same
item.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from nonet.errors import ConfigError, DataError
from nonet.models.hf.backbone import Backbone, HfCache, StepNodes
from nonet.models.hf.layout import EventPositions, PromptLayout, bucket_time_gaps
from nonet.models.sid_decoder import GAPS, RATINGS, TYPES
from nonet.plugins import load_heavy
from nonet.types import Jagged, SampleBatch

# Shapes: B sequences, N events, S positions, T = B * S flat positions, M targets, U prompts, W nodes, L levels, K codes of a
# level, D width; in steps Q new positions and N = S + Q keys.
_MAX_PASS_POSITIONS = 1024  # Maximum number of new positions per prompt in one pass of a step.


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
        self.base_sha256: str | None = None  # Result of `hash_folder` for the backbone's folder.
        self.tokenizer: Any = None
        self._first_token = [sum(self.codes[:level]) for level in range(self.levels)]
        self.caches = True  # Whether steps use a key-value cache.
        self.no_cache: str | None = None  # Why they do not.
        # For meters: numbers of positions and of attended pairs of positions in the current pass of the backbone.
        self.pass_size: tuple[float, float] | None = None
        self.draw()

    @torch.no_grad()
    def draw(self) -> None:
        """Initialise the weights: codes and projections of rows with the words' deviation, other event features with zeros."""
        std = self.backbone.compute_std()
        weights: list[Any] = [self.token.weight, self.start, *(linear.weight for linear in self.row.values())]
        weights += [] if self.out is None else [self.out.weight]
        for weight in weights:
            nn.init.normal_(weight).mul_(std)
        if self.out is not None and self.out.bias is not None:
            nn.init.zeros_(self.out.bias)
        for table in (self.gap, self.rating, self.kind):
            nn.init.zeros_(table.weight)

    def hidden_matrices(self) -> list[nn.Parameter]:
        """Return the weights of the backbone's linear layers, which Muon updates."""
        return self.backbone.hidden_matrices()

    # --- training -----------------------------------------------------------------------------------------------

    def states(self, batch: SampleBatch, rows: Mapping[str, Tensor]) -> Tensor:
        """Compute the state [T, D] at every position, including padding if the backbone does not pack sequences."""
        events = self._locate_training_events(batch)
        x_TD = self._embed_inputs(batch, rows, events)
        with self._declare_sizes(events.lengths):
            if self.backbone.packs:
                return self.backbone.read_packed(x_TD, events.lengths)
            return self.backbone.read(self._unflatten(x_TD, events)).flatten(0, 1)

    def _locate_training_events(self, batch: SampleBatch) -> EventPositions:
        """Locate the events of a batch in the result of `states`."""
        return self.layout.locate_events(batch, packed=self.backbone.packs)

    @contextmanager
    def _declare_sizes(
        self, new_B: Tensor, past_B: Tensor | None = None, n_chains: int = 1
    ) -> Iterator[None]:
        """Set `pass_size` during a pass of the backbone; padding does not count.

        Each sequence has `n_chains` independent chains of new positions, all after the same past ones.

        Args:
            new_B: New positions of each sequence, or of each of its chains.
            past_B: Number of past positions [B], which every new position attends to; None for 0.
            n_chains: Chains of each sequence.
        """
        n_new_B = new_B.double()
        past_pairs = 0.0 if past_B is None else past_B.double() * n_new_B
        pairs = n_chains * float((past_pairs + n_new_B * (n_new_B + 1) / 2).sum())
        self.pass_size = n_chains * float(n_new_B.sum()), pairs
        try:
            yield
        finally:
            self.pass_size = None

    def targets(self, batch: SampleBatch) -> Tensor:
        """Return the semantic ids [M, L] of the batch's targets, the events whose loss_mask is True."""
        return batch.sid[batch.loss_mask.values]

    def compute_alignment_loss(self, sid_nL: Tensor, texts: Sequence[str]) -> Tensor:
        """Compute the alignment loss of items and their texts (`align.py`)."""
        return load_heavy("nonet.models.hf.align:compute_alignment_loss")(self, sid_nL, texts)

    def target_positions(self, batch: SampleBatch, ahead: int = 1) -> Tensor:
        """Return the position [M] of the state `ahead` events before each target; -1 where its sequence has none."""
        return self._locate_training_events(batch).locate_queries(ahead)[batch.loss_mask.values]

    def teacher_forced_logits(
        self,
        batch: SampleBatch,
        state_TD: Tensor,
        position_MA: Tensor,
        sid_ML: Tensor,
        choices: Sequence[Tensor],
    ) -> Iterator[Tensor]:
        """Yield the logits [m, 1, K] of each level.

        A target's codes follow its query in the batch, so `state_TD` contains the states after them.

        Args:
            batch: The batch.
            state_TD: States of all positions.
            position_MA: Position of each target's query.
            sid_ML: Semantic ids of the targets.
            choices: For each level, the indices [m] of the targets to compute.

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
        x_BSD = self._unflatten(self._embed_inputs(batch, rows, events), events)
        kv = None
        with self._declare_sizes(events.lengths):
            if self.caches:
                state_BSD, kv = self.backbone.prefill(x_BSD)
            else:
                state_BSD = self.backbone.read(x_BSD)
        return HfCache(state_BSD.flatten(0, 1)[events.locate_ends()], x_BSD, events.lengths, kv)

    def step(self, cache: HfCache, codes: Tensor | Sequence[Tensor], level: int) -> Tensor:
        """Return the logits [U, W, K] of a level after prefixes of codes."""
        if not level:
            n_nodes = codes.shape[1] if isinstance(codes, Tensor) else 1
            return self.compute_code_logits(cache.state, level=0)[:, None].expand(-1, n_nodes, -1)
        prefix_UWl = (codes if isinstance(codes, Tensor) else torch.stack(list(codes), -1))[..., :level]
        n_nodes, max_nodes = prefix_UWl.shape[1], max(1, _MAX_PASS_POSITIONS // level)
        parent_UW = self._find_parents(cache, prefix_UWl)
        n_passes = math.ceil(n_nodes / max_nodes) if parent_UW is None else 1
        n_passes = n_nodes if cache.kv is None else n_passes
        n_idle = self.find_most_passes(n_passes) - n_passes
        if cache.kv is None:
            state_UWD = self._reread_histories(cache, prefix_UWl)
        elif parent_UW is not None:
            state_UWD = self._compute_from_parents(cache, prefix_UWl, parent_UW)
        else:
            states = [
                self._compute_from_history(cache, chunk_UWl, keep=n_nodes <= max_nodes)
                for chunk_UWl in prefix_UWl.split(max_nodes, 1)
            ]
            state_UWD = torch.cat(states, 1)
        for _ in range(n_idle):
            state_UWD = state_UWD + self.backbone.read(cache.x[:0, :1]).sum()
        return self.compute_code_logits(state_UWD, level)

    def find_most_passes(self, n_passes: int) -> int:
        """Return the largest number of passes of the backbone that any rank takes in a step; `n_passes` for a whole model.

        An engine that divides the model replaces it, because all ranks must take the same number of passes.
        """
        return n_passes

    def _compute_from_history(self, cache: HfCache, prefix_UWl: Tensor, *, keep: bool) -> Tensor:
        """Compute the states [U, W, D] after prefixes, each as a chain of its own after the history.

        With `keep`, the keys and values of the prefixes are stored in `cache.nodes`, otherwise `cache.nodes` is cleared.
        """
        n_prompts, n_nodes, level = prefix_UWl.shape
        device = cache.x.device
        chain = torch.arange(n_nodes * level, device=device) // level
        depth = torch.arange(n_nodes * level, device=device) % level
        # A position attends to the history and to its own chain up to itself.
        own_QQ = (chain[:, None] == chain) & (depth[:, None] >= depth)
        visible_UQN = torch.cat(
            [cache.mask_history()[:, None].expand(-1, len(chain), -1), own_QQ.expand(n_prompts, -1, -1)], 2
        )
        position_UQ = cache.lengths[:, None] + depth
        assert cache.kv is not None
        with self._declare_sizes(
            torch.full_like(cache.lengths, level), past_B=cache.lengths, n_chains=n_nodes
        ):
            state_UQD, kv = self.backbone.compute_next_states(
                self.embed_codes(prefix_UWl).flatten(1, 2), position_UQ, visible_UQN, cache.kv
            )
        n_history = cache.x.shape[1]
        key_positions_Wl = (n_history + torch.arange(n_nodes * level, device=device)).view(n_nodes, level)
        cache.nodes = StepNodes(prefix_UWl, key_positions_Wl.expand(n_prompts, -1, -1), kv) if keep else None
        return state_UQD.unflatten(1, (n_nodes, level))[:, :, -1]

    def _find_parents(self, cache: HfCache, prefix_UWl: Tensor) -> Tensor | None:
        """Return the node [U, W] of `cache.nodes` of which each prefix is a child; None if a prefix has no parent there."""
        nodes = cache.nodes
        if nodes is None or nodes.codes.shape[-1] != prefix_UWl.shape[-1] - 1:
            return None
        return nodes.find_parents(prefix_UWl)

    def _compute_from_parents(self, cache: HfCache, prefix_UWl: Tensor, parent_UW: Tensor) -> Tensor:
        """Compute the states [U, W, D] after prefixes from their last codes and those of their parents in `cache.nodes`.

        `cache.nodes` is replaced by the prefixes.
        """
        nodes = cache.nodes
        assert nodes is not None
        n_prompts, n_nodes, level = prefix_UWl.shape
        device, n_keys = cache.x.device, nodes.kv[0][0].shape[2]
        ancestor_keys_UWl = nodes.key_positions.gather(1, parent_UW[..., None].expand(-1, -1, level - 1))
        new_key_W = n_keys + torch.arange(n_nodes, device=device)
        visible_UWN = torch.zeros(n_prompts, n_nodes, n_keys + n_nodes, dtype=torch.bool, device=device)
        visible_UWN[:, :, : cache.x.shape[1]] = cache.mask_history()[:, None]
        key_positions_UWl = torch.cat([ancestor_keys_UWl, new_key_W.expand(n_prompts, -1)[..., None]], -1)
        visible_UWN.scatter_(2, key_positions_UWl, True)
        position_UW = (cache.lengths + level - 1)[:, None].expand(-1, n_nodes)
        x_UWD = self.embed_codes(prefix_UWl[..., -1:], level - 1)[:, :, 0]
        with self._declare_sizes(
            torch.ones_like(cache.lengths), past_B=cache.lengths + level - 1, n_chains=n_nodes
        ):
            state_UWD, kv = self.backbone.compute_next_states(x_UWD, position_UW, visible_UWN, nodes.kv)
        cache.nodes = StepNodes(prefix_UWl, key_positions_UWl, kv)
        return state_UWD

    def _reread_histories(self, cache: HfCache, prefix_UWl: Tensor) -> Tensor:
        """Compute the states [U, W, D] after prefixes by reading each history again, for backbones with unusable caches."""
        n_prompts, n_nodes, level = prefix_UWl.shape
        padded_UND = functional.pad(cache.x, (0, 0, 0, level))
        position_Ul = cache.lengths[:, None] + torch.arange(level, device=padded_UND.device)
        states = []
        for node in range(n_nodes):
            index = position_Ul[..., None].expand(-1, -1, padded_UND.shape[-1])
            x_USD = padded_UND.scatter(
                1, index, self.embed_codes(prefix_UWl[:, node : node + 1])[:, 0].to(padded_UND.dtype)
            )
            with self._declare_sizes(cache.lengths + level):
                state_USD = self.backbone.read(x_USD)
            states.append(state_USD[torch.arange(n_prompts, device=padded_UND.device), position_Ul[:, -1]])
        return torch.stack(states, 1)

    # --- rows ---------------------------------------------------------------------------------------------------

    def compute_code_logits(self, state: Tensor, level: int) -> Tensor:
        """Compute the logits [..., K] of a level's codes."""
        rows_of_level = slice(self._first_token[level], self._first_token[level] + self.codes[level])
        if self.out is None:
            return self.backbone.cap_logits(functional.linear(state, self.token.weight[rows_of_level]))
        bias = None if self.out.bias is None else self.out.bias[rows_of_level]
        return self.backbone.cap_logits(functional.linear(state, self.out.weight[rows_of_level], bias))

    def embed_codes(self, codes: Tensor, level: int = 0) -> Tensor:
        """Embed codes [..., l] of the levels from `level` on as input of the first layer, [..., l, D]."""
        first_token_l = torch.tensor(self._first_token[level : level + codes.shape[-1]], device=codes.device)
        return self.token(codes + first_token_l) * self.backbone.scale

    def _embed_inputs(self, batch: SampleBatch, rows: Mapping[str, Tensor], events: EventPositions) -> Tensor:
        """Build the input [T, D] of the backbone; padded sequences are padded at the end."""
        word_S = self.layout.get_word_ids(events.max_events).to(self.start.device)
        frame_SD = self.start.new_zeros(len(word_S), self.width)
        if bool((word_S >= 0).any()):
            word_position = (word_S >= 0).nonzero().squeeze(1)
            frame_SD = frame_SD.index_copy(
                0, word_position, self.backbone.embed(word_S[word_position]).to(frame_SD.dtype)
            )
        x_TD = frame_SD[events.locate_places()]
        event_ND, user_BD = self._embed_context(batch, rows, events)
        token_NLD = self.embed_codes(batch.sid)
        token_NLD = torch.cat([token_NLD[:, :-1], token_NLD[:, -1:] + event_ND[:, None]], 1)
        x_TD = x_TD.index_copy(0, events.locate_starts(), user_BD)
        return x_TD.index_copy(0, events.locate_codes().flatten(), token_NLD.flatten(0, 1))

    def _unflatten(self, x_TD: Tensor, events: EventPositions) -> Tensor:
        """Return the inputs of padded sequences as [B, S, D]."""
        n_positions = int(self.layout.count_positions(events.max_events))
        return x_TD.view(len(events.lengths), n_positions, self.width)

    def _embed_context(
        self, batch: SampleBatch, rows: Mapping[str, Tensor], events: EventPositions
    ) -> tuple[Tensor, Tensor]:
        """Embed the features [N, D] of every event other than its codes, and START [B, D] of every sequence."""
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
