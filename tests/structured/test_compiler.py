"""Limits, the sandbox process and the cache. What compiles here is what the engine accepts."""

from __future__ import annotations

import gc
import json
import multiprocessing
import os
import threading
import weakref
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import numpy as np
import psutil
import pytest

from app import limited_process
from app.checkpoints.model_info import ModelInfo
from app.errors import InvalidRequestError, OverloadedError
from app.structured import compiler as compiler_module
from app.structured.compiler import GrammarCompiler
from app.structured.grammar import compile_grammar
from app.structured.limits import GrammarLimits
from app.structured.masks import MIN_PARALLEL, fill_masks
from app.structured.matcher import GrammarFailure, Matcher
from app.structured.reasoning import ReasoningSpan
from app.structured.structured_outputs import StructuredOutputs
from app.text.grammar_vocabulary import TokenizerVocabulary
from app.text.tokenizer import Tokenizer
from tests import limits

INFO = ModelInfo.from_directory("tiny-chat")
EOS = 2


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_directory(INFO.directory)


@pytest.fixture(scope="module")
def compiler() -> Iterator[GrammarCompiler]:
    source = TokenizerVocabulary(INFO.directory, INFO.vocab_size + 40, INFO.eos_token_ids)  # a padded embedding
    compiler = GrammarCompiler(
        source, GrammarLimits(timeout_s=limits.scaled_s(1.0), memory_bytes=64 << 20), cache_size=4
    )
    yield compiler
    compiler.close()


def allowed(matcher: Matcher) -> set[int]:
    words = np.zeros(matcher.num_words, np.int32)
    matcher.fill_mask(words)
    return set(np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little")).tolist())


def accepts(compiler: GrammarCompiler, tokenizer: Tokenizer, spec: StructuredOutputs, text: str) -> bool:
    """Whether the text as a whole is an answer: each token allowed by its mask, and an end after them."""
    matcher = compiler.matcher(spec)
    for token in tokenizer.encode(text, add_special_tokens=False):
        if matcher.is_complete or token not in allowed(matcher):
            return False
        matcher.accept(token)
    return matcher.is_complete or EOS in allowed(matcher)


TAG: dict[str, Any] = {
    "type": "structural_tag",
    "structures": [{"begin": "<f=a>", "schema": {"type": "integer"}, "end": "</f>"}],
    "triggers": ["<f="],
}
INTEGER = {"type": "json_schema", "json_schema": {"type": "integer"}}
TREE: dict[str, Any] = {
    "type": "structural_tag",
    "format": {
        "type": "sequence",
        "elements": [
            {"type": "const_string", "value": "<t>"},
            {"type": "or", "elements": [INTEGER, {"type": "regex", "pattern": "a/b+"}]},
            {"type": "tag", "begin": "[", "content": {"type": "any_text"}, "end": "]"},
        ],
    },
}
CALL: dict[str, Any] = {
    "type": "structural_tag",
    "format": {
        "type": "triggered_tags",
        "triggers": ["<call>"],
        "tags": [{"type": "tag", "begin": "<call>\n", "content": INTEGER, "end": "\n</call>"}],
        "at_least_one": True,
    },
}


SLASHES = {"type": "structural_tag", "format": {"type": "regex", "pattern": r"a\/b/[c/]\\/"}}


@pytest.mark.parametrize(
    ("spec", "good", "bad"),
    [
        ({"structural_tag": SLASHES}, ["a/b/c\\/", "a/b//\\/"], ["a/b/c/"]),
        ({"json": {"const": "é\n"}}, ['"é\\n"'], ['"e"', '"é']),
        ({"json": {"type": "array", "maxItems": 2}}, ["[1, [ ]]", "[\n]"], ["[1,2,3]", "[" + " " * 33 + "]"]),
        ({"json": True}, ["1", "{}"], ["x"]),
        ({"json": {"type": "array"}, "disable_any_whitespace": True}, ["[1,2]"], ["[1, 2]"]),
        ({"json": {"type": "array"}, "whitespace_pattern": "[ ]{1,2}"}, ["[1,  2]"], ["[1,   2]", "[1,\n2]"]),
        ({"json_object": True}, ['{"a": [1, {}]}'], ["[]", "1"]),
        ({"regex": r"\d{3}-[a-z]+/x"}, ["123-abc/x"], ["12-a/x", "123-abc/xx"]),
        ({"regex": "(a+)+b"}, ["aaab"], ["aaa"]),
        ({"choice": ["a", "ab", 'é\n"x/ \\d']}, ["a", "ab", 'é\n"x/ \\d'], ["b", "abc"]),
        ({"grammar": 'root ::= "a" b*\nb ::= [0-9]+ | "x"'}, ["a", "a12x"], ["b", "ay"]),
        ({"grammar": 'start: "if " e\ne: "x" | "(" e ")"'}, ["if ((x))"], ["if ((x)"]),
        ({"structural_tag": TAG}, ["", "hi <f=a>3</f> bye", "<f=a>1</f><f=a>-3</f>"], ["<f=b>", "x <f=a>y</f>"]),
        ({"structural_tag": json.dumps(TREE)}, ["<t>12[hello]", "<t>a/bb[]"], ["<t>a/bb[", "<t>a[x]"]),
        ({"structural_tag": CALL}, ["<call>\n5\n</call>", "so <call>\n5\n</call>."], ["so", "<call>\nx"]),
    ],
)
def test_what_matches(compiler: GrammarCompiler, tokenizer: Tokenizer, spec: Any, good: Any, bad: Any) -> None:
    parsed = StructuredOutputs.model_validate(spec)
    for text in good:
        assert accepts(compiler, tokenizer, parsed, text), text
    for text in bad:
        assert not accepts(compiler, tokenizer, parsed, text), text


def test_neither_special_tokens_nor_padding_are_text(compiler: GrammarCompiler, tokenizer: Tokenizer) -> None:
    found = allowed(compiler.matcher(StructuredOutputs(regex="(.|\n)*")))
    assert found >= {tokenizer.encode(text, add_special_tokens=False)[0] for text in ("a", "{", "\n")}
    assert found.isdisjoint(
        {*tokenizer.special_token_ids, *range(tokenizer.vocab_size, 2000)} - set(INFO.eos_token_ids)
    )


def deep(levels: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "integer"}
    for _ in range(levels):
        schema = {"type": "array", "items": schema}
    return schema


@pytest.mark.parametrize(
    ("spec", "says"),
    [
        ({"json": deep(10_000)}, "deeper than 96"),
        ({"json": {"enum": ["x" * 1000] * 1000}}, "longer than 262144"),
        ({"regex": "x" * 300_000}, "longer than 262144"),
        ({"json": {"maximum": 10**300_000}}, "longer than 262144"),  # hundreds of thousands of digits
        ({"json": {"uniqueItems": True}}, "uniqueItems"),
        ({"json": {"type": "string", "format": "a new one"}}, "a new one"),
        ({"json": {"type": "integer", "minimum": 5, "maximum": 3}}, "minimum"),
        ({"json": False}, "nothing matches"),
        ({"regex": r"(a)\1"}, "backreferences"),
        ({"choice": ["\ud800"]}, "surrogate"),
        ({"grammar": "start: " + "(" * 3000 + '"a"' + ")" * 3000}, "deeply"),
        ({"structural_tag": {"type": "structural_tag", "structures": [], "triggers": ["x"]}}, "at least one"),
        ({"structural_tag": {**TAG, "triggers": ["<g"]}}, "none of the triggers"),
        ({"structural_tag": {"type": "structural_tag", "format": {"type": "tag"}}}, "must be a text"),
        ({"structural_tag": {**TREE, "more": 1}}, "unknown field"),
    ],
)
def test_refusals_are_quick_and_say_why(compiler: GrammarCompiler, spec: Any, says: str) -> None:
    parsed = StructuredOutputs.model_construct(**{"json_schema" if k == "json" else k: v for k, v in spec.items()})
    if parsed.kind != "structural_tag" or isinstance(spec["structural_tag"], dict):
        with limits.soon(20.0, "a refusal"), pytest.raises(InvalidRequestError) as raised:
            compiler.matcher(parsed)
        assert raised.value.param == f"structured_outputs.{parsed.kind}"
        assert says in raised.value.message


def too_slow() -> StructuredOutputs:
    many = {f"p{i}": {"type": "string"} for i in range(9000)}
    return StructuredOutputs(json={"type": "object", "properties": many, "additionalProperties": False})


def test_a_grammar_that_takes_too_long_costs_a_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """The limit, as it is by default, is of CPU time; there is more memory than could be filled in that time, and time
    on the clock for a machine on which others work."""
    monkeypatch.setattr(limited_process, "PATIENCE", 1e9)
    source = TokenizerVocabulary(INFO.directory, INFO.vocab_size, INFO.eos_token_ids)
    hasty = GrammarCompiler(source, GrammarLimits(memory_bytes=4 << 30), cache_size=4)
    try:
        hasty.matcher(StructuredOutputs(regex="first"))
        before = {child.pid for child in psutil.Process(os.getpid()).children()}
        with pytest.raises(InvalidRequestError, match=r"takes more than 0\.5 s"):
            hasty.matcher(too_slow())
        after = {child.pid for child in psutil.Process(os.getpid()).children()}
        assert len(before - after) == 1
        hasty.matcher(StructuredOutputs(regex="next"))
    finally:
        hasty.close()


def test_a_busy_machine_refuses_nothing(compiler: GrammarCompiler) -> None:
    """The limit of one second is of the process's own time."""
    compiler.matcher(StructuredOutputs(regex="before"))
    assert compiler._sandbox._process is not None
    child = psutil.Process(compiler._sandbox._process._child.pid)
    child.suspend()
    timer = threading.Timer(1.5, child.resume)
    timer.start()
    compiler.matcher(StructuredOutputs(regex="late"))
    timer.join()


def test_a_grammar_that_takes_too_much_memory_costs_a_process() -> None:
    source = TokenizerVocabulary(INFO.directory, INFO.vocab_size, INFO.eos_token_ids)
    small = GrammarCompiler(source, GrammarLimits(timeout_s=limits.patience_s(), memory_bytes=16 << 20), cache_size=4)
    try:
        with pytest.raises(InvalidRequestError, match="takes more than 16 MiB"):
            small.matcher(too_slow())
        small.matcher(StructuredOutputs(regex="next"))
    finally:
        small.close()


def test_the_process_comes_back_after_a_kill(compiler: GrammarCompiler) -> None:
    compiler.matcher(StructuredOutputs(regex="before"))
    for child in psutil.Process(os.getpid()).children():
        if "sandbox_process" in " ".join(child.cmdline()):
            child.kill()
            child.wait(limits.patience_s())
    compiler.matcher(StructuredOutputs(regex="after"))


def test_requests_with_one_grammar_do_not_share_a_state(compiler: GrammarCompiler, tokenizer: Tokenizer) -> None:
    spec = StructuredOutputs(choice=["ab", "ac"])
    one, two = compiler.matcher(spec), compiler.matcher(spec)
    a, b = (tokenizer.encode(text, add_special_tokens=False)[0] for text in "ab")
    start = allowed(two)
    one.accept(a)
    assert allowed(two) == start
    one.accept(b)
    assert one.is_complete
    assert not two.is_complete
    with pytest.raises(GrammarFailure):
        two.accept(b)


def test_the_grammar_begins_after_the_reasoning(compiler: GrammarCompiler, tokenizer: Tokenizer) -> None:
    end = ReasoningSpan(tuple(tokenizer.encode("</think>", add_special_tokens=False)))
    # The last one's end is written in tokens that it shares with the empty line after it.
    for reasoning in ("", "so 1 </think it is", "hm\n</thi"):
        matcher = compiler.matcher(StructuredOutputs(choice=["yes"]), end)
        for token in tokenizer.encode(f"{reasoning}</think>\n\n", add_special_tokens=False):
            was_active = matcher.is_active
            if not was_active:
                matcher.accept(token)
        assert matcher.is_active
        for token in tokenizer.encode("yes", add_special_tokens=False):
            assert token in allowed(matcher)
            matcher.accept(token)
        assert matcher.is_complete


@pytest.mark.parametrize("others", [0, MIN_PARALLEL])
def test_a_model_may_open_its_reasoning_itself_or_answer_at_once(
    compiler: GrammarCompiler, tokenizer: Tokenizer, others: int
) -> None:
    """The opening token is allowed first, and never again; what follows it is free until the end has come."""
    opening = tokenizer.token_to_id("<think>")
    assert opening is not None
    spec = StructuredOutputs(choice=["yes"])
    span = ReasoningSpan(tuple(tokenizer.encode("</think>", add_special_tokens=False)), opening)
    at_once, thinking = compiler.matcher(spec, span), compiler.matcher(spec, span)
    beside = [compiler.matcher(spec) for _ in range(others)]
    *plain, first = fill_masks([*beside, at_once])
    bit = np.uint32(1) << np.uint32(opening % 32)
    assert first.view(np.uint32)[opening // 32] & bit
    assert not any(mask.view(np.uint32)[opening // 32] & bit for mask in plain)
    words = tokenizer.encode("yes", add_special_tokens=False)
    assert words[0] in allowed(at_once)
    for matcher, text in ((at_once, ""), (thinking, "<think>no, but</think>\n\n")):
        for token in tokenizer.encode(text, add_special_tokens=False):
            if matcher is thinking and not (matcher.is_active and token != opening):
                matcher.accept(token)
        for token in words:
            mask = fill_masks([matcher])[0].view(np.uint32)
            assert mask[token // 32] & (np.uint32(1) << np.uint32(token % 32))
            assert bool(mask[opening // 32] & bit) == (matcher is at_once and token == words[0])
            matcher.accept(token)
        assert matcher.is_complete


def test_text_after_the_reasoning_in_its_last_token_begins_the_answer() -> None:
    source = TokenizerVocabulary(INFO.directory, INFO.vocab_size, INFO.eos_token_ids)
    compiler = GrammarCompiler(source, GrammarLimits(), cache_size=1)
    try:
        vocabulary = source.load()
        matcher = compiler.matcher(StructuredOutputs(choice=['"}']), ReasoningSpan(tuple(vocabulary.tokenize_str("x"))))
        matcher.accept(vocabulary.tokenize_str("x")[0])
        assert matcher.is_active
        matcher = compiler.matcher(StructuredOutputs(choice=["}"]), ReasoningSpan(tuple(vocabulary.tokenize_str('"'))))
        matcher.accept(vocabulary.tokenize_str('"}')[0])  # one token: the end, and the whole answer
        assert matcher.is_complete
    finally:
        compiler.close()


def test_a_remembered_refusal_does_not_keep_what_was_refused(compiler: GrammarCompiler) -> None:
    """Errors on their way collect frames, and 16 schemas of 2,000 properties left an engine 90 MB larger."""

    def refused() -> weakref.ref[StructuredOutputs]:
        spec = StructuredOutputs(regex="(never closed at all")
        with pytest.raises(InvalidRequestError):
            compiler.matcher(spec)
        assert compiler.knows(spec)
        return weakref.ref(spec)

    spec = refused()
    gc.collect()
    assert spec() is None


def test_a_refusal_is_remembered(compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch) -> None:
    """A grammar that was refused cost a sandboxed compile each time it came."""
    spec = StructuredOutputs(regex="(never closed")
    assert not compiler.knows(spec)
    with pytest.raises(InvalidRequestError) as first:
        compiler.matcher(spec)
    assert compiler.knows(spec)
    monkeypatch.setattr(compiler._sandbox, "check", lambda _: pytest.fail("tried again"))
    with pytest.raises(InvalidRequestError) as second:
        compiler.matcher(spec)
    assert (second.value.message, second.value.param) == (first.value.message, first.value.param)


def test_what_is_known_needs_no_compiling(compiler: GrammarCompiler) -> None:
    spec = StructuredOutputs(regex="known[0-9]")
    assert not compiler.knows(spec)
    compiler.matcher(spec)
    assert compiler.knows(spec)
    assert compiler.knows(StructuredOutputs(choice=["x" * (300 << 10)])), "too long: refused unread"


def test_the_cache_is_bounded_in_bytes(compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiler_module, "MAX_CACHED_BYTES", 1000)
    specs = [StructuredOutputs(choice=[f"{i}" + "x" * 400]) for i in range(3)]
    for spec in specs:
        compiler.matcher(spec)
    assert [compiler.knows(spec) for spec in specs] == [False, False, True]


def test_a_starved_sandbox_is_no_verdict(compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that gets no CPU time has not found the grammar too complex: it may be sent again."""
    compiler.matcher(StructuredOutputs(regex="[a-c]"))
    spec = StructuredOutputs(regex="[d-f]{1,7}")
    process = compiler._sandbox._process
    assert process is not None
    with monkeypatch.context() as patch:
        patch.setattr(limited_process, "PATIENCE", 0.01)
        psutil.Process(process._child.pid).suspend()
        with pytest.raises(OverloadedError, match="too busy to try the grammar; try later"):
            compiler.matcher(spec)
    assert not compiler.knows(spec)
    assert compiler.matcher(spec)


def bytes_grown_each(num_grammars: int) -> tuple[float, int]:
    """What a compiled grammar takes in memory, and the length of its text: schemas of many bounded texts take most."""
    vocabulary = TokenizerVocabulary(INFO.directory, INFO.vocab_size, INFO.eos_token_ids).load()

    def schema(number: int) -> StructuredOutputs:
        properties = {f"{number}{i}": {"type": "string", "maxLength": 1000 + i} for i in range(1000)}
        return StructuredOutputs(json={"type": "object", "properties": properties})

    kept = [compile_grammar(schema(0), vocabulary)]
    before = psutil.Process().memory_info().rss
    kept += [compile_grammar(schema(number), vocabulary) for number in range(1, num_grammars + 1)]
    return (psutil.Process().memory_info().rss - before) / num_grammars, len(schema(1).model_dump_json())


def test_a_full_cache_of_grammars_takes_little_memory() -> None:
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:  # where no memory is free to be taken
        grown, num_bytes = pool.submit(bytes_grown_each, 4).result(limits.patience_s())
    assert 10 < grown / num_bytes < (256 << 20) / compiler_module.MAX_CACHED_BYTES
