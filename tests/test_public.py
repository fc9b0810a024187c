"""The public face: names, laziness, layering."""

from __future__ import annotations

import ast
import importlib
import re
import subprocess
import sys
import tomllib
from functools import cache
from pathlib import Path
from types import ModuleType

import nonet

ROOT = Path(__file__).parent.parent
LAYERS = ("attention", "embedding", "samples", "models", "rl", "workers", "controller", "deploy", "bench")
# The folders inside each, lowest first; "" is the folder's own files.
ROOMS = {
    "attention": ("masks", "calls", "plans", "kernels", "torch_backends", ""),
    "embedding": (
        "",
        "tables/optimizers",
        "tables",
        "exchange",
        "modules",
        "tiers",
        "versions",
        "reading",
        "training",
        "storage",
    ),
    "samples": (
        "",
        "tables",
        "stores",
        "ledger",
        "sequences",
        "tokenised",
        "preparation",
        "profiles",
        "batches/graphs",
        "batches",
        "streams",
        "sources",
        "importers",
    ),
    "models": (
        "ranking/kinds",
        "ranking",
        "",
        "clicks",
        "deepfm",
        "keras/backends",
        "keras",
        "generation",
        "sid_decoder",
        "hf",
        "tokenizer/kinds",
        "tokenizer",
        "baselines/kinds",
        "baselines",
        "inference",
    ),
    "rl": ("policy", "", "rewards", "algorithms"),
    "workers": (
        "",
        "registry",
        "devices",
        "runtime/rendezvous",
        "runtime",
        "engines/_blocks",
        "engines/division",
        "engines",
        "engines/_zero",
        "roles/artifacts",
        "roles",
        "roles/kinds",
        "roles/evaluation",
        "roles/learners",
        "roles/click",
    ),
    "controller": (
        *(
            "record/tracking/kinds",
            "record/tracking",
            "record",
            "cluster/placement",
            "cluster",
            "scenario/settings",
            "scenario/document",
            "scenario/parts",
            "scenario",
            "plan",
            "search",
            "setup",
            "groups",
            "session",
            "stages",
            "",
        ),
    ),
    "deploy": (
        *(
            "opened",
            "report",
            "run",
            "run/jobs",
            "run/manifests",
            "new",
            "doctor",
            "parity",
            "after",
            "after/chaos",
            "after/board",
            "tune",
        ),
        *(
            "serving/access",
            "serving/offline/exporters",
            "serving/offline",
            "serving/service",
            "serving/apart",
            "serving",
            "verbs",
            "",
        ),
    ),
    "bench": (
        "timing",
        "cluster",
        "runs",
        "rl",
        "attention",
        "embedding",
        "samples",
        "serving",
        "models",
        "",
    ),
}


def test_all_and_the_namespace_agree():
    assert set(nonet.__all__) <= set(dir(nonet))
    for name in nonet.__all__:
        assert getattr(nonet, name) is not None


def test_import_loads_neither_torch_nor_ray():
    code = "import sys, nonet, nonet.deploy.cli; assert not {'torch', 'ray', 'pyarrow', 'pydantic'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_arrows_only_point_down():
    wrong = [
        f"{place} imports {target}"
        for place, targets in _arrows().items()
        for target in targets
        if _rank(target) > _rank(place)
    ]
    assert not wrong, wrong


def test_every_folder_has_its_place_in_the_order():
    assert {place for place, _ in _modules()} == {
        *LAYERS,
        *(f"{a}/{b}" for a in ROOMS for b in ROOMS[a] if b),
    }


def test_other_folders_import_from_a_face_only():
    wrong = [
        f"{file.relative_to(ROOT)} imports {module}"
        for place, file in _modules()
        for module, _ in _imports(file)
        if not (ROOT / _path(module)).is_dir() and _path(module).rpartition("/")[0] not in {place, ""}
    ]
    assert not wrong, wrong


def test_what_a_face_offers_exists_and_is_not_a_module_s_name():
    for face in sorted({place for place, _ in _modules()}):
        package = importlib.import_module("nonet." + face.replace("/", "."))
        assert package.__doc__, face
        own = {file.stem for file in (ROOT / face).glob("*.py")}
        for name in package.__all__:
            value = getattr(package, name)
            assert name not in own or isinstance(value, ModuleType), (
                f"{face} offers {name}, which is a module too"
            )


def test_what_a_face_offers_is_used_from_outside():
    users: dict[str, set[str]] = {}
    files = [*_modules(), *(("", ROOT / "src" / "nonet" / name) for name in ("__init__.pyi", "plug.pyi"))]
    files += [
        ("", file) for folder in ("examples", "tests", "src/nonet") for file in (ROOT / folder).rglob("*.py")
    ]
    for place, file in files:
        if file.name == "__init__.pyi" and "src" not in file.parts:
            continue
        for module, names in _imports(file):
            path = _path(module)
            home = path if (ROOT / path).is_dir() else path.rpartition("/")[0]
            if home != place:
                users.setdefault(home, set()).update(names)
        for module, name in re.findall(r"\"nonet\.([\w.]+):(\w+)\"", file.read_text()):  # what a spec names
            users.setdefault(module.replace(".", "/"), set()).add(name)
    docs = "".join(file.read_text() for file in [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")])
    idle = [
        f"{face}: {name}"
        for face in sorted({place for place, _ in _modules()})
        for name in importlib.import_module("nonet." + face.replace("/", ".")).__all__
        if name not in users.get(face, set()) and name not in docs
    ]
    assert not idle, idle


def test_no_folder_has_more_than_twelve_entries():
    crowded = {
        place: count
        for place in {place for place, _ in _modules()}
        if (count := sum(_counts(entry) for entry in (ROOT / place).iterdir())) > 12
    }
    assert not crowded, crowded
    tests = [folder for folder in (ROOT / "tests").rglob("*") if folder.is_dir()]
    crowded = {
        str(folder): count
        for folder in tests
        if (count := sum(_counts(entry) for entry in folder.iterdir())) > 20
    }
    assert not crowded, crowded


def test_lower_layers_import_no_ray_but_for_the_engine_on_ray_data_and_rewards_that_are_actors():
    importing = {
        str(file.relative_to(ROOT))
        for layer in ("attention", "embedding", "samples", "models", "rl")
        for file in (ROOT / layer).rglob("*.py")
        if "import ray" in file.read_text()
    }
    assert importing == {"samples/streams/ray_engine.py", "rl/rewards/actor.py"}


@cache
def _list_nodes(file: Path) -> list[ast.AST]:
    """Return the nodes of a file that the tests below look at."""
    kinds = (ast.Import, ast.ImportFrom, ast.Attribute, ast.keyword, ast.Constant)
    return [node for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, kinds)]


def _list_unpickling(file):
    """Yield what a file names that unpickles: modules, `torch.load`, `allow_pickle`, and collectives of objects."""
    for node in _list_nodes(file):
        if isinstance(node, ast.Import | ast.ImportFrom):
            names = [getattr(node, "module", None) or "", *(alias.name for alias in node.names)]
            yield from {name.partition(".")[0] for name in names} & {
                "pickle",
                "cloudpickle",
                "dill",
                "joblib",
                "shelve",
            }
        elif isinstance(node, ast.Attribute) and node.attr == "load" and ast.unparse(node.value) == "torch":
            yield "torch.load"
        elif (
            isinstance(node, ast.keyword)
            and node.arg == "allow_pickle"
            and ast.unparse(node.value) != "False"
        ):
            yield "allow_pickle"
        elif isinstance(node, ast.Attribute) and re.fullmatch(
            r"(all_gather|gather|broadcast|scatter|send|recv)_object(_list)?", node.attr
        ):
            yield node.attr


def test_nothing_is_unpickled_but_what_comes_through_ray():
    found = {
        (str(file.relative_to(ROOT)), name)
        for place in (*LAYERS, "src")
        for file in (ROOT / place).rglob("*.py")
        for name in _list_unpickling(file)
    }
    assert found == {
        ("workers/runtime/dispatch.py", "pickle"),  # the header of a call of Ray's actors
        ("controller/setup/worker_setup.py", "cloudpickle"),  # registers modules of the user
    }


def test_only_the_device_module_names_vendors():
    for layer in ("embedding", "samples", "models", "rl", "workers"):
        for file in (ROOT / layer).rglob("*.py"):
            names = {node.value for node in _list_nodes(file) if isinstance(node, ast.Constant)}
            assert file.name == "vendors.py" or not names & {"cuda", "npu", "nccl", "hccl"}, file


def test_the_type_checker_looks_into_every_code_folder():
    include = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["pyright"]["include"]
    folders = {file.parent.name for file in ROOT.glob("*/__init__.py")}
    assert set(LAYERS) <= folders
    assert set(include) == {"src/nonet"} | {
        f"src/nonet/{name}" for name in folders
    }  # it follows no symlink itself


def test_scenarios_and_faces_are_checked_strictly():
    strict = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["pyright"]["strict"]
    assert {"src/nonet/controller/scenario", "src/nonet/__init__.py", "**/__init__.pyi"} <= set(strict)


def _modules() -> list[tuple[str, Path]]:
    """Every module of the package with the folder it is in; rewards of the shipped scenarios are users' files."""
    files = [file for layer in LAYERS for file in (ROOT / layer).rglob("*.py")]
    return [(str(file.parent.relative_to(ROOT)), file) for file in files if "scenarios" not in file.parts]


def _arrows() -> dict[str, set[str]]:
    """Which folder imports from which."""
    arrows: dict[str, set[str]] = {}
    for place, file in _modules():
        homes = {_path(module) for module, _ in _imports(file)}
        homes = {home if (ROOT / home).is_dir() else home.rpartition("/")[0] for home in homes}
        arrows.setdefault(place, set()).update(
            home for home in homes if home.split("/")[0] in LAYERS and home != place
        )
    return arrows


def _rank(place: str) -> tuple[int, int]:
    layer, _, room = place.partition("/")
    return LAYERS.index(layer), ROOMS[layer].index(room)


def _path(module: str) -> str:
    return module.removeprefix("nonet").lstrip(".").replace(".", "/")


def _counts(entry: Path) -> bool:
    """Python files and folders are entries; what every folder has is none."""
    return (entry.suffix == ".py" and entry.stem != "__init__") or (
        entry.is_dir() and entry.name != "__pycache__"
    )


@cache
def _imports(file: Path) -> set[tuple[str, tuple[str, ...]]]:
    """Modules of the package that a file imports, with the names it takes out of them."""
    imports = set()
    for node in _list_nodes(file):
        if isinstance(node, ast.ImportFrom) and node.module:
            module = f"nonet.{node.module}" if node.level else node.module
            imports.add((module, tuple(alias.name for alias in node.names)))
        elif isinstance(node, ast.Import):
            imports |= {(alias.name, ()) for alias in node.names}
    return {(module, names) for module, names in imports if module.startswith("nonet.")}
