"""A pool's environment: what Ray is told of it, what is looked at before, and that the strict wire bites."""

from __future__ import annotations

import os
import pickle
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1]))  # Ray's workers import this file too

from strict_wire import foreign_names

import nonet
from nonet.controller.scenario.scenario import make_scenario
from nonet.errors import ConfigError, PlacementError
from nonet.workers.devices.environment import PoolEnvironment, probe_interpreter
from nonet.workers.devices.vendors import get_device


class Tells(nonet.DistributeWorker):
    @nonet.method(collect="list")
    def tell(self):
        return os.environ.get("NONET_POOL"), sys.executable, nonet.__file__


def test_ray_is_told_of_an_image_of_requirements_and_of_variables():
    host = get_device("cpu")
    image = PoolEnvironment.from_options({"image": "registry/nonet:cuda", "vars": {"A": "1"}})
    assert image.to_runtime_env(host) == {"image_uri": "registry/nonet:cuda", "env_vars": {"A": "1"}}
    assert PoolEnvironment.from_options({"pip": ["einops"], "python": None}).to_runtime_env(host) == {
        "pip": ["einops"]
    }
    assert PoolEnvironment.from_options(None).to_runtime_env(host) == {}


def test_two_ways_to_start_a_worker_are_refused():
    with pytest.raises(ConfigError, match="env has python and image; they exclude each other"):
        PoolEnvironment.from_options({"python": "/usr/bin/python", "image": "x"})
    pools = {"pools": {"other": {"env": {"python": "/usr/bin/python", "pip": ["einops"]}}}}
    with pytest.raises(ConfigError, match="give one of python, image and pip, got python and pip"):
        make_scenario({"name": "two", "data": {"interactions": "x"}, "stages": {}, **pools}, "two")


def test_an_interpreter_is_looked_at_before_workers_start(tmp_path):
    import ray

    version = ".".join(map(str, sys.version_info[:2]))
    assert probe_interpreter(sys.executable, {}, 60.0) == {"python": version, "ray": ray.__version__}
    assert probe_interpreter(str(tmp_path / "none"), {}, 60.0) == {"error": "there is no such executable"}
    broken = tmp_path / "python"
    broken.write_text("#!/bin/sh\necho 'no module ray' >&2; exit 1\n")
    broken.chmod(0o755)
    assert probe_interpreter(str(broken), {}, 60.0) == {"error": "no module ray"}


def test_a_missing_interpreter_names_pool_node_and_what_to_do(ray_local):
    node = ray_local.get_runtime_context().get_node_id()
    wrong = PoolEnvironment(python="/nowhere/python")
    with pytest.raises(
        PlacementError, match=rf"pool 'npu': env.python /nowhere/python on node {node[:8]}: there"
    ):
        wrong.check_interpreter("npu", [node, node])


def test_another_ray_is_refused_with_both_versions(ray_local, tmp_path):
    other = tmp_path / "python"
    other.write_text("""#!/bin/sh\necho '{"python": "3.9", "ray": "2.1.0"}'\n""")
    other.chmod(0o755)
    node = ray_local.get_runtime_context().get_node_id()
    with pytest.raises(
        PlacementError, match=r"python is 3.9, the cluster's is 3.*ray is 2.1.0, the cluster's is"
    ):
        PoolEnvironment(python=str(other)).check_interpreter("npu", [node])


def test_workers_start_in_the_environment_of_their_pool(ray_local):
    plain = nonet.WorkerGroup(Tells, workers=1, cpus=0.2, threads=0)
    own = nonet.WorkerGroup(
        Tells, workers=2, cpus=0.2, threads=0, env={"python": sys.executable, "vars": {"NONET_POOL": "own"}}
    )
    (pool, _, ours), *_ = plain.tell().get(300)
    told = own.tell().get(300)
    plain.stop()
    own.stop()
    assert pool is None
    assert {(pool, python) for pool, python, _ in told} == {("own", sys.executable)}
    assert all(source != ours and "py_modules" in source for *_, source in told)


@pytest.mark.parametrize(
    "value",
    [
        torch.ones(2),
        torch.nn.Parameter(torch.ones(1)),
        {"a": [torch.float32]},
        torch.nn.ReLU(),
        torch.Size([2]),
    ],
)
def test_the_strict_wire_sees_torch_at_any_depth(value):
    assert foreign_names(pickle.dumps(value, protocol=5))


def test_the_strict_wire_lets_arrays_and_text_pass():
    plain = {"torch": np.ones(3), "values": ["torch.Tensor", b"torch"], "tensor": ("torch", "Tensor")}
    assert not foreign_names(pickle.dumps(plain, protocol=5))
