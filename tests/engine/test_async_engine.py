"""The engine in a thread: outputs, errors, health, parking, and an end for every request."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from app.config.engine import EngineConfig
from app.engine import assembly, control, step_limit
from app.engine.async_engine import AsyncEngine
from app.engine.core import EngineCore
from app.errors import EngineDeadError, InvalidRequestError, PromptTooLongError, UnsupportedError
from app.records.outputs import EngineOutput
from app.records.step import ModelRunnerOutput
from app.records.worker_info import WorkerInfo
from tests import limits
from tests.engine.core_driver import KEY, Results, assert_idle, fake_info, make_request
from tests.engine.fake_executor import FakeExecutor, expected_tokens


class Slow(FakeExecutor):
    """Steps take a while, may hang at a gate, may die; remembers the threads that drove it."""

    def __init__(self, *, step_s: float = 0.0, late: bool = False) -> None:
        super().__init__(200, 4, late=late)
        self.step_s = step_s
        self.gate = threading.Event()
        self.gate.set()
        self.hold_at_step: int | None = None  # closes the gate, once
        self.die_at_step: int | None = None
        self.threads: set[int] = set()
        self.shutdowns = 0

    def start(self) -> WorkerInfo:
        self.threads.add(threading.get_ident())
        return super().start()

    def wait_held(self) -> None:
        """Wait until the step at which it was to be held has come; `gate` lets it go on."""
        limits.wait_until(lambda: not self.gate.is_set(), "the step that is held")

    def collect(self) -> list[ModelRunnerOutput]:
        self.threads.add(threading.get_ident())
        if self.hold_at_step is not None and len(self.step_messages) >= self.hold_at_step:
            self.hold_at_step = None
            self.gate.clear()
        self.gate.wait(limits.patience_s())
        time.sleep(self.step_s)
        if self.die_at_step is not None and len(self.step_messages) >= self.die_at_step:
            self.death = EngineDeadError("worker rank 0 was killed")
        outputs = super().collect()
        for output in outputs:
            output.step_time_s = 1e-6
        return outputs

    def shutdown(self) -> None:
        self.shutdowns += 1


class Receiver:
    """Collects what the engine says, and lets a test wait for it."""

    def __init__(self) -> None:
        self.results = Results()
        self.calls = 0
        self.fatal: list[BaseException] = []
        self.condition = threading.Condition()

    def on_outputs(self, outputs: list[EngineOutput]) -> None:
        with self.condition:
            self.calls += 1
            self.results.take(outputs)
            self.condition.notify_all()

    def on_fatal(self, error: BaseException) -> None:
        with self.condition:
            self.fatal.append(error)
            self.condition.notify_all()

    def wait(self, condition: Callable[[], Any]) -> None:
        with self.condition:
            assert self.condition.wait_for(condition, limits.patience_s()), "timed out"

    def wait_final(self, *names: str) -> None:
        self.wait(lambda: all(name in self.results.final for name in names))


class Setup:
    def __init__(self, executor: Slow, **options: Any) -> None:
        self.executor = executor
        self.receiver = Receiver()
        self.core = EngineCore(EngineConfig(block_size=4, **options), fake_info(), executor, KEY)
        self.engine = AsyncEngine(self.core, self.receiver.on_outputs, self.receiver.on_fatal)


@pytest.fixture
def make_engine() -> Iterator[Callable[..., Setup]]:
    made: list[Setup] = []

    def make(executor: Slow | None = None, start: bool = True, **options: Any) -> Setup:
        setup = Setup(executor or Slow(), **options)
        made.append(setup)
        if start:
            setup.engine.start()
        return setup

    yield make
    for setup in made:
        setup.executor.gate.set()
        setup.engine.shutdown()


@pytest.mark.parametrize("late", [False, True])
def test_many_threads_add_requests(make_engine: Callable[..., Setup], late: bool) -> None:
    setup = make_engine(Slow(late=late))

    def add(worker: int) -> None:
        for i in range(10):
            setup.engine.add_request(make_request(f"{worker}.{i}", [worker, i, 5], seed=worker))

    threads = [threading.Thread(target=add, args=(worker,)) for worker in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    setup.receiver.wait(lambda: len(setup.receiver.results.final) == 80)
    for worker in range(8):
        for i in range(10):
            assert setup.receiver.results.tokens[f"{worker}.{i}"] == expected_tokens([worker, i, 5], worker, 16)
    assert len(setup.executor.threads) == 1, "the executor was driven by more than one thread"
    assert threading.get_ident() not in setup.executor.threads
    assert_idle(setup.core)


def test_one_call_a_step_carries_all_outputs(make_engine: Callable[..., Setup]) -> None:
    setup = make_engine()
    setup.executor.gate.clear()
    for i in range(20):
        setup.engine.add_request(make_request(f"r{i}", [i], max_tokens=10))
    setup.executor.gate.set()
    setup.receiver.wait_final(*(f"r{i}" for i in range(20)))
    assert setup.receiver.calls <= 2 * 13


def test_refusals_are_raised_to_the_caller(make_engine: Callable[..., Setup]) -> None:
    setup = make_engine()
    with pytest.raises(PromptTooLongError):
        setup.engine.add_request(make_request("r", [1] * 5000))
    with pytest.raises(InvalidRequestError, match="stop_token_ids"):
        setup.engine.add_request(make_request("r", [1], stop_token_ids=(100_000,)))
    setup.executor.gate.clear()
    setup.engine.add_request(make_request("r", [1]))
    with pytest.raises(InvalidRequestError, match="already in use"):
        setup.engine.add_request(make_request("r", [1]))
    setup.executor.gate.set()
    setup.receiver.wait_final("r")
    assert setup.receiver.results.final["r"].finish_reason == "length"


def test_abort_frees_all_blocks(make_engine: Callable[..., Setup]) -> None:
    setup = make_engine()
    setup.executor.hold_at_step = 8
    setup.engine.add_request(make_request("r", [1] * 20, max_tokens=500))
    setup.executor.wait_held()
    assert setup.receiver.results.tokens["r"]
    setup.engine.abort(["r", "nobody"])
    setup.executor.gate.set()
    setup.receiver.wait_final("r")
    assert setup.receiver.results.final["r"].finish_reason == "abort"
    limits.wait_until(lambda: setup.engine.stats().num_free_blocks == 200, "all blocks are free")


def test_a_plan_that_waits_takes_in_who_comes(
    make_engine: Callable[..., Setup], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine would plan its next step much later; a request that comes is in the step that it plans at once."""
    setup, waits = make_engine(Slow(late=True), start=False), threading.Event()

    def spare_s(core: EngineCore) -> float:
        if "first" not in setup.receiver.results.tokens or waits.is_set():
            return 0.0
        waits.set()
        return 10.0 * limits.patience_s()

    monkeypatch.setattr(EngineCore, "spare_s", spare_s)
    setup.engine.start()
    setup.engine.add_request(make_request("first", [1], max_tokens=60))
    assert waits.wait(limits.patience_s())
    sent = len(setup.executor.step_messages)
    setup.engine.add_request(make_request("second", [2], max_tokens=3))
    setup.receiver.wait_final("first", "second")
    assert len(setup.executor.step_messages[sent].new_requests) == 1


def test_a_pause_that_comes_while_a_plan_waits_leaves_nothing_to_plan(
    make_engine: Callable[..., Setup], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A request has ended by its stop token and a step of it is out yet; a request and the pause come together."""
    setup, waits = make_engine(Slow(late=True), start=False), threading.Event()

    def spare_s(core: EngineCore) -> float:
        if core.scheduler.requests or not core.scheduler.num_unreturned or waits.is_set():
            return 0.0
        waits.set()
        return 10.0 * limits.patience_s()

    monkeypatch.setattr(EngineCore, "spare_s", spare_s)
    setup.engine.start()
    stop = expected_tokens([1, 2, 3], 7, 9)[-1]
    setup.engine.add_request(make_request("a", [1, 2, 3], max_tokens=60, stop_token_ids=(stop,)))
    assert waits.wait(limits.patience_s())
    with setup.engine._condition:  # both are there before the engine's thread goes on
        setup.engine.add_request(make_request("b", [4, 5], max_tokens=5))
        pause = setup.engine.control("pause", {"mode": "keep"})
    pause.result(limits.patience_s())
    setup.engine.control("resume", {}).result(limits.patience_s())
    setup.receiver.wait_final("a", "b")
    assert not setup.receiver.fatal


def test_a_plan_waits_only_while_one_step_is_out_that_was_measured(make_engine: Callable[..., Setup]) -> None:
    setup = make_engine(Slow(late=True), start=False)
    core = setup.core
    core.start()
    core.add_request(make_request("a", [1] * 8, max_tokens=20))
    assert core.spare_s() == 0.0, "nothing is out"
    while not setup.core.scheduler._statistics.costs.decode_step_s:
        core.step()
    core._plan_time.margin_s = -limits.patience_s()
    assert core.spare_s() > 0.0
    core.config = core.config.model_copy(update={"pipeline_parallel_size": 2})
    assert core.spare_s() == 0.0, "the first stage would have nothing to do"
    core.config = core.config.model_copy(update={"pipeline_parallel_size": 1})
    core.add_request(make_request("b", [2] * 8, max_tokens=20))
    assert core.spare_s() == 0.0, "a prompt is to be planned for"


def test_a_slow_client_holds_only_itself(make_engine: Callable[..., Setup]) -> None:
    setup = make_engine()
    setup.executor.hold_at_step = 4
    setup.engine.add_request(make_request("slow", [1], max_tokens=60))
    setup.executor.wait_held()
    setup.engine.pause("slow")
    setup.engine.add_request(make_request("other", [2], max_tokens=60))
    setup.executor.gate.set()
    setup.receiver.wait_final("other")
    assert "slow" not in setup.receiver.results.final
    assert setup.engine.stats().num_paused == 1
    setup.engine.resume("slow")
    setup.receiver.wait_final("slow")
    assert setup.receiver.results.tokens["slow"] == expected_tokens([1], 7, 60)


def test_a_dead_worker_ends_every_request_with_a_readable_error(make_engine: Callable[..., Setup]) -> None:
    executor = Slow()
    executor.die_at_step = 12
    setup = make_engine(executor, max_num_seqs=2)
    executor.gate.clear()
    for i in range(5):
        setup.engine.add_request(make_request(f"r{i}", [i], max_tokens=200))
    executor.gate.set()
    setup.receiver.wait(lambda: setup.receiver.fatal)
    assert len(setup.receiver.results.final) == 5
    for output in setup.receiver.results.final.values():
        assert output.finish_reason == "error"
        assert output.error == "the engine died: worker rank 0 was killed"
    assert isinstance(setup.receiver.fatal[0], EngineDeadError)
    assert len(setup.receiver.fatal) == 1
    with pytest.raises(EngineDeadError, match="rank 0"):
        setup.engine.check_health()
    with pytest.raises(EngineDeadError, match="rank 0"):
        setup.engine.add_request(make_request("late", [1]))
    setup.engine.abort(["r1"])  # harmless


def test_health_sees_a_step_that_hangs(make_engine: Callable[..., Setup]) -> None:
    setup = make_engine(step_timeout_s=limits.AT_ONCE_S)
    setup.engine.check_health()
    limits.pause(0.3)
    setup.engine.check_health()  # idle is healthy, however long
    setup.executor.gate.clear()
    setup.engine.add_request(make_request("r", [1]))
    with pytest.raises(EngineDeadError, match=r"step_timeout_s=0\.2"):
        limits.wait_until(setup.engine.check_health, "the timeout")


def test_a_step_far_longer_than_those_before_it_hangs(
    make_engine: Callable[..., Setup], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(step_limit, "FLOOR_S", limits.AT_ONCE_S)
    setup = make_engine()
    setup.engine.add_request(make_request("a", [1, 2, 3], max_tokens=2 * step_limit.MIN_STEPS))
    setup.receiver.wait_final("a")
    limits.pause(0.3)
    setup.engine.check_health()  # idle is healthy, however long
    setup.executor.gate.clear()
    setup.engine.add_request(make_request("r", [1]))
    with pytest.raises(EngineDeadError, match="has been running a step for more than"):
        limits.wait_until(setup.engine.check_health, "the notice")


def test_a_step_may_take_as_long_as_one_of_the_schedulers_most_tokens(
    make_engine: Callable[..., Setup], monkeypatch: pytest.MonkeyPatch
) -> None:
    """An encoder's are more than the option has by default."""
    monkeypatch.setattr(assembly, "step_budget", lambda *_, **__: 8192)
    monkeypatch.setattr(step_limit.StepLimit, "limit_s", lambda _limit, _token_s, max_step_tokens: max_step_tokens)
    setup = make_engine()
    assert setup.core.config.max_num_batched_tokens == 2048
    assert setup.engine.step_limit_s() == 8192


def test_health_before_start_and_after_shutdown(make_engine: Callable[..., Setup]) -> None:
    setup = make_engine(start=False)
    for _ in range(2):
        with pytest.raises(EngineDeadError, match="not running"):
            setup.engine.check_health()
        setup.engine.shutdown()


def test_a_failure_to_start_reaches_the_caller(make_engine: Callable[..., Setup]) -> None:
    class Broken(Slow):
        def start(self) -> WorkerInfo:
            raise EngineDeadError("no such model")

    setup = make_engine(Broken(), start=False)
    with pytest.raises(EngineDeadError, match="no such model"):
        setup.engine.start()
    assert setup.executor.shutdowns > 0
    assert not setup.receiver.fatal


def test_shutdown_ends_what_still_runs(make_engine: Callable[..., Setup]) -> None:
    setup = make_engine(Slow(step_s=0.002))
    for i in range(3):
        setup.engine.add_request(make_request(f"r{i}", [i], max_tokens=700))
    setup.receiver.wait(lambda: setup.receiver.calls > 3)
    setup.engine.shutdown()
    assert {output.finish_reason for output in setup.receiver.results.final.values()} == {"abort"}
    assert len(setup.receiver.results.final) == 3
    with pytest.raises(EngineDeadError):
        setup.engine.add_request(make_request("x", [1]))
    setup.engine.shutdown()


def test_a_receiver_that_fails_loses_no_request(make_engine: Callable[..., Setup]) -> None:
    """Those whose outputs it did not take end with an error, once, and hold nothing; the others go on."""
    setup = make_engine(start=False)
    receiver = setup.receiver

    def failing(outputs: list[EngineOutput]) -> None:
        if any(output.request_id == "bad" and output.error is None for output in outputs):
            raise ValueError("a bug in the receiver")
        receiver.on_outputs(outputs)

    setup.engine = AsyncEngine(setup.core, failing, receiver.on_fatal)
    setup.engine.start()
    setup.engine.add_request(make_request("good", [1], max_tokens=150))
    receiver.wait(lambda: "good" in receiver.results.tokens)
    setup.engine.pause("good")
    setup.engine.add_request(make_request("bad", [2], max_tokens=150))
    receiver.wait_final("bad")
    assert receiver.results.final["bad"].finish_reason == "error"
    assert "a bug in the receiver" in str(receiver.results.final["bad"].error)
    setup.engine.resume("good")
    receiver.wait_final("good")
    setup.engine.add_request(make_request("next", [1], max_tokens=5))
    receiver.wait_final("next")
    assert receiver.results.final["next"].finish_reason == "length"
    assert not setup.engine._given_up
    setup.engine.check_health()
    setup.engine.shutdown()
    assert_idle(setup.core)


def test_an_idle_engine_parks_once_and_costs_nothing(make_engine: Callable[..., Setup]) -> None:
    setup = make_engine()
    limits.wait_until(lambda: setup.executor.parked == 1, "the engine parks before there is any work")
    setup.engine.add_request(make_request("a", [1], max_tokens=3))
    setup.receiver.wait_final("a")
    limits.wait_until(lambda: setup.executor.parked == 2, "the engine parks after it")
    cpu_s = time.process_time()
    limits.pause(0.5)
    assert setup.executor.parked == 2
    assert time.process_time() - cpu_s < 0.25  # one that spins would take all of it; others live here, too
    setup.engine.add_request(make_request("b", [1], max_tokens=3))  # and it wakes
    setup.receiver.wait_final("b")


def test_a_short_gap_does_not_park(make_engine: Callable[..., Setup]) -> None:
    setup = make_engine(start=False)
    setup.engine = AsyncEngine(
        setup.core, setup.receiver.on_outputs, setup.receiver.on_fatal, park_after_s=limits.patience_s()
    )
    setup.engine.start()
    for i in range(3):
        setup.engine.add_request(make_request(f"r{i}", [1], max_tokens=3))
        setup.receiver.wait_final(f"r{i}")
    assert setup.executor.parked == 0


def test_stats_may_be_read_while_the_engine_runs(make_engine: Callable[..., Setup]) -> None:
    setup = make_engine(max_num_seqs=16)
    for i in range(40):
        setup.engine.add_request(make_request(f"r{i}", [i] * (i + 1), max_tokens=60))
    while len(setup.receiver.results.final) < 40:
        stats = setup.engine.stats()
        assert 0 <= stats.num_running <= 16
        assert stats.outstanding_tokens >= 0
    assert setup.engine.stats().figures["generation_tokens"] == 2400


def _wait_for_the_end(core: EngineCore) -> Any:
    """A control call that waits until nothing runs."""
    while core.scheduler.requests:
        yield
    return core.call_workers("sum_up")


_taken_back_by: list[threading.Thread] = []


def _say_who_ends_it(core: EngineCore) -> Any:
    """A control call that waits for good, and says which thread takes it back."""
    try:
        while True:
            yield
    finally:
        _taken_back_by.append(threading.current_thread())


def _fail_at_the_end(core: EngineCore) -> Any:
    """A control call that waits for good, and cannot clean up."""
    try:
        while True:
            yield
    finally:
        raise OSError("no space left on device")


CALLS = (_wait_for_the_end, _fail_at_the_end, _say_who_ends_it)


@pytest.fixture
def controls(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = {call.__name__[1:]: f"{__name__}:{call.__name__}" for call in CALLS}
    monkeypatch.setattr(control.CONTROLS, "_table", {**control.CONTROLS._table, **lines})


@pytest.mark.usefixtures("controls")
def test_control_calls_run_between_steps(make_engine: Callable[..., Setup]) -> None:
    setup = make_engine()
    setup.engine.add_request(make_request("r", [1, 2, 3], max_tokens=50))
    done = setup.engine.control("wait_for_the_end", {})
    assert done.result(limits.patience_s()) == [("sum_up",)]
    assert setup.receiver.results.tokens["r"] == expected_tokens([1, 2, 3], 7, 50)
    with pytest.raises(UnsupportedError, match="unknown control call '__init__'"):
        setup.engine.control("__init__", {}).result(limits.patience_s())
    with pytest.raises(InvalidRequestError, match="directory: ") as refused:
        setup.engine.control("start_profile", {"directory": 3}).result(limits.patience_s())
    assert refused.value.param == "directory"
    setup.engine.check_health()


@pytest.mark.usefixtures("controls")
def test_a_control_call_is_taken_back_or_ends_with_the_engine(make_engine: Callable[..., Setup]) -> None:
    setup = make_engine()
    setup.executor.hold_at_step = 4
    setup.engine.add_request(make_request("r", [1, 2, 3], max_tokens=400))
    setup.executor.wait_held()
    setup.engine.pause("r")
    setup.executor.gate.set()
    taken_back = setup.engine.control("wait_for_the_end", {})
    assert taken_back.cancel()
    waiting = setup.engine.control("wait_for_the_end", {})
    limits.wait_until(lambda: list(setup.engine._controls) == [waiting])
    setup.executor.die_at_step = 1
    setup.engine.resume("r")
    with pytest.raises(EngineDeadError, match="was killed"):
        waiting.result(limits.patience_s())
    with pytest.raises(EngineDeadError, match="was killed"):
        setup.engine.control("wait_for_the_end", {})


@pytest.mark.usefixtures("controls")
def test_a_control_call_that_fails_as_it_is_taken_back_ends_no_engine(make_engine: Callable[..., Setup]) -> None:
    setup = make_engine()
    call = setup.engine.control("fail_at_the_end", {})
    setup.engine.add_request(make_request("r", [1, 2, 3], max_tokens=3))
    setup.receiver.wait_final("r")  # the call waits: it has been gone on with
    assert call.cancel()
    limits.wait_until(lambda: not setup.engine._controls)
    setup.engine.check_health()


@pytest.mark.usefixtures("controls")
@pytest.mark.parametrize("dies", [False, True])
def test_a_call_that_waits_is_taken_back_by_the_engines_thread(make_engine: Callable[..., Setup], dies: bool) -> None:
    """Not by whichever thread the garbage collector runs in, once the workers are gone."""
    _taken_back_by.clear()
    setup = make_engine(Slow(step_s=0.001))
    failing = setup.engine.control("fail_at_the_end", {})  # it stops no other one from being taken back
    call = setup.engine.control("say_who_ends_it", {})
    setup.engine.add_request(make_request("r", [1, 2, 3], max_tokens=3))
    setup.receiver.wait_final("r")
    if dies:
        setup.executor.die_at_step = 1
        setup.engine.add_request(make_request("s", [1, 2, 3], max_tokens=3))
    else:
        setup.engine.shutdown()
    for one in (call, failing):
        with pytest.raises(EngineDeadError):
            one.result(limits.patience_s())
    assert [thread.name for thread in _taken_back_by] == ["engine"]
