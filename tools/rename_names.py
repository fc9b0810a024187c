"""Rename classes, functions, methods and variables by `names_2026_11.txt`: `python tools/rename_names.py`, then commit.

It may run on any checkout, and again: what has its new name already stays. Words are replaced whole, in comments and strings
too; a capitalised word that only begins a sentence ("Move rows ...") stays. Lines of
`tests/mutants.yaml` follow the file they change. Afterwards: `ruff check --fix . ; ruff format .`.
"""

from __future__ import annotations

import re
import subprocess
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TABLE = Path(__file__).with_name("names_2026_11.txt")
MUTANTS = "tests/mutants.yaml"


@dataclass(frozen=True)
class Rule:
    """One line of the table: the pattern, what takes its place, and the folders or files it holds in (none: all)."""

    pattern: re.Pattern[str]
    new: str
    paths: tuple[str, ...]

    @classmethod
    def parse(cls, line: str) -> Rule:
        old, _, rest = line.partition(" -> ")
        new, _, paths = rest.partition(" in ")
        begin, end = (r"\b" if old[0].isidentifier() else ""), (r"\b" if old[-1].isidentifier() else "")
        # an English word at the head of a sentence: after quotes, a comment's mark, a full stop or an indent
        prose = r'(?<!""")(?<!# )(?<!\. )(?<!    )' if old.isalpha() and old[0].isupper() else ""
        pattern = f"{prose}{begin}{re.escape(old)}{end}"
        if prose:
            pattern += f"|{begin}{re.escape(old)}{end}(?! [a-z])"
        return cls(re.compile(pattern), new, tuple(paths.split()))

    def holds(self, path: str) -> bool:
        return not self.paths or any(path == each or path.startswith(f"{each}/") for each in self.paths)


def renamed(text: str, path: str, rules: list[Rule]) -> str:
    """The text of a file with its new names."""
    for rule in rules:
        if rule.holds(path):
            text = rule.pattern.sub(rule.new.replace("\\", r"\\"), text)
    return text


def renamed_mutants(text: str, rules: list[Rule]) -> str:
    """Mutants with their lines as they are in the files that they change."""
    blocks = re.split(r"(?m)^(?=- name: )", text)
    files = [re.search(r"(?m)^  file: (\S+)", block) for block in blocks]
    return "".join(
        renamed(block, file[1], rules) if file else block for block, file in zip(blocks, files, strict=True)
    )


def main() -> None:
    lines = TABLE.read_text().splitlines()
    rules = [Rule.parse(line) for line in lines if " -> " in line and not line.startswith("#")]
    listed = subprocess.run(
        ["git", "ls-files", "*.py", "*.pyi", "*.md", "*.yaml"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    for path in listed.stdout.splitlines():
        file = ROOT / path
        if path == "CHANGELOG.md" or path.startswith("tools/") or file.is_symlink():
            continue
        before = file.read_text()
        after = renamed_mutants(before, rules) if path == MUTANTS else renamed(before, path, rules)
        if after != before:
            file.write_text(after)


if __name__ == "__main__":
    main()
