"""Every verb that reads a finished run works for every kind of run, or is refused in one line."""

from __future__ import annotations

import pytest
from cells import CHECKS, Cell
from finished import make_run
from stranger import MODELS, Shop

from nonet.controller.scenario import find_verb_limit
from nonet.verbs import VERBS

PLAIN = [(kind, ()) for kind in MODELS]


class FinishedRuns:
    """The runs of this session, each made when it is first used."""

    def __init__(self, root):
        self._root, self._shops, self._runs = root, {}, {}

    def open(self, kind, variants):
        key = (kind, tuple(variants))
        if key not in self._runs:
            text_ids = list(MODELS).index(kind) % 2 == 0
            if text_ids not in self._shops:
                folder = self._root / ("text" if text_ids else "integers")
                folder.mkdir()
                self._shops[text_ids] = Shop(folder, text_ids)
            shop = self._shops[text_ids]
            scenario = shop.write_scenario(kind, variants)
            self._runs[key] = shop, make_run(scenario, shop.folder / "runs" / scenario.stem), scenario
        return self._runs[key]


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    return FinishedRuns(tmp_path_factory.mktemp("shops"))


@pytest.mark.parametrize("verb", CHECKS)
@pytest.mark.parametrize(
    ("kind", "variants"), PLAIN, ids=lambda value: value if isinstance(value, str) else "-".join(value)
)
def test_a_verb_works_or_is_refused_in_one_line(runs, kind, variants, verb, command, tmp_path):
    shop, folder, scenario = runs.open(kind, variants)
    cell = Cell(shop, folder, scenario, command, tmp_path)
    check, words = CHECKS[verb]
    limit = find_verb_limit(cell.scenario, verb) if verb in VERBS else None
    if limit is None:
        check(cell)
        return
    names = {"RUN": folder.path, "SCENARIO": scenario, "USER": shop.user_ids[0], "ITEM": shop.item_ids[0]}
    names |= {"FILE": shop.folder / "articles.parquet", "OUT": tmp_path / "out"}
    assert limit in cell.refuse(*(names.get(word, word) for word in words))
    assert not (tmp_path / "out").exists()
