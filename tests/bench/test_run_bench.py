from __future__ import annotations

import inspect
import json
from importlib.metadata import PackageNotFoundError

import pytest

import nonet
from nonet.bench.run import BENCHES, find, run_bench
from nonet.errors import ConfigError


def measured(seeds=(1,), share: float = 0.5):
    return {"rows": [{"seeds": list(seeds), "share": share}], "ratio": {"b / a": 2 * share}}


@pytest.fixture
def bench(monkeypatch, tmp_path):
    """Run `measured` as the bench "sync"; what it wrote."""
    monkeypatch.setattr("nonet.bench.embedding.sync.measure", measured)

    def run(*changes: str) -> dict:
        run_bench("sync", tmp_path / "out.json", [7, 8], "cpu", changes)
        return json.loads((tmp_path / "out.json").read_text())

    return run


def test_a_bench_runs_where_nonet_is_only_on_the_path_and_not_installed(monkeypatch, bench):
    def find_version(package: str) -> str:
        if package == "nonet":
            raise PackageNotFoundError(package)
        return "1.0"

    monkeypatch.setattr("nonet.bench.run.version", find_version)
    assert bench()["versions"]["nonet"] == nonet.__version__


def test_every_bench_is_listed_and_is_a_function_that_can_be_called_without_options(capsys):
    run_bench("", None, [7], "cpu", [])
    told = {line.split()[0] for line in capsys.readouterr().out.splitlines()}
    assert told == {*BENCHES, "all"}
    for name in BENCHES:
        if name in ("offline", "gpu"):
            pytest.importorskip("triton", reason="the kernels are Triton's")
        takes = inspect.signature(find(name)).parameters.values()
        assert {p.name for p in takes if p.default is p.empty} <= {"seeds"}, name


def test_a_bench_is_given_what_it_takes_and_leaves_rows_ratios_and_the_command(bench, capsys):
    made = bench("share=0.25")
    assert made["rows"] == [{"seeds": [7, 8], "share": 0.25}]
    assert (made["ratio"], made["command"], made["seed"]) == (
        {"b / a": 0.5},
        "nonet bench sync --set share=0.25",
        7,
    )
    assert "b / a: 0.5" in capsys.readouterr().out


@pytest.mark.parametrize("change", ["shar=1", "device=cpu", "share:1"])
def test_an_option_that_a_bench_does_not_take_is_refused_with_those_it_takes(bench, change):
    with pytest.raises(ConfigError, match="seeds, share"):
        bench(change)


def test_an_unknown_bench_is_refused_with_the_names():
    with pytest.raises(ConfigError, match=r"attention, .*Did you mean 'wire'"):
        run_bench("wir", None, [7], "cpu", [])
