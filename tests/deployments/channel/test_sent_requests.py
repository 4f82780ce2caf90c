"""Requests and refusals come out of msgpack as they went in; what has no such form is told."""

from __future__ import annotations

import dataclasses
from typing import Any

import msgspec
import pytest

from app.deployments.channel import sent_requests
from app.deployments.channel.sent_requests import (
    decode_refusals,
    decode_requests,
    encode_refusals,
    encode_requests,
)
from app.deployments.channel.wire import PixelsGoneError, SecludedError
from app.errors import (
    EngineAsleepError,
    EngineDeadError,
    InvalidRequestError,
    MantaError,
    OverloadedError,
    PromptTooLongError,
    ServerOverloadedError,
)
from app.records.adapter import AdapterAsk
from app.records.alignment_ask import AlignmentAsk
from app.records.bad_words import BadWords
from app.records.bundle import Bundle
from app.records.encoder_input import EncoderInput
from app.records.late_interaction import ExpandedQuery
from app.records.media import MediaAsk
from app.records.message_borders import MessageBorders
from app.records.pooling_params import PoolingParams
from app.records.repetition_detection import RepetitionDetection
from app.records.request import Deadline, EngineRequest, Placement, ServiceClass
from app.records.sampling_params import SamplingParams
from app.records.thinking_budget import ThinkingBudget
from app.structured.reasoning import ReasoningSpan
from app.structured.structured_outputs import StructuredOutputs

PROMPT = [5, 0, 127, 128, 65_536, (1 << 31) - 1]
PLACEMENT = Placement(-3, b"\0root", "s", "tenant", ServiceClass("batch", 0.25), 2, Deadline(1.5, True))
ASKS = (
    AdapterAsk("adapter", b"\xff" * 16),
    AlignmentAsk(2, 5),
    BadWords(((1, 2), (3,))),
    Bundle((2, 4), (None, 1)),
    ExpandedQuery(3),
    MessageBorders((1, 4)),
    ReasoningSpan((7,), None),
    ThinkingBudget(9, (), (1, 2)),
)
WORKS = [
    SamplingParams(),
    SamplingParams(
        temperature=0.1,
        top_p=1 / 3,
        logit_bias={7: -0.5, 9: 100.0},
        allowed_token_ids=(1, 2),
        bad_words=("a",),
        seed=-(1 << 63),
        stop=("b", "\ud7ff"),
        stop_token_ids=(4,),
        repetition_detection=RepetitionDetection(max_pattern_size=4, min_count=3),
    ),
    SamplingParams(
        structured_outputs=StructuredOutputs(json={"type": "object", "properties": {"a": {"enum": [1, None]}}})
    ),
    SamplingParams(structured_outputs=StructuredOutputs(choice=("x", "y"))),
    PoolingParams(task="token_embed", dimensions=4, use_activation=False),
]


def there_and_back(*requests: EngineRequest) -> list[EngineRequest]:
    data = encode_requests([(str(number), one) for number, one in enumerate(requests)])
    assert data is not None
    read = decode_requests(data)
    assert [stream_id for stream_id, _ in read] == [str(number) for number in range(len(requests))]
    return [one for _, one in read]


@pytest.mark.parametrize("work", WORKS, ids=lambda work: type(work).__name__)
def test_a_request_comes_as_it_went(work: Any) -> None:
    sent = EngineRequest("id", PROMPT, work, 3, PLACEMENT, 1.7e9 + 1 / 3, ASKS, [1, 2], b"mark")
    (read,) = there_and_back(sent)
    for field in dataclasses.fields(EngineRequest):
        assert getattr(read, field.name) == getattr(sent, field.name), field.name
        assert type(getattr(read, field.name)) is type(getattr(sent, field.name)), field.name
    assert [type(ask) for ask in read.asks] == [type(ask) for ask in sent.asks]
    assert read.work.model_fields_set == sent.work.model_fields_set


def test_every_field_of_a_request_was_set_in_these_tests() -> None:
    sent = EngineRequest("id", PROMPT, WORKS[1], 3, PLACEMENT, 1.0, ASKS, [1, 2], b"mark")
    usual = EngineRequest("", [], SamplingParams())
    for field in dataclasses.fields(EngineRequest):
        assert getattr(sent, field.name) != getattr(usual, field.name), field.name
    assert {type(ask) for ask in ASKS} == set(sent_requests._ASKS)


def test_a_prompt_travels_once() -> None:
    prompt = list(range(1000, 3000))
    choices = [EngineRequest(f"r-{i}", prompt, SamplingParams(), i) for i in range(8)]
    one, all_of = encode_requests([("0", choices[0])]), encode_requests([(str(i), c) for i, c in enumerate(choices)])
    assert one is not None
    assert all_of is not None
    assert len(all_of) < 2 * len(one)
    read = there_and_back(*choices, EngineRequest("other", [1], SamplingParams()))
    assert all(request.prompt_token_ids is read[0].prompt_token_ids for request in read[:8])
    assert read[8].prompt_token_ids == [1]


def test_so_does_what_its_choices_share() -> None:
    schema = {"properties": {f"k{i}": {"enum": ["a", "b"]} for i in range(1000)}}
    work = SamplingParams(
        structured_outputs=StructuredOutputs(json=schema), allowed_token_ids=tuple(range(5000)), n=128
    )
    words, prompt = BadWords(tuple((i, i + 1) for i in range(1000))), [1]
    choices = [EngineRequest(f"r-{i}", prompt, work, i, asks=(words, ThinkingBudget(i, (), (2,)))) for i in range(128)]
    one, all_of = encode_requests([("0", choices[0])]), encode_requests([(str(i), c) for i, c in enumerate(choices)])
    assert one is not None
    assert all_of is not None
    assert len(all_of) < 2 * len(one)
    read = there_and_back(*choices, EngineRequest("other", [1], SamplingParams(n=2)))
    assert all(request.work is read[0].work and request.asks[0] is read[0].asks[0] for request in read[:128])
    assert read[:128] == choices
    assert read[128].work == SamplingParams(n=2)


class OwnParams(SamplingParams):
    """Of a dialect."""


@pytest.mark.parametrize(
    "change",
    [
        {"asks": (MediaAsk(()),)},
        {"asks": (EncoderInput("audio", b"", 1, (1,), b""),)},
        {"asks": ("a plug-in's record",)},
        {"work": OwnParams()},
        {"prompt_token_ids": [object()]},
        {"prompt_token_ids": [1 << 64]},
        {"work": SamplingParams(structured_outputs=StructuredOutputs(json={"const": 1 << 70}))},
    ],
    ids=["picture", "sound", "plug-in", "subclass", "object", "large id", "large number"],
)
def test_what_has_no_form_is_told(change: dict[str, Any]) -> None:
    plain = EngineRequest("r", [1], SamplingParams())
    assert encode_requests([("0", plain)]) is not None
    assert encode_requests([("0", plain), ("1", dataclasses.replace(plain, **change))]) is None


def test_so_is_what_is_too_long(monkeypatch: pytest.MonkeyPatch) -> None:
    request = EngineRequest("r", [1] * 1000, SamplingParams())
    assert encode_requests([("0", request)]) is not None
    monkeypatch.setattr(sent_requests, "MAX_REQUESTS_BYTES", 1000)
    assert encode_requests([("0", request)]) is None


def test_what_cannot_be_read_is_told() -> None:
    request = EngineRequest("r", [1], SamplingParams(max_tokens=3), asks=(ExpandedQuery(1),))
    data = encode_requests([("0", request)])
    assert data is not None
    usual = [prompts, works, asks, (request_fields,)] = msgspec.msgpack.decode(data)
    assert decode_requests(msgspec.msgpack.encode(usual)) == [("0", request)]
    for changed in (
        [prompts, [[9, {"max_tokens": 3}]], asks, [request_fields]],
        [prompts, [[0, {"max_tokens": "many"}]], asks, [request_fields]],
        [prompts, [[0, {"no_such_field": 1}]], asks, [request_fields]],
        [prompts, works, [[99, {}]], [request_fields]],
        [prompts, works, [[4, {"num_seen": "x"}]], [request_fields]],
        [[], works, asks, [request_fields]],
        [prompts, [], asks, [request_fields]],
        [prompts, works, [], [request_fields]],
    ):
        with pytest.raises(ValueError, match="cannot be read"):
            decode_requests(msgspec.msgpack.encode(changed))
    with pytest.raises(ValueError, match="cannot be read"):
        decode_requests(b"\x80\x04N.")


@pytest.mark.parametrize(
    "work",
    [
        {"stop": [{"my words": 1}]},
        {"top_p": "my words"},
        {"logit_bias": {"my words": "my words"}},
        {"structured_outputs": {"my words": 1}},
    ],
    ids=["type", "number", "key", "unknown"],
)
def test_what_cannot_be_read_is_told_without_what_a_client_sent(work: dict[str, Any]) -> None:
    data = encode_requests([("0", EngineRequest("r", [1], SamplingParams()))])
    assert data is not None
    prompts, _, asks, requests = msgspec.msgpack.decode(data)
    with pytest.raises(ValueError, match="cannot be read") as told:
        decode_requests(msgspec.msgpack.encode([prompts, [[0, work]], asks, requests]))
    assert "words" not in str(told.value)
    assert next(iter(work)) in str(told.value)


class OwnError(PromptTooLongError):
    """One of a plug-in."""


@pytest.mark.parametrize(
    "error",
    [
        MantaError("why"),
        InvalidRequestError("why", param="prompt"),
        PromptTooLongError("too long", param="max_tokens"),
        OverloadedError("full", retry_after_s=2.5),
        ServerOverloadedError("full", retry_after_s=0.5),
        EngineDeadError("gone"),
        EngineAsleepError("asleep"),
        SecludedError("alone"),
        PixelsGoneError("gone"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_a_refusal_comes_as_it_went(error: MantaError) -> None:
    nothing, read, _ = decode_refusals(encode_refusals([None, error, None]))
    assert nothing is None
    assert type(read) is type(error)
    assert vars(read) == vars(error)
    assert str(read) == str(error)


def test_an_unknown_refusal_comes_as_the_nearest_known_one() -> None:
    (read,) = decode_refusals(encode_refusals([OwnError("too long", param="prompt")]))
    assert type(read) is PromptTooLongError
    assert read.param == "prompt"
