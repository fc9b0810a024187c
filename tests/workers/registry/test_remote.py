"""A registry on a filesystem of Arrow: pushed by one host, followed by others, whole or not at all."""

from __future__ import annotations

import json

import pyarrow.fs as pafs
import pytest
import torch
from registry_world import before_write, contents, layer, read

from nonet.errors import CheckpointError, ConfigError, DeadlineExceeded, StaleVersion
from nonet.workers.registry import RemoteRegistry, VersionRegistry, open_registry
from nonet.workers.registry import registry as registry_module
from nonet.workers.registry.remote import check_address


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


def test_a_state_that_is_lost_there_withdraws_and_refuses_as_before(at, tmp_path):
    mine, theirs = at("mine"), at("theirs")
    mine.publish(contents(tmp_path))
    mine.withdraw({"7"})
    assert theirs.serving.withdrawn == theirs.announced.withdrawn == ("7",)
    place = tmp_path / "bucket" / "r1" / "serving.json"
    content = place.read_bytes()
    place.unlink()
    for registry in (mine, theirs, at("late")):
        for ask in (lambda: registry.serving, lambda: registry.announced, lambda: registry.withdraw({"8"})):  # noqa: B023
            with pytest.raises(CheckpointError, match=r"r1/serving.json is missing, so it is not known"):
                ask()
        assert registry.problem is not None
    assert VersionRegistry(tmp_path / "theirs").serving.withdrawn == ("7",)
    place.write_bytes(content)
    assert theirs.serving.withdrawn == theirs.announced.withdrawn == ("7",)
    assert theirs.problem is None


@pytest.mark.parametrize("lost", ["serving.json", "blobs"])
def test_what_cannot_be_read_at_an_address_is_reported_as_long_as_it_lasts(tmp_path, lost):
    bucket = tmp_path / "bucket"
    RemoteRegistry(tmp_path / "mine", f"file://{bucket}").publish(contents(tmp_path))
    reader = RemoteRegistry(
        tmp_path / ("late" if lost == "blobs" else "mine"), f"file://{bucket}", max_age_s=3600
    )
    (bucket / lost).rename(bucket / "away")
    for _ in range(3):
        with pytest.raises(CheckpointError, match=rf"bucket/{lost}.*missing"):
            _ = reader.serving
        assert (reader.problem is None) == (lost == "blobs")
    (bucket / "away").rename(bucket / lost)
    assert reader.serving.default == 1


def test_a_damaged_file_is_repaired_by_what_the_other_side_has(at, tmp_path):
    mine, theirs = at("mine"), at("theirs")
    version = mine.publish(contents(tmp_path))
    assert theirs.serving.default == 1
    here, there = (tmp_path / folder / "blobs" / version.dense for folder in ("theirs", "bucket/r1"))
    whole = here.read_bytes()
    here.write_bytes(b"x" * len(whole))
    at("theirs").locate_files(version)
    assert here.read_bytes() == whole
    there.write_bytes(whole[:9])
    mine.publish(contents(tmp_path, rows=[3], step=2), base=1)
    assert there.read_bytes() == whole


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


def test_two_hosts_that_publish_at_once_get_two_versions(at, tmp_path):
    mine, theirs = at("mine"), at("theirs")
    mine.publish(contents(tmp_path))
    between = contents(tmp_path, rows=[3], step=2, weight=5.0)
    before_write(theirs, "versions/", lambda: mine.publish(between, base=1))
    version = theirs.publish(contents(tmp_path, rows=[7], step=3, weight=9.0), base=1)
    for host in (mine, theirs, at("late")):
        assert [host.read_version(number).source["step"] for number in host.list_versions()] == [1, 2, 3]
        assert (version.number, host.serving.default) == (3, 3)
        assert same_rows(host, 3, [7])


def test_a_rollback_on_another_host_is_not_overwritten_by_a_change_that_began_before_it(at, tmp_path):
    mine, theirs = at("mine"), at("theirs")
    mine.publish(contents(tmp_path))
    mine.publish(contents(tmp_path, rows=[3], step=2), base=1)
    before_write(mine, "serving.json", lambda: theirs.rollback())
    mine.withdraw({"17"})
    for serving in (mine.serving, theirs.serving, at("late").serving):
        assert (serving.default, serving.refused, serving.withdrawn) == (1, (2,), ("17",))


def test_states_that_follow_each_other_have_different_turns_whoever_wrote_them(at, tmp_path):
    """A server that has seen one of two equal turns would not notice the other."""
    mine, theirs, server = at("mine"), at("theirs"), at("server")
    mine.publish(contents(tmp_path))
    mine.publish(contents(tmp_path, rows=[3], step=2), base=1)
    turns = [server.announced.turn]

    def withdraw():
        theirs.withdraw({"1009"})
        turns.append(server.announced.turn)

    before_write(mine, "serving.json", withdraw)
    mine.rollback()
    turns.append(server.announced.turn)
    assert turns == [2, 3, 4]


def test_a_version_whose_base_another_host_rolls_back_meanwhile_is_not_served(at, tmp_path):
    mine, theirs = at("mine"), at("theirs")
    mine.publish(contents(tmp_path))
    mine.publish(contents(tmp_path, rows=[3], step=2), base=1)
    before_write(theirs, "serving.json", lambda: mine.rollback())
    with pytest.raises(StaleVersion, match="version 2 was rolled back"):
        theirs.publish(contents(tmp_path, rows=[3, 4], step=3), base=2)
    assert mine.serving.default == 1
    with pytest.raises(ConfigError, match="made from one that was"):
        mine.promote(3)


def fails_after(registry, name):
    """Let the next write of a file at the address be made, and its answer be lost."""
    write, failures = registry._replace_remote, [1]

    def write_and_fail(written_name, content, old):
        write(written_name, content, old)
        if written_name.startswith(name) and failures:
            failures.pop()
            raise CheckpointError("connection reset")

    registry._replace_remote = write_and_fail


def test_a_rollback_whose_answer_is_lost_goes_back_once(at, tmp_path):
    mine = at("mine")
    mine.publish(contents(tmp_path))
    for number in (1, 2):
        mine.publish(contents(tmp_path, rows=[number], step=1 + number), base=number)
    fails_after(mine, "serving.json")
    assert mine.rollback().default == 2
    assert (at("late").serving.default, mine.serving.refused) == (2, (3,))


def test_a_change_whose_answer_is_lost_is_known_though_another_host_has_changed_more(at, tmp_path):
    mine, theirs = at("mine"), at("theirs")
    mine.publish(contents(tmp_path))
    for number in (1, 2):
        mine.publish(contents(tmp_path, rows=[number], step=1 + number), base=number)
    write = mine._replace_remote

    def write_and_fail(name, content, old):
        write(name, content, old)
        mine._replace_remote = write
        theirs.withdraw({"17"})
        raise CheckpointError("connection reset")

    mine._replace_remote = write_and_fail
    mine.rollback()
    serving = at("late").serving
    assert (serving.default, serving.withdrawn) == (2, ("17",)), "it did not go back twice"


def test_a_version_whose_answer_is_lost_is_published_once(at, tmp_path):
    mine = at("mine")
    fails_after(mine, "versions/")
    assert mine.publish(contents(tmp_path)).number == 1
    assert at("late").list_versions() == [1]


def test_a_change_that_does_not_reach_the_address_changes_nothing_here(at, tmp_path):
    mine = at("mine")
    mine.publish(contents(tmp_path))
    mine.publish(contents(tmp_path, rows=[1], step=2), base=1)

    def fail(name, content, old):
        raise CheckpointError("the network went away")

    write, mine._replace_remote = mine._replace_remote, fail
    with pytest.raises(CheckpointError):
        mine.rollback()
    assert VersionRegistry(tmp_path / "mine").serving.default == 2
    with pytest.raises(CheckpointError):
        mine.publish(contents(tmp_path, rows=[2], weight=3.0, step=3), base=2)
    local = VersionRegistry(tmp_path / "mine")
    assert (local.serving.default, local.serving.refused, local.list_versions()) == (2, (), [1, 2])
    mine._replace_remote = write
    assert mine.publish(contents(tmp_path, rows=[2], weight=3.0, step=3), base=2).number == 3


def test_a_change_starts_from_the_newest_state_however_recently_it_was_read(tmp_path):
    address = f"file://{tmp_path}/bucket"
    mine, theirs = (RemoteRegistry(tmp_path / host, address, max_age_s=3600) for host in ("a", "b"))
    mine.publish(contents(tmp_path))
    assert theirs.serving.default == 1
    mine.publish(contents(tmp_path, rows=[1], step=2), base=1)
    assert theirs.rollback().default == 1, "the rollback is one of version 2"
    assert theirs.serving.refused == (2,)


def test_damaged_manifests_there_stop_nobody(at, tmp_path):
    mine = at("mine")
    mine.publish(contents(tmp_path))
    mine.publish(contents(tmp_path, rows=[3], step=2), base=1)
    place = tmp_path / "bucket" / "r1" / "versions" / "000003.json"
    place.write_bytes((place.parent / "000002.json").read_bytes()[:40])
    late = at("late")
    assert late.serving.default == 2
    with pytest.raises(CheckpointError, match=r"versions/000003.json is damaged"):
        late.read_version(3)
    assert late.publish(contents(tmp_path, rows=[4], step=4), base=2).number == 4
    assert mine.serving.default == 4


def test_a_manifest_that_was_damaged_there_is_read_once_it_is_whole(at, tmp_path):
    mine, theirs = at("mine"), at("theirs")
    mine.publish(contents(tmp_path))
    assert theirs.serving.default == 1
    mine.publish(contents(tmp_path, rows=[3], step=2), base=1)
    place = tmp_path / "bucket" / "r1" / "versions" / "000002.json"
    whole = place.read_bytes()
    place.write_bytes(whole[:40])
    with pytest.raises(CheckpointError, match="000002"):
        _ = theirs.serving
    place.write_bytes(whole)
    assert theirs.serving.default == 2
    assert theirs.read_version(2).source["step"] == 2


def test_a_lost_file_of_an_old_version_does_not_stop_the_next_one(at, tmp_path):
    mine = at("mine")
    first = mine.publish(contents(tmp_path))
    for number in range(1, 4):
        mine.publish(
            contents(tmp_path, item=layer([], seed=number), step=number + 1, weight=2.0 + number), base=number
        )
    (tmp_path / "bucket" / "r1" / "blobs" / first.dense).unlink()
    late = at("late")
    fifth = late.publish(contents(tmp_path, item=layer([1], seed=3), step=5, weight=9.0), base=4)
    assert (fifth.number, fifth.kind) == (5, "delta")
    assert not (tmp_path / "late" / "blobs" / first.rows["item"]["row"]).exists(), "nobody has used it"


def test_a_version_whose_base_has_lost_its_rows_is_written_whole(at, tmp_path):
    mine = at("mine")
    first = mine.publish(contents(tmp_path))
    (tmp_path / "bucket" / "r1" / "blobs" / first.rows["item"]["row"]).unlink()
    late = at("late")
    second = late.publish(contents(tmp_path, rows=[4], step=2), base=1)
    assert (second.kind, second.base) == ("full", 1)
    assert same_rows(late, 2, [4])


def test_processes_of_one_host_that_read_at_once_do_not_disturb_each_other(at, tmp_path):
    at("publisher").publish(contents(tmp_path))
    server, command = at("host"), at("host")
    download = server._download

    def download_while_another_reads(number):
        assert command.serving.default == 1
        download(number)

    server._download = download_while_another_reads
    assert server.serving.default == 1


def test_processes_of_one_host_change_an_address_one_after_the_other(at, monkeypatch):
    server, command = at("host"), at("host")
    monkeypatch.setattr(registry_module, "_CHANGE_WAIT_S", 0.1)
    with server._lock(), pytest.raises(DeadlineExceeded, match=r"\.lock"):
        command.withdraw({"1"})
    assert command.withdraw({"2"}).withdrawn == server.serving.withdrawn == ("2",)


RUNS = [{"run": "feed", "data": "d", "start": start} for start in ("one", "two", "")]


def test_an_address_and_a_folder_belong_to_one_run(at, tmp_path):
    address = f"file://{tmp_path}/bucket/r1"
    (first, second, early) = RUNS
    RemoteRegistry(tmp_path / "a", address, owner=first).publish(contents(tmp_path))
    with pytest.raises(ConfigError, match=r"file://.* has the versions of another run \('feed'\)"):
        _ = RemoteRegistry(tmp_path / "b", address, owner=second).serving
    with pytest.raises(ConfigError, match="has the versions of another run"):
        VersionRegistry(tmp_path / "a", second)
    with pytest.raises(ConfigError, match="has the versions of another run"):
        VersionRegistry(tmp_path / "a", {**early, "data": "others"})
    assert RemoteRegistry(tmp_path / "c", address, owner=early).serving.default == 1
    assert RemoteRegistry(tmp_path / "d", address, owner={**first, "run": "a copy"}).serving.default == 1
    at("unknown").withdraw({"1"})  # who does not know its run is not asked


def test_a_registry_of_an_older_version_belongs_to_the_run_that_changes_it_next(at, tmp_path):
    at("old").publish(contents(tmp_path))
    address = f"file://{tmp_path}/bucket/r1"
    assert RemoteRegistry(tmp_path / "a", address, owner=RUNS[0]).serving.default == 1
    RemoteRegistry(tmp_path / "b", address, owner=RUNS[1]).withdraw({"1"})
    with pytest.raises(ConfigError, match="has the versions of another run"):
        _ = RemoteRegistry(tmp_path / "c", address, owner=RUNS[0]).serving


def test_a_damaged_file_of_the_owner_is_named(tmp_path):
    VersionRegistry(tmp_path, RUNS[0]).publish(contents(tmp_path))
    (tmp_path / "run.json").write_text("[]")
    with pytest.raises(
        CheckpointError, match=r"run.json does not say .* remove it if they are those of feed"
    ):
        VersionRegistry(tmp_path, RUNS[0])


@pytest.mark.parametrize(
    "address",
    [
        "s3://ID:HIDDEN@bucket/r",
        "s3://ID:HIDD/EN@bucket/r",
        "s3://HIDDEN@bucket/r",
        "hdfs://me:HIDDEN@bucket/r",
    ],
)
def test_an_address_with_a_password_is_refused_and_not_told(tmp_path, address):
    with pytest.raises(ConfigError, match=r"a password stands in the address \w+://bucket/r;") as error:
        open_registry(tmp_path, address)
    assert "HIDD" not in str(error.value)
    (tmp_path / "registry.uri").write_text(address)
    with pytest.raises(ConfigError, match="a password stands in the address"):
        open_registry(tmp_path)


@pytest.mark.parametrize(
    "address",
    ["s3://bucket/a@b", "abfss://box@me.dfs.core.windows.net/r", "hdfs://me@host:8020/r", "s3://bucket"],
)
def test_an_at_sign_is_no_password(address):
    check_address(address)


@pytest.mark.parametrize("name", ["serving.json", "versions/000001.json"])
def test_a_file_at_the_address_that_is_far_too_large_is_not_read(at, tmp_path, name):
    at("mine").publish(contents(tmp_path))
    with (tmp_path / "bucket/r1" / name).open("r+b") as file:
        file.truncate(20 << 30)
    with pytest.raises(CheckpointError, match=rf"{name} has 21,474,836,480 bytes, of at most"):
        at("theirs")._read_remote(name)
