"""What logprobs leave behind while an answer is being written."""

from __future__ import annotations

import gc
import json
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from app.api.openai.logprobs import chat_logprobs, prompt_logprobs, written_chat_logprobs
from app.checkpoints.model_info import ModelInfo
from app.records.step import TokenLogprobs
from app.text.tokenizer import Tokenizer

NUM_POSITIONS = 50
ENTRIES = [TokenLogprobs(list(range(50, 71)), [-float(i) for i in range(21)], [1, *range(1, 21)])] * NUM_POSITIONS


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    tokenizer = Tokenizer.from_directory(ModelInfo.from_directory("tiny-chat").directory)
    assert tokenizer.byte_table
    return tokenizer


@pytest.mark.parametrize("write", [written_chat_logprobs, prompt_logprobs])
def test_the_collector_has_nothing_to_walk(tokenizer: Tokenizer, write: Callable[..., Any]) -> None:
    """8,000 tokens of an answer left it 340,000 dicts and lists, and each of its rounds stopped all threads."""
    write(ENTRIES, tokenizer)
    gc.collect()
    before = len(gc.get_objects())
    written = write(ENTRIES, tokenizer)
    assert len(gc.get_objects()) - before < NUM_POSITIONS // 2
    assert len(written["content"] if isinstance(written, dict) else written) == NUM_POSITIONS


def test_written_is_what_a_stream_says(tokenizer: Tokenizer) -> None:
    written = msgspec.json.encode(written_chat_logprobs(ENTRIES, tokenizer))
    assert json.loads(written) == chat_logprobs(ENTRIES, tokenizer)
