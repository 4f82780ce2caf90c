"""The arithmetic of autoscaling: what holds for any load, and when data, replicas or the controller fail."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st

from app.deployments.autoscaling.policy import Fleet, ReplicaLoad, Settings, State, decide, required_replicas

OPTIONS = Settings(
    min_replicas=1,
    max_replicas=20,
    ttft_slo_s=2.0,
    itl_slo_s=0.05,
    utilization=0.8,
    hysteresis=0.8,
    up_delay_s=5.0,
    down_interval_s=60.0,
    idle_s=300.0,
    max_num_seqs=64,
)
SLEEPY = replace(OPTIONS, min_replicas=0)

shares = st.floats(0.0, 1.0)
loads = st.builds(
    ReplicaLoad,
    prefill_rate=st.floats(0.0, 20.0),
    queued_prefill_s=st.floats(0.0, 1e4),
    decode_step_s=st.floats(0.0, 1.0),
    kv_share=shares,
    num_requests=st.integers(0, 5000).map(float),
    prefill_token_s=st.floats(0.0, 1e-3),
)
fleets = st.builds(
    Fleet,
    now_s=st.just(1e6),
    target=st.integers(0, 20),
    running=st.integers(0, 20),
    loads=st.lists(loads, max_size=8).map(tuple),
    num_waiting=st.integers(0, 5000).map(float),
    waiting_tokens=st.floats(0.0, 1e7),
    complete=st.booleans(),
)


class World:
    """A fleet in closed loop: replicas come a cold start after they were asked for, and share the load evenly."""

    def __init__(self, options: Settings = OPTIONS, *, replicas: int = 1, cold_start_s: float = 20.0) -> None:
        self.options = options
        self.cold_start_s = cold_start_s
        self.now_s = 1_000_000.0
        self.state = State()
        self.target = self.running = replicas
        self.targets = [replicas]
        self.backlog_s = 0.0
        self.work = 0.0  # seconds of prefill that arrive in a second
        self.streams = 0.0
        self.num_waiting = 0.0
        self.reporting: Callable[[], float] = lambda: 1.0  # share of the replicas that report
        self._coming: list[float] = []

    def run(self, seconds: float) -> list[int]:
        """The targets of each second from now on."""
        begin = len(self.targets)
        for _ in range(int(seconds)):
            self._second()
        return self.targets[begin:]

    def _second(self) -> None:
        self.now_s += 1.0
        arrived = [at for at in self._coming if at <= self.now_s]
        self._coming = [at for at in self._coming if at > self.now_s]
        self.running = min(self.running + len(arrived), self.target)
        self.backlog_s = max(0.0, self.backlog_s + self.work - self.running)
        target, self.state = decide(self.options, self._fleet(), self.state)
        self._coming += [self.now_s + self.cold_start_s] * (target - self.target)
        if target < self.target:
            self.running = min(self.running, target)
        self.target = target
        self.targets.append(target)

    def _fleet(self) -> Fleet:
        reporting = round(self.running * self.reporting())
        step_s = 0.008 + 0.0001 * self.streams / self.running if self.running and self.streams else 0.0
        one = ReplicaLoad(
            prefill_rate=self.work / max(self.running, 1),
            queued_prefill_s=self.backlog_s / max(self.running, 1),
            decode_step_s=step_s,
            kv_share=0.0,
            num_requests=100.0 if self.work or self.streams or self.backlog_s else 0.0,
            start_s=0.8 * self.cold_start_s,
        )
        complete = reporting == self.running
        return Fleet(self.now_s, self.target, self.running, (one,) * reporting, self.num_waiting, complete=complete)


def turns(targets: list[int]) -> int:
    """How often the fleet changed direction."""
    steps = [after - before for before, after in pairwise(targets) if after != before]
    return sum((a > 0) != (b > 0) for a, b in pairwise(steps))


@given(fleets, loads, st.floats(0.0, 5.0), st.floats(0.0, 1e4))
def test_more_load_never_needs_fewer_replicas(fleet: Fleet, load: ReplicaLoad, more: float, waiting: float) -> None:
    state = State(prefill_token_s=1e-4, cold_start_s=30.0)
    before = required_replicas(OPTIONS, replace(fleet, loads=(*fleet.loads, load)), state)
    heavier = [
        replace(load, prefill_rate=load.prefill_rate + more),
        replace(load, queued_prefill_s=load.queued_prefill_s + more),
        replace(load, decode_step_s=load.decode_step_s + more),
        replace(load, kv_share=load.kv_share + more),
        replace(load, num_requests=load.num_requests + more),
    ]
    for one in heavier:
        assert required_replicas(OPTIONS, replace(fleet, loads=(*fleet.loads, one)), state) >= before - 1e-9
    crowded = replace(fleet, loads=(*fleet.loads, load), num_waiting=fleet.num_waiting + waiting)
    assert required_replicas(OPTIONS, crowded, state) >= before - 1e-9


@given(st.lists(fleets, min_size=1, max_size=20), st.integers(0, 3), st.integers(3, 12))
@settings(max_examples=30, deadline=None)
def test_no_load_leads_out_of_the_bounds(seen: list[Fleet], least: int, most: int) -> None:
    options = replace(OPTIONS, min_replicas=least, max_replicas=most)
    state, target = State(), least
    for second, fleet in enumerate(seen):
        now_s = 1e6 + 4.0 * second
        target, state = decide(options, replace(fleet, now_s=now_s, target=target), state)
        assert least <= target <= most


@given(st.lists(loads, min_size=1, max_size=6), st.integers(1, 12))
@settings(max_examples=10, deadline=None)
def test_missing_reports_never_scale_down(seen: list[ReplicaLoad], target: int) -> None:
    state = State()
    for second in range(0, 800, 4):
        known = tuple(seen) if second % 3 else ()
        fleet = Fleet(1e6 + second, target, target, known, complete=False)
        after, state = decide(SLEEPY, fleet, state)
        assert after >= target
        target = after


def test_without_any_data_the_fleet_stays_as_it_is() -> None:
    world = World(SLEEPY, replicas=4)
    world.reporting = lambda: 0.0
    assert set(world.run(3600)) == {4}


@given(st.floats(0.05, 12.0), st.floats(0.0, 4000.0), st.integers(1, 20), st.floats(1.0, 120.0))
@settings(max_examples=12, deadline=None)
def test_constant_load_settles_and_never_flaps(work: float, streams: float, replicas: int, cold_start_s: float) -> None:
    world = World(replicas=replicas, cold_start_s=cold_start_s)
    world.work, world.streams = work, streams
    settling = world.run(1500)
    assert turns(settling) <= 1, "up for the backlog, then down to what the load takes"
    settled = world.run(240)
    assert len(set(settled)) == 1
    share = world.work + (0.008 * world.target + 0.0001 * streams) / OPTIONS.itl_slo_s if streams else world.work
    assert settled[0] == OPTIONS.max_replicas or share <= OPTIONS.utilization * settled[0] + 1e-6


def test_noise_does_not_make_the_fleet_flap() -> None:
    rng = random.Random(7)
    world = World(replicas=3)
    for _ in range(3600):
        world.work = max(0.0, rng.gauss(2.0, 0.4))  # needs 2.5 of 3 replicas, give or take half a one
        world.run(1)
    assert set(world.targets[120:]) <= {3, 4}
    assert turns(world.targets) <= 1


def test_a_short_spike_adds_nothing() -> None:
    world = World(replicas=2)
    world.work = 1.0
    world.run(120)
    world.work = 3.0
    world.run(2)
    world.work = 1.0
    assert set(world.run(60)) == {2}


def test_a_step_is_met_within_ten_seconds_by_several_at_once() -> None:
    world = World(replicas=1)
    world.work = 0.3
    world.run(60)
    world.work = 4.0
    targets = world.run(10)
    assert targets[4] == 1, "not at once"
    assert targets[-1] >= 5, "4 seconds of work a second, at a utilization of 0.8"


def test_the_queue_that_grows_while_replicas_start_orders_no_further_ones_without_end() -> None:
    world = World(replicas=1, cold_start_s=60.0)
    world.work = 0.3
    world.run(60)
    world.work = 4.0
    assert max(world.run(300)) <= 12, "60 s of waiting leave a backlog of 180 s"


def test_down_by_one_a_minute_and_not_below_what_is_needed() -> None:
    world = World(replicas=8)
    world.work = 8 * 0.79
    world.run(200)
    world.work = 1.0  # 1.25 replicas; 2 are left by the hysteresis
    targets = world.run(900)
    falls = [second for second, (a, b) in enumerate(pairwise(targets)) if b < a]
    assert all(b - a >= 60 for a, b in pairwise(falls))
    assert all(a - b <= 1 for a, b in pairwise(targets))
    assert targets[-1] == 2


def test_down_only_to_what_was_enough_for_the_whole_delay() -> None:
    world = World(replace(OPTIONS, down_delay_s=300.0), replicas=8)
    world.work = 8 * 0.79
    world.run(400)
    world.work = 1.0
    falls = [second for second, (a, b) in enumerate(pairwise(world.run(900))) if b < a]
    assert 290 <= falls[0] <= 305
    assert falls[1] - falls[0] < 65, "then one in each down_interval_s"


def test_replicas_that_the_objectives_cannot_use_are_not_asked_for() -> None:
    world = World(replace(OPTIONS, itl_slo_s=0.004))  # a step of one request takes 8 ms
    fleet = Fleet(1e6, 1, 1, (ReplicaLoad(0.0, 0.0, 0.008, 0.1, 3.0),))
    assert required_replicas(world.options, fleet, State()) <= 3, "three requests run on three replicas at most"


def test_cached_blocks_do_not_count_and_referenced_ones_do() -> None:
    load = ReplicaLoad(0.0, 0.0, 0.0, kv_share=0.8, num_requests=40.0)
    assert required_replicas(OPTIONS, Fleet(1e6, 2, 2, (load, load)), State()) == 2.0


def test_from_zero_at_once_and_to_zero_only_after_a_long_silence() -> None:
    world = World(SLEEPY, replicas=0, cold_start_s=10.0)
    assert set(world.run(600)) == {0}
    world.num_waiting = 130.0  # 64 run at once
    assert world.run(1) == [3], "several at once, without a delay"
    world.run(10)
    world.num_waiting, world.work = 0.0, 0.2
    assert 0 not in world.run(900), "there is load"
    assert world.target == 1
    world.work = 0.0
    assert 0 not in world.run(299)
    assert world.run(5)[-1] == 0


def test_what_goes_on_coming_while_nobody_serves_is_asked_for_at_once() -> None:
    """One replica's time in prefills arrives in each second, and decodes took twice as much beside them."""
    state, target = State(cold_start_s=60.0, prefill_token_s=1e-3, share_per_prefill=3.0), 0
    for second in range(30):
        fleet = Fleet(1e6 + second, target, 0, (), 5.0 * (second + 1), 1000.0 * (second + 1))
        target, state = decide(SLEEPY, fleet, state)
    assert 4 <= target <= 6
    assert decide(SLEEPY, Fleet(1e6 + 31, 6, 0, ()), state)[1].waiting_since_s is None


def test_the_share_beside_the_prefills_is_learned() -> None:
    state = State()
    load = ReplicaLoad(0.2, 0.0, 0.6 * OPTIONS.itl_slo_s, 0.1, 5.0)
    for second in range(600):
        _, state = decide(OPTIONS, Fleet(1e6 + second, 1, 1, (load,)), state)
    assert abs(state.share_per_prefill - 4.0) < 0.01


def test_a_model_that_may_not_sleep_keeps_its_least_replicas() -> None:
    world = World(replace(OPTIONS, min_replicas=2), replicas=5)
    assert world.run(3600)[-1] == 2


def test_a_restarted_controller_changes_nothing_at_once() -> None:
    world = World(replicas=4)
    world.work = 2.9
    world.run(300)
    world.state = State()
    assert set(world.run(120)) == {4}
    world.work, world.state = 0.5, State()
    assert set(world.run(59)) == {4}, "no scale-down before a whole interval was seen"
    assert world.run(5)[-1] == 3


def test_a_clock_that_is_set_back_delays_a_scale_down_by_one_interval() -> None:
    world = World(replicas=4)
    world.run(30)
    world.now_s -= 7200.0
    targets = world.run(120)
    assert targets[50] == 4
    assert targets[-1] == 3


def test_a_replica_that_dies_leaves_its_load_to_the_others_and_is_not_taken_for_less_load() -> None:
    world = World(replicas=3)
    world.work = 2.2
    world.run(120)
    world.running = 2  # Serve starts another one; two carry everything meanwhile
    assert min(world.run(120)) >= 3


def test_a_replica_that_reports_now_and_then_does_not_make_the_fleet_flap() -> None:
    world, rng = World(replicas=4), random.Random(3)
    world.work = 1.0
    world.reporting = lambda: rng.choice([0.5, 1.0])
    assert set(world.run(1200)) == {4}


def test_replicas_that_never_come_are_asked_for_no_longer_than_they_are_needed() -> None:
    world = World(replicas=1, cold_start_s=1e9)  # the cluster has no room
    world.work = 3.0
    world.run(60)
    assert world.target > 3
    world.work = world.backlog_s = 0.1
    assert world.run(2400)[-1] == 1


def test_the_cold_start_is_measured() -> None:
    world = World(replicas=1, cold_start_s=42.0)
    world.work = 2.0
    world.run(120)
    assert 41.0 <= world.state.cold_start_s <= 44.0


def test_floors_by_hour_hold_early_enough_for_replicas_to_be_there() -> None:
    options = replace(SLEEPY, floors=((8, 3), (18, 0)))
    day_s = 86400.0 * 12
    state = State(cold_start_s=120.0)
    for clock, floor in ((7.9, 0), (7.97, 3), (12.0, 3), (17.9, 3), (18.0, 0), (23.0, 0), (2.0, 0)):
        fleet = Fleet(day_s + clock * 3600.0, 0, 0, ())
        assert decide(options, fleet, state)[0] == floor, clock


def test_a_floor_holds_from_its_hour_over_midnight() -> None:
    options = replace(SLEEPY, floors=((22, 2),))
    for hour in (22, 23, 0, 5, 21):
        assert decide(options, Fleet(hour * 3600.0 + 86400.0, 0, 0, ()), State())[0] == 2
