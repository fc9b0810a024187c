"""The catalogue as a trie of semantic IDs, in CSR form, memory-mapped.

Invariant: nodes of a level are numbered in lexicographic order of their prefix, so the children of a node and
the leaves below it are contiguous ranges, and every leaf is exactly one item. Memory is O(nodes), 12 bytes
per item plus 8 to 12 bytes per inner node, all of it in mapped files. No [nodes, K] table of children is stored:
`find_children` computes the rows that a batch of nodes needs. A smaller catalogue (in stock, one category) is
`Trie.build(sids, codes, items=...)` over the same dense item index.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from nonet.atomic import write_whole
from nonet.errors import DataError

FORMAT = 2
_READABLE_FORMATS = (1, 2)  # format 1 has int64 arrays and no first_leaf-*.npy files

# Shapes: I items, L levels, K_l codes of level l, n_l nodes of level l (n_0 = 1, the root; n_L = leaves), M nodes of one
# level, C children of these.


class Trie:
    """The semantic IDs of one catalogue version, which are the paths from the root to the leaves.

    Attributes:
        codes: Number of codes K of every level, the collision level included.
        first_child: Per level l < L: [n_l + 1] int32; the children of node p are nodes first_child[p] ..
            first_child[p + 1] - 1 of level l + 1.
        code: Per level l < L: [n_{l+1}] int32, the code that leads from the parent to each node of level l + 1; ascending
            inside a parent.
        item_of_leaf: [n_L] int32, the dense item index of each leaf.
        leaf_of_item: [I] int32, the leaf of each item; -1 for items outside the catalogue.
        version: Hash of the content: equal catalogues have equal versions.
    """

    def __init__(
        self,
        codes: Sequence[int],
        first_child: Sequence[np.ndarray],
        code: Sequence[np.ndarray],
        item_of_leaf: np.ndarray,
        leaf_of_item: np.ndarray,
        version: str = "",
        first_leaf: Sequence[np.ndarray] | None = None,
    ):
        """Wrap the arrays; `first_leaf` is `get_first_leaf` of every level < L - 1, computed here if it is None."""
        self.codes = tuple(int(k) for k in codes)
        self.first_child, self.code = list(first_child), list(code)
        self.item_of_leaf, self.leaf_of_item = item_of_leaf, leaf_of_item
        self._first_leaf = list(first_leaf) if first_leaf is not None else self._build_first_leaf()
        self.version = version or self._hash(FORMAT)
        self._tensors: dict[tuple[str, int, str], Tensor] = {}

    @property
    def levels(self) -> int:
        """Number of levels."""
        return len(self.codes)

    @property
    def n_items(self) -> int:
        """Number of items of the dense index, including those outside the catalogue."""
        return len(self.leaf_of_item)

    @property
    def n_leaves(self) -> int:
        """Number of items of the catalogue."""
        return len(self.item_of_leaf)

    @property
    def n_nodes(self) -> tuple[int, ...]:
        """Number of nodes per level, from level 0 (the root) to L (the leaves)."""
        return (1, *(len(code) for code in self.code))

    @classmethod
    def build(cls, sids: np.ndarray, codes: Sequence[int], items: np.ndarray | None = None) -> Trie:
        """Build the trie of SIDs [I, L] in dense index order; `items` (dense indices) restricts the catalogue to these."""
        sids = np.asarray(sids)
        _check_sids(sids, codes)
        catalogue_items = np.arange(len(sids)) if items is None else _check_items(items, len(sids))
        items_in_sid_order = catalogue_items[np.lexsort(sids[catalogue_items].T[::-1])]
        sorted_sids = sids[items_in_sid_order]
        _refuse_duplicates(sorted_sids, items_in_sid_order)
        first_child, code = _build_levels(sorted_sids)
        leaf_of_item = np.full(len(sids), -1, np.int32)
        leaf_of_item[items_in_sid_order] = np.arange(len(items_in_sid_order), dtype=np.int32)
        return cls(codes, first_child, code, items_in_sid_order.astype(np.int32), leaf_of_item)

    def get_first_leaf(self, level: int) -> np.ndarray:
        """Return the first leaf below each node of a level, [n_level + 1] int32.

        The leaves below node p are first_leaf[p] .. first_leaf[p + 1] - 1. For the last level, whose nodes are the leaves, the
        array is created on each call.
        """
        if level == self.levels:
            return np.arange(self.n_leaves + 1, dtype=np.int32)
        # Children of the last inner level are the leaves themselves.
        return self.first_child[level] if level == self.levels - 1 else self._first_leaf[level]

    def find_nodes(self, level: int, leaf: Tensor) -> Tensor:
        """Return the node of `level` on the path from the root to each leaf, int64."""
        if level == self.levels:
            return leaf.long()
        return _find_range(self.get_tensor("first_leaf", level, leaf.device), leaf)

    def count_leaves(self, level: int, node: Tensor) -> Tensor:
        """Count the leaves below each node of `level`, int64."""
        if level == self.levels:
            return torch.ones_like(node, dtype=torch.int64)
        first_leaf = self.get_tensor("first_leaf", level, node.device)
        return (first_leaf[node + 1] - first_leaf[node]).long()

    def find_parents(self, level: int, child: Tensor) -> Tensor:
        """Return the parent, a node of level `level`, of each node of the next level, int64."""
        return _find_range(self.get_tensor("first_child", level, child.device), child)

    def _build_first_leaf(self) -> list[np.ndarray]:
        """Compute `get_first_leaf` of every level but the last two, whose arrays need no computation."""
        first_leaf_from_bottom = [self.first_child[-1]]
        for first_child in reversed(self.first_child[:-1]):
            first_leaf_from_bottom.append(first_leaf_from_bottom[-1][first_child])
        return first_leaf_from_bottom[:0:-1]  # from the root down, without level L - 1

    def get_tensor(self, name: str, level: int, device: Any = "cpu") -> Tensor:
        """Return an array of the trie as a tensor on `device`, cached.

        `name` is "first_child", "code", "first_leaf", "item_of_leaf" or "leaf_of_item"; for the last two, `level` has no effect.
        """
        key = (name, level, str(device))
        if key not in self._tensors:
            if name == "first_leaf":
                array = self.get_first_leaf(level)
            else:
                levels = getattr(self, name)
                array = levels[level] if isinstance(levels, list) else levels
            self._tensors[key] = torch.from_numpy(np.asarray(array)).to(device)
        return self._tensors[key]

    def list_children(self, level: int, nodes_M: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """List the children of nodes of a level.

        Returns:
            For each child, [C] int64 each: the row of its parent in `nodes_M`, its code, and its node number at level + 1.
        """
        first_child = self.get_tensor("first_child", level, nodes_M.device)
        first_child_M = first_child[nodes_M].long()
        n_children_M = first_child[nodes_M + 1] - first_child_M
        row_C = torch.repeat_interleave(n_children_M)
        # The children are listed node by node, each node's from this row of the output on.
        first_row_M = n_children_M.cumsum(0) - n_children_M
        child_C = torch.arange(len(row_C), device=nodes_M.device) + (first_child_M - first_row_M)[row_C]
        return row_C, self.get_tensor("code", level, nodes_M.device)[child_C].long(), child_C

    def decode_prefixes(self, level: int, nodes_M: Tensor) -> Tensor:
        """Return the codes [M, level] int64 on the path from the root to each node `nodes_M` of `level`."""
        codes = []
        for parent_level in range(level - 1, -1, -1):
            codes.append(self.get_tensor("code", parent_level, nodes_M.device)[nodes_M].long())
            nodes_M = self.find_parents(parent_level, nodes_M)
        return torch.stack(codes[::-1], 1) if codes else nodes_M.new_empty(len(nodes_M), 0)

    def find_children(self, level: int, nodes: Tensor) -> Tensor:
        """Return the child of each node for every code, [..., K] int64 node numbers of level + 1; -1 where no child has the code.

        Args:
            level: Level of the nodes.
            nodes: Node numbers [...] int64.
        """
        n_codes = self.codes[level]
        nodes_M = nodes.reshape(-1)
        row_C, code_C, child_C = self.list_children(level, nodes_M)
        children = torch.full((len(nodes_M) * n_codes,), -1, dtype=torch.int64, device=nodes.device)
        children[row_C * n_codes + code_C] = child_C
        return children.view(*nodes.shape, n_codes)

    def save(self, folder: str | Path) -> None:
        """Write the arrays as .npy files, then meta.json; `load` rejects a folder without meta.json as incomplete."""
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        first_leaf_files = {f"first_leaf-{level}": array for level, array in enumerate(self._first_leaf)}
        for name, array in (self._list_arrays() | first_leaf_files).items():
            np.save(folder / f"{name}.npy", array)
        meta = {"format": FORMAT, "codes": list(self.codes), "n_items": self.n_items, "version": self.version}
        write_whole(folder / "meta.json", f"{json.dumps(meta, indent=1)}\n".encode())

    @classmethod
    def load(cls, folder: str | Path, *, verify: bool = False) -> Trie:
        """Memory-map a saved trie; with `verify`, read all arrays and check that their hash is the version."""
        folder = Path(folder)
        meta = _read_meta(folder)

        def map_array(name: str) -> np.ndarray:
            try:
                # "c" (copy on write) shares pages and never writes them back; torch.from_numpy warns about "r".
                return np.load(folder / f"{name}.npy", mmap_mode="c")
            except (OSError, ValueError) as error:
                raise DataError(
                    f"catalogue {folder}: {name}.npy is not readable ({error}). Build it again."
                ) from error

        levels = range(len(meta["codes"]))
        first_child, code = (
            [map_array(f"first_child-{n}") for n in levels],
            [map_array(f"code-{n}") for n in levels],
        )
        item_maps = map_array("item_of_leaf"), map_array("leaf_of_item")
        first_leaf = [map_array(f"first_leaf-{n}") for n in levels[:-1]] if meta["format"] > 1 else None
        trie = cls(meta["codes"], first_child, code, *item_maps, meta["version"], first_leaf)
        trie._check_sizes(folder, meta["n_items"])
        if verify and trie._hash(meta["format"]) != trie.version:
            raise DataError(
                f"catalogue {folder}: the content is damaged: it does not hash to {trie.version}. Build it again."
            )
        return trie

    def _check_sizes(self, folder: Path, n_items: int) -> None:
        """Check that the sizes of the loaded arrays match one another and the number of items."""
        parents, children = self.n_nodes[:-1], self.n_nodes[1:]
        # The last entry of a level's first_child is the number of its children.
        consistent = all(
            len(first) == n + 1 and int(first[-1]) == m
            for first, n, m in zip(self.first_child, parents, children, strict=True)
        )
        if not consistent or children[-1] != self.n_leaves or n_items != self.n_items:
            raise DataError(
                f"catalogue {folder}: the sizes of its arrays do not match one another or meta.json. Build it again."
            )

    def _list_arrays(self) -> dict[str, np.ndarray]:
        """Return the arrays that are saved and hashed in every format, by file name without suffix."""
        files = {f"first_child-{level}": array for level, array in enumerate(self.first_child)}
        files |= {f"code-{level}": array for level, array in enumerate(self.code)}
        return files | {"item_of_leaf": self.item_of_leaf, "leaf_of_item": self.leaf_of_item}

    def _hash(self, file_format: int) -> str:
        """Return the version: a hash of the format number, the codes and the arrays."""
        digest = hashlib.sha256(json.dumps([file_format, self.codes]).encode())
        for name, array in self._list_arrays().items():
            digest.update(f"{name}:{len(array)};".encode())
            digest.update(np.ascontiguousarray(array).data)
        return digest.hexdigest()[:16]

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_tensors": {}}  # cached tensors are not pickled, only arrays


def _find_range(range_starts: Tensor, values: Tensor) -> Tensor:
    """Return the index p of the range [range_starts[p], range_starts[p + 1]) that contains each value, int64."""
    return torch.searchsorted(range_starts, values.to(range_starts.dtype).contiguous(), right=True) - 1


def _build_levels(sorted_sids: np.ndarray) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Build the CSR arrays of distinct SIDs [n, L] in lexicographic order."""
    # Whether a row is the first with its prefix of this level, so the first row below a node.
    is_first = np.zeros(len(sorted_sids), bool)
    is_first[0] = True
    node_of_row = np.zeros(len(sorted_sids), np.int64)
    first_child, code = [], []
    for column in sorted_sids.T:
        n_parents = int(node_of_row[-1]) + 1
        is_first = is_first.copy()
        is_first[1:] |= column[1:] != column[:-1]
        first_child.append(
            np.concatenate([[0], np.cumsum(np.bincount(node_of_row[is_first], minlength=n_parents))]).astype(
                np.int32
            )
        )
        code.append(column[is_first].astype(np.int32))
        node_of_row = np.cumsum(is_first) - 1
    return first_child, code


def _check_sids(sids: np.ndarray, codes: Sequence[int]) -> None:
    """Raise DataError if semantic IDs are not integers [items, levels] within the codes of their level."""
    if sids.ndim != 2 or sids.dtype.kind not in "iu" or sids.shape[1] != len(codes) or not len(codes):
        raise DataError(
            f"catalogue: SIDs have shape {list(sids.shape)} {sids.dtype}; they must be integers [items, {len(codes)}]."
        )
    if not len(sids):
        raise DataError("catalogue: there are no items. Give at least one item with a SID.")
    for level, (column, size) in enumerate(zip(sids.T, codes, strict=True)):
        bad_items = np.flatnonzero((column < 0) | (column >= size))
        if len(bad_items):
            raise DataError(
                f"catalogue: {len(bad_items)} items have a code outside 0..{size - 1} on level {level}; "
                f"the first is item {bad_items[0]} with {column[bad_items[0]]}. Check the tokenizer's `codes`."
            )


def _check_items(items: np.ndarray, n_items: int) -> np.ndarray:
    """Return the distinct `items` in ascending order; raise DataError if there are none or one does not exist."""
    distinct_items = np.unique(np.asarray(items, np.int64))
    if not len(distinct_items):
        raise DataError("catalogue: it was restricted to no items. Give at least one item.")
    if distinct_items[0] < 0 or distinct_items[-1] >= n_items:
        bad_item = distinct_items[0] if distinct_items[0] < 0 else distinct_items[-1]
        raise DataError(f"catalogue: it was restricted to item {bad_item}, but items are 0..{n_items - 1}.")
    return distinct_items


def _refuse_duplicates(sorted_sids: np.ndarray, items_in_sid_order: np.ndarray) -> None:
    """Raise DataError if two items have the same semantic ID; row r of `sorted_sids` is that of `items_in_sid_order[r]`."""
    duplicate_rows = np.flatnonzero((sorted_sids[1:] == sorted_sids[:-1]).all(1))
    if len(duplicate_rows):
        sid = tuple(int(c) for c in sorted_sids[duplicate_rows[0]])
        first, second = items_in_sid_order[duplicate_rows[0] :][:2]
        raise DataError(
            f"catalogue: {len(duplicate_rows)} items share a SID with another one; items {first} and "
            f"{second} are both {sid}. Add a collision level to the tokenizer."
        )


def _read_meta(folder: Path) -> dict[str, Any]:
    """Read the meta.json of a catalogue and check its format."""
    try:
        meta = json.loads((folder / "meta.json").read_text())
    except FileNotFoundError:
        raise DataError(f"catalogue {folder}: there is no meta.json. Run the tokenise stage first.") from None
    except ValueError as error:
        raise DataError(f"catalogue {folder}: meta.json is not JSON ({error}). Build it again.") from error
    if not isinstance(meta, dict) or meta.get("format") not in _READABLE_FORMATS:
        got = meta.get("format") if isinstance(meta, dict) else meta
        raise DataError(
            f"catalogue {folder}: format {got!r}, this version reads formats 1 and {FORMAT}. Build it again."
        )
    return meta
