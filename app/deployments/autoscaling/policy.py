"""Decides how many replicas a model needs, and how many it shall have next. Pure functions: no clock, no Ray, nothing
of `app`.

Serve's adapter and the simulator call `decide` with the same arguments. All of this room travels by value to Serve's
controller, which may have no `app` to import.

**Need.** A replica that spends the share p of its time on prefills and takes d seconds for a step of decodes gives a
token every d / (1 - p) seconds; that is within the ITL objective I as long as p + d / I <= 1. So p + d / I is the share
of a replica that its load takes, and these shares add up over the fleet. Prefills that will still wait once a new
replica serves (the look-ahead is the measured cold start) have to be done within the TTFT objective on top of what
arrives; a cold start that takes longer is the time for that. Memory counts by the blocks that requests hold, never by
cached ones, of which a healthy prefix cache is full. Each may fill a replica to `utilization` only.

While no replica serves, none tells of its load: then what arrives is what came to wait, and it is taken to cost as much
beside its prefills as the load did lately. So the first cold start is followed by no second one for the rest.

**Damping.** Up to what was needed all through the last `up_delay_s`, however many replicas that is. Down by one in
`down_interval_s`, if all through it, and through `down_delay_s`, the need stayed below `hysteresis` of what would be
left. To zero only after `idle_s` without a request. Where a running replica or an ingress has not reported, the need is
a lower bound: it may scale up and never down. After a restart of the controller nothing is remembered, so both windows
have to fill anew.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from itertools import dropwhile, takewhile

ROUNDING = 1e-6  # sums of shares
COLD_START_WEIGHT = 0.5  # the newest measurement's
MAX_COLD_START_S = 900.0
ARRIVAL_DOUBT_S = 5.0  # the first requests' rate is taken as if they had come over so much longer
LEAST_PREFILL = 0.05  # share of a replica, below which the ratio says nothing
SHARE_WEIGHT = 0.02  # the newest second's
BUCKET_S = 1.0  # the history keeps the least and the most of each


@dataclass(frozen=True, slots=True)
class Settings:
    """One model's options; see app/config/autoscaling.py, and app/config/slo.py."""

    min_replicas: int
    max_replicas: int
    ttft_slo_s: float
    itl_slo_s: float
    utilization: float
    hysteresis: float
    up_delay_s: float
    down_interval_s: float
    idle_s: float
    max_num_seqs: int  # requests that one replica runs at once
    down_delay_s: float = 0.0  # below down_interval_s it says nothing
    floors: tuple[tuple[int, int], ...] = ()  # (hour of the day in UTC, least replicas from then on), by hour

    @property
    def down_window_s(self) -> float:
        """Returns how long a need is remembered."""
        return max(self.down_delay_s, self.down_interval_s)


@dataclass(frozen=True, slots=True)
class ReplicaLoad:
    """Holds what one replica told of the last seconds."""

    prefill_rate: float  # seconds of prefill that arrived in a second
    queued_prefill_s: float  # that is still to be done
    decode_step_s: float  # mean of a step of decodes; 0 while nothing decodes
    kv_share: float  # referenced blocks / blocks
    num_requests: float  # running and waiting, the most
    prefill_token_s: float = 0.0  # 0 until measured
    start_s: float = 0.0  # its own start, without the time that Ray took to place it


@dataclass(frozen=True, slots=True)
class Fleet:
    """One model's replicas at a moment."""

    now_s: float  # seconds since the epoch
    target: int  # replicas that shall run
    running: int
    loads: tuple[ReplicaLoad, ...]  # of the running ones that have reported lately
    num_waiting: float = 0.0  # requests that wait in the ingresses for a replica
    waiting_tokens: float = 0.0  # of their prompts
    complete: bool = True  # all running replicas and all ingresses have reported lately

    @property
    def num_requests(self) -> float:
        """All requests of the model."""
        return self.num_waiting + sum(load.num_requests for load in self.loads)


@dataclass(frozen=True, slots=True)
class State:
    """Holds what one decision leaves for the next."""

    cold_start_s: float = 0.0  # from a decision to the replicas that serve; 0 until known
    prefill_token_s: float = 0.0  # the last that a replica had measured
    pending_since_s: float | None = None  # a scale-up is under way
    down_since_s: float | None = None  # the last change, or the first decision
    idle_since_s: float | None = None
    waiting_since_s: float | None = None  # requests wait, and no replica serves
    share_per_prefill: float = 1.0  # the whole share of a replica that a load takes / that of its prefills, lately
    history: tuple[tuple[float, float, float], ...] = ()  # (bucket's begin, least need, most need)


def decide(settings: Settings, fleet: Fleet, state: State) -> tuple[int, State]:
    """Decides how many replicas there shall be, and what to remember."""
    if state.history and fleet.now_s < state.history[-1][0]:  # the clock was set back
        state = State(state.cold_start_s, state.prefill_token_s)
    state = _measured(settings, fleet, state)
    need = required_replicas(settings, fleet, state)
    state = _remembered(settings, fleet, state, need)
    floor = _floor(settings, fleet.now_s + state.cold_start_s)
    target = min(max(fleet.target, floor, settings.min_replicas), settings.max_replicas)
    target = min(max(target, _up(settings, fleet, state, need)), settings.max_replicas)
    if target == fleet.target and _may_shrink(settings, fleet, state, max(floor, settings.min_replicas)):
        target -= 1
    if target == fleet.target:
        return target, state
    pending = fleet.now_s if target > fleet.target else None
    return target, replace(state, down_since_s=fleet.now_s, pending_since_s=pending)


def required_replicas(settings: Settings, fleet: Fleet, state: State) -> float:
    """Replicas that the load takes, as a real number; a lower bound where some have not reported."""
    work = _work(settings, fleet) if fleet.loads else _arriving(fleet, state)
    backlog_s = sum(load.queued_prefill_s for load in fleet.loads) + fleet.waiting_tokens * state.prefill_token_s
    # A replica asked for now serves a cold start later: what will still wait then, beside those asked for already.
    later_s = max(0.0, backlog_s + (work - fleet.target) * state.cold_start_s)
    compute = (work + later_s / max(settings.ttft_slo_s, state.cold_start_s)) / settings.utilization
    memory = sum(load.kv_share for load in fleet.loads) / settings.utilization
    rows = fleet.num_waiting / settings.max_num_seqs
    # A replica without a request is of no use, whatever the objectives say.
    return min(max(compute, memory, rows, _some(fleet.num_requests)), fleet.num_requests)


def _work(settings: Settings, fleet: Fleet) -> float:
    """The share of a replica that the load takes where it runs."""
    return sum(load.prefill_rate + load.decode_step_s / settings.itl_slo_s for load in fleet.loads)


def _arriving(fleet: Fleet, state: State) -> float:
    """The same of what has come to wait while no replica serves: its prefills, and the decodes that such brought."""
    if state.waiting_since_s is None:
        return 0.0
    seconds = fleet.now_s - state.waiting_since_s + ARRIVAL_DOUBT_S
    return fleet.waiting_tokens / seconds * state.prefill_token_s * state.share_per_prefill


def _some(num_requests: float) -> float:
    """Any request at all needs a replica."""
    return 2 * ROUNDING if num_requests > 0 else 0.0


def _up(settings: Settings, fleet: Fleet, state: State, need: float) -> int:
    if fleet.target == 0:
        return _ceil(need)  # somebody waits
    begin = fleet.now_s - settings.up_delay_s
    if state.history[0][0] > begin + ROUNDING:
        return 0
    since = takewhile(lambda entry: entry[0] + BUCKET_S > begin, reversed(state.history))
    return _ceil(min(least for _, least, _ in since))


def _may_shrink(settings: Settings, fleet: Fleet, state: State, floor: int) -> bool:
    if fleet.target <= floor:
        return False
    if fleet.target == 1:
        return state.idle_since_s is not None and fleet.now_s - state.idle_since_s >= settings.idle_s
    if state.down_since_s is None or state.down_since_s > fleet.now_s - settings.down_interval_s:
        return False
    begin = fleet.now_s - settings.down_window_s
    if state.history[0][0] > begin + BUCKET_S:
        return False
    most = max(most for at, _, most in state.history if at + BUCKET_S > begin)
    return most <= settings.hysteresis * (fleet.target - 1) + ROUNDING


def _floor(settings: Settings, at_s: float) -> int:
    """The least replicas by the hour that it will be once a replica ordered now serves."""
    if not settings.floors:
        return 0
    hour = int(at_s // 3600) % 24
    begun = [replicas for begin, replicas in settings.floors if begin <= hour]
    return begun[-1] if begun else settings.floors[-1][1]


def _measured(settings: Settings, fleet: Fleet, state: State) -> State:
    """Notes how long a cold start takes, by the last scale-ups or else as replicas say, and what a prefill token
    costs."""
    costs = [load.prefill_token_s for load in fleet.loads if load.prefill_token_s > 0]
    if costs:
        state = replace(state, prefill_token_s=sum(costs) / len(costs))
    prefill = sum(load.prefill_rate for load in fleet.loads)
    if prefill > LEAST_PREFILL:
        share = _work(settings, fleet) / prefill
        state = replace(
            state, share_per_prefill=state.share_per_prefill + SHARE_WEIGHT * (share - state.share_per_prefill)
        )
    waits = not fleet.loads and fleet.num_waiting > 0
    since_s = fleet.now_s if state.waiting_since_s is None else state.waiting_since_s
    state = replace(state, waiting_since_s=since_s if waits else None)
    known_s = state.cold_start_s or max((load.start_s for load in fleet.loads), default=0.0)
    if state.pending_since_s is None:
        return replace(state, cold_start_s=min(known_s, MAX_COLD_START_S))
    took_s = min(max(fleet.now_s - state.pending_since_s, 0.0), MAX_COLD_START_S)
    if fleet.running < fleet.target:
        return replace(state, cold_start_s=max(known_s, took_s))
    if state.cold_start_s:
        took_s = state.cold_start_s + COLD_START_WEIGHT * (took_s - state.cold_start_s)
    return replace(state, cold_start_s=took_s, pending_since_s=None)


def _remembered(settings: Settings, fleet: Fleet, state: State, need: float) -> State:
    """The state with this moment's need; where data are missing, it counts for no scale-down."""
    most = need if fleet.complete else max(need, float(fleet.target))
    history, at = state.history, fleet.now_s
    if history and at - history[-1][0] < BUCKET_S:
        at, low, high = history[-1]
        history = (*history[:-1], (at, min(low, need), max(high, most)))
    else:
        history = (*history, (at, need, most))
    oldest = fleet.now_s - max(settings.down_window_s, settings.up_delay_s) - 2 * BUCKET_S
    history = tuple(dropwhile(lambda entry: entry[0] < oldest, history))
    idle = fleet.complete and fleet.num_requests <= 0
    return replace(
        state,
        history=history,
        idle_since_s=(fleet.now_s if state.idle_since_s is None else state.idle_since_s) if idle else None,
        down_since_s=fleet.now_s if state.down_since_s is None else state.down_since_s,
    )


def _ceil(need: float) -> int:
    return math.ceil(need - ROUNDING)
