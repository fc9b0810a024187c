"""Items that come and go while a server answers: a later version of the catalogue, without a restart."""

from __future__ import annotations

import shutil
import time

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from served_run import ask, items
from starlette.testclient import TestClient

from nonet.deploy.serving.service import ServeConfig
from nonet.deploy.serving.start import one_process
from nonet.models.generation import Trie
from nonet.samples.sequences import Transitions


def new_catalogue(served, folder, title, withdrawn):
    """One more item under a free semantic id, and some that leave: what `nonet items add` writes."""
    corpus = served.ring.corpus()
    before, home = served.ring.folders, folder / "later"
    taken = {tuple(sid) for sid in corpus.sids.tolist()}
    free = next(sid for sid in np.ndindex(*corpus.codes) if sid not in taken)
    sids = np.concatenate([corpus.sids, np.array([free], np.int32)])
    items = corpus.items
    row = {name: [None] for name in items.column_names} | {
        "item": [len(items)],
        "item_id": [5000],
        "events": [0],
    }
    row |= {"title": [title]} if "title" in row else {}
    table = pa.concat_tables([items, pa.table(row, schema=items.schema)])
    shutil.copytree(before["sequences"], home / "sequences")
    pq.write_table(table, home / "sequences" / "items.parquet")
    key = np.concatenate([corpus.seq.keys_of_items(np.arange(len(items))), np.array([987654321])])
    np.save(home / "sequences" / "item_keys.npy", key)
    (home / "sids").mkdir()
    levels = {f"l{level}": sids[:, level] for level in range(sids.shape[1])}
    pq.write_table(pa.table({"item": np.arange(len(sids)), **levels}), home / "sids" / "sids.parquet")
    old = corpus.transitions if "transitions" in before else Transitions.load(before["transitions"])
    Transitions(
        np.append(old.row, old.row[-1]),
        np.asarray(old.item),
        np.asarray(old.count),
        occurs=np.append(old.occurs, np.float32(0)),
        options=old.options,
        until=old.until,
    ).save(home / "transitions")
    allowed = np.array([at for at in range(len(sids)) if at not in withdrawn])
    trie = Trie.build(sids, corpus.codes, items=allowed)
    trie.save(home / "catalogue")
    kinds = ("sequences", "sids", "transitions", "catalogue")
    artifacts = {kind: {"kind": kind, "path": str(home / kind), "sha256": ""} for kind in kinds}
    served.folder.write_json(
        "catalogues.json", {"versions": [{"version": trie.version, "artifacts": artifacts}]}
    )


def test_items_that_come_are_recommended_and_those_that_go_are_not_without_a_restart(
    served, app, client, tmp_path
):
    every = ask(client, user=110, k=40)
    gone = items(every)[0]
    first = every["version"]
    assert ask(client, "/score", user=110, items=[5000])["unknown"] == [5000]
    new_catalogue(served, tmp_path, "fresh", {gone - 1000})
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
    app = one_process(str(served.folder.path), other, True)
    with TestClient(app) as client:
        assert ask(client, "/score", user=110, items=[5000])["unknown"] == []
    app.state.service.engines.close()
