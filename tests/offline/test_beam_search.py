"""`LLM.beam_search`, with transformers' beam search as the judge: same tokens, same order, same scores."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from app import LLM, BeamSearchParams, SamplingParams
from app.checkpoints.model_info import ASSETS
from app.errors import InvalidRequestError, PromptTooLongError
from tests.tiny_models import hf_model, tiny_model

PROMPTS = [[5, 9, 13, 200, 7], [(7 * i) % 300 + 3 for i in range(40)], [3]]
ENDS = [2, *range(10, 331, 12)]  # many, so that beams end at all lengths
CASES: list[tuple[int, int, dict[str, Any]]] = [
    (2, 12, {}),
    (4, 20, {}),
    (5, 20, {"length_penalty": 0.0}),
    (4, 20, {"length_penalty": 2.0}),
    (3, 20, {"length_penalty": -1.0}),
    (4, 20, {"early_stopping": True}),
    (4, 20, {"early_stopping": "never", "length_penalty": 0.6}),
    (3, 16, {"min_tokens": 9}),
    (3, 16, {"ignore_eos": True}),
    (1, 10, {}),
]


@pytest.fixture(scope="module")
def directory() -> Any:
    return tiny_model("llama", seed=3, initializer_range=0.1, eos_token_id=ENDS)


@pytest.fixture(scope="module")
def reference(directory: Any) -> Any:
    return hf_model(directory)


@pytest.fixture(scope="module")
def llm(directory: Any) -> Iterator[LLM]:
    tokenizer = str(ASSETS / "tiny-chat")
    with LLM(str(directory), tokenizer=tokenizer, device="cpu", num_threads=1, num_blocks=300, block_size=8) as llm:
        yield llm


def judge(reference: Any, prompt: list[int], width: int, max_tokens: int, **options: Any) -> Any:
    """(beams cut after the token that ended them, scores) by transformers, best first."""
    import torch

    ends = None if options.pop("ignore_eos", False) else ENDS
    ids = torch.tensor([prompt])
    found = reference.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        num_beams=width,
        num_return_sequences=width,
        max_new_tokens=max_tokens,
        min_new_tokens=options.pop("min_tokens", None),
        do_sample=False,
        eos_token_id=ends,
        pad_token_id=0,
        return_dict_in_generate=True,
        output_scores=True,
        **options,
    )
    beams = [row[len(prompt) :].tolist() for row in found.sequences]
    cut = [next((row[: i + 1] for i, token in enumerate(row) if token in (ends or ())), row) for row in beams]
    return cut, found.sequences_scores.tolist() if width > 1 else None


@pytest.mark.parametrize(("width", "max_tokens", "options"), CASES)
def test_the_beams_are_transformers(
    llm: LLM, reference: Any, width: int, max_tokens: int, options: dict[str, Any]
) -> None:
    params = BeamSearchParams(beam_width=width, max_tokens=max_tokens, **options)
    outputs = llm.beam_search(PROMPTS, params)
    for prompt, output in zip(PROMPTS, outputs, strict=True):
        beams, scores = judge(reference, prompt, width, max_tokens, **options)
        assert [beam.tokens for beam in output.sequences] == [prompt + beam for beam in beams]
        if scores is not None:
            assert [beam.score for beam in output.sequences] == pytest.approx(scores, abs=2e-4)
        for beam, tokens in zip(output.sequences, beams, strict=True):
            assert beam.finish_reason == ("stop" if tokens[-1] in ENDS and "ignore_eos" not in options else "length")
            assert beam.cum_logprob == pytest.approx(sum(entry.logprobs[0] for entry in beam.logprobs))


def test_the_cases_reach_every_way_to_end(llm: LLM) -> None:
    """Else the comparison above would prove less than it says."""
    outputs = llm.beam_search(PROMPTS, BeamSearchParams(beam_width=4, max_tokens=20))
    lengths = [{len(beam.tokens) for beam in output.sequences} for output in outputs]
    assert any(len(each) > 1 for each in lengths)
    assert {beam.finish_reason for output in outputs for beam in output.sequences} == {"stop", "length"}


def test_beams_share_their_blocks(llm: LLM) -> None:
    """Each step computes no more than the unfilled block of each beam, however long the prompt."""
    prompt = [(11 * i) % 300 + 3 for i in range(120)]
    (output,) = llm.beam_search([prompt], BeamSearchParams(beam_width=4, max_tokens=10, ignore_eos=True))
    steps = 9 * 4  # after the first
    assert output.num_computed_tokens <= len(prompt) + steps * 8
    assert output.num_cached_tokens >= steps * (len(prompt) - 8)
    assert llm.stats().num_running == llm.stats().num_waiting == 0


def test_text_and_finish(llm: LLM) -> None:
    shown = BeamSearchParams(beam_width=3, max_tokens=20, include_stop_str_in_output=True)
    (with_end,) = llm.beam_search("Hello", shown)
    (without,) = llm.beam_search("Hello", shown.model_copy(update={"include_stop_str_in_output": False}))
    for full, cut in zip(with_end.sequences, without.sequences, strict=True):
        assert full.tokens == cut.tokens
        output = full.tokens[len(with_end.prompt_token_ids) :]
        assert cut.text == llm.tokenizer.decode(output[:-1] if cut.finish_reason == "stop" else output)
        assert full.text.startswith(cut.text)


def test_a_stop_token_ends_a_beam_and_is_named(llm: LLM) -> None:
    (plain,) = llm.beam_search([PROMPTS[2]], BeamSearchParams(beam_width=2, max_tokens=12, ignore_eos=True))
    stop = plain.sequences[0].tokens[3]
    params = BeamSearchParams(beam_width=2, max_tokens=12, ignore_eos=True, stop_token_ids=(stop,), early_stopping=True)
    (stopped,) = llm.beam_search([PROMPTS[2]], params)
    ended = [beam for beam in stopped.sequences if beam.finish_reason == "stop"]
    assert ended
    assert all(beam.stop_reason == stop == beam.tokens[-1] for beam in ended)


def test_what_is_wrong_is_named(llm: LLM) -> None:
    with pytest.raises(PromptTooLongError, match=r"prompts\[1\]"):
        llm.beam_search([[3, 4], [5] * 600], BeamSearchParams(beam_width=2, max_tokens=4))
    with pytest.raises(InvalidRequestError, match=r"prompts\[0\]"):
        llm.beam_search([[9999]], BeamSearchParams(beam_width=2, max_tokens=4))
    for wrong in ({"beam_width": 0}, {"beam_width": 2, "temperature": 0.7}, {"beam_width": 2, "top_p": 0.5}):
        with pytest.raises((ValueError, InvalidRequestError), match=next(reversed(wrong))):
            BeamSearchParams(**wrong)
    assert llm.generate([[3, 4]], SamplingParams(max_tokens=2), use_tqdm=False)[0].finished
