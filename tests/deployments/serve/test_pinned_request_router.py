"""Calls to one replica, in Serve's own request router; the whole of it is in tests/deployments/test_serve_graph.py."""

from __future__ import annotations

from typing import Any

from ray.serve._private.common import DeploymentHandleSource, DeploymentID, ReplicaID, RequestMetadata
from ray.serve.request_router import PendingRequest

from app.deployments.serve.pinned_request_router import PinnedRequestRouter
from app.errors import EngineDeadError
from tests.limits import run

DEPLOYMENT = DeploymentID("engine", "manta")


class Replica:
    """As much of a running replica as a router that sends nothing looks at."""

    def __init__(self, name: str) -> None:
        self.replica_id = ReplicaID(name, DEPLOYMENT)


async def sent(router: PinnedRequestRouter, call: PendingRequest) -> Any:
    """The replica that a call goes to, or the error it ends with."""
    call.reset_future()
    await router.choose_replicas([], call)
    return call.future.exception() or call.future.result()


def test_a_call_that_a_retired_replica_sends_back_fails() -> None:
    """What a running one sends back, or what fails on the way there, is sent again."""

    async def check() -> None:
        router = PinnedRequestRouter(DEPLOYMENT, DeploymentHandleSource.REPLICA)
        router.initialize_state()
        first, second = Replica("a"), Replica("b")
        router.update_replicas([first, second])
        call, other = (
            PendingRequest([], {"target": "a"}, RequestMetadata(request_id=name, internal_request_id=name))
            for name in ("1", "2")
        )
        assert [await sent(router, call) for _ in range(3)] == [first] * 3
        router.update_replicas([second])
        assert isinstance(await sent(router, call), EngineDeadError)
        assert await sent(router, other) is first, "those under way there need it"
        assert "takes no new requests" in str(await sent(router, other))
        router.on_replica_actor_died(first.replica_id)
        assert "is gone" in str(await sent(router, other))

    run(check())
