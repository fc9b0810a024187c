"""`nonet recommend --user` gives the list that the server gives, user by user."""

from __future__ import annotations

import json

import numpy as np
import pytest
from served_run import TrainedRun, ask, items
from starlette.testclient import TestClient
from typer.testing import CliRunner

from nonet.deploy.after import recommend_for
from nonet.deploy.cli import app as commands
from nonet.deploy.opened import RequestFeatures
from nonet.deploy.serving.service import ServeConfig
from nonet.deploy.serving.start import build_single_process_app


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    """Make a run whose ratings differ from event to event, so that a guessed rating is visible."""
    made = TrainedRun(tmp_path_factory.mktemp("served"))
    made.commit(8)
    return made


@pytest.fixture(scope="module")
def client(served):
    app = build_single_process_app(str(served.folder.path), ServeConfig(deadline_s=20.0, follow=False), True)
    with TestClient(app, base_url="http://localhost") as client:
        yield client
    app.state.service.engines.close()


def listed(client, user, k=10):
    return [row["title"] for row in ask(client, user=user, k=k, explain=True)["items"]]


def test_every_user_gets_the_list_of_the_server(served, client):
    users = served.ring.corpus().seq.user_id.tolist()
    for user in users:
        offline = recommend_for(str(served.folder.path), [], str(user), 10)["columns"]["pretrain"]
        assert offline == listed(client, user), user


def test_ratings_and_kinds_of_events_are_those_of_the_data(served):
    """The columns of a user's events are read, where they used to be set to the largest value."""
    corpus = served.ring.corpus()
    seq = corpus.seq
    events = RequestFeatures.from_run(served.open(), posts=False).read_events(str(seq.user_id[2]), None)[0]
    cut = slice(int(seq.offsets[2]), int(seq.offsets[3]))
    np.testing.assert_array_equal(events.event, seq.event[cut])
    assert set(events.columns) == set(seq.columns)
    for name, values in events.columns.items():
        np.testing.assert_array_equal(values, seq.columns[name][cut])


def test_posted_events_and_withdrawn_items_count_for_both(served, client):
    ask(client, "/events", user=103, events=[{"item": 1011}, {"item": 1017}])
    best = items(ask(client, user=103, k=1))
    served.open().registry.withdraw({str(best[0])})
    while client.get("/versions").json()["withdrawn"] != [str(best[0])]:
        pass
    command = ["recommend", str(served.folder.path), "--user", "103", "--top", "10", "--json"]
    answer = CliRunner().invoke(commands, command)
    assert answer.exit_code == 0, answer.output
    columns = json.loads(answer.output)["columns"]
    assert columns["pretrain"] == listed(client, 103)
    corpus = served.ring.corpus()
    gone = str(corpus.items["title"][corpus.item_id.tolist().index(best[0])])
    assert not any(gone in titles for titles in columns.values())


@pytest.mark.parametrize(
    ("command", "said"),
    [
        (["recommend", "RUN", "--user", "103", "--workers", "2"], "--workers only applies to --users"),
        (
            ["recommend", "RUN", "--users", "u.parquet", "--out", "o.parquet", "--user", "3"],
            "omit --user",
        ),
        (["serve", "RUN", "--image", "nonet:1"], "--image only applies to --manifest"),
    ],
)
def test_options_that_would_change_nothing_are_refused(served, command, said):
    command = [str(served.folder.path) if part == "RUN" else part for part in command]
    answer = CliRunner().invoke(commands, command)
    assert answer.exit_code != 0
    assert said in str(answer.exception) + answer.output
