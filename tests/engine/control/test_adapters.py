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
from app.engine.core import EngineCore
from app.engine.executor.in_process import InProcessExecutor
from app.errors import InvalidRequestError, MantaError, ModelNotFoundError
from app.records.adapter import AdapterAsk
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
