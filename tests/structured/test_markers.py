"""Tokens that a user's grammar names or quotes: added ones are text, special ones are tokens."""

from __future__ import annotations

from typing import Any

import pytest
from llguidance import LLTokenizer

from app.checkpoints.model_info import ModelInfo
from app.errors import InvalidRequestError
from app.structured.grammar import compile_grammar
from app.structured.markers import literal, special_tokens, split_markers, with_token_ids
from app.structured.structured_outputs import StructuredOutputs
from app.text.grammar_vocabulary import TokenizerVocabulary
from app.text.tokenizer import Tokenizer

MODEL = ModelInfo.from_directory("tiny-chat")
TOKENIZER = Tokenizer.from_directory(MODEL.directory)
CALL = '<tool_call>\n{"name": "f"}\n</tool_call>'


@pytest.fixture(scope="module")
def vocabulary() -> LLTokenizer:
    return TokenizerVocabulary(MODEL.directory, MODEL.vocab_size, MODEL.eos_token_ids).load()


def tokens(text: str) -> list[int]:
    return TOKENIZER.encode(text, add_special_tokens=False)


def letters(text: str) -> list[int]:
    """The text without any token of more than a byte or so, as a model may write a marker too."""
    return [token for char in text for token in tokens(char)]


def allows(vocabulary: LLTokenizer, spec: StructuredOutputs, token_ids: list[int]) -> bool:
    matcher = compile_grammar(spec, vocabulary)
    return all(matcher.consume_token(token) for token in token_ids) and matcher.is_accepting()


def tagged(begin: str, end: str, trigger: str) -> StructuredOutputs:
    structures = [{"begin": begin, "schema": {"type": "object"}, "end": end}]
    return StructuredOutputs(structural_tag={"structures": structures, "triggers": [trigger]})


def form(**parts: Any) -> StructuredOutputs:
    return StructuredOutputs(structural_tag={"type": "structural_tag", "format": parts})


QUOTED = [
    StructuredOutputs(grammar='start: "<tool_call>\\n" call "\\n</tool_call>"\ncall: "{\\"name\\": \\"f\\"}"'),
    StructuredOutputs(grammar=r"start: /<tool_call>\n.*\n<\/tool_call>/"),
    StructuredOutputs(grammar='// <think> ::= x\nstart: "<TOOL_CALL>"i "\\n" call | "a ::= <think>"\ncall: /.*\\n.*/'),
    StructuredOutputs(grammar='start: "<tool_call>\\n" call "\\n</tool_call>"\ncall: %json {"type": "object"}'),
    StructuredOutputs(grammar='root ::= "<tool_call>\\n" call "\\n</tool_call>"\ncall ::= "{" [^\\n]* "}"'),
    tagged("<tool_call>\n", "\n</tool_call>", "<tool_call>"),
    tagged("<tool_call>\n", "\n</tool_call>", "<tool"),
    form(type="tag", begin="<tool_call>", content={"type": "any_text"}, end="</tool_call>"),
    form(type="const_string", value=CALL),
    form(type="regex", pattern="<tool_call>\n.*\n</tool_call>"),
]


@pytest.mark.parametrize("spec", QUOTED, ids=range(len(QUOTED)))
def test_quoted_markers_are_text_in_any_tokens(vocabulary: LLTokenizer, spec: StructuredOutputs) -> None:
    assert len(tokens(CALL)) < len(letters(CALL))
    assert allows(vocabulary, spec, tokens(CALL))
    assert allows(vocabulary, spec, letters(CALL))
    assert not allows(vocabulary, spec, letters("<tool_call>\n{"))


@pytest.mark.parametrize("name", ["<tool_call>", "<|im_start|>"])
@pytest.mark.parametrize("head", ["", "%llguidance {}\n"])
def test_a_name_without_quotes_is_a_token(vocabulary: LLTokenizer, name: str, head: str) -> None:
    spec = StructuredOutputs(grammar=f'{head}start: {name} "x"')
    assert allows(vocabulary, spec, tokens(name + "x"))
    assert not allows(vocabulary, spec, letters("<tool_call>x"))
    with pytest.raises(InvalidRequestError, match="unknown special token"):
        compile_grammar(StructuredOutputs(grammar=f'{head}start: <no_such> "x"'), vocabulary)
    with pytest.raises(InvalidRequestError, match="cannot be read"):  # GBNF has no names for tokens
        compile_grammar(StructuredOutputs(grammar=f'root ::= {name} "x"'), vocabulary)


def test_names_are_told_from_what_looks_like_them(vocabulary: LLTokenizer) -> None:
    marker = TOKENIZER.token_to_id("<tool_call>")
    for text in ('"<tool_call>"', '"\\"<tool_call>"', "/<tool_call>/", r"/\/<tool_call>/", "// <tool_call>", "<[5]>"):
        assert with_token_ids(text, vocabulary) == text
    assert with_token_ids('"<" <tool_call> ">"', vocabulary) == f'"<" <[{marker}]> ">"'
    hostile = "<[" * 50_000 + "<" * 50_000 + '"' * 50_001 + "/" * 50_001
    assert with_token_ids(hostile, vocabulary) == hostile


def test_special_tokens_in_structural_tags_are_tokens(vocabulary: LLTokenizer) -> None:
    """No text can hold them, so quoted as letters they would be what a model never writes."""
    mark = "<|im_start|>"
    spec = tagged(f"{mark}go", mark, mark)
    assert allows(vocabulary, spec, tokens(f'Hello {mark}go{{"a": 1}}{mark} and more'))
    assert allows(vocabulary, spec, tokens("Hello"))
    assert allows(vocabulary, spec, letters("it looks like ") + letters("<|im") + letters("_start|>"))
    assert not allows(vocabulary, spec, tokens(f"Hello {mark}stay"))
    assert not allows(vocabulary, spec, tokens(f'Hello {mark}go{{"a": 1}} and more'))
    inside = tagged(f"a{mark}go", "b", f"a{mark}")
    assert allows(vocabulary, inside, tokens(f'Hello a{mark}go{{"a": 1}}b and more'))
    odd = 'a/<b>[c] "d"-#&~\\\n é'
    inside = form(type="tag", begin="", content={"type": "any_text"}, end=f"{odd}{mark}")
    assert allows(vocabulary, inside, tokens(f"words {odd} {odd}{mark}"))
    assert not allows(vocabulary, inside, tokens(f"words {odd} {mark}"))
    text = form(type="tag", begin=mark, content={"type": "any_text"}, end=f"{mark}end")
    assert allows(vocabulary, text, tokens(f"{mark}any words{mark}end"))
    assert not allows(vocabulary, text, tokens(f"{mark}any words{mark}"))


def test_literals(vocabulary: LLTokenizer) -> None:
    assert special_tokens(vocabulary) == {"<|endoftext|>": 0, "<|im_start|>": 1} or 0 in MODEL.eos_token_ids
    assert "<|im_end|>" not in special_tokens(vocabulary)
    markers = {"[A]": 3, "[A][B]": 4}
    assert split_markers("x[A][B][A]y", markers) == ["x", "[A][B]", "[A]", "y"]
    assert literal('x"[A]', markers) == '"x\\"" <[3]>'
    assert literal("", markers) == literal("", {}) == '""'
