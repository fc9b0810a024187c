"""Getting the core: built, refused, compiled once for a node, or replaced by the twin with one warning."""

import ctypes
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from nonet.embedding.tables.native_library import (
    ABI,
    ConfigStruct,
    _open_library,
    find_compiler,
    list_declared,
    list_sources,
)

needs_compiler = pytest.mark.skipif(find_compiler() is None, reason="no C++ compiler on this machine")


@pytest.fixture(scope="module")
def node(tmp_path_factory):
    """Provide a node's cache, shared by these tests: the first one compiles."""
    return tmp_path_factory.mktemp("node")


STATUS = "from nonet.embedding.tables.factory import get_core_status; print(get_core_status())"


def run(code, tmp_path, **environment):
    return subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | {"NONET_CACHE": str(tmp_path)} | environment,
        capture_output=True,
        text=True,
        timeout=800,
        check=True,
    )


@pytest.mark.slow
@needs_compiler
def test_many_processes_of_a_node_compile_the_core_once(node):
    code = "import nonet.embedding.tables.native_library as n; n.list_packaged = lambda: []; " + STATUS
    with ThreadPoolExecutor(3) as pool:
        answers = [job.stdout for job in pool.map(lambda _: run(code, node), range(3))]
    assert len(set(answers)) == 1
    assert answers[0].startswith("C++ core (")
    built = list(node.rglob("*.so"))
    assert len(built) == 1
    before = built[0].stat().st_mtime_ns
    run(code, node)
    assert built[0].stat().st_mtime_ns == before


@needs_compiler
@pytest.mark.parametrize("kind", ["another architecture", "another ABI", "no such function", "torn"])
def test_a_library_that_does_not_fit_is_replaced_by_one_compiled_here(tmp_path, node, kind):
    foreign = tmp_path / "_core.so"
    if kind in ("another ABI", "no such function"):
        source, abi = tmp_path / "old.c", ABI - (kind == "another ABI")
        source.write_text(
            f"int nonet_abi(void) {{ return {abi}; }} int nonet_config_bytes(void) {{ return {ctypes.sizeof(ConfigStruct)}; }}"
        )
        subprocess.run(["cc", "-shared", "-fPIC", source, "-o", foreign], check=True)
    else:
        whole = bytearray(Path("/bin/true").resolve().read_bytes())
        whole[18:20] = (0xF3, 0x00)  # ELF machine: RISC-V
        foreign.write_bytes(whole if kind == "another architecture" else whole[:40])
    code = (
        f"import pathlib, nonet.embedding.tables.native_library as n; "
        f"n.list_packaged = lambda: [pathlib.Path({str(foreign)!r})]; "
    )
    found = run(code + STATUS + "; print(n.load_library()._name)", node).stdout.splitlines()
    assert found[0].startswith("C++ core (")
    assert Path(found[1]).parent == node / "nonet" / "core"


@needs_compiler
def test_a_library_without_a_function_of_its_sources_is_refused_by_name(tmp_path):
    source, made = tmp_path / "old.c", tmp_path / "_core.so"
    had = [name for name in list_declared() if name not in ("nonet_table_look", "nonet_route")]
    answers = {"nonet_abi": ABI, "nonet_config_bytes": ctypes.sizeof(ConfigStruct)}
    source.write_text(" ".join(f"int {name}(void) {{ return {answers.get(name, 0)}; }}" for name in had))
    subprocess.run(["cc", "-shared", "-fPIC", source, "-o", made], check=True)
    assert _open_library(made) == (None, "has no nonet_route, nonet_table_look")


def test_without_a_compiler_tables_run_on_the_twin_with_one_warning_that_says_why(tmp_path):
    code = """
import warnings, nonet.embedding.tables.native_library as n
n.list_packaged = lambda: []
n.find_compiler = lambda: None
from nonet.embedding.tables.factory import get_core_status, make_table
from nonet.embedding.tables.spec import TableSpec
with warnings.catch_warnings(record=True) as seen:
    warnings.simplefilter("always")
    tables = [make_table(name, TableSpec(4), 7) for name in "ab"]
print(type(tables[0]).__name__, len(seen), seen[0].category.__name__, get_core_status().native)
print(seen[0].message)
"""
    first, message = run(code, tmp_path).stdout.strip().splitlines()
    assert first == "NumPyTable 1 SlowTablesWarning False"
    assert "no C++ compiler: install g++ or clang++, or set CXX" in message


def test_the_twin_can_be_asked_for(tmp_path):
    assert run(STATUS, tmp_path, NONET_CORE="numpy").stdout.startswith(
        "NumPy tables: NONET_CORE=numpy selects"
    )


@needs_compiler
def test_a_compiler_that_fails_is_named_with_its_first_line(tmp_path):
    code = "import nonet.embedding.tables.native_library as n; n.list_packaged = lambda: []; " + STATUS
    answer = run(code, tmp_path, CXX="/bin/false").stdout
    assert answer.startswith("NumPy tables: /bin/false could not compile the core")


def test_the_package_lists_every_source_of_the_core():
    import tomllib

    root = Path(__file__).parents[3]
    project = tomllib.loads((root / "pyproject.toml").read_text())
    (module,) = project["tool"]["setuptools"]["ext-modules"]
    listed = {Path(name).name for name in module["sources"] + module["depends"]}
    assert listed == {path.name for path in list_sources()}


@pytest.mark.slow
@needs_compiler
def test_the_core_passes_its_own_checks_under_the_address_and_undefined_sanitizers():
    root = Path(__file__).parents[3]
    done = subprocess.run(
        ["bash", root / "embedding" / "native" / "sanitize.sh"], capture_output=True, text=True, timeout=800
    )
    if "cannot find" in done.stderr and "san" in done.stderr:
        pytest.skip("the compiler came without the sanitizers' libraries")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "checks passed" in done.stdout
