"""Shared fixtures: one local Ray a session, ended with it; one torch thread."""

from __future__ import annotations

import os

import pytest

os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
os.environ.setdefault("RAY_DISABLE_IMPORT_WARNING", "1")


def start_local_ray():
    """A local Ray of four CPUs, never a cluster that happens to run."""
    import ray

    ray.init(
        address="local",
        num_cpus=4,
        include_dashboard=False,
        log_to_driver=False,
        namespace="nonet",
        object_store_memory=200_000_000,
    )
    return ray


@pytest.fixture(scope="session")
def ray_local():
    """The session's local Ray."""
    ray = start_local_ray()
    yield ray
    ray.shutdown()


@pytest.fixture(scope="module")
def no_ray():
    """This process has no Ray while a module's tests run; the session's is started again after them."""
    import ray

    before = ray.is_initialized()
    ray.shutdown()
    yield
    ray.shutdown()
    if before:
        start_local_ray()


@pytest.fixture(autouse=True, scope="session")
def one_thread():
    """The tensors here are tiny, and threads that wait for a busy core make them a hundred times slower."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
