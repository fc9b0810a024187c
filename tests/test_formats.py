"""docs/reference/files.md has the number of every format that the code writes."""

from __future__ import annotations

import re
from pathlib import Path

from nonet.controller.record import checkpoint
from nonet.deploy.serving.offline import export
from nonet.embedding.storage import segments
from nonet.models.generation import signals, trie
from nonet.models.keras import optimizer
from nonet.samples.batches.graphs import graphs
from nonet.samples.ledger import ledger
from nonet.samples.sequences import choose_flat_format, sequences
from nonet.samples.stores import base
from nonet.storage import run_tree
from nonet.workers.registry import version

WRITTEN = {
    "checkpoint": checkpoint.FORMAT,
    "segment of a sparse table": segments.FORMAT,
    "sequences": sequences._FORMAT,
    "sequences with late labels": sequences._FORMAT_WITH_LATE_LABELS,
    "sequences prepared on disk": choose_flat_format(compressed=False, late_labels=False),
    "sequences of compressed events prepared on disk": choose_flat_format(compressed=True, late_labels=False),
    "sequences with late labels prepared on disk": choose_flat_format(compressed=False, late_labels=True),
    "sequences of compressed events with late labels prepared on disk": choose_flat_format(
        compressed=True, late_labels=True
    ),
    "graphs": graphs.FORMAT,
    "catalogue trie": trie.FORMAT,
    "signals of a memory": signals.FORMAT,
    "ledger of samples": ledger._FORMAT_WITHOUT_CONTENT,
    "ledger of samples from files": ledger._FORMAT,
    "packed store": base._FORMAT,
    "optimizer of a keras model": optimizer.RULES,
    "published version": version.FORMAT,
    "export": export.FORMAT,
    "head of a stored run": run_tree.FORMAT,
    "tree of a stored run": run_tree.FORMAT,
}


def test_the_table_has_the_numbers_that_are_written():
    page = (Path(__file__).parent.parent / "docs" / "reference" / "files.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| ([a-z ]+) \| (\d+) \| ", page, re.MULTILINE)
    assert {name: int(number) for name, number in rows} == WRITTEN
