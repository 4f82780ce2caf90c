"""When a replica is left alone, and when it serves again."""

from __future__ import annotations

from app.deployments.ingress.circuit_breaker import FIRST_REST_S, LONGEST_REST_S, TRIAL_S, CircuitBreaker


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def usable(breaker: CircuitBreaker, *names: str) -> list[str]:
    return sorted(breaker.usable(names or ("a", "b")))


def shut(clock: Clock) -> CircuitBreaker:
    breaker = CircuitBreaker(3, clock)
    for i in range(3):
        assert usable(breaker) == ["a", "b"]
        breaker.fault("a", f"channel {i}")
    return breaker


def test_faults_in_a_row_shut_it_and_one_request_tries_later() -> None:
    clock = Clock()
    breaker = shut(clock)
    assert usable(breaker) == ["b"]
    clock.now += FIRST_REST_S
    assert usable(breaker) == ["a", "b"]
    breaker.note_sent("a")
    assert usable(breaker) == ["b"], "one tries, alone"
    breaker.success("a")
    assert usable(breaker) == ["a", "b"]


def test_it_rests_longer_each_time_up_to_a_limit() -> None:
    clock = Clock()
    breaker = shut(clock)
    rest_s = FIRST_REST_S
    for i in range(8):
        clock.now += rest_s
        breaker.note_sent("a")
        breaker.fault("a", f"again {i}")
        rest_s = min(2 * rest_s, LONGEST_REST_S)
        clock.now += 0.99 * rest_s
        assert usable(breaker) == ["b"]
        clock.now -= 0.99 * rest_s


def test_a_trial_that_tells_nothing_is_followed_by_another() -> None:
    clock = Clock()
    breaker = shut(clock)
    clock.now += FIRST_REST_S
    breaker.note_sent("a")
    clock.now += TRIAL_S
    assert usable(breaker) == ["a", "b"]


def test_never_the_last_one() -> None:
    breaker = shut(Clock())
    assert usable(breaker, "a") == ["a"]


def test_one_lost_channel_is_one_fault_and_success_ends_the_row() -> None:
    breaker = CircuitBreaker(3, Clock())
    for _ in range(16):
        breaker.fault("a", "the same")
    assert usable(breaker) == ["a", "b"]
    breaker.success("a")
    breaker.fault("a")
    breaker.fault("a")
    assert usable(breaker) == ["a", "b"]
