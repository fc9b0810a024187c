"""Commands that users send to a running run, and their outcomes.

A command is a file in RUN/commands. The run's loop takes it between two steps, records it in commands.jsonl and writes
the answer to a file beside the command. The journal commands.jsonl is not cut by a resume: a command that was taken at a
step is taken at the same step again.
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


class CommandQueue:
    """The command queue of one run."""

    def __init__(self, run: RunFolder):
        self._folder, self._journal_path = run.path / "commands", run.path / "commands.jsonl"
        self._journal: Journal | None = None

    def ask(self, **command: Any) -> str:
        """Add a command to the queue.

        Args:
            **command: The fields of the command.

        Returns:
            The id of the command.
        """
        make_folder(self._folder)
        name = f"{time.time_ns()}-{secrets.token_hex(2)}"
        self._write(f"{name}.asked.json", {"id": name, "asked": time.time(), **command})
        return name

    def read_answer(self, command_id: str) -> dict[str, Any] | None:
        """Return the answer to a command, `{"state": "taken" | "refused", "text"}`, or None while there is none."""
        path = self._folder / f"{command_id}.answer.json"
        return json.loads(path.read_text(encoding="utf-8")) if path.exists() else None

    def list_waiting(self) -> list[dict[str, Any]]:
        """Return the commands without an answer, oldest first."""
        if not self._folder.is_dir():
            return []
        names = {path.name for path in self._folder.iterdir()}
        asked = sorted(name.removesuffix(".asked.json") for name in names if name.endswith(".asked.json"))
        left = [name for name in asked if f"{name}.answer.json" not in names]
        return [
            json.loads((self._folder / f"{name}.asked.json").read_text(encoding="utf-8")) for name in left
        ]

    def list_taken(self) -> list[dict[str, Any]]:
        """Return all taken and refused commands in order.

        A taken command has the fields `stage`, `step` and `text`; a refused one has `refused` instead.
        """
        return list(read_journal(self._journal_path))

    def take(self, command: dict[str, Any], stage: str, step: int, text: str) -> None:
        """Record that a command applies from a step of a stage on, and answer it."""
        self._note(**{**command, "stage": stage, "step": step, "text": text})
        self.reply(command["id"], "taken", text)

    def refuse(self, command: dict[str, Any], reason: str) -> None:
        """Record that a command is refused, and answer it with the reason."""
        self._note(**command, refused=reason)
        self.reply(command["id"], "refused", reason)

    def reply(self, command_id: str, state: str, text: str) -> None:
        """Write the answer to a command."""
        self._write(f"{command_id}.answer.json", {"state": state, "text": text})

    def _note(self, **record: Any) -> None:
        if self._journal is None:
            self._journal = Journal(self._journal_path)
        self._journal.write(**record)

    def _write(self, name: str, value: dict[str, Any]) -> Path:
        path = self._folder / name
        write_whole(path, json.dumps(value).encode())
        return path
