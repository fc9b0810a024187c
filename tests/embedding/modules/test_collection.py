"""The embedding modules: equal to torch's on the same weights, gradients to the tables, one pull a table."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from nonet.embedding.modules.collection import (
    EmbeddingBagCollection,
    LocalRowSource,
    ReaderRowSource,
    TableConfig,
)
from nonet.embedding.reading.reader import LocalReader
from nonet.embedding.tables.factory import make_table
from nonet.embedding.tables.spec import TableSpec
from nonet.embedding.training.sharded_tables import ShardedTables
from nonet.errors import ConfigError, DataError
from nonet.random import rng
from nonet.types import Jagged

LR = 0.05


def tables(combiner="sum"):
    return {
        "item": TableConfig(TableSpec(8, "sgd", LR, init_scale=0.1), ("item", "history"), combiner),
        "user": TableConfig(TableSpec(4, "sgd", LR, init_scale=0.1), ("user",), "mean"),
    }


def world(configs, seed=3):
    return ShardedTables({name: config.spec for name, config in configs.items()}, seed=seed)


def batch(bags=40, ids=50, seed=1, empty=0.3):
    draw = rng(seed, "batch")
    lengths = draw.integers(1, 7, bags) * (draw.random(bags) > empty)
    offsets = torch.from_numpy(np.concatenate([[0], np.cumsum(lengths)]))
    history = torch.from_numpy(draw.integers(0, ids, int(offsets[-1])))
    users = torch.from_numpy(draw.integers(0, ids, 2 * bags))
    return {
        "item": torch.from_numpy(draw.integers(0, ids, bags)),
        "history": Jagged(history, offsets),
        "user": Jagged(users, torch.arange(bags + 1) * 2),
    }


class Torch(nn.Module):
    """The same weights in torch's own modules."""

    def __init__(self, source, configs, ids=50):
        super().__init__()
        every = torch.arange(ids)
        self.bags = nn.ModuleDict(
            {
                name: nn.EmbeddingBag.from_pretrained(
                    source.pull(name, every).clone(),
                    freeze=False,
                    mode=config.combiner,
                    include_last_offset=True,
                )
                for name, config in configs.items()
            }
        )

    def forward(self, asked):
        item = self.bags["item"](asked["item"], torch.arange(len(asked["item"]) + 1))
        history = self.bags["item"](asked["history"].values, asked["history"].offsets)
        return {
            "item": item,
            "history": history,
            "user": self.bags["user"](asked["user"].values, asked["user"].offsets),
        }


def loss_of(pooled, weights):
    return sum(((rows * weights[name]) ** 2).sum() for name, rows in sorted(pooled.items()))


@pytest.mark.parametrize("combiner", ["sum", "mean"])
def test_pooled_rows_are_torch_embedding_bag_bit_for_bit(combiner):
    configs = tables(combiner=combiner)
    source, asked = world(configs), batch()
    theirs = Torch(source, configs)(asked)
    ours = EmbeddingBagCollection(configs, source)(asked)
    for name in ("item", "history", "user"):
        assert torch.equal(ours[name], theirs[name]), name


@pytest.mark.parametrize("combiner", ["sum", "mean"])
def test_bags_of_one_id_each_are_the_rows_themselves_and_two_ids_beside_none_are_not(combiner):
    configs = tables(combiner=combiner)
    bags = EmbeddingBagCollection(configs, world(configs))
    one = Jagged(torch.tensor([3, 5, 7]), torch.arange(4))
    two = Jagged(torch.tensor([3, 5, 7]), torch.tensor([0, 2, 2, 3]))  # as many ids as bags
    single = bags({"item": one, "history": one, "user": one})
    uneven = bags({"item": one, "history": two, "user": two})
    assert torch.equal(single["history"], single["item"])
    expected = single["item"][0] + single["item"][1]
    torch.testing.assert_close(uneven["history"][0], expected / 2 if combiner == "mean" else expected)
    assert uneven["history"][1].tolist() == uneven["user"][1].tolist() * 2 == [0.0] * 8
    assert torch.equal(uneven["history"][2], single["item"][2])


def test_a_sequence_has_the_rows_of_its_newest_ids_and_a_mask_and_learns_them():
    configs = tables(combiner="mean")
    source = world(configs)
    bags = EmbeddingBagCollection(configs, source, {"history": 2})
    past = Jagged(torch.tensor([3, 5, 7, 9]), torch.tensor([0, 3, 3, 4]))
    some = torch.tensor([3, 5, 7])
    rows = bags({"item": some, "history": past, "user": some})
    read = source.pull("item", torch.tensor([5, 7, 9]), train=False)
    assert rows["history_mask"].tolist() == [[1, 1], [0, 0], [1, 0]]
    zeros = torch.zeros(8)
    assert torch.equal(
        rows["history"], torch.stack([read[0], read[1], zeros, zeros, read[2], zeros]).view(3, 2, 8)
    )
    before = source.pull("item", torch.tensor([3, 5, 7, 9]), train=False).clone()
    rows["history"].sum().backward()
    bags.push(1)
    moved = (source.pull("item", torch.tensor([3, 5, 7, 9]), train=False) - before).abs().sum(1)
    assert (moved > 0).tolist() == [False, True, True, True]  # the oldest of three events is not read


@pytest.mark.parametrize("combiner", ["sum", "mean"])
def test_steps_of_sgd_follow_torch_sgd(combiner):
    configs = tables(combiner=combiner)
    source = world(configs)
    torch_model, bags = Torch(source, configs), EmbeddingBagCollection(configs, source)
    optimizer = torch.optim.SGD(torch_model.parameters(), lr=LR)
    draw = rng(5, "weights")
    for step in range(1, 6):
        asked = batch(seed=step)
        weights = {
            name: torch.from_numpy(draw.standard_normal(dim, np.float32)) for name, dim in bags.dims.items()
        }
        optimizer.zero_grad()
        loss_of(torch_model(asked), weights).backward()
        optimizer.step()
        loss_of(bags(asked), weights).backward()
        bags.push(step)
    every = torch.arange(50)
    for name in configs:
        # Torch adds the gradients of two features bag by bag, the table position by position: 5 steps of rounding.
        torch.testing.assert_close(
            source.pull(name, every), torch_model.bags[name].weight.data, rtol=1e-5, atol=1e-6
        )


class Counting(LocalRowSource):
    def __init__(self, configs, seed=3):
        super().__init__({name: make_table(name, config.spec, seed) for name, config in configs.items()})
        self.pulls, self.pushes = [], []

    def pull(self, table, keys, *, train=True):
        self.pulls.append((table, train))
        return super().pull(table, keys, train=train)

    def push(self, table, keys, grads, step, lr=None):
        self.pushes.append((table, len(keys), lr))
        super().push(table, keys, grads, step, lr)


def test_features_of_a_table_share_one_pull_and_one_push():
    configs = tables()
    source, asked = Counting(configs), batch()
    bags = EmbeddingBagCollection(configs, source)
    sum(rows.sum() for rows in bags(asked).values()).backward()
    bags.push(1, lr={"item": 0.25})
    assert source.pulls == [("item", True), ("user", True)]
    positions = len(asked["item"]) + len(asked["history"].values)
    assert source.pushes == [("item", positions, 0.25), ("user", len(asked["user"].values), None)]


def test_micro_batches_make_one_step_of_their_summed_gradients():
    configs = tables()
    whole, parts = Counting(configs), Counting(configs)
    one, two = EmbeddingBagCollection(configs, whole), EmbeddingBagCollection(configs, parts)
    first, second = batch(seed=1), batch(seed=2)
    for asked in (first, second):
        sum(rows.sum() for rows in two(asked).values()).backward()
    two.push(1)
    joined = {
        name: Jagged(
            torch.cat([_jagged(asked[name]).values for asked in (first, second)]),
            torch.cat(
                [
                    _jagged(first[name]).offsets,
                    _jagged(second[name]).offsets[1:] + _jagged(first[name]).offsets[-1],
                ]
            ),
        )
        for name in first
    }
    sum(rows.sum() for rows in one(joined).values()).backward()
    one.push(1)
    assert [pushed[0] for pushed in parts.pushes] == ["item", "user"]
    for name in configs:
        ours, theirs = (
            source.tables[name].lookup(torch.arange(50), train=False) for source in (parts, whole)
        )
        # Micro-batches put the history of the first before the items of the second: another order of one sum.
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


def _jagged(value):
    return value if isinstance(value, Jagged) else Jagged(value, torch.arange(len(value) + 1))


def test_eval_and_no_grad_make_no_rows():
    configs = tables()
    source = Counting(configs)
    bags = EmbeddingBagCollection(configs, source)
    with torch.no_grad():
        bags(batch())
    assert torch.equal(bags.eval()(batch())["item"], torch.zeros(40, 8))
    assert [len(table) for table in source.tables.values()] == [0, 0]
    assert {train for _, train in source.pulls} == {False}
    bags.train()(batch())
    assert len(source.tables["item"]) > 0


def test_a_reader_serves_eval_and_refuses_training():
    configs = tables()
    source = Counting(configs)
    trained = EmbeddingBagCollection(configs, source)(batch())
    reading = EmbeddingBagCollection(configs, ReaderRowSource(LocalReader(source.tables)))
    with pytest.raises(ConfigError, match="reader"):
        reading(batch())
    read = reading.eval()(batch())
    assert all(torch.equal(read[name], trained[name]) for name in trained)


def test_empty_bags_and_batches_without_any_id_are_zeros():
    configs = tables(combiner="mean")
    bags = EmbeddingBagCollection(configs, world(configs))
    none = Jagged(torch.empty(0, dtype=torch.int64), torch.zeros(4, dtype=torch.int64))
    pooled = bags({"item": none, "history": none, "user": none})
    assert {name: rows.tolist() for name, rows in pooled.items()} == {
        "item": [[0.0] * 8] * 3,
        "history": [[0.0] * 8] * 3,
        "user": [[0.0] * 4] * 3,
    }
    sum(rows.sum() for rows in pooled.values()).backward()
    bags.push(1)
    nobody = Jagged(torch.empty(0, dtype=torch.int64), torch.zeros(1, dtype=torch.int64))
    assert bags({"item": nobody, "history": nobody, "user": nobody})["item"].shape == (0, 8)


def test_rows_that_no_loss_reached_do_not_move():
    configs = tables()
    source = world(configs)
    bags = EmbeddingBagCollection(configs, source)
    before = source.pull("user", torch.arange(50)).clone()
    bags(batch())["item"].sum().backward()
    bags.push(1)
    assert torch.equal(source.pull("user", torch.arange(50)), before)


def test_a_feature_of_two_tables_is_refused():
    twice = {name: TableConfig(TableSpec(8), ("user",)) for name in ("item", "user")}
    with pytest.raises(ConfigError, match="feature 'user' is listed by the tables 'item' and 'user'"):
        EmbeddingBagCollection(twice, world(twice))


def test_text_features_have_rows_and_learn():
    configs = {"city": TableConfig(TableSpec(4, "sgd", 0.1), ("city",), "mean", text=True)}
    bags = EmbeddingBagCollection(configs, world(configs))
    asked = {"city": Jagged(["Łódź", "東京", "Łódź", "Rome"], torch.tensor([0, 2, 3, 4]))}
    first = bags(asked)["city"]
    assert not torch.equal(first[1], first[2])
    first[1].sum().backward()
    bags.push(1)
    second = bags(asked)["city"]
    torch.testing.assert_close(second[1], first[1] - 0.1, rtol=1e-6, atol=1e-7)
    assert torch.equal(second[2], first[2])


def test_forwards_without_a_push_are_an_error_and_not_a_leak():
    configs = {"item": TableConfig(TableSpec(1), ("item",))}
    bags = EmbeddingBagCollection(configs, world(configs))
    one = {"item": torch.tensor([1])}
    for _ in range(1024):
        bags(one)
    with pytest.raises(ConfigError, match="push"):
        bags(one)
    bags.drop_pending()
    bags(one)


@pytest.mark.parametrize(
    ("feature", "value", "says"),
    [
        ("item", torch.ones(40), "'item' must be int64"),
        ("item", ["a"] * 40, "text: true"),
        ("item", torch.ones(39, dtype=torch.int64), "39|40"),
        ("history", Jagged(torch.ones(3, dtype=torch.int64), torch.tensor([0, 2])), "0 to 2"),
        ("history", Jagged(torch.ones(3, dtype=torch.int64), torch.tensor([0, 2, 1, 3])), "rise"),
        ("history", Jagged(torch.ones(3, dtype=torch.int64), torch.tensor([0.0, 3.0])), "int64"),
    ],
)  # fmt: skip
def test_a_wrong_feature_is_named(feature, value, says):
    configs = tables()
    bags = EmbeddingBagCollection(configs, world(configs))
    with pytest.raises(DataError, match=feature) as caught:
        bags(batch() | {feature: value})
    assert any(part in str(caught.value) for part in says.split("|"))


def test_a_missing_feature_is_named_with_those_there_are():
    configs = tables()
    asked = batch()
    del asked["history"]
    with pytest.raises(DataError, match=r"no feature 'history'.*item, user"):
        EmbeddingBagCollection(configs, world(configs))(asked)


class Tower(nn.Module):
    def __init__(self, bags):
        super().__init__()
        self.bags = bags
        self.layer = nn.Linear(20, 1)

    def head(self, pulled):
        pooled = self.bags.pool(pulled)
        return self.layer(torch.cat([pooled["item"], pooled["history"], pooled["user"]], 1)).sigmoid()

    def forward(self, asked):
        return self.head(self.bags.pull(asked))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_what_follows_the_look_up_compiles_whole_and_learns_the_same():
    torch.manual_seed(0)
    configs = tables()
    source = world(configs)
    tower = Tower(EmbeddingBagCollection(configs, source))
    compiled = torch.compile(tower.head, fullgraph=True, dynamic=True)
    pulled, again = tower.bags.pull(batch()), tower.bags.pull(batch())
    ours, theirs = compiled(again), tower.head(pulled)
    torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-6)
    ours.sum().backward()
    theirs.sum().backward()
    for name in configs:
        torch.testing.assert_close(again.rows[name].grad, pulled.rows[name].grad, rtol=1e-6, atol=1e-7)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_compiled_model_breaks_its_graph_at_the_look_up_alone():
    torch.manual_seed(0)
    configs = tables()
    tower = Tower(EmbeddingBagCollection(configs, world(configs)))
    eager = tower(batch())
    compiled = torch.compile(tower)
    torch.testing.assert_close(compiled(batch()), eager, rtol=1e-6, atol=1e-6)
    compiled(batch()).sum().backward()
    tower.bags.push(1)
    explained = torch._dynamo.explain(tower)(batch())
    assert explained.graph_break_count <= 1, explained.break_reasons
