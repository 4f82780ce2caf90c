"""Prompts of many documents never have more tokens than their room, and hold each document once."""

from __future__ import annotations

from pathlib import Path

import pytest

from app.records.listwise import Listwise
from app.text.listwise_prompts import ListwiseAsk, listwise_prompts
from app.text.tokenizer import Tokenizer
from tests.tiny_encoders import texts
from tests.tiny_listwise import MARKS, published


@pytest.mark.parametrize(("room", "least"), [(700, 5), (1500, 2), (100_000, 1)])
def test_prompts_fit_their_room(tmp_path: Path, room: int, least: int) -> None:
    tokenizer = Tokenizer.from_directory(published(tmp_path))
    document, query = (tokenizer.token_to_id(mark) for mark in ("<|embed_token|>", "<|rerank_token|>"))
    assert document is not None
    assert query is not None
    ask = ListwiseAsk("which fox ?", texts(40, 10))
    prompts = listwise_prompts(tokenizer, Listwise(document, query), ask, room, "Find boats")
    assert len(prompts) >= least
    assert max(len(prompt.token_ids) for prompt in prompts) <= room
    assert sum(prompt.token_ids.count(document) for prompt in prompts) == 40
    assert all(prompt.token_ids.count(query) == 1 for prompt in prompts)
    together = "".join(tokenizer.decode(prompt.token_ids, skip_special_tokens=False) for prompt in prompts)
    at = [together.index(f"\n{text}<|embed_token|>") for text in ask.documents]
    assert at == sorted(at)


@pytest.mark.parametrize("inner", MARKS)
@pytest.mark.parametrize("outer", MARKS)
def test_what_is_left_of_marks_makes_no_mark(tmp_path: Path, outer: str, inner: str) -> None:
    tokenizer = Tokenizer.from_directory(published(tmp_path))
    document, query = (tokenizer.token_to_id(mark) for mark in MARKS)
    assert document is not None
    assert query is not None
    text = "fox " + outer[:8] + outer[:5] + inner + outer[5:] + outer[8:] + " boat"
    (prompt,) = listwise_prompts(tokenizer, Listwise(document, query), ListwiseAsk(text, [text, "sun"]), 2000, text)
    assert [token for token in prompt.token_ids if token in (document, query)] == [document, document, query]
