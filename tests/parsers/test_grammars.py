"""The grammar of each format: llguidance accepts what the templates write, and nothing that breaks a schema."""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping
from typing import Any

import pytest
from llguidance import LLMatcher, LLTokenizer

from app.parser_tables import TOOL_PARSERS
from app.parsers.grammar import Lark, in_order
from tests.parsers.conftest import KINDS, TOOLS, Kind, parse, transcripts

OTHER_FORMS = {"mistral_args", "llama3_json-tagged", "pythonic-marked", "pythonic-lfm", "harmony-in_role"}
OTHER_FORMS |= {"mistral_args-numbered"}
OWN_FORMS = [kind for kind in KINDS if str(kind) not in OTHER_FORMS]


class Bytes:
    """A vocabulary of bytes, which any text is made of."""

    eos_token_id = 256
    bos_token_id = None
    tokens = [*(bytes([byte]) for byte in range(256)), b"<end>"]  # noqa: RUF012
    special_token_ids = (256,)
    is_tokenizer_wrapper = True

    def __call__(self, text: str | bytes) -> list[int]:
        return list(text.encode() if isinstance(text, str) else text)


@pytest.fixture(scope="module")
def vocabulary() -> LLTokenizer:
    return LLTokenizer(Bytes())  # type: ignore[arg-type]


def accepts(vocabulary: LLTokenizer, grammar: str, text: str) -> bool:
    matcher = LLMatcher(vocabulary, grammar, log_level=0)
    assert not matcher.get_error(), matcher.get_error()
    return all(matcher.consume_token(byte) for byte in text.encode()) and matcher.is_accepting()


def grammar(kind: Kind, required: bool, tools: Mapping[str, Any] = TOOLS, parallel: bool = True) -> str:
    form, lark = TOOL_PARSERS.load(kind.tools).call_grammar(()), Lark({})
    return lark.finish((form.required if required else form.allowed)(lark, tools, parallel))


def plain(text: str) -> str:
    """A transcript without what a model need not write: ids, Python's words for constants, the token that ends it."""
    for old, new in ((', "id": "abcDEF123"', ""), ("None", "null"), ("True", "true"), ("<|call|>", "")):
        text = text.replace(old, new)
    return text.strip("\n")


@pytest.mark.parametrize("kind", OWN_FORMS, ids=str)
def test_required_calls(kind: Kind, vocabulary: LLTokenizer) -> None:
    required, single = grammar(kind, True), grammar(kind, True, parallel=False)
    num_calls = 0
    for transcript in transcripts(kind):
        if transcript.content or (transcript.reasoning and kind.tools != "harmony"):
            continue
        text = plain(transcript.text)
        if not transcript.calls or (kind.tools == "harmony" and len(transcript.calls) > 1):
            continue  # the latter: one call an answer
        num_calls += len(transcript.calls)
        assert accepts(vocabulary, required, text), text
        assert accepts(vocabulary, single, text) == (len(transcript.calls) == 1)
    assert num_calls >= 4
    assert not accepts(vocabulary, required, "")
    assert not accepts(vocabulary, required, "Hello.")


@pytest.mark.parametrize("kind", OWN_FORMS, ids=str)
def test_arguments_follow_the_schema(kind: Kind, vocabulary: LLTokenizer) -> None:
    tools = {"get_weather": {**TOOLS["get_weather"], "additionalProperties": False}}
    required = grammar(kind, True, tools)
    good = next(t.text for t in transcripts(kind) if t.calls[:1] and t.calls[0][1].get("days") == 3 and not t.content)
    good = plain(good)
    assert accepts(vocabulary, required, good)
    for old, new in (("3", '"3"'), ("true", "1"), ("get_weather", "get_whether"), ("days", "weeks"), ("city", "town")):
        assert old in good
        assert not accepts(vocabulary, required, good.replace(old, new, 1)), new


@pytest.mark.parametrize("kind", [kind for kind in OWN_FORMS if kind.tools != "harmony"], ids=str)
def test_calls_in_free_text(kind: Kind, vocabulary: LLTokenizer) -> None:
    allowed = grammar(kind, False)
    for transcript in transcripts(kind):
        if not transcript.reasoning:
            text = plain(transcript.text)
            assert accepts(vocabulary, allowed, text), text
    wrong = next(t.text for t in transcripts(kind) if t.calls and t.calls[0][1].get("days") == 3)
    assert not accepts(vocabulary, allowed, wrong.replace("3", '"3"'))


def test_markers_that_are_tokens_go_by_their_ids() -> None:
    form, lark = TOOL_PARSERS.load("hermes").call_grammar(()), Lark({"<tool_call>": 7, "</tool_call>": 8})
    text = lark.finish(form.required(lark, {"now": TOOLS["now"]}, False))
    assert '<[7]> "\\n{\\"name\\": \\"now\\"' in text
    assert '"}\\n"' in text.replace('"}\\n" <[8]>', '"}\\n"')
    newer = TOOL_PARSERS.load("mistral").call_grammar({"[ARGS]": 9})
    assert newer.before == "[TOOL_CALLS]{name}[ARGS]"


def test_the_form_of_python_calls_follows_the_vocabulary(vocabulary: LLTokenizer) -> None:
    """With markers of their own the calls may stand anywhere; without, only at the beginning."""
    tools, call = {"now": {"type": "object", "properties": {"n": {"type": "integer"}}}}, "[now(n=1), now()]"
    for special, text, other in (
        ((), call, f"<|tool_call_start|>{call}<|tool_call_end|>"),
        (("<|tool_call_start|>",), f"<|tool_call_start|>{call}<|tool_call_end|>", call),
    ):
        form = TOOL_PARSERS.load("pythonic").call_grammar(special)
        lark = Lark({})
        required = lark.finish(form.required(lark, tools, True))
        assert accepts(vocabulary, required, text)
        assert not accepts(vocabulary, required, other)
        lark = Lark({})
        allowed = lark.finish(form.allowed(lark, tools, True))
        assert accepts(vocabulary, allowed, f"Words. {text}")
        assert accepts(vocabulary, allowed, text)
        assert not accepts(vocabulary, allowed, text.replace("1", "x"))
        assert accepts(vocabulary, allowed, f"Words. {text}".replace("1", "x")) == (not special)


@pytest.mark.parametrize("separator", ["", '", "'])
@pytest.mark.parametrize("needed", list(itertools.product([False, True], repeat=3)), ids=str)
def test_optional_parts_in_order(vocabulary: LLTokenizer, needed: tuple[bool, ...], separator: str) -> None:
    """Every subset of a, b, c that holds the required ones, in order, and no other text."""
    expression = in_order([(f'"{name}"', must) for name, must in zip("abc", needed, strict=True)], separator)
    text = f'%llguidance {{}}\nstart: "<" {expression} ">"'
    glue = separator.strip('"')
    for present in itertools.product([False, True], repeat=3):
        names = [name for name, is_there in zip("abc", present, strict=True) if is_there]
        is_whole = all(is_there or not must for must, is_there in zip(needed, present, strict=True))
        assert accepts(vocabulary, text, f"<{glue.join(names)}>") == is_whole, names
    assert not accepts(vocabulary, text, f"<b{glue}a>")


def test_what_the_grammar_allows_the_parser_reads(vocabulary: LLTokenizer) -> None:
    """Texts drawn at random from each grammar parse to calls whose arguments are JSON objects."""
    import random

    import numpy as np

    tools = {
        "now": {
            "type": "object",
            "properties": {
                "s": {"type": "string", "maxLength": 4},
                "k": {"enum": ["x", "y"]},
                "b": {"type": "boolean"},
            },
            "required": ["k", "b"],
            "additionalProperties": False,
        }
    }
    for kind in OWN_FORMS:
        text = grammar(kind, True, tools, parallel=False)
        for seed in range(5):
            rng, matcher, out = random.Random(seed), LLMatcher(vocabulary, text, log_level=0), bytearray()
            mask = np.zeros((257 + 31) // 32, np.int32)
            while not matcher.is_stopped() and len(out) < 600:
                matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
                bits = np.unpackbits(mask.view(np.uint8), bitorder="little")
                options = [int(i) for i in np.flatnonzero(bits[:257])]
                plain = [i for i in options if i == 256 or 32 <= i < 127 or i == 10]
                token = 256 if 256 in options else rng.choice(plain or options)
                assert matcher.consume_token(token)
                out += bytes([token]) if token < 256 else b""
            if matcher.is_accepting() or matcher.is_stopped():
                answer = parse(kind, [out.decode("utf-8", "replace")])
                assert [call.name for call in answer.calls] == ["now"], out
                arguments = json.loads(answer.calls[0].arguments)
                assert {"k", "b"} <= set(arguments), out
                assert arguments["k"] in ("x", "y")
