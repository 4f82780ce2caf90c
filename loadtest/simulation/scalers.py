"""Who decides how many replicas there are: Manta's policy, Serve's own, a rule over queues, or a schedule."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, Protocol
from unittest.mock import patch

from ray.serve import autoscaling_policy as serve
from ray.serve._private.common import DeploymentID, TimeStampedValue
from ray.serve._private.metrics_utils import aggregate_timeseries
from ray.serve.config import AggregationFunction, AutoscalingContext
from ray.serve.config import AutoscalingConfig as ServeAutoscalingConfig

from app.deployments.autoscaling.figures import LOOK_BACK_S, engine_figures, replica_load
from app.deployments.autoscaling.policy import Fleet, Settings, State, decide
from app.records.stats import EngineStats

EPOCH_S = 86400.0 * 365  # the simulation's 0


@dataclass(frozen=True, slots=True)
class Moment:
    """What a policy may look at."""

    now_s: float
    target: int
    running: dict[str, EngineStats]  # by replica
    num_waiting: int  # requests that find no replica
    waiting_tokens: int

    @property
    def num_requests(self) -> int:
        """All requests in the system."""
        return self.num_waiting + sum(one.num_running + one.num_waiting for one in self.running.values())

    @property
    def num_queued(self) -> int:
        """Those that no engine runs yet."""
        return self.num_waiting + sum(one.num_waiting for one in self.running.values())


class Scaler(Protocol):
    """Asked once a second of simulated time."""

    def target(self, moment: Moment) -> int:
        """How many replicas there shall be."""


class Ours:
    """Manta's policy on what Manta's replicas report."""

    def __init__(self, settings: Settings, start_s: float) -> None:
        self._settings = settings
        self._start_s = start_s
        self._state = State()
        self._series: dict[str, dict[str, deque[TimeStampedValue]]] = {}

    def target(self, moment: Moment) -> int:
        """See Scaler."""
        loads = []
        for name, stats in moment.running.items():
            series = self._series.setdefault(name, {})
            figures = engine_figures(stats, stats.num_running + stats.num_waiting, self._start_s)
            for figure, value in figures.items():
                points = series.setdefault(figure, deque(maxlen=int(LOOK_BACK_S)))
                points.append(TimeStampedValue(moment.now_s, value))
            load = replica_load(series)
            assert load is not None
            loads.append(load)
        fleet = Fleet(
            EPOCH_S + moment.now_s,
            moment.target,
            len(moment.running),
            tuple(loads),
            moment.num_waiting,
            moment.waiting_tokens,
        )
        target, self._state = decide(self._settings, fleet, self._state)
        return target


class ServeDefault:
    """Ray Serve's own policy, delays and averaging: its functions of the installed Ray, on a clock that we turn.

    It is given the true number of requests, as for a deployment whose requests Serve could count (I9).
    """

    PUSH_S = 10.0

    def __init__(self, **options: Any) -> None:
        self._config = ServeAutoscalingConfig(**options)
        self._policy = serve._apply_autoscaling_config(serve.default_autoscaling_policy)
        self._state: dict[str, Any] = {}
        self._series: deque[TimeStampedValue] = deque()
        self._known: list[TimeStampedValue] = []
        self._pushed_s = -self.PUSH_S

    def target(self, moment: Moment) -> int:
        """See Scaler."""
        self._series.append(TimeStampedValue(moment.now_s, float(moment.num_requests)))
        while self._series[0].timestamp < moment.now_s - self._config.look_back_period_s:
            self._series.popleft()
        # A handle without replicas tells of the first request that waits at once.
        if moment.now_s - self._pushed_s >= self.PUSH_S or (not moment.running and moment.num_requests):
            self._pushed_s, self._known = moment.now_s, list(self._series)
        since_s = max(moment.now_s - self._known[-1].timestamp, 1e-3)
        mean = aggregate_timeseries(self._known, AggregationFunction.MEAN, last_window_s=since_s) or 0.0
        context = _context(self._config, moment, mean, self._state)
        with patch.object(serve, "time", SimpleNamespace(time=lambda: moment.now_s)):
            decision, self._state = self._policy(context)
        return min(max(math.ceil(decision), self._config.min_replicas), self._config.max_replicas)


def _context(
    config: ServeAutoscalingConfig, moment: Moment, num_requests: float, state: dict[str, Any]
) -> AutoscalingContext:
    name = DeploymentID("Engine", "simulated")
    return AutoscalingContext(
        deployment_id=name,
        deployment_name=name.name,
        app_name=name.app_name,
        current_num_replicas=len(moment.running),
        target_num_replicas=moment.target,
        running_replicas=list(moment.running),
        total_num_requests=num_requests,
        total_queued_requests=None,
        aggregated_metrics=None,
        raw_metrics=None,
        capacity_adjusted_min_replicas=config.min_replicas,
        capacity_adjusted_max_replicas=config.max_replicas,
        policy_state=state,
        last_scale_up_time=None,
        last_scale_down_time=None,
        current_time=moment.now_s,
        config=config,
    )


class QueueRule:
    """A horizontal pod autoscaler that KEDA drives by the number of waiting requests, with their defaults.

    A metric per replica: desired = ceil(waiting / threshold), looked at every 15 s; up by 4 or to the double at most,
    down to the most that was desired within 300 s.
    """

    PERIOD_S, STABLE_S, MOST_STEP = 15.0, 300.0, 4

    def __init__(self, min_replicas: int, max_replicas: int, threshold: float) -> None:
        self._bounds = min_replicas, max_replicas
        self._threshold = threshold
        self._next_s = 0.0
        self._desired: deque[tuple[float, int]] = deque()

    def target(self, moment: Moment) -> int:
        """See Scaler."""
        if moment.now_s < self._next_s:
            return moment.target
        self._next_s = moment.now_s + self.PERIOD_S
        low, high = self._bounds
        if moment.target == 0:
            return 1 if moment.num_queued else 0  # KEDA's activation
        desired = min(max(math.ceil(moment.num_queued / self._threshold), 1), high)
        if moment.num_requests == 0:
            desired = low
        self._desired.append((moment.now_s, desired))
        while self._desired[0][0] < moment.now_s - self.STABLE_S:
            self._desired.popleft()
        if desired > moment.target:
            return min(desired, max(moment.target + self.MOST_STEP, 2 * moment.target))
        return min(moment.target, max(desired for _, desired in self._desired))


class Schedule:
    """Numbers of replicas by the second, known beforehand; the last one holds on."""

    def __init__(self, numbers: Sequence[int]) -> None:
        self._numbers = numbers

    def target(self, moment: Moment) -> int:
        """See Scaler."""
        return self._numbers[min(int(moment.now_s), len(self._numbers) - 1)]
