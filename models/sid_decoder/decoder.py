"""SID decoder: a causal history decoder with one position per event, and a small depth decoder over the codes of an item.

After RQ-Transformer (Lee et al. 2022): sequences are as long as histories, not L times that, and an item's codes are decoded
from one state, so a catalogue is scored exhaustively at the cost of a few matrix products. An event's input is the sum of its
codes' embeddings, its sparse rows, its rating, its type and the time since the event before it. A start position with the
user's features precedes the events of every sequence, so an empty history also has a state.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from nonet.attention.masks import UniMask
from nonet.errors import ConfigError, DataError
from nonet.models.sid_decoder.beam_cache import DecoderCache
from nonet.models.sid_decoder.blocks import AttentionBlock, compute_rotary
from nonet.models.sid_decoder.depth import DepthDecoder
from nonet.models.sid_decoder.depth_attention import DepthAttention
from nonet.models.sid_decoder.hstu import HstuBlock
from nonet.models.sid_decoder.prefix import CachedPrefix, extend
from nonet.models.sid_decoder.spec import GAPS, RATINGS, TYPES
from nonet.types import Jagged, SampleBatch

# Shapes: B sequences, N events, T = N + B positions (each sequence has a start), M loss positions, U prompts, W beams,
# L levels, K codes of a level, D width.
OPTIONS = {
    "width": 64,
    "layers": 3,
    "heads": 4,
    "dropout": 0.1,
    "block": "attention",  # Kind of the blocks of the history decoder.
    "depth": "mlp",  # Kind of the decoder of an item's codes.
    "length": 0,  # Length of the longest sequence including the start, by which HSTU scales.
}
_CHOICES = {"block": ("attention", "hstu"), "depth": ("mlp", "attention")}
_INITIAL_STD = 0.05  # Standard deviation of initial embeddings.
_MAX_ELAPSED_S = 2**31 - 1  # Maximum seconds since a sequence's first event in HSTU's time bias: 68 years.


class SidDecoder(nn.Module):
    """The shipped model: a transformer over events and a decoder of codes.

    `nonet.models.protocol.SidModel` describes the methods and their shapes.
    """

    def __init__(
        self,
        codes: Sequence[int],
        features: Mapping[str, int],
        *,
        width: int,
        layers: int,
        heads: int,
        dropout: float,
        block: str,
        depth: str,
        length: int,
    ):
        super().__init__()
        self.levels, self.codes, self.features = len(codes), tuple(map(int, codes)), dict(features)
        self.width = width
        self.head_width = width // heads
        self.code = nn.ModuleList(nn.Embedding(k, width) for k in self.codes)
        self.row = nn.ModuleDict(
            {f"of_{name}": nn.Linear(dim, width, bias=False) for name, dim in self.features.items()}
        )
        self.gap, self.rating = nn.Embedding(GAPS, width), nn.Embedding(RATINGS, width)
        self.kind = nn.Embedding(TYPES, width)
        self.start = nn.Parameter(torch.zeros(width))
        self._is_hstu = block == "hstu"
        self.blocks = nn.ModuleList(
            HstuBlock(width, heads, length, dropout=dropout)
            if self._is_hstu
            else AttentionBlock(width, heads, dropout)
            for _ in range(layers)
        )
        self.norm = nn.LayerNorm(width)
        self.depth = (
            DepthAttention(self.codes, width, dropout, heads)
            if depth == "attention"
            else DepthDecoder(self.codes, width, dropout)
        )

    @classmethod
    def build(
        cls, config: Mapping[str, Any], codes: Sequence[int], features: Mapping[str, int], seed: int
    ) -> SidDecoder:
        """Build from scenario options, with weights drawn from `seed`; torch's global generator is left unchanged."""
        options = OPTIONS | dict(config)
        _check_options(options, codes)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            model = cls(codes, features, **options)
            model.draw()
        return model

    def draw(self) -> None:
        """Initialise the embeddings: small, but zero for event types and for `get_zero_weights` of the depth decoder."""
        for module in self.modules():
            if isinstance(module, nn.Embedding):
                nn.init.normal_(module.weight, std=_INITIAL_STD)
        for weight in (*self.depth.get_zero_weights(), self.kind.weight):
            nn.init.zeros_(weight)

    def hidden_matrices(self) -> list[nn.Parameter]:
        """Return the weights of the linear layers in the blocks, which Muon updates."""
        return [m.weight for m in self.blocks.modules() if isinstance(m, nn.Linear)]  # type: ignore[misc]

    def forward(self, batch: SampleBatch, rows: Mapping[str, Tensor]) -> list[Tensor]:
        """Compute the teacher-forced logits of the targets, the events whose loss_mask is True: one tensor [M, K] per level."""
        sid_ML = self.targets(batch)
        all_targets = [torch.arange(len(sid_ML), device=sid_ML.device)] * self.levels
        logits = self.teacher_forced_logits(
            batch, self.states(batch, rows), self.target_positions(batch)[:, None], sid_ML, all_targets
        )
        return [logits_M1K[:, 0] for logits_M1K in logits]

    def targets(self, batch: SampleBatch) -> Tensor:
        """Return the semantic ids [M, L] of the batch's targets, the events whose loss_mask is True."""
        return batch.sid[batch.loss_mask.values]

    def target_positions(self, batch: SampleBatch, ahead: int = 1) -> Tensor:
        """Return the position [M] of the state `ahead` events before each target; -1 where its sequence has none.

        With `ahead` 1 there always is one: a start position precedes the first event.
        """
        events_N, sequence_N, place_N = _locate_events(batch)
        is_target_N = batch.loss_mask.values
        position_M = (events_N + sequence_N)[is_target_N] - (ahead - 1)
        return position_M.masked_fill(place_N[is_target_N] < ahead - 1, -1)

    def teacher_forced_logits(
        self,
        batch: SampleBatch,
        state_TD: Tensor,
        position_MA: Tensor,
        sid_ML: Tensor,
        choices: Sequence[Tensor],
    ) -> Iterator[Tensor]:
        """Yield the logits [m, A, K] of each level, with the targets' own codes as prefixes."""
        return self.depth.teacher_forced_logits(state_TD, _compute_cuts(batch), position_MA, sid_ML, choices)

    def prefill(self, batch: SampleBatch, rows: Mapping[str, Tensor]) -> DecoderCache:
        """Encode the histories of the batch, and return the cache from which `step` decodes."""
        return self.depth.cache(self.states(batch, rows), _compute_cuts(batch))

    def step(self, cache: DecoderCache, codes: Tensor | Sequence[Tensor], level: int) -> Tensor:
        """Return the logits [U, W, K] of a level after prefixes of codes."""
        prefix_UWl = _stack_codes(codes, cache.state)
        # Prefixes that all prompts share (stride 0) are embedded once.
        if len(prefix_UWl) > 1 and prefix_UWl.stride(0) == 0:
            prefix_UWl = prefix_UWl[:1]
        logits_UWK = self.depth(cache, prefix_UWl[..., :level], level)
        return logits_UWK.expand(-1, prefix_UWl.shape[1], -1)

    def compute_legal_logits(
        self, cache: DecoderCache, level: int, prefix_ml: Tensor, row_c: Tensor, code_c: Tensor
    ) -> Tensor | None:
        """Return the logits [U, c] of the legal codes only, if the depth decoder can compute them; None otherwise."""
        return self.depth.compute_legal_logits(cache, level, prefix_ml, row_c, code_c)

    def states(self, batch: SampleBatch, rows: Mapping[str, Tensor]) -> Tensor:
        """Compute the states [T, D]: one at the start of each sequence, then one after each of its events."""
        events_N, sequence_N, _ = _locate_events(batch)
        n_sequences, cuts_B1 = len(batch.item), _compute_cuts(batch)
        event_ND, start_BD = self.embed_inputs(batch, rows)
        x_TD = start_BD.new_zeros(len(event_ND) + n_sequences, start_BD.shape[-1])
        position_N = events_N + sequence_N + 1
        context = self._make_block_context(batch, cuts_B1, position_N)
        x_TD = x_TD.index_copy(0, cuts_B1[:-1], start_BD).index_copy(0, position_N, event_ND)
        for block in self.blocks:
            x_TD = block(x_TD, cuts_B1, *context)
        return self.norm(x_TD)

    def embed_inputs(
        self, batch: SampleBatch, rows: Mapping[str, Tensor], previous_time_B: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Compute the input of the first block: events [N, D] and starts [B, D].

        `previous_time_B` is the time of the event before each sequence, -1 for none.
        """
        event_ND = self._embed_events(batch, previous_time_B)
        start_BD = self.start.expand(len(batch.item), -1)
        for projected, by_event in self._project_rows(batch, rows):
            if by_event:
                event_ND = event_ND + projected
            else:
                start_BD = start_BD + projected
        return event_ND, start_BD

    @property
    def extends(self) -> bool:
        """Whether `extend` works; it does not for HSTU, whose time bias needs the times of the whole sequence."""
        return not self._is_hstu

    def extend(
        self, batch: SampleBatch, rows: Mapping[str, Tensor], prefixes: Sequence[CachedPrefix | None]
    ) -> tuple[DecoderCache, list[CachedPrefix]]:
        """Compute the prefill of stored prefixes and the events after them (`prefix.py`); also return the longer prefixes."""
        return extend(self, batch, rows, prefixes)

    def _make_block_context(self, batch: SampleBatch, cuts_B1: Tensor, position_N: Tensor) -> tuple[Any, ...]:
        """Return the further arguments of every block: rotations, or HSTU's mask and times. Events are at `position_N`."""
        _, sequence_N, place_N = _locate_events(batch)
        zeros_T = torch.zeros(
            int(len(position_N) + len(cuts_B1) - 1), dtype=torch.int64, device=position_N.device
        )
        if not self._is_hstu:
            return (compute_rotary(zeros_T.index_copy(0, position_N, place_N + 1), self.head_width),)
        time_N = batch.time.values
        # Seconds since the sequence's first event, whose time the start position shares.
        elapsed_N = time_N - time_N[batch.item.offsets[sequence_N]]
        time_T = zeros_T.index_copy(0, position_N, elapsed_N.clamp_max(_MAX_ELAPSED_S)).int()
        return UniMask.hstu().build_table(cuts_B1), time_T

    def _embed_events(self, batch: SampleBatch, previous_time_B: Tensor | None = None) -> Tensor:
        """Return the sum [N, D] of the embeddings of each event's codes, time gap, type and rating."""
        x_ND = self.gap(_bucket_time_gaps(batch, previous_time_B))
        for level, table in enumerate(self.code):
            x_ND = x_ND + table(batch.sid[:, level])
        if "rating" in batch.context:
            half_steps = (2 * batch.context["rating"].values).round().long()
            x_ND = x_ND + self.rating(half_steps.clamp(0, RATINGS - 1))
        return x_ND + self.kind(batch.event.values.clamp(0, TYPES - 1))

    def _project_rows(self, batch: SampleBatch, rows: Mapping[str, Tensor]) -> list[tuple[Tensor, bool]]:
        """Return for each feature its rows projected to width D, and whether there is one per event (else one per sequence)."""
        missing = sorted(set(self.features) - set(rows))
        if missing:
            raise DataError(
                f"the model was built with sparse features {', '.join(sorted(self.features))}; the rows of "
                f"{', '.join(missing)} are missing. Pull them for this batch."
            )
        projections = []
        for name, dim in self.features.items():
            by_event = name == "item" or isinstance(batch.context.get(name), Jagged)
            expected_shape = (len(batch.item.values) if by_event else len(batch.item), dim)
            if tuple(rows[name].shape) != expected_shape:
                raise DataError(
                    f"rows of {name!r} are {list(rows[name].shape)}; this batch needs {list(expected_shape)}."
                )
            projections.append((self.row[f"of_{name}"](rows[name]), by_event))
        return projections


def _compute_cuts(batch: SampleBatch) -> Tensor:
    """Return the offsets [B + 1] of the sequences among all positions: a start position and the events of each."""
    offsets = batch.item.offsets
    return offsets + torch.arange(len(offsets), device=offsets.device)


def _locate_events(batch: SampleBatch) -> tuple[Tensor, Tensor, Tensor]:
    """Return for each event [N] its index in the batch, its sequence, and its index in that sequence."""
    offsets = batch.item.offsets
    events_N = torch.arange(len(batch.item.values), device=offsets.device)
    sequence_N = torch.repeat_interleave(offsets.diff())
    return events_N, sequence_N, events_N - offsets[sequence_N]


def _bucket_time_gaps(batch: SampleBatch, previous_time_B: Tensor | None = None) -> Tensor:
    """Return the bucket [N] of the time between each event and the one before it.

    Bucket 0 is for an event without one before it, 1 for a gap of 0 s, and 2 + k for gaps of 2^k to 2^(k+1) s. `previous_time_B`
    is the time of the stored event before each sequence's first, -1 if there is none.
    """
    _, sequence_N, place_N = _locate_events(batch)
    time_N = batch.time.values
    gap_N = torch.zeros_like(time_N)
    gap_N[1:] = (time_N[1:] - time_N[:-1]).clamp_min(0)
    if previous_time_B is not None:
        previous_time_N = previous_time_B[sequence_N]
        has_stored_event_N = (place_N == 0) & (previous_time_N >= 0)
        gap_N = torch.where(has_stored_event_N, (time_N - previous_time_N).clamp_min(0), gap_N)
        place_N = place_N + has_stored_event_N
    bucket_N = 2 + gap_N.clamp_min(1).double().log2().floor().long().clamp_max(GAPS - 3)
    return bucket_N.masked_fill(gap_N == 0, 1).masked_fill(place_N == 0, 0)


def _stack_codes(codes: Tensor | Sequence[Tensor], state: Tensor) -> Tensor:
    """Return the prefixes [U, W, l] of `codes`, a tensor or one [U, W] per level; without levels, one empty prefix per prompt."""
    if isinstance(codes, list | tuple):
        empty_U10 = torch.zeros(len(state), 1, 0, dtype=torch.int64, device=state.device)
        return torch.stack(list(codes), -1) if codes else empty_U10
    assert isinstance(codes, Tensor)
    return codes


def _check_options(options: Mapping[str, Any], codes: Sequence[int]) -> None:
    """Check the options of the decoder."""
    unknown = sorted(set(options) - set(OPTIONS))
    if unknown:
        raise ConfigError(
            f"model: sid_decoder has no option {unknown[0]!r}; there are: {', '.join(OPTIONS)}."
        )
    if not codes or min(codes) < 1:
        raise ConfigError(f"model: codes {list(codes)}: at least one level, each of at least one code.")
    width, heads = options["width"], options["heads"]
    if width % heads or (width // heads) % 2:
        raise ConfigError(
            f"model: width {width} must be heads ({heads}) times an even number, e.g. {16 * heads}."
        )
    for name, allowed in _CHOICES.items():
        if options[name] not in allowed:
            raise ConfigError(f"model: {name} is {options[name]!r}; it can be {' or '.join(allowed)}.")
    if options["block"] == "hstu" and options["length"] < 1:
        raise ConfigError(
            "model: block: hstu needs `length`, the longest sequence with its start: a scenario gives data.history + 1."
        )


def build(
    options: Mapping[str, Any], codes: Sequence[int], features: Mapping[str, int], seed: int
) -> SidDecoder:
    """Build a decoder with weights drawn from `seed`, for the codes per level and the row width of each sparse feature."""
    return SidDecoder.build(options, codes, features, seed)
