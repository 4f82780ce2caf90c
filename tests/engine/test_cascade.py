"""EngineCore with shared-prefix decode, its Triton kernels in the interpreter: transformers is the judge."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from app.checkpoints.model_info import ModelInfo
from app.config.engine import EngineConfig
from app.engine.core import EngineCore
from app.engine.executor.in_process import InProcessExecutor
from app.errors import ConfigError
from app.kernels.attention import triton_decode, triton_ops, triton_splits
from app.kernels.attention.triton_decode import DecodeTile
from app.worker import cascade_choice
from app.worker.cascade_choice import CascadeChoice
from app.worker.worker import Worker
from tests.engine.core_driver import KEY, assert_idle, make_request, run
from tests.tiny_models import hf_greedy, hf_model, tiny_model
from tests.worker.worker_driver import decode_statically

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter's: see test_engine_on_gpu.py")
MAX_TOKENS = 9


class Watch:
    """Every launch of the cascade kernel: the number of runs it served."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.runs: list[int] = []
        original = triton_decode.attend_runs

        def attend_runs(*arguments: Any, **options: Any) -> None:
            self.runs.append(int(arguments[3].count))
            original(*arguments, **options)

        monkeypatch.setattr(triton_decode, "attend_runs", attend_runs)


@pytest.fixture
def watch(monkeypatch: pytest.MonkeyPatch) -> Watch:
    """Triton's attention on the CPU, with splits short enough for short prompts to have several."""
    monkeypatch.setattr(
        "app.worker.placement.select_attention", lambda *_, **__: (triton_ops.OPS, "attention: triton (interpreted)")
    )
    monkeypatch.setattr(triton_splits, "SPLIT_KEYS", 32)
    monkeypatch.setattr(triton_decode, "choose_tile", lambda *_: DecodeTile(keys=32, num_warps=4, num_stages=2))
    monkeypatch.setattr(cascade_choice, "FIRST_PROBE", 32)
    monkeypatch.setattr(cascade_choice, "EXACT_DTYPES", ())  # all is fp32 here
    return Watch(monkeypatch)


def started(**options: Any) -> Iterator[EngineCore]:
    config = EngineConfig(
        model=str(tiny_model("llama", num_hidden_layers=1)), device="cpu", num_threads=1, executor="in_process",
        max_model_len=256, max_num_seqs=8, **options,
    )  # fmt: skip
    executor = InProcessExecutor(config)
    core = EngineCore(config, ModelInfo.from_directory(config.model), executor, KEY)
    core.start()
    yield core
    core.shutdown()


def worker_of(core: EngineCore) -> Worker:
    executor = core.executor
    assert isinstance(executor, InProcessExecutor)
    assert executor._worker is not None
    return executor._worker


def cascade_of(core: EngineCore) -> CascadeChoice | None:
    runner = worker_of(core)._runner
    assert runner is not None
    return runner._cascade


def prompts() -> list[list[int]]:
    """Two groups, one nested in the other, and one that shares nothing."""
    rng = random.Random(3)

    def draw(count: int) -> list[int]:
        return [rng.randrange(3, 331) for _ in range(count)]

    outer, inner = draw(64), draw(48)
    return [
        outer + inner,
        outer + inner + draw(9),
        outer + draw(20),
        outer + inner + draw(3),
        draw(70),
        outer + draw(5),
    ]


@pytest.mark.parametrize("static", [False, True])
def test_tokens_equal_transformers(watch: Watch, monkeypatch: pytest.MonkeyPatch, static: bool) -> None:
    """Requests join one by one, one is aborted, and blocks run out."""
    monkeypatch.setattr(cascade_choice, "MIN_SAVED_BYTES", 1)
    judge, wanted = hf_model(tiny_model("llama", num_hidden_layers=1)), prompts()
    expected = [hf_greedy(judge, prompt, MAX_TOKENS) for prompt in wanted]
    core = next(cores := started(num_blocks=14, max_step_s=0, cascade_attention="auto" if static else "on"))
    if static:
        decode_statically(worker_of(core), [2, 4, 8], (2, 8))
    requests = [
        make_request(f"r{i}", prompt, max_tokens=MAX_TOKENS, temperature=0.0, ignore_eos=True)
        for i, prompt in enumerate(wanted)
    ]
    doomed = make_request("doomed", wanted[1], max_tokens=50, temperature=0.0, ignore_eos=True)

    def each_step(step: int) -> None:
        if 2 <= step < 2 + len(requests):
            core.add_request(requests[step - 2])
        if step == 14:
            core.abort_requests(["doomed"])

    results = run(core, [doomed], each_step=each_step)
    assert [results.tokens[f"r{i}"] for i in range(len(wanted))] == expected
    assert results.tokens["doomed"][:MAX_TOKENS] == expected[1][: len(results.tokens["doomed"])]
    assert core.stats().figures["preemptions"] > 0
    assert sum(count > 0 for count in watch.runs) >= 6
    assert_idle(core)
    next(cores, None)


def test_off_and_too_little_to_share(watch: Watch) -> None:
    """`auto` leaves the kernel alone where it would save too little."""
    core = next(cores := started(num_blocks=32, cascade_attention="auto"))
    assert cascade_of(core) is not None
    run(core, [make_request(f"r{i}", prompt, max_tokens=2) for i, prompt in enumerate(prompts()[:2])])
    next(cores, None)
    assert not watch.runs
    core = next(cores := started(num_blocks=32, cascade_attention="off"))
    assert cascade_of(core) is None
    next(cores, None)


@pytest.mark.parametrize(
    ("family", "changes", "patched", "match"),
    [("llama", {}, False, "attention_backend=triton shares"), ("mistral", {"sliding_window": 24}, True, "every layer")],
)
def test_on_is_refused_where_nothing_can_be_shared(
    request: pytest.FixtureRequest, family: str, changes: dict[str, Any], patched: bool, match: str
) -> None:
    if patched:
        request.getfixturevalue("watch")
    for mode in ("on", "auto"):
        config = EngineConfig(
            model=str(tiny_model(family, **changes)), device="cpu", executor="in_process", num_blocks=8, num_threads=1,
            max_model_len=64, cascade_attention=mode,
        )  # fmt: skip
        core = EngineCore(config, ModelInfo.from_directory(config.model), InProcessExecutor(config), KEY)
        if mode == "on":
            with pytest.raises(ConfigError, match=match) as error:
                core.start()
            assert error.value.param == "cascade_attention"
        else:
            core.start()
            assert cascade_of(core) is None
            core.shutdown()
