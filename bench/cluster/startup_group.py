"""Start-up of a controller and four workers against the same written by hand in Ray, in turns.

Ours: a controller actor that plans, binds a placement group and starts a group of four `DistributeWorker`s, detached
and named. By hand: a controller actor that makes the placement group and four plain actors. All import the same
modules. Each round begins with new processes on both sides.
"""

from __future__ import annotations

import time
from typing import Any

from nonet.bench.timing import LapTimer

_WORLD, _ROUNDS = 4, 7


def bench_startup_group() -> dict[str, Any]:
    """Return median seconds until all workers are ready, ours over the hand-written side, and that side over itself."""
    import ray

    from nonet.workers.runtime import ensure_ray

    ensure_ray()
    ours, hand = _make_controllers()
    sides = {"ours": ours, "by hand": hand, "by hand again": hand}
    times = {name: LapTimer() for name in sides}
    for turn in range(_ROUNDS + 1):
        for name in list(sides)[turn % 3 :] + list(sides)[: turn % 3]:
            with times[name]:
                controller = sides[name].remote()
                ray.get(controller.wait_until_ready.remote())
            ray.get(controller.end.remote())
            ray.kill(controller)
    # The first round warms Ray's pool of worker processes.
    medians = {name: timer.drop_laps_before(1).compute_median_s() for name, timer in times.items()}
    ratio = {
        "controller + 4 workers ready": medians["ours"] / medians["by hand"],
        "the same by hand, A/A": medians["by hand again"] / medians["by hand"],
    }
    return {"rows": [{"side": name, "median_s": value} for name, value in medians.items()], "ratio": ratio}


def _make_controllers() -> tuple[Any, Any]:
    """Define the controller actors of both sides."""
    import ray

    @ray.remote(num_cpus=0)
    class Ours:
        def __init__(self) -> None:
            from nonet.bench.cluster.dispatch_roles import Echo
            from nonet.controller import SingleController  # noqa: F401
            from nonet.controller.groups import GroupBinding
            from nonet.workers.runtime import GroupLifetime, RoleSpec

            life = GroupLifetime(f"bench-{time.time_ns()}", orphan_timeout_s=60.0)
            self.binding = GroupBinding(_make_plan(), {"echo": RoleSpec(Echo)}, life)

        def wait_until_ready(self) -> int:
            return len(self.binding.hosts["echo"].wait_until_ready())

        def end(self) -> None:
            self.binding.stop(at_once=True)

    @ray.remote(num_cpus=0)
    class ByHand:
        def __init__(self) -> None:
            from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

            from nonet.controller import SingleController  # noqa: F401

            self.group = ray.util.placement_group([{"CPU": 0.1}] * _WORLD, strategy="PACK")
            self.group.wait(30)
            self.actors = [
                Plain.options(scheduling_strategy=PlacementGroupSchedulingStrategy(self.group, rank)).remote()
                for rank in range(_WORLD)
            ]

        def wait_until_ready(self) -> int:
            return len(ray.get([actor.nop.remote() for actor in self.actors]))

        def end(self) -> None:
            for actor in self.actors:
                ray.kill(actor)  # pyright: ignore[reportArgumentType]
            ray.util.remove_placement_group(self.group)

    @ray.remote(num_cpus=0.1)
    class Plain:
        def __init__(self) -> None:
            from nonet.workers.runtime import RoleSpec  # noqa: F401

        def nop(self) -> None:
            pass

    return Ours, ByHand


def _make_plan() -> Any:
    """Make a plan of one group of four on the node of this process."""
    import ray

    from nonet.controller.plan import GroupPlan, Plan

    node = ray.get_runtime_context().get_node_id()
    group = GroupPlan(
        name="echo",
        roles=("echo",),
        pool="cpu",
        device="cpu",
        resource="CPU",
        workers=_WORLD,
        cpus=0.1,
        devices=0.0,
        bundle={"CPU": 0.1},
        threads=0,
        nodes=(node,) * _WORLD,
    )
    return Plan("bench", 0, (group,), ())
