"""A registry on a filesystem of Arrow: pushed by one host, followed by others, whole or not at all."""

from __future__ import annotations

import json

import pyarrow.fs as pafs
import pytest
import torch
from registry_world import contents, layer, read

from nonet.errors import CheckpointError, ConfigError
from nonet.workers.registry import RemoteRegistry, VersionRegistry


@pytest.fixture(params=["subtree", "uri"])
def at(request, tmp_path):
    """Open the same registry as another host would."""
    (tmp_path / "bucket").mkdir()
    there = pafs.SubTreeFileSystem(str(tmp_path / "bucket"), pafs.LocalFileSystem())

    def opened(host):
        if request.param == "uri":
            return RemoteRegistry(tmp_path / host, f"file://{tmp_path}/bucket/r1", max_age_s=0)
        return RemoteRegistry(tmp_path / host, "r1", there, max_age_s=0)

    return opened


def same_rows(registry, number, rows):
    key = layer([]).key
    return torch.equal(read(registry, number, key), torch.from_numpy(layer(rows).row))


def test_what_one_host_publishes_another_serves_and_rolls_back(at, tmp_path):
    mine, theirs = at("mine"), at("theirs")
    mine.publish(contents(tmp_path))
    mine.publish(contents(tmp_path, rows=[3, 7], step=2), base=1)
    assert theirs.serving.default == 2
    assert same_rows(theirs, 2, [3, 7])
    theirs.rollback()
    assert mine.serving.default == 1
    assert mine.serving.refused == (2,)
    third = theirs.publish(contents(tmp_path, rows=[5], step=3), base=1)
    assert (third.number, mine.serving.default) == (3, 3)
    assert same_rows(mine, 3, [5])


def test_a_late_host_takes_what_is_served_and_no_more(at, tmp_path):
    mine = at("mine")
    mine.publish(contents(tmp_path))
    full = mine.publish(contents(tmp_path, item=layer([], seed=1), step=2), base=1)
    mine.publish(contents(tmp_path, item=layer([3], seed=1), step=3), base=2)
    assert full.kind == "full"
    late = at("late")
    assert late.serving.default == 3
    names = {path.name for path in (tmp_path / "late" / "blobs").iterdir()}
    assert names == late.read_version(3).blobs | late.read_version(2).blobs
    first = late.read_version(1)
    assert names == {path.name for path in (tmp_path / "late" / "blobs").iterdir()}, "a manifest alone"
    late.locate_files(first)
    late.map_layers(1)
    assert first.blobs <= {path.name for path in (tmp_path / "late" / "blobs").iterdir()}


def test_a_torn_file_there_leaves_what_is_served_here(at, tmp_path):
    mine, theirs = at("mine"), at("theirs")
    mine.publish(contents(tmp_path))
    assert theirs.serving.default == 1
    second = mine.publish(contents(tmp_path, rows=[1], weight=2.0, step=2), base=1)
    torn = tmp_path / "bucket" / "r1" / "blobs" / second.dense
    whole = torn.read_bytes()
    torn.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(CheckpointError, match="of version 2 is damaged or missing"):
        _ = theirs.serving
    assert VersionRegistry(tmp_path / "theirs").serving.default == 1
    torn.write_bytes(whole)
    assert theirs.serving.default == 2


def test_a_push_that_ends_early_shows_no_version(at, tmp_path, monkeypatch):
    mine, theirs = at("mine"), at("theirs")
    mine.publish(contents(tmp_path))

    def ends(name, content):
        raise CheckpointError("the network went away")

    monkeypatch.setattr(mine, "_write_remote", ends)
    with pytest.raises(CheckpointError):
        mine.publish(contents(tmp_path, weight=2.0, step=2), base=1)
    assert theirs.list_versions() == [1]
    assert theirs.serving.default == 1


def test_an_address_of_nothing_is_one_line(tmp_path):
    with pytest.raises(ConfigError, match="not the address of a filesystem"):
        RemoteRegistry(tmp_path, "gopher://x/y")


def test_a_registry_of_another_catalogue_has_the_same_weights_for_the_same_users(tmp_path):
    registry = VersionRegistry(tmp_path / "registry")
    registry.publish(contents(tmp_path))
    registry.publish(contents(tmp_path, rows=[3], weight=2.0, step=2), base=1)
    registry.promote(1)
    registry.promote(2, 0.3)
    third = registry.renew(1, "another trie", {})
    assert (third.number, third.dense, third.catalogue) == (3, registry.read_version(1).dense, "another trie")
    assert (registry.serving.default, registry.serving.shares) == (3, {2: 0.3})
    assert same_rows(registry, 3, [])
    assert registry.renew(3, "another trie", {}).number == 3
    fourth = registry.publish(contents(tmp_path, rows=[9], weight=3.0, step=3), base=3)
    assert same_rows(registry, fourth.number, [9])
    assert json.loads((tmp_path / "registry" / "versions" / "000003.json").read_text())["rows"] == {}
