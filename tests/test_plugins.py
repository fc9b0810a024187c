"""Specs are found by name, in files of one's own, and in installed packages; what is not found says what there is."""

from __future__ import annotations

import pickle
import subprocess
import sys
from importlib.metadata import EntryPoint, EntryPoints
from pathlib import Path

import pytest

from nonet.controller.scenario.scenario import make_scenario
from nonet.errors import ConfigError
from nonet.plugins import PluginFiles, PluginRegistry, import_file, load_heavy, load_reference
from nonet.rl.algorithms import ALGORITHMS, Algorithm

OWN = """
from nonet.options import Rate, StrictModel
from nonet.rl.algorithms import Algorithm

class Options(StrictModel):
    push: Rate = 2.0

SPEC = Algorithm(Options, "nonet.rl:normalise_groups", "nonet.rl:compute_policy_loss")
NOT_ONE = 3
"""


@pytest.fixture
def files(tmp_path):
    (tmp_path / "mine.py").write_text(OWN)
    return PluginFiles(str(tmp_path))


def scenario(files, algorithm):
    stage = {"steps": 2, "rewards": {"hit": {}}, "algorithm": algorithm}
    return make_scenario(
        {"name": "own", "data": {"interactions": "x"}, "stages": {"rl": stage}}, "own", files
    )


def test_a_shipped_module_is_a_name():
    assert "grpo" in ALGORITHMS.list_names()
    assert ALGORITHMS.get("grpo").needs_reference({"kl": 0.1})
    assert not ALGORITHMS.get("grpo").needs_reference({"kl": 0.0})


def test_options_of_ones_own_are_filled_and_checked_where_the_scenario_is_read(files):
    assert scenario(files, "mine.py:SPEC").stages["rl"].algorithm.get_options() == {"push": 2.0}
    with pytest.raises(ConfigError, match=r"algorithm.*push"):
        scenario(files, {"use": "mine.py:SPEC", "push": -1.0})
    with pytest.raises(ConfigError, match="pull"):
        scenario(files, {"use": "mine.py:SPEC", "pull": 1.0})


def test_another_process_reads_the_scenario_with_its_own_files_anew(files):
    made = scenario(files, {"use": "mine.py:SPEC", "push": 3.0})
    again = pickle.loads(pickle.dumps(made))
    assert again == made
    assert again.stages["rl"].algorithm.spec.options().push == 2.0
    assert again.stages["rl"].algorithm.address == f"{Path(files.folder).resolve()}/mine.py:SPEC"


def test_a_run_s_copies_stand_for_the_files_that_are_cited(tmp_path, files):
    (tmp_path / "copies").mkdir()
    (tmp_path / "copies" / "mine.py").write_text(OWN.replace("2.0", "7.0"))
    there = scenario(files, "mine.py:SPEC").relocate(
        PluginFiles(str(tmp_path / "copies"), {"mine.py": "mine.py"})
    )
    assert there.stages["rl"].algorithm.spec.options().push == 7.0


@pytest.mark.parametrize(
    ("use", "says"),
    [
        ("grop", r"'grop' \(did you mean 'grpo'\?\) does not exist"),
        ("mine.py", "the reference does not name an object; write mine.py:Name"),
        ("mine.py:NONE", "there is no 'NONE' in mine.py"),
        (
            "mine.py:NOT_ONE",
            "mine.py\\): expected an object of type Algorithm, got 3; see docs/how-to/extend.md",
        ),
        ("none.py:SPEC", "there is no file"),
        ("no_such_package:SPEC", "the import failed: ModuleNotFoundError"),
    ],
)
def test_what_is_not_there_is_said_in_a_line(files, use, says):
    with pytest.raises(ConfigError, match=says):
        ALGORITHMS.get(use, files)


def test_an_installed_package_names_its_own_by_an_entry_point(monkeypatch):
    points = EntryPoints([EntryPoint("theirs", "nonet.rl.algorithms.grpo:SPEC", "nonet.algorithms")])
    monkeypatch.setattr("nonet.contracts._read_entry_points", lambda: points)
    registry = PluginRegistry("algorithm", Algorithm, "nonet.rl.algorithms")
    assert "theirs" in registry.list_names()
    assert registry.get("theirs") is ALGORITHMS.get("grpo")


def test_what_is_heavy_is_imported_where_it_is_needed():
    assert load_heavy("nonet.suggest:suggest_inline")("grop", ["grpo"]) == " (did you mean 'grpo'?)"
    assert load_heavy(len) is len
    with pytest.raises(ConfigError, match=r"there is no .nothing"):
        load_reference("nonet.suggest:nothing", PluginFiles(), "here")


@pytest.mark.parametrize(
    ("path", "said"),
    [
        (
            "heavy_part:losss",
            r"loss is 'heavy_part:losss': there is no losss in heavy_part \(did you mean 'loss'\?\); see",
        ),
        ("heavy_part:inner", "there is no inner in heavy_part"),
        ("nowhere.at_all:loss", r"loss is 'nowhere.at_all:loss': there is no module nowhere.at_all; see"),
        ("heavy_part", r"loss is 'heavy_part': it does not name an object; write heavy_part:Name; see"),
    ],
)
def test_a_path_in_a_spec_that_names_nothing_is_refused_without_an_import(tmp_path, path, said):
    (tmp_path / "heavy_part.py").write_text(
        "raise RuntimeError('imported')\n\n\ndef loss(policy, options):\n    inner = 1\n    return inner\n"
        "\n\nasync def loss_later(policy, options):\n    return 1\n"
    )
    head = "from nonet.plug import Algorithm, StrictModel\n\nOWN = Algorithm(StrictModel, 'heavy_part:loss', "
    own = head + "{path!r})\n"
    for there in ("heavy_part:loss", "heavy_part:loss_later"):
        (tmp_path / "own.py").write_text(own.format(path=there))
        assert ALGORITHMS.get("own.py:OWN", PluginFiles(str(tmp_path))).loss == there
    (tmp_path / "own.py").write_text(own.format(path=path))
    with pytest.raises(ConfigError, match=said):
        ALGORITHMS.get("own.py:OWN", PluginFiles(str(tmp_path)))


POOLED = """
from concurrent.futures import ProcessPoolExecutor
import multiprocessing
from pathlib import Path
from beside import limit

HERE = Path(__file__).parent


def one(value):
    return value < limit()


def scores(values, start):
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context(start)) as pool:
        return list(pool.map(one, values))
"""


@pytest.mark.parametrize("start", ["fork", "spawn"])
def test_a_file_imports_what_lies_beside_it_and_its_functions_work_in_other_processes(tmp_path, start):
    (tmp_path / "own.py").write_text(POOLED)
    (tmp_path / "beside.py").write_text("def limit():\n    return 30\n")
    script = (
        "import sys; from pathlib import Path; from nonet.plugins import import_file\n"
        "if __name__ == '__main__':\n"
        "    module = import_file(Path(sys.argv[1]), 'own')\n"
        "    print(module.HERE, module.scores([10, 50], sys.argv[2]))\n"
    )
    command = [sys.executable, "-c", script, str(tmp_path / "own.py"), start]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.stdout == f"{tmp_path} [True, False]\n", done.stderr


def test_two_files_each_import_their_own_neighbour_of_one_name(tmp_path):
    for name, value in (("a", 1), ("b", 2)):
        folder = tmp_path / name
        folder.mkdir()
        (folder / "own.py").write_text("from neighbour import VALUE\n")
        (folder / "neighbour.py").write_text(f"VALUE = {value}\n")
    found = [import_file(tmp_path / name / "own.py", name).VALUE for name in "ab"]
    assert found == [1, 2]
