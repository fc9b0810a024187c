"""`nonet board`: run the entries of a board, one seed after the other, and write their results after each run."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from nonet.atomic import make_folder, read_json, write_whole
from nonet.controller.record import RunFolder, check_no_storage, create_run, lock_run
from nonet.deploy.after import check_seeds, combine_seeds, get_seed_dir, run_seed
from nonet.deploy.after.board.entries import METRICS, BoardEntry, parse_entries
from nonet.deploy.after.board.page import format_markdown, format_summary, render_board
from nonet.deploy.after.board.results import collect_entry, compare_small_sets
from nonet.deploy.run import api
from nonet.errors import ConfigError, NonetError

_FILE = "board.json"


def run_board(
    data: Sequence[str],
    protocols: Sequence[str],
    seeds: Sequence[int],
    *,
    budget_s: float | None = None,
    run_dir: Path | None = None,
    command: str = "",
    say: Callable[[str], None] = print,
) -> tuple[Path, dict[str, Any], bool]:
    """Run a board, or continue the one in `run_dir`.

    Each entry runs once per seed: all entries with the first seed, then all with the second. A run that failed is named in the
    board and does not stop the others.

    Args:
        data: Data sets and scenarios, each as [NAME=]PATH; they are added to those of the board.
        protocols: Protocols of new data sets; empty to choose one for each.
        seeds: The seeds, which are added to those of the board; empty for the board's, or 1.
        budget_s: No run starts that is expected to end later, in seconds from now; None for no limit.
        run_dir: The board's folder, by default a new one.
        command: The command line, for the board's page.
        say: Receives lines of progress.

    Returns:
        The board's folder, the board as JSON, and whether all its runs are finished.

    Raises:
        ConfigError: The input is wrong; no run was started.
    """
    if seeds:
        check_seeds(seeds)
    folder = _choose_folder(run_dir)
    end_s = time.monotonic() + (float("inf") if budget_s is None else budget_s)
    with lock_run(RunFolder(folder)), _remove_unless_begun(folder):
        board = _read_board(folder)
        known = [BoardEntry(**entry) for entry in board["entries"]]
        entries, notes = parse_entries(data, protocols, folder, known)
        if not entries:
            raise ConfigError(
                "--data is missing; name data sets or scenarios, such as --data quickstart,beauty=DIR"
            )
        for note in notes:
            say(f"note: {note}")
        board["entries"] = [entry.as_json() for entry in entries]
        board["seeds"] = list(dict.fromkeys([*board["seeds"], *seeds])) or [1]
        for entry in entries:
            scenario = api.scenario(entry.get_scenario(folder)).scenario
            check_no_storage(scenario.storage and scenario.storage.url, "board")
        if command not in board["commands"] and (data or seeds or not board["commands"]):
            board["commands"].append(command)
        _write_board(folder, board)
        is_complete = _run_entries(entries, board, folder, end_s, say)
    return folder, board, is_complete


@contextmanager
def _remove_unless_begun(folder: Path) -> Iterator[None]:
    """Delete what an error in the `with` block leaves in a folder that had no board before and has none afterwards."""
    try:
        yield
    except BaseException:
        if not (folder / _FILE).exists():
            shutil.rmtree(folder)
        raise


def _choose_folder(run_dir: Path | None) -> Path:
    """Return the board's folder. Raises ConfigError if it has files but no board."""
    folder = create_run("board").path if run_dir is None else run_dir.absolute()
    if folder.is_file() or (folder.is_dir() and any(folder.iterdir()) and not (folder / _FILE).exists()):
        raise ConfigError(f"{folder} has no board; choose an empty or a new folder for --run-dir")
    make_folder(folder)
    return folder


def _read_board(folder: Path) -> dict[str, Any]:
    """Return the board of a folder, or an empty one."""
    if (folder / _FILE).exists():
        return read_json(folder / _FILE)
    return {"entries": [], "seeds": [], "commands": [], "results": {}, "failed": {}, "together": {}}


def _write_board(folder: Path, board: Mapping[str, Any]) -> None:
    """Write the board as JSON, as Markdown and as a page."""
    write_whole(folder / _FILE, f"{json.dumps(board, indent=1)}\n".encode())
    write_whole(folder / "board.md", format_markdown(board).encode())
    write_whole(folder / "report.html", render_board(board).encode())


class _BoardStopped(Exception):
    """A run was stopped, and with it the board."""


def _run_entries(
    entries: Sequence[BoardEntry],
    board: dict[str, Any],
    folder: Path,
    end_s: float,
    say: Callable[[str], None],
) -> bool:
    """Run what is not finished and update the board after each run.

    Returns:
        Whether all runs are finished; else a run failed, the budget is spent, or a run was stopped.
    """
    is_complete = True
    for seed in board["seeds"]:
        for entry in entries:
            try:
                is_complete &= _run_entry(entry, seed, board, folder, end_s, say)
            except _BoardStopped:
                return False
            finally:
                _update_board(entry, board, folder)
    return is_complete


def _update_board(entry: BoardEntry, board: dict[str, Any], folder: Path) -> None:
    """Put the results of the finished runs of an entry into the board, and write it."""
    seeds = [seed for seed in board["seeds"] if _is_finished(folder, entry, seed)]
    if seeds and board["results"].get(entry.key, {}).get("seeds") != seeds:
        pooled = combine_seeds(seeds, folder / entry.key, lambda *_: False)
        assert pooled is not None  # all these runs are finished
        runs = [_get_run(folder, entry, seed) for seed in seeds]
        board["results"][entry.key] = collect_entry(entry, folder, pooled, runs)
        board["together"] = compare_small_sets(board["results"], folder, METRICS)
    _write_board(folder, board)


def _run_entry(
    entry: BoardEntry,
    seed: int,
    board: dict[str, Any],
    folder: Path,
    end_s: float,
    say: Callable[[str], None],
) -> bool:
    """Run an entry with a seed unless that run is finished; return whether it is then. The board gets the reason of a failure.

    Raises:
        _BoardStopped: The run was stopped.
    """
    if _is_finished(folder, entry, seed):
        return True
    first_seed = board["seeds"][0]
    if seed != first_seed and not _is_finished(folder, entry, first_seed):
        say(f"{entry.key}, seed {seed}: left out, because seed {first_seed} has not finished")
        return False
    expected_s = max(board["results"].get(entry.key, {}).get("seconds", [0.0]))
    if time.monotonic() + expected_s > end_s:
        say(f"{entry.key}, seed {seed}: left out, because the budget is spent")
        return False
    say(f"{entry.key}, seed {seed}")
    board["failed"].pop(entry.key, None)
    path = _get_run(folder, entry, seed).path
    try:
        changes = _make_changes(entry, board["seeds"], folder)
        is_finished = run_seed(entry.get_scenario(folder), changes, seed, path, board["commands"][-1])
    except NonetError as error:
        board["failed"][entry.key] = f"seed {seed}: {' '.join(str(error).split())}"
        say(f"{entry.key}, seed {seed} failed: {error}")
        return False
    if not is_finished:
        raise _BoardStopped
    return True


def _make_changes(entry: BoardEntry, seeds: Sequence[int], folder: Path) -> list[str]:
    """Return the changes of an entry's scenario: the options of baselines that its first seed chose, if that has finished."""
    report = _get_run(folder, entry, seeds[0]).read_json("report.json") or {}
    chosen = {name: facts.get("options") for name, facts in (report.get("trained") or {}).items()}
    if not any(chosen.values()):
        return []
    baselines = [
        {**config, **options, "trials": 1} if (options := chosen.get(config["use"])) else config
        for config in entry.baselines
    ]
    return [f"evaluate.baselines={json.dumps(baselines)}"]


def _get_run(folder: Path, entry: BoardEntry, seed: int) -> RunFolder:
    """Return the folder of an entry's run with a seed."""
    return RunFolder(get_seed_dir(folder / entry.key, seed))


def _is_finished(folder: Path, entry: BoardEntry, seed: int) -> bool:
    """Return whether an entry's run with a seed is finished."""
    return _get_run(folder, entry, seed).report.exists()


def format_board(board: Mapping[str, Any], folder: Path) -> str:
    """Format a board for a terminal: its summary, the runs that are missing, and its files."""
    return f"{format_summary(board)}\n\nreport     {folder / 'report.html'}\nmarkdown   {folder / 'board.md'}"
