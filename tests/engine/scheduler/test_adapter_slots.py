"""Adapters of the rows are never more than slots, and no request waits for one for ever."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from app.engine.core import EngineCore
from app.errors import ModelNotFoundError
from app.records.adapter import AdapterAsk
from app.records.request import EngineRequest
from app.records.step import SchedulerOutput
from tests.engine.core_driver import Results, assert_idle, make_core, make_request, run
from tests.engine.fake_executor import FakeExecutor


def adapting_core(max_loras: int, **options: object) -> EngineCore:
    core = make_core(enable_lora=True, max_loras=max_loras, **{"num_blocks": 200, "max_num_seqs": 8, **options})
    core.adapters.loaded = frozenset(bytes([number]) for number in range(100))
    return core


def asking(request_id: str, adapter: int | None, length: int = 6, max_tokens: int = 4) -> EngineRequest:
    request = make_request(request_id, list(range(length)), max_tokens=max_tokens)
    if adapter is None:
        return request
    ask = AdapterAsk(f"a{adapter}", bytes([adapter]))
    return replace(request, asks=(ask,))


def adapters_of_rows(core: EngineCore) -> list[set[bytes]]:
    """The adapters of the rows after each step message, as workers see them: what a row had it keeps until it is freed
    or taken by another."""
    assert isinstance(core.executor, FakeExecutor)
    rows: dict[int, bytes | None] = {}
    found = []
    for message in core.executor.step_messages:
        assert isinstance(message, SchedulerOutput)
        for row in message.freed_rows:
            rows.pop(row)
        for request in message.new_requests:
            ask = request.spec.asked(AdapterAsk)
            rows[request.row] = None if ask is None else ask.digest
        found.append({digest for digest in rows.values() if digest is not None})
    return found


def test_an_adapter_that_is_not_loaded_is_refused_by_name() -> None:
    core = adapting_core(2)
    with pytest.raises(ModelNotFoundError, match="'a200' is not loaded"):
        core.add_request(asking("r", 200))


@pytest.mark.parametrize("seed", range(4))
def test_rows_have_at_most_as_many_adapters_as_there_are_slots(seed: int) -> None:
    chosen = random.Random(seed)
    core = adapting_core(3, max_num_batched_tokens=24, num_blocks=40, max_inflight_steps=1 + seed % 2)
    requests = [
        asking(f"r{index}", chosen.choice([None, *range(9)]), chosen.randrange(2, 30), chosen.randrange(1, 12))
        for index in range(60)
    ]
    results = run(core, requests)
    assert len(results.final) == 60
    assert all(final.finish_reason == "length" for final in results.final.values())
    assert max(map(len, adapters_of_rows(core))) == 3
    assert_idle(core)


def test_a_request_is_not_overtaken_for_ever() -> None:
    """One adapter's requests never end to come; another's gets in all the same."""
    core = adapting_core(1, max_num_seqs=4)
    for index in range(4):
        core.add_request(asking(f"first{index}", 1, max_tokens=6))
    core.add_request(asking("other", 2))
    count, results = 0, Results()

    def keep_coming(step: int) -> None:
        nonlocal count
        if "other" not in results.final and count < 300:
            count += 1
            core.add_request(asking(f"more{count}", 1, max_tokens=6))

    run(core, results=results, each_step=keep_coming)
    assert count < 100, "the other adapter waited until none of the first came any more"
    place = results.order.index("other")
    assert 4 <= place <= 4 + 4 + 4, results.order[: place + 1]
    assert_idle(core)


def test_requests_without_an_adapter_pass_those_that_wait_for_a_slot() -> None:
    core = adapting_core(1, max_num_seqs=4)
    requests = [asking("long", 1, max_tokens=30), asking("waits", 2), *(asking(f"base{i}", None) for i in range(6))]
    order = run(core, requests).order
    assert set(order[:6]) == {f"base{i}" for i in range(6)}
    assert order[6:] == ["long", "waits"]
    assert_idle(core)


def test_many_that_wait_for_a_slot_hold_up_nobody_else() -> None:
    core = adapting_core(1, max_num_seqs=8)
    requests = [asking("long", 1, max_tokens=60), *(asking(f"waits{i}", 2 + i % 3) for i in range(40))]
    order = run(core, [*requests, *(asking(f"base{i}", None) for i in range(4))]).order
    assert set(order[:4]) == {f"base{i}" for i in range(4)}
    assert order[4] == "long"
    assert len(order) == 45
    assert_idle(core)


def test_requests_that_clients_hold_give_their_slot() -> None:
    core = adapting_core(1)
    core.add_request(asking("held", 1, max_tokens=20))
    results = Results()
    for _ in range(3):
        results.take(core.step())
    core.pause("held")
    core.add_request(asking("other", 2))
    steps = 0
    while "other" not in results.final:
        results.take(core.step())
        steps += 1
        assert steps < 50
    core.resume("held")
    run(core, results=results)
    assert results.order == ["other", "held"]
    assert len(results.tokens["held"]) == 20
    assert_idle(core)


def test_names_of_running_and_waiting_adapters_are_told() -> None:
    core = adapting_core(1, max_num_seqs=4)
    for index, number in enumerate((1, 2, 3, 1)):
        core.add_request(asking(f"r{index}", number, max_tokens=8))
    assert core.stats().adapters.waiting_names == ("a1", "a2", "a3")
    core.step()
    told = core.stats().adapters
    assert (told.running_names, told.waiting_names) == (("a1",), ("a2", "a3"))
    assert told.running == (bytes([1]).hex(),)
    core.abort_requests(["r2"])
    assert core.stats().adapters.waiting_names == ("a2",)
    run(core)
    told = core.stats().adapters
    assert (told.running, told.running_names, told.waiting_names, told.num_slots) == ((), (), (), 1)
