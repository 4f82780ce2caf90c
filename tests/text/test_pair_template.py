"""Pairs within a template: the checkpoint's, Qwen3-Reranker's, or none; a template is never cut."""

from __future__ import annotations

from typing import Any

import pytest

from app.errors import InvalidRequestError, UnsupportedError
from app.records.pooling_info import PoolingInfo
from app.records.task_prompts import TaskPrompts
from app.records.verdict import Verdict
from app.text.chat_template import ChatTemplate
from app.text.pair_template import PairTemplate
from app.text.pooling_prompt import templated_prompts
from app.text.tokenizer import Tokenizer
from tests.tiny_encoders import tiny_encoder

ROLES = "{% for m in messages %}[{{ m.role }}] {{ m.content }} {% endfor %}{{ '=' if add_generation_prompt }}"
ORDINARY = "{% for m in messages %}{% if m.role == 'user' %}{{ m.content }}{% endif %}{% endfor %}"
REFUSES = "{{ raise_exception('only user and assistant') }}"


def info(**more: Any) -> PoolingInfo:
    own = {"is_causal": True, "tasks": ("classify",), "labels": ("LABEL_0",), "verdict": Verdict(1, 2)}
    return PoolingInfo("last", **{**own, **more})


def template(source: str) -> ChatTemplate:
    return ChatTemplate({"default": source} if source else {}, {})


def test_the_checkpoints_own() -> None:
    found = PairTemplate.of(template(ROLES), info())
    assert found == PairTemplate("[query] ", " [document] ", " =")
    asked = PairTemplate.of(template(ROLES), info(prompts=TaskPrompts((("boats", "Find boats"),), "boats")))
    assert asked == PairTemplate("[system] Find boats [query] ", " [document] ", " =")


@pytest.mark.parametrize("source", ["", ORDINARY, REFUSES])
def test_qwen3s_where_the_checkpoint_has_none(source: str) -> None:
    assert PairTemplate.of(template(source), info()) is None
    found = PairTemplate.of(template(source), info(verdict=Verdict(1, 2, asked="qwen3")))
    assert found is not None
    assert found.head.endswith("<Query>: ")
    assert found.tail.endswith("<think>\n\n</think>\n\n")
    assert found.holds(found.text("a", "b"))
    assert not found.holds("a")


def test_an_instruction_takes_the_usual_ones_place() -> None:
    own = PairTemplate.of(template(ROLES), info())
    assert own is not None
    assert own.instructed("Find {{ boats }}").head == "[system] Find {{ boats }} [query] "
    qwen3 = PairTemplate.of(template(""), info(verdict=Verdict(1, 2, asked="qwen3")))
    assert qwen3 is not None
    usual = "Given a web search query, retrieve relevant passages that answer the query"
    assert qwen3.instructed(usual) == qwen3
    assert "<Instruct>: Find boats\n<Query>: " in qwen3.instructed("Find boats").head
    deaf = PairTemplate.of(template(ROLES.replace("in messages", "in messages[-2:]")), info())
    assert deaf is not None
    with pytest.raises(UnsupportedError, match="takes no instruction"):
        deaf.instructed("Find boats")


@pytest.mark.parametrize("more", [{"is_causal": False}, {"labels": ("A", "B")}, {"labels": ()}])
def test_models_that_are_asked_otherwise(more: dict[str, Any]) -> None:
    assert PairTemplate.of(template(ROLES), info(**more)) is None


def test_texts_are_cut_within_the_template() -> None:
    tokenizer = Tokenizer.from_directory(tiny_encoder("qwen3"))
    frame = PairTemplate("the ", " boat ", " rain")
    pair = ("a quick brown fox", "lazy dog bank money loan water " * 5)
    (whole,) = templated_prompts(tokenizer, frame, [pair])
    assert tokenizer.decode(whole.token_ids).strip() == frame.text(*pair)
    for room in (len(whole.token_ids) - 1, 30, 20):
        (cut,) = templated_prompts(tokenizer, frame, [pair], room)
        text = tokenizer.decode(cut.token_ids).strip()
        assert len(cut.token_ids) <= room
        assert text.startswith("the a ")
        assert text.endswith(" rain")
        assert " boat " in text
    (short,) = templated_prompts(tokenizer, frame, [pair], max_last_tokens=4)
    assert tokenizer.decode(short.token_ids).strip().startswith("the a quick brown fox boat")
    assert len(short.token_ids) < len(whole.token_ids)
    with pytest.raises(InvalidRequestError, match="leaves no room"):
        templated_prompts(tokenizer, frame, [pair], frame.num_tokens(tokenizer) + 1)


def test_texts_that_bring_the_template_are_taken_as_they_are() -> None:
    tokenizer = Tokenizer.from_directory(tiny_encoder("qwen3"))
    frame = PairTemplate("the quick\nbrown ", " boat ", " rain")
    (found,) = templated_prompts(tokenizer, frame, [("the quick\nbrown fox ", "boat water rain")])
    assert tokenizer.decode(found.token_ids).split() == ["the", "quick", "brown", "fox", "boat", "water", "rain"]
