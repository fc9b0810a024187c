import itertools

import numpy as np
import pytest

from nonet.embedding.slices import SLICES, SliceMap, compute_slices, splitmix64
from nonet.errors import ConfigError


def test_splitmix64_gives_the_published_first_outputs_of_states_0_and_1():
    assert [int(value) for value in splitmix64(np.array([0, 1]))] == [0xE220A8397B1DCDAF, 0x910A2DEC89025CC1]


def test_a_slice_is_the_top_16_bits_of_the_mixed_key_for_negative_keys_too():
    keys = np.array([0, 1, -1, -(2**63), 2**63 - 1])
    assert compute_slices(keys).tolist() == [int(value) >> 48 for value in splitmix64(keys)]
    assert compute_slices(keys)[0] == 0xE220


@pytest.mark.parametrize("shards", [1, 2, 3, 7, 65_536])
def test_shards_partition_the_slices_into_contiguous_blocks_of_even_size(shards):
    blocks = [SliceMap(shards).get_slices(shard) for shard in range(shards)]
    assert blocks[0].start == 0
    assert blocks[-1].stop == SLICES
    assert all(left.stop == right.start for left, right in itertools.pairwise(blocks))
    assert max(map(len, blocks)) - min(map(len, blocks)) <= 1


def test_a_keys_owner_is_the_shard_whose_block_holds_its_slice():
    keys = np.random.default_rng(3).integers(-(2**63), 2**63 - 1, 2000)
    owners = SliceMap(5).find_owners(keys)
    assert all(
        slice_ in SliceMap(5).get_slices(owner)
        for slice_, owner in zip(compute_slices(keys), owners, strict=True)
    )
    assert set(owners.tolist()) == {0, 1, 2, 3, 4}


def test_a_map_without_shards_is_refused():
    with pytest.raises(ConfigError, match="1 to 65536 shards, got 0"):
        SliceMap(0)
