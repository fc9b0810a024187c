"""The list of mutants is true of this tree: patterns occur once, changes compile, and the tests that must fail are there."""

from __future__ import annotations

import ast
import sys
from collections import Counter
from functools import cache
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from mutants import ROOT, read_mutants

MUTANTS = read_mutants()
FOLDERS = ("attention", "embedding", "samples", "models", "rl", "workers", "controller", "deploy")


@cache
def named_in(file: str) -> dict[str, bool]:
    """Return the tests of a file by name, and whether they are slow."""
    tree = ast.parse((ROOT / file).read_text(encoding="utf-8"))
    slow = any("mark.slow" in ast.unparse(node) for node in tree.body if isinstance(node, ast.Assign))
    return {
        node.name: slow or any("mark.slow" in ast.unparse(mark) for mark in node.decorator_list)
        for node in tree.body
        if isinstance(node, ast.FunctionDef)
    }


@pytest.mark.parametrize("mutant", MUTANTS, ids=[mutant.name for mutant in MUTANTS])
def test_a_mutant_changes_one_place_and_names_tests_that_run_by_default(mutant):
    text = (ROOT / mutant.file).read_text(encoding="utf-8")
    changed = mutant.changed(text)
    assert changed != text
    if mutant.file.endswith(".py"):
        compile(changed, mutant.file, "exec")
    assert mutant.why
    assert mutant.tests
    for test in mutant.tests:
        file, _, name = test.partition("::")
        named = named_in(file)
        slow = named[name.partition("[")[0]] if name else all(named.values())
        assert not slow, f"{test} is slow: `make test` would not notice"


def test_every_mutant_has_a_name_of_its_own_and_every_folder_has_mutants():
    assert max(Counter(mutant.name for mutant in MUTANTS).values()) == 1
    assert {mutant.file.split("/")[0] for mutant in MUTANTS} >= set(FOLDERS)
