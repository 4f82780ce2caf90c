"""The judge finds what was done to a stream, and nothing where nothing was done."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import pytest

from loadtest.faults.answer import reader_of
from loadtest.faults.judge import Kind, judge
from loadtest.faults.mix import CHAT, MESSAGES, RESPONSES, Ask
from loadtest.faults.reply import Reply, send
from tests import limits

WORDS = ["Once", " upon", " a", " time", " there", " was"]
Events = list[dict[str, Any] | str]


def chat(words: list[str] = WORDS, size: int = 1) -> Events:
    """Chunks of `size` words each, names and times of their own."""
    entries = [{"token": word, "logprob": -0.5 - number / 8} for number, word in enumerate(words)]
    events: Events = []
    for i in range(0, len(words), size):
        choice: dict[str, Any] = {"index": 0, "delta": {"content": "".join(words[i : i + size])}, "finish_reason": None}
        events.append(
            {"id": f"chat-{id(events)}", "choices": [{**choice, "logprobs": {"content": entries[i : i + size]}}]}
        )
    events.append({"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]})
    usage = {"completion_tokens": len(words), "prompt_tokens_details": {"cached_tokens": size}}
    return [*events, {"choices": [], "usage": usage}, "[DONE]"]


def responses(words: list[str] = WORDS) -> Events:
    kind = "response.output_text.delta"
    deltas = [{"type": kind, "output_index": 0, "content_index": 0, "delta": word} for word in words]
    whole = {"type": "response.completed", "response": {"id": "r", "output": ["".join(words)]}}
    events = [{"type": "response.created"}, *deltas, whole]
    return [{**event, "sequence_number": number} for number, event in enumerate(events)]


def messages(words: list[str] = WORDS) -> Events:
    deltas = [{"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": w}} for w in words]
    start = {"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}}
    end = {"type": "message_delta", "delta": {"stop_reason": "end_turn"}, "usage": {"output_tokens": len(words)}}
    return [{"type": "message_start", "message": {}}, start, *deltas, end, {"type": "message_stop"}]


DIALECTS = {CHAT: chat, RESPONSES: responses, MESSAGES: messages}


def received(path: str, events: Events, breaks: bool = False, hangs: bool = False, status: int = 200) -> Reply:
    """The reply of a server that sends these events, then ends its answer, breaks the connection or falls silent."""

    class Stream(httpx.AsyncByteStream):
        async def __aiter__(self) -> Any:
            for event in events:
                yield f"data: {event if isinstance(event, str) else json.dumps(event)}\n\n".encode()
            if hangs:
                await asyncio.Event().wait()
            if breaks:
                raise httpx.RemoteProtocolError("peer closed connection without sending complete message body")

    transport = httpx.MockTransport(lambda request: httpx.Response(status, stream=Stream()))

    async def ask() -> Reply:
        reply = Reply(Ask("x", path, {"stream": True}))
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as http:
            await send(http, reply, limits.AT_ONCE_S if hangs else limits.patience_s())
        return reply

    return limits.run(ask())


def verdict(reply: Reply, golden: Reply) -> Kind:
    return judge(reply, golden.answer).kind


@pytest.mark.parametrize("path", DIALECTS)
def test_what_was_done_is_found(path: str) -> None:
    make = DIALECTS[path]
    golden = received(path, make())
    assert verdict(received(path, make()), golden) == "ok"
    for at in range(1, len(make())):
        assert verdict(received(path, make()[:at]), golden) == "cut"
        assert verdict(received(path, make()[:at], breaks=True), golden) == "lost"
    assert verdict(received(path, make()[:3], hangs=True), golden) == "hung"
    doubled, missing, wrong = WORDS[:3] + WORDS[2:], WORDS[:2] + WORDS[3:], [*WORDS[:2], " the", *WORDS[3:]]
    for words in (doubled, missing, wrong, WORDS[:-1], [*WORDS, " once"]):
        assert verdict(received(path, make(words)), golden) == "wrong"
    for words in (doubled, missing, wrong):  # although the answer is broken anyway
        assert verdict(received(path, make(words)[:6], breaks=True), golden) == "wrong"


def test_how_a_text_is_cut_into_chunks_does_not_matter() -> None:
    assert verdict(received(CHAT, chat(size=4)), received(CHAT, chat())) == "ok"


def test_errors_that_say_so_are_told_from_those_that_do_not() -> None:
    golden = received(CHAT, chat())
    event: Events = [*chat()[:3], {"error": {"message": "the replica is gone"}}, "[DONE]"]
    assert judge(received(CHAT, event), golden.answer).why == "the replica is gone"
    assert verdict(received(CHAT, event), golden) == "error"
    refusal = Reply(golden.ask, status=503, refusal='{"error": {"message": "later"}}')
    assert verdict(refusal, golden) == "error"
    assert (
        verdict(Reply(golden.ask, status=503, refusal="<html>503 Service Unavailable</html>"), golden) == "unreadable"
    )


@pytest.mark.parametrize(
    ("events", "why"),
    [
        ([*chat(), chat()[0]], "after [DONE]"),
        ([*chat()[:-1], chat()[-3], "[DONE]"], "finish_reason came twice"),
        ([*chat()[:-1], chat()[-2], "[DONE]"], "usage came twice"),
        ([*chat()[:2], {"nothing": "of a chat"}], "not an event"),
    ],
)
def test_events_that_the_dialect_does_not_allow(events: Events, why: str) -> None:
    found = judge(received(CHAT, events), received(CHAT, chat()).answer)
    assert (found.kind, why in found.why) == ("wrong", True), found


def test_a_number_of_an_event_that_comes_twice_or_never() -> None:
    golden, events = received(RESPONSES, responses()), responses()
    for broken in (events[:2] + events[1:], events[:2] + events[3:]):
        assert verdict(received(RESPONSES, broken), golden) == "wrong"


def test_logprobs_may_differ_by_rounding_only_and_not_at_all_where_they_are_exact() -> None:
    golden = received(CHAT, chat())
    for change, kind in ((1e-6, "ok"), (1e-2, "wrong")):
        events = chat()
        first: Any = events[0]
        first["choices"][0]["logprobs"]["content"][0]["logprob"] += change
        assert verdict(received(CHAT, events), golden) == kind
        assert judge(received(CHAT, events), golden.answer, is_exact=True).kind == "wrong"
    assert judge(received(CHAT, chat()), golden.answer, is_exact=True).kind == "ok"
    assert judge(received(CHAT, chat()[:3]), golden.answer, is_exact=True).kind == "cut"


def test_where_a_collected_body_differs() -> None:
    body = {"choices": [{"text": "a"}, {"text": "abc", "prompt_logprobs": [None, {"5": {"logprob": -1.5}}]}]}
    golden = received_body(body)
    for change, expected in (
        ({"text": "axc"}, "body.choices[1].text: at character 1 of 3: 'xc' for 'bc'"),
        ({"prompt_logprobs": [None, {"5": {"logprob": -1.7}}]}, "[1].5.logprob: -1.7 for -1.5"),
        ({"prompt_logprobs": None}, "body.choices[1].prompt_logprobs: null for [null,"),
    ):
        found = judge(received_body({"choices": [body["choices"][0], {**body["choices"][1], **change}]}), golden.answer)
        assert (found.kind, expected in found.why) == ("wrong", True), found


@pytest.mark.parametrize(("rank", "kind"), [(116, "ok"), (119, "wrong"), (1, "wrong")])
def test_ranks_of_unlikely_tokens_may_swap(rank: int, kind: Kind) -> None:
    """Seen in fp32 where a prompt is computed in other chunks: -13.611286 is the 115th, -13.611292 the 116th."""
    entries = [{"70": {"logprob": -13.611286, "rank": 115}}, {"70": {"logprob": -13.611292, "rank": rank}}]
    golden, reply = (received_body({"choices": [{"prompt_logprobs": [None, entry]}]}) for entry in entries)
    assert verdict(reply, golden) == kind


def received_body(body: dict[str, Any]) -> Reply:
    reply = Reply(Ask("x", CHAT, {}), status=200)
    reader_of(reply.ask).push(reply.answer, json.dumps(body))
    return reply
