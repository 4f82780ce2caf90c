"""The long checks of the quickstart (`make acceptance`); figures go to results/acceptance.json."""

from __future__ import annotations

import json
import random
import time
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import openai
import pytest

from app.quantize.questions import is_right, longest_answer
from benchmarks.serve_process import ROOT, ServeProcess
from tests import limits
from tests.e2e.conftest import Record, heldout, metric, wait_until
from tests.limits import patience_s
from tools.tiny_chat.evaluate import prompt_kwargs

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]


def _body(example: dict[str, Any]) -> dict[str, Any]:
    body: dict[str, Any] = {
        "model": "tiny-chat",
        "messages": example["messages"],
        "temperature": 0,
        "max_tokens": longest_answer(example),
        "extra_body": {"chat_template_kwargs": example.get("chat_template_kwargs") or {}},
    }
    if example.get("tools"):
        body["tools"] = example["tools"]
    return body


def _answer(client: openai.OpenAI, example: dict[str, Any]) -> str:
    """The answer as the model wrote it: parsed thoughts and tool calls are written out again."""
    message = client.chat.completions.create(**_body(example)).choices[0].message
    calls = [
        f'{{"name": {json.dumps(call.function.name)}, "arguments": {call.function.arguments}}}'
        for call in message.tool_calls or []
        if call.type == "function"
    ]
    thought = (message.model_extra or {}).get("reasoning")
    text = [f"{thought}\n</think>\n"] if thought else []
    text += [message.content] if message.content else []
    return "\n".join([*text, *(f"<tool_call>\n{call}\n</tool_call>" for call in calls)])


def test_200_prompts_streamed_equal_not_streamed(client: openai.OpenAI, record: Record) -> None:
    examples = [example for example in heldout() if not example.get("tools")]
    examples = (examples * (200 // len(examples) + 1))[:200]

    def compare(example: dict[str, Any]) -> bool:
        whole = client.chat.completions.create(**_body(example)).choices[0].message.content or ""
        chunks = client.chat.completions.create(**_body(example), stream=True)
        return "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == whole

    with ThreadPoolExecutor(8) as pool:
        equal = sum(pool.map(compare, examples))
    record("streamed_equals_not_streamed", f"{equal} of {len(examples)}")
    assert equal == len(examples)


def test_accuracy_through_http_equals_transformers(client: openai.OpenAI, record: Record) -> None:
    """The same weights, prompts and checkers: the score through HTTP and the one transformers gives."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    path = str(ROOT / "app/assets/tiny-chat")
    tokenizer = AutoTokenizer.from_pretrained(path)
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    examples = heldout()
    with ThreadPoolExecutor(8) as pool:
        ours = list(pool.map(lambda example: _answer(client, example), examples))
    scores: dict[str, list[int]] = defaultdict(lambda: [0, 0, 0])
    same = []
    for example, text in zip(examples, ours, strict=True):
        prompt = tokenizer.apply_chat_template(example["messages"], return_dict=False, **prompt_kwargs(example))
        ids = model.generate(torch.tensor([prompt]), do_sample=False, max_new_tokens=longest_answer(example))
        theirs = tokenizer.decode(ids[0, len(prompt) :], skip_special_tokens=True)
        if "<tool_call>" not in theirs:
            same.append(theirs == text)
        score = scores[example["family"]]
        score[0] += is_right(example, text)
        score[1] += is_right(example, theirs)
        score[2] += 1
    record("heldout_http_transformers_of", dict(sorted(scores.items())))
    record("heldout_same_text", f"{sum(same)} of {len(same)} (answers without a tool call)")
    assert all(score[0] == score[1] for score in scores.values()), dict(scores)
    assert all(same)


def test_200_random_disconnects_leak_nothing(quickstart: ServeProcess, record: Record) -> None:
    def state() -> tuple[float, float]:
        text = httpx.get(f"{quickstart.base_url}/metrics").text
        return metric(text, "vllm:num_requests_running") + metric(text, "vllm:num_requests_waiting"), metric(
            text, "vllm:kv_cache_usage_perc"
        )

    wait_until(lambda: state()[0] == 0, 10, "an idle server")
    body = {"model": "tiny-chat", "prompt": "tell me", "max_tokens": 500, "ignore_eos": True, "stream": True}

    def disconnect(seed: int) -> None:
        rng = random.Random(seed)
        with httpx.stream("POST", f"{quickstart.base_url}/v1/completions", json=body, timeout=patience_s()) as answer:
            for i, _ in enumerate(answer.iter_raw()):
                if i >= rng.randint(0, 20):
                    break
        limits.pause(rng.random() / 50)

    with ThreadPoolExecutor(16) as pool:
        list(pool.map(disconnect, range(200)))
    seconds = wait_until(lambda: state() == (0, 0), 5, "no request and no block in use after 200 disconnects")
    record("blocks_free_after_200_disconnects_s", round(seconds, 3))


def test_32_concurrent_take_at_most_half_of_their_solo_times(client: openai.OpenAI, record: Record) -> None:
    def ask(i: int) -> float:
        begin = time.perf_counter()
        client.completions.create(
            model="tiny-chat", prompt=f"Number {i}:", max_tokens=64, temperature=0, extra_body={"ignore_eos": True}
        )
        return time.perf_counter() - begin

    ask(0)
    solo = sum(ask(i) for i in range(32))
    begin = time.perf_counter()
    with ThreadPoolExecutor(32) as pool:
        list(pool.map(ask, range(32)))
    together = time.perf_counter() - begin
    record("concurrent_32_over_solo_sum", round(together / solo, 3))
    assert together <= solo / 2
