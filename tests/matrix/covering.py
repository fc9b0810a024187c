"""Rows of variants: every kind of model with every variant, and every two variants, that can be run together."""

from __future__ import annotations

ROWS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("decoder", ("join", "redis", "labels", "compressed", "stored", "disk")),
    ("decoder", ("redis", "parquet", "memory", "no tables", "file ids", "rl")),
    ("hf", ("join", "redis", "memory", "align", "warm", "integers")),
    ("decoder", ("labels", "streams", "no tables", "warm", "integers")),
    ("hf", ("labels", "compressed", "parquet", "file ids", "align")),
    ("hf", ("stored", "streams", "disk", "rl", "align")),
    ("hstu", ("join", "redis", "compressed", "no tables", "rl", "warm")),
    ("hf-lora", ("join", "redis", "stored", "disk", "file ids", "warm")),
    ("hstu", ("labels", "stored", "parquet", "disk", "memory")),
    ("hstu", ("compressed", "streams", "memory", "file ids", "integers")),
    ("hf-lora", ("labels", "compressed", "parquet", "rl", "integers")),
    ("hf", ("stored", "disk", "no tables", "align", "integers")),
    ("click", ("join", "redis", "graph", "labels", "tasks", "compressed", "stored", "disk")),
    ("keras", ("join", "redis", "graph", "labels", "tasks", "compressed", "stored", "disk")),
    ("hf-lora", ("streams", "memory", "no tables", "align")),
    ("click", ("graph", "tasks", "file ids", "warm", "integers")),
    ("keras", ("graph", "tasks", "file ids", "warm", "integers")),
    ("hstu", ("join", "parquet", "warm")),
)
"""(kind of model, variants) of each run. `test_every_pair_that_can_be_run_is_in_a_row` fails where a pair is missing."""
