from __future__ import annotations

import pytest

from nonet.atomic import replace_file, write_whole


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
