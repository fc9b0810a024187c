"""Pages: groups of adjacent targets that share one sequence of an attention call, with the keys [history | their code tokens].

On an accelerator a page contains all targets of a sequence. On a CPU it contains at most 10 of them, and its history ends at
its last target: pages of at most 256 keys share padded calls of torch's fused kernel, and cover half of the history on average,
where a whole sequence needs three masked blocks. This makes a training step of 8 histories of 50 events 1.6 times faster.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

# Shapes: B sequences, M targets in order of their sequences, P pages, R rows (pairs of a target and a level) in order of
# their targets, A states that each target is predicted from, S history keys of all pages.
_TARGETS_PER_PAGE = 10  # On a CPU.
_MAX_PAGED_POSITIONS = 200  # Longest history, in positions, whose targets are divided into several pages.


@dataclass(frozen=True, slots=True, eq=False)
class TargetPages:
    """The division of a batch's targets into pages.

    Attributes:
        page: Page [M] of each target.
        first: First target of each page, [P + 1] with the number of targets at the end.
        begin: First packed state [P] of each page's history.
        length: Number of states [P] of each page's history.
    """

    page: Tensor
    first: Tensor
    begin: Tensor
    length: Tensor

    @staticmethod
    def of(cuts_B1: Tensor, last_M: Tensor) -> TargetPages:
        """Divide targets into pages.

        `cuts_B1` are the offsets of the sequences of packed states. `last_M` is the newest state that each target attends to,
        ascending.
        """
        index_M = torch.arange(len(last_M), device=last_M.device)
        sequence_M = torch.searchsorted(cuts_B1, last_M.contiguous(), right=True) - 1
        index_in_sequence_M = index_M - torch.searchsorted(sequence_M, sequence_M)
        begins_page_M = index_in_sequence_M == 0
        if last_M.device.type == "cpu" and int(cuts_B1.diff().max()) <= _MAX_PAGED_POSITIONS:
            begins_page_M = index_in_sequence_M % _TARGETS_PER_PAGE == 0
        first_P = begins_page_M.nonzero().squeeze(1)
        first_P1 = pad(first_P, (0, 1), value=len(last_M))
        begin_P = cuts_B1[sequence_M[first_P]]
        return TargetPages(
            begins_page_M.cumsum(0) - 1, first_P1, begin_P, last_M[first_P1[1:] - 1] - begin_P + 1
        )

    @property
    def cuts(self) -> Tensor:
        """Offsets [P + 1] of the pages in their concatenated histories."""
        return pad(self.length.cumsum(0), (1, 0))

    def locate_states(self) -> Tensor:
        """Return the index [S] of the packed state of each history key."""
        page_S = torch.repeat_interleave(self.length)
        return torch.arange(len(page_S), device=page_S.device) + (self.begin - self.cuts[:-1])[page_S]

    def compute_intervals(
        self, target_R: Tensor, chosen_codes_R: Tensor, position_RA: Tensor, codes_per_target: int
    ) -> tuple[Tensor, Tensor]:
        """Compute the intervals of keys that each row attends to.

        They are the history of its page up to the state `position_RA`, and the first `chosen_codes_R` of the `codes_per_target`
        code tokens of its target.

        Returns:
            Start and stop of the intervals, [R * A, 2] each.
        """
        page_R = self.page[target_R]
        code_start_R1 = (self.length[page_R] + codes_per_target * (target_R - self.first[page_R]))[:, None]
        n_history_RA = position_RA - self.begin[page_R, None] + 1
        start = torch.stack([torch.zeros_like(n_history_RA), code_start_R1.expand_as(n_history_RA)], -1)
        stop = torch.stack(
            [n_history_RA, (code_start_R1 + chosen_codes_R[:, None]).expand_as(n_history_RA)], -1
        )
        return start.flatten(0, 1), stop.flatten(0, 1)

    def locate_rows(self, target_R: Tensor) -> Tensor:
        """Return the offsets [P + 1] of the pages in the rows."""
        page_P1 = torch.arange(len(self.first), device=target_R.device)
        return torch.searchsorted(self.page[target_R], page_P1)
