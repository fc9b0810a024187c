"""Constants in seconds: a wait of a run has a deadline from `deadlines:`, and other times say by their name what they are."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

_ROOT = Path(__file__).parents[1]
_FOLDERS = (
    "attention",
    "embedding",
    "samples",
    "models",
    "rl",
    "workers",
    "controller",
    "deploy",
    "src/nonet",
)
_WAITING_METHODS = ("get", "wait", "join", "result", "acquire")
_SECONDS = re.compile(r"(?<!per)_s$|^timeout$")
# Poll intervals and pauses, and waits whose end is no error: code goes on without what it has waited for.
_HARMLESS = re.compile(r"(poll|pauses?|every|interval|patience|grace)_s$")

# Other constants by their file or folder, or by file:name, with the reason why they are no deadline of a run.
_REVIEWED = {
    # Times that nothing waits for.
    "controller/record/checkpoint.py:_SETTLED_S": "the age of a file",
    "src/nonet/contents.py": "ages of files and of what is remembered about them",
    "src/nonet/journal.py:_DAY_S": "a unit",
    "samples/profiles/profile.py:_DAY_S": "a unit",
    "samples/sequences/labels.py:period_s": "a property of data",
    "samples/tables/times.py": "a date",
    "workers/registry/version.py:_YEAR_10000_S": "a date",
    "controller/scenario/settings/warnings.py:_MAX_RELATIVE_S": "a property of data",
    "models/sid_decoder/decoder.py:_MAX_ELAPSED_S": "a property of data",
    "controller/stages/_rerank.py:_MAX_UNREQUESTED_S": "the expected duration from which work is left out",
    "workers/engines/_meter.py:_LEAST_MATMUL_S": "the shortest time that is measured",
    "deploy/run/status.py:_LATE_S": "the age of a status, which is shown",
    "src/nonet/storage/mounts.py:_ALIVE_S": "the age of a commit",
    "src/nonet/storage/request_log.py:_SLOW_S": "the age of a request, which is shown",
    # Waits of what has no scenario, or options of its own.
    "controller/groups/lifetimes.py:ORPHAN_TIMEOUT_S": "the default of an environment variable",
    "controller/scenario/options.py:timeout_s": "an option of a reward",
    "deploy/after/chaos": "a tool",
    "deploy/opened/events.py:_MAX_AHEAD_S": "a limit of posts",
    "deploy/parity": "a tool",
    "deploy/run/jobs": "requests of commands to a cluster",
    "deploy/run/manifests": "the notice of Slurm before its time limit",
    "deploy/serving": "servers and their clients, with options of their own",
    "embedding/reading/remote.py:timeout_s": "an argument of a class; a run gives its deadline",
    "embedding/tables/native_library.py": "the compiler, once per machine",
    "embedding/training/pipeline.py:timeout_s": "an argument of a class; a run gives its deadline",
    "models/keras/check.py:_TIMEOUT_S": "a check of files before a run",
    "rl/rewards/base.py:timeout_s": "an option of a reward",
    "samples/stores": "options of a store",
    "src/nonet/background.py:timeout_s": "an argument of a method; a run gives its deadline",
    "src/nonet/storage/objects.py": "single requests, also of commands; `deadlines.storage` limits an outage",
    "workers/reach.py:_ANSWER_S": "whether a cluster exists, also for commands",
    "workers/registry": "publishers and servers, which have no scenario",
    "workers/roles/reward.py:timeout_s": "an option of a reward",
}


def _is_number(node: ast.expr | None) -> bool:
    """Return whether an expression is a number of seconds other than 0, or a tuple of them."""
    if isinstance(node, ast.Tuple):
        return any(map(_is_number, node.elts))
    if isinstance(node, ast.BinOp):
        return _is_number(node.left) and _is_number(node.right)
    return isinstance(node, ast.Constant) and type(node.value) in (int, float) and node.value != 0


def _list_names(target: ast.expr) -> list[str]:
    """Return the names that an assignment sets."""
    targets = target.elts if isinstance(target, ast.Tuple) else [target]
    return [name for entry in targets if (name := getattr(entry, "id", getattr(entry, "attr", "")))]


def _find_constants(source: str) -> Iterator[str]:
    """Yield the names of variables, fields, arguments and methods whose constant value is a time in seconds."""
    for node in ast.walk(ast.parse(source)):
        found: list[tuple[str, ast.expr | None]] = []
        if isinstance(node, ast.Assign):
            found = [(name, node.value) for target in node.targets for name in _list_names(target)]
        elif isinstance(node, ast.AnnAssign):
            found = [(name, node.value) for name in _list_names(node.target)]
        elif isinstance(node, ast.arguments):
            positional = [*node.posonlyargs, *node.args]
            defaults = zip(positional[len(positional) - len(node.defaults) :], node.defaults, strict=True)
            found = [(argument.arg, default) for argument, default in defaults]
            found += [(a.arg, default) for a, default in zip(node.kwonlyargs, node.kw_defaults, strict=True)]
        elif isinstance(node, ast.Call):
            found = [(keyword.arg or "", keyword.value) for keyword in node.keywords]
            if (
                len(node.args) == 1
                and getattr(node.func, "attr", "") in _WAITING_METHODS
                and _is_number(node.args[0])
            ):
                yield f"{ast.unparse(node.func)}()"
        yield from (name for name, value in found if _SECONDS.search(name.lower()) and _is_number(value))


def _is_reviewed(file: str, name: str) -> bool:
    """Return whether the list of reviewed constants has a constant, or its file, or a folder around it."""
    folders = map(str, Path(file).parents)
    return any(place in _REVIEWED for place in (f"{file}:{name}", file, *folders))


def test_every_constant_in_seconds_is_a_poll_interval_or_a_patience_by_its_name_or_was_reviewed():
    files = [file for folder in _FOLDERS for file in (_ROOT / folder).rglob("*.py")]
    found = {
        (str(file.relative_to(_ROOT)), name) for file in files for name in _find_constants(file.read_text())
    }
    assert len(found) > 100, "the search works"
    unknown = sorted(
        f"{file}:{name}"
        for file, name in found
        if not _HARMLESS.search(name.lower()) and not _is_reviewed(file, name)
    )
    assert not unknown, "take the time from `deadlines:`, or say by the name that it is no deadline"
    used = {
        place for file, name in found for place in (f"{file}:{name}", file, *map(str, Path(file).parents))
    }
    assert not set(_REVIEWED) - used, "these are not in the code any more"


def test_a_new_constant_in_seconds_is_found():
    source = """
LIMIT_S, TRIES = 3.0, 2
_DAYS_S = 2 * 86_400
_POLL_EVERY_S = 1.0
lines_per_s = 5
class Options:
    timeout_s: float = 60.0
def wait_for(ready, *, patience_s=5.0, give_up_s: float = 0.0):
    ray.get(ready, timeout=30)
    ready.wait(3)
    names.get("name")
"""
    found = [name for name in _find_constants(source) if not _HARMLESS.search(name.lower())]
    assert sorted(found) == ["LIMIT_S", "_DAYS_S", "ready.wait()", "timeout", "timeout_s"]
