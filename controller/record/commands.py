"""Commands: what people ask of a run while it goes on, and what became of it.

A command is a file of RUN/commands. The run's loop takes it between two steps, notes it in commands.jsonl (a journal, which no
resume cuts: what was taken at a step is taken there again) and answers in a file beside it.
"""

from __future__ import annotations

import json
import secrets
import time
from pathlib import Path
from typing import Any

from nonet.atomic import make_folder, write_whole
from nonet.controller.record.journal import Journal, read_journal
from nonet.controller.record.run_folder import RunFolder


class Commands:
    """The queue of one run."""

    def __init__(self, run: RunFolder):
        self._folder, self._journal_path = run.path / "commands", run.path / "commands.jsonl"
        self._journal: Journal | None = None

    def ask(self, **command: Any) -> str:
        """Put a command into the queue; its id."""
        make_folder(self._folder)
        name = f"{time.time_ns()}-{secrets.token_hex(2)}"
        self._write(f"{name}.asked.json", {"id": name, "asked": time.time(), **command})
        return name

    def answer(self, name: str) -> dict[str, Any] | None:
        """{"state": "taken" | "refused", "text"} of a command, None while it waits."""
        path = self._folder / f"{name}.answer.json"
        return json.loads(path.read_text(encoding="utf-8")) if path.exists() else None

    def waiting(self) -> list[dict[str, Any]]:
        """Commands without an answer, oldest first."""
        if not self._folder.is_dir():
            return []
        names = {path.name for path in self._folder.iterdir()}
        asked = sorted(name.removesuffix(".asked.json") for name in names if name.endswith(".asked.json"))
        left = [name for name in asked if f"{name}.answer.json" not in names]
        return [
            json.loads((self._folder / f"{name}.asked.json").read_text(encoding="utf-8")) for name in left
        ]

    def taken(self) -> list[dict[str, Any]]:
        """Every command that was taken, in order, with `stage`, `step` and `text`; refused ones have `refused` instead."""
        return list(read_journal(self._journal_path))

    def take(self, command: dict[str, Any], stage: str, step: int, text: str) -> None:
        """Note that a command is in force from a step of a stage on, and say so."""
        self._note(**{**command, "stage": stage, "step": step, "text": text})
        self.reply(command["id"], "taken", text)

    def refuse(self, command: dict[str, Any], why: str) -> None:
        """Note that a command is not carried out, and say why."""
        self._note(**command, refused=why)
        self.reply(command["id"], "refused", why)

    def reply(self, name: str, state: str, text: str) -> None:
        """Answer whoever asked."""
        self._write(f"{name}.answer.json", {"state": state, "text": text})

    def _note(self, **record: Any) -> None:
        if self._journal is None:
            self._journal = Journal(self._journal_path)
        self._journal.write(**record)

    def _write(self, name: str, value: dict[str, Any]) -> Path:
        path = self._folder / name
        write_whole(path, json.dumps(value).encode())
        return path
