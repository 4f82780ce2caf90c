"""Adapters are loaded, replaced and unloaded while requests are computed."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

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
        executor="in_process", enable_lora=True, max_loras=2,
    )  # fmt: skip
    core = EngineCore(config, ModelInfo.of(config), InProcessExecutor(config), KEY)
    core.start()
    yield core
    core.shutdown()


def adapter(directory: Path, seed: int) -> Path:
    torch.manual_seed(seed)
    return write_adapter(directory, {name: tensor * 0.7 for name, tensor in pair().items()})


def load(core: EngineCore, directory: Path) -> AdapterAsk:
    return AdapterAsk("the adapter", bytes.fromhex(control.run(core, "load_adapter", {"path": str(directory)})))


def asking(request_id: str, ask: AdapterAsk | None, max_tokens: int = 8) -> EngineRequest:
    request = make_request(request_id, [5, 9, 200, 7, 3, 77, 130], max_tokens=max_tokens, temperature=0.0)
    if ask is None:
        return request
    return replace(request, asks=(ask,), placement=replace(request.placement, cache_root=ask.cache_root(b"")))


def test_replaced_and_unloaded_under_way(core: EngineCore, tmp_path: Path) -> None:
    """Requests that began with an adapter end with it, whatever its directory holds by then; none meets the blocks of
    what had its name before."""
    old = load(core, adapter(tmp_path / "a", 1))
    alone = run(core, [asking("old", old), asking("base", None)]).tokens
    results = Results()
    for request in (asking("one", old), asking("two", old), asking("none", None)):
        core.add_request(request)
    for _ in range(3):
        results.take(core.step())
    shutil.rmtree(tmp_path / "a")
    new = load(core, adapter(tmp_path / "a", 2))
    assert new.digest != old.digest
    core.add_request(asking("new", new))
    leaving = control.begin(core, "unload_adapter", {"digest": old.digest.hex()})
    next(leaving)
    with pytest.raises(ModelNotFoundError, match="the adapter"):
        core.add_request(asking("late", old))
    done = False
    while not done or core.has_work():
        results.take(core.step())
        try:
            next(leaving)
        except StopIteration as end:
            done = done or end.value is True
    assert results.tokens["one"] == results.tokens["two"] == alone["old"]
    assert results.tokens["none"] == alone["base"]
    assert results.tokens["new"] not in (alone["old"], alone["base"])
    assert run(core, [asking("again", new)]).tokens["again"] == results.tokens["new"]
    assert_idle(core)


def test_loaded_again_while_it_is_unloaded(core: EngineCore, tmp_path: Path) -> None:
    ask = load(core, adapter(tmp_path, 1))
    expected = run(core, [asking("first", ask)]).tokens["first"]
    core.add_request(asking("running", ask, max_tokens=20))
    results = Results()
    results.take(core.step())
    leaving = control.begin(core, "unload_adapter", {"digest": ask.digest.hex()})
    next(leaving)
    assert load(core, tmp_path).digest == ask.digest
    run(core, results=results)
    with pytest.raises(StopIteration):
        next(leaving)
    assert run(core, [asking("again", ask)]).tokens["again"] == expected


def test_what_cannot_be_loaded_leaves_nothing(core: EngineCore, tmp_path: Path) -> None:
    hostile = write_adapter(tmp_path / "bad", {name: x / 0 for name, x in pair().items()})
    with pytest.raises(MantaError, match="numbers that are none"):
        load(core, hostile)
    assert not core.adapters
    assert control.run(core, "unload_adapter", {"digest": "00" * 16}) is False
    for digest in ("no digest", "ab"):
        with pytest.raises(InvalidRequestError, match="digest"):
            control.run(core, "unload_adapter", {"digest": digest})


def test_cycles_leave_nothing_behind(core: EngineCore, tmp_path: Path) -> None:
    """Many adapters come and go: neither slots nor host memory keep any."""
    first = load(core, adapter(tmp_path / "first", 0))
    expected = run(core, [asking("first", first)]).tokens["first"]
    for cycle in range(30):
        ask = load(core, adapter(tmp_path / str(cycle), cycle + 1))
        run(core, [asking(f"r{cycle}", ask, max_tokens=2)])
        assert control.run(core, "unload_adapter", {"digest": ask.digest.hex()}) is True
    assert core.adapters == {first.digest}
    assert run(core, [asking("last", first)]).tokens["last"] == expected
    assert_idle(core)
