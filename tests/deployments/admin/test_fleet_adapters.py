"""Adapters are served by all replicas or by none, and by those that start later."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import pytest

from app.deployments.admin.fleet_calls import FLEET_CALLS
from app.errors import InvalidRequestError
from app.records.adapter import KnownAdapter
from tests.deployments.admin.fake_fleet import FakeReplica
from tests.deployments.admin.test_fleet import Stage
from tests.limits import run

X, Y = KnownAdapter("one", "x", "/x"), KnownAdapter("two", "y", "/y")


def served(replica: FakeReplica) -> set[KnownAdapter]:
    return set(replica.adapters.values())


async def _call(stage: Stage, call: str, **arguments: str) -> None:
    await stage.fleet.control(call, arguments, 60.0)


def play(scene: Callable[[Stage], Awaitable[None]]) -> None:
    async def whole() -> None:
        stage = Stage()
        await stage.begin()
        await scene(stage)

    run(whole())


def test_all_serve_it_and_who_starts_later_too() -> None:
    async def scene(stage: Stage) -> None:
        await _call(stage, "load_adapter", name="one", path="/x")
        await _call(stage, "load_adapter", name="two", path="/y")
        await _call(stage, "unload_adapter", name="one")
        assert served(stage.a) == served(stage.b) == {Y}
        late = stage.starts("late")
        late.adapters["configured"] = KnownAdapter("configured", "c", "/c")
        await late.member.join(stage.fleet.known_state)
        assert served(late) == {Y}
        await stage.new_admin()
        assert stage.fleet.state.adapters == (Y,)
        last = stage.starts("last")
        await last.member.join(stage.fleet.known_state)
        assert served(last) == {Y}

    play(scene)


@pytest.mark.parametrize("before", [True, False])
def test_where_one_fails_all_are_as_before(before: bool) -> None:
    async def scene(stage: Stage) -> None:
        if before:
            await _call(stage, "load_adapter", name="one", path="/x")
        stage.b.fails["load_adapter"] = InvalidRequestError("no such adapter", param="lora_path")
        with pytest.raises(InvalidRequestError, match="replica b: no such adapter; all replicas are as they were"):
            await _call(stage, "load_adapter", name="one", path="/y")
        assert served(stage.a) == served(stage.b) == ({X} if before else set())
        with pytest.raises(InvalidRequestError, match="another adapter than the first replica's"):
            await _call(stage, "load_adapter", name="three", path="/unlike")
        assert served(stage.a) == served(stage.b) == ({X} if before else set())

    play(scene)


def test_one_that_cannot_serve_what_the_others_do_takes_no_requests() -> None:
    async def scene(stage: Stage) -> None:
        await _call(stage, "load_adapter", name="one", path="/x")
        late = stage.starts("late")
        late.fails["load_adapter"] = InvalidRequestError("its node has no /x")
        await late.member.join(stage.fleet.known_state)
        assert "no /x" in late.member.error
        assert late.answers is None

    play(scene)


def test_the_fleets_calls_are_the_engines() -> None:
    from app.engine.control import CONTROLS

    assert FLEET_CALLS.keys() <= set(CONTROLS)
