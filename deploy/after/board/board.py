"""`nonet board`: run the entries of a board, one seed after the other, and write their results after each run."""

from __future__ import annotations

import hashlib
import json
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from nonet.atomic import make_folder, read_json, refuse_damage, write_whole
from nonet.controller.record import RunFolder, check_no_storage, create_run, lock_run
from nonet.controller.scenario import find_scenario, read_chain
from nonet.controller.setup import find_files_beside
from nonet.deploy.after import check_comparable, check_seeds, combine_seeds, get_seed_dir, run_seed
from nonet.deploy.after.board.entries import METRICS, BoardEntry, parse_entries
from nonet.deploy.after.board.page import format_markdown, format_summary, render_board
from nonet.deploy.after.board.results import collect_entry, compare_small_sets
from nonet.deploy.run import api
from nonet.errors import ConfigError, NonetError
from nonet.options import StrictModel
from nonet.plugins import parse_file
from nonet.run_code import list_references
from nonet.trust import approve_content, is_approved_content

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
    folder = create_run("board").path if run_dir is None else run_dir.absolute()
    end_s = time.monotonic() + (float("inf") if budget_s is None else budget_s)
    is_new_folder = not folder.exists()
    if folder.is_file():
        raise ConfigError(f"--run-dir {folder} is a file")
    make_folder(folder)
    with lock_run(RunFolder(folder)):
        board = read_board(folder)
        with _remove_unless_begun(folder, board, is_new_folder):
            _refuse_links(folder)
            entries = _add_entries(data, protocols, seeds, board, folder, say)
            if command not in board["commands"] and (data or seeds or not board["commands"]):
                board["commands"].append(command)
            _write_board(folder, board)
        is_complete = _run_entries(entries, board, folder, end_s, say)
    return folder, board, is_complete


def _add_entries(
    data: Sequence[str],
    protocols: Sequence[str],
    seeds: Sequence[int],
    board: dict[str, Any],
    folder: Path,
    say: Callable[[str], None],
) -> list[BoardEntry]:
    """Add data sets and seeds to a board, and check what is new; return all entries.

    Raises:
        ConfigError: The input is wrong, a new scenario ranks no items, or somebody else has written the board.
    """
    if not board["entries"]:
        # A board that is killed while it imports its first tables continues.
        _write_board(folder, board)
    known = [BoardEntry(**entry) for entry in board["entries"]]
    for entry in known:
        _check_code(entry, board, folder)
    entries, notes = parse_entries(data, protocols, folder, known)
    if not entries:
        raise ConfigError(
            "--data is missing; name data sets or scenarios, such as --data quickstart,beauty=DIR"
        )
    for note in notes:
        say(f"note: {note}")
    board["entries"] = [entry.model_dump() for entry in entries]
    board["seeds"] = list(dict.fromkeys([*board["seeds"], *seeds])) or [1]
    for entry in entries[len(known) :]:
        scenario = api.scenario(*_get_recipe(entry, board, folder)).scenario
        check_comparable(scenario)
        check_no_storage(scenario.storage and scenario.storage.url, "board")
        approve_content(_describe_code(entry, board, folder))
    return entries


def _get_recipe(entry: BoardEntry, board: Mapping[str, Any], folder: Path) -> tuple[str, list[str]]:
    """Return the scenario that an entry runs, and changes of its keys, such as the options that its first seed chose."""
    source, changes = entry.get_recipe(folder)
    return source, changes + (_list_baseline_changes(entry, board["seeds"], folder) if board["seeds"] else [])


def _describe_code(entry: BoardEntry, board: Mapping[str, Any], folder: Path) -> bytes:
    """Return a text of the code of an entry's scenario in this folder: all that it names, and the files of that.

    The scenario is not loaded, which would import code.

    Raises:
        ConfigError: The scenario, or one that it extends, cannot be read.
    """
    source, changes = _get_recipe(entry, board, folder)
    scenario = read_chain(find_scenario(source), changes)
    references = sorted(list_references(scenario.document))
    named = [scenario.path.parent / file for file in map(parse_file, references) if file]
    # Python also finds modules in the folders of files that are imported.
    folders = {scenario.path.parent, *(file.parent for file in named)}
    modules = {text.partition(":")[0].replace(".", "/") for text in references}
    named += [
        folder / file
        for folder in folders
        for name in modules
        for file in (f"{name}.py", f"{name}/__init__.py")
    ]
    files = {path for file in named if file.is_file() for path in (file, *find_files_beside(file))}
    hashes = {str(path): hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(files)}
    return json.dumps([str(folder), entry.key, references, hashes]).encode()


def _check_code(entry: BoardEntry, board: Mapping[str, Any], folder: Path) -> None:
    """Check that this user has put the scenario of an entry into the board with the code that it has now.

    Anybody who can write to the folder can change the scenario, what it extends, its code, and the results that later seeds read.

    Raises:
        ConfigError: It names other code; with --trust, that is approved.
    """
    content = _describe_code(entry, board, folder)
    if not is_approved_content(content):
        raise ConfigError(
            f"{entry.key} names code that you have not put into this board on this machine, or that has changed since: read "
            f"{entry.get_recipe(folder)[0]} and the files that it names, then add --trust"
        )
    approve_content(content)


def _refuse_links(folder: Path) -> None:
    """Raise ConfigError if a link in a board's folder would let the board write elsewhere."""
    for path in folder.rglob("*"):
        if path.is_symlink():
            raise ConfigError(f"{path} is a link; a board writes into its folder only, so remove the link")


@contextmanager
def _remove_unless_begun(folder: Path, board: Mapping[str, Any], is_new_folder: bool) -> Iterator[None]:
    """Delete what an error in the `with` block leaves in the folder of a board that had no entries before.

    Args:
        folder: The board's folder.
        board: The board.
        is_new_folder: Whether this command has made the folder.
    """
    is_new_board, known = not board["entries"], {*folder.iterdir()}
    try:
        yield
    except BaseException:
        if is_new_board and is_new_folder:
            shutil.rmtree(folder)
        elif is_new_board:
            for path in {*folder.iterdir()} - known:
                shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
        raise


class _Board(StrictModel):
    """The content of board.json.

    Attributes:
        entries: The entries.
        seeds: The seeds, in the order in which they run.
        commands: The commands that made or extended the board.
        results: The results of the finished runs of each entry by its key (`collect_entry`).
        failed: The reason of the failure of each run that failed, by the entry's key and the seed.
        together: The comparison of all small sets (`compare_small_sets`).
    """

    entries: list[BoardEntry] = []
    seeds: list[int] = []
    commands: list[str] = []
    results: dict[str, dict[str, Any]] = {}
    failed: dict[str, str] = {}
    together: dict[str, Any] = {}


def read_board(folder: Path) -> dict[str, Any]:
    """Return the board of a folder as JSON, or an empty one if the folder is empty.

    Raises:
        ConfigError: The folder has other files, or board.json is damaged.
    """
    file = folder / _FILE
    if not file.exists():
        if [path for path in folder.iterdir() if not path.name.startswith(".")]:
            raise ConfigError(f"{folder} has no board; choose an empty or a new folder for --run-dir")
        return _Board().model_dump()
    with refuse_damage(file):
        return _Board.model_validate(read_json(file)).model_dump()


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
            run_name, is_finished, is_stopped, problem = f"{entry.key}, seed {seed}", False, False, ""
            try:
                is_finished = _run_entry(entry, seed, board, folder, end_s, say)
            except _BoardStopped:
                is_stopped = True
            except NonetError as error:
                problem = " ".join(str(error).split())
            try:
                _update_results(entry, board, folder)
            except NonetError as error:
                problem = problem or " ".join(str(error).split())
            if problem:
                say(f"{run_name} failed: {problem}")
                board["failed"][run_name] = problem
            elif is_finished:
                board["failed"].pop(run_name, None)
            _write_board(folder, board)
            if is_stopped:
                return False
            is_complete &= is_finished and not problem
    return is_complete


def _update_results(entry: BoardEntry, board: dict[str, Any], folder: Path) -> None:
    """Put the results of the finished runs of an entry into the board.

    Raises:
        ConfigError: A result is damaged, or the runs differ in more than the seed.
    """
    seeds = [seed for seed in board["seeds"] if _is_finished(folder, entry, seed)]
    if seeds and board["results"].get(entry.key, {}).get("seeds") != seeds:
        pooled = combine_seeds(seeds, folder / entry.key, lambda *_: False)
        assert pooled is not None  # all these runs are finished
        runs = [_get_run(folder, entry, seed) for seed in seeds]
        board["results"][entry.key] = collect_entry(entry, folder, pooled, runs)
        board["together"] = compare_small_sets(board["results"], folder, METRICS)


def _run_entry(
    entry: BoardEntry,
    seed: int,
    board: dict[str, Any],
    folder: Path,
    end_s: float,
    say: Callable[[str], None],
) -> bool:
    """Run an entry with a seed unless that run is finished; return whether it is then.

    Raises:
        NonetError: The run failed.
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
    _refuse_links(folder)
    source, changes = _get_recipe(entry, board, folder)
    path = _get_run(folder, entry, seed).path
    _check_code(entry, board, folder)
    if not run_seed(source, changes, seed, path, board["commands"][-1]):
        raise _BoardStopped
    return True


def _list_baseline_changes(entry: BoardEntry, seeds: Sequence[int], folder: Path) -> list[str]:
    """Return the changes of an entry's scenario: the options of baselines that its first seed chose, if that has finished."""
    run = _get_run(folder, entry, seeds[0])
    with refuse_damage(run.report):
        report = run.read_json("report.json") or {}
        chosen = {
            name: dict(facts.get("options") or {}) for name, facts in (report.get("trained") or {}).items()
        }
    if not any(chosen.values()):
        return []
    baselines = [
        {**options, **config, "trials": 1} if (options := chosen.get(config["use"])) else config
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
    """Format a board for a terminal: its summary, the runs that are missing, and its files.

    Raises:
        ConfigError: The results in the board are damaged.
    """
    with refuse_damage(folder / _FILE):
        summary = format_summary(board)
    return f"{summary}\n\nreport     {folder / 'report.html'}\nmarkdown   {folder / 'board.md'}"
