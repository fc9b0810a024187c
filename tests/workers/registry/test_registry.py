"""Versions: published whole, by what changed; served, rolled back and refused."""

from __future__ import annotations

import hashlib
import json

import numpy as np
import pytest
import torch
from registry_world import SPECS, contents, layer, read

from nonet.embedding.reading import RowLayer
from nonet.errors import CheckpointError, ConfigError, StaleVersion
from nonet.workers.registry import VersionRegistry


@pytest.fixture
def registry(tmp_path):
    return VersionRegistry(tmp_path / "registry")


def test_the_first_version_is_full_and_the_next_has_what_changed(registry, tmp_path):
    first = registry.publish(contents(tmp_path))
    second = registry.publish(contents(tmp_path, rows=[3, 7]), base=1)
    assert (first.kind, first.touched, second.kind, second.touched) == (
        "full",
        {"item": 1000},
        "delta",
        {"item": 2},
    )
    assert second.written < 0.1 * first.written
    key = layer([]).key
    assert torch.equal(read(registry, 1, key), torch.from_numpy(layer([]).row))
    assert torch.equal(read(registry, 2, key), torch.from_numpy(layer([3, 7]).row))


def test_rows_that_come_and_go_travel_in_a_delta(registry, tmp_path):
    old = layer([])
    new = RowLayer(np.append(old.key[1:], 2 * 10**6), np.roll(old.row, -1, 0), np.empty(0, np.int64))
    registry.publish(contents(tmp_path, item=old))
    assert registry.publish(contents(tmp_path, item=new), base=1).touched == {"item": 1}
    rows = registry.open_rows(2, SPECS)
    answer = rows.read_rows("item", torch.tensor([old.key[0], 2 * 10**6, -5]))
    assert torch.equal(answer[0], torch.full((4,), 0.5))  # gone: the default
    assert torch.equal(answer[1], torch.from_numpy(old.row[0]))
    assert rows.absent == 2


def test_a_chain_that_is_long_or_changes_much_is_written_whole(registry, tmp_path):
    registry.publish(contents(tmp_path))
    assert registry.publish(contents(tmp_path, rows=range(500)), base=1).kind == "full"
    for number in range(2, 20):
        registry.publish(contents(tmp_path, rows=[number]), base=number)
    assert max(len(layers) for layers in registry.map_layers(20).values()) <= 16
    assert torch.equal(read(registry, 20, layer([]).key), torch.from_numpy(layer([19]).row))


def test_a_rollback_goes_back_and_refuses_what_was_made_from_the_bad_one(registry, tmp_path):
    for number in range(4):
        registry.publish(contents(tmp_path, rows=[number]), base=number or None)
    assert registry.serving.default == 4
    serving = registry.rollback(2)
    assert (serving.default, serving.refused) == (2, (3, 4))
    with pytest.raises(StaleVersion, match="version 4 was rolled back"):
        registry.publish(contents(tmp_path, rows=[9]), base=4)
    with pytest.raises(ConfigError, match="was rolled back"):
        registry.promote(3)
    assert registry.list_versions() == [1, 2, 3, 4]
    good = registry.publish(contents(tmp_path, rows=[9]), base=2)
    assert VersionRegistry(registry.root).serving.default == good.number == 5
    assert registry.rollback().default == 2  # by default the one it was made from
    with pytest.raises(ConfigError, match="there is no version 77"):
        registry.rollback(77)


def test_a_commit_that_was_rolled_back_is_published_anew_where_a_person_asks(registry, tmp_path):
    def publish(serve, commit, base=None):
        body = contents(tmp_path, rows=[1])
        body.source["commit"] = commit
        return registry.publish(body, base=base, serve=serve).number

    assert (publish(True, "a"), publish(True, "b", base=1)) == (1, 2)
    assert registry.rollback(1).refused == (2,)
    assert publish(True, "b", base=1) == 2, "who follows a run does not undo a rollback"
    assert publish(False, "b", base=1) == 3
    assert publish(False, "b", base=1) == 3, "once"
    assert registry.promote(3).default == 3


def test_the_first_version_has_nothing_before_it(registry, tmp_path):
    with pytest.raises(ConfigError, match="serves no version"):
        registry.rollback()
    registry.publish(contents(tmp_path))
    with pytest.raises(ConfigError, match="cannot be rolled back"):
        registry.rollback()


def test_a_share_of_users_gets_another_version_and_stays_with_it(registry, tmp_path):
    registry.publish(contents(tmp_path))
    registry.publish(contents(tmp_path, rows=[1]), base=1, serve=False)
    serving = registry.promote(2, 0.2)
    users = [f"user {number}" for number in range(10_000)]
    first = [serving.select_version(user) for user in users]
    assert abs(first.count(2) / len(users) - 0.2) < 0.01  # the split is exact to a hundredth
    assert first == [VersionRegistry(registry.root).serving.select_version(user) for user in users]
    grown = registry.promote(2, 0.3)
    assert all(
        grown.select_version(user) == 2 for user, version in zip(users, first, strict=True) if version == 2
    )
    for share in (0.0, 1.0, -1):
        with pytest.raises(ConfigError, match="between 0 and 1"):
            registry.promote(2, share)
    assert registry.promote(2).shares == {}


def test_torn_files_are_named_and_not_read(registry, tmp_path):
    version = registry.publish(contents(tmp_path))
    blob = registry.root / "blobs" / version.rows["item"]["row"]
    blob.write_bytes(blob.read_bytes()[:-8] + b"whatever")
    with pytest.raises(CheckpointError, match=r"rows of 'item' of a published version is damaged"):
        VersionRegistry(registry.root).map_layers(1)
    manifest = registry.root / "versions" / "000001.json"
    body = json.loads(manifest.read_text())
    manifest.write_text(json.dumps(body | {"base": 7}))
    with pytest.raises(CheckpointError, match="its checksum does not match"):
        registry.read_version(1)
    manifest.write_text("{")
    with pytest.raises(CheckpointError, match="not a complete version"):
        registry.read_version(1)


def test_equal_contents_are_stored_once(registry, tmp_path):
    registry.publish(contents(tmp_path))
    again = registry.publish(contents(tmp_path), base=1)
    assert again.touched == {"item": 0}
    assert again.written < 500  # two empty arrays


@pytest.mark.parametrize("damage", [lambda content: content[:50], lambda content: b"x" * len(content)])
def test_what_is_published_again_repairs_its_files(registry, tmp_path, damage):
    first = registry.publish(contents(tmp_path), serve=False)
    registry.locate_files(first)  # which checks a file once for all
    for name in first.blobs:
        path = registry.root / "blobs" / name
        path.write_bytes(damage(path.read_bytes()))
    second = registry.publish(contents(tmp_path))
    assert (second.number, second.blobs) == (2, first.blobs)
    VersionRegistry(registry.root).locate_files(first)
    assert torch.equal(read(registry, 1, layer([]).key), torch.from_numpy(layer([]).row))


def published(registry, tmp_path, count):
    """Versions 1 to count, each made from the one before; the first is served."""
    for number in range(count):
        registry.publish(contents(tmp_path, rows=[number]), base=number or None, serve=number == 0)


def test_a_rollback_without_a_version_refuses_open_shares_first_and_the_default_stays(registry, tmp_path):
    published(registry, tmp_path, 4)
    registry.promote(2)
    registry.promote(3, 0.3)
    serving = registry.rollback()
    assert (serving.default, serving.shares, serving.refused) == (2, {}, (3, 4))
    with pytest.raises(ConfigError, match="version 3 was rolled back"):
        registry.promote(3)
    serving = registry.rollback()
    assert (serving.default, serving.refused) == (1, (2, 3, 4)), "a second call goes back from the default"
    with pytest.raises(ConfigError, match="cannot be rolled back"):
        registry.rollback()


def test_a_canary_of_the_first_version_s_successor_rolls_back(registry, tmp_path):
    published(registry, tmp_path, 2)
    registry.promote(2, 0.1)
    serving = registry.rollback()
    assert (serving.default, serving.shares, serving.refused) == (1, {}, (2,))


def test_a_rollback_to_a_version_refuses_what_is_served_or_shared_and_no_ancestor_of_it(registry, tmp_path):
    published(registry, tmp_path, 5)
    registry.promote(2)
    registry.promote(4, 0.3)
    registry.promote(1, 0.1)
    serving = registry.rollback(2)
    assert (serving.default, serving.shares, serving.refused) == (2, {}, (4, 5))
    with pytest.raises(ConfigError, match="version 4 was rolled back"):
        registry.promote(4)
    assert registry.promote(3, 0.2).shares == {3: 0.2}, "nobody was answered by 3"
    serving = registry.rollback(1)
    assert (serving.default, serving.refused) == (1, (2, 3, 4, 5))


def test_a_share_of_an_ancestor_of_the_default_goes_and_the_default_stays(registry, tmp_path):
    published(registry, tmp_path, 3)
    registry.promote(3)
    registry.promote(2, 0.2)
    serving = registry.rollback()
    assert (serving.default, serving.shares, serving.refused) == (3, {}, (2,))
    assert registry.rollback().default == 1, "2 was rolled back: it is passed over"


def test_shares_of_versions_are_drawn_independently_and_keep_their_users(registry, tmp_path):
    """Without a salt, the same tenth of the users would get every canary first."""
    published(registry, tmp_path, 4)
    users = [f"user {number}" for number in range(20_000)]

    def answered(version, share):
        registry.promote(1)
        serving = registry.promote(version, share)
        return {user for user in users if serving.select_version(user) == version}

    second, third = answered(2, 0.2), answered(3, 0.2)
    assert abs(len(second & third) / len(users) - 0.04) < 0.01
    serving = registry.promote(2, 0.3)
    counts = {
        version: [serving.select_version(user) for user in users].count(version) for version in (1, 2, 3)
    }
    for version, share in ((1, 0.5), (2, 0.3), (3, 0.2)):
        assert abs(counts[version] / len(users) - share) < 0.01
    renewed = registry.renew(1, "another trie", {})
    assert [renewed.number if v == 1 else v for v in map(serving.select_version, users)] == list(
        map(registry.serving.select_version, users)
    )


def test_a_file_of_an_older_nonet_says_who_is_served_and_keeps_its_users(registry, tmp_path):
    published(registry, tmp_path, 2)
    text = '{"default": 1, "shares": {"2": 0.2}, "refused": [], "withdrawn": ["9"], "turn": 7}'
    (registry.root / "serving.json").write_text(text)
    serving = registry.serving
    assert (serving.withdrawn, serving.turn, serving.followed, serving.salts) == (("9",), 7, None, {})
    users = [f"user {number}" for number in range(2_000)]
    before = [
        2
        if int.from_bytes(hashlib.blake2b(user.encode(), digest_size=8).digest(), "big") / 2**64 < 0.2
        else 1
        for user in users
    ]
    assert list(map(serving.select_version, users)) == before
    grown = registry.promote(2, 0.3)
    assert all(
        grown.select_version(user) == 2 for user, version in zip(users, before, strict=True) if version == 2
    )


def test_what_is_followed_is_promoted_once_and_a_person_s_choice_stays(registry, tmp_path):
    def publish(commit, step, serve=True, base=None):
        body = contents(tmp_path, rows=[step], step=step)
        body.source["commit"] = commit
        return registry.publish(body, base=base, serve=serve).number

    assert publish("a", 1) == 1
    assert publish("b", 2, base=1) == 2
    assert publish("a", 1) == 1, "the stage selected the earlier step"
    assert registry.serving.default == 1
    registry.promote(2)
    assert publish("a", 1) == 1
    assert registry.serving.default == 2, "nothing new was selected since"
    assert publish("c", 3, serve=False, base=1) == 3
    assert registry.serving.default == 2
    assert publish("c", 3, base=1) == 3
    assert registry.serving.default == 3, (
        "a version that a person had published is followed when it is selected"
    )
