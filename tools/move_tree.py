"""Move a branch made before 2026-11-23 into the tree of subfolders: `python tools/move_tree.py`, then commit.

`tree_2026_11.txt` says which module became which. Files are moved with `git mv` and modules that became one are joined.
Imports, dotted names and paths are rewritten in every file that git knows. Between folders an import names the folder's face;
`--faces` adds what is imported to the faces (`__init__.pyi`). Afterwards: `make format`, then `git merge main`.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TABLE = Path(__file__).with_name("tree_2026_11.txt")
TEXT = {".py", ".md", ".yaml", ".toml", ".txt", ".h", ".cpp", ".sh", ".html", ".in", ".json"}
SKIP = {"tools/tree_2026_11.txt", "tools/move_tree.py", "CHANGELOG.md"}


@dataclass
class Tree:
    """Where each module goes: paths without .py, both ways; and what faces must offer."""

    moves: dict[str, str] = field(default_factory=dict)
    parts: dict[str, list[str]] = field(default_factory=dict)
    faces: dict[str, dict[str, set[str]]] = field(
        default_factory=lambda: defaultdict(lambda: defaultdict(set))
    )
    warnings: list[str] = field(default_factory=list)

    @classmethod
    def read(cls, table: Path) -> Tree:
        tree = cls()
        for line in table.read_text().splitlines():
            if "<-" in line and not line.startswith("#"):
                new, olds = line.split("<-")
                tree.parts[new.strip()] = [old.strip() for old in olds.split("+")]
                tree.moves |= {old.strip(): new.strip() for old in olds.split("+")}
        return tree

    def new(self, old: str) -> str:
        return self.moves.get(old, old)


def folder(path: str) -> str:
    """The folder of a module's path."""
    return path.rsplit("/", 1)[0] if "/" in path else ""


def dotted(path: str) -> str:
    """The import name of a path of the package."""
    return "nonet." + path.removeprefix("src/nonet/").replace("/", ".")


def old_path(module: str, tree: Tree) -> str | None:
    """The old path of an import name, where it is one that the table has."""
    path = module.removeprefix("nonet.").replace(".", "/")
    return path if path in tree.moves else None


def rewritten_imports(text: str, here: str, tree: Tree) -> str:
    """The text of the module whose new path is `here`, its imports of nonet as they are in the new tree."""
    lines = text.splitlines(keepends=True)
    nodes = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.ImportFrom | ast.Import)]
    for node in sorted(nodes, key=lambda node: -node.lineno):
        new = _statement(node, here, tree)
        if new is None:
            continue
        assert node.end_lineno is not None
        tail = re.search(r"\s*#.*$", lines[node.end_lineno - 1].rstrip("\n"))
        comment = tail.group() if tail and "(" not in tail.group() else ""
        indent = " " * node.col_offset
        lines[node.lineno - 1 : node.end_lineno] = [f"{indent}{line}{comment}\n" for line in new]
    return "".join(lines)


def _statement(node: ast.ImportFrom | ast.Import, here: str, tree: Tree) -> list[str] | None:
    if isinstance(node, ast.Import):
        changed = [old_path(alias.name, tree) for alias in node.names]
        if not any(changed):
            return None
        names = [
            dotted(tree.new(old)) if old else alias.name
            for old, alias in zip(changed, node.names, strict=True)
        ]
        return [f"import {name}" for name in names]
    if node.module is None or not (node.module + ".").startswith("nonet."):
        return None
    old = old_path(node.module, tree)
    if old is not None:
        return _from_module(node, tree.new(old), here, tree)
    return _from_folder(node, here, tree)


def _from_module(node: ast.ImportFrom, new: str, here: str, tree: Tree) -> list[str]:
    """Names out of a module: from it where it is in the same folder or a test asks, else from its folder's face."""
    if new == here:
        return []
    names = ", ".join(alias.name + (f" as {alias.asname}" if alias.asname else "") for alias in node.names)
    inside = folder(new) == folder(here) or here.startswith(("tests/", "tools/")) or new.startswith("src/")
    if inside:
        return [f"from {dotted(new)} import {names}"]
    for alias in node.names:
        tree.faces[folder(new)][new.rsplit("/", 1)[1]].add(alias.name)
        if alias.name.startswith("_"):
            tree.warnings.append(f"{here} imports {alias.name} of {new}")
    return [f"from {dotted(folder(new))} import {names}"]


def _from_folder(node: ast.ImportFrom, here: str, tree: Tree) -> list[str] | None:
    """Modules out of a folder, by their new names and under the names they had."""
    assert node.module is not None
    base = node.module.removeprefix("nonet").lstrip(".").replace(".", "/")
    if not any(f"{base}/{alias.name}" in tree.moves for alias in node.names):
        return None
    lines = []
    for alias in node.names:
        new = tree.new(f"{base}/{alias.name}")
        name, wanted = new.rsplit("/", 1)[1], alias.asname or alias.name
        lines.append(
            f"from {dotted(folder(new))} import {name}" + (f" as {wanted}" if wanted != name else "")
        )
        if folder(new) != folder(here) and not here.startswith("tests/"):
            tree.faces[folder(new)][""].add(name)
    return lines


def rewritten_words(text: str, tree: Tree, imports: bool = False) -> str:
    """Dotted names and paths of old modules wherever they are cited, but in imports, which are done."""
    paths = {f"{old}.py": f"{new}.py" for old, new in tree.moves.items()}
    pattern = "|".join(re.escape(name) for name in sorted(paths, key=len, reverse=True))

    def line(words: str) -> str:
        words = re.sub(
            r"(?<![\w.])nonet(?:\.[a-z_0-9]+)+", lambda match: _renamed(match.group(), tree), words
        )
        return re.sub(rf"(?<![\w/])({pattern})(?![\w])", lambda match: paths[match.group()], words)

    lines = text.splitlines(keepends=True)
    skip: set[int] = set()
    for node in ast.walk(ast.parse(text)) if imports else ():
        if isinstance(node, ast.ImportFrom | ast.Import):
            skip |= set(range(node.lineno - 1, node.end_lineno or node.lineno))
    return "".join(words if at in skip else line(words) for at, words in enumerate(lines))


def _renamed(name: str, tree: Tree) -> str:
    parts = name.split(".")
    for stop in range(len(parts), 1, -1):
        old = old_path(".".join(parts[:stop]), tree)
        if old is not None:
            return ".".join([dotted(tree.new(old)), *parts[stop:]])
    return name


def deeper(text: str, levels: int) -> str:
    """`Path(__file__)` of a file that lies `levels` folders deeper than it did."""
    if levels <= 0:
        return text

    def climb(match: re.Match[str]) -> str:
        resolve, up = match.group(1) or "", match.group(2)
        steps = int(up[9:-1]) + 1 if up.startswith(".parents[") else up.count(".parent")
        return f"Path(__file__){resolve}.parents[{steps - 1 + levels}]"

    text = re.sub(r"Path\(__file__\)(\.resolve\(\))?(\.parents\[\d+\]|(?:\.parent)+)(?![\w\[])", climb, text)
    return re.sub(
        r"Path\(__file__\)\.with_name\(([^()]*(?:\([^()]*\))?[^()]*)\)",
        rf"(Path(__file__).parents[{levels}] / \1)",
        text,
    )


def joined(texts: list[str], path: str, tree: Tree) -> str:
    """Several modules as one: docstrings one after the other, imports first, then the bodies."""
    if len(texts) == 1:
        return texts[0]
    docs, imports, bodies, defined = [], [], [], set()
    for text in texts:
        module, lines = ast.parse(text), text.splitlines()
        docs.append(ast.get_docstring(module, clean=False) or "")
        last = max((node.end_lineno or 0 for node in module.body if _is_head(node)), default=0)
        first = module.body[0].end_lineno or 0
        imports += [line for line in lines[first:last] if "__future__" not in line]
        bodies.append("\n".join(lines[last:]).strip("\n"))
        names = {node.name for node in module.body if isinstance(node, ast.FunctionDef | ast.ClassDef)}
        names |= {
            t.id
            for node in module.body
            if isinstance(node, ast.Assign)
            for t in node.targets
            if isinstance(t, ast.Name)
        }
        if names & defined:
            tree.warnings.append(f"{path} has {sorted(names & defined)} twice")
        defined |= names
    doc = "\n\n".join(text.rstrip() for text in docs)
    end = "\n" if "\n" in doc else ""
    return (
        f'"""{doc}{end}"""\n\nfrom __future__ import annotations\n\n'
        + "\n".join(imports)
        + "\n\n\n"
        + "\n\n\n".join(bodies)
        + "\n"
    )


def _is_head(node: ast.stmt) -> bool:
    """Docstring, imports and what is guarded by TYPE_CHECKING."""
    if isinstance(node, ast.If):
        return isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"
    return isinstance(node, ast.Import | ast.ImportFrom)


def git(*words: str) -> str:
    """What git prints, run in the repository."""
    return subprocess.run(["git", *words], cwd=ROOT, check=True, capture_output=True, text=True).stdout


def move(tree: Tree) -> None:
    """Move and join the files; nothing is committed."""
    for new, olds in tree.parts.items():
        present = [old for old in olds if (ROOT / f"{old}.py").exists()]
        if not present or present == [new]:
            continue
        texts = [(ROOT / f"{old}.py").read_text() for old in present]
        levels = new.count("/") - present[0].count("/") if not new.startswith("src/") else 0
        (ROOT / new).parent.mkdir(parents=True, exist_ok=True)
        if present[0] != new:
            git("mv", f"{present[0]}.py", f"{new}.py")
        for old in present[1:]:
            git("rm", "-q", f"{old}.py")
        (ROOT / f"{new}.py").write_text(deeper(joined(texts, new, tree), levels))


def rewrite(tree: Tree) -> None:
    """Imports, dotted names and paths in every text file that git knows."""
    for name in git("ls-files").splitlines():
        file = ROOT / name
        if name in SKIP or file.suffix not in TEXT | {""} or file.is_symlink() or not file.is_file():
            continue
        before = file.read_text()
        after = rewritten_imports(before, name.removesuffix(".py"), tree) if file.suffix == ".py" else before
        after = rewritten_words(after, tree, imports=file.suffix == ".py")
        if after != before:
            file.write_text(after)


def write_faces(tree: Tree) -> None:
    """Add what other folders import to the stubs of the folders' faces."""
    for place, modules in sorted(tree.faces.items()):
        stub = ROOT / place / "__init__.pyi"
        lines = set(stub.read_text().splitlines()) if stub.exists() else set()
        for module, names in modules.items():
            lines |= {f"from .{module} import {name} as {name}" for name in names}
        stub.write_text("\n".join(sorted(lines)) + "\n")


if __name__ == "__main__":
    table = Tree.read(TABLE)
    move(table)
    rewrite(table)
    if "--faces" in sys.argv:
        write_faces(table)
    print("\n".join(table.warnings))
