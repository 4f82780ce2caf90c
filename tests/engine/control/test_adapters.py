"""Adapters are loaded, replaced and unloaded while requests are computed."""

from __future__ import annotations

import os
import random
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from app.checkpoints.adapters.adapter_files import AdapterFiles
from app.checkpoints.model_info import ModelInfo
from app.config.engine import EngineConfig
from app.engine import control
from app.engine.adapter_book import AdapterBook
from app.engine.adapter_loads import PATIENCE
from app.engine.core import EngineCore
from app.engine.executor.in_process import InProcessExecutor
from app.errors import InvalidRequestError, MantaError, ModelNotFoundError
from app.records.adapter import NO_ADAPTERS, AdapterAsk, KnownAdapter
from app.records.request import EngineRequest
from tests.adapters import pair, write_adapter
from tests.engine.core_driver import KEY, Results, assert_idle, make_request, run
from tests.tiny_models import tiny_model


@pytest.fixture
def core() -> Iterator[EngineCore]:
    config = EngineConfig(
        model=str(tiny_model()), device="cpu", num_threads=1, num_blocks=200, block_size=4, max_num_seqs=8,
        executor="in_process", enable_lora=True, max_loras=2, max_cpu_loras=3,
    )  # fmt: skip
    core = EngineCore(config, ModelInfo.of(config), InProcessExecutor(config), KEY)
    core.start()
    yield core
    core.shutdown()


def adapter(directory: Path, seed: int) -> Path:
    torch.manual_seed(seed)
    return write_adapter(directory, {name: tensor * 0.7 for name, tensor in pair().items()})


def load(core: EngineCore, directory: Path, name: str = "the adapter") -> AdapterAsk:
    digest = control.run(core, "load_adapter", {"name": name, "path": str(directory)})
    return AdapterAsk(name, bytes.fromhex(digest))


def load_beside(core: EngineCore, directory: Path, results: Results, name: str = "the adapter") -> AdapterAsk:
    """The same while requests run."""
    call = control.begin(core, "load_adapter", {"name": name, "path": str(directory)})
    while True:
        try:
            next(call)
        except StopIteration as done:
            return AdapterAsk(name, bytes.fromhex(done.value))
        results.take(core.step())


def asking(request_id: str, ask: AdapterAsk | None, max_tokens: int = 8) -> EngineRequest:
    request = make_request(request_id, [5, 9, 200, 7, 3, 77, 130], max_tokens=max_tokens, temperature=0.0)
    if ask is None:
        return request
    return replace(request, asks=(ask,))


def test_replaced_under_way(core: EngineCore, tmp_path: Path) -> None:
    """Requests that began with an adapter end with it, whatever its name and its directory mean by then; none meets the
    blocks of what had its name before."""
    old = load(core, adapter(tmp_path / "a", 1))
    alone = run(core, [asking("old", old), asking("base", None)]).tokens
    results = Results()
    for request in (asking("one", old), asking("two", old), asking("none", None)):
        core.add_request(request)
    for _ in range(3):
        results.take(core.step())
    core.pause("two")  # it outlives the load
    shutil.rmtree(tmp_path / "a")
    new = load_beside(core, adapter(tmp_path / "a", 2), results)
    assert new.digest != old.digest
    assert [one.digest for one in core.stats().adapters.known] == [new.digest.hex()]
    core.add_request(asking("new", new))
    core.add_request(asking("late", old))  # built before the change; the adapter is still there
    core.resume("two")
    run(core, results=results)
    assert results.tokens["one"] == results.tokens["two"] == results.tokens["late"] == alone["old"]
    assert results.tokens["none"] == alone["base"]
    assert results.tokens["new"] not in (alone["old"], alone["base"])
    assert core.adapters.loaded == {new.digest}, "with the last request the old one goes"
    assert control.run(core, "unload_adapter", {"name": "another"}) is False
    with pytest.raises(ModelNotFoundError, match="the adapter"):
        core.add_request(asking("too late", old))
    assert run(core, [asking("again", new)]).tokens["again"] == results.tokens["new"]
    assert_idle(core)


def test_an_adapter_that_goes_between_admission_and_queue_ends_the_request_alone(
    core: EngineCore, tmp_path: Path
) -> None:
    prepared = core.prepare(asking("r", load(core, adapter(tmp_path, 1))))
    assert control.run(core, "unload_adapter", {"name": "the adapter"}) is True
    core.enqueue(prepared)
    results = run(core, [asking("base", None)])
    assert "not loaded" in str(results.final["r"].error)
    assert results.final["base"].finish_reason == "length"


def test_no_more_are_loaded_than_there_may_be(
    core: EngineCore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(3):
        load(core, adapter(tmp_path / str(number), number), str(number))
    more = adapter(tmp_path / "more", 9)
    with monkeypatch.context() as patch:
        patch.setattr(AdapterFiles, "digest", None)  # it would be read for nothing
        with pytest.raises(InvalidRequestError, match="max_cpu_loras=3"):
            load(core, more, "more")
    load(core, more, "2")
    assert [one.name for one in core.adapters.known] == ["0", "1", "2"]


def test_one_adapter_under_two_names(core: EngineCore, tmp_path: Path) -> None:
    first, second = (load(core, adapter(tmp_path, 1), name) for name in ("a", "b"))
    assert first.digest == second.digest
    assert [one.name for one in core.adapters.known] == ["a", "b"]
    assert control.run(core, "unload_adapter", {"name": "a"}) is True
    assert run(core, [asking("r", second)]).final["r"].finish_reason == "length"


def test_a_name_is_given_away_only_where_that_is_asked_for(core: EngineCore, tmp_path: Path) -> None:
    load(core, adapter(tmp_path / "a", 1))
    arguments = {"name": "the adapter", "path": str(adapter(tmp_path / "b", 2)), "in_place": False}
    with pytest.raises(InvalidRequestError, match="load_inplace"):
        control.run(core, "load_adapter", arguments)
    assert control.run(core, "load_adapter", {**arguments, "path": str(tmp_path / "a")})


def test_what_cannot_be_loaded_leaves_nothing(core: EngineCore, tmp_path: Path) -> None:
    hostile = write_adapter(tmp_path / "bad", {name: x / 0 for name, x in pair().items()})
    with pytest.raises(MantaError, match="numbers that are none"):
        load(core, hostile)
    assert not core.adapters.loaded
    assert not core.adapters.known
    for name in ("", "x" * 300):
        with pytest.raises(InvalidRequestError, match="name"):
            load(core, adapter(tmp_path / "good", 1), name)


def test_cycles_leave_nothing_behind(core: EngineCore, tmp_path: Path) -> None:
    """Many adapters come and go: neither slots nor host memory keep any."""
    first = load(core, adapter(tmp_path / "first", 0), "first")
    expected = run(core, [asking("first", first)]).tokens["first"]
    for cycle in range(30):
        ask = load(core, adapter(tmp_path / str(cycle), cycle + 1))
        run(core, [asking(f"r{cycle}", ask, max_tokens=2)])
        if cycle % 3 == 0:
            assert control.run(core, "unload_adapter", {"name": "the adapter"}) is True
    control.run(core, "unload_adapter", {"name": "the adapter"})
    assert core.adapters.loaded == {first.digest}
    assert run(core, [asking("last", first)]).tokens["last"] == expected
    assert_idle(core)


@pytest.mark.parametrize(("cycles", "streams"), [(8, 6), pytest.param(1000, 64, marks=pytest.mark.slow)])
def test_loads_under_streams(cycles: int, streams: int, tmp_path: Path) -> None:
    """Adapters are loaded, replaced and unloaded while requests come and go: each request has the tokens of the adapter
    that its name meant when it came, and nothing is left behind."""
    config = EngineConfig(
        model=str(tiny_model()), device="cpu", num_threads=1, num_blocks=1000, block_size=4, max_num_seqs=streams,
        executor="in_process", enable_lora=True, max_loras=4, max_cpu_loras=6,
    )  # fmt: skip
    core = EngineCore(config, ModelInfo.of(config), InProcessExecutor(config), KEY)
    core.start()
    directories, rng = [adapter(tmp_path / str(seed), seed) for seed in range(8)], random.Random(cycles)
    expected: dict[bytes | None, list[int]] = {None: run(core, [asking("base", None)]).tokens["base"]}
    for number, directory in enumerate(directories):
        ask = load(core, directory)
        expected[ask.digest] = run(core, [asking(f"alone {number}", ask)]).tokens[f"alone {number}"]
    assert len({tuple(tokens) for tokens in expected.values()}) == len(expected), "the adapters do not differ"
    control.run(core, "unload_adapter", {"name": "the adapter"})
    results, asked, known = Results(), dict[str, bytes | None](), dict[str, AdapterAsk]()
    memory, count = [], 0

    def judge() -> None:
        """What has ended is compared, and forgotten: memory is to be the engine's alone."""
        nonlocal results
        for request_id in results.order:
            assert results.tokens[request_id] == expected[asked.pop(request_id)], request_id
        unfinished, results = results, Results()
        results.tokens = {name: tokens for name, tokens in unfinished.tokens.items() if name in asked}

    for _cycle in range(cycles):
        name = f"name {rng.randrange(3)}"
        if name in known and rng.random() < 0.3:
            assert control.run(core, "unload_adapter", {"name": name}) is True
            del known[name]
        else:
            while core.adapters.nameless and len(core.adapters.loaded) >= config.max_cpu_loras:
                results.take(core.step())  # until those that go on for a request have gone
            known[name] = load_beside(core, rng.choice(directories), results, name)
        while len(asked) < streams:
            request_id, count = str(count), count + 1
            ask = rng.choice([None, *known.values()])
            asked[request_id] = None if ask is None else ask.digest
            core.add_request(asking(request_id, ask))
        for _ in range(rng.randrange(4)):
            results.take(core.step())
        judge()
        memory.append(resident_bytes())
    run(core, results=results)
    judge()
    assert not asked
    assert count > cycles
    assert core.adapters.loaded == {ask.digest for ask in known.values()}
    assert not core.adapters.nameless
    assert_idle(core)
    assert max(memory) - memory[len(memory) // 10] < 16 << 20
    core.shutdown()


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")


def test_names_and_what_they_mean() -> None:
    book = AdapterBook()
    one, other = KnownAdapter("a", "11" * 16, "/x"), KnownAdapter("a", "22" * 16, "/y")
    book.name(one)
    book.name(other)
    assert book.known == (other,)
    assert book.nameless == {bytes.fromhex(one.digest)}
    assert book.has("a", bytes.fromhex(other.digest))
    assert not book.has("a", bytes.fromhex(one.digest))
    assert book.forget("a")
    assert not book.forget("a")


@pytest.fixture
def disk_core() -> Iterator[EngineCore]:
    """Two adapters in host memory, one in a slot; the others lie on disk."""
    config = EngineConfig(
        model=str(tiny_model()), device="cpu", num_threads=1, num_blocks=400, block_size=4, max_num_seqs=8,
        executor="in_process", enable_lora=True, max_loras=1, max_cpu_loras=2, max_disk_loras=6,
    )  # fmt: skip
    core = EngineCore(config, ModelInfo.of(config), InProcessExecutor(config), KEY)
    core.start()
    yield core
    core.shutdown()


def test_adapters_beyond_host_memory_are_read_again(disk_core: EngineCore, tmp_path: Path) -> None:
    """Eight adapters, of which two are in memory at a time: each request has the tokens of its own, in any order and
    among others, and none waits for ever."""
    core, alone = disk_core, dict[str, list[int]]()
    asks = [load(core, adapter(tmp_path / str(number), number), str(number)) for number in range(8)]
    for number, ask in enumerate(asks):
        alone[str(number)] = run(core, [asking(f"alone {number}", ask)]).tokens[f"alone {number}"]
        assert len(core.adapters.loaded) <= 2
    assert len({tuple(tokens) for tokens in alone.values()}) == 8, "the adapters do not differ"
    with pytest.raises(InvalidRequestError, match="max_cpu_loras=2 and max_disk_loras=6"):
        load(core, adapter(tmp_path / "more", 9), "more")
    chosen = random.Random(1)
    wanted = {f"r{index}": chosen.randrange(8) for index in range(40)}
    found = run(core, [asking(name, asks[number]) for name, number in wanted.items()])
    assert {name: found.tokens[name] for name in wanted} == {n: alone[str(number)] for n, number in wanted.items()}
    assert len(core.adapters.loaded) <= 2
    assert [one.name for one in core.adapters.known] == [str(number) for number in range(8)]
    assert_idle(core)


def test_a_directory_that_holds_another_adapter_by_now_ends_the_requests_that_need_it(
    disk_core: EngineCore, tmp_path: Path
) -> None:
    core = disk_core
    asks = [load(core, adapter(tmp_path / str(number), number), str(number)) for number in range(3)]
    adapter(tmp_path / "0", 77)
    found = run(core, [asking("changed", asks[0]), asking("own", asks[2]), asking("base", None)])
    assert "holds another adapter" in str(found.final["changed"].error)
    assert found.final["own"].finish_reason == found.final["base"].finish_reason == "length"
    shutil.rmtree(tmp_path / "1")
    run(core, [asking("other", asks[2])])
    again = load(core, tmp_path / "0", "0")  # the name gets what is there now
    assert asks[1].digest not in core.adapters.loaded
    found = run(core, [asking("gone", asks[1]), asking("new", again)])
    assert "cannot be read again" in str(found.final["gone"].error)
    assert found.final["new"].finish_reason == "length"
    assert_idle(core)


def test_what_waits_for_an_adapter_can_be_aborted_or_lose_it(disk_core: EngineCore, tmp_path: Path) -> None:
    core = disk_core
    asks = [load(core, adapter(tmp_path / str(number), number), str(number)) for number in range(3)]
    assert asks[0].digest not in core.adapters.loaded
    core.add_request(asking("left", asks[0]))
    core.abort_requests(["left"])
    assert run(core).final["left"].finish_reason == "abort"
    core.add_request(asking("late", asks[0]))
    assert control.run(core, "unload_adapter", {"name": "0"}) is True
    assert "not loaded" in str(run(core).final["late"].error)
    assert_idle(core)


def test_an_adapter_on_disk_does_not_wait_for_ever_for_those_in_memory(disk_core: EngineCore, tmp_path: Path) -> None:
    """Two in memory are asked for without end; the third comes after PATIENCE requests for each of their places."""
    core, results = disk_core, Results()
    asks = [load(core, adapter(tmp_path / str(number), number), str(number)) for number in range(3)]
    cold, hot = asks[0], asks[1:]
    assert cold.digest not in core.adapters.loaded
    sent = [asking(f"hot {number}", hot[number % 2], max_tokens=3) for number in range(6)]
    for request in sent:
        core.add_request(request)
    core.add_request(asking("cold", cold))
    while "cold" not in results.final:
        while len(sent) - len(results.final) < 6:
            sent.append(asking(f"hot {len(sent)}", hot[len(sent) % 2], max_tokens=3))
            core.add_request(sent[-1])
        results.take(core.step())
        assert len(sent) < 30 * PATIENCE
    assert results.final["cold"].finish_reason == "length"
    assert core.stats().figures["adapter_reads"] >= 4
    told = core.stats().adapters
    assert {len(told.known), len(told.on_disk) + len(core.adapters.loaded)} == {3}
    assert 0 < told.read_s != NO_ADAPTERS.read_s
    run(core, results=results)
    assert {output.finish_reason for output in results.final.values()} == {"length"}
