"""`nonet serve RUN`: start Ray, Ray Serve and the run's newest version, and serve until Ctrl-C.

Access, features, rows and engine run in one process, a single replica without HTTP between its parts,
unless `services:` separates them.
"""

from __future__ import annotations

import io
import logging
import math
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, redirect_stdout, suppress
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from nonet.controller.record import find_run
from nonet.controller.scenario import check_supported, load_scenario
from nonet.deploy.opened import check_selected, find_artifacts
from nonet.deploy.serving.access import READ_TOKEN, WRITE_TOKEN
from nonet.deploy.serving.draining import drain_proxies
from nonet.deploy.serving.service import ServeConfig, read_config
from nonet.errors import ConfigError, PlacementError
from nonet.workers import check_port, check_ray_environment, start_ray

_APPLICATION_NAME = "nonet"  # name within Ray Serve
_POLL_S = 0.05  # between two checks of Ray Serve's state
_PROXY_TIMEOUT_S = 60  # until a proxy that Serve has restarted must listen; a busy machine starts it slowly
Say = Callable[[str], None]  # shows a line of text to the user


def serve_run(
    run: str, host: str | None = None, port: int | None = None, config: Path | None = None, say: Say = print
) -> None:
    """Serve a run until this process is interrupted.

    Args:
        run: The run's folder, its id, a prefix of its id, or `last`.
        host: The host to listen on, by default the configured one.
        port: The port to listen on, by default the configured one.
        config: A file with keys of `ServeConfig`.
        say: Receives lines of text.

    Raises:
        ConfigError: The run does not exist or has no checkpoint, the port is in use, or Ray Serve is not
            installed.
    """
    start_s = time.monotonic()
    settings = read_config(config)
    host, port = host or settings.host, port or settings.port
    run_folder = find_run(run)
    if not any(run_folder.checkpoints.glob("step-*/manifest.json")):
        raise ConfigError(f"{run_folder.id} has no checkpoint yet: there is no model to serve")
    check_supported(load_scenario(run_folder.scenario)[0], "serve", run_folder.id)
    find_artifacts(run_folder)  # raises if the run has none yet
    has_published = (run_folder.path / "serving" / "registry" / "serving.json").exists()
    if settings.follow != "checkpoints" and not has_published:
        check_selected(run_folder)
    if settings.registry is not None:
        from nonet.deploy.opened import OpenedRun  # imports torch

        served_run = OpenedRun.open(run_folder.path, address=settings.registry, verb="serve")
        _ = served_run.registry.serving  # raises if the address does not answer
    check_port(host, port)
    check_ray_environment()
    with serve_application(run_folder.path, settings, host, port):
        say(f"serving {run_folder.id} at http://{host}:{port} after {time.monotonic() - start_s:.1f} s")
        say(f"page  http://{host}:{port}/    API  http://{host}:{port}/docs    stop with Ctrl-C")
        _wait_for_interrupt()
        with suppress(Exception):  # Ray raises plain exceptions; what cannot be drained is stopped
            drain_proxies()


@contextmanager
def serve_application(run: Path, settings: ServeConfig, host: str, port: int) -> Iterator[Any]:
    """Run Ray Serve with the application of a run's folder while the context is open.

    Args:
        run: The run's folder.
        settings: The server's settings.
        host: The host to listen on.
        port: The port to listen on.

    Yields:
        The module of Ray Serve, when the application answers.
    """
    serve, environment, proxy_start = _start_serve(settings, host, port)
    try:
        _run_application(serve, build_application(serve, str(run), settings, host, environment))
        _wait_for_proxy(proxy_start, host, port)
        yield serve
    finally:
        _stop_serve(serve)


def build_application(
    serve: Any, run: str, settings: ServeConfig, host: str, environment: Mapping[str, str] | None = None
) -> Any:
    """Build the application: one replica with all services, or one deployment for each service.

    Args:
        serve: The module of Ray Serve.
        run: The run's folder.
        settings: The server's settings.
        host: The host that the server listens on.
        environment: Environment variables of replicas in addition to those of Ray's processes, by default
            `get_replica_environment`.

    Returns:
        The application for `serve.RunTarget`.

    Raises:
        ConfigError: The run cannot be served.
    """
    environment = get_replica_environment() if environment is None else environment
    local = host in ("127.0.0.1", "localhost", "::1")
    if settings.services is not None:
        from nonet.deploy.opened import OpenedRun
        from nonet.deploy.serving.apart import build_deployments

        served_run = OpenedRun.open(run, address=settings.registry, verb="serve")
        if settings.follow or not served_run.has_version:
            # Engines start from a published version.
            served_run.publish_newest(mid_stage=settings.follow == "checkpoints")
        return build_deployments(serve, run, settings, local, environment)

    # Serve calls a function in the replica; it takes any other object as the app itself.
    def build_app_in_replica() -> Any:
        return build_single_process_app(run, settings, local)

    deployment = serve.deployment(serve.ingress(build_app_in_replica)())
    return deployment.options(
        name="Nonet",
        max_ongoing_requests=4096,  # above the default of `waiting`, so the service refuses requests before Serve does
        ray_actor_options={"num_cpus": settings.cpus, **_make_runtime_env(environment)},
        health_check_period_s=2,
    ).bind()


def build_app(arguments: dict[str, Any]) -> Any:
    """Build the application that a Serve config file names.

    Args:
        arguments: {"run": the run's folder, "config": keys of `ServeConfig`}.

    Raises:
        ConfigError: The run cannot be served.
    """
    from ray import serve

    settings = ServeConfig(**arguments.get("config", {}))
    return build_application(serve, arguments["run"], settings, host="0.0.0.0")


def write_run_manifest(path: Path, run: str, config: Path | None, image: str | None) -> Path:
    """Write the Kubernetes manifest that serves a run.

    Args:
        path: The file to write.
        run: The run's path in the pods.
        config: A file with keys of `ServeConfig`; None for the defaults.
        image: The pods' image; None for a placeholder.

    Returns:
        The path of the file.

    Raises:
        ConfigError: A key is wrong.
    """
    from nonet.deploy.serving.apart import write_manifest

    settings = read_config(config)
    return write_manifest(path, run, settings.model_dump(exclude_defaults=True), image)


def build_single_process_app(run: str, settings: ServeConfig, local: bool) -> Any:
    """Build an ASGI app with all services in this process.

    Args:
        run: The run's folder.
        settings: The server's settings.
        local: Whether the server only listens on this machine; if not, changes need a token.
    """
    import torch

    from nonet.deploy.opened import OpenedRun, RequestFeatures
    from nonet.deploy.serving.service import (
        EnginePool,
        FallbackRecommender,
        RecommendationService,
        ServerMetrics,
        make_app,
    )

    torch.set_num_threads(settings.threads)
    served_run = OpenedRun.open(run, address=settings.registry, verb="serve")
    features = RequestFeatures.from_run(
        served_run,
        settings.block,
        journal=settings.make_journal_options(),
        stores=settings.make_join_stores(),
    )
    engines = EnginePool(
        served_run,
        follow=settings.follow,
        device=settings.device,
        queue=settings.queue.model_dump(),
        state_bytes=settings.state_bytes,
    )
    service = RecommendationService(
        features,
        engines,
        FallbackRecommender(served_run.catalogues.get_newest(), features.items),
        settings.make_service_settings(),
        ServerMetrics(),
        served_run.scenes,
    )
    return make_app(service, local=local, proxies=settings.proxies)


def _run_application(serve: Any, app: Any) -> None:
    """Run the application and wait until it answers. Raises PlacementError with a replica's error if it fails."""
    target = serve.RunTarget(app, name=_APPLICATION_NAME, route_prefix="/")
    serve.run_many([target], wait_for_applications_running=False)  # its own wait polls only once per second
    while (overview := serve.status().applications[_APPLICATION_NAME]).status != "RUNNING":
        if overview.status in ("DEPLOY_FAILED", "UNHEALTHY"):
            messages = [
                deployment.message for deployment in overview.deployments.values()
            ]  # replicas' tracebacks
            error_lines = [line for message in messages for line in message.splitlines() if "Error:" in line]
            raise PlacementError(error_lines[-1].strip() if error_lines else overview.message)
        time.sleep(_POLL_S)


def get_replica_environment() -> dict[str, str]:
    """Return the environment variables of every replica: the number of OpenMP threads, and this process's tokens."""
    tokens = {name: os.environ[name] for name in (WRITE_TOKEN, READ_TOKEN) if os.environ.get(name)}
    return {"OMP_NUM_THREADS": "1"} | tokens


def _make_runtime_env(environment: Mapping[str, str]) -> dict[str, Any]:
    """Return actor options with a runtime environment, or no options without variables.

    Ray can use an idle worker process for a replica without a runtime environment, instead of starting one.
    """
    return {"runtime_env": {"env_vars": dict(environment)}} if environment else {}


def _start_serve(settings: ServeConfig, host: str, port: int) -> tuple[Any, dict[str, str], Future[Any]]:
    """Start Ray and Ray Serve.

    Returns:
        The module of Ray Serve, environment variables that replicas need in addition to those of Ray's
        processes, and the future of `serve.start`, which ends when the HTTP proxy has started.
    """
    if find_spec("ray.serve") is None or find_spec("fastapi") is None:
        raise ConfigError("serving needs Ray Serve: pip install 'nonet[serve]'")
    import ray

    os.environ.setdefault("RAY_SERVE_LOG_TO_STDERR", "0")
    # Leave CUDA_VISIBLE_DEVICES to actors without GPUs.
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    environment = get_replica_environment()
    if not ray.is_initialized():
        address = os.environ.get("RAY_ADDRESS") or "local"
        if address == "local":
            os.environ.update(environment)  # all processes of this Ray inherit it
            environment = {}
        serve_import = threading.Thread(target=import_module, args=("ray.serve",))
        serve_import.start()  # import while Ray's processes start
        local_options = {
            # Ray starts as many worker processes; Serve's controller, its proxy and a replica need one each.
            "num_cpus": max(3, math.ceil(settings.count_cpus() + 2)),
            "include_dashboard": False,
            "object_store_memory": 100 << 20,
        }
        try:
            start_ray(address, local_options if address == "local" else {})
        except Exception as error:  # Ray raises plain exceptions
            raise PlacementError(f"Ray did not start: {' '.join(str(error).split())[:200]}") from None
        serve_import.join()
    from ray import serve

    logging.getLogger("ray.serve").setLevel(logging.WARNING)
    http = {"host": host, "port": port}
    proxy_start = ThreadPoolExecutor(1).submit(
        serve.start, http_options=http, logging_config={"log_level": "WARNING"}
    )
    # Wait for the controller only: the replica can start while `serve.start` waits for the proxy.
    while not proxy_start.done() and not _is_controller_started():
        time.sleep(_POLL_S)
    return serve, environment, proxy_start


def _wait_for_proxy(proxy_start: Future[Any], host: str, port: int) -> None:
    """Wait until the proxy listens.

    Serve kills a proxy that is slow to start and starts another one, which `serve.start` does not wait for.

    Raises:
        PlacementError: No proxy listens in time.
    """
    from ray.exceptions import RayActorError

    try:
        proxy_start.result()
        return
    except RayActorError:  # Serve killed the first proxy
        deadline_s = time.monotonic() + _PROXY_TIMEOUT_S
    while time.monotonic() < deadline_s:
        try:
            with socket.create_connection((host, port), timeout=1):
                return
        except OSError:
            time.sleep(_POLL_S)
    raise PlacementError(
        f"Ray Serve's proxy does not listen at {host}:{port} after {_PROXY_TIMEOUT_S} s; is the machine busy?"
    )


def _is_controller_started() -> bool:
    """Return whether Serve's controller exists, so that applications can be deployed."""
    import ray

    try:
        ray.get_actor("SERVE_CONTROLLER_ACTOR", namespace="serve")
    except ValueError:
        return False
    return True


def _stop_serve(serve: Any) -> None:
    """Stop Ray Serve and Ray.

    Ray prints that the last call of Serve's controller failed, because the controller ends itself within this call. That line is
    left out.
    """
    import ray

    printed = io.StringIO()
    with redirect_stdout(printed):
        serve.shutdown()
        ray.shutdown()
    for line in printed.getvalue().splitlines():
        if "ServeController.graceful_shutdown failed" not in line:
            print(line)


def _wait_for_interrupt() -> None:
    """Wait for SIGINT or SIGTERM."""
    stopped = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stopped.set())
    stopped.wait()
