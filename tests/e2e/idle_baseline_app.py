"""The quickstart's shape (ingress, router, engine replica with one worker in its placement group), doing nothing."""

from __future__ import annotations

import ray
from fastapi import FastAPI
from ray import serve
from ray.serve.handle import DeploymentHandle
from ray.util import get_current_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

api = FastAPI()


@ray.remote
class Worker:
    def ping(self) -> bool:
        return True


@serve.deployment(placement_group_bundles=[{"CPU": 0.1}, {"CPU": 1}], ray_actor_options={"num_cpus": 0.1})
class Engine:
    def __init__(self) -> None:
        strategy = PlacementGroupSchedulingStrategy(get_current_placement_group(), placement_group_bundle_index=1)
        self.worker = Worker.options(num_cpus=1, scheduling_strategy=strategy).remote()
        ray.get(self.worker.ping.remote())

    async def ping(self) -> bool:
        return True


@serve.deployment(ray_actor_options={"num_cpus": 0})
class Router:
    async def ping(self) -> bool:
        return True


@serve.deployment(ray_actor_options={"num_cpus": 0})
@serve.ingress(api)
class Ingress:
    def __init__(self, router: DeploymentHandle, engine: DeploymentHandle) -> None:
        self.router, self.engine = router, engine

    @api.get("/health")
    async def health(self) -> bool:
        return bool(await self.router.ping.remote() and await self.engine.ping.remote())


app = Ingress.bind(Router.bind(), Engine.bind())
