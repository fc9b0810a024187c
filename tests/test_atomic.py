from __future__ import annotations

import os
import socket

import pytest

from nonet.atomic import open_file, read_json, replace_file, write_whole
from nonet.errors import ConfigError


def test_a_draft_takes_the_name_when_it_is_written_and_nothing_else_is_left(tmp_path):
    write_whole(tmp_path / "a", b"old")
    with replace_file(tmp_path / "a") as draft:
        draft.write_bytes(b"new")
        assert (tmp_path / "a").read_bytes() == b"old"
    assert [(path.name, path.read_bytes()) for path in tmp_path.iterdir()] == [("a", b"new")]


def interrupted(draft):
    draft.write_bytes(b"half")
    raise KeyboardInterrupt


def test_after_an_error_the_file_is_as_it_was_and_nothing_else_is_left(tmp_path):
    write_whole(tmp_path / "a", b"old")
    with pytest.raises(KeyboardInterrupt), replace_file(tmp_path / "a") as draft:
        interrupted(draft)
    assert [(path.name, path.read_bytes()) for path in tmp_path.iterdir()] == [("a", b"old")]


@pytest.mark.timeout(60)
@pytest.mark.parametrize("kind", ["pipe", "socket", "folder"])
def test_what_is_no_file_is_named_and_nobody_waits_for_it(tmp_path, monkeypatch, kind):
    monkeypatch.chdir(tmp_path)  # the path of a socket may not be long
    path = tmp_path / "status.json"
    with socket.socket(socket.AF_UNIX) as end:
        {"pipe": lambda: os.mkfifo(path), "socket": lambda: end.bind(path.name), "folder": path.mkdir}[kind]()
        for read in (open_file, read_json):
            with pytest.raises(ConfigError, match=r"status\.json is no regular file"):
                read(path)


@pytest.mark.parametrize("content", [b"[" * 200_000, b"{", b"\xff", b""])
def test_damaged_json_is_one_line_that_names_the_file(tmp_path, content):
    (tmp_path / "a.json").write_bytes(content)
    with pytest.raises(ConfigError, match=r"a\.json is damaged \(\w+: .*\); put it back") as caught:
        read_json(tmp_path / "a.json")
    assert "\n" not in str(caught.value)


def test_json_of_more_than_the_limit_is_refused_before_it_is_in_memory(tmp_path):
    with (tmp_path / "a.json").open("wb") as file:
        file.truncate((256 << 20) + 1)
    with pytest.raises(ConfigError, match="more than 256 MiB"):
        read_json(tmp_path / "a.json")
