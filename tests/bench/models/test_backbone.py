"""Batches of the bench of backbones: as many as are asked for, also from few histories."""

from __future__ import annotations

import numpy as np

from nonet.bench.models.backbone import make_batches


def test_histories_are_repeated_if_there_are_fewer_than_the_steps_need():
    histories = [np.arange(length) for length in (2, 3, 4)]
    batches, _ = make_batches(histories, sequences=2, steps=3)
    lengths = [length for batch in batches for length in batch.item.offsets.diff().tolist()]
    assert len(batches) == 3
    assert sorted(lengths) == [2, 2, 3, 3, 4, 4]
