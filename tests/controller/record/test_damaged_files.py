"""Files of a run that somebody else wrote are refused in one line, and nobody waits for them."""

from __future__ import annotations

import os

import pytest

from nonet.controller.record import RunFolder, read_manifest
from nonet.controller.record.commands import CommandQueue
from nonet.errors import CheckpointError, ConfigError

FACTS = "results/tokenise.json"


def put(path, content):
    path.parent.mkdir(parents=True, exist_ok=True)
    os.mkfifo(path) if content is None else path.write_text(content)


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    ("name", "content", "read"),
    [
        (FACTS, "[]", RunFolder.read_facts),
        (FACTS, "{}", lambda run: run.fetch_artifacts(run.read_facts()["artifacts"])),
        (FACTS, '{"artifacts": {"sequences": 3}}', RunFolder.read_facts),
        (FACTS, '{"artifacts": []}', RunFolder.describe_owner),
        (FACTS, None, RunFolder.describe_owner),
        ("metrics.jsonl", None, RunFolder.describe_owner),
        ("catalogues.json", '{"versions": [3]}', RunFolder.read_catalogues),
        ("catalogues.json", "[3]", RunFolder.read_catalogues),
        ("commands/1.asked.json", None, lambda run: CommandQueue(run).list_waiting()),
    ],
)
def test_a_damaged_record_is_refused_in_one_line(tmp_path, name, content, read):
    if name == "metrics.jsonl":
        put(tmp_path / FACTS, '{"artifacts": {}}')
    put(tmp_path / name, content)
    with pytest.raises(ConfigError, match=r"is damaged|is no regular file") as caught:
        read(RunFolder(tmp_path))
    assert str(tmp_path / name) in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.timeout(60)
@pytest.mark.parametrize("content", [None, "[" * 200_000, "[]", "3"])
def test_a_damaged_manifest_is_no_checkpoint(tmp_path, content):
    put(tmp_path / "manifest.json", content)
    with pytest.raises(CheckpointError, match="is not a complete checkpoint"):
        read_manifest(tmp_path)
