"""Commands that users send to a running run, and their outcomes.

A command is a file in RUN/commands. Between two steps, the run's loop takes (applies) or refuses it, records that in the
journal RUN/commands.jsonl, and writes the answer to a file beside the command. A resume does not truncate this journal: a
command that was taken at a step is taken at the same step again.
"""

from __future__ import annotations

import json
import secrets
import time
from typing import Any

from nonet.atomic import make_folder, read_json, write_whole
from nonet.controller.record.journal import encode_record, read_intact_records
from nonet.controller.record.run_folder import RunFolder
from nonet.journal import LineJournal
from nonet.storage import receive_command, send_command

SCALE = "scale"
"""The verb of commands that change the number of workers; all others change the rewards of a stage."""


class CommandQueue:
    """The commands that were sent to one run, and their answers."""

    def __init__(self, run: RunFolder):
        self._folder, self._journal_path = run.path / "commands", run.path / "commands.jsonl"
        self._journal: LineJournal | None = None

    def ask(self, **command: Any) -> str:
        """Add a command to the queue.

        Args:
            **command: The fields of the command; "id" and "asked", the time, are added.

        Returns:
            The id of the command.
        """
        make_folder(self._folder)
        command_id = f"{time.time_ns()}-{secrets.token_hex(2)}"  # sorts by time
        self._write(f"{command_id}.asked.json", {"id": command_id, "asked": time.time(), **command})
        return command_id

    def read_answer(self, command_id: str) -> dict[str, Any] | None:
        """Return the answer to a command, `{"state": "taken" | "refused", "text"}`, or None while there is none."""
        path = self._folder / f"{command_id}.answer.json"
        receive_command(path)
        return read_json(path) if path.exists() else None

    def list_waiting(self) -> list[dict[str, Any]]:
        """Return the commands without an answer, oldest first.

        A command that the journal has already is answered now, because the run ended before its answer was written.
        """
        if not self._folder.is_dir():
            return []
        files = {path.name for path in self._folder.iterdir()}
        ids = sorted(file.removesuffix(".asked.json") for file in files if file.endswith(".asked.json"))
        waiting_ids = [command_id for command_id in ids if f"{command_id}.answer.json" not in files]
        recorded_by_id = {command["id"]: command for command in self.list_taken()} if waiting_ids else {}
        for command_id in recorded_by_id.keys() & waiting_ids:
            recorded = recorded_by_id[command_id]
            state = "refused" if "refused" in recorded else "taken"
            self.reply(command_id, state, recorded.get("refused", recorded.get("text", "")))
        return [
            read_json(self._folder / f"{command_id}.asked.json")
            for command_id in waiting_ids
            if command_id not in recorded_by_id
        ]

    def list_taken(self) -> list[dict[str, Any]]:
        """Return all answered commands, both taken and refused ones, in the order of their answers.

        A taken command has the fields `stage`, `step` and `text`; a refused one has `refused` instead.
        """
        return list(read_intact_records(self._journal_path))

    def take(self, command: dict[str, Any], stage: str, step: int, text: str) -> None:
        """Record that a command applies from a step of a stage on, and answer it."""
        self._record(**{**command, "stage": stage, "step": step, "text": text})
        self.reply(command["id"], "taken", text)

    def refuse(self, command: dict[str, Any], reason: str) -> None:
        """Record that a command is refused, and answer it with the reason."""
        self._record(**command, refused=reason)
        self.reply(command["id"], "refused", reason)

    def reply(self, command_id: str, state: str, text: str) -> None:
        """Write the answer to a command.

        Args:
            command_id: The id of the command.
            state: "taken" or "refused".
            text: What the command did, or the reason of the refusal.
        """
        self._write(f"{command_id}.answer.json", {"state": state, "text": text})

    def _record(self, **record: Any) -> None:
        """Append a record to commands.jsonl, which is created with the first one."""
        if self._journal is None:
            self._journal = LineJournal(self._journal_path)
        self._journal.append(encode_record(record))

    def _write(self, name: str, value: dict[str, Any]) -> None:
        """Write a JSON file in RUN/commands atomically."""
        write_whole(self._folder / name, json.dumps(value).encode())
        if name.endswith(".asked.json"):
            send_command(self._folder / name)
