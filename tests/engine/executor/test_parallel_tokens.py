"""Tensor- and pipeline-parallel worker groups over gloo give the tokens of transformers, and the logits of one rank."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from app.checkpoints.model_info import ModelInfo
from app.config.engine import EngineConfig
from app.engine.core import EngineCore
from app.engine.executor.base import Executor
from app.engine.executor.in_process import InProcessExecutor
from app.engine.executor.worker_group_executor import WARM_UP_STEP_ID
from app.records.request import EngineRequest
from app.records.sampling_params import SamplingParams
from app.records.step import ModelRunnerOutput, SchedulerOutput
from tests import limits
from tests.engine.core_driver import Results, assert_idle, run
from tests.engine.executor.forked_executor import ForkedExecutor, serve_static
from tests.tiny_models import hf_greedy, hf_model, tiny_model

pytestmark = pytest.mark.usefixtures("one_thread")

NUM_PROMPTS, MAX_TOKENS = 50, 12
KEY = b"a secret for tests"
VOCAB = 331
# Two KV heads: at TP = 4 two ranks share one. A tied head: the last stage needs the first one's table.
SHAPE: dict[str, Any] = {"num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}


def prompts() -> list[list[int]]:
    """Every third begins with a prefix that others share."""
    rng = np.random.default_rng(7)
    shared = rng.integers(3, VOCAB, 40).tolist()
    made = [rng.integers(3, VOCAB, int(length)).tolist() for length in rng.integers(1, 50, NUM_PROMPTS)]
    return [shared + prompt if number % 3 == 0 else prompt for number, prompt in enumerate(made)]


@pytest.fixture(scope="module")
def directory() -> Path:
    return tiny_model("qwen2", tie_word_embeddings=True, **SHAPE)


@pytest.fixture(scope="module")
def truth(directory: Path) -> list[list[int]]:
    model = hf_model(directory)
    return [hf_greedy(model, prompt, MAX_TOKENS) for prompt in prompts()]


@pytest.fixture(scope="module")
def one_rank(directory: Path) -> tuple[Results, Results]:
    config = make_config(directory, executor="in_process")
    return generate(config, InProcessExecutor(config))


def make_config(directory: Path, **options: Any) -> EngineConfig:
    """Chunked prompts, and blocks for about a third of the requests, so that some are preempted."""
    return EngineConfig(
        model=str(directory),
        device="cpu",
        max_model_len=160,
        block_size=8,
        num_blocks=64,
        max_num_seqs=16,
        max_num_batched_tokens=48,
        num_threads=1,
        step_timeout_s=limits.patience_s(),
        **{"executor": "local_processes", **options},
    )


class Watched(ForkedExecutor):
    """Counts step messages that are out at the same time, and whether neighbours among them share a request."""

    def __init__(self, config: EngineConfig) -> None:
        super().__init__(config)
        self._out: list[set[int]] = []  # rows that sample in the step messages that are out
        self.most_out = 0
        self.overlaps = self.neighbours = 0

    def submit(self, step_message: SchedulerOutput) -> None:
        super().submit(step_message)
        if step_message.step_id == WARM_UP_STEP_ID:  # the executor collects it itself
            return
        old = set(step_message.rows.tolist()) - {request.row for request in step_message.new_requests}
        if old and self._out and self._out[-1]:
            self.neighbours += 1
            self.overlaps += bool(old & self._out[-1])
        self._out.append(set(step_message.rows[step_message.samples].tolist()))
        self.most_out = max(self.most_out, len(self._out))

    def collect(self) -> list[ModelRunnerOutput]:
        self._out.pop(0)
        return super().collect()


def requests(count: int, **params: Any) -> list[EngineRequest]:
    options = {"seed": 3, "max_tokens": MAX_TOKENS, "ignore_eos": True, **params}
    return [
        EngineRequest(f"{number}", prompt, SamplingParams(**options), choice_index=number)
        for number, prompt in enumerate(prompts()[:count])
    ]


def generate(config: EngineConfig, executor: Executor) -> tuple[Results, Results]:
    """Greedy with logprobs, then at random with penalties, on one engine."""
    core = EngineCore(config, ModelInfo.from_directory(config.model), executor, KEY)
    try:
        core.start()
        greedy = Results()
        run(core, requests(NUM_PROMPTS, temperature=0.0, logprobs=3), results=greedy)
        drawn = run(
            core, requests(NUM_PROMPTS, temperature=1.0, top_p=0.9, presence_penalty=0.5, frequency_penalty=0.3)
        )
        single = run(core, requests(20, temperature=0.0, max_tokens=1))  # the stages never need these tokens again
        assert all(single.tokens[name] == greedy.tokens[name][:1] for name in single.tokens)
        assert_idle(core)
        stats = core.stats()
        assert stats.figures["preemptions"] > 0, "nothing was preempted"
        assert stats.figures["prefix_cache_hits"] > 0, "no prefix was found"
        return greedy, drawn
    finally:
        core.shutdown()


class Static(Watched):
    """Over static tensors, as from CUDA graphs."""

    target = staticmethod(serve_static)


@pytest.mark.parametrize("pp", [pytest.param(2, marks=pytest.mark.slow), 3])
def test_stages_over_static_tensors(
    pp: int, directory: Path, truth: list[list[int]], one_rank: tuple[Results, Results]
) -> None:
    config = make_config(directory, pipeline_parallel_size=pp)
    greedy, drawn = generate(config, Static(config))
    assert [greedy.tokens[f"{number}"] for number in range(NUM_PROMPTS)] == truth
    assert drawn.tokens == one_rank[1].tokens


@pytest.mark.parametrize(
    ("tp", "pp"),
    [
        (2, 2),
        (4, 1),
        (1, 3),
        pytest.param(2, 1, marks=pytest.mark.slow),
        pytest.param(1, 2, marks=pytest.mark.slow),
    ],
)
def test_same_tokens_as_one_rank(
    tp: int, pp: int, directory: Path, truth: list[list[int]], one_rank: tuple[Results, Results]
) -> None:
    config = make_config(directory, tensor_parallel_size=tp, pipeline_parallel_size=pp)
    watched = Watched(config)
    greedy, drawn = generate(config, watched)
    assert [greedy.tokens[f"{number}"] for number in range(NUM_PROMPTS)] == truth
    assert drawn.tokens == {request_id: one_rank[1].tokens[request_id] for request_id in drawn.tokens}
    assert isinstance(greedy, Results)
    assert isinstance(one_rank[0], Results)
    for request_id, entries in greedy.logprobs.items():
        theirs = [entry.logprobs for entry in one_rank[0].logprobs[request_id]]
        np.testing.assert_allclose([entry.logprobs for entry in entries], theirs, atol=1e-4, rtol=0)
    if pp > 1:
        assert watched.most_out >= pp, "the stages idle"
        assert watched.neighbours > 20
        assert watched.overlaps == 0, "a step waited for the tokens of the one before it"


def test_stages_give_the_same_bits(directory: Path) -> None:
    """`deterministic` in bf16: logprobs of three stages are those of one rank, prompts' too."""

    def bits(kind: type[Executor], **options: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        config = make_config(directory, dtype="bfloat16", deterministic="batch", **options)
        core = EngineCore(config, ModelInfo.from_directory(config.model), kind(config), KEY)  # type: ignore[call-arg]
        try:
            core.start()
            found = run(core, requests(6, temperature=0.9, logprobs=20, prompt_logprobs=1, max_tokens=3))
            return found.logprobs, found.prompt_logprobs
        finally:
            core.shutdown()

    one_rank = bits(InProcessExecutor, executor="in_process")
    assert len(one_rank[0]) == 6
    assert bits(ForkedExecutor, pipeline_parallel_size=3) == one_rank
