"""Adapters that lie on disk until a request asks for them."""

from __future__ import annotations

import random
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from app.checkpoints.model_info import ModelInfo
from app.config.engine import EngineConfig
from app.engine import control
from app.engine.adapters.loads import PATIENCE
from app.engine.core import EngineCore
from app.engine.executor.in_process import InProcessExecutor
from app.errors import InvalidRequestError
from app.records.adapter import NO_ADAPTERS
from tests.engine.control.test_adapters import adapter, asking, load
from tests.engine.core_driver import KEY, Results, assert_idle, run
from tests.tiny_models import tiny_model


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
