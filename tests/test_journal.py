"""Journals of lines: torn lines, sealed segments, retention, several processes, and what a power loss leaves."""

from __future__ import annotations

import os
import time
from functools import partial
from pathlib import Path

import pytest
from losing_disk import MODES, LosingDisk

from nonet import journal
from nonet.errors import ConfigError, DeadlineExceeded, NonetError
from nonet.journal import JournalOptions, LineJournal
from tests.journal_world import DAY_S, World

SCHEDULES = 200


@pytest.mark.parametrize("retention_days", [None, 1.0])
def test_processes_that_are_killed_and_suspended_anywhere_lose_no_line(tmp_path, monkeypatch, retention_days):
    for seed in range(SCHEDULES):
        with monkeypatch.context() as patch:
            world = World(tmp_path / str(seed) / "events.jsonl", seed, retention_days=retention_days)
            world.install(patch)
            for number in range(world.draw.choice([2, 3, 4])):
                world.start(partial(world.append_lines, f"w{number}", 6))
            for _ in range(6):
                world.start(world.read, latest_start=300)
            world.run()
            world.faults = False
            if retention_days is not None:
                world.now_s += world.draw.choice([0.0, 0.5, 2.0]) * DAY_S
            world.append_lines("last", 1)
            world.read()
            world.check()


def read(path: Path, options: JournalOptions | None = None) -> list[bytes]:
    return [line for _, line in LineJournal(path, options, read_only=True).iterate_lines()]


def test_what_a_killed_process_leaves_of_a_line_is_removed_before_another_that_has_it_open_appends(tmp_path):
    path = tmp_path / "events.jsonl"
    opened = LineJournal(path, JournalOptions())
    for n, torn in enumerate([b"t", b"torn" * 40_000]):  # shorter and longer than what is read at once
        opened.append(b"whole %d" % n)
        path.write_bytes(path.read_bytes() + torn)
    opened.append(b"acknowledged")
    assert read(path) == [b"whole 0", b"whole 1", b"acknowledged"]
    assert opened.cut_bytes == 160_001
    path.write_bytes(b"torn from the first byte on")
    opened.append(b"again")
    assert path.read_bytes() == b"again\n"


def test_a_reader_beside_a_process_that_seals_misses_no_line_and_reads_none_twice(tmp_path, monkeypatch):
    path, options = tmp_path / "events.jsonl", JournalOptions(segment_bytes=20)
    opened, scan = LineJournal(path, options), LineJournal._scan_sealed_segments
    for number in range(5):
        opened.append(b"line %d" % number)
    numbers = iter(range(5, 11))

    def seal_meanwhile(this: LineJournal):
        with monkeypatch.context() as patch:
            patch.setattr(LineJournal, "_scan_sealed_segments", scan)
            before = scan(this)
            for _, number in zip(range(3), numbers, strict=False):
                opened.append(b"line %d" % number)
            return before

    reader = LineJournal(path, options, read_only=True)
    monkeypatch.setattr(LineJournal, "_scan_sealed_segments", seal_meanwhile)
    lines = [line for _, line in reader.iterate_lines()]
    assert lines == [b"line %d" % number for number in range(len(lines))]
    assert len(lines) >= 5


def test_a_listing_with_a_gap_is_made_again(tmp_path, monkeypatch):
    """A folder that is listed while segments are renamed into it may show the second of two new names alone."""
    path, options, scan = tmp_path / "events.jsonl", JournalOptions(1), LineJournal._scan_sealed_segments
    opened, listings = LineJournal(path, options), []
    for number in range(5):
        opened.append(b"line %d" % number)

    def list_with_gap(this: LineJournal):
        listings.append(scan(this))
        found = dict(listings[-1])
        if len(listings) == 1:
            found.pop(tmp_path / "events" / "000003.jsonl")
        return found

    monkeypatch.setattr(LineJournal, "_scan_sealed_segments", list_with_gap)
    assert read(path, options) == [b"line %d" % number for number in range(5)]


def test_a_process_appends_to_the_new_segment_after_another_one_has_sealed_the_old_one(tmp_path):
    path, options = tmp_path / "events.jsonl", JournalOptions(segment_bytes=20)
    first, second = LineJournal(path, options), LineJournal(path, options)
    first.append(b"a" * 15)
    second.append(b"b" * 15)
    sealed = (tmp_path / "events" / "000001.jsonl").read_bytes()
    first.append(b"c" * 2)
    assert (tmp_path / "events" / "000001.jsonl").read_bytes() == sealed == b"a" * 15 + b"\n"
    assert path.read_bytes() == b"b" * 15 + b"\ncc\n"


def test_while_the_holder_of_the_lock_is_suspended_nothing_is_appended_and_readers_do_not_wait(
    tmp_path, monkeypatch
):
    path, options = tmp_path / "events.jsonl", JournalOptions()
    suspended, other = LineJournal(path, options), LineJournal(path, options)
    other.append(b"before")
    waits: list[float] = []
    monkeypatch.setattr(journal, "_LOCK_PATIENCE_S", 0.5)
    monkeypatch.setattr(journal, "_STUCK_LOCK_PATIENCE_S", 0.0)
    with suspended._hold_lock():
        with pytest.raises(
            DeadlineExceeded, match=r"another process .* nothing was stored; it may be suspended"
        ):
            other.append(b"meanwhile")
        with monkeypatch.context() as patch:
            patch.setattr(time, "sleep", waits.append)
            with pytest.raises(DeadlineExceeded):
                other.append(b"later, which does not wait again")
        with pytest.raises(DeadlineExceeded):
            LineJournal(path, options)
        assert read(path) == [b"before"]
    assert len(waits) < 5
    other.append(b"after")
    assert read(path) == [b"before", b"after"]


def test_a_full_disk_of_a_journal_that_is_not_durable_leaves_it_as_it_was(tmp_path, monkeypatch):
    path = tmp_path / "metrics.jsonl"
    opened = LineJournal(path, durable=False)
    opened.append(b"1", b"2")
    real = os.write

    def write_some(file: int, content: bytes) -> int:
        if len(content) > 3:
            return real(file, bytes(content)[:3])
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as full:
        full.setattr(os, "write", write_some)
        with pytest.raises(journal.StorageFull, match=r"is full .* nothing was stored; free some space"):
            opened.append(b"3", b"4", b"5")
    assert path.read_bytes() == b"1\n2\n"


# --- retention ------------------------------------------------------------------------------------------------------


def test_lines_of_a_journal_that_never_fills_a_segment_are_deleted_by_their_age(tmp_path):
    path, options = tmp_path / "events.jsonl", JournalOptions(retention_days=30)
    LineJournal(path, options).append(b"old")
    assert read(path, options) == [b"old"]
    long_ago = time.time() - 400 * DAY_S
    os.utime(path, (long_ago, long_ago))
    opened = LineJournal(path, options)
    assert (read(path, options), opened.dropped_segments) == ([], 1)
    opened.append(b"new")
    assert read(path, options) == [b"new"]


def test_a_line_a_day_is_deleted_at_most_a_tenth_of_the_retention_late(tmp_path, monkeypatch):
    """One process appends for a year, and one that only looks deletes the rest."""
    path, options = tmp_path / "events.jsonl", JournalOptions(retention_days=30)
    start_s = time.time() - 500 * DAY_S
    monkeypatch.setattr(time, "time", lambda: start_s)
    opened = LineJournal(path, options)
    for day in range(365):
        now_s = start_s + day * DAY_S
        monkeypatch.setattr(time, "time", lambda now_s=now_s: now_s)
        opened.append(b"%d" % day)
        os.utime(path, (now_s, now_s))
        days = [int(line) for line in read(path, options)]
        assert days == list(range(days[0], day + 1))
        assert day - 33 <= days[0] <= max(0, day - 30)
        assert len(opened.list_sealed_segments()) <= 12
    monkeypatch.setattr(time, "time", lambda: start_s + 398 * DAY_S)
    opened.delete_old_segments()
    assert read(path, options) == []


def test_a_torn_line_makes_old_lines_no_younger(tmp_path):
    path, options = tmp_path / "events.jsonl", JournalOptions(retention_days=30)
    opened = LineJournal(path, options)
    opened.append(b"old")
    path.write_bytes(b"old\ntor")
    long_ago = time.time() - 31 * DAY_S
    os.utime(path, (long_ago, long_ago))
    opened.delete_old_segments()
    assert read(path, options) == []


# --- journals of one segment, and other filesystems -------------------------------------------------------------------


def test_a_journal_of_one_segment_that_was_replaced_is_left_alone(tmp_path):
    path = tmp_path / "journal.jsonl"
    opened = LineJournal(path)
    opened.append(b"1")
    path.unlink()
    with pytest.raises(NonetError, match="was removed or replaced while this process had it open"):
        opened.append(b"2")
    assert not path.exists()
    path.write_bytes(b"of another\n")
    with pytest.raises(NonetError, match="was removed or replaced"):
        opened.append(b"3")
    assert path.read_bytes() == b"of another\n"


def test_without_locks_a_run_works_and_a_journal_of_several_processes_is_refused(tmp_path, monkeypatch):
    def refuse(*_: object) -> None:
        raise OSError(37, "No locks available")

    monkeypatch.setattr(journal.fcntl, "flock", refuse)
    with pytest.raises(OSError, match="No locks available"):
        LineJournal(tmp_path / "events.jsonl", JournalOptions())
    monkeypatch.setattr(journal.fcntl, "flock", lambda file, kind: None if kind == 8 else refuse())
    LineJournal(tmp_path / "journal.jsonl").append(b"1")
    assert read(tmp_path / "journal.jsonl") == [b"1"]


def test_a_journal_that_is_closed_or_read_only_refuses_lines(tmp_path):
    opened = LineJournal(tmp_path / "a.jsonl")
    opened.close()
    opened.close()
    for closed in (opened, LineJournal(tmp_path / "a.jsonl", read_only=True)):
        with pytest.raises(ConfigError, match="is not open for appending"):
            closed.append(b"1")


@pytest.mark.timeout(60)
@pytest.mark.parametrize("kind", ["pipe", "link"])
def test_what_stands_in_the_place_of_a_journal_is_neither_read_for_ever_nor_changed(tmp_path, kind):
    other, path = tmp_path / "mine.txt", tmp_path / "events.jsonl"
    other.write_bytes(b"a line\nand no line break")
    os.mkfifo(path) if kind == "pipe" else path.symlink_to(other)
    with pytest.raises(
        ConfigError, match=r"events\.jsonl is a link or no regular file, so nothing is appended"
    ):
        LineJournal(path)
    assert other.read_bytes() == b"a line\nand no line break"
    if kind == "pipe":
        with pytest.raises(ConfigError, match="is no regular file"):
            read(path)


# --- power losses -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES)
def test_no_acknowledged_line_is_lost_with_the_power_after_a_process_was_killed_anywhere(
    tmp_path, monkeypatch, mode
):
    """One process is killed before each call that changes the disk, another goes on, and then the power fails."""
    options = JournalOptions(segment_bytes=12)
    for number in range(99):
        folder = tmp_path / str(number)
        folder.mkdir()
        disk = LosingDisk(folder, monkeypatch)
        acknowledged: list[bytes] = []
        opened: list[LineJournal] = []

        def append(lines: list[bytes], folder=folder, acknowledged=acknowledged, opened=opened) -> None:
            opened.append(LineJournal(folder / "serving" / "events.jsonl", options))
            for line in lines:
                opened[-1].append(line)
                acknowledged.append(line)

        with disk.before(number) as lost:
            append([b"line %d" % n for n in range(4)])
        for killed in opened:
            killed.close()
        append([b"line 8", b"line 9"])
        left = disk.left(mode, tmp_path / f"left{number}")
        lines = read(left / "serving" / "events.jsonl", options)
        assert set(acknowledged) <= set(lines)
        assert lines == sorted(set(lines))
        opened[-1].close()
        disk.close()
        if not lost:
            return
    raise AssertionError("the work has no end")
