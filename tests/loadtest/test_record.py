"""Metrics of one answer, and the reader that fills its record, on made-up times."""

from __future__ import annotations

import json
from typing import Any

import pytest

from loadtest.answer import AnswerReader, BrokenAnswerError
from loadtest.record import AnswerRecord


def _chunk(content: str | None = None, finish_reason: str | None = None, **fields: Any) -> bytes:
    delta = {} if content is None else {"content": content}
    return json.dumps({"choices": [{"delta": delta, "finish_reason": finish_reason}], **fields}).encode()


def _read(events: list[bytes]) -> str:
    reader = AnswerReader(AnswerRecord("chat", 0.0), 0.0)
    for event in events:
        reader.push(event, 1.0)
    return reader.finish()


USAGE = {"prompt_tokens": 7, "completion_tokens": 5, "prompt_tokens_details": {"cached_tokens": 3}}


def test_times_of_an_answer() -> None:
    record = AnswerRecord("chat", begin=1000.0)
    reader = AnswerReader(record, begin=10.0)
    reader.push(_chunk(""), 10.1)  # the role chunk is not the first token
    reader.push(_chunk("a"), 10.5)
    reader.push(_chunk("b"), 10.75)
    reader.push(_chunk("c"), 11.5)
    reader.push(_chunk(finish_reason="stop"), 12.0)  # neither is the end a token
    reader.push(json.dumps({"choices": [], "usage": USAGE}).encode(), 12.0)
    reader.push(b"[DONE]", 12.0)
    assert reader.finish() == "abc"
    assert record.ttft_s == pytest.approx(0.5)
    assert record.gaps_s == pytest.approx([0.25, 0.75])
    assert record.e2e_s == pytest.approx(1.5)
    assert record.tpot_s == pytest.approx(1.0 / 4)  # by tokens, not by chunks
    assert record.chunk_times() == pytest.approx([1000.5, 1000.75, 1001.5])
    assert (record.num_prompt_tokens, record.num_cached_tokens, record.num_output_tokens) == (7, 3, 5)
    assert AnswerRecord.from_json(record.to_json()) == record


@pytest.mark.parametrize("field", ["reasoning_content", "reasoning", "tool_calls"])
def test_reasoning_and_calls_count_as_output(field: str) -> None:
    record = AnswerRecord("chat", 0.0)
    AnswerReader(record, 0.0).push(json.dumps({"choices": [{"delta": {field: "x"}}]}).encode(), 2.0)
    assert record.ttft_s == 2.0


def test_one_token_has_no_tpot() -> None:
    assert AnswerRecord("chat", 0.0, ttft_s=1.0, num_output_tokens=1).tpot_s is None
    assert AnswerRecord("chat", 0.0).e2e_s is None


@pytest.mark.parametrize(
    ("events", "message"),
    [
        ([_chunk("a")], "finish reason, usage, \\[DONE\\]"),
        ([_chunk("a", "stop"), b"[DONE]"], "without usage"),
        ([_chunk("a", "stop", usage=USAGE)], "without \\[DONE\\]"),
        ([_chunk("a", usage=USAGE), b"[DONE]"], "without finish reason"),
        ([b'{"error": {"message": "the engine died"}}'], "the engine died"),
        ([b"<html>"], "not a chunk \\(JSONDecodeError\\): <html>"),
        ([b'{"id": 1}'], "not a chunk \\(KeyError\\)"),
        ([b"[1]"], "not a chunk"),
    ],
)
def test_broken_streams(events: list[bytes], message: str) -> None:
    with pytest.raises(BrokenAnswerError, match=message):
        _read(events)
