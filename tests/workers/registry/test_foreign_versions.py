"""Manifests and serving states from elsewhere: their names are plain names, and what is damaged stops nothing else."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys

import pytest
from registry_world import contents, layer, read

from nonet.errors import CheckpointError, ConfigError, DeadlineExceeded, StaleVersion
from nonet.workers.registry import RemoteRegistry, ServingState, VersionRegistry, registry
from nonet.workers.registry.version import Version, _digest


@pytest.fixture
def published(tmp_path):
    """Return a registry with versions 1 and 2, of which 2 is served and is complete."""
    made = VersionRegistry(tmp_path / "registry")
    made.publish(contents(tmp_path))
    assert made.publish(contents(tmp_path, item=layer([], seed=1), step=2), base=1).kind == "full"
    return made


def forge(root, number, /, **changes):
    """Change a manifest, and write its checksum as its owner would."""
    path = root / "versions" / f"{number:06d}.json"
    body = json.loads(path.read_text()) | changes
    body.pop("sha256")
    path.write_text(json.dumps(body | {"sha256": _digest(body)}))


BLOB = "0" * 64


@pytest.mark.parametrize(
    "changes",
    [
        {"dense": "../../../.ssh/id_rsa"},
        {"dense": BLOB + "/x"},
        {"dense": BLOB.upper().replace("0", "A")},
        {"counts": {"x": "/etc/passwd"}},
        {"counts": {"../../.bashrc": BLOB}},
        {"counts": {"..": BLOB}},
        {"counts": {"": BLOB}},
        {"counts": {"a\\b": BLOB}},
        {"counts": {"a\0b": BLOB}},
        {"rows": {"../item": {"row": BLOB}}},
        {"rows": {"item": {"../row": BLOB}}},
        {"rows": {"item": {"row": "row"}}},
        {"rows": [BLOB]},
        {"touched": {"item": -1}},
        {"touched": {"item": "many"}},
        {"written": 1.5},
        {"catalogue": None},
        {"source": {"published": "today"}},
        {"source": {"published": float("nan")}},
        {"source": {"published": 1e18}},
        {"source": {"published": 10**400}},
        {"source": {"step": "../9"}},
        {"source": []},
        {"kind": "whole"},
        {"kind": "delta", "base": None},
        {"base": 2},
        {"base": 3},
        {"base": 0},
        {"base": True},
        {"number": 1},
        {"format": 2},
        {"more": 1},
    ],
    ids=str,
)
def test_a_manifest_with_wrong_entries_is_not_read_though_its_checksum_matches(published, changes):
    forge(published.root, 2, **changes)
    with pytest.raises(CheckpointError, match=r"000002.json (is not a complete version|has format)"):
        published.read_version(2)


def test_a_version_that_is_based_on_itself_ends_no_rollback(published):
    forge(published.root, 1, base=1, kind="delta")
    with pytest.raises(ConfigError, match="no ancestor with other weights that was not rolled back"):
        published.rollback()
    with pytest.raises(CheckpointError, match="its base is 1, and must be an earlier version"):
        published.map_layers(1)


def test_no_file_of_this_user_is_pushed_with_a_version(tmp_path):
    secret = tmp_path / "id_rsa"
    secret.write_text("PRIVATE KEY")
    local = VersionRegistry(tmp_path / "local")
    version = local.publish(contents(tmp_path))
    blob = local.root / "blobs" / version.dense
    blob.unlink()
    blob.symlink_to(secret)  # a name that its content does not match
    (local.root / "serving.json").unlink()
    RemoteRegistry(local.root, f"file://{tmp_path}/bucket").push()
    assert not [path for path in (tmp_path / "bucket").rglob("*") if b"PRIVATE" in path.read_bytes()[:20]]
    assert list((tmp_path / "bucket").rglob("000001.json")) == []


GOOD = {"default": 1, "shares": {"2": 0.2}, "refused": [3], "withdrawn": ["9"], "turn": 7}


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{}",
        b"[]",
        b"null",
        b"\xff\xfe",
        b"[" * 100_000,
        *(
            json.dumps(GOOD | change).encode()
            for change in (
                {"default": "1"},
                {"default": 0},
                {"default": 10**18},
                {"shares": []},
                {"shares": {"x": 0.1}},
                {"shares": {"2": "nan"}},
                {"shares": {"2": float("nan")}},
                {"shares": {"2": 1.0}},
                {"shares": {"2": 0.5, "3": 0.5}},
                {"refused": ["3"]},
                {"withdrawn": [9]},
                {"turn": None},
                {"salts": {"2": 2}},
                {"changes": [1]},
            )
        ),
        *(json.dumps({name: GOOD[name] for name in GOOD if name != missing}).encode() for missing in GOOD),
    ],
)
def test_a_damaged_serving_state_is_named_in_one_line(content):
    with pytest.raises(CheckpointError, match=r"^serving.json does not say which version is served: .*$"):
        ServingState.parse(content, "serving.json")
    assert ServingState.parse(json.dumps(GOOD).encode(), "serving.json").shares == {2: 0.2}


def test_a_torn_manifest_stops_no_other_version(published, tmp_path):
    torn = published.root / "versions" / "000001.json"
    torn.write_bytes(torn.read_bytes()[:50])
    third = published.publish(contents(tmp_path, item=layer([1], seed=1), step=3), base=2)
    assert (third.number, third.kind) == (3, "delta")
    fourth = published.renew(3, "another trie", {})
    assert published.serving.default == fourth.number == 4
    assert published.promote(3, 0.2).shares == {3: 0.2}
    assert published.rollback(2).default == 2
    assert published.serving.refused == (3, 4)
    with pytest.raises(CheckpointError, match="not a complete version"):
        published.rollback(1)


def test_a_torn_manifest_of_what_is_served_can_be_rolled_back_from(published, tmp_path):
    torn = published.root / "versions" / "000002.json"
    torn.write_bytes(b"")
    assert published.rollback(1).refused == (2,)
    assert published.publish(contents(tmp_path, rows=[1], step=3), base=1).number == 3


def test_a_version_whose_base_cannot_be_read_is_written_whole(published, tmp_path):
    blob = published.root / "blobs" / published.read_version(2).rows["item"]["row"]
    blob.unlink()
    third = published.publish(contents(tmp_path, item=layer([1], seed=1), step=3), base=2)
    assert (third.kind, third.base) == ("full", 2)
    assert read(published, 3, layer([], seed=1).key).shape == (1000, 4)


def test_no_version_is_made_from_one_that_was_rolled_back(published, tmp_path):
    published.rollback(1)
    with pytest.raises(StaleVersion, match="version 2 was rolled back"):
        published.renew(2, "another trie", {})
    assert published.list_versions() == [1, 2]
    third = published.read_version(2)
    # As a Nonet without this check has written it.
    Version(**{**_fields(third), "number": 3, "base": 2, "kind": "delta", "rows": {}}).write(
        published.root / "versions" / "000003.json"
    )
    with pytest.raises(ConfigError, match="version 3 was rolled back, or made from one that was"):
        published.promote(3)
    with pytest.raises(StaleVersion, match="version 3 was rolled back"):
        published.publish(contents(tmp_path, step=4), base=3)
    assert published.serving.default == 1


def _fields(version):
    return {name: getattr(version, name) for name in version.__dataclass_fields__}


def test_what_was_kept_when_its_ancestor_was_rolled_back_is_promoted_and_built_on(tmp_path):
    made = VersionRegistry(tmp_path / "registry")
    for number in range(3):
        made.publish(contents(tmp_path, rows=[number]), base=number or None)
    made.promote(2, 0.2)
    assert made.rollback().refused == (2,)
    assert made.publish(contents(tmp_path, rows=[9]), base=3, serve=False).number == 4
    assert made.promote(4, 0.5).shares == {4: 0.5}
    assert made.promote(4).default == 4


def test_a_version_that_was_rolled_back_is_no_base_though_what_was_made_from_it_is_served(tmp_path):
    made = VersionRegistry(tmp_path / "registry")
    for number in range(3):
        made.publish(contents(tmp_path, rows=[number]), base=number or None)
    made.promote(2, 0.2)
    assert (made.rollback().default, made.serving.refused) == (3, (2,))
    for change in (
        lambda: made.publish(contents(tmp_path, rows=[9]), base=2),
        lambda: made.renew(2, "another trie", {}),
    ):
        with pytest.raises(StaleVersion, match="version 2 was rolled back"):
            change()
    assert made.list_versions() == [1, 2, 3]


def test_a_checkpoint_that_was_rolled_back_is_not_followed_again(tmp_path):
    made = VersionRegistry(tmp_path / "registry")

    def publish(commit, base=None):
        body = contents(tmp_path, rows=[1 if base is None else 2])
        body.source["commit"] = commit
        return made.publish(body, base=base).number

    assert (publish("a"), publish("b", 1)) == (1, 2)
    made.rollback()
    assert publish("a") == 1
    assert made.serving.followed == "a"
    assert publish("b", 1) == 2
    assert made.serving.default == 1


def test_versions_in_shares_get_the_newest_catalogue_too_and_an_old_one_comes_back(tmp_path):
    made = VersionRegistry(tmp_path / "registry")
    made.publish(contents(tmp_path))
    made.publish(contents(tmp_path, rows=[3], weight=2.0, step=2), base=1, serve=False)
    made.promote(2, 0.3)
    users = [f"user {number}" for number in range(500)]
    in_share = [made.serving.select_version(user) == 2 for user in users]
    made.renew_served("c2", {})
    assert (made.serving.default, made.serving.shares) == (3, {4: 0.3})
    assert [made.serving.select_version(user) == 4 for user in users] == in_share
    assert [(made.read_version(n).dense, made.read_version(n).catalogue) for n in (3, 4)] == [
        (made.read_version(n).dense, "c2") for n in (1, 2)
    ]
    made.renew_served("trie", {})
    assert (made.serving.default, made.serving.shares, made.list_versions()) == (1, {2: 0.3}, [1, 2, 3, 4])
    made.renew_served("c2", {})
    assert (made.serving.default, made.serving.shares, made.list_versions()) == (3, {4: 0.3}, [1, 2, 3, 4])
    made.promote(2)  # with a catalogue that is old by now
    made.renew_served("c2", {})
    assert (made.serving.default, made.serving.shares) == (4, {})


def test_a_catalogue_that_was_rolled_back_is_not_served_again(tmp_path):
    made = VersionRegistry(tmp_path / "registry")
    made.publish(contents(tmp_path))
    made.renew_served("c2", {})
    assert made.rollback(1).default == 1
    made.renew_served("c2", {})
    assert (made.serving.default, made.list_versions()) == (1, [1, 2])


def test_a_rollback_goes_back_to_other_weights_whatever_catalogues_the_bad_ones_had(tmp_path):
    made = VersionRegistry(tmp_path / "registry")
    made.publish(contents(tmp_path))
    made.publish(contents(tmp_path, rows=[3], weight=2.0, step=2), base=1)
    for catalogue in ("c2", "c3"):
        made.renew_served(catalogue, {})
    serving = made.rollback()
    assert (serving.default, serving.refused) == (1, (2, 3, 4))
    with pytest.raises(ConfigError, match=r"no ancestor with other weights .*\(--to N\)"):
        made.rollback()


def test_a_canary_that_is_rolled_back_is_refused_with_each_of_its_catalogues(tmp_path):
    made = VersionRegistry(tmp_path / "registry")
    made.publish(contents(tmp_path))
    made.publish(contents(tmp_path, rows=[3], weight=2.0, step=2), base=1, serve=False)
    made.promote(2, 0.3)
    made.renew_served("c2", {})
    assert made.serving.shares == {4: 0.3}
    serving = made.rollback()
    assert (serving.default, serving.refused) == (3, (2, 4))


def test_no_version_follows_the_largest_number(tmp_path):
    made = VersionRegistry(tmp_path / "registry")
    made.publish(contents(tmp_path))
    place = made.root / "versions" / f"{10**18 - 1}.json"
    place.write_text("{}")
    with pytest.raises(ConfigError, match=r"9{18}.json has the largest number .*, so remove it"):
        made.publish(contents(tmp_path, rows=[1], step=2), base=1)
    assert made.list_versions() == [1, 10**18 - 1]
    place.unlink()
    assert made.publish(contents(tmp_path, rows=[1], step=2), base=1).number == 2


@pytest.mark.parametrize("loses", ["the file", "the folder"])
def test_a_state_that_disappears_is_named_and_nothing_takes_its_place(published, loses):
    published.withdraw({"7"})
    path = published.root / "serving.json"
    content = path.read_bytes()
    if loses == "the folder":
        published.root.rename(published.root.with_name("away"))
    else:
        path.unlink()
    for ask in (
        lambda: published.serving,
        lambda: published.announced,
        lambda: published.withdraw({"8"}),
        lambda: published.rollback(1),
    ):
        with pytest.raises(
            (CheckpointError, OSError), match=r"serving.json is missing, .*; put it back|\.lock"
        ):
            ask()
    assert "serving.json is missing" in published.problem
    if loses == "the folder":
        published.root.with_name("away").rename(published.root)
    else:
        with pytest.raises(
            CheckpointError, match=r"serving.json is missing"
        ):  # a process that has not read it
            _ = VersionRegistry(published.root).serving
        path.write_bytes(content)
    assert (published.serving.withdrawn, published.problem) == (("7",), None)


def test_a_first_version_that_is_not_served_loses_no_state(tmp_path):
    made = VersionRegistry(tmp_path / "registry")
    assert made.publish(contents(tmp_path), serve=False).number == 1
    assert (made.serving.default, VersionRegistry(made.root).serving.default) == (None, None)
    assert made.promote(1).default == 1


def test_two_shares_that_become_one_version_keep_their_users_together(tmp_path):
    state = ServingState(1, {2: 0.25, 3: 0.5}, salts={2: "2:", 3: "3:"})
    assert state.replace_version(2, 3).shares == {3: 0.75}
    assert state.replace_version(2, 1).shares == {3: 0.5}
    assert state.replace_version(1, 2).shares == {3: 0.5}


def test_shares_are_less_than_all_users(published):
    published.promote(1)
    published.promote(2, 0.5)
    with pytest.raises(ConfigError, match="are 1 together"):
        ServingState(1, {2: 0.5}).promote(3, 0.5)


def test_a_version_to_go_back_to_is_no_longer_refused(published):
    published.rollback(1)
    assert published.rollback(2).refused == ()
    assert published.promote(2).default == 2


@pytest.mark.parametrize(
    ("file", "change"),
    [
        (".lock", lambda made, folder: made.rollback(1)),
        (".publishing", lambda made, folder: made.publish(contents(folder, step=3), base=2)),
        (".publishing", lambda made, folder: made.renew(2, "another trie", {})),
        (".publishing", lambda made, folder: made.renew_served("another trie", {})),
    ],
)
def test_a_suspended_process_ends_the_wait_with_what_to_do(published, tmp_path, monkeypatch, file, change):
    monkeypatch.setattr(registry, "_CHANGE_WAIT_S", 0.1)
    monkeypatch.setattr(registry, "_PUBLISH_WAIT_S", 0.1)
    code = (
        "import fcntl, sys; f = open(sys.argv[1], 'w'); fcntl.flock(f, 2); print('held', flush=True); input()"
    )
    holder = subprocess.Popen(
        [sys.executable, "-c", code, str(published.root / file)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    try:
        assert holder.stdout is not None
        holder.stdout.readline()
        os.kill(holder.pid, signal.SIGSTOP)
        with pytest.raises(DeadlineExceeded, match=rf"find it with `fuser .*{file}`, continue or end it"):
            change(published, tmp_path)
    finally:
        holder.kill()
        holder.communicate()
    assert (published.serving.default, published.list_versions()) == (2, [1, 2])
    change(published, tmp_path)
