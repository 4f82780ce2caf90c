"""Masks for draft tokens: those that a matcher gives token by token, for as many drafts as its grammar allows."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest
from llguidance import LLExecutor, LLTokenizer
from numpy.typing import NDArray

from app.checkpoints.model_info import ModelInfo
from app.structured import masks
from app.structured.grammar import compile_grammar
from app.structured.masks import fill_masks, mask_drafts
from app.structured.matcher import Matcher
from app.structured.reasoning import ReasoningSpan
from app.structured.structured_outputs import StructuredOutputs
from app.text.grammar_vocabulary import TokenizerVocabulary

SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "n": {"type": "integer"}},
    "required": ["name", "n"],
    "additionalProperties": False,
}
OBJECT = StructuredOutputs(json=SCHEMA)
TEXT = b'{"name": "abc", "n": 5}'
OUTSIDE = b"}"  # what no object begins with, and no value


@cache
def vocabulary() -> LLTokenizer:
    info = ModelInfo.from_directory("tiny-chat")
    return TokenizerVocabulary(info.directory, info.vocab_size, info.eos_token_ids).load()


def ids(text: bytes) -> list[int]:
    return list(vocabulary().tokenize_bytes(text))


def matcher(spec: StructuredOutputs = OBJECT, reasoning: ReasoningSpan | None = None) -> Matcher:
    return Matcher(compile_grammar(spec, vocabulary()), vocabulary(), reasoning)


def one_by_one(of: Matcher, tokens: list[int]) -> NDArray[np.int32]:
    found = [fill_masks([of])[0]]
    for token in tokens:
        of.accept(token)
        found.append(fill_masks([of])[0])
    return np.stack(found)


@pytest.mark.parametrize("num_threads", [0, 2])
def test_masks_of_drafts_are_those_of_the_tokens(monkeypatch: pytest.MonkeyPatch, num_threads: int) -> None:
    """Whatever else is in the batch, side by side or not; the matchers themselves stay where they are."""
    if num_threads:
        executor = LLExecutor(num_threads=num_threads)
        monkeypatch.setattr(masks, "_executor", lambda: executor)
        monkeypatch.setattr(masks, "MIN_PARALLEL", 1)
    tokens = ids(TEXT)
    matchers, drafts = [], []
    for start, length in ((0, 4), (3, 0), (5, 6), (1, len(tokens) - 1)):
        matchers.append(matcher())
        for token in tokens[:start]:
            matchers[-1].accept(token)
        drafts.append(tokens[start : start + length])
    found = mask_drafts(list(zip(matchers, drafts, strict=True)))
    for one, tokens_ahead, made in zip(matchers, drafts, found, strict=True):
        assert made is not None
        assert made.num_drafts == len(tokens_ahead)
        assert made.words is not None
        assert (made.words == one_by_one(one, tokens_ahead)).all()


def test_drafts_end_where_the_grammar_does() -> None:
    tokens = ids(TEXT)
    cut = matcher()
    found = mask_drafts([(cut, [*tokens[:3], *ids(OUTSIDE), *tokens[3:]])])[0]
    assert found is not None
    assert found.num_drafts == 3
    assert found.words is not None
    assert (found.words == one_by_one(cut, tokens[:3])).all()
    nothing = mask_drafts([(matcher(), [*ids(OUTSIDE), *tokens])])[0]
    assert nothing is not None
    assert nothing.num_drafts == 0


def test_drafts_end_where_reasoning_opens_or_closes() -> None:
    """Behind it other rules hold; before it, in the reasoning, nothing is masked."""
    end, text = ids(b"</think>"), ids(b"let me see")
    thinking = matcher(reasoning=ReasoningSpan(tuple(end)))
    inside = mask_drafts([(thinking, [*text, *end, *ids(TEXT)])])[0]
    assert inside is not None
    assert inside.words is None
    assert inside.num_drafts == len(text) + len(end) - 1
    opening = 7
    closed = matcher(reasoning=ReasoningSpan(tuple(end), opening))
    opened = mask_drafts([(closed, [opening, *text])])[0]
    assert opened is not None
    assert opened.words is not None
    assert opened.num_drafts == 0
    assert opened.words[0, 0] >> opening & 1
    at_once = mask_drafts([(closed, ids(TEXT)[:2])])[0]
    assert at_once is not None
    assert at_once.words is not None
    assert at_once.words[0, 0] >> opening & 1
    assert not at_once.words[1, 0] >> opening & 1
