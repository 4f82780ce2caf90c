"""Prompts of many documents never have more tokens than their room, and hold each document once."""

from __future__ import annotations

from pathlib import Path

import pytest

from app.records.listwise import Listwise
from app.text.listwise_prompts import ListwiseAsk, listwise_prompts
from app.text.tokenizer import Tokenizer
from tests.tiny_encoders import texts
from tests.tiny_listwise import published


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
