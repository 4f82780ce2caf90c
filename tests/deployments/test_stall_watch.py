"""An engine that stands still is noticed; one that has nothing to do, or waits for slow clients only, is not blamed."""

from __future__ import annotations

from app.deployments.stall_watch import StallWatch


class Clock:
    """Seconds, as the test says."""

    now = 100.0

    def __call__(self) -> float:
        return self.now


def test_a_step_in_time_is_progress() -> None:
    clock = Clock()
    watch = StallWatch(30.0, clock)
    for step in range(5):
        clock.now += 29.0
        assert watch.progresses(step + 1, num_waiting=1)


def test_no_step_while_a_request_waits_is_a_stall_until_the_next_step() -> None:
    clock = Clock()
    watch = StallWatch(30.0, clock)
    assert watch.progresses(7, num_waiting=2)
    clock.now += 29.9
    assert watch.progresses(7, num_waiting=2)
    clock.now += 0.2
    assert not watch.progresses(7, num_waiting=2)
    assert watch.progresses(8, num_waiting=2)


def test_without_a_waiting_request_nothing_stalls() -> None:
    clock = Clock()
    watch = StallWatch(30.0, clock)
    for _ in range(10):
        clock.now += 20.0
        assert watch.progresses(7, num_waiting=0)
    clock.now += 29.0
    assert watch.progresses(7, num_waiting=1), "the time counts from the last look at which nobody waited"
