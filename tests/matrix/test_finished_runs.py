"""Every verb that reads a finished run works for every kind of run, or is refused in one line."""

from __future__ import annotations

from pathlib import Path

import pytest
import typer
from cells import CHECKS, Cell, check_refused_path
from covering import ROWS
from finished import make_run
from redis_server import REDIS, RedisServer
from stranger import MODELS, Shop

from nonet.controller.record import RunFolder
from nonet.controller.scenario import find_verb_limit
from nonet.deploy.cli import app
from nonet.verbs import VERBS

PLAIN = [(kind, ("integers",) if index % 2 else ()) for index, kind in enumerate(MODELS)]
NO_FOLDER = [
    ("decoder", (variant,))
    for variant in ("two trainers", "ddp", "fsdp2", "deepspeed", "replicate", "tensor")
]
"""Runs of several processes, which this process cannot make."""
HOLES: dict[tuple[str, str], int] = {}
"""Cells that do not work yet: (verb, variant or kind; "" for all) -> the item of the plan that mends them.

A mark may only be removed: a cell that works although it is marked fails.
"""


class FinishedRuns:
    """The runs of this session, each made when it is first used.

    Args:
        root: An empty folder.
    """

    def __init__(self, root: Path):
        self._root = root
        self._servers: list[RedisServer] = []
        self._runs: dict[tuple[str, ...], tuple[Shop, RunFolder, Path] | Exception] = {}

    def open(self, kind: str, variants: tuple[str, ...]) -> tuple[Shop, RunFolder, Path]:
        """Return the shop, the folder and the scenario of a run."""
        key = (kind, *variants)
        if key not in self._runs:
            try:
                self._runs[key] = self._make(kind, variants)
            except Exception as error:
                self._runs[key] = error
        made = self._runs[key]
        if isinstance(made, Exception):
            raise made
        return made

    def close(self) -> None:
        """Stop the stores of the runs."""
        for server in self._servers:
            server.kill()

    def _make(self, kind: str, variants: tuple[str, ...]) -> tuple[Shop, RunFolder, Path]:
        """Make a run, and the one that it starts from."""
        folder = self._root / str(len(self._runs))
        folder.mkdir()
        shop = Shop(folder, "integers" not in variants)
        if "redis" in variants:
            self._servers.append(RedisServer(folder))
            shop.redis = self._servers[-1].address
        if "warm" in variants:
            earlier = tuple(variant for variant in variants if variant != "warm")
            shop.earlier_run = make_run(shop.write_scenario(kind, earlier), folder / "runs" / "earlier").path
        scenario = shop.write_scenario(kind, variants)
        return shop, make_run(scenario, folder / "runs" / scenario.stem), scenario


STARTING = {"run", "resume", "tune", "board", "submit", "tradeoff"}
"""Verbs that start a run on Ray, or go on with one."""
SERVING = {"serve", "top"}
"""Verbs of a server in a process of its own; `/recommend` and `/score` ask its app in this process."""
WITHOUT_RUNS = {
    *("bench", "doctor", "import", "new", "pack", "parity", "plan", "schema", "scenarios"),
    *(
        "cache list",
        "cache prune",
        "samples stats",
        "store get",
        "store put",
        "store stats",
        "chaos",
        "job",
        "logs",
        "manifest",
        "status",
        "why",
    ),
}
"""Verbs that take no run, or that read only its status and logs, whatever its kind, of which `test_plan_cells.py` has `plan`."""
TOGETHER = {
    "detach": "attach",
    "set": "attach",
    "scale": "stop",
    "versions": "publish",
    "promote": "publish",
    "rollback": "publish",
}
"""Verbs that the check of another verb tries too."""


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    made = FinishedRuns(tmp_path_factory.mktemp("shops"))
    yield made
    made.close()


def list_cells():
    """Yield (kind, variants, verb) of every cell, of which those of plain kinds are not slow."""
    for kind, variants in [*PLAIN, *ROWS]:
        for verb in CHECKS:
            marks = [] if (kind, variants) in PLAIN else [pytest.mark.slow]
            if "redis" in variants:
                marks.append(pytest.mark.skipif(not REDIS, reason="no redis-server"))
            yield pytest.param(kind, variants, verb, marks=marks, id=f"{'+'.join([kind, *variants])}: {verb}")


@pytest.mark.parametrize(("kind", "variants", "verb"), list(list_cells()))
def test_a_verb_works_or_is_refused_in_one_line(request, runs, kind, variants, verb, command, tmp_path):
    shop, folder, scenario = runs.open(kind, variants)
    cell = Cell(shop, folder, scenario, command, tmp_path)
    check, words = CHECKS[verb]
    declared = verb.removesuffix(" --data")
    limit = find_verb_limit(cell.scenario, declared) if declared in VERBS else None
    if limit is None:
        for name in ("", kind, *variants):
            if item := HOLES.get((verb, name)):
                request.applymarker(pytest.mark.xfail(reason=f"hole {item}", strict=True))
        check(cell)
        return
    if verb.startswith("/") and find_verb_limit(cell.scenario, "serve") is None:
        check_refused_path(cell, verb)
        return
    names = {"RUN": folder.path, "SCENARIO": scenario, "USER": shop.user_ids[0], "ITEM": shop.item_ids[0]}
    names |= {"FILE": shop.folder / "articles.parquet", "OUT": tmp_path / "out"}
    assert limit in cell.refuse(*(names.get(word, word) for word in words))
    assert not (tmp_path / "out").exists()


def list_commands(command, name=""):
    """Yield the commands of the command line, and those of their groups."""
    for word, inner in getattr(command, "commands", {}).items():
        full_name = f"{name} {word}".strip()
        if getattr(inner, "commands", None):
            yield from list_commands(inner, full_name)
        else:
            yield full_name


def test_every_verb_is_in_the_matrix():
    """A command, or a verb that kinds declare, without a place in the matrix fails here."""
    commands = set(list_commands(typer.main.get_command(app)))
    placed = {*CHECKS, *STARTING, *SERVING, *TOGETHER}
    assert commands - placed == WITHOUT_RUNS
    assert set(VERBS) - placed == {"run --seeds"}
    words = {
        " ".join(name.split()[:2]) if name.split()[0] in ("items", "reward") else name for name in placed
    }
    assert {word for word in words if word.partition(" -")[0] not in commands} == {"/recommend", "/score"}
