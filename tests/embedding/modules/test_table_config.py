"""Tables from plain dicts: every key lands in its TableSpec field, and what is wrong is named."""

from __future__ import annotations

import pytest

from nonet.embedding.modules.table_config import table_configs
from nonet.embedding.tables.spec import TableSpec
from nonet.errors import ConfigError


def test_every_key_of_a_table_reaches_its_spec():
    configs = table_configs(
        {
            "item": {
                "dim": 8, "features": ["item", "history"], "combiner": "mean", "optimizer": "adam", "lr": 0.1,
                "init_scale": 0.3, "weight_decay": 0.01, "eps": 1e-6, "dtype": "bf16", "default": 0.5, "clip": 2.0,
                "admit": {"count": 3, "probability": 0.5}, "evict": {"by": "lru", "ttl_steps": 100},
                "budget": {"rows": 1000, "bytes": 1_000_000},
            },
            "city": {"text": True, "budget": 4096, "evict": {"by": "lfu"}, "optimizer": "ftrl", "l1": 0.1, "l2": 0.2},
        },
        {"dim": 4},
    )  # fmt: skip
    assert configs["item"].spec == TableSpec(
        8, "adam", 0.1, 0.3, 0.01, 1e-6, "bf16", 0.5, 2.0, 0.0, 0.0, 3, 0.5, "lru", 100, 1000, 1_000_000
    )
    assert (configs["item"].features, configs["item"].combiner) == (("item", "history"), "mean")
    city = configs["city"]
    assert (city.features, city.text, city.combiner) == (("city",), True, "sum")
    assert city.spec == TableSpec(4, "ftrl", l1=0.1, l2=0.2, evict="lfu", budget_bytes=4096)


@pytest.mark.parametrize(
    ("table", "says"),
    [
        ({"dimm": 8}, r"table 'item': unknown key 'dimm' \(did you mean 'dim'\?\)"),
        ({}, r"table 'item': dim is required"),
        ({"dim": 8, "combiner": "max"}, "combiner must be one of sum, mean, got 'max'"),
        ({"dim": 8, "text": "yes"}, "text must be true or false"),
        ({"dim": 8, "features": ["a", "a"]}, "name one twice"),
        ({"dim": 8, "admit": {"counts": 3}}, r"table 'item': admit: unknown key 'counts'"),
        ({"dim": 8, "admit": 3}, "admit must be a map of count, probability, got 3"),
        ({"dim": 8, "optimizer": "adamm"}, "table 'item'.*adamm"),
        ({"dim": 8, "evict": {"by": "lru"}}, "table 'item'.*budget"),
        ({"dim": 8, "budget": {"rows": 5}}, "table 'item'.*evict"),
    ],
)
def test_a_wrong_table_is_named(table, says):
    with pytest.raises(ConfigError, match=says):
        table_configs({"item": table})


def test_a_feature_of_two_tables_is_refused():
    with pytest.raises(ConfigError, match="feature 'user' is listed by the tables 'item' and 'user'"):
        table_configs({"item": {"dim": 8, "features": ["item", "user"]}, "user": {"dim": 8}})
