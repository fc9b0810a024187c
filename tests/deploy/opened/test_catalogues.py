"""Items that come and go while a server answers: a later version of the catalogue, without a restart."""

from __future__ import annotations

import os
import time
from types import SimpleNamespace

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from served_run import ask, items
from starlette.testclient import TestClient

from nonet.controller.record import CATALOGUES, RunFolder
from nonet.deploy.after import add_items
from nonet.deploy.opened.catalogues import CatalogueVersions
from nonet.deploy.serving.service import ServeConfig
from nonet.deploy.serving.start import build_single_process_app
from nonet.errors import CheckpointError
from nonet.models.generation import Corpus


def new_catalogue(served, folder, title, withdrawn):
    """One more item, and one that leaves."""
    items = served.ring.corpus().items
    row = {"item_id": [5000], "title": [title], "categories": [items["categories"].to_pylist()[3]]}
    pq.write_table(
        pa.table({name: row[name] for name in row if name in items.column_names}), folder / "new.parquet"
    )
    add_items(str(served.folder.path), str(folder / "new.parquet"), [str(withdrawn)])


def test_items_that_come_are_recommended_and_those_that_go_are_not_without_a_restart(
    served, app, client, tmp_path
):
    every = ask(client, user=110, k=40)
    gone = items(every)[0]
    first = every["version"]
    assert ask(client, "/score", user=110, items=[5000])["unknown"] == [5000]
    new_catalogue(served, tmp_path, "fresh", gone)
    vanished = None
    for _ in range(400):
        answer = ask(client, user=110, k=39)
        assert answer["fallback"] is None
        assert len(set(items(answer))) == len(items(answer))
        if gone not in items(answer):
            vanished = vanished or answer["version"]
        elif vanished:
            raise AssertionError("a withdrawn item came back")
        if answer["version"] != first and 5000 in items(ask(client, user=110, k=40)):
            break
        time.sleep(0.02)
    assert vanished is not None
    assert answer["version"] != first
    scored = ask(client, "/score", user=110, items=[5000, gone], explain=True)
    assert scored["unknown"] == [gone]
    assert scored["items"][0]["title"] == "fresh"
    assert np.isfinite(scored["items"][0]["score"])
    ask(client, "/events", user=110, events=[{"item": 5000}])
    assert ask(client, user=110, k=5, explain=True)["history"][-1] == "fresh"
    assert gone not in items(ask(client, user=110, k=40, deadline_ms=0.001))


def test_a_version_of_before_answers_those_who_saw_items_that_came_later(served, app, client):
    registry = served.open().registry
    registry.rollback(1)
    for _ in range(400):
        answer = ask(client, user=110, k=40)
        if answer["version"] == 1:
            break
        time.sleep(0.02)
    assert answer["version"] == 1
    assert answer["fallback"] is None
    assert 5000 not in items(answer)
    assert ask(client, "/score", user=110, items=[5000])["items"][0]["score"] is None
    assert app.state.service.engines.problems == {}


def test_a_server_that_starts_later_serves_the_newest_catalogue(served):
    other = ServeConfig(deadline_s=20.0, follow=False)
    app = build_single_process_app(str(served.folder.path), other, True)
    with TestClient(app, base_url="http://localhost") as client:
        assert ask(client, "/score", user=110, items=[5000])["unknown"] == []
    app.state.service.engines.close()


def test_few_versions_of_the_catalogue_stay_in_memory(served, monkeypatch):
    first = served.ring.corpus()
    names = [f"version {number}" for number in range(6)]
    monkeypatch.setattr(Corpus, "load", lambda folders: SimpleNamespace(folders=folders))
    versions = CatalogueVersions(served.folder, {}, first)
    monkeypatch.setattr(
        versions,
        "_list_versions",
        lambda: [(first.trie.version, {}), *((name, {"name": name}) for name in names)],
    )
    newest = versions.get_newest()
    for name in names:
        assert versions.get_corpus(name).folders == {"name": name}
    assert versions.get_newest() is newest
    assert versions.get_corpus(first.trie.version) is first
    assert len(versions._corpus_by_version) <= 5


def test_a_catalogue_that_is_written_within_one_tick_of_the_clock_is_seen(served, tmp_path):
    folder, first = RunFolder(tmp_path), served.ring.corpus()
    versions = CatalogueVersions(folder, {}, first)
    for count in (1, 2):
        folder.write_catalogues([{"version": f"v{number}", "artifacts": {}} for number in range(count)])
        os.utime(tmp_path / CATALOGUES, ns=(10**18, 10**18))
        assert [name for name, _ in versions._list_versions()[1:]] == [
            f"v{number}" for number in range(count)
        ]


def test_a_list_of_catalogues_that_disappears_brings_no_withdrawn_item_back(served, monkeypatch, tmp_path):
    folder, first = RunFolder(tmp_path), served.ring.corpus()
    monkeypatch.setattr(Corpus, "load", lambda folders: SimpleNamespace(folders=folders))
    versions = CatalogueVersions(folder, {}, first)
    assert versions.get_newest() is first
    folder.write_catalogues([{"version": "without an item", "artifacts": {}}])
    newest = versions.get_newest()
    (tmp_path / CATALOGUES).rename(tmp_path / "away")
    with pytest.raises(CheckpointError, match=rf"{CATALOGUES} is missing, .*; put it back from a copy"):
        versions.get_newest()
    (tmp_path / "away").rename(tmp_path / CATALOGUES)
    assert versions.get_newest() is newest is not first
