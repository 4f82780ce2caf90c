"""The worker as the scheduler meets it: step messages in, outputs out, against transformers on the same weights."""

from __future__ import annotations

import random
import shutil
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from app.config.engine import EngineConfig
from app.errors import CheckpointError, ConfigError
from app.platforms.cpu import Cpu
from app.platforms.cuda import Cuda
from app.records.request import EngineRequest
from app.records.sampling_params import SamplingParams
from app.records.step import ModelRunnerOutput, NewRequest, SchedulerOutput
from app.worker.rows.pending_step import PendingStep
from app.worker.worker import Worker
from tests.tiny_models import hf_greedy, hf_model, tiny_model
from tests.worker.worker_driver import Driver, Run, greedy

PROMPT = [random.Random(3).randrange(3, 331) for _ in range(37)]


@pytest.fixture(scope="module")
def directory() -> Path:
    return tiny_model("llama")


@pytest.fixture(scope="module")
def reference(directory: Path) -> PreTrainedModel:
    return hf_model(directory)


def worker(directory: Path, **options: Any) -> Worker:
    defaults: dict[str, Any] = {"device": "cpu", "num_threads": 1, "max_num_seqs": 4, "num_blocks": 64}
    return Worker(EngineConfig(model=str(directory), **{**defaults, **options}))


def request(row: int, tokens: list[int], block_ids: list[int], computed: int = 0, prompt: int = 0) -> NewRequest:
    ids = np.array(tokens, dtype=np.int32)
    ids.flags.writeable = False  # as after a pickle with out-of-band buffers
    return NewRequest(row, ids, prompt or len(tokens), computed, block_ids, EngineRequest("r", [], greedy(50)), ())


def step_message(step_id: int, steps: dict[int, tuple[int, bool]], **diffs: Any) -> SchedulerOutput:
    """steps: row -> (tokens, samples)."""
    return SchedulerOutput(
        step_id,
        np.array(list(steps), dtype=np.int32),
        np.array([count for count, _ in steps.values()], dtype=np.int32),
        np.array([samples for _, samples in steps.values()], dtype=np.bool_),
        **diffs,
    )


def tokens_of(outputs: list[ModelRunnerOutput]) -> list[list[int]]:
    return [output.sampled_token_ids.tolist() for output in outputs]


def test_prefix_hit_computes_the_rest_only(directory: Path, reference: PreTrainedModel) -> None:
    one = worker(directory)
    one.start()
    expected = hf_greedy(reference, PROMPT, 2)
    one.execute(step_message(0, {0: (37, True)}, new_requests=[request(0, PROMPT, [9, 4, 7])]))
    # The first two blocks are shared; block 11 is the request's own.
    out = one.execute(step_message(1, {3: (5, True)}, new_requests=[request(3, PROMPT, [9, 4, 11], computed=32)]))
    out += one.execute(step_message(2, {3: (1, True)}))
    assert tokens_of(out) == [expected[:1], expected[1:]]


def test_preempted_request_goes_on_in_another_row(directory: Path, reference: PreTrainedModel) -> None:
    one = worker(directory)
    one.start()
    expected = hf_greedy(reference, PROMPT, 8)
    one.execute(step_message(0, {0: (37, True)}, new_requests=[request(0, PROMPT, [9, 4, 7])]))
    for step in (1, 2):
        one.execute(step_message(step, {0: (1, True)}))
    one.execute(step_message(3, {}, freed_rows=[0]))
    resumed = request(2, PROMPT + expected[:3], [1, 2, 3], prompt=len(PROMPT))
    assert one.execute(step_message(4, {2: (30, False)}, new_requests=[resumed]))[0].sampled_token_ids.size == 0
    out = one.execute(step_message(5, {2: (10, True)}))
    out += [one.execute(step_message(step, {2: (1, True)}))[0] for step in (6, 7, 8, 9)]
    assert [token for tokens in tokens_of(out) for token in tokens] == expected[3:]


def test_row_freed_and_given_away_in_one_step(directory: Path, reference: PreTrainedModel) -> None:
    one = worker(directory)
    one.start()
    one.execute(step_message(0, {0: (37, True)}, new_requests=[request(0, PROMPT, [9, 4, 7])]))
    other = PROMPT[::-1][:18]
    out = one.execute(step_message(1, {0: (18, True)}, freed_rows=[0], new_requests=[request(0, other, [9, 7])]))
    out += one.execute(step_message(2, {0: (1, True)}))
    assert [t for tokens in tokens_of(out) for t in tokens] == hf_greedy(reference, other, 2)


def test_blocks_appended_to_a_running_row(directory: Path, reference: PreTrainedModel) -> None:
    one = worker(directory)
    one.start()
    found = tokens_of(one.execute(step_message(0, {1: (15, True)}, new_requests=[request(1, PROMPT[:15], [20])])))
    for step in range(1, 20):
        new = {1: [(1, [5])], 17: [(1, [31])]}.get(step, [])  # one at 16 tokens, the next at 32
        found += tokens_of(one.execute(step_message(step, {1: (1, True)}, new_blocks=new)))
    assert [token for tokens in found for token in tokens] == hf_greedy(reference, PROMPT[:15], 20)


def test_empty_message_answers(directory: Path) -> None:
    one = worker(directory)
    one.start()
    for flush in (False, True):
        (output,) = one.execute(step_message(7, {}, flush=flush))
        assert (output.step_id, output.sampled_token_ids.size) == (7, 0)
        assert output.sampled_token_ids.dtype == np.int32
        assert output.step_time_s >= 0


def test_a_device_in_the_background_answers_one_step_late(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """I2, by a worker that is told its device were a GPU: outputs lag by one step message until a flush, and say
    whether their step was over when the next one was launched."""
    over = iter([False, True, False, True, True])
    monkeypatch.setattr(PendingStep, "is_done", lambda _: next(over))
    one = worker(directory)
    one.start()
    one._platform = Cuda()
    steps = [
        one.execute(step_message(0, {0: (37, True)}, new_requests=[request(0, PROMPT, [9, 4, 7])])),
        one.execute(step_message(1, {0: (1, True)})),
        one.execute(step_message(2, {0: (1, True)})),
        one.execute(step_message(3, {}, flush=True)),
        one.execute(step_message(4, {}, flush=True)),
    ]
    assert [[output.step_id for output in outputs] for outputs in steps] == [[], [0], [1], [2, 3], [4]]
    assert [output.was_over for outputs in steps for output in outputs] == [False, True, False, True, True]
    one._platform = Cpu()


def test_steps_that_would_spoil_the_cache_are_refused(directory: Path) -> None:
    one = worker(directory)
    one.start()
    with pytest.raises(AssertionError, match="lacks blocks"):
        one.execute(step_message(0, {0: (37, True)}, new_requests=[request(0, PROMPT, [9, 4])]))
    with pytest.raises(AssertionError, match="end of what is known"):
        one.execute(step_message(1, {1: (37, False)}, new_requests=[request(1, PROMPT, [9, 4, 1])]))


def test_any_thread_may_execute(directory: Path, reference: PreTrainedModel) -> None:
    """A compiled graph steps the worker in another thread than started it."""
    one = worker(directory)
    one.start()
    outputs: list[ModelRunnerOutput] = []
    first = step_message(0, {0: (37, True)}, new_requests=[request(0, PROMPT, [9, 4, 7])])
    for message in (first, step_message(1, {0: (1, True)})):
        thread = threading.Thread(target=lambda message=message: outputs.extend(one.execute(message)))
        thread.start()
        thread.join()
    assert [t for tokens in tokens_of(outputs) for t in tokens] == hf_greedy(reference, PROMPT, 2)


def hf_generate(reference: PreTrainedModel, **options: Any) -> list[int]:
    with torch.inference_mode():
        out = reference.generate(
            torch.tensor([PROMPT]), max_new_tokens=16, do_sample=False, pad_token_id=0,
            attention_mask=torch.ones(1, len(PROMPT), dtype=torch.long), **options,
        )  # fmt: skip
    tokens: list[int] = out[0, len(PROMPT) :].tolist()
    return tokens


def test_repetition_penalty_through_the_device_history(directory: Path, reference: PreTrainedModel) -> None:
    expected = hf_generate(reference, repetition_penalty=1.5, eos_token_id=None)
    plain = hf_generate(reference, eos_token_id=None)
    runs = Driver(str(directory)).run([Run(PROMPT, greedy(16, repetition_penalty=1.5)), Run(PROMPT, greedy(16))])
    assert runs[0].tokens == expected != plain
    assert runs[1].tokens == plain


def test_min_tokens_and_bad_words_end_to_end(directory: Path, reference: PreTrainedModel) -> None:
    plain = hf_generate(reference, eos_token_id=None)
    eos = plain[4]
    expected = hf_generate(reference, eos_token_id=eos, min_new_tokens=9)
    run = Run(PROMPT, greedy(16, min_tokens=9), eos_token_ids=(eos,))
    assert Driver(str(directory)).run([run])[0].tokens[: len(expected)] == expected
    assert eos not in expected[:9]
    words = ((plain[0],), (plain[3], plain[4]))
    assert not set(plain) & set(PROMPT), "transformers looks for bad words in the prompt too"
    expected = hf_generate(reference, eos_token_id=None, bad_words_ids=[list(word) for word in words])
    assert Driver(str(directory)).run([Run(PROMPT, greedy(16), bad_words_token_ids=words)])[0].tokens == expected


@pytest.mark.parametrize("chunk", [10_000, 16, 5])
def test_prompt_logprobs(directory: Path, reference: PreTrainedModel, chunk: int) -> None:
    with torch.inference_mode():
        exact = torch.log_softmax(reference(torch.tensor([PROMPT])).logits[0], dim=-1)
    asking = Run(PROMPT, greedy(3, prompt_logprobs=2, logprobs=1))
    run, bystander = Driver(str(directory), chunk=chunk).run([asking, Run(PROMPT[:20], greedy(3))])
    assert not bystander.prompt_logprobs
    assert len(run.prompt_logprobs) == len(PROMPT) - 1
    for position, entry in enumerate(run.prompt_logprobs, start=1):
        line = exact[position - 1]
        assert entry.token_ids == [PROMPT[position], *line.topk(2).indices.tolist()]
        np.testing.assert_allclose(entry.logprobs, line[entry.token_ids], atol=1e-4)
        assert entry.ranks == [int((line > line[PROMPT[position]]).sum()) + 1, 1, 2]
    first = run.logprobs[0]
    assert first is not None
    assert first.logprobs[0] == pytest.approx(float(exact[-1, run.tokens[0]]), abs=1e-4)
    assert bystander.logprobs == [None] * 3


def test_seeded_sampling_minds_neither_batch_nor_chunk(directory: Path) -> None:
    params = [SamplingParams(seed=i % 3, max_tokens=12, temperature=0.9, top_p=0.95) for i in range(8)]
    prompts = [PROMPT[: 11 + 3 * i] for i in range(8)]
    alone = [Driver(str(directory)).run([Run(p, s)])[0].tokens for p, s in zip(prompts, params, strict=True)]
    for chunk in (10_000, 6):
        runs = [Run(p, s) for p, s in zip(prompts, params, strict=True)]
        assert [run.tokens for run in Driver(str(directory), chunk=chunk).run(runs)] == alone
    assert len({tuple(tokens) for tokens in alone}) == 8


def test_notes_say_what_was_chosen(directory: Path) -> None:
    info = worker(directory, num_blocks=None, max_model_len=100).start()
    assert info.num_blocks == 4 * 7  # max_num_seqs * max_model_len is all a CPU can use
    assert (info.device, info.dtype) == ("cpu", "float32")
    assert info.notes == [
        "device: cpu (as configured)",
        "dtype: float32 (CPU)",
        "attention: torch (CPU)",
        "KV cache: 28 blocks of 16 tokens (0.2 MiB), room for 4.0 requests of 100 tokens",
        "threads: 1",
    ]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_blocks": None, "kv_cache_memory_bytes": 100_000}, r"max_model_len=512: raise kv_cache_memory_bytes or"),
        ({"num_blocks": 1 << 40}, r"num_blocks=1099511627776 needs \d+ MiB on cpu"),
        ({"attention_backend": "triton"}, "attention_backend=triton needs a GPU"),
        pytest.param(
            {"device": "cuda"},
            "device=cuda: rank 0 needs a GPU, 0 visible",
            marks=pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU"),
        ),
    ],
)
def test_what_cannot_be_met_is_a_config_error(directory: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        worker(directory, **options).start()


def test_dummy_weights_need_no_checkpoint(directory: Path, tmp_path: Path) -> None:
    shutil.copy(directory / "config.json", tmp_path)
    with pytest.raises(CheckpointError):
        worker(tmp_path).start()
    runs = [
        Driver(str(tmp_path), load_format="dummy", seed=seed).run([Run(PROMPT, greedy(8))])[0].tokens
        for seed in (1, 1, 2)
    ]
    assert runs[0] == runs[1] != runs[2]


def test_shutdown_twice(directory: Path) -> None:
    one = worker(directory)
    one.start()
    one.shutdown()
    one.shutdown()
    with pytest.raises(AssertionError, match="before start"):
        one.execute(step_message(0, {}))


def test_a_freed_row_cannot_be_stepped(directory: Path) -> None:
    one = worker(directory)
    one.start()
    one.execute(step_message(0, {0: (37, True)}, new_requests=[request(0, PROMPT, [9, 4, 7])]))
    with pytest.raises(AssertionError, match="lacks blocks"):
        one.execute(step_message(1, {0: (1, True)}, freed_rows=[0]))
