"""OutputProcessor: text, truncation and finish reasons, however the engine cuts its outputs."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from app.records.outputs import CompletionOutput, EngineOutput
from app.records.sampling_params import SamplingParams
from app.records.step import TokenLogprobs
from app.text.output_processor import OutputProcessor, TextDelta
from app.text.tokenizer import Tokenizer


@pytest.fixture(scope="session")
def tokenizer(directories: dict[str, Path]) -> Tokenizer:
    return Tokenizer.from_directory(directories["byte_level"])


def run(
    tokenizer: Tokenizer,
    ids: list[int],
    finish: str = "length",
    sizes: list[int] | None = None,
    **params: object,
) -> tuple[CompletionOutput, list[TextDelta], OutputProcessor]:
    """Feed `ids` in outputs of the given sizes, the last with `finish`."""
    sampling = SamplingParams.model_validate(params)
    processor = OutputProcessor(tokenizer, sampling)
    whole, deltas, start = CompletionOutput(0), [], 0
    while start < len(ids) and not processor.finished:
        size = (sizes or [1])[len(deltas) % len(sizes or [1])]
        part = ids[start : start + size]
        start += size
        logprobs = [TokenLogprobs([i, 5], [-float(i), -0.5], [2, 1]) for i in part] if sampling.logprobs else None
        reason = finish if start >= len(ids) else None
        output = EngineOutput("r", part, reason, logprobs=logprobs)  # type: ignore[arg-type]
        deltas.append(processor.process(output))
        deltas[-1].add_to(whole)
    return whole, deltas, processor


sizes = st.lists(st.integers(1, 5), min_size=1, max_size=4)


@settings(max_examples=200, deadline=None)
@given(text=st.text(min_size=1, max_size=40), sizes=sizes)
def test_any_cutting_gives_the_decoding_of_the_whole(text: str, sizes: list[int], tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode(text, add_special_tokens=False)
    whole, _, processor = run(tokenizer, ids, sizes=sizes)
    assert (whole.text, whole.token_ids) == (tokenizer.decode(ids), ids)
    assert (whole.finish_reason, processor.num_output_tokens) == ("length", len(ids))


@settings(max_examples=300, deadline=None)
@given(
    text=st.text(alphabet="the quick\n🙂", min_size=1, max_size=40),
    stop=st.lists(st.text(alphabet="the q\n🙂", min_size=1, max_size=3), min_size=1, max_size=3),
    sizes=sizes,
    min_tokens=st.integers(0, 6),
    include=st.booleans(),
)
def test_any_cutting_stops_at_the_same_place(
    text: str, stop: list[str], sizes: list[int], min_tokens: int, include: bool, tokenizer: Tokenizer
) -> None:
    ids = tokenizer.encode(text, add_special_tokens=False)
    params = {"stop": stop, "min_tokens": min_tokens, "include_stop_str_in_output": include, "logprobs": 1}
    one, _, single = run(tokenizer, ids, **params)
    many, deltas, multi = run(tokenizer, ids, sizes=sizes, **params)
    assert one == many
    assert single.num_output_tokens == multi.num_output_tokens == len(one.token_ids) == len(one.logprobs or [])
    if one.finish_reason == "stop":
        # The stop token is the first whose text completes a stop string.
        assert one.stop_reason in stop
        assert len(one.token_ids) > min_tokens
        before = tokenizer.decode(ids[: len(one.token_ids)])
        assert before.startswith(one.text)
        assert str(one.stop_reason) in before
        assert deltas[-1].must_abort or len(one.token_ids) > len(ids) - max(sizes)
    else:
        assert one.text == tokenizer.decode(ids)


def test_a_stop_string_truncates_everything(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("The quick brown fox jumps over", add_special_tokens=False)
    whole, deltas, processor = run(tokenizer, ids, sizes=[100], stop="fox", logprobs=1)
    assert whole.text == "The quick brown "
    assert (whole.finish_reason, whole.stop_reason) == ("stop", "fox")
    assert tokenizer.decode(whole.token_ids).rstrip().endswith("fox")
    assert len(whole.token_ids) < len(ids)
    assert len(whole.logprobs or []) == len(whole.token_ids) == processor.num_output_tokens
    assert whole.cumulative_logprob == -float(sum(whole.token_ids))
    assert not deltas[0].must_abort, "the engine has ended by itself"


def test_the_engine_is_told_to_abort(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("one fox two", add_special_tokens=False)
    _, deltas, processor = run(tokenizer, ids, stop="fox")
    assert [delta.must_abort for delta in deltas] == [False] * (len(deltas) - 1) + [True]
    late = processor.process(EngineOutput("r", [5, 6], "length"))
    assert (late.text, late.token_ids, late.finish_reason) == ("", [], None)


def test_stop_tokens_have_no_text_but_count(tokenizer: Tokenizer) -> None:
    word, stop = tokenizer.encode("The fox", add_special_tokens=False)[:2]
    whole, _, processor = run(tokenizer, [word, stop], "stop", logprobs=1)
    assert (whole.text, whole.token_ids, processor.num_output_tokens) == (tokenizer.decode([word]), [word, stop], 2)
    assert len(whole.logprobs or []) == 2
    shown, _, _ = run(tokenizer, [word, stop], "stop", include_stop_str_in_output=True)
    assert shown.text == tokenizer.decode([word, stop])
    limit, _, _ = run(tokenizer, [word, stop], "length")
    assert limit.text == shown.text


def test_the_end_of_sequence_is_no_stop_reason(tokenizer: Tokenizer) -> None:
    # A chat model's end of turn may reach the engine as a stop token.
    eos = tokenizer.eos_token_id
    assert eos is not None
    for ignore, expected in ((False, None), (True, eos)):
        processor = OutputProcessor(tokenizer, SamplingParams(ignore_eos=ignore))
        delta = processor.process(EngineOutput("r", [40, eos], "stop", stop_reason=eos))
        assert (delta.finish_reason, delta.stop_reason) == ("stop", expected)
    other = OutputProcessor(tokenizer, SamplingParams()).process(EngineOutput("r", [40], "stop", stop_reason=40))
    assert other.stop_reason == 40


def test_a_stop_string_before_min_tokens_does_not_count(tokenizer: Tokenizer) -> None:
    ids = [i for _ in range(3) for i in tokenizer.encode(" fox", add_special_tokens=False)]
    per_word = len(ids) // 3
    whole, _, _ = run(tokenizer, ids, stop="fox", min_tokens=per_word)
    assert whole.text == " fox "
    assert run(tokenizer, ids, stop="fox", min_tokens=len(ids))[0].text == " fox fox fox"


def test_held_text_is_released_at_the_end(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("a fo", add_special_tokens=False)
    whole, deltas, _ = run(tokenizer, ids, stop="fox")
    assert whole.text == "a fo"
    assert (whole.finish_reason, whole.stop_reason) == ("length", None)
    assert "".join(delta.text for delta in deltas[:-1]) != "a fo"


def test_special_tokens_are_shown_on_request(tokenizer: Tokenizer) -> None:
    ids = [*tokenizer.encode("hi", add_special_tokens=False), tokenizer.token_to_id("<|pad token|>") or 0]
    assert run(tokenizer, ids)[0].text == "hi"
    assert run(tokenizer, ids, skip_special_tokens=False)[0].text == "hi<|pad token|>"


def test_offsets_follow_the_text(tokenizer: Tokenizer) -> None:
    text = "Grüße 🙈, the fox"
    ids = tokenizer.encode(text, add_special_tokens=False)
    _, deltas, _ = run(tokenizer, ids, sizes=[3], logprobs=1)
    offsets = [offset for delta in deltas for offset in delta.text_offsets or []]
    assert len(offsets) == len(ids)
    for i, offset in enumerate(offsets):
        assert tokenizer.decode(ids[:i]).rstrip("\ufffd") == text[:offset]


def test_errors_and_counts_pass_through(tokenizer: Tokenizer) -> None:
    processor = OutputProcessor(tokenizer, SamplingParams())
    scored = [None, TokenLogprobs([1], [-1.0], [1])]
    delta = processor.process(EngineOutput("r", [], None, num_cached_tokens=32, prompt_logprobs=scored))
    assert (delta.prompt_logprobs, processor.num_cached_tokens) == (scored, 32)
    delta = processor.process(EngineOutput("r", [], "error", error="the grammar broke"))
    assert (delta.finish_reason, delta.output.error) == ("error", "the grammar broke")
    assert processor.finished
