"""Whether a process reaches a folder that others work in, tried on a file. No Ray: a driver asks it of itself too."""

from __future__ import annotations

import os
from pathlib import Path


def unreachable(file: Path, token: str) -> str:
    """Why this process cannot read `file` with `token` in it and write beside it; "" where it can."""
    if not file.parent.is_dir():
        return "has no such folder"
    try:
        if file.read_text(encoding="utf-8") != token:
            return "reads another file there"
    except OSError as error:
        return f"sees another folder there: {error.strerror}"
    return "" if os.access(file.parent, os.W_OK) else "may not write there"
