"""A log of events as a fixture."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture
def write_log():
    def write(path: Path, *, repeats: bool = False, users: int = 12, events: int = 8) -> Path:
        """Write a CSV of users with some events each, one minute apart; with repeats, each item twice."""
        lines = ["user_id,item_id,timestamp"]
        for user in range(users):
            for event in range(events):
                item = (user + event // 2) % 9 if repeats else (user + event) % 9
                lines.append(f"{user},{item},{1_600_000_000 + 60 * (user * events + event)}")
        path.write_text("\n".join(lines) + "\n")
        return path

    return write
