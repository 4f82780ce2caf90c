"""Processes that may be killed: what a parent believes of their answers."""

from __future__ import annotations

from app.limited_process import LimitedProcess


def test_an_answer_that_is_larger_than_its_process_may_be() -> None:
    """Nothing of that size is made room for."""
    process = LimitedProcess("tests.lying_process", (), 64 << 20)
    try:
        assert process.wait_ready()
        answer, ended = process.ask(b"x", 1e9)
        assert not answer
        assert ended == "takes more than 64 MiB, or more stack than there is"
    finally:
        process.kill()
