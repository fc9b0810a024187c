"""Rename functions, classes, methods and parameters by a map: `python tools/rename.py MAP... [--check]`, then commit.

A line of a map is `path:Qualified.name -> new_name` or `path:Qualified.function(parameter) -> new_name`; `#` begins a comment.
References come from pyright's language server, so names are resolved by type. What it cannot see is renamed by name where
no other definition has that name: attributes of objects without a type, dotted strings, `tests/mutants.yaml`, names in
backticks. The rest is listed as "look at". `--check` changes nothing. Afterwards: `ruff check --fix . ; ruff format .`.
"""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import unquote, urlparse

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ["attention", "embedding", "samples", "models", "rl", "workers", "controller", "deploy", "bench"]
MUTANTS = "tests/mutants.yaml"
COMMON = set(dir(str)) | set(dir(list)) | set(dir(dict)) | set(dir(set)) | set(dir(Path))


@dataclass
class Rename:
    """One line of a map, and where the references to it are."""

    path: str
    qualified: str
    parameter: str | None
    new: str
    places: set[tuple[str, int, int]] = field(default_factory=set)

    @property
    def old(self) -> str:
        return self.parameter or self.qualified.rsplit(".", 1)[-1]


class LanguageServer:
    """A pyright language server over the tree; `find_references` takes and gives paths relative to the root."""

    def __init__(self) -> None:
        self.config = ROOT / "pyrightconfig.json"
        include = ["src/nonet", *(f"src/nonet/{f}" for f in FOLDERS), "tests", "examples", "tools"]
        settings = {
            "include": include,
            "extraPaths": ["src"],
            "typeCheckingMode": "off",
            "pythonVersion": "3.11",
        }
        self.config.write_text(json.dumps(settings | {"venvPath": ".", "venv": ".venv"}))
        command = [sys.executable, "-m", "pyright.langserver", "--stdio"]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=ROOT)
        self.count = 0
        self.opened: set[str] = set()
        folder = {"uri": ROOT.as_uri(), "name": "root"}
        self.call("initialize", {"rootUri": ROOT.as_uri(), "capabilities": {}, "workspaceFolders": [folder]})
        self.send({"method": "initialized", "params": {}})

    def send(self, message: dict) -> None:
        assert self.process.stdin
        body = json.dumps({"jsonrpc": "2.0"} | message).encode()
        self.process.stdin.write(b"Content-Length: %d\r\n\r\n" % len(body) + body)
        self.process.stdin.flush()

    def receive(self) -> dict:
        assert self.process.stdout
        length = 0
        while line := self.process.stdout.readline().decode().strip():
            if line.lower().startswith("content-length"):
                length = int(line.split(":")[1])
        return json.loads(self.process.stdout.read(length))

    def call(self, method: str, params: dict) -> list | dict | None:
        self.count += 1
        mine = self.count
        self.send({"id": mine, "method": method, "params": params})
        while True:
            message = self.receive()
            if message.get("id") == mine and "method" not in message:
                return message.get("result")
            if "id" in message:
                empty = [{}] * len(message.get("params", {}).get("items", []))
                self.send({"id": message["id"], "result": empty or None})

    def find_references(self, path: str, line: int, column: int) -> set[tuple[str, int, int]]:
        uri = (ROOT / (f"src/nonet/{path}" if path.split("/")[0] in FOLDERS else path)).as_uri()
        if uri not in self.opened:
            self.opened.add(uri)
            document = {"uri": uri, "languageId": "python", "version": 1, "text": (ROOT / path).read_text()}
            self.send({"method": "textDocument/didOpen", "params": {"textDocument": document}})
        position = {"textDocument": {"uri": uri}, "position": {"line": line, "character": column}}
        answer = self.call("textDocument/references", position | {"context": {"includeDeclaration": True}})
        places = set()
        for reference in answer or []:
            real = Path(unquote(urlparse(reference["uri"]).path)).resolve()
            if real.is_relative_to(ROOT) and ".venv" not in real.parts:
                start = reference["range"]["start"]
                places.add((str(real.relative_to(ROOT)), start["line"], start["character"]))
        return places

    def stop(self) -> None:
        self.config.unlink(missing_ok=True)
        self.process.kill()
        self.process.wait()


def read_maps(paths: list[Path]) -> list[Rename]:
    renames = []
    for path in paths:
        for number, line in enumerate(path.read_text().splitlines(), 1):
            line = line.split("#")[0].strip()
            if not line:
                continue
            match = re.fullmatch(r"(\S+?):([\w.]+)(?:\((\w+)\))?\s*->\s*(\w+)", line)
            if not match:
                sys.exit(f"{path}:{number}: not `path:name -> new`: {line}")
            renames.append(Rename(match[1], match[2], match[3], match[4]))
    return renames


def find_definition(rename: Rename) -> list[tuple[int, int]]:
    """Return the places (0-based line, column) of a definition; overloads and property setters have several."""
    source = (ROOT / rename.path).read_text()
    nodes: list[ast.AST] = [ast.parse(source)]
    for part in rename.qualified.split("."):
        nodes = [found for node in nodes for found in _members(node, part)]
    lines = source.splitlines()
    places = []
    for node in nodes:
        if rename.parameter:
            arguments = node.args  # type: ignore[attr-defined]
            for arg in (
                *arguments.posonlyargs,
                *arguments.args,
                arguments.vararg,
                *arguments.kwonlyargs,
                arguments.kwarg,
            ):
                if arg and arg.arg == rename.parameter:
                    places.append((arg.lineno - 1, arg.col_offset))
        elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            match = re.compile(r"(def|class)\s+").search(lines[node.lineno - 1], node.col_offset)
            assert match
            places.append((node.lineno - 1, match.end()))
        else:
            places.append(
                (node.lineno - 1, node.col_offset + (0 if isinstance(node, ast.Name) else node.attr_offset))
            )  # type: ignore[attr-defined]
    return places


def _members(node: ast.AST, name: str) -> Iterator[ast.AST]:
    """Yield definitions of a name directly in a module, class or function; also assignments, and `self.name = `."""
    for child in ast.walk(node) if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) else _body(node):
        if isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)) and child.name == name:
            yield child
        elif (
            isinstance(child, ast.AnnAssign)
            and isinstance(child.target, ast.Name)
            and child.target.id == name
        ):
            yield child.target
        elif isinstance(child, ast.Assign):
            yield from (t for t in child.targets if isinstance(t, ast.Name) and t.id == name)
    if isinstance(node, ast.ClassDef):
        for child in ast.walk(node):
            stored = (
                isinstance(child, ast.Attribute) and isinstance(child.ctx, ast.Store) and child.attr == name
            )
            if stored and isinstance(child.value, ast.Name) and child.value.id == "self":
                child.attr_offset = len("self.")  # type: ignore[attr-defined]
                yield child
                return


def _body(node: ast.AST) -> Iterator[ast.AST]:
    for child in getattr(node, "body", []):
        yield child
        if isinstance(child, (ast.If, ast.Try)):
            yield from _body(child)


def list_sources() -> list[str]:
    names = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    return [n for n in names.stdout.splitlines() if (ROOT / n).is_file() and not (ROOT / n).is_symlink()]


@dataclass
class Names:
    """Every definition and attribute access in the tree, by name."""

    definitions: dict[str, set[tuple[str, int]]]
    attributes: dict[str, set[tuple[str, int, int]]]
    stored: dict[str, set[str]]

    @classmethod
    def collect(cls, files: list[str]) -> Names:
        definitions, attributes, stored = defaultdict(set), defaultdict(set), defaultdict(set)
        for path in files:
            if not path.endswith(".py"):
                continue
            source = (ROOT / path).read_text()
            lines = source.splitlines()
            for node in ast.walk(ast.parse(source)):
                if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
                    definitions[node.name].add((path, node.lineno - 1))
                elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                    stored[node.target.id].add(path)
                elif isinstance(node, ast.Attribute):
                    line = (node.end_lineno or 1) - 1
                    column = len(lines[line].encode()[: node.end_col_offset].decode()) - len(node.attr)
                    attributes[node.attr].add((path, line, column))
                    if isinstance(node.ctx, ast.Store):
                        stored[node.attr].add(path)
        return cls(definitions, attributes, stored)


def main(arguments: list[str]) -> int:
    check = "--check" in arguments
    renames = read_maps([Path(a) for a in arguments if not a.startswith("--")])
    files = list_sources()
    names = Names.collect(files)
    server, done, missing = LanguageServer(), [], []
    try:
        for number, rename in enumerate(renames):
            places = find_definition(rename) if (ROOT / rename.path).exists() else []
            if not places:
                missing.append(rename)
                continue
            for line, column in places:
                rename.places |= {(rename.path, line, column)} | server.find_references(
                    rename.path, line, column
                )
            done.append(rename)
            if number % 50 == 49:
                print(f"{number + 1} of {len(renames)} resolved", file=sys.stderr)
    finally:
        server.stop()
    edits: dict[tuple[str, int, int], Rename] = {}
    for rename in done:
        for place in rename.places:
            if edits.setdefault(place, rename).new != rename.new:
                print(
                    f"look at: {place[0]}:{place[1] + 1}: {rename.old} is to become {rename.new} and {edits[place].new}"
                )
    extra = _by_name(done, names, edits)
    changed = _apply(edits, check)
    _rename_words(done, changed, files, check, extra)
    for rename in missing:
        print(
            f"not found: {rename.path}:{rename.qualified}{f'({rename.parameter})' if rename.parameter else ''}"
        )
    print(f"{len(done)} names, {len(edits)} places")
    return 1 if missing else 0


def _by_name(done: list[Rename], names: Names, edits: dict[tuple[str, int, int], Rename]) -> set[str]:
    """Add accesses whose type is unknown where the name can mean nothing else; list the others. Return names that are unique."""
    unique = set()
    by_old = defaultdict(list)
    for rename in done:
        if not rename.parameter:
            by_old[rename.old].append(rename)
    for old, group in by_old.items():
        defined = {(p, line) for r in group for p, line, _ in r.places}
        others = {d for d in names.definitions[old] if d not in defined}
        members = all(
            "." in r.qualified and r.qualified.split(".")[-2].strip("_")[:1].isupper() for r in group
        )
        telling = (
            "_" in old.strip("_") or len(old) > 12
        )  # short words are also attributes of objects of other packages
        clear = not others and len({r.new for r in group}) == 1 and old not in COMMON and members and telling
        left = [place for place in names.attributes[old] if place not in edits]
        if clear and not (names.stored[old] and not all("." in r.qualified for r in group)):
            unique.add(old)
            product = [p for p in left if p[0] not in names.stored[old]]
            for place in left if not names.stored[old] else product:
                edits[place] = group[0]
                print(f"by name: {place[0]}:{place[1] + 1}: .{old} -> {group[0].new}")
        elif left and len(left) < 12:
            for path, line, _ in left:
                print(
                    f"look at: {path}:{line + 1}: .{old} kept (renamed elsewhere to {', '.join(sorted({r.new for r in group}))})"
                )
    return unique


def _apply(edits: dict[tuple[str, int, int], Rename], check: bool) -> dict[str, dict[str, str]]:
    """Write the edits; return for each file its changed lines, old to new."""
    by_file = defaultdict(list)
    for (path, line, column), rename in edits.items():
        by_file[path].append((line, column, rename))
    changed: dict[str, dict[str, str]] = defaultdict(dict)
    for path, places in by_file.items():
        text = (ROOT / path).read_text()
        lines = text.splitlines(keepends=True)
        before = list(lines)
        for line, column, rename in sorted(places, key=lambda p: (p[0], p[1]), reverse=True):
            here = lines[line]
            if here[column : column + len(rename.old)] != rename.old:
                if not re.search(rf"\b{rename.new}\b", here):
                    print(f"look at: {path}:{line + 1}: no {rename.old} here")
                continue
            lines[line] = here[:column] + rename.new + here[column + len(rename.old) :]
        for old, new in zip(before, lines, strict=True):
            if old != new:
                changed[path][old.strip()] = new.strip()
        if not check:
            (ROOT / path).write_text("".join(lines))
    return changed


def _rename_words(done: list[Rename], changed: dict, files: list[str], check: bool, unique: set[str]) -> None:
    """Rename in dotted strings, backticks, documents and mutants; list quoted words."""
    dotted: dict[str, str] = {}
    quoted: dict[str | tuple[str, str], str] = {}
    for rename in done:
        if rename.parameter:
            continue
        parts = rename.qualified.split(".")
        module = "nonet." + rename.path.removeprefix("src/nonet/").removesuffix(".py").replace("/", ".")
        for prefix in (module, module.rsplit(".", 1)[0]):
            for mark in (":", "."):
                if (
                    (ROOT / (prefix + "." + rename.qualified).removeprefix("nonet.").replace(".", "/"))
                    .with_suffix(".py")
                    .exists()
                ):
                    continue  # the dotted name is that of a module
                dotted[prefix + mark + rename.qualified] = prefix + mark + ".".join([*parts[:-1], rename.new])
        if len(parts) > 1:
            quoted[".".join(parts[-2:])] = f"{parts[-2]}.{rename.new}"
        alone = rename.old in unique and (len(rename.old) > 9 or "_" in rename.old)
        quoted[rename.old if alone else (rename.path, rename.old)] = rename.new
    endings = (".py", ".pyi", ".md", ".yaml", ".toml", ".cpp", ".h", ".sh")
    for path in files:
        if path.startswith("tools/") or path == "CHANGELOG.md" or not path.endswith(endings):
            continue
        text = (ROOT / path).read_text()
        new = re.sub(r"\bnonet\.[\w.]+(?::\w+(?:\.\w+)*)?", lambda m: dotted.get(m[0], m[0]), text)
        new = re.sub(
            r"`(\w+(?:\.\w+)*)(?=[`(])",
            lambda m, path=path: "`" + quoted.get(m[1], quoted.get((path, m[1]), m[1])),
            new,
        )
        if path == MUTANTS:
            new = _rename_mutants(new, changed, done)
        if new != text and not check:
            (ROOT / path).write_text(new)
        if path.endswith(".py") and path != "tests/test_language.py":
            _list_quoted(path, new, done)


def _list_quoted(path: str, text: str, done: list[Rename]) -> None:
    """List old names as strings in calls that look names up: getattr, setattr, patches, remote control calls."""
    news: dict[str, set[str]] = defaultdict(set)
    for rename in done:
        if not rename.parameter:
            news[rename.old].add(rename.new)
    for number, line in enumerate(text.splitlines(), 1):
        if re.search(r"attr\(|patch\.|control\(", line):
            for word in re.findall(r"\"(\w+)\"", line):
                if word in news:
                    print(
                        f"look at: {path}:{number}: {line.strip()[:140]}   ({word} -> {', '.join(sorted(news[word]))})"
                    )


def _rename_mutants(text: str, changed: dict, done: list[Rename]) -> str:
    blocks = re.split(r"(?m)^(?=- name: )", text)
    for number, block in enumerate(blocks):
        file = re.search(r"(?m)^  file: (\S+)", block)
        lines = changed.get(file[1], {}) if file else {}
        if not lines:
            continue
        used = {r.old: r.new for r in done if any(p == file[1] for p, _, _ in r.places)}
        out = []
        for line in block.splitlines(keepends=True):
            if not re.match(r"  (name|file|why|test|tests|kills|killed_by):", line) and not line.startswith(
                "- name"
            ):
                for old, new in used.items():
                    pattern = (
                        rf"(?<![\w\"'.]){old}(?=\()|(?<=\.){old}\b|\b{old}\b(?!=)"
                        if len(old) > 3
                        else rf"\b{old}(?=\()"
                    )
                    if any(re.search(rf"\b{re.escape(new)}\b", after) for after in lines.values()):
                        key, text = re.match(r"(  \w+: )?(.*)", line, re.S).groups("")  # type: ignore[union-attr]
                        line = key + re.sub(pattern, new, text)
            out.append(line)
        blocks[number] = "".join(out)
    return "".join(blocks)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
