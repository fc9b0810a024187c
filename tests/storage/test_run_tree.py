"""The tree of a stored run: which contents are refused."""

from __future__ import annotations

import json

import pytest

from nonet.errors import CheckpointError
from nonet.storage import RunWriter
from nonet.storage.run_tree import RunHead, RunTree
from tests.storage.run_steps import CopyMaker, write


@pytest.mark.parametrize(
    "name",
    ["../x", "/tmp/x", "a/../../x", "a//b", "./a", "", ".", "a/./b", "a/..", "x\0y", 7, "objects/../../y"],
)
def test_a_tree_that_names_a_file_outside_the_run_is_refused(name: object):
    entry = [0.0, [["objects/1/a", 1, "0" * 64]], "0" * 64, 0]
    tree = {"format": 2, "files": {name: entry} if isinstance(name, str) else {"a": entry}}
    if not isinstance(name, str):
        tree["files"] = {"a": [0.0, [[name, 1, "0" * 64]], "0" * 64, 0]}
    with pytest.raises(CheckpointError, match="the tree of a run in object storage is damaged"):
        RunTree.decode(json.dumps(tree).encode())
    if isinstance(name, str) and name:
        head = {"run": "x", "epoch": 1, "tree": name, "owner": "", "opened": 0.0, "commit": "", "format": 2}
        with pytest.raises(CheckpointError, match="the head of a run in object storage is damaged"):
            RunHead.decode(json.dumps(head).encode())


@pytest.mark.parametrize(
    "parts",
    [
        [["objects/1/a", -1, "0" * 64]],
        [["objects/1/a", 1.5, "0" * 64]],
        [["objects/1/a", 1, "short"]],
        [["objects/1/a", 1]],
        [["objects/1/a", 1, ""], ["objects/1/b", 1, ""]],
        "abc",
        None,
    ],
)
def test_a_tree_with_parts_that_cannot_be_is_refused(parts: object):
    tree = {"format": 2, "files": {"a": [0.0, parts, None, 0]}}
    with pytest.raises(CheckpointError, match="is damaged, or somebody else wrote it"):
        RunTree.decode(json.dumps(tree).encode())


def test_a_tree_is_the_same_after_it_was_stored(make_copy: CopyMaker):
    copy = make_copy("a")
    writer = RunWriter(copy)
    write(copy, "results/a.json", "1")
    writer.close()
    tree = copy.read_tree()
    assert RunTree.decode(tree.encode()) == tree
    assert set(tree.select("results")) == {"results/a.json"}
    assert not tree.select("res")


@pytest.mark.parametrize(
    "name",
    [".storage.json", "serving/withdrawn.json", "commands/1.json", "sources/__pycache__/x.pyc", "a/.b"],
)
def test_a_tree_that_names_what_no_writer_stores_is_refused(name: str):
    tree = {"format": 2, "files": {name: [0.0, [["objects/1/a", 1, "0" * 64]], "0" * 64, 0]}}
    with pytest.raises(CheckpointError, match="is damaged, or somebody else wrote it"):
        RunTree.decode(json.dumps(tree).encode())
