"""What a plan warns of, before anything starts."""

from __future__ import annotations

from nonet.controller.cluster.view import ClusterView, Node
from nonet.controller.plan.planner import plan
from nonet.controller.scenario import load_scenario

JOIN = "data.join.item={use: redis://cache:6379/x, columns: [stock], as_of: %s}"


def test_a_join_of_the_newest_values_is_said_to_let_offline_metrics_see_the_future():
    view = ClusterView((Node("n0", {"CPU": 2.0}, {"CPU": 2.0}),))
    for as_of, count in (("newest", 1), ("time", 0)):
        notes = plan(load_scenario("quickstart", [JOIN % as_of])[0], view).notes
        assert sum("data.join.item reads the newest values" in note for note in notes) == count
