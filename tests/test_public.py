"""The public face: names, laziness, layering."""

from __future__ import annotations

import ast
import subprocess
import sys
import tomllib
from pathlib import Path

import nonet

ROOT = Path(__file__).parent.parent
LAYERS = ("attention", "embedding", "samples", "models", "rl", "workers", "controller", "deploy", "bench")


def test_all_and_the_namespace_agree():
    assert set(nonet.__all__) <= set(dir(nonet))
    for name in nonet.__all__:
        assert getattr(nonet, name) is not None


def test_import_loads_neither_torch_nor_ray():
    code = "import sys, nonet, nonet.deploy.cli; assert not {'torch', 'ray', 'pyarrow', 'pydantic'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_arrows_only_point_down():
    wrong = [
        f"{file.relative_to(ROOT)} imports nonet.{target}"
        for layer in LAYERS
        for file in (ROOT / layer).rglob("*.py")
        for target in _imports(file)
        if target in LAYERS
        and LAYERS.index(target) > LAYERS.index(layer)
        and (layer, target) != ("deploy", "bench")
    ]
    assert not wrong, wrong


def test_lower_layers_import_no_ray():
    for layer in ("attention", "embedding", "samples", "models", "rl"):
        for file in (ROOT / layer).rglob("*.py"):
            assert "import ray" not in file.read_text(), file


def test_only_the_device_module_names_vendors():
    for layer in ("embedding", "samples", "models", "rl", "workers"):
        for file in (ROOT / layer).rglob("*.py"):
            names = {
                node.value for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.Constant)
            }
            assert file.name == "device.py" or not names & {"cuda", "npu", "nccl", "hccl"}, file


def test_the_type_checker_looks_into_every_code_folder():
    include = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["pyright"]["include"]
    folders = {file.parent.name for file in ROOT.glob("*/__init__.py")}
    assert set(LAYERS) <= folders
    assert set(include) == {"src/nonet"} | {
        f"src/nonet/{name}" for name in folders
    }  # it follows no symlink itself


def _imports(file: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(file.read_text())):
        names = [node.module] if isinstance(node, ast.ImportFrom) and node.module else []
        names += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        found |= {name.split(".")[1] for name in names if name.startswith("nonet.")}
    return found
