"""FaultAgents: the `FaultAgent` of each node of a cluster."""

from __future__ import annotations

from types import TracebackType
from typing import Any

from nonet.deploy.after.chaos.agent import FaultAgent

_START_TIMEOUT_S = 60.0
_ANSWER_TIMEOUT_S = 10.0


class FaultAgents:
    """Starts an agent on each node when it is entered, and on a node that joins later when that is called; ends them."""

    def __init__(self) -> None:
        self._actors: dict[str, Any] = {}  # by node

    def __enter__(self) -> FaultAgents:
        import ray

        from nonet.workers.runtime import ensure_ray

        ensure_ray()
        for node in ray.nodes():
            if node["Alive"]:
                self._get(node["NodeID"])
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        import ray

        for actor in self._actors.values():
            ray.kill(actor)
        self._actors.clear()

    def call(self, node: str, method: str, *arguments: Any) -> None:
        """Call a method of the agent of a node, and wait for its end.

        Raises:
            LookupError: The node has been lost.
            PermissionError: The method is not permitted.
        """
        import ray
        from ray.exceptions import RayError

        try:
            ray.get(getattr(self._get(node), method).remote(*arguments), timeout=_ANSWER_TIMEOUT_S)
        except PermissionError:
            raise
        except RayError as error:
            self._actors.pop(node, None)
            raise LookupError(f"node {node} does not answer") from error

    def begin(self, node: str, method: str, *arguments: Any) -> None:
        """Call a method of the agent of a node without waiting for its end.

        Raises:
            LookupError: The node has been lost.
        """
        getattr(self._get(node), method).remote(*arguments)

    def _get(self, node: str) -> Any:
        """Return the agent of a node, which is started the first time."""
        import ray
        from ray.exceptions import RayError
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        if node not in self._actors:
            strategy = NodeAffinitySchedulingStrategy(node, soft=False)
            options = {"num_cpus": 0, "max_concurrency": 16, "scheduling_strategy": strategy}
            agent: Any = ray.remote(FaultAgent).options(**options).remote()
            try:
                ray.get(agent.ping.remote(), timeout=_START_TIMEOUT_S)
            except RayError as error:
                raise LookupError(f"node {node} does not answer") from error
            self._actors[node] = agent
        return self._actors[node]
