"""The three deployments: access (HTTP), features (one replica, which holds the posted events) and engines."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

from nonet.deploy.opened import OpenedRun, PreparedQuestion, RequestFeatures
from nonet.deploy.serving.apart.remote import QUESTION_TIMEOUT_S, RemoteEnginePool, RemoteFeatures
from nonet.deploy.serving.service import JOIN_SHARE, DeploymentConfig, ServeConfig
from nonet.models.inference import Answer, Question

# Above the default of `waiting`, so the service refuses requests before Serve does.
_MAX_ONGOING_REQUESTS = 4096


def build_deployments(
    serve: Any, run: str, settings: ServeConfig, local: bool, environment: Mapping[str, str]
) -> Any:
    """Build the application of a run from three deployments; access calls features and engine.

    Args:
        serve: The module of Ray Serve.
        run: The run's folder.
        settings: The server's settings with `services`.
        local: Whether the server only listens on this machine.
        environment: Environment variables of replicas in addition to those of Ray's processes.

    Returns:
        The application for `serve.RunTarget`.
    """
    services = settings.services
    assert services is not None

    def make_options(service: DeploymentConfig) -> dict[str, Any]:
        """Return the options of a service's deployment."""
        scaling = service.autoscaling
        gpus = {"num_gpus": service.gpus} if service.gpus else {}
        replicas: dict[str, Any] = (
            {"num_replicas": service.replicas}
            if scaling is None
            else {
                "autoscaling_config": {
                    "min_replicas": scaling.min,
                    "max_replicas": scaling.max,
                    "target_ongoing_requests": scaling.ongoing,
                }
            }
        )
        return replicas | {
            "max_ongoing_requests": _MAX_ONGOING_REQUESTS,
            "health_check_period_s": 1,
            "graceful_shutdown_timeout_s": 5,
            "ray_actor_options": {
                "num_cpus": service.cpus,
                "resources": dict(service.resources),
                **({"runtime_env": {"env_vars": dict(environment)}} if environment else {}),
                **gpus,
            },
        }

    features = serve.deployment(FeaturesService).options(name="Features", **make_options(services.features))
    engine = serve.deployment(EngineService).options(name="Engine", **make_options(services.engine))
    bound_services = features.bind(run, settings), engine.bind(run, settings)

    def build_app_in_replica() -> Any:  # Serve calls a function in the replica
        app_name = serve.get_replica_context().app_name
        handles = [serve.get_deployment_handle(name, app_name=app_name) for name in ("Features", "Engine")]
        return build_access_app(run, settings, local, *handles)

    access = serve.deployment(serve.ingress(build_app_in_replica)())
    # The bound services make Serve deploy them with the application; the app finds them by their names.
    return access.options(name="Access", **make_options(services.access)).bind(*bound_services)


class FeaturesService:
    """The features deployment: converts requests to questions, stores events, and publishes newer checkpoints."""

    def __init__(self, run: str, settings: ServeConfig):
        from nonet.deploy.serving.service import RunFollower

        served_run = OpenedRun.open(run, address=settings.registry, verb="serve")
        store = settings.services.features.store if settings.services else None
        self._features = RequestFeatures.from_run(
            served_run,
            settings.block,
            store=store,
            journal=settings.make_journal_options(),
            stores=settings.make_join_stores(),
        )
        self._follower = None
        if settings.follow:
            self._follower = RunFollower(
                served_run, self._features.renew, mid_stage=settings.follow == "checkpoints"
            )
            self._follower.start()

    async def make_list_question(self, *arguments: Any, **options: Any) -> PreparedQuestion:
        """Call `RequestFeatures.prepare_list_question`, and read joined columns."""
        prepared = self._features.prepare_list_question(*arguments, **options)
        return await self._features.add_joined_columns(prepared, JOIN_SHARE * QUESTION_TIMEOUT_S)

    async def make_score_question(self, *arguments: Any, **options: Any) -> PreparedQuestion:
        """Call `RequestFeatures.prepare_score_question`, and read joined columns."""
        prepared = self._features.prepare_score_question(*arguments, **options)
        return await self._features.add_joined_columns(prepared, JOIN_SHARE * QUESTION_TIMEOUT_S)

    def get_journal_facts(self) -> dict[str, Any]:
        """Call `RequestFeatures.get_journal_facts`."""
        return self._features.get_journal_facts()

    async def post(
        self, user: int | str, events: list[dict[str, Any]], id: str | None
    ) -> tuple[int, list[Any], bool]:
        """Call `RequestFeatures.post` in a thread, because it waits for the disk."""
        return await asyncio.to_thread(self._features.post, user, events, id)


class EngineService:
    """The engine deployment: a pool of engines per replica. Rows are memory-mapped, so replicas of a host share them."""

    def __init__(self, run: str, settings: ServeConfig):
        import torch

        from nonet.deploy.serving.service import EnginePool

        torch.set_num_threads(settings.threads)
        self._engines = EnginePool(
            OpenedRun.open(run, address=settings.registry, verb="serve"),
            follow=False,  # the features deployment publishes versions
            device=settings.device,
            queue=settings.queue.model_dump(),
            state_bytes=settings.state_bytes,
        )

    async def answer(self, question: Question, within_s: float) -> tuple[Answer, int]:
        """Return the answer and the number of the version that gave it; see `EnginePool.ask`."""
        return await self._engines.ask(question, within_s)

    async def get_facts(self) -> tuple[dict[int, dict[str, float]], dict[str, str]]:
        """Return the figures of `EnginePool.get_facts`, and the pool's problems by name."""
        return self._engines.get_facts(), dict(self._engines.problems)


def build_access_app(run: str, settings: ServeConfig, local: bool, features: Any, engine: Any) -> Any:
    """Build the HTTP app that calls features and engine through their handles.

    Args:
        run: The run's folder.
        settings: The server's settings.
        local: Whether the server only listens on this machine.
        features: The handle of the features deployment.
        engine: The handle of the engine deployment.
    """
    from nonet.deploy.opened import CatalogueItems
    from nonet.deploy.serving.service import (
        FallbackRecommender,
        RecommendationService,
        ServerMetrics,
        make_app,
    )

    served_run = OpenedRun.open(run, address=settings.registry, verb="serve")
    corpus = served_run.catalogues.get_newest()
    items = CatalogueItems(corpus, CatalogueItems(served_run.corpus))
    service = RecommendationService(
        RemoteFeatures(features, items),
        RemoteEnginePool(served_run, engine),
        FallbackRecommender(corpus, items),
        settings.make_service_settings(),
        ServerMetrics(),
        served_run.scenes,
    )
    return make_app(service, local=local, proxies=settings.proxies)
