"""Layout: the positions of a user's text and codes in the sequence that a causal language model reads.

    head...  START  [lead... c1 .. cL]  [lead... c1 .. cL]  ...  lead...
                     the first event     the second              predicts the next

`head` and `lead` are the text tokens ("words") of the prompt before and after the history. The lead precedes the codes of every
item, so training and generation read the same sequence, and one pass over a history trains on all of its events.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from nonet.types import SampleBatch

# Shapes: B sequences, N events, L levels, S positions of the longest sequence.


@dataclass(frozen=True, slots=True)
class PromptLayout:
    """Token layout of a prompt.

    Attributes:
        levels: Number of codes per item.
        head: Ids of the text tokens before the history.
        lead: Ids of the text tokens before each item.
    """

    levels: int
    head: tuple[int, ...] = ()
    lead: tuple[int, ...] = ()

    @property
    def start(self) -> int:
        """Position of START, the embedding of the user."""
        return len(self.head)

    @property
    def stride(self) -> int:
        """Number of positions per event."""
        return len(self.lead) + self.levels

    def count_positions(self, events: int | Tensor) -> int | Tensor:
        """Return the number of positions of a sequence of `events` events."""
        return self.start + 1 + events * self.stride + len(self.lead)

    def get_word_ids(self, events: int) -> Tensor:
        """Return the ids [S] of the text tokens of a sequence of `events` events; -1 at START and codes."""
        word_ids_of_event = [*self.lead, *[-1] * self.levels]
        return torch.tensor([*self.head, -1, *word_ids_of_event * events, *self.lead])

    def locate_events(self, batch: SampleBatch, *, packed: bool = False) -> EventPositions:
        """Locate the events of a batch in its sequences, which are padded, or `packed` behind one another."""
        offsets = batch.item.offsets
        counts_B = offsets.diff()
        sequence_N = torch.repeat_interleave(counts_B)
        place_N = torch.arange(len(sequence_N), device=offsets.device) - offsets[sequence_N]
        max_events = int(counts_B.max()) if len(counts_B) else 0
        lengths_B = torch.as_tensor(self.count_positions(counts_B))
        spans_B = lengths_B if packed else torch.full_like(lengths_B, int(self.count_positions(max_events)))
        return EventPositions(self, sequence_N, place_N, max_events, lengths_B, spans_B)


@dataclass(frozen=True, slots=True)
class EventPositions:
    """The positions of events in the sequences of a batch.

    All positions are flat: those of sequence b are the spans[b] ones from first[b] on, padding included.

    Attributes:
        layout: Layout of the sequences.
        sequence: Sequence [N] of each event.
        place: Index [N] of each event in its sequence.
        max_events: Number of events of the longest sequence.
        lengths: Number of positions [B] of each sequence.
        spans: Number of positions [B] of each sequence including its padding.
    """

    layout: PromptLayout
    sequence: Tensor
    place: Tensor
    max_events: int
    lengths: Tensor
    spans: Tensor

    @property
    def first(self) -> Tensor:
        """First position [B] of each sequence."""
        return self.spans.cumsum(0) - self.spans

    def locate_places(self) -> Tensor:
        """Return for each flat position [T] its place in its sequence."""
        first_T = torch.repeat_interleave(self.first, self.spans)
        return torch.arange(len(first_T), device=first_T.device) - first_T

    def locate_queries(self, ahead: int = 1) -> Tensor:
        """Return the flat position [N] whose state predicts the first code of each event.

        Args:
            ahead: How many events ahead to predict. 1 is the position directly before the event's codes; each further one is one
                event earlier. The position is -1 where the sequence has no event that early.
        """
        query_event_N = self.place - (ahead - 1)
        first_query = self.layout.start + len(self.layout.lead)
        position_N = self.first[self.sequence] + first_query + query_event_N * self.layout.stride
        return position_N.masked_fill(query_event_N < 0, -1)

    def locate_codes(self) -> Tensor:
        """Return the flat positions [N, L] of the codes of each event."""
        return self.locate_queries()[:, None] + 1 + torch.arange(self.layout.levels, device=self.place.device)

    def locate_starts(self) -> Tensor:
        """Return the flat position [B] of each START."""
        return self.first + self.layout.start

    def locate_ends(self) -> Tensor:
        """Return the flat position [B] of each sequence's end, whose state predicts the next item."""
        return self.first + self.lengths - 1


def bucket_time_gaps(batch: SampleBatch, events: EventPositions, buckets: int) -> Tensor:
    """Return the bucket [N] of the time between each event and the one before it in its sequence.

    Bucket 0 is for the first event of a sequence, 1 for a gap of 0 s, and 2 + k for gaps of 2^k to 2^(k+1) s; the last bucket has
    all longer gaps.
    """
    gap_N = pad(batch.time.values.diff().clamp_min(0), (1, 0))[: len(events.place)]
    bucket_N = 2 + gap_N.clamp_min(1).double().log2().floor().long().clamp_max(buckets - 3)
    return bucket_N.masked_fill(gap_N == 0, 1).masked_fill(events.place == 0, 0)
