"""The trie holds exactly the catalogue, in memory proportional to its nodes, and survives the disk."""

from __future__ import annotations

import json
import pickle

import numpy as np
import pytest
import torch

from nonet.errors import DataError
from nonet.models.generation.trie import Trie

CODES = (5, 4, 6, 3)


def paths(trie: Trie) -> dict[tuple[int, ...], int]:
    """Every SID of the trie and its item, by walking `children` from the root."""
    found = {}

    def walk(level: int, node: int, prefix: tuple[int, ...]) -> None:
        if level == trie.levels:
            found[prefix] = int(trie.item_of_leaf[node])
            return
        for code, child in enumerate(trie.find_children(level, torch.tensor([node]))[0].tolist()):
            if child >= 0:
                walk(level + 1, child, (*prefix, code))

    walk(0, 0, ())
    return found


def test_trie_holds_each_sid_of_the_catalogue_and_no_other(make_sids):
    sids = make_sids(CODES, 90)
    trie = Trie.build(sids, CODES)
    assert paths(trie) == {tuple(sid): item for item, sid in enumerate(sids.tolist())}
    assert (trie.n_items, trie.n_leaves, trie.levels) == (90, 90, 4)


def test_nodes_are_counted_and_numbered_in_lexicographic_order():
    trie = Trie.build(np.array([[1, 0], [0, 2], [1, 2], [0, 1]]), (2, 3))
    assert trie.n_nodes == (1, 2, 4)
    assert trie.item_of_leaf.tolist() == [3, 1, 0, 2]
    assert trie.leaf_of_item.tolist() == [2, 1, 3, 0]
    assert [first.tolist() for first in trie.first_child] == [[0, 2], [0, 2, 4]]
    assert [code.tolist() for code in trie.code] == [[0, 1], [1, 2, 0, 2]]
    assert trie.get_first_leaf(0).tolist() == [0, 4]
    assert trie.get_first_leaf(1).tolist() == [0, 2, 4]


def test_prefixes_are_the_codes_on_the_way(make_sids):
    sids = make_sids(CODES, 60)
    trie = Trie.build(sids, CODES)
    for level in range(trie.levels + 1):
        prefixes = trie.decode_prefixes(level, torch.arange(trie.n_nodes[level]))
        assert prefixes.tolist() == sorted(map(list, {tuple(sid[:level]) for sid in sids.tolist()}))


def test_a_restricted_catalogue_keeps_the_dense_index(make_sids):
    sids = make_sids(CODES, 50)
    trie = Trie.build(sids, CODES, items=np.array([40, 3, 17, 3]))
    assert paths(trie) == {tuple(sids[item].tolist()): item for item in (3, 17, 40)}
    assert (trie.n_items, trie.n_leaves) == (50, 3)
    assert np.flatnonzero(trie.leaf_of_item >= 0).tolist() == [3, 17, 40]


def test_a_restricted_catalogue_may_leave_duplicates_out():
    sids = np.array([[0, 0], [0, 0], [1, 0]])
    assert Trie.build(sids, (2, 1), items=np.array([1, 2])).n_leaves == 2


def test_memory_grows_with_nodes_and_not_with_the_code_space(make_sids):
    codes = (4096, 4096, 4096)
    trie = Trie.build(make_sids(codes, 1000), codes)
    held = sum(array.nbytes for array in trie._list_arrays().values())
    assert held < 1000 * (3 * 12 + 16) + 3 * 8  # below one row of a dense [nodes, K] table per ten nodes


def test_save_and_load_give_the_same_trie_mapped_from_disk(make_sids, tmp_path):
    trie = Trie.build(make_sids(CODES, 70), CODES, items=np.arange(0, 70, 2))
    trie.save(tmp_path / "catalogue")
    loaded = Trie.load(tmp_path / "catalogue", verify=True)
    assert paths(loaded) == paths(trie)
    assert (loaded.version, loaded.codes, loaded.n_items) == (trie.version, CODES, 70)
    assert all(isinstance(array, np.memmap) for array in loaded._list_arrays().values())
    meta = json.loads((tmp_path / "catalogue" / "meta.json").read_text())
    assert meta == {"format": 2, "codes": list(CODES), "n_items": 70, "version": trie.version}


def test_version_follows_the_content(make_sids):
    sids = make_sids(CODES, 30)
    assert Trie.build(sids, CODES).version == Trie.build(sids, CODES, items=np.arange(30)).version
    changed = sids[::-1]
    other_codes = (*CODES[:3], 4)
    versions = [Trie.build(sids, CODES), Trie.build(changed, CODES), Trie.build(sids, other_codes)]
    versions.append(Trie.build(sids, CODES, items=np.arange(29)))
    assert len({trie.version for trie in versions}) == 4


def test_pickling_carries_no_torch_object(make_sids):
    trie = Trie.build(make_sids(CODES, 30), CODES)
    trie.find_children(0, torch.zeros(1, dtype=torch.int64))
    data = pickle.dumps(trie)
    assert b"torch" not in data.replace(b"nonet.models.generation.trie", b"")
    assert paths(pickle.loads(data)) == paths(trie)


@pytest.mark.parametrize(
    ("sids", "codes", "items", "message"),
    [
        ([[0, 1], [1, 1], [0, 1]], (2, 2), None, r"1 items share a SID .* items 0 and 2 are both \(0, 1\)"),
        ([[0, 2]], (2, 2), None, r"outside 0\.\.1 on level 1; the first is item 0 with 2"),
        ([[0, -1]], (2, 2), None, r"outside 0\.\.1 on level 1"),
        ([[0, 1, 0]], (2, 2), None, r"shape \[1, 3\] int64; they must be integers \[items, 2\]"),
        ([[0.0, 1.0]], (2, 2), None, r"shape \[1, 2\] float64"),
        (np.zeros((0, 2), int), (2, 2), None, "there are no items"),
        ([[0, 1]], (2, 2), [1], r"restricted to item 1, but items are 0\.\.0"),
        ([[0, 1]], (2, 2), [], "restricted to no items"),
    ],
)
def test_a_wrong_catalogue_is_refused_in_one_line(sids, codes, items, message):
    with pytest.raises(DataError, match=message) as error:
        Trie.build(np.asarray(sids), codes, None if items is None else np.asarray(items, int))
    assert "\n" not in str(error.value)


def test_a_folder_that_is_not_a_whole_catalogue_is_refused(make_sids, tmp_path):
    with pytest.raises(DataError, match=r"no meta\.json"):
        Trie.load(tmp_path)
    trie = Trie.build(make_sids(CODES, 30), CODES)
    trie.save(tmp_path)
    np.save(tmp_path / "code-1.npy", trie.code[1][:-1])
    with pytest.raises(DataError, match="do not match one another"):
        Trie.load(tmp_path)
    trie.save(tmp_path)
    np.save(tmp_path / "code-3.npy", (trie.code[3] + 1) % 3)
    with pytest.raises(DataError, match="does not hash"):
        Trie.load(tmp_path, verify=True)
    (tmp_path / "code-3.npy").unlink()
    with pytest.raises(DataError, match=r"code-3\.npy is not readable"):
        Trie.load(tmp_path)
    (tmp_path / "meta.json").write_text('{"format": 9}')
    with pytest.raises(DataError, match="format 9"):
        Trie.load(tmp_path)
