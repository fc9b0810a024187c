"""The CPU path's speed, as a ratio to torch's SDPA under a dense mask in the same process."""

import pytest
import torch

from nonet.bench.attention import _compared


@pytest.mark.slow
@pytest.mark.parametrize("mask", ["causal", "prefix_lm", "candidates", "window 256"])
def test_training_is_twice_as_fast_as_under_a_dense_mask(mask, monkeypatch):
    """CPU time of this thread, which does all the work: a busy neighbour does not count. FlexAttention is not asked."""
    monkeypatch.setattr("nonet.bench.attention._flex", lambda mod, padded: lambda: None)
    assert torch.get_num_threads() == 1
    assert _compared(mask, "float32")["train sdpa/uni, CPU time"] >= 2.0
