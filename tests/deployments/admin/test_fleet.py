"""A fleet is changed as a whole or not at all, and who joins it later is what the others are."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from app.deployments.admin.fleet import ModelFleet
from app.deployments.admin.fleet_state import FleetState
from app.deployments.admin.transfer_watch import TransferWatch
from app.errors import EngineDeadError, InvalidRequestError
from tests.deployments.admin.fake_fleet import OWN, FakePort, FakeReplica
from tests.limits import run, until

Scene = Callable[["Stage"], Awaitable[None]]


class Stage:
    """Two replicas that have joined, and their Admin."""

    def __init__(self) -> None:
        self.log: list[Any] = []
        self.port = FakePort()
        self.fleet = ModelFleet("m", self.port)

    async def begin(self) -> None:
        await self.fleet.recover()
        for name in ("a", "b"):
            await self.starts(name).member.join(self.fleet.known_state)

    def starts(self, name: str) -> FakeReplica:
        """A replica runs, and has not joined."""
        self.port.replicas[name] = FakeReplica(name, self.log)
        return self.port.replicas[name]

    async def call(self, name: str, **arguments: Any) -> list[Any]:
        answers = await self.fleet.control(name, arguments, 60.0)
        return [one.result for one in answers]

    async def new_admin(self) -> None:
        """The Admin has died, and another one was started."""
        self.fleet = ModelFleet("m", self.port)
        await self.fleet.recover()

    @property
    def answers(self) -> set[str | None]:
        return {one.answers for one in self.port.replicas.values() if not one.is_gone}

    @property
    def a(self) -> FakeReplica:
        return self.port.replicas["a"]

    @property
    def b(self) -> FakeReplica:
        return self.port.replicas["b"]


@pytest.fixture
def play() -> Callable[[Scene], None]:
    async def main(scene: Scene) -> None:
        stage = Stage()
        await stage.begin()
        await scene(stage)

    return lambda scene: run(main(scene))


def test_none_answers_with_new_weights_while_another_has_the_old(play: Any) -> None:
    async def scene(stage: Stage) -> None:
        assert stage.answers == {OWN}
        assert await stage.call("update_weights", path="/new", mode="wait") == ["new", "new"]
        assert stage.answers == {"new"}
        order = [name for _, name in stage.log]
        assert order == ["check_weights"] * 2 + ["pause"] * 2 + ["update_weights"] * 2 + ["resume"] * 2
        assert stage.fleet.state.weights == "/new"
        await stage.call("reload_weights")
        assert stage.answers == {OWN}

    play(scene)


def test_a_paused_fleet_stays_paused_over_new_weights(play: Any) -> None:
    async def scene(stage: Stage) -> None:
        await stage.call("pause")
        await stage.call("update_weights", path="/new")
        assert stage.answers == {None}
        await stage.call("resume")
        assert stage.answers == {"new"}

    play(scene)


def test_what_does_not_fit_changes_nothing(play: Any) -> None:
    async def scene(stage: Stage) -> None:
        answers = await stage.fleet.control("update_weights", {"path": "/bad"}, 60.0)
        assert [one.error and one.error.param for one in answers] == ["path", "path"]
        assert stage.answers == {OWN}
        assert stage.fleet.state == FleetState()
        assert {name for _, name in stage.log} == {"check_weights"}

    play(scene)


@pytest.mark.parametrize("failing", ["pause", "update_weights"])
def test_all_have_the_old_weights_where_one_fails(play: Any, failing: str) -> None:
    async def scene(stage: Stage) -> None:
        await stage.call("update_weights", path="/first")
        stage.b.fails[failing] = EngineDeadError("not now")
        with pytest.raises(EngineDeadError, match="replica b: not now; all replicas are as they were before"):
            await stage.call("update_weights", path="/second")
        assert stage.answers == {"first"}
        assert stage.fleet.state.weights == "/first"
        await stage.call("update_weights", path="/second")
        assert stage.answers == {"second"}

    play(scene)


def test_half_read_weights_are_replaced_by_the_old(play: Any) -> None:
    async def scene(stage: Stage) -> None:
        with pytest.raises(InvalidRequestError, match="cannot be read"):
            await stage.call("update_weights", path="/broken")
        assert stage.answers == {OWN}
        assert not stage.port.left

    play(scene)


def test_one_that_cannot_go_back_is_taken_out(play: Any) -> None:
    async def scene(stage: Stage) -> None:
        stage.b.fails = {"update_weights": EngineDeadError("no"), "describe": EngineDeadError("gone")}
        with pytest.raises(EngineDeadError, match="1 replicas are as they were before; restarted: b"):
            await stage.call("update_weights", path="/new")
        assert stage.port.left == ["b"]
        assert stage.answers == {OWN}

    play(scene)


def test_one_that_dies_after_the_first_has_new_weights(play: Any) -> None:
    async def scene(stage: Stage) -> None:
        stage.b.gates["update_weights"] = asyncio.Event()
        update = asyncio.create_task(stage.call("update_weights", path="/new"))
        await until(lambda: ("a", "update_weights") in stage.log)
        assert stage.answers == {None}
        stage.b.is_gone = True
        stage.b.gates["update_weights"].set()
        with pytest.raises(EngineDeadError):
            await update
        assert stage.a.answers == OWN
        joined = stage.starts("c")
        await joined.member.join(stage.fleet.known_state)
        assert stage.answers == {OWN}

    play(scene)


def test_different_weights_under_one_path(play: Any) -> None:
    async def scene(stage: Stage) -> None:
        stage.b._check_weights = lambda path: "new"  # type: ignore[method-assign]
        stage.b._update_weights = lambda path, mode: "other"  # type: ignore[method-assign, assignment]
        with pytest.raises(InvalidRequestError, match="other weights than the first replica's"):
            await stage.call("update_weights", path="/new")
        assert stage.fleet.state.weights is None
        assert stage.a.answers == OWN

    play(scene)


@pytest.mark.parametrize(
    "calls",
    [
        [("pause", {})],
        [("update_weights", {"path": "/new"})],
        [("sleep", {"level": 1})],
        [("update_weights", {"path": "/new"}), ("sleep", {"level": 1}), ("pause", {})],
        [("sleep", {"level": 2})],
        [("sleep", {"level": 2}), ("wake_up", {"tags": ["weights"]})],
        [("sleep", {"level": 2}), ("wake_up", {"tags": ["weights"]}), ("update_weights", {"path": "/new"})],
        [("sleep", {"level": 2}), ("wake_up", {})],
        [("sleep", {"level": 1}), ("wake_up", {"tags": ["kv_cache"]})],
        [("sleep", {"level": 2}), ("wake_up", {}), ("reload_weights", {})],
    ],
    ids=lambda calls: "-".join(name for name, _ in calls),
)
@pytest.mark.parametrize("has_admin", [True, False])
def test_who_starts_later_is_what_the_others_are(play: Any, calls: Any, has_admin: bool) -> None:
    async def scene(stage: Stage) -> None:
        for name, arguments in calls:
            await stage.call(name, **arguments)
        late = stage.starts("c")
        assert late.answers is None

        async def ask_peer() -> FleetState:
            assert stage.a.member.state is not None
            return stage.a.member.state

        await late.member.join(stage.fleet.known_state if has_admin else ask_peer)
        names = ("asleep", "sleep_level", "weights_missing", "is_paused")
        assert all(getattr(late.engine, name) == getattr(stage.a.engine, name) for name in names)
        assert late.answers == stage.a.answers
        await stage.call("wake_up")
        await stage.call("reload_weights")
        await stage.call("resume")
        assert stage.answers == {OWN}, "a late one takes part from now on"

    play(scene)


def test_who_starts_during_a_change_waits_for_its_end(play: Any) -> None:
    async def scene(stage: Stage) -> None:
        stage.b.gates["update_weights"] = asyncio.Event()
        late = stage.starts("c")
        update = asyncio.create_task(stage.call("update_weights", path="/new"))
        await until(lambda: ("a", "update_weights") in stage.log)
        states = []

        async def ask() -> FleetState:
            states.append(await stage.fleet.known_state())
            return states[-1]

        join = asyncio.create_task(late.member.join(ask))
        await until(lambda: len(states) > 1)
        assert all(state.is_changing for state in states)
        assert late.answers is None
        stage.b.gates["update_weights"].set()
        assert await update == ["new", "new"]
        await join
        assert stage.answers == {"new"}

    play(scene)


def test_a_change_that_begins_while_one_asks_is_not_missed(play: Any) -> None:
    """It was told what the fleet is, and before it hears that, the Admin has begun and looked who is there."""

    async def scene(stage: Stage) -> None:
        late, asked = stage.starts("c"), 0

        async def ask() -> FleetState:
            nonlocal asked
            state = await stage.fleet.known_state()
            asked += 1
            if asked == 1:
                await stage.call("update_weights", path="/new")
            return state

        await late.member.join(ask)
        assert asked > 1
        assert stage.answers == {"new"}

    play(scene)


def test_one_that_cannot_become_what_the_others_are_takes_no_requests(play: Any) -> None:
    async def scene(stage: Stage) -> None:
        await stage.call("update_weights", path="/new")
        late = stage.starts("c")
        late.fails["update_weights"] = InvalidRequestError("path: not on this node", param="path")
        await late.member.join(stage.fleet.known_state)
        assert late.answers is None
        assert late.member.error == "path: not on this node"
        await stage.call("update_weights", path="/newer")
        assert stage.answers == {"newer"}
        assert not late.member.error

    play(scene)


def test_a_new_admin_takes_back_what_the_last_one_left_half_done(play: Any) -> None:
    async def scene(stage: Stage) -> None:
        await stage.call("update_weights", path="/old")
        stage.b.gates["update_weights"] = asyncio.Event()
        update = asyncio.create_task(stage.call("update_weights", path="/new"))
        await until(lambda: stage.a.revision == "new")
        update.cancel()
        with pytest.raises(asyncio.CancelledError):
            await update
        assert stage.b.revision == "old"
        stage.b.gates.clear()
        await stage.new_admin()
        assert stage.answers == {"old"}
        assert stage.fleet.state.weights == "/old"
        assert not stage.fleet.state.is_changing

    play(scene)


def test_a_new_admin_knows_what_the_last_one_told(play: Any) -> None:
    async def scene(stage: Stage) -> None:
        await stage.call("update_weights", path="/new")
        await stage.call("sleep", level=1)
        await stage.new_admin()
        assert (stage.fleet.state.weights, stage.fleet.state.sleep_level) == ("/new", 1)
        await stage.call("wake_up")
        assert stage.answers == {"new"}

    play(scene)


def test_a_new_admin_learns_from_replicas_that_were_silent_when_it_began(play: Any) -> None:
    async def scene(stage: Stage) -> None:
        await stage.call("update_weights", path="/new")
        silent, stage.port.replicas = stage.port.replicas, {}
        await stage.new_admin()
        stage.port.replicas = silent
        await stage.fleet.look_after()
        await stage.fleet.look_after()
        assert not stage.port.left
        assert stage.fleet.state.weights == "/new"
        assert stage.answers == {"new"}

    play(scene)


def test_one_that_missed_a_change_is_restarted(play: Any) -> None:
    async def scene(stage: Stage) -> None:
        hidden = stage.port.replicas.pop("b")
        await stage.call("update_weights", path="/new")
        await stage.fleet.look_after()
        assert not stage.port.left
        stage.port.replicas["b"] = hidden
        await stage.fleet.look_after()
        assert stage.port.left == ["b"]
        stage.port.deaf.add("a")
        with pytest.raises(EngineDeadError):
            await stage.call("pause")

    play(scene)


def test_weights_that_are_sent_to_all(play: Any) -> None:
    async def scene(stage: Stage) -> None:
        with pytest.raises(InvalidRequestError, match="world_size"):
            await stage.call("init_weight_transfer_engine", rank_offset=1, world_size=3)
        assert await stage.call("init_weight_transfer_engine", rank_offset=1, world_size=5) == [1, 3]
        with pytest.raises(InvalidRequestError, match="start_weight_update first"):
            await stage.call("finish_weight_update", version="7")
        await stage.call("start_weight_update")
        assert stage.answers == {None}
        with pytest.raises(InvalidRequestError, match="under way"):
            await stage.call("pause")
        await stage.call("receive_weights", names=["a"])
        first, second = await stage.call("finish_weight_update", version="7")
        assert first == second != OWN
        assert stage.answers == {first}
        late = stage.starts("c")
        await late.member.join(stage.fleet.known_state)
        assert late.answers is None
        assert "came from another process" in late.member.error
        await stage.call("reload_weights")
        assert stage.answers == {OWN}

    play(scene)


def test_a_transfer_is_given_up_for_the_weights_of_a_directory(play: Any) -> None:
    async def scene(stage: Stage) -> None:
        await stage.call("start_weight_update")
        await stage.call("reload_weights")
        assert stage.answers == {OWN}
        assert not stage.fleet.state.is_changing

    play(scene)


def test_a_transfer_whose_sender_has_left_is_taken_back(play: Any) -> None:
    async def scene(stage: Stage) -> None:
        now = 0.0
        stage.fleet._transfer = TransferWatch(300.0, lambda: now)
        await stage.call("update_weights", path="/old")
        await stage.call("start_weight_update")
        stage.a.gates["receive_weights"] = asyncio.Event()
        received = asyncio.create_task(stage.call("receive_weights", names=["a"]))
        await until(lambda: ("b", "receive_weights") in stage.log)
        now = 1000.0
        await stage.fleet.look_after()
        assert stage.fleet.state.is_changing, "tensors come"
        stage.a.gates["receive_weights"].set()
        await received
        now = 1299.0
        await stage.call("describe")
        await stage.fleet.look_after()
        assert stage.answers == {None}
        now = 1301.0
        await stage.fleet.look_after()
        assert stage.answers == {"old"}
        assert not stage.fleet.state.is_changing
        for late in ("receive_weights", "finish_weight_update"):
            with pytest.raises(InvalidRequestError, match="start_weight_update first"):
                await stage.call(late)
        assert stage.answers == {"old"}

    play(scene)


def test_a_failed_sleep_wakes_the_others(play: Any) -> None:
    async def scene(stage: Stage) -> None:
        stage.a.fails["sleep"] = EngineDeadError("not done within 1 s")
        with pytest.raises(EngineDeadError):
            await stage.call("sleep", level=2)
        assert stage.answers == {OWN}

    play(scene)


def test_without_replicas_there_is_an_error(play: Any) -> None:
    async def scene(stage: Stage) -> None:
        stage.port.replicas.clear()
        for name in ("pause", "reset_prefix_cache", "update_weights"):
            with pytest.raises(EngineDeadError, match="no replica"):
                await stage.call(name, path="/new")
        assert not stage.fleet.state.is_changing

    play(scene)


def test_what_an_operator_sees(play: Any) -> None:
    async def scene(stage: Stage) -> None:
        stage.starts("c")
        assert await stage.fleet.drain("b", True, False)
        assert not await stage.fleet.drain("nobody", True, False)
        seen = await stage.fleet.describe()
        assert [one["condition"] for one in seen["replicas"]] == ["serving", "drained", "joining"]
        assert seen["model_revision"] == [OWN]
        assert seen["fleet"]["weights"] is None

    play(scene)
