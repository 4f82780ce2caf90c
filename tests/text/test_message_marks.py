"""Borders of messages in prompts, by the templates of families as they lie on the hub."""

from __future__ import annotations

from pathlib import Path

import pytest

from app.checkpoints.model_info import ASSETS
from app.text.chat_template import ChatTemplate
from app.text.message_marks import SHORTEST, message_borders, message_marks
from app.text.tokenizer import Tokenizer

PADDING = "word " * SHORTEST
CHAT = [
    {"role": "system", "content": f"Be brief. {PADDING}"},
    {"role": "user", "content": "What is 1+1?"},
    {"role": "assistant", "content": "Two."},
    {"role": "user", "content": "Are you sure?"},
]


def test_a_conversation_ends_its_head_and_its_last_messages_at_borders() -> None:
    tokenizer = Tokenizer.from_directory(ASSETS / "tiny-chat")
    template = ChatTemplate.from_directory(ASSETS / "tiny-chat", tokenizer)
    marks = message_marks(template, tokenizer)
    assert marks <= tokenizer.special_token_ids
    text = template.render(CHAT)
    token_ids = tokenizer.encode(text, add_special_tokens=False)
    borders = message_borders(token_ids, marks)
    assert borders is not None
    heads = [tokenizer.decode(token_ids[:border], skip_special_tokens=False) for border in borders.tokens]
    other = template.render([CHAT[0], {"role": "user", "content": "Another question"}])
    assert other.startswith(heads[0]), "the first is what conversations share"
    assert "1+1" not in heads[0]
    assert heads[0].rstrip().find("Be brief") > 0
    closed = template.render(CHAT, add_generation_prompt=False)
    assert heads[-1] == closed.rstrip("\n") or heads[-1] == closed, "the last is where the answer begins"
    assert list(borders.tokens) == sorted(set(borders.tokens))


@pytest.mark.parametrize("length", [0, SHORTEST - 1])
def test_short_prompts_have_none(length: int) -> None:
    assert message_borders([7] * length, frozenset([7])) is None


def test_a_prompt_of_marks_alone_is_bounded() -> None:
    borders = message_borders([7, 8] * 50_000, frozenset([7, 8]))
    assert borders is not None
    assert len(borders.tokens) <= 4


def test_a_template_that_opens_with_no_special_token_tells_nothing(tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_directory(ASSETS / "tiny-chat")
    for source in ("{{ messages[0].content }}", "{{ raise_exception('no') }}"):
        assert message_marks(ChatTemplate({"default": source}, {}), tokenizer) == frozenset()
    assert message_marks(ChatTemplate({}, {}), tokenizer) == frozenset()
