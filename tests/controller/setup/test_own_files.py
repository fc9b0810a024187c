from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from nonet.controller.record.run_folder import RunFolder
from nonet.controller.scenario.scenario import Scenario, load_scenario, make_scenario
from nonet.controller.setup.own_files import find_files_beside, keep_copies, list_named_files, read_copies
from nonet.controller.setup.run_files import write_run
from nonet.controller.setup.worker_setup import make_role_specs
from nonet.errors import ConfigError
from nonet.rl.rewards.api import find_reward, load_reward

REWARD = "import nonet\n\n\n@nonet.reward\ndef own(item):\n    return item * 0.0 + {}\n"


def scenario_of(*uses: str) -> Scenario:
    rewards = {f"r{i}": {"use": use} for i, use in enumerate(uses)}
    return make_scenario(
        {
            "name": "own",
            "data": {"interactions": "interactions.parquet"},
            "stages": {"pretrain": {"epochs": 1}, "rl": {"steps": 1, "rewards": rewards}},
        }
    )


@pytest.fixture
def beside(tmp_path):
    """Make a scenario's folder, with files in it and next to it, two of which have one name."""
    folder = tmp_path / "scenario"
    for i, place in enumerate(("scenario/rewards/own.py", "a/own.py", "b/own.py", "far/own.py")):
        path = tmp_path / place
        path.parent.mkdir(parents=True)
        path.write_text(REWARD.format(i))
    return folder


def scores(run: RunFolder, scenario: Scenario) -> list[float]:
    """Return what each reward gives when it is made as a run makes it."""
    import numpy as np

    found = []
    for spec in (spec for name, spec in make_role_specs(scenario, run).items() if ".reward." in name):
        name, use, folder, options, *_ = spec.args
        reward = load_reward(use, Path(folder), options, name=name)
        found.append(float(reward.function(np.zeros(1))[0]))
    return found


def test_a_run_loads_its_own_copies_wherever_the_originals_lie(beside, tmp_path):
    uses = ["rewards/own.py", "../a/own.py", "../b/own.py:own", f"{tmp_path}/far/own.py"]
    scenario, run = scenario_of(*uses), RunFolder(tmp_path / "run")
    for use in uses:
        assert find_reward(use, beside), "preflight takes it"
    write_run(scenario, beside, run)
    for place in ("a", "b", "far", "scenario"):
        shutil.rmtree(tmp_path / place)
    assert scores(run, scenario) == [0.0, 1.0, 2.0, 3.0]
    again, _ = load_scenario(run.scenario)
    write_run(again, run.sources, run)
    assert scores(run, again) == [0.0, 1.0, 2.0, 3.0], "as `nonet resume` does"


def test_the_run_says_which_copy_stands_for_what_with_its_hash(beside, tmp_path):
    import hashlib

    run = RunFolder(tmp_path / "run")
    keep_copies(scenario_of("rewards/own.py", "../a/own.py", "rewards/own.py"), beside, run)
    records = json.loads(run.sources_list.read_text())
    assert [record["use"] for record in records] == ["rewards/own.py", "../a/own.py"]
    for record in records:
        content = (run.sources / record["copy"]).read_bytes()
        assert hashlib.sha256(content).hexdigest() == record["sha256"]
        assert content == (beside / record["use"]).read_bytes()


def test_an_edited_original_does_not_reach_a_run_that_has_begun(beside, tmp_path):
    scenario, run = scenario_of("../a/own.py"), RunFolder(tmp_path / "run")
    write_run(scenario, beside, run)
    (tmp_path / "a" / "own.py").write_text(REWARD.format(9))
    write_run(scenario, beside, run)
    assert scores(run, scenario) == [1.0]
    run.clear_records()
    write_run(scenario, beside, run)
    assert scores(run, scenario) == [9.0], "a start that never got to a commit begins with what is there now"


@pytest.mark.parametrize("change", ["edited", "gone"])
def test_a_changed_copy_is_an_error_that_says_what_to_do(beside, tmp_path, change):
    scenario, run = scenario_of("rewards/own.py"), RunFolder(tmp_path / "run")
    write_run(scenario, beside, run)
    copy = run.sources / "rewards" / "own.py"
    copy.write_text(REWARD.format(9)) if change == "edited" else copy.unlink()
    said = (
        r"was changed since the run began \(sha256 .* or start a new run" if change == "edited" else "is gone"
    )
    with pytest.raises(ConfigError, match=said):
        read_copies(run)
    with pytest.raises(ConfigError, match=said):
        make_role_specs(scenario, run)


def test_a_run_of_before_with_copies_but_no_list_can_be_resumed(beside, tmp_path):
    scenario, run = scenario_of("rewards/own.py"), RunFolder(tmp_path / "run")
    write_run(scenario, beside, run)
    run.sources_list.unlink()
    write_run(scenario, run.sources, run)
    assert scores(run, scenario) == [0.0]


def test_whatever_part_uses_a_file_has_it_copied():
    scenario = make_scenario(
        {
            "name": "own",
            "data": {"interactions": "i.parquet", "split": {"use": "mine/split.py:Newest", "days": 3}},
            "model": {"use": "nonet.models.sid_decoder.spec:SPEC"},
            "stages": {
                "rl": {
                    "steps": 1,
                    "rewards": {"hit": {}},
                    "between": [{"use": "steps.py:Guard"}],
                }
            },
        }
    )
    assert list_named_files(scenario) == ["mine/split.py", "steps.py"]


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(
        ConfigError, match=r"use: gone\.py: there is no file .*gone\.py; it is looked for beside"
    ):
        write_run(scenario_of("gone.py"), tmp_path, RunFolder(tmp_path / "run"))


def test_what_lies_beside_a_reward_travels_and_tables_runs_and_hidden_files_do_not(tmp_path):
    folder = tmp_path / "work"
    for name, text in {
        "rewards/own.py": f"import helper\nDEEP, LIMITS = 'deep', 'limits.json'\n{REWARD.format(1)}",
        "rewards/limits.json": "{}",
        "rewards/s3env.sh": "AWS_SECRET_ACCESS_KEY=hunter2",
        "rewards/orders.parquet": "",
        "rewards/helper.py": "LIMIT = 3",
        "rewards/deep/more.txt": "",
        "rewards/.hidden": "",
        "rewards/__pycache__/x.pyc": "",
        "rewards/run-1/scenario.yaml": "name: a run",
        "beside.txt": "",
    }.items():
        place = folder / name
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(text)
    run = RunFolder(tmp_path / "run")
    keep_copies(scenario_of("rewards/own.py"), folder, run)
    there = sorted(str(path.relative_to(run.sources)) for path in run.sources.rglob("*") if path.is_file())
    assert there == [
        "rewards/deep/more.txt",
        "rewards/helper.py",
        "rewards/limits.json",
        "rewards/own.py",
    ]
    assert read_copies(run).copies == {"rewards/own.py": "rewards/own.py"}
    (run.sources / "rewards" / "helper.py").write_text("LIMIT = 4")
    with pytest.raises(ConfigError, match=r"helper.py was changed since the run began"):
        read_copies(run)


@pytest.mark.parametrize(("files", "bytes", "travels"), [(3, 1, False), (1, 200, False), (2, 50, True)])
def test_a_large_folder_does_not_travel_because_a_text_is_its_name(
    tmp_path, monkeypatch, files, bytes, travels
):
    (tmp_path / "own.py").write_text("KEY = 'data'\n")
    (tmp_path / "data").mkdir()
    for index in range(files):
        (tmp_path / "data" / f"{index}.txt").write_bytes(b"x" * bytes)
    monkeypatch.setattr("nonet.controller.setup.own_files._MAX_FILES", 2)
    monkeypatch.setattr("nonet.controller.setup.own_files._MAX_BYTES", 100)
    assert len(find_files_beside(tmp_path / "own.py")) == (files if travels else 0)


def test_a_folder_with_the_name_of_an_import_travels_only_as_the_code_that_python_imports(tmp_path):
    (tmp_path / "own.py").write_text("import pyarrow, json, kinds, words, data\n")
    code = {"kinds/deep/part.py", "words/__init__.py", "words/part.py", "words/limits.json"}
    others = {
        "pyarrow/mine.py", "json/mine.py", "data/train.csv", "kinds/deep/prices.csv", "words/aws_credentials"
    }  # fmt: skip
    for name in code | others:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("T = 'limits.json'\n" if name == "words/part.py" else "")
    found = find_files_beside(tmp_path / "own.py")
    assert {str(path.relative_to(tmp_path)) for path in found} == code


def test_code_deep_in_a_package_may_name_files_of_the_folders_around_it(tmp_path):
    (tmp_path / "own.py").write_text("import words\n")
    (tmp_path / "words/deep").mkdir(parents=True)
    (tmp_path / "words/deep/part.py").write_text("T = Path(__file__).parents[1] / 'stop.txt'\n")
    (tmp_path / "words/stop.txt").write_text("the")
    assert tmp_path / "words/stop.txt" in find_files_beside(tmp_path / "own.py")


@pytest.mark.timeout(60)
def test_folders_with_links_to_each_other_travel_with_one_link_each(tmp_path):
    (tmp_path / "own.py").write_text("X = 'all'\n")
    for name in range(8):
        (tmp_path / f"all/{name}/deep").mkdir(parents=True)
        (tmp_path / f"all/{name}/own.txt").write_text("x")
        (tmp_path / f"all/{name}/deep/up").symlink_to(tmp_path / f"all/{name}")
        for other in range(8):
            (tmp_path / f"all/{name}/to-{other}").symlink_to(tmp_path / f"all/{other}")
    places = {str(path.relative_to(tmp_path / "all")) for path in find_files_beside(tmp_path / "own.py")}
    own = {f"{name}/own.txt" for name in range(8)}
    assert places == own | {f"{a}/to-{b}/own.txt" for a in range(8) for b in range(8) if a != b}


def test_with_a_file_travels_what_it_imports_and_names_and_nothing_else(tmp_path):
    (tmp_path / "own.py").write_text(
        "import json, importlib\nfrom package.part import f\nimport helper\n"
        "LIMITS = 'limits.json'\nLAZY = importlib.import_module('lazy')\n"
        "def words(name): return open(f'words-{name}.txt'), open('*.glob'), f'{name}_{name}'\n"
        "FOLDER = 'vocabulary'\nPLACES = ('', '.', '..', '/', '~', '*', '../outside.txt', 'run-1', '.hidden')\n"
    )
    (tmp_path / "helper.py").write_text("from . import sister\nfrom other import x\n")
    names = {
        "other.py", "sister.py", "lazy.py", "limits.json", "words-en.txt", "words-de.txt", "a.glob",
        "package/__init__.py", "package/part.py", "vocabulary/a.txt", "vocabulary/deep/b.txt", "helper.py",
    }  # fmt: skip
    others = {
        "unnamed.json", "log.parquet", "a_b", "my_secrets.txt", "s3env.sh", "words.txt", "own.yaml", "other/x.txt.bak", ".hidden",
        "run-1/scenario.yaml", "data/secrets.txt",
    }  # fmt: skip
    for name in (names | others) - {"helper.py"}:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("x = 1\n")
    (tmp_path.parent / "outside.txt").write_text("x")
    found = find_files_beside(tmp_path / "own.py")
    assert {str(path.relative_to(tmp_path)) for path in found} == names
    without = find_files_beside(tmp_path / "own.py", {tmp_path / "vocabulary", tmp_path / "limits.json"})
    assert {path.name for path in set(found) - set(without)} == {"a.txt", "b.txt", "limits.json"}


FOUND = [
    ("importlib.import_module('lib.extra')", {"lib/__init__.py", "lib/extra.py"}, set()),
    ("'lib.gone'", set(), {"lib/__init__.py"}),
    ("import fast", {"fast.cpython-311-x86_64-linux-gnu.so"}, set()),
    ("import recsys", {"recsys/__init__.py"}, {"recsys/.env", "recsys/scenario.yaml"}),
    ("T = Path(__file__).with_suffix('.json')", {"own.json"}, {"other.json"}),
    ("T = Path(__file__).parent / 'conf' / 'a.txt'", {"conf/a.txt"}, {"conf/password.yaml"}),
    ("T = Path(__file__).parent / 'conf' / name", {"conf/a.txt", "conf/password.yaml"}, set()),
    ("T = Path('conf', 'a.txt')", {"conf/a.txt"}, {"conf/password.yaml"}),
    ("T = Path('conf') / 'a.txt'", {"conf/a.txt"}, {"conf/password.yaml"}),
    ("T = (HERE / 'conf').joinpath('a.txt')", {"conf/a.txt"}, {"conf/password.yaml"}),
    ("T = os.path.join(os.path.dirname(__file__), 'conf', 'a.txt')", {"conf/a.txt"}, {"conf/password.yaml"}),
    ("T = os.path.join(HERE, name, 'conf'), Path(x) / 2", {"conf/a.txt"}, set()),
    ("FOLDER = 'conf'", {"conf/a.txt"}, set()),
    ("def f(x, folder='conf', *, n=1): return x", {"conf/a.txt"}, set()),
    ("def load(*, table='conf'): return x", {"conf/a.txt"}, set()),
    ("def f(folder, /, kind='conf', *, n=1): return x", set(), {"conf/a.txt"}),
    ("T = load_words('conf')", {"conf/a.txt"}, set()),
    ("T = Words(x, folder='conf')", {"conf/a.txt"}, set()),
    ("T = options.get('folder', 'conf')", {"conf/a.txt"}, set()),
    ("T = print(open('conf'))", {"conf/a.txt"}, set()),
    ("T = Words('conf/a.txt')", {"conf/a.txt"}, {"conf/password.yaml"}),
    ("T = options.get('conf'), os.environ.get('own.json')", set(), {"conf/a.txt", "own.json"}),
    ("T = os.environ['conf'], os.getenv('conf'), x.pop('conf')", set(), {"conf/a.txt"}),
    ("T = logging.getLogger('conf'), getattr(x, 'conf'), Word(kind='conf')", set(), {"conf/a.txt"}),
    ("T = Thread('conf'), redirect({'a': ['conf']}), '_'.join(('conf', x))", set(), {"conf/a.txt"}),
    ("T = load(column('conf'))", set(), {"conf/a.txt"}),
    ("raise ValueError('conf')", set(), {"conf/a.txt"}),
    ("T = x in ('conf', 'own.json')", set(), {"conf/a.txt", "own.json"}),
    ("match x:\n case 'conf' | {'own.json': 1}: pass", set(), {"conf/a.txt", "own.json"}),
    ("__all__ = ['conf']", set(), {"conf/a.txt"}),
    ("T = f'conf/{x}.txt'", {"conf/a.txt"}, {"conf/password.yaml"}),
    ("T = 'conf/%d.txt' % 1, 'a_{}.txt'.format(2)", {"conf/1.txt", "a_2.txt"}, {"conf/password.yaml"}),
    ("raise KeyError(f'{x}.json')", set(), {"own.json", "credentials.json"}),
    ("T = {'conf': 1}['conf'] if 'conf' == x else 1", set(), {"conf/a.txt"}),
    ("'conf'", set(), {"conf/a.txt"}),
    ("T = f'{1}/x{2}.json', 'myrun/x1.json'", {"conf/x1.json"}, {"myrun/x1.json", "venv/x1.json"}),
    ("T = 'linked.txt', 'hidden.txt', 'outside.txt'", {"linked.txt"}, {"v2.txt", "hidden.txt", ".env", "outside.txt"}),
    ("import linked_module", {"linked_module.py", "helper.py"}, {"lib/module_v2.py"}),
]  # fmt: skip


@pytest.mark.parametrize(("code", "travels", "stays"), FOUND)
@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "latin-1"])
def test_what_travels_with_code_of_this_form(tmp_path, code, travels, stays, encoding):
    names = {name for _, some, others in FOUND for name in some | others} | {
        "myrun/scenario.yaml",
        "venv/pyvenv.cfg",
    }
    folder = tmp_path / "work"
    for name in names - {"linked.txt", "hidden.txt", "outside.txt", "linked_module.py"}:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("import helper\n" if name.endswith("_v2.py") else "x = 1\n")
    (tmp_path / "out.txt").write_text("x")
    links = {"linked.txt": "v2.txt", "hidden.txt": ".env", "outside.txt": "../out.txt"}
    links["linked_module.py"] = "lib/module_v2.py"
    for name, target in links.items():
        (folder / name).symlink_to(target)
    cookie = "# coding: latin-1\n" if encoding == "latin-1" else ""
    (folder / "own.py").write_text(f"{cookie}# \xe9\nx = name = 1\n{code}\n", encoding=encoding)
    found = {str(path.relative_to(folder)) for path in find_files_beside(folder / "own.py")}
    assert travels <= found
    assert not found & stays


@pytest.mark.parametrize(
    ("interactions", "path", "code", "travels"),
    [
        ("interactions.parquet", "orders.csv", "T = 'orders.csv', 'weights.json'", {"weights.json"}),
        ("interactions.parquet", "*s.csv", "T = 'orders.csv', '*.csv'", {"prices.csv.csv"}),
        ("interactions.parquet", "labels/*.csv", "T = 'labels'", set()),
        ("interactions.parquet", "labels", "T = 'labels/a.csv'", set()),
        ("interactions.parquet", "labels/a.csv", "T = 'labels'", set()),
        (
            "interactions.parquet",
            "labels/*.csv",
            "T = 'labels/a.csv', 'labels/units.json'",
            {"labels/units.json"},
        ),
        ("interactions.parquet", "file://FOLDER/labels/*.csv", "T = 'labels'", set()),
        ("labels/a.c*", "file://FOLDER/orders.csv", "T = 'orders.csv', 'labels/a.csv'", set()),
        ("interactions.parquet", "s3://bucket/labels/a.csv", "T = 'labels/a.csv'", {"labels/a.csv"}),
    ],
)
def test_tables_of_the_scenario_stay_where_they_are(tmp_path, interactions, path, code, travels):
    (tmp_path / "labels").mkdir()
    for name in ("orders.csv", "prices.csv.csv", "labels/a.csv", "labels/units.json", "weights.json"):
        (tmp_path / name).write_text("user,item,time\n")
    (tmp_path / "own.py").write_text(code)
    labels = [{"path": path.replace("FOLDER", str(tmp_path)), "within": "7d"}]
    scenario = make_scenario(
        {
            "name": "own",
            "data": {"interactions": interactions, "labels": labels},
            "stages": {"rl": {"steps": 1, "rewards": {"r": {"use": "own.py"}}}},
        }
    )
    run = RunFolder(tmp_path / "run")
    keep_copies(scenario, tmp_path, run)
    copies = {str(file.relative_to(run.sources)) for file in run.sources.rglob("*") if file.is_file()}
    assert copies == travels | {"own.py"}


def test_code_that_cannot_be_parsed_takes_nothing_along(tmp_path):
    (tmp_path / "helper.py").write_text("x = 1\n")
    for content in (
        "import helper\nx = (",
        "import helper\0\n",
        "import helper\nX = " + "+".join(["1"] * 20_000),
    ):
        (tmp_path / "own.py").write_text(content)
        assert not find_files_beside(tmp_path / "own.py")
