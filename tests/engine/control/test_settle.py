"""That nothing is computed any more of what was aborted before a call that waits for the workers."""

from __future__ import annotations

from app.engine import control
from tests.engine.core_driver import make_core, make_request


def test_no_step_is_out_of_what_was_aborted_before() -> None:
    core = make_core(late=True)
    core.add_request(make_request("a", [1, 2, 3], max_tokens=30))
    while not core.scheduler.num_unreturned:
        core.step()
    core.abort_requests(["a"])
    assert core.scheduler.num_unreturned
    control.run(core, "settle", {})
    assert not core.scheduler.num_unreturned
