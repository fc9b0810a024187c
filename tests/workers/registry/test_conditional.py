"""Small files at an address are written only if no other host was first: in S3, in folders, and by one host elsewhere."""

from __future__ import annotations

import fsspec
import pyarrow.fs as pafs
import pytest
from registry_world import before_write, contents, layer

from nonet.errors import ConfigError, StorageConflict
from nonet.workers.registry import RemoteRegistry, conditional
from nonet.workers.registry.conditional import LockedFiles, MarkedFiles, ObjectFiles
from tests.s3 import BUCKET, serve_s3


class MemoryStorage:
    """Files in memory, which are read and written whole."""

    def __init__(self):
        self.files = {}

    def read(self, name):
        return self.files.get(name)

    def write(self, name, content):
        self.files[name] = content


def test_a_file_of_a_folder_is_replaced_only_if_it_is_as_it_was(tmp_path):
    files = LockedFiles(tmp_path)
    files.replace("versions/1.json", b"1", None)
    for old in (None, b"0"):
        with pytest.raises(StorageConflict, match="another process"):
            files.replace("versions/1.json", b"2", old)
    files.replace("versions/1.json", b"2", b"1")
    assert (tmp_path / "versions" / "1.json").read_bytes() == b"2"
    with pytest.raises(StorageConflict):
        files.replace("versions/2.json", b"2", b"1")


def test_without_conditional_writes_the_first_host_alone_writes(tmp_path):
    memory = MemoryStorage()
    for host in "ab":
        (tmp_path / host).mkdir()
    first, second = (MarkedFiles(memory, "gs://bucket", tmp_path / host) for host in "ab")
    first.replace("serving.json", b"1", None)
    with pytest.raises(ConfigError, match=r"gs://bucket is written by .* remove gs://bucket/writer.json"):
        second.replace("serving.json", b"2", b"1")
    MarkedFiles(memory, "gs://bucket", tmp_path / "a").replace("serving.json", b"2", b"1")  # after a restart
    with pytest.raises(StorageConflict):
        first.replace("serving.json", b"3", b"1")
    del memory.files["writer.json"]
    second.replace("serving.json", b"3", b"2")
    memory.files["writer.json"] = b"{"
    with pytest.raises(ConfigError, match="an unknown host"):
        second.replace("serving.json", b"4", b"3")


def test_a_copy_of_the_folder_on_another_host_is_not_the_writer(tmp_path, monkeypatch):
    memory = MemoryStorage()
    MarkedFiles(memory, "gs://bucket", tmp_path).replace("serving.json", b"1", None)
    monkeypatch.setattr(conditional.socket, "gethostname", lambda: "another")
    with pytest.raises(ConfigError, match="no other host may publish"):
        MarkedFiles(memory, "gs://bucket", tmp_path).replace("serving.json", b"2", b"1")
    assert memory.files["serving.json"] == b"1"


def test_a_host_whose_mark_another_one_replaced_at_the_same_moment_is_told(tmp_path):
    memory = MemoryStorage()
    for host in "ab":
        (tmp_path / host).mkdir()
    first, second = (MarkedFiles(memory, "gs://bucket", tmp_path / host) for host in "ab")
    write = memory.write

    def write_after_another(name, content):
        if name == "serving.json":
            memory.write = write
            del memory.files["writer.json"]  # the other host looked before there was one
            second.replace(name, b"2", None)
        write(name, content)

    memory.write = write_after_another
    with pytest.raises(ConfigError, match="is written by"):
        first.replace("serving.json", b"1", None)


def test_a_second_host_may_read_what_only_one_may_write(tmp_path):
    class Elsewhere(pafs.FSSpecHandler):
        def get_type_name(self):
            return "elsewhere"

    system = pafs.PyFileSystem(Elsewhere(fsspec.filesystem("file")))
    place = str(tmp_path / "bucket")
    mine, theirs = (RemoteRegistry(tmp_path / host, place, system, max_age_s=0) for host in "ab")
    mine.publish(contents(tmp_path))
    assert theirs.serving.default == 1
    for change in (
        lambda: theirs.withdraw({"1"}),
        lambda: theirs.publish(contents(tmp_path, step=2), base=1),
    ):
        with pytest.raises(ConfigError, match="no other host may publish, promote, roll back or withdraw"):
            change()
    assert (mine.serving.withdrawn, mine.list_versions()) == ((), [1])
    assert mine.withdraw({"2"}).withdrawn == ("2",)


def test_two_hosts_share_a_registry_in_s3(tmp_path):
    with serve_s3():
        address = f"{BUCKET}/movies"
        mine, theirs = (RemoteRegistry(tmp_path / host, address, max_age_s=0) for host in "ab")
        mine.publish(contents(tmp_path))
        between = contents(tmp_path, rows=[3], step=2, weight=5.0)
        before_write(theirs, "versions/", lambda: mine.publish(between, base=1))
        third = theirs.publish(contents(tmp_path, rows=[7], step=3, weight=9.0), base=1)
        assert isinstance(theirs._files, ObjectFiles)
        before_write(mine, "serving.json", lambda: theirs.rollback())
        mine.withdraw({"17"})
        serving = RemoteRegistry(tmp_path / "late", address).serving
        assert third.number == 3
        assert (serving.default, serving.refused, serving.withdrawn) == (1, (3,), ("17",))
        assert mine.map_layers(3)["item"][-1].key.size == 1
        assert [mine.read_version(number).source["step"] for number in mine.list_versions()] == [1, 2, 3]
        assert layer([]).key.size == mine.map_layers(1)["item"][0].key.size
