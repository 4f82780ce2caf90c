"""Families whose layers keep states equal transformers in every way in which a prompt may be computed.

CI takes one variant of each family, and one family in all ways; `make acceptance` takes all.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch

from app import LLM, BeamSearchParams, SamplingParams
from app.checkpoints.model_info import ASSETS, ModelInfo
from app.config.engine import EngineConfig
from app.engine.core import EngineCore
from app.engine.executor.in_process import InProcessExecutor
from app.engine.kv_cache import state_manager
from app.records.request import EngineRequest
from tests.engine.core_driver import KEY, assert_idle, make_request, run
from tests.hf_logprobs import answer_error, check_logprobs, prompts
from tests.models.families.state_variants import STATE_VARIANTS
from tests.models.families.test_families import check
from tests.tiny_models import hf_greedy, hf_model, tiny_model
from tests.worker.worker_driver import Driver, Run, all_logits, decode_statically, greedy

IN_ALL_WAYS = "qwen3_5"
NAMES = [pytest.param(name, marks=() if name == IN_ALL_WAYS else pytest.mark.slow, id=name) for name in STATE_VARIANTS]
MAX_TOKENS = 8


def directory_of(name: str) -> Any:
    family, changes = STATE_VARIANTS[name]
    return tiny_model(family, **changes)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow if "-" in name else ()) for name in STATE_VARIANTS]
)
def test_tokens_and_logits_equal_transformers(name: str) -> None:
    check(directory_of(name), (3, 16, 37, 70), 128)


@pytest.mark.parametrize("name", NAMES)
def test_chunks_of_any_length(name: str) -> None:
    """Shorter than a scan's chunk, as long, longer, and token by token."""
    directory = directory_of(name)
    prompt = prompts((140,))[0]
    with torch.inference_mode():
        exact = hf_model(directory)(torch.tensor([prompt])).logits[0]
    for chunk in (1, 7, 63, 64, 65, 1000):
        logits = all_logits(Driver(str(directory), chunk=chunk, max_model_len=256), prompt)
        assert (logits - exact).abs().max() < 1e-3, f"chunk {chunk}"


def test_minimax_as_first_published(tmp_path: Path) -> None:
    """Other names in config.json, the same tensors."""
    directory = directory_of("minimax")
    config = json.loads((directory / "config.json").read_text())
    older = {f"layernorm_{kind.replace('attn', 'attention')}_{end}": config.pop(f"{kind}_{end}_factor")
             for kind in ("full_attn", "linear_attn", "mlp") for end in ("alpha", "beta")}  # fmt: skip
    marks = [int(kind == "full_attention") for kind in config.pop("layer_types")]
    older |= {"attn_type_list": marks, "architectures": ["MiniMaxText01ForCausalLM"], "model_type": "minimax_text_01"}
    (tmp_path / "config.json").write_text(json.dumps({**config, **older}))
    (tmp_path / "model.safetensors").symlink_to(directory / "model.safetensors")
    prompt = prompts((70,))[0]
    with torch.inference_mode():
        exact = hf_model(directory)(torch.tensor([prompt])).logits[0]
    assert (all_logits(Driver(str(tmp_path), max_model_len=128), prompt) - exact).abs().max() < 1e-3


@contextmanager
def started(directory: Any, **options: Any) -> Iterator[EngineCore]:
    config = EngineConfig(
        model=str(directory), device="cpu", num_threads=1, executor="in_process", block_size=8,
        **{"max_model_len": 128, **options},
    )  # fmt: skip
    core = EngineCore(config, ModelInfo.from_directory(config.model), InProcessExecutor(config), KEY)
    core.start()
    try:
        yield core
    finally:
        core.shutdown()


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    "options",
    [
        {"max_num_seqs": 1},
        {"max_num_seqs": 4, "max_num_batched_tokens": 24},
        {"max_num_seqs": 4, "num_blocks": 16},
    ],
    ids=["alone", "batched", "preempted"],
)
def test_requests_side_by_side(name: str, options: dict[str, Any]) -> None:
    """Rows change hands, and hold what nobody cleared; of a request that is preempted nothing is left."""
    directory, asked = directory_of(name), prompts((3, 16, 37, 60, 41, 9))
    judge = hf_model(directory)
    with started(directory, **options) as core:
        executor = core.executor
        assert isinstance(executor, InProcessExecutor)
        assert executor._worker is not None
        assert executor._worker._parts is not None
        with torch.inference_mode():
            for tensor in chain.from_iterable(executor._worker._parts.cache.states):
                tensor.fill_(float("nan"))
        requests = [
            make_request(str(i), prompt, max_tokens=MAX_TOKENS, temperature=0.0, ignore_eos=True)
            for i, prompt in enumerate(asked)
        ]
        results = run(core, requests)
        assert (core.stats().figures["preemptions"] > 0) == ("num_blocks" in options)
        assert_idle(core)
    found = [results.tokens[str(i)] for i in range(len(asked))]
    assert found == [hf_greedy(judge, prompt, MAX_TOKENS) for prompt in asked]


@pytest.mark.parametrize("name", NAMES)
def test_static_steps_leave_the_states_of_others_alone(name: str) -> None:
    """Three requests in a step for four: the row that pads stands for row 0, whose state must stay."""
    directory, asked = directory_of(name), prompts((37, 16, 5))
    judge = hf_model(directory)
    driver = Driver(str(directory), max_model_len=128)
    decode_statically(driver.worker, [4])
    found = driver.run([Run(prompt, greedy(MAX_TOKENS)) for prompt in asked])
    assert [one.tokens for one in found] == [hf_greedy(judge, prompt, MAX_TOKENS) for prompt in asked]


def test_choices_and_grammars() -> None:
    """Three choices of one prompt, three beams, and an answer that a grammar rules."""
    directory = directory_of(IN_ALL_WAYS)
    prompt = prompts((37,))[0]
    judge = hf_model(directory)
    expected = hf_greedy(judge, prompt, MAX_TOKENS)
    options: dict[str, Any] = {"device": "cpu", "num_threads": 1, "max_model_len": 128, "num_blocks": 100}
    with LLM(str(directory), tokenizer=str(ASSETS / "tiny-chat"), **options) as llm:
        params = SamplingParams(n=3, temperature=0, max_tokens=MAX_TOKENS, ignore_eos=True)
        (answer,) = llm.generate([prompt], params, use_tqdm=False)
        assert [list(choice.token_ids) for choice in answer.outputs] == [expected] * 3
        (found,) = llm.beam_search([prompt], BeamSearchParams(beam_width=3, max_tokens=MAX_TOKENS, ignore_eos=True))
        assert len({tuple(beam.tokens) for beam in found.sequences}) == 3
        for beam in found.sequences:  # each step of a beam forks a state
            with torch.inference_mode():
                exact = torch.log_softmax(judge(torch.tensor([beam.tokens])).logits[0], dim=-1)
            places = range(len(prompt), len(beam.tokens))
            assert beam.cum_logprob == pytest.approx(sum(float(exact[i - 1, beam.tokens[i]]) for i in places), abs=1e-3)
        ruled = SamplingParams(temperature=0, max_tokens=MAX_TOKENS, structured_outputs={"regex": "(yes|no)"})
        (answer,) = llm.generate([prompt], ruled, use_tqdm=False)
        assert answer.outputs[0].text in ("yes", "no")


@pytest.mark.gpu
@pytest.mark.parametrize("name", list(STATE_VARIANTS))
def test_on_a_gpu(name: str) -> None:
    """Prompts in chunks, and tokens from replayed CUDA graphs, through the Triton kernels."""
    check_logprobs(directory_of(name), "cuda", 2e-2)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("in_flight", [1, 2])
def test_prefixes_with_states(name: str, in_flight: int) -> None:
    """A prompt again, one that leaves it, one that goes on behind an answer: cached as far as states were kept."""
    directory = directory_of(name)
    judge = hf_model(directory)
    shared, *ends = prompts((140, 5, 30, 20))
    asked = [shared + end for end in ends]
    options: dict[str, Any] = {"max_num_seqs": 4, "num_blocks": 400, "max_inflight_steps": in_flight}
    with started(directory, max_num_batched_tokens=48, **{**options, "max_model_len": 512}) as core:
        found = []
        for turn, prompt in enumerate([*asked, *asked, shared[:100]]):
            request = make_request(str(turn), prompt, max_tokens=MAX_TOKENS, temperature=0.0, ignore_eos=True)
            results = run(core, [request])
            assert results.tokens[str(turn)] == hf_greedy(judge, prompt, MAX_TOKENS)
            found.append(results.final[str(turn)].num_cached_tokens)
        assert_idle(core)
    last = [(len(prompt) - 2) // 8 * 8 for prompt in asked]
    assert found == [0, 136 if last[0] > 136 else last[0], 136, *last, 0], "the first fork leaves a state for others"


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name == IN_ALL_WAYS else pytest.mark.slow) for name in STATE_VARIANTS]
)
def test_states_of_16_bits(name: str) -> None:
    """Rounded between chunks alone: near transformers, which keeps them in fp32, but not as near as in fp32."""
    if "lfm2" in name:  # whose states are a convolution's inputs
        return
    directory, prompt = directory_of(name), prompts((100,))[0]
    with torch.inference_mode():
        exact = hf_model(directory)(torch.tensor([prompt])).logits[0]
    options = {"max_model_len": 256, "recurrent_state_dtype": "bfloat16"}
    error = (all_logits(Driver(str(directory), chunk=7, **options), prompt) - exact).abs().max()
    assert 1e-5 < error / exact.abs().max() < 5e-2


@pytest.mark.parametrize("name", NAMES)
def test_a_hit_at_every_kept_position(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where answers left them; and one that another replica began goes on from what this one keeps."""
    monkeypatch.setattr(state_manager, "INTERVAL", 32)
    directory, first = directory_of(name), prompts((120,))[0]
    judge = hf_model(directory)
    with started(directory, max_num_seqs=4, num_blocks=400, max_model_len=256) as core:

        def ask(number: int, request: EngineRequest, expected: list[int]) -> int:
            results = run(core, [replace(request, request_id=str(number))])
            assert results.tokens[str(number)] == expected
            return results.final[str(number)].num_cached_tokens

        def request(prompt: list[int], count: int = MAX_TOKENS) -> EngineRequest:
            return make_request("", prompt, max_tokens=count, temperature=0.0, ignore_eos=True)

        answer = hf_greedy(judge, first, 24)
        assert ask(0, request(first, 24), answer) == 0
        whole = [*first, *answer]
        kept = [32, 64, 96, 112, 136]
        for number, place in enumerate(reversed(kept), 1):  # a shallower one is a fork of what is there
            prompt = [*whole[: place + 1], (whole[place + 1] + 1) % 300, 7, 8]
            assert ask(number, request(prompt), hf_greedy(judge, prompt, MAX_TOKENS)) == place
        elsewhere = replace(request(first, 24), output_token_ids=answer[:17])
        assert ask(9, elsewhere, answer[17:]) == 0, "its client has been told of the first replica's"
        assert core.stats().figures["prefix_cache_hits"] >= sum(kept) + 136
        assert_idle(core)


def test_states_come_back_from_the_host() -> None:
    """In too few blocks for all conversations, whose states and tokens wait in host memory; states hold NaN before."""
    directory = directory_of(IN_ALL_WAYS)
    judge = hf_model(directory)
    asked = prompts((140, 130, 120, 110))
    host = {"num_blocks": 60, "kv_host_memory_bytes": 1 << 20}
    with started(directory, max_num_seqs=2, max_num_batched_tokens=48, max_model_len=256, **host) as core:
        found = []
        for turn, prompt in enumerate([*asked, *asked]):
            request = make_request(str(turn), prompt, max_tokens=MAX_TOKENS, temperature=0.0, ignore_eos=True)
            results = run(core, [request])
            assert results.tokens[str(turn)] == hf_greedy(judge, prompt, MAX_TOKENS)
            found.append(results.final[str(turn)].num_cached_tokens)
        assert core.stats().figures["kv_host_loaded_bytes"] > 0
        assert_idle(core)
    assert found == [0] * 4 + [(len(prompt) - 2) // 8 * 8 for prompt in asked]


@pytest.mark.gpu
@pytest.mark.parametrize("name", list(STATE_VARIANTS))
def test_prefixes_with_states_on_a_gpu(name: str) -> None:
    """Prompts that go on from kept states, in chunks and replayed CUDA graphs, have transformers' logprobs."""
    directory = directory_of(name)
    shared, *ends = prompts((140, 5, 30, 20))
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, logprobs=0)
    options = {"dtype": "float32", "max_num_seqs": 4, "max_num_batched_tokens": 48, "gpu_memory_utilization": 0.5}
    chat = str(ASSETS / "tiny-chat")
    judge = hf_model(directory)
    found = []
    with LLM(str(directory), tokenizer=chat, device="cuda", max_model_len=512, block_size=16, **options) as llm:
        for prompt in [shared + end for end in (*ends, *ends)]:
            (answer,) = llm.generate([prompt], params, use_tqdm=False)
            found.append(answer.num_cached_tokens)
            assert answer_error(judge, prompt, answer.outputs[0]) < 2e-2
    assert found == [0, 128, 128, *((len(shared + end) - 2) // 16 * 16 for end in ends)]
