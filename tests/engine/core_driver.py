"""EngineCore over FakeExecutor, and a collector of what comes out, for tests."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from app.checkpoints.model_info import ModelInfo
from app.config.engine import EngineConfig
from app.engine.core import EngineCore
from app.records.outputs import EngineOutput
from app.records.request import EngineRequest, Placement
from app.records.sampling_params import SamplingParams
from app.records.step import TokenLogprobs
from tests.engine.fake_executor import VOCAB, FakeExecutor

KEY = b"a secret for tests"


def fake_info(max_model_len: int = 4096, eos: int | None = None) -> ModelInfo:
    sizes = {"vocab_size": VOCAB, "max_position_embeddings": max_model_len, "num_hidden_layers": 8}
    return ModelInfo(Path("fake"), {**sizes, "eos_token_id": eos}, {})


def make_core(
    *,
    num_blocks: int = 64,
    block_size: int = 4,
    late: bool = False,
    eos: int | None = None,
    max_context: int = 4096,
    recorder: Any = None,
    sink: Any = None,
    num_draft_tokens: int = 0,
    draft_quality: float = 1.0,
    **options: Any,
) -> EngineCore:
    """A started core; `options` are EngineConfig's."""
    config = EngineConfig(block_size=block_size, **options)
    executor = FakeExecutor(
        num_blocks,
        block_size,
        late=late,
        max_num_batched_tokens=config.max_num_batched_tokens,
        num_draft_tokens=num_draft_tokens,
        draft_quality=draft_quality,
    )
    core = EngineCore(config, fake_info(max_context, eos), executor, KEY, recorder=recorder, kv_event_sink=sink)
    core.start()
    return core


def make_request(
    request_id: str, prompt: list[int], *, priority: int = 0, choice_index: int = 0, **params: Any
) -> EngineRequest:
    params.setdefault("seed", 7)
    params.setdefault("max_tokens", 16)
    return EngineRequest(request_id, prompt, SamplingParams(**params), choice_index, placement=Placement(priority))


class Results:
    """Tokens and final output of every request."""

    def __init__(self) -> None:
        self.tokens: dict[str, list[int]] = {}
        self.final: dict[str, EngineOutput] = {}
        self.first: dict[str, EngineOutput] = {}
        self.order: list[str] = []  # request ids as they finished
        self.logprobs: dict[str, list[TokenLogprobs]] = {}
        self.prompt_logprobs: dict[str, list[TokenLogprobs | None]] = {}

    def take(self, outputs: Iterable[EngineOutput]) -> None:
        for output in outputs:
            assert output.request_id not in self.final, f"{output.request_id} goes on after its end"
            self.first.setdefault(output.request_id, output)
            self.tokens.setdefault(output.request_id, []).extend(output.new_token_ids)
            self.logprobs.setdefault(output.request_id, []).extend(output.logprobs or ())
            if output.prompt_logprobs is not None:
                assert output.request_id not in self.prompt_logprobs, "delivered once"
                self.prompt_logprobs[output.request_id] = output.prompt_logprobs
            if output.finish_reason is not None:
                self.final[output.request_id] = output
                self.order.append(output.request_id)


def run(
    core: EngineCore,
    requests: Iterable[EngineRequest] = (),
    *,
    results: Results | None = None,
    each_step: Callable[[int], None] | None = None,
    max_steps: int = 20_000,
) -> Results:
    """Add `requests` and step until nothing is left to do."""
    results = results or Results()
    for request in requests:
        core.add_request(request)
    step = 0
    while core.has_work():
        assert step < max_steps, "no end in sight"
        if each_step is not None:
            each_step(step)
        results.take(core.step())
        step += 1
    return results


def assert_idle(core: EngineCore) -> None:
    """Nothing is held any more: rows, blocks, step messages."""
    scheduler = core.scheduler
    scheduler.kv.pool.check()
    assert not scheduler.requests
    assert scheduler.rows.num_occupied == 0
    assert len(scheduler.waiting) == 0
    assert scheduler.num_unreturned == 0
    assert not scheduler._output_updater._preempted_in_flight
    assert not scheduler.kv._coming
    assert scheduler.kv.pool.num_deferred == 0
    assert scheduler.kv.pool.num_free == scheduler.kv.num_blocks
