"""Files that are only appended to are stored in parts."""

from __future__ import annotations

import pytest

from nonet.storage import RunWriter
from nonet.storage.run_tree import FilePart
from tests.storage.run_steps import CopyMaker, ViewMaker, write


def test_a_growing_file_is_uploaded_in_few_parts_and_read_whole(make_copy: CopyMaker, make_view: ViewMaker):
    copy = make_copy("a")
    writer = RunWriter(copy)
    with (copy.path / "journal.jsonl").open("w") as journal:
        for number in range(100):
            journal.write(f"line {number}\n")
            journal.flush()
            writer.commit()
        journal.write("half a li")
        journal.flush()
        writer.commit()
    entry = copy.get_tree().files["journal.jsonl"]
    assert 1 < len(entry.parts) < 12
    view = make_view("b")
    assert (view.path / "journal.jsonl").read_text() == "".join(f"line {n}\n" for n in range(100))
    writer.close()


def test_a_truncated_journal_replaces_the_longer_one_also_after_it_has_grown_again(
    make_copy: CopyMaker, make_view: ViewMaker
):
    copy = make_copy("a")
    writer = RunWriter(copy)
    journal = write(copy, "journal.jsonl", "1\n2\n3\n")
    writer.commit()
    journal.unlink()  # the next file may have the same inode
    write(copy, "journal.jsonl", "1\n4\n5\n6\n")
    writer.close()
    assert (make_view("b").path / "journal.jsonl").read_text() == "1\n4\n5\n6\n"


def test_parts_of_a_growing_file_are_no_larger_than_an_object(
    make_copy: CopyMaker, make_view: ViewMaker, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("nonet.storage.run_tree.PART_BYTES", 1000)
    copy = make_copy("a")
    writer = RunWriter(copy)
    lines = [f"{number:098}\n" for number in range(120)]
    stored: list[list[FilePart]] = []
    for begin in range(0, 120, 30):
        with (copy.path / "metrics.jsonl").open("a") as file:
            file.writelines(lines[begin : begin + 30])
        writer.commit()
        stored.append(list(copy.get_tree().files["metrics.jsonl"].parts))
    writer.close()
    parts = stored[-1]
    assert all(part.size <= 1000 for part in parts)
    assert sum(part.size for part in parts) == 120 * 99
    assert parts[:3] == stored[0]  # not uploaded again
    assert (make_view("b").path / "metrics.jsonl").read_text() == "".join(lines)
