"""Serve's request router for engine replicas: a call goes to exactly the replica that its `target` argument names.

Serve runs one instance in every process that holds a handle. A replica that Serve has taken out of the running set
(scale-down, redeploy) stays reachable for pinned calls until its process ends: the requests it still runs need their
credits and aborts. Calls to a replica that is gone fail at once instead of waiting for another, and so do those that
such a retired one has sent back: it would do so again and again.
"""

from __future__ import annotations

from collections import OrderedDict

from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from app.errors import EngineDeadError

MAX_RETIRED = 32


class PinnedRequestRouter(RequestRouter):  # type: ignore[misc]  # Ray ships no usable types
    """Routes by the keyword argument `target`, a replica's unique id."""

    def initialize_state(self, **kwargs: object) -> None:
        """Called by Serve once."""
        self._retired: OrderedDict[ReplicaID, RunningReplica] = OrderedDict()
        self._running: set[ReplicaID] = set()

    @property
    def curr_replicas(self) -> dict[ReplicaID, RunningReplica]:
        """The running replicas: what a broadcast reaches. Retired ones are not among them."""
        return {name: replica for name, replica in self._replicas.items() if name in self._running}

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        """Serve's new running set."""
        running = {replica.replica_id: replica for replica in replicas}
        for name, replica in self._replicas.items():
            if name not in running:
                self._retired[name] = replica
        for name in running:
            self._retired.pop(name, None)
        while len(self._retired) > MAX_RETIRED:
            self._retired.popitem(last=False)
        self._running = set(running)
        super().update_replicas([*replicas, *self._retired.values()])

    def on_replica_actor_died(self, replica_id: ReplicaID) -> None:
        """The replica's process has ended."""
        self._retired.pop(replica_id, None)
        self._running.discard(replica_id)
        super().on_replica_actor_died(replica_id)

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """Settle the pending call itself: Serve matches by HTTP request, and one may have several calls pending."""
        if pending_request is None or pending_request.future.done():
            return [candidate_replicas]
        target = pending_request.kwargs.get("target")
        replica = next((r for r in self._replicas.values() if r.replica_id.unique_id == target), None)
        was_sent = getattr(pending_request, "was_sent", False)
        self._remove_pending_request_from_indices(pending_request)
        if replica is None:
            pending_request.future.set_exception(EngineDeadError(f"engine replica {target} is gone"))
        elif was_sent and replica.replica_id in self._retired:
            pending_request.future.set_exception(EngineDeadError(f"engine replica {target} takes no new requests"))
        else:
            pending_request.was_sent = True
            pending_request.future.set_result(replica)
        return [candidate_replicas]
