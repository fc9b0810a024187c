"""What is wrong with a graph is refused before a process starts, in one line."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from likes_world import HOUR, make_likes

NEAR = "data.graph={near: {edges: item-item}}"
READ = "sparse.tables.graphs={features: [near]}"
TABLE = "data.graph={near: {edges: item-item, table: TABLE}}"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = make_likes(tmp_path_factory.mktemp("likes"))
    items = np.arange(1000, 1040)
    edges = {"source": items, "target": np.roll(items, 2), "time": np.full(40, HOUR)}
    pq.write_table(pa.table(edges), folder / "pairs.parquet")
    pq.write_table(pa.table(edges | {"target": np.r_[items[1:], 77]}), folder / "unknown.parquet")
    pq.write_table(pa.table({"source": items, "target": items}), folder / "timeless.parquet")
    log = pq.read_table(folder / "interactions.parquet")
    log = log.append_column("near_1hop", log["age"])
    pq.write_table(log, folder / "taken.parquet")
    return folder


def plan(command, folder, *changes):
    return command("plan", folder / "likes.yaml", *(word for change in changes for word in ("--set", change)))


@pytest.mark.parametrize("prepare", ["memory", "disk"])
@pytest.mark.parametrize("graph", [NEAR, TABLE.replace("TABLE", "pairs.parquet")])
def test_a_graph_that_is_read_is_planned(folder, command, graph, prepare):
    code, out, err = plan(command, folder, graph, READ, f"data.prepare={prepare}")
    assert (code, err) == (0, "")
    assert "-> sequences, items, sids, catalogue, graphs" in out


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ([NEAR], "data.graph.near is read by no table; add one of near, near_1hop, near_2hop to sparse.tables"),
        (
            ["data.graph={taste: {edges: item-item}}", "sparse.tables.graphs={features: [taste]}"],
            "data.graph.taste: 'taste' is a feature or column already; give the graph another name",
        ),
        (
            [NEAR, READ, "data.interactions=taken.parquet"],
            "data.graph.near: 'near_1hop' is a feature or column already; give the graph another name",
        ),
        ([NEAR, "sparse.tables.graphs={features: [near_3hop, near]}"], "no feature 'near_3hop'"),
        (["data.graph={near: {edges: item-itme}}", READ], "data.graph.near.edges"),
        (["data.graph={near: {edges: user-user}}", READ], "name a table of edges (table)"),
        ([TABLE.replace("TABLE", "no.parquet"), READ], "no.parquet"),
        (
            [TABLE.replace("TABLE", "timeless.parquet"), READ],
            "data.graph.near.table: FOLDER/timeless.parquet has no column 'time'; it has source, target. Name it",
        ),
        (
            [TABLE.replace("TABLE", "unknown.parquet"), READ],
            "1 of 40 edges have a target that is no item of the log, such as 77; remove them, or set unknown_ids: drop",
        ),
    ],
)  # fmt: skip
def test_a_wrong_graph_is_refused_in_one_line(folder, command, changes, message):
    code, out, err = plan(command, folder, *changes)
    assert (code, out) == (2, "")
    assert message.replace("FOLDER", str(folder)) in err
    assert err.count("\n") == 1


def test_unknown_ids_are_dropped_where_that_is_said(folder, command):
    graph = "data.graph={near: {edges: item-item, table: unknown.parquet, unknown_ids: drop}}"
    assert plan(command, folder, graph, READ)[0] == 0


def test_a_table_of_a_scenario_that_another_one_extends_is_beside_the_other(folder, command, tmp_path):
    changes = f"extends: {folder}/likes.yaml\ndata: {{graph: {{near: {{edges: item-item, table: pairs.parquet}}}}}}\n"
    (tmp_path / "child.yaml").write_text(f"{changes}sparse: {{tables: {{graphs: {{features: [near]}}}}}}\n")
    code, _, err = command("plan", tmp_path / "child.yaml")
    assert code == 2
    assert "pairs.parquet" in err  # a relative table starts at the file that names it
    base = (
        (folder / "likes.yaml")
        .read_text()
        .replace("  history: 8", "  history: 8\n  graph: {near: {edges: item-item, table: pairs.parquet}}")
    )
    (folder / "base.yaml").write_text(base.replace("tables: {", "tables: {graphs: {features: [near]}, "))
    (tmp_path / "other.yaml").write_text(f"extends: {folder}/base.yaml\nname: other\n")
    code, _, err = command("plan", tmp_path / "other.yaml")
    assert (code, err) == (0, "")
