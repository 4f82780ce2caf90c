"""An engine that stands still is noticed; one that has nothing to do, or waits for slow clients only, is not blamed."""

from __future__ import annotations

from app.deployments.replica.stall_watch import StallWatch
from app.engine.step_limit import FLOOR_S

LIMIT_S = 2 * FLOOR_S


class Stage:
    """A watch that is looked at every half second."""

    def __init__(self, limit_s: float = LIMIT_S) -> None:
        self.now = 100.0
        self.watch = StallWatch(lambda: self.now)
        self.limit_s = limit_s

    def look(self, num_steps: int = 7, num_waiting: int = 1, later_s: float = 0.5) -> bool:
        self.now += later_s
        return self.watch.progresses(num_steps, num_waiting, lambda: self.limit_s)

    def seconds(self) -> float:
        """Until it says that nothing is done."""
        began = self.now
        while self.look():
            assert self.now < began + 1000
        return self.now - began


def test_steps_in_time_are_progress() -> None:
    stage = Stage()
    assert all(stage.look(num_steps=step // 19) for step in range(200)), "one step in 9.5 s"


def test_no_step_while_a_request_waits_is_a_stall_until_the_next_step() -> None:
    stage = Stage()
    assert stage.look()
    assert stage.seconds() == LIMIT_S
    assert not stage.look()
    assert stage.look(num_steps=8)


def test_the_limit_is_that_of_a_hung_step_and_never_below_its_floor() -> None:
    for limit_s, seconds in ((0.1, FLOOR_S), (30.0, 30.0)):
        stage = Stage(limit_s)
        assert stage.look()
        assert stage.seconds() == seconds


def test_without_a_waiting_request_nothing_stalls() -> None:
    stage = Stage()
    assert all(stage.look(num_waiting=0) for _ in range(100))
    assert stage.seconds() == LIMIT_S, "the time counts from the last look at which nobody waited"


def test_a_process_that_stood_still_itself_blames_nobody_for_that() -> None:
    """As on a machine with far more to do than it can: looks come late, and so do steps."""
    stage = Stage()
    assert stage.look()
    assert stage.look(later_s=3600.0)
    assert all(stage.look(later_s=4.0) for _ in range(int(LIMIT_S) - 2)), "two turns of one second have passed"
    assert not stage.look(later_s=4.0)
