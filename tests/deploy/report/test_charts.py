import re
from xml.etree import ElementTree

import pytest

from nonet.deploy.report.charts import (
    choose_ticks,
    compute_moving_average,
    draw_forest_plot,
    draw_line_chart,
    format_ticks,
    reduce_points,
)
from nonet.deploy.report.scores import Difference


def svg(markup):
    return ElementTree.fromstring(markup[markup.index("<svg") : markup.index("</svg>") + 6])


def points(path):
    return [tuple(map(float, pair.split(","))) for pair in path.removeprefix("M").split(" ")]


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [
        (0, 1, [0, 0.25, 0.5, 0.75, 1]),
        (7.9, 11.4, [8, 9, 10, 11]),
        (-0.04, 0.04, [-0.04, -0.02, 0, 0.02, 0.04]),
    ],
)
def test_ticks_are_round_numbers_inside_the_range(low, high, expected):
    assert choose_ticks(low, high) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([11.35, 11.4, 11.45], ["11.35", "11.40", "11.45"]),
        ([-0.025, 0.0, 0.025], ["−0.025", "0.000", "0.025"]),
        ([0, 200, 400], ["0", "200", "400"]),
        ([10_000, 12_500], ["10.0k", "12.5k"]),
        ([0.0002, 0.0004], ["0.0002", "0.0004"]),
    ],
)
def test_tick_labels_tell_neighbours_apart(values, expected):
    assert format_ticks(values) == expected


def test_a_line_stays_in_its_frame_and_goes_the_way_of_its_values():
    chart = svg(draw_line_chart("loss", range(10), [9.0 - step for step in range(10)]))
    (path,) = [element.attrib["d"] for element in chart.iter("path")]
    drawn = points(path)
    assert [x for x, _ in drawn] == sorted(x for x, _ in drawn)
    assert [y for _, y in drawn] == sorted(y for _, y in drawn)
    assert all(48 <= x <= 330 and 8 <= y <= 148 for x, y in drawn)


def test_a_long_curve_is_thinned_to_means_and_gets_a_moving_average():
    assert reduce_points([(float(at), float(at)) for at in range(700)])[:2] == [(1.0, 1.0), (4.0, 4.0)]
    assert len(reduce_points([(0.0, 0.0)] * 100_000)) <= 300
    assert compute_moving_average([1.0] * 29) == []
    smooth = compute_moving_average([float(at % 2) for at in range(100)])
    assert all(abs(value - 0.5) < 0.1 for value in smooth)
    chart = svg(draw_line_chart("loss", range(100), [float(at % 2) for at in range(100)]))
    assert [element.attrib["class"] for element in chart.iter("path")] == ["line faint", "line"]


@pytest.mark.parametrize(
    "values", [[], [1.0], [2.0, 2.0], [0.0, 0.0], [float("nan"), 1.0], [-3.0, float("inf"), 5.0]]
)
def test_curves_of_few_equal_or_broken_values_are_drawn_or_told(values):
    drawn = draw_line_chart("a <b>", range(len(values)), values)
    assert "nan" not in drawn
    assert "inf" not in drawn
    assert "a &lt;b&gt;" in drawn


def test_a_forest_places_zero_and_colours_only_what_is_significant():
    found = [
        Difference("rl", "finetune", "recall@10", 0.01, -0.01, 0.03),
        Difference("rl", "popularity", "recall@10", 0.09, 0.07, 0.11),
        Difference("rl", "pretrain", "recall@10", -0.05, -0.08, -0.02),
    ]
    plot = svg(draw_forest_plot(found))
    groups = list(plot.iter("g"))
    assert [group.attrib["class"] for group in groups] == ["even", "good", "bad"]
    zero = next(float(line.attrib["x1"]) for line in plot.iter("line") if line.attrib["class"] == "zero")
    sides = []
    for group in groups:
        whisker, dot = group.find("line"), group.find("circle")
        low, high, middle = float(whisker.attrib["x1"]), float(whisker.attrib["x2"]), float(dot.attrib["cx"])
        assert low < middle < high
        sides.append((low > zero) - (high < zero))
    assert sides == [0, 1, -1]
    texts = " ".join("".join(element.itertext()) for element in plot.iter("text"))
    assert re.search(r"\+0\.0100\s+\[−0\.0100, \+0\.0300\]", texts)


def test_a_curve_beside_another_shares_its_axes():
    chart = draw_line_chart("loss", [1, 2, 3], [5.0, 4.0, 3.0], dashed_points=[(2, 9.0), (4, 8.0)])
    alone = draw_line_chart("loss", [1, 2, 3], [5.0, 4.0, 3.0])
    assert chart.count("<path") == 2
    assert 'class="line beside"' in chart
    assert ">8<" in chart, "the axis reaches it"
    assert ">8<" not in alone
