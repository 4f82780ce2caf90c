"""The event loop: clients, the router's LoadBook with its policy and PrefixIndex, and the replicas with their feeds."""

from __future__ import annotations

import heapq
import itertools
import random
import time
from collections.abc import Callable
from typing import Any

from app.config.router import RouterConfig
from app.deployments.channel.wire import FeedFrame
from app.deployments.routing.load_book import LoadBook
from app.deployments.routing.policies import create_policy as create_routing_policy
from app.deployments.routing.policies.base import EXPECTED_TOKENS, RouteQuery, RoutingPolicy
from app.deployments.routing.policies.power_of_two import PowerOfTwo
from app.deployments.routing.prefix_index import PrefixIndex
from app.records.load_report import LoadReport
from loadtest.simulation.approximate_tree import ApproximateTree
from loadtest.simulation.replica import SimReplica
from loadtest.simulation.serve_multiplexing import ServeMultiplexing
from loadtest.simulation.speeds import Speeds
from loadtest.simulation.traffic import SimRequest, Trace

HOP_S = 0.001  # between client, router and replica
FEED_S = 0.002  # a frame of a feed on its way, and in the Router's queue
LOSS_S = 0.02  # until a death is noticed by whoever holds a stream from the replica
IDLE_HEARTBEAT_S = 1.0
RETRY_S = 0.1  # while no replica is known


BASELINES = ("approximate_tree", "serve_multiplexing")


def create_policy(name: str, seed: int) -> RoutingPolicy:
    """A policy of the Router, or one of the simulation's BASELINES."""
    if name == "approximate_tree":
        return ApproximateTree()
    if name == "serve_multiplexing":
        return ServeMultiplexing(seed)
    if name == "power_of_two":
        return PowerOfTwo(seed)
    return create_routing_policy(name)


class Fleet:
    """`run` sends a trace of `length_s` seconds and returns once every request has ended."""

    def __init__(
        self,
        policy: str,
        num_replicas: int,
        num_blocks: int,
        seed: int = 0,
        speeds: Speeds | None = None,
        heartbeat_s: float = RouterConfig().heartbeat_s,
        adapter_places: int = 0,
    ) -> None:
        self.now = 0.0
        self.replicas: dict[str, SimReplica] = {}
        self.retired: list[SimReplica] = []  # those that died
        self.decision_s: list[float] = []  # CPU seconds of each decision
        self.events_s = 0.0  # CPU seconds spent on feeding the index
        self.num_replaced = 0  # requests that were placed again, because their replica died
        self._heartbeat_s = heartbeat_s
        self._num_blocks = num_blocks
        self._adapter_places = adapter_places
        self._speeds = speeds or Speeds()
        self._random = random.Random(seed)
        chosen = create_policy(policy, seed)
        self._index = PrefixIndex() if chosen.uses_index else None
        self._book = LoadBook(chosen, clock=lambda: self.now, index=self._index)
        self._heap: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._order = itertools.count()
        self._version: dict[str, int] = {}  # a replica's step: an end that was put off is ignored
        self._last_report: dict[str, tuple[LoadReport, float]] = {}
        self._names = itertools.count()
        self._left = 0
        self._length_s = 0.0
        for _ in range(num_replicas):
            self._join()

    def run(self, trace: Trace, length_s: float) -> None:
        """Fill in what became of each of the trace's requests."""
        self._length_s = length_s
        self._left = sum(1 for _ in trace)
        for request in trace.roots:
            self._at(1.0 + request.at * length_s, self._send, request)
        for at in trace.deaths:
            self._at(1.0 + at * length_s, self._die)
        for at in trace.joins:
            self._at(1.0 + at * length_s, self._join)
        while self._left:
            self.now, _, action, arguments = heapq.heappop(self._heap)
            action(*arguments)

    def _at(self, when: float, action: Callable[..., None], *arguments: Any) -> None:
        heapq.heappush(self._heap, (when, next(self._order), action, arguments))

    # ---- requests

    def _send(self, request: SimRequest) -> None:
        request.sent_s = self.now
        self._place(request, 0)

    def _place(self, request: SimRequest, num_generated: int) -> None:
        num_known = request.prompt.num_tokens + num_generated
        # What it has generated is part of the prompt when it is placed again; its hashes are the engines' own.
        query = RouteQuery(num_known, EXPECTED_TOKENS, request.prompt_hashes, request.session, request.adapter)
        began = time.thread_time()
        decision = self._book.route(query)
        if decision is None:
            self._at(self.now + RETRY_S, self._place, request, num_generated)
            return
        self.decision_s.append(time.thread_time() - began)
        self._at(self.now + 2 * HOP_S, self._arrive, decision.replica_id, request, num_generated)

    def _arrive(self, name: str, request: SimRequest, num_generated: int) -> None:
        replica = self.replicas.get(name)
        if replica is None:  # it died meanwhile
            self._at(self.now + LOSS_S, self._place, request, num_generated)
            return
        request.replica = name
        request.num_placements += 1
        replica.submit(request, num_generated)
        if not replica.is_stepping:
            self._step(replica)
        elif (end_s := replica.cut(self.now)) is not None:
            self._expect_end(replica, end_s)

    def _step(self, replica: SimReplica) -> None:
        end_s = replica.begin(self.now)
        if end_s is not None:
            self._expect_end(replica, end_s)

    def _expect_end(self, replica: SimReplica, end_s: float) -> None:
        version = self._version[replica.name] = self._version.get(replica.name, 0) + 1
        self._at(end_s, self._stepped, replica, version)

    def _stepped(self, replica: SimReplica, version: int) -> None:
        if self._version[replica.name] != version:
            return
        done = replica.end()
        for job in done.first_tokens:
            if job.request.first_token_s < 0:
                job.request.first_token_s = self.now + HOP_S
        for job in done.ended:
            self._ended(job.request)
        self._step(replica)

    def _ended(self, request: SimRequest) -> None:
        assert request.ended_s < 0, "a request ends once"
        request.ended_s = self.now + HOP_S
        self._left -= 1
        for follower in request.then:
            self._at(request.ended_s + follower.delay * self._length_s, self._send, follower)

    # ---- replicas

    def _join(self) -> None:
        number = next(self._names)
        name = f"replica-{number:04d}"
        replica = self.replicas[name] = SimReplica(
            name, f"{number:08d}", self._num_blocks, self._speeds, self._adapter_places
        )
        self._tell(replica, FeedFrame(replica.report(self.now), replica.events.snapshot()))
        self._at(self.now + self._heartbeat_s * self._random.random(), self._heartbeat, replica)

    def _die(self) -> None:
        if len(self.replicas) > 1:
            self._leave(self._random.choice(sorted(self.replicas)))

    def _leave(self, name: str) -> None:
        """A replica goes; what it ran goes on elsewhere, behind the tokens that it had generated."""
        replica = self.replicas.pop(name)
        self.retired.append(replica)
        self._version[name] = -1  # its step never ends
        self._at(self.now + LOSS_S, self._lose, name)
        for job in replica.jobs():
            self.num_replaced += 1
            self._at(self.now + LOSS_S, self._place, job.request, replica.num_generated(job, self.now))

    def _lose(self, name: str) -> None:
        self._book.remove(name)
        if self._index is not None:
            self._index.drop(name)

    def _heartbeat(self, replica: SimReplica) -> None:
        if replica.name not in self.replicas:
            return
        report = replica.report(self.now)
        batch = replica.events.flush()
        last = self._last_report.get(replica.name)
        if batch is not None or last is None or report != last[0] or self.now - last[1] >= IDLE_HEARTBEAT_S:
            self._last_report[replica.name] = report, self.now
            self._at(self.now + FEED_S, self._tell, replica, FeedFrame(report, batch))
        self._at(self.now + self._heartbeat_s, self._heartbeat, replica)

    def _tell(self, replica: SimReplica, frame: FeedFrame) -> None:
        """What FeedPool does with a frame."""
        if self.replicas.get(replica.name) is not replica:
            return
        self._book.report(frame.load)
        if self._index is not None and frame.events is not None:
            began = time.thread_time()
            outcome = self._index.apply(frame.events)
            self.events_s += time.thread_time() - began
            assert outcome == "applied", outcome
