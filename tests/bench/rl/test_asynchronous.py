"""The clock of `nonet bench async`, which stages take for a recorder."""

from __future__ import annotations

import inspect

import pytest

from nonet.bench.rl.asynchronous import StageClock
from nonet.controller.record import Recorder


@pytest.mark.parametrize("name", ["begin", "record_step", "record_metrics", "record_tables", "add_event"])
def test_the_clock_takes_what_loops_give_a_recorder(name):
    parameters = list(inspect.signature(getattr(Recorder, name)).parameters.values())[1:]
    positional = [each for each in parameters if each.kind is each.POSITIONAL_OR_KEYWORD]
    inspect.signature(getattr(StageClock(), name)).bind(*(object() for _ in positional))
