"""Structured outputs through the whole engine: valid at temperature 1, whatever happens around them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from llguidance import LLExecutor

from app.checkpoints.model_info import ModelInfo
from app.errors import InvalidRequestError
from app.offline.llm import LLM
from app.records.sampling_params import SamplingParams, StructuredOutputs
from app.structured import masks
from tests.structured.grammars import MAX_TOKENS, all_grammars
from tests.tiny_models import tiny_model

GRAMMARS = all_grammars()
OPTIONS: dict[str, Any] = {"num_threads": 1, "block_size": 8}
TOKENIZER = str(ModelInfo.from_directory("tiny-chat").directory)


def random_model(**options: Any) -> LLM:
    """Random weights, and more embeddings than the tokenizer has tokens."""
    model = tiny_model(vocab_size=1100, eos_token_id=2, max_position_embeddings=1024)
    return LLM(str(model), tokenizer=TOKENIZER, **{**OPTIONS, **options})


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with random_model(num_blocks=2000, max_num_seqs=64) as llm:
        yield llm


def params(spec: StructuredOutputs | None, seed: int, **changes: Any) -> SamplingParams:
    return SamplingParams(
        **{"temperature": 1.0, "max_tokens": MAX_TOKENS, "seed": seed, "structured_outputs": spec, **changes}
    )


def check(llm: LLM, names: list[str], count: int) -> None:
    wanted = [(name, seed) for name in names for seed in range(count)]
    answers = llm.generate(
        ["Answer: "] * len(wanted), [params(GRAMMARS[name][0], seed) for name, seed in wanted], use_tqdm=False
    )
    wrong = []
    for (name, seed), answer in zip(wanted, answers, strict=True):
        output = answer.outputs[0]
        if output.finish_reason != "stop" or not GRAMMARS[name][1](output.text):
            wrong.append((name, seed, output.finish_reason, output.text[:200]))
    assert not wrong, f"{len(wrong)} of {len(wanted)}: {wrong[:5]}"


def test_every_grammar_once(llm: LLM) -> None:
    check(llm, list(GRAMMARS), 1)


@pytest.mark.slow
@pytest.mark.parametrize("model", ["random", "tiny-chat"])
def test_every_grammar_a_hundred_times(model: str) -> None:
    options = {"num_blocks": 8000, "max_num_seqs": 128, "num_threads": 2}
    with random_model(**options) if model == "random" else LLM(model, **options) as llm:
        for name in GRAMMARS:
            check(llm, [name], 100)


def mixed_prompts() -> list[SamplingParams]:
    names = ["json-flat", "json-array-of-objects", "regex-words", "choice-4", "grammar-sql"]
    found = [params(GRAMMARS[name][0], seed) for seed, name in enumerate(names * 2)]
    return found + [params(None, seed, max_tokens=120, ignore_eos=True) for seed in range(4)]


def run(**options: Any) -> tuple[list[list[int]], int]:
    with random_model(**options) as llm:
        answers = llm.generate(["Answer: "] * len(mixed_prompts()), mixed_prompts(), use_tqdm=False)
        return [answer.outputs[0].token_ids for answer in answers], llm.stats().figures["preemptions"]


def test_same_tokens_sync_async_alone_and_preempted(llm: LLM) -> None:
    """I6 with grammars: two steps in flight, synchronous steps, and a cache too small for everybody."""
    overlapped = [a.outputs[0].token_ids for a in llm.generate(["Answer: "] * 14, mixed_prompts(), use_tqdm=False)]
    alone = [llm.generate("Answer: ", one, use_tqdm=False)[0].outputs[0].token_ids for one in mixed_prompts()[:3]]
    assert alone == overlapped[:3]
    synchronous, _ = run(max_inflight_steps=1, num_blocks=2000)
    assert synchronous == overlapped
    squeezed, preemptions = run(num_blocks=60, max_num_seqs=14)
    assert preemptions > 0
    assert squeezed == overlapped


def test_text_that_is_a_token_of_its_own(llm: LLM) -> None:
    """Added tokens are text, special ones are not, but what they look like can be written in other tokens."""
    marker = llm.tokenizer.token_to_id("<tool_call>")
    for text, inside in (("<tool_call>\n{}", True), ("<|im_end|> is no end", False)):
        output = llm.generate("Answer: ", params(StructuredOutputs(choice=(text,)), 1), use_tqdm=False)[0].outputs[0]
        assert (output.text, output.finish_reason) == (text, "stop")
        assert (marker in output.token_ids) == inside
        assert llm.tokenizer.special_token_ids.isdisjoint(output.token_ids)


def test_masks_side_by_side_equal_masks_one_by_one(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    names = ["json-flat", "json-date-uuid", "regex-words", "choice-2", "grammar-sql", "json-enum"] * 3
    wanted = [params(GRAMMARS[name][0], seed) for seed, name in enumerate(names)]
    one_by_one = [a.outputs[0].token_ids for a in llm.generate(["Answer: "] * len(names), wanted, use_tqdm=False)]
    executor = LLExecutor(num_threads=2)
    monkeypatch.setattr(masks, "_executor", lambda: executor)
    side_by_side = [a.outputs[0].token_ids for a in llm.generate(["Answer: "] * len(names), wanted, use_tqdm=False)]
    assert side_by_side == one_by_one


def test_choices_of_one_prompt_differ(llm: LLM) -> None:
    spec = GRAMMARS["choice-4"][0]
    outputs = llm.generate("Answer: ", params(spec, 5, n=8), use_tqdm=False)[0].outputs
    assert len({output.text for output in outputs}) > 3
    assert all(output.text in spec.choice for output in outputs if spec.choice)


def test_penalties_bias_and_bad_words_stay_within_the_grammar(llm: LLM) -> None:
    spec, judge = GRAMMARS["regex-number"]
    hard = params(spec, 1, presence_penalty=2.0, repetition_penalty=5.0, logit_bias={2: 100.0, 5: 100.0}, top_p=0.3)
    assert judge(llm.generate("Answer: ", hard, use_tqdm=False)[0].outputs[0].text)
    without = params(StructuredOutputs(choice=("~~", "no")), 1, bad_words=("~", "~~"))
    assert llm.generate("Answer: ", without, use_tqdm=False)[0].outputs[0].text == "no"


def test_a_request_that_cannot_go_on_fails_alone(llm: LLM) -> None:
    """Nothing is left where bad words forbid all that the grammar allows; others go on (I7)."""
    stuck = params(StructuredOutputs(regex="~{9}"), 1, bad_words=tuple("~" * count for count in range(1, 10)))
    fine = params(GRAMMARS["json-flat"][0], 3)
    first, second = llm.generate(["Answer: "] * 2, [stuck, fine], use_tqdm=False)
    assert first.outputs[0].finish_reason == "error"
    assert GRAMMARS["json-flat"][1](second.outputs[0].text)


def test_an_end_that_the_grammar_did_not_allow_is_an_error() -> None:
    """tiny-chat's token 0 ends an answer, and is what is chosen where every logit is -inf."""
    with LLM("tiny-chat", num_blocks=200, **{**OPTIONS, "block_size": 16}) as llm:
        stuck = params(StructuredOutputs(choice=("~~",)), 1, bad_words=("~", "~~"))
        costly = params(StructuredOutputs(regex="(a|b|ab){1,5000}{1,5000}c"), 1, max_tokens=300)
        ends = params(StructuredOutputs(regex="a+"), 1, logit_bias={2: 100.0})
        cut = params(StructuredOutputs(regex="a{9}"), 1, max_tokens=1)
        answers = llm.generate(["x"] * 4, [stuck, costly, ends, cut], use_tqdm=False)
    assert [answer.outputs[0].finish_reason for answer in answers] == ["error", "error", "stop", "length"]


def test_the_unconstrained_keep_two_steps_in_flight(llm: LLM) -> None:
    """I2: a constrained request waits for its token, its neighbours do not."""
    core = llm._core
    seen = []
    schedule = core.scheduler.schedule

    def watched() -> Any:
        in_flight = core.scheduler.num_unreturned
        step_message = schedule()
        if step_message is not None and in_flight:
            rows = core.scheduler.rows
            seen.append((len(step_message.rows), bool(rows.has_grammar[step_message.rows].any())))
        return step_message

    core.scheduler.schedule = watched  # type: ignore[method-assign]
    try:
        spec = GRAMMARS["json-nested"][0]
        llm.generate(
            ["Answer: "] * 2, [params(spec, 1), params(None, 2, max_tokens=80, ignore_eos=True)], use_tqdm=False
        )
    finally:
        core.scheduler.schedule = schedule  # type: ignore[method-assign]
    assert (1, False) in seen  # the free one alone, while the other's token is on its way


def test_refused_before_anything_runs(llm: LLM) -> None:
    with pytest.raises(InvalidRequestError, match=r"prompts\[1\]: structured_outputs.json: .*not") as raised:
        llm.generate(["a", "b"], [params(None, 1), params(StructuredOutputs(json={"not": {}}), 1)], use_tqdm=False)
    assert raised.value.param == "structured_outputs.json"
