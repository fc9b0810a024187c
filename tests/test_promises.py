"""What the pages promise: each promise names the tests that fail if it becomes false, and numbers are those of the code."""

from __future__ import annotations

import ast
import importlib
import re
from functools import cache, reduce
from pathlib import Path

import pytest

from nonet import yaml

ROOT = Path(__file__).parents[1]
PAGES = yaml.read(ROOT / "tests/promises.yaml")
GUARANTEES, EXACTLY_ONCE = "explanation/guarantees", "explanation/exactly-once"
CLUSTERS, SERVE, HTTP = "how-to/clusters", "how-to/serve", "reference/http"
NUMBERS = [
    (GUARANTEES, "at most 5 seconds of metrics", "storage.run_writer:COMMIT_EVERY_S", 5),
    (GUARANTEES, "uploaded in parts every five seconds", "storage.run_writer:COMMIT_EVERY_S", 5),
    (GUARANTEES, "15 minutes by default", "deadlines:DEFAULTS.storage", 900),
    (GUARANTEES, "the first one after 3 seconds", "journal:_LOCK_PATIENCE_S", 3),
    (GUARANTEES, "as above, every 10 seconds", "controller.record.trace:COLLECT_EVERY_S", 10),
    (GUARANTEES, "have not named it for a minute", "storage.run_writer:READ_GRACE_S", 60),
    (GUARANTEES, "older than 15 minutes by the clock", "storage.run_writer:GARBAGE_GRACE_S", 900),
    (GUARANTEES, "A file above 64 MB", "storage.run_tree:PART_BYTES", 64 << 20),
    (
        EXACTLY_ONCE,
        "Up to five million events",
        "workers.roles.artifacts.data_setup:MEMORY_EVENTS",
        5_000_000,
    ),
    (EXACTLY_ONCE, "two million rows per thread", "samples.preparation.preparing:_PARTITION_ROWS", 1 << 21),
    (EXACTLY_ONCE, "two million rows per thread", "samples.preparation.log:_SLICE_ROWS", 1 << 21),
    (CLUSTERS, "92 % of it is planned", "controller.plan.memory_ledger:_USABLE_SHARE", 0.92),
    (CLUSTERS, "with 1, 2, 4 or 8 trainers", "controller.search.placements:_WORKER_COUNTS", (1, 2, 4, 8)),
    (CLUSTERS, "at most 10 MiB, packed", "deploy.run.jobs.package:MAX_PACKAGE_BYTES", 10 << 20),
    (CLUSTERS, "after 5 minutes without the cluster", "deploy.run.jobs.logs:_GIVE_UP_S", 300),
    (CLUSTERS, "`NONET_ORPHAN_TIMEOUT_S` (60 s)", "controller.groups.lifetimes:ORPHAN_TIMEOUT_S", 60),
    (CLUSTERS, "five minutes before the time limit", "deploy.run.manifests.slurm:_NOTICE_S", 300),
    (CLUSTERS, "nodes have at most eight", "deploy.run.manifests.node_groups:_DEVICES_PER_NODE", 8),
    (CLUSTERS, "`deadlines.replace` (10 minutes)", "deadlines:DEFAULTS.replace", 600),
    (CLUSTERS, "`deadlines.probe` (2 minutes)", "deadlines:DEFAULTS.probe", 120),
    (CLUSTERS, "`deadlines.storage` (15 minutes)", "deadlines:DEFAULTS.storage", 900),
    (CLUSTERS, "stores nothing for a minute", "storage.mounts:_ALIVE_S", 60),
    (CLUSTERS, "a young head for at most a minute", "storage.mounts:_ALIVE_S", 60),
    (CLUSTERS, "`NONET_CACHE_BYTES` (50GB)", "cache:_DEFAULT_BYTES", "50GB"),
    (
        CLUSTERS,
        "about 15 seconds ago",
        "controller.groups.run_status:ALIVE_EVERY_S",
        10,
    ),  # and COMMIT_EVERY_S
    (CLUSTERS, "suspended for 1 to 4 seconds", "deploy.after.chaos.faults:_SLOW_S", (1, 4)),
    (CLUSTERS, "0.3 s per 64 KiB", "deploy.after.chaos.connections:_SLOW_S", 0.3),
    (CLUSTERS, "0.3 s per 64 KiB", "deploy.after.chaos.connections:_CHUNK_BYTES", 64 << 10),
    (CLUSTERS, "new ones for 2 to 6 seconds", "deploy.after.chaos.faults:_CUT_STORAGE_S", (2, 6)),
    (
        CLUSTERS,
        "Half of the faults",
        "deploy.after.chaos.faults:_MOMENT_SHARES",
        {"step": 0.5, "save": 0.3, "publish": 0.2},
    ),
    (SERVE, "for at most 20 seconds", "deploy.serving.draining:_DRAIN_S", 20),
    (SERVE, "in half of the deadline", "deploy.serving.service.service:JOIN_SHARE", 0.5),
    (HTTP, "at most 2 MB", "deploy.serving.service.app:MAX_BODY_BYTES", 2 << 20),
    (HTTP, "at most 1,000 items", "deploy.opened.events:MAX_PER_REQUEST", 1000),
    (HTTP, "the newest 131,072 ids", "deploy.opened.histories:_MAX_POST_IDS", 131_072),
    (HTTP, "most of the last 100 requests", "deploy.serving.service.service:_JOIN_OUTCOMES", 100),
    (HTTP, "at most a tenth of that time and an hour", "journal:_SEGMENT_SHARE", 0.1),
    (HTTP, "at most a tenth of that time and an hour", "deploy.opened.histories:_EXPIRE_EVERY_S", 3600),
]


@cache
def read_page(page: str) -> str:
    return (ROOT / page).read_text(encoding="utf-8")


def join_lines(text: str) -> str:
    """Return a text with one blank in place of each run of blanks and line breaks."""
    return " ".join(text.split())


@cache
def list_tests(file: str) -> set[str]:
    tree = ast.parse((ROOT / file).read_text(encoding="utf-8"))
    return {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}


def list_items(page: str) -> list[str]:
    """Return the bullets and the rows of tables of a page, without code."""
    text = re.sub(r"```.*?```", "", read_page(page), flags=re.DOTALL)
    text = re.sub(r"(?m)^\|.*\n(?=\|[-|: ]+\|$)", "", text)  # headers
    rows = [row for row in re.findall(r"(?m)^\|.*$", text) if re.search(r"\w", row)]
    return [join_lines(item) for item in [*rows, *re.findall(r"(?m)^- .*(?:\n {2,}.*)*", text)]]


@pytest.mark.parametrize("page", PAGES)
def test_each_promise_stands_on_its_page_once_and_its_tests_exist(page):
    text, excerpts = (
        join_lines(read_page(page)),
        [join_lines(promise["says"]) for promise in PAGES[page]["promises"]],
    )
    assert [excerpt for excerpt in excerpts if text.count(excerpt) != 1] == []
    assert len(set(excerpts)) == len(excerpts)
    named = [test for promise in PAGES[page]["promises"] for test in promise["tests"]]
    assert all(promise["tests"] for promise in PAGES[page]["promises"])
    assert [
        test for test in named if test.partition("::")[2] not in list_tests(test.partition("::")[0])
    ] == []


@pytest.mark.parametrize("page", PAGES)
def test_every_bullet_and_row_promises_something_or_is_said_to_promise_nothing(page):
    excerpts = [join_lines(promise["says"]) for promise in PAGES[page]["promises"]]
    silent = [item for item in list_items(page) if not any(excerpt in item for excerpt in excerpts)]
    assert [item for item in silent if not item.startswith(tuple(PAGES[page]["nothing"]))] == []
    assert [
        start for start in PAGES[page]["nothing"] if not any(item.startswith(start) for item in silent)
    ] == []


def test_each_number_belongs_to_a_promise_and_each_promise_of_a_number_has_one():
    numbers = {(f"docs/{page}.md", says) for page, says, *_ in NUMBERS}
    this = f"tests/{Path(__file__).name}::{test_a_number_of_a_page_is_that_of_the_code.__name__}"
    of_numbers = {
        (page, promise["says"])
        for page in PAGES
        for promise in PAGES[page]["promises"]
        if this in promise["tests"]
    }
    assert [
        number
        for number in numbers
        if not any(number[0] == page and number[1] in says for page, says in of_numbers)
    ] == []
    assert [
        each for each in of_numbers if not any(each[0] == page and says in each[1] for page, says in numbers)
    ] == []


@pytest.mark.parametrize(
    ("page", "says", "name", "value"), NUMBERS, ids=[f"{row[1]}: {row[2]}" for row in NUMBERS]
)
def test_a_number_of_a_page_is_that_of_the_code(page, says, name, value):
    assert says in join_lines(read_page(f"docs/{page}.md"))
    module, _, attributes = name.partition(":")
    assert reduce(getattr, attributes.split("."), importlib.import_module(f"nonet.{module}")) == value
