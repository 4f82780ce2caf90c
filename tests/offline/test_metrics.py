"""`LLM.get_metrics()`: what vLLM's own example of speculative decoding adds up."""

from __future__ import annotations

from app.offline.llm import LLM
from app.offline.metrics import Counter, Gauge, Vector
from app.records.sampling_params import SamplingParams


def test_drafts_are_counted_by_position() -> None:
    """A model that drafts for itself is always right: all that ends a step early is the answer's end."""
    drafting = {"method": "draft_model", "model": "tiny-chat-draft", "num_speculative_tokens": 3}
    params = SamplingParams(temperature=0.0, max_tokens=25, ignore_eos=True)
    with LLM(
        "tiny-chat-draft",
        tokenizer="app/assets/tiny-chat",
        max_model_len=256,
        num_threads=1,
        speculative_config=drafting,
    ) as llm:
        llm.generate(["Count: one two three", "Say it again:"], params, use_tqdm=False)
        found = {(metric.name, *metric.labels.values()): metric for metric in llm.get_metrics()}
    named = {kind: f"vllm:spec_decode_num_{kind}" for kind in ("drafts", "draft_tokens", "accepted_tokens")}
    drafts, tokens, accepted = (found[name,] for name in named.values())
    assert all(isinstance(one, Counter) for one in (drafts, tokens, accepted))
    places = found["vllm:spec_decode_num_accepted_tokens_per_pos",]
    assert isinstance(places, Vector)
    assert (drafts.value, tokens.value, accepted.value) == (12, 36, 36)  # type: ignore[attr-defined]
    assert places.values == (12, 12, 12)
    generated = found["vllm:generation_tokens",]
    assert isinstance(generated, Counter)
    assert generated.value == 50
    running = found["vllm:num_requests_running",]
    assert isinstance(running, Gauge)
    assert running.value == 0


def test_none_without_drafts() -> None:
    with LLM("tiny-chat-draft", tokenizer="app/assets/tiny-chat", max_model_len=64, num_threads=1) as llm:
        (places,) = (one for one in llm.get_metrics() if isinstance(one, Vector))
    assert places.values == ()
