"""Modules that import one another in a circle, counting lazy imports and those for type hints alone; costly imports."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

ROOT = Path(__file__).parent.parent
LAYERS = ("attention", "embedding", "samples", "models", "rl", "workers", "controller", "deploy", "bench")


def test_there_is_no_import_cycle():
    cycles = list(find_cycles(import_graph()))
    assert cycles == [], "an import cycle: move what both modules need into a third one"


def test_a_cycle_through_a_lazy_import_is_found():
    graph = {"a": {"b"}, "b": {"c"}, "c": {"a", "d"}, "d": set()}
    assert list(find_cycles(graph)) == [frozenset("abc")]


def test_processes_that_compile_and_divide_no_model_do_not_import_what_does():
    roles = ("rollout", "trainer", "reward", "evaluation.evaluator")
    modules = [
        "controller.single_controller",
        "deploy.run.driver",
        *(f"workers.roles.{role}" for role in roles),
    ]
    imports = "; ".join(f"import nonet.{name}" for name in (*modules, "workers.engines._ddp"))
    # Torch's own optimizers import the compiler at the first of these calls.
    optimizer = "w = torch.nn.Parameter(torch.ones(2, 2)); o = Muon([w], []); w.sum().backward(); o.step(); o.zero_grad()"
    heavy = ["torch._dynamo", "torch.distributed.fsdp", "sympy"]
    names = f"print([name for name in {heavy} if name in sys.modules])"
    program = f"import sys, torch; from nonet.muon import Muon; {imports}; {optimizer}; {names}"
    ended = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True)
    assert ended.stdout == "[]\n"


def import_graph() -> dict[str, set[str]]:
    """Return the modules of the package that each module imports; an import from a face counts for the module behind it."""
    files = [
        file for layer in LAYERS for file in (ROOT / layer).rglob("*.py") if "scenarios" not in file.parts
    ]
    modules = {_dotted(file.with_suffix("")): file for file in files}
    faces = {_dotted(file.parent): _read_face(file) for layer in LAYERS for file in _faces(layer)}
    graph: dict[str, set[str]] = {}
    for module, file in modules.items():
        targets = {_module_behind(*name, modules, faces) for name in _imported_names(file)}
        graph[module] = {target for target in targets if target is not None and target != module}
    return graph


def find_cycles(graph: Mapping[str, set[str]]) -> Iterator[frozenset[str]]:
    """Yield the groups of more than one module that all reach one another (strongly connected components, Tarjan 1972)."""
    number: dict[str, int] = {}
    lowest: dict[str, int] = {}
    stack: list[str] = []

    def visit(module: str) -> Iterator[frozenset[str]]:
        number[module] = lowest[module] = len(number)
        stack.append(module)
        for target in graph.get(module, ()):
            if target not in number:
                yield from visit(target)
                lowest[module] = min(lowest[module], lowest[target])
            elif target in stack:
                lowest[module] = min(lowest[module], number[target])
        if lowest[module] == number[module]:
            group = stack[stack.index(module) :]
            del stack[stack.index(module) :]
            if len(group) > 1:
                yield frozenset(group)

    for module in graph:
        if module not in number:
            yield from visit(module)


def _module_behind(
    package: str, name: str, modules: Mapping[str, Path], faces: Mapping[str, Mapping[str, tuple[str, str]]]
) -> str | None:
    """Return the module that defines a name imported from a package or module; None outside the package."""
    while package not in modules:
        if f"{package}.{name}" in modules:
            return f"{package}.{name}"
        if name not in faces.get(package, {}):
            return None
        package, name = faces[package][name]
    return package


def _imported_names(file: Path) -> Iterator[tuple[str, str]]:
    """Yield (module, name) of the imports from the package anywhere in a file."""
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("nonet."):
            for alias in node.names:
                yield str(node.module).removeprefix("nonet."), alias.name


def _read_face(file: Path) -> dict[str, tuple[str, str]]:
    """Return (module, name) behind each name of a face."""
    package, names = _dotted(file.parent), {}
    for node in ast.parse(file.read_text()).body:
        if isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                names[alias.asname or alias.name] = (f"{package}.{node.module}", alias.name)
    return names


def _faces(layer: str) -> Iterator[Path]:
    return (ROOT / layer).rglob("__init__.pyi")


def _dotted(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).parts)
