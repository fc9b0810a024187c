"""The documents: what they cite exists, what they show runs, and they stay short."""

from __future__ import annotations

import ast
import re
import runpy
import shlex
from collections.abc import Iterator
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import typer

from nonet import yaml
from nonet.bench.run import BENCHES
from nonet.controller.cluster import read_view
from nonet.controller.scenario import (
    LIBRARY,
    Scenario,
    list_shipped_scenarios,
    load_scenario,
    make_scenario,
)
from nonet.deploy.cli import app
from nonet.errors import ConfigError
from nonet.workers.devices import vendors

ROOT = Path(__file__).parent.parent
CODE = (
    *("attention", "embedding", "samples", "models", "rl", "workers", "controller", "deploy", "bench"),
    *("tests", "docs", "examples", "src"),
)
PAGES = sorted(
    page
    for page in (
        ROOT / "README.md",
        ROOT / "ARCHITECTURE.md",
        *(p for f in CODE for p in (ROOT / f).rglob("*.md")),
    )
    if "nonet" not in page.relative_to(ROOT).parts
)
# Its blocks are one file and one scenario, which tests/test_extend.py runs.
WHOLE = ROOT / "docs" / "how-to" / "extend.md"
COMMANDS = typer.main.get_command(app).commands  # type: ignore[attr-defined]
PATH = re.compile(rf"\b(?:{'|'.join(CODE)})/(?:[\w.-]+/)*[\w-]+\.(?:py|pyi|md|cpp|h|sh|yaml|html|svg|png)\b")
MOST_WORDS = 25


every_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))


@every_page
def test_links_lead_somewhere(page: Path):
    wrong = []
    for target in re.findall(r"\]\(([^)\s]+)\)", _prose(page)):
        if "://" in target:
            continue
        path, _, anchor = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        if not _there(file):
            wrong.append(target)
        elif anchor and file.exists() and anchor not in _anchors(file):
            wrong.append(f"{target}: no such heading")
    assert not wrong


@every_page
def test_paths_in_a_page_exist(page: Path):
    wrong = [path for path in _paths(page) if not any(_there(home / path) for home in (ROOT, page.parent))]
    assert not wrong


def test_pages_and_paths_that_code_cites_exist():
    wrong = {
        f"{file.relative_to(ROOT)}: {path}"
        for file in _code()
        for path in PATH.findall(file.read_text(encoding="utf-8"))
        if not _there(ROOT / path)
    }
    assert not wrong


def test_sections_that_are_cited_exist():
    wrong = []
    for file in (*_code(), *PAGES):
        text = " ".join(re.sub(r"^\s*(?:#|//)", " ", file.read_text(encoding="utf-8"), flags=re.M).split())
        for page, section in re.findall(r"(docs/[\w/-]+\.md), section (\d+)", text):
            headings = re.findall(r"^## (\d+)\. ", (ROOT / page).read_text(encoding="utf-8"), re.M)
            if section not in headings:
                wrong.append(f"{file.relative_to(ROOT)}: {page}, section {section}")
    assert not wrong


def test_the_sections_of_the_design_are_numbered_in_order():
    numbers = re.findall(
        r"^## (\d+)\. ", (ROOT / "docs" / "explanation" / "design.md").read_text(encoding="utf-8"), re.M
    )
    assert numbers == [str(number) for number in range(1, len(numbers) + 1)]


@every_page
def test_commands_exist(page: Path):
    wrong = [problem for command in _commands(page) for problem in _problems(command)]
    assert not wrong


@every_page
def test_python_blocks_run(page: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(vendors, "_DEVICES", dict(vendors._DEVICES))
    for tag, text in _blocks(page):
        if tag == "python" and page != WHOLE:
            _run(text, f"{page.name}: {text[:60]!r}")
        elif tag.startswith("python"):  # a part of the file in its title, which needs a run
            compile(text, str(page), "exec")


@every_page
def test_yaml_blocks_are_scenarios_or_parts_of_one(page: Path, tmp_path: Path):
    for tag, text in _blocks(page):
        if tag == "yaml" and page != WHOLE:
            _check_yaml(text, tmp_path)


def test_blocks_say_what_they_are():
    known = {"", "sh", "toml", "python", "yaml"}
    assert {tag.partition(" title=")[0] for page in PAGES for tag, _ in _blocks(page)} <= known


def test_the_examples_of_the_rewards_module_run():
    text = ast.get_docstring(ast.parse((ROOT / "rl" / "rewards" / "api.py").read_text(encoding="utf-8")))
    assert text is not None
    example = "\n".join(line[4:] for line in text.splitlines() if not line or line.startswith("    "))
    names = _run(f"import nonet\n{example}", "rl/rewards/api.py")
    assert list(names["cheap"](np.array([30.0, 60.0]))) == [True, False]  # type: ignore[operator]


def test_readme_is_short_with_eight_measures_at_most():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 90
    measured = re.search(r"^## Measured\n(.*?)^## ", text, re.M | re.S)
    assert measured is not None
    rows = [line for line in measured[1].splitlines() if line.startswith("|")][2:]
    assert 0 < len(rows) <= 8
    assert all(line.count("`") == 2 for line in rows)  # one command each


def test_generated_pages_are_current():
    generated = runpy.run_path(str(ROOT / "docs" / "generate.py"))
    stale = [
        page
        for page, write in generated["PAGES"].items()
        if (ROOT / "docs" / "reference" / page).read_text(encoding="utf-8") != write()
    ]
    assert not stale, "run `python docs/generate.py`"


def test_every_page_is_on_the_home_page():
    home = (ROOT / "docs" / "index.md").read_text(encoding="utf-8")
    pages = {str(page.relative_to(ROOT / "docs")) for page in (ROOT / "docs").rglob("*.md")} - {"index.md"}
    assert pages == set(re.findall(r"\]\(([\w/.-]+\.md)\)", home))


def test_architecture_is_short_and_its_sentences_are():
    page = ROOT / "ARCHITECTURE.md"
    assert len(page.read_text(encoding="utf-8").splitlines()) <= 100
    long = [sentence for sentence in _sentences(page) if len(sentence.split()) > MOST_WORDS]
    assert not long


def test_every_measured_row_has_a_command_or_says_that_there_is_none():
    bare = []
    for page in (ROOT / "docs" / "benchmarks").glob("20*.md"):
        lines = page.read_text(encoding="utf-8").splitlines()
        rows = [line for before, line in pairwise(lines) if line.startswith("|") and before.startswith("|")]
        bare += [
            row
            for row in rows
            if not row.startswith("|---") and not re.search(r"(`|the same|no bench prints it) \|$", row)
        ]
    assert not bare


# --- what pages hold ------------------------------------------------------------------------------------------------


def _blocks(page: Path) -> list[tuple[str, str]]:
    """Each fenced block of a page: its tag and its text."""
    return re.findall(r"^```([^\n]*)\n(.*?)^```$", page.read_text(encoding="utf-8"), re.M | re.S)


def _prose(page: Path) -> str:
    """Return a page without its fenced blocks."""
    return re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.M | re.S)


def _spans(page: Path) -> list[str]:
    """Return what stands between backticks, on one line."""
    return [" ".join(span.split()) for span in re.findall(r"`([^`]+)`", _prose(page))]


def _anchors(page: Path) -> set[str]:
    """Return the headings of a page as links name them."""
    headings = re.findall(r"^#+ (.*)$", _prose(page), re.M)
    return {re.sub(r"[^\w -]", "", heading).lower().replace(" ", "-") for heading in headings}


def _paths(page: Path) -> Iterator[str]:
    """Files and folders of this repository that a page names between backticks."""
    homes = tuple(f"{folder}/" for folder in CODE)
    own = page.name == "README.md" and page.parent != ROOT  # names what lies beside it, without a folder
    for span in _spans(page):
        yield from PATH.findall(span)
        if span.startswith(homes) and re.fullmatch(r"[\w./-]+/", span):
            yield span
        elif own and re.fullmatch(r"\w+\.(?:py|cpp|h)", span):
            yield from [] if any(page.parent.rglob(span)) else [span]


def _code() -> Iterator[Path]:
    for folder in CODE:
        for kind in ("*.py", "*.cpp", "*.h", "*.sh", "*.yaml"):
            if folder != "src":
                yield from (ROOT / folder).rglob(kind)
    yield from (ROOT / "src" / "nonet").glob("*.py")
    yield from (ROOT / "Makefile", ROOT / "pyproject.toml")


def _there(path: Path) -> bool:
    return path.exists()


def _sentences(page: Path) -> Iterator[str]:
    """Sentences of prose: no tables, no headings."""
    for part in re.split(r"\n\s*\n|\n(?=- )", _prose(page)):
        if not part.lstrip().startswith(("|", "#")):
            yield from re.split(r"(?<=[.?!])[*)]*\s+", " ".join(part.split()))


# --- commands -------------------------------------------------------------------------------------------------------


def _commands(page: Path) -> Iterator[str]:
    """Commands of a page: what looks like one between backticks, and lines of blocks without a language."""
    yield from (span for span in _spans(page) if re.search(r"\b(nonet|make|pytest|python -m) ", f"{span} "))
    for tag, text in _blocks(page):
        if tag in ("", "sh"):
            lines = (re.sub(r"\s#.*", "", line).strip().removeprefix("$ ") for line in text.splitlines())
            yield from (line for line in lines if re.match(r"(nonet|make|pytest|ray job)\b", line))


def _problems(command: str) -> Iterator[str]:
    """Return the parts of a command that do not exist."""
    if make := re.match(r"make ([a-z-]+)", command):
        targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.M)
        if make[1] not in targets:
            yield command
    for module in re.findall(r"python -m ([\w.]+)", command):
        if find_spec(module) is None:
            yield command
    if "pytest" in command:
        yield from (path for path in re.findall(r"tests/[\w/.]+", command) if not (ROOT / path).exists())
    if match := re.search(r"\bnonet ([a-z]+)(.*)", command):
        yield from _problems_of_verb(command, match[1], match[2])


def _problems_of_verb(command: str, verb: str, rest: str) -> Iterator[str]:
    if verb not in COMMANDS:
        yield f"{command}: no verb {verb}"
        return
    part = COMMANDS[verb]
    if verbs := getattr(part, "commands", None):
        named = rest.split()[0] if rest.split() else ""
        if named.replace("|", "").isalpha():  # one of a group's, or several: put|get|stats
            if missing := [each for each in named.split("|") if each not in verbs]:
                yield f"{command}: no verb {verb} {missing[0]}"
                return
            part = verbs[named.split("|")[0]]
    options = {option for parameter in part.params for option in parameter.opts}
    yield from (
        f"{command}: no option {option}"
        for option in re.findall(r"(?<= )--[\w-]+", rest)
        if option not in options
    )
    first = re.match(r" ([\w.-]+)", rest)
    if first is None or first[1].startswith("-") or first[1].isupper() or "." in first[1]:
        return
    known = {
        "bench": [*BENCHES, "all"],
        **dict.fromkeys(("run", "plan", "new", "parity", "submit"), list_shipped_scenarios()),
        "import": ["movielens", "csv", "sequences"],
    }
    if first[1] not in known.get(verb, [first[1]]):
        yield f"{command}: no {first[1]}"
    elif verb in ("run", "plan", "parity"):
        yield from _problems_of_changes(first[1], shlex.split(rest))


def _problems_of_changes(scenario: str, words: list[str]) -> Iterator[str]:
    """Keys and values after `--set` that the scenario does not take."""
    changes = [change for option, change in pairwise(words) if option == "--set" and "=" in change]
    try:
        load_scenario(scenario, changes)
    except ConfigError as error:
        yield str(error)


# --- blocks ---------------------------------------------------------------------------------------------------------


def _run(text: str, title: str) -> dict[str, object]:
    names: dict[str, object] = {"__name__": "a_block_of_the_docs"}
    exec(compile(text, title, "exec"), names)
    return names


def _check_yaml(text: str, folder: Path) -> None:
    """Check a cluster view, a scenario, keys of one, or rewards of a stage."""
    body = yaml.parse(text, "a block of the docs")
    quickstart = yaml.read(LIBRARY / "quickstart.yaml")
    if "nodes" in body:
        (folder / "view.yaml").write_text(text, encoding="utf-8")
        read_view(folder / "view.yaml")
    elif "extends" in body:
        (folder / "child.yaml").write_text(text, encoding="utf-8")
        load_scenario(folder / "child.yaml")
    elif set(body) == {"rewards"}:
        quickstart["stages"]["rl"]["rewards"] = body["rewards"]
        make_scenario(quickstart)
    else:
        assert set(body) <= set(Scenario.model_fields), text
        make_scenario(body if "name" in body else quickstart | body)
