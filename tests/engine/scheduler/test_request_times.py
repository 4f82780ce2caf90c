"""What an engine's last output says of the request's time there, for its spans."""

from __future__ import annotations

from app.records.outputs import EngineOutput
from tests.engine.core_driver import make_core, make_request


def test_a_preempted_request_says_when() -> None:
    """Two requests of 24 tokens over 8 blocks of 4: one has to give way."""
    core = make_core(num_blocks=8)
    for name in ("a", "b"):
        core.add_request(make_request(name, [1, 2, 3, 4], max_tokens=20))
    outputs: list[EngineOutput] = []
    while core.has_work():
        outputs += core.step()
    ends = [output for output in outputs if output.finish_reason is not None]
    assert len(ends) == 2
    assert sum(output.num_preemptions for output in ends) > 0
    for output in ends:
        times = output.times
        assert times is not None
        assert times.first_token_s is not None
        assert times.last_token_s is not None
        assert 0 <= times.scheduled_s <= times.first_token_s <= times.last_token_s
        assert len(times.preempted_s) == output.num_preemptions
        assert all(times.scheduled_s <= at <= times.last_token_s for at in times.preempted_s)
    assert all(output.times is None for output in outputs if output.finish_reason is None)


def test_one_that_was_never_scheduled_says_nothing() -> None:
    core = make_core()
    core.add_request(make_request("a", [1, 2, 3]))
    core.abort_requests(["a"])
    (end,) = core.step()
    assert end.finish_reason == "abort"
    assert end.times is None
