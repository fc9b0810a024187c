"""The three deployments: access, features (one replica, which has the posted events) and engines."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

from nonet.deploy.serving.features import PreparedQuestion, RequestFeatures, ServedRun
from nonet.deploy.serving.service import DeploymentConfig, ServeConfig
from nonet.models.inference import Answer, Question

_ONGOING = 4096


def build_deployments(
    serve: Any, run: str, settings: ServeConfig, local: bool, environment: Mapping[str, str]
) -> Any:
    """Build the application of a run from three deployments; access calls features and engine.

    Args:
        serve: The module of Ray Serve.
        run: The run's folder.
        settings: The server's settings with `services`.
        local: Whether the server only listens on this machine.
        environment: Environment variables of replicas.
    """
    services = settings.services
    assert services is not None

    def make_options(deployed: DeploymentConfig) -> dict[str, Any]:
        scaling = deployed.autoscaling
        resources = {"num_gpus": deployed.gpus} if deployed.gpus else {}
        replicas: dict[str, Any] = (
            {"num_replicas": deployed.replicas}
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
            "max_ongoing_requests": _ONGOING,
            "health_check_period_s": 1,
            "graceful_shutdown_timeout_s": 5,
            "ray_actor_options": {
                "num_cpus": deployed.cpus,
                "resources": dict(deployed.resources),
                **({"runtime_env": {"env_vars": dict(environment)}} if environment else {}),
                **resources,
            },
        }

    features = serve.deployment(FeaturesService).options(name="Features", **make_options(services.features))
    engine = serve.deployment(EngineService).options(name="Engine", **make_options(services.engine))
    asked = features.bind(run, settings), engine.bind(run, settings)

    def build_access() -> Any:  # Serve calls a function in the replica
        app = serve.get_replica_context().app_name
        handles = [serve.get_deployment_handle(name, app_name=app) for name in ("Features", "Engine")]
        return build_access_app(run, settings, local, *handles)

    access = serve.deployment(serve.ingress(build_access)())
    return access.options(name="Access", **make_options(services.access)).bind(*asked)


class FeaturesService:
    """Converts requests to questions, stores posted events, and publishes newer checkpoints of the run."""

    def __init__(self, run: str, settings: ServeConfig):
        from nonet.deploy.serving.service import RunFollower

        opened = ServedRun.open(run, address=settings.registry)
        store = settings.services.features.store if settings.services else None
        self._features = RequestFeatures.from_run(
            opened, settings.block, store=store, journal=settings.make_journal_options()
        )
        self._follower = None
        if settings.follow:
            self._follower = RunFollower(
                opened, self._features.renew, mid_stage=settings.follow == "checkpoints"
            )
            self._follower.start()

    def make_list_question(self, *asked: Any, **options: Any) -> PreparedQuestion:
        """Call `Features.make_list_question`."""
        return self._features.make_list_question(*asked, **options)

    def make_score_question(self, *asked: Any, **options: Any) -> PreparedQuestion:
        """Call `Features.make_score_question`."""
        return self._features.make_score_question(*asked, **options)

    def get_journal_facts(self) -> dict[str, Any]:
        """Call `Features.get_journal_facts`."""
        return self._features.get_journal_facts()

    async def post(
        self, user: str, events: list[dict[str, Any]], id: str | None
    ) -> tuple[int, list[Any], bool]:
        """Call `Features.post` in a thread, because it waits for the disk."""
        return await asyncio.to_thread(self._features.post, user, events, id)


class EngineService:
    """A replica of the engine: versions, queues and batching. Rows are memory-mapped and shared by replicas of a host."""

    def __init__(self, run: str, settings: ServeConfig):
        import torch

        from nonet.deploy.serving.service import EnginePool

        torch.set_num_threads(settings.threads)
        self._engines = EnginePool(
            ServedRun.open(run, address=settings.registry),
            follow=False,  # the features deployment publishes versions
            device=settings.device,
            queue=settings.queue.model_dump(),
            state_bytes=settings.state_bytes,
        )

    async def answer(self, question: Question, within_s: float) -> tuple[Answer, int]:
        """Return the answer and the version that gave it."""
        return await self._engines.ask(question, within_s)

    async def get_facts(self) -> tuple[dict[int, dict[str, float]], dict[str, str]]:
        """Return figures of the active versions, and problems by name."""
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
    from nonet.deploy.serving.apart.remote import RemoteEnginePool, RemoteFeatures
    from nonet.deploy.serving.features import CatalogueItems, FallbackRecommender
    from nonet.deploy.serving.service import RecommendationService, ServerMetrics, make_app

    opened = ServedRun.open(run, address=settings.registry)
    newest = opened.catalogues.get_newest()
    items = CatalogueItems(newest, CatalogueItems(opened.corpus))
    service = RecommendationService(
        RemoteFeatures(features, items),
        RemoteEnginePool(opened, engine),
        FallbackRecommender(newest, items),
        settings.make_service_settings(),
        ServerMetrics(),
    )
    return make_app(service, local=local, proxies=settings.proxies)
