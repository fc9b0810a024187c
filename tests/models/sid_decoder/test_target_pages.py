"""Pages: however the targets of a batch are cut, every row sees the same states and codes."""

import pytest
import torch

from nonet.models.sid_decoder import target_pages as pages
from nonet.models.sid_decoder.target_pages import TargetPages

LENGTHS = (25, 1, 3, 42)  # positions of each sequence, its start first
TOKENS = 3


def asked():
    """Cuts, and for the targets of all sequences but the second the positions that they are asked from, nearest first."""
    cuts = torch.tensor([0, *LENGTHS]).cumsum(0)
    near = torch.cat([torch.arange(cuts[b], cuts[b + 1]) for b in (0, 2, 3)])
    begin = cuts[torch.searchsorted(cuts, near, right=True) - 1]
    return cuts, torch.stack([near, torch.maximum(near - 1, begin)], 1)


def seen_by(made, target, level, position):
    """For every row [R][A] the packed states it sees and the (target, place) of the codes it sees."""
    start, stop = made.compute_intervals(target, level, position, TOKENS)
    states, cuts, first = made.locate_states(), made.cuts.tolist(), made.first.tolist()
    out = []
    for row, (a, b) in enumerate(zip(start.tolist(), stop.tolist(), strict=True)):
        page = int(made.page[target[row // position.shape[1]]])
        history = states[cuts[page] + a[0] : cuts[page] + b[0]].tolist()
        assert b[0] <= int(made.length[page])
        codes = [k - int(made.length[page]) + TOKENS * first[page] for k in range(a[1], b[1])]
        out.append((history, [(k // TOKENS, k % TOKENS) for k in codes]))
    return out


@pytest.mark.parametrize("short", [0, 200])
def test_a_row_sees_its_sequence_up_to_where_it_is_asked_and_the_codes_before_it(monkeypatch, short):
    monkeypatch.setattr(pages, "_MAX_PAGED_POSITIONS", short)
    cuts, position_MA = asked()
    targets = len(position_MA)
    made = TargetPages.of(cuts, position_MA[:, 0])
    target = torch.arange(targets).repeat_interleave(2)
    level = torch.tensor([0, 2]).repeat(targets)
    found = seen_by(made, target, level, position_MA[target])
    want = []
    for m, chosen in zip(target.tolist(), level.tolist(), strict=True):
        for position in position_MA[m].tolist():
            begin = int(cuts[torch.searchsorted(cuts, position, right=True) - 1])
            want.append((list(range(begin, position + 1)), [(m, place) for place in range(chosen)]))
    assert found == want
    rows = made.locate_rows(target).diff()
    assert rows.tolist() == [2 * int((made.page == page).sum()) for page in range(len(rows))]
    assert rows.sum() == len(target)


def test_short_histories_are_cut_into_small_pages_and_long_ones_are_not(monkeypatch):
    cuts, position_MA = asked()
    made = TargetPages.of(cuts, position_MA[:, 0])
    assert int(torch.bincount(made.page).max()) == 10
    assert len(made.length) == 3 + 1 + 5
    monkeypatch.setattr(pages, "_MAX_PAGED_POSITIONS", 41)
    assert TargetPages.of(cuts, position_MA[:, 0]).length.tolist() == [25, 3, 42]
