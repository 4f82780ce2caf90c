"""What the templates write is what the parsers read, however it is cut; broken text is kept and never raises."""

from __future__ import annotations

import json
import random
import re
from typing import Any

import pytest

from app.parser_tables import TOOL_PARSERS
from app.text.detokenizer import create_detokenizer
from app.text.tokenizer import Tokenizer
from tests.parsers.conftest import KINDS, TOOLS, Kind, cut, parse, transcripts

SEEDS = range(20)
LOOSE = ("qwen3_coder", "seed_oss", "minimax_m2")


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    from app.checkpoints.model_info import ModelInfo

    return Tokenizer.from_directory(ModelInfo.from_directory("tiny-chat").directory)


def token_texts(tokenizer: Tokenizer, text: str) -> list[str]:
    """What each token adds to the text, as the detokenizer hands it out."""
    detokenizer = create_detokenizer(tokenizer, skip_special_tokens=False)
    return [
        *(detokenizer.push(token) for token in tokenizer.encode(text, add_special_tokens=False)),
        detokenizer.flush(),
    ]


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_streamed_is_what_the_template_was_told(kind: Kind, tokenizer: Tokenizer) -> None:
    markers = TOOL_PARSERS.load(kind.tools).markers
    for transcript in transcripts(kind):
        whole = parse(kind, [transcript.text])
        found = [(call.name, json.loads(call.arguments)) for call in whole.calls]
        assert found == transcript.calls, transcript.text
        assert (whole.reasoning, whole.content) == (transcript.reasoning, transcript.content.strip("\n")), (
            transcript.text
        )
        assert not any(marker in whole.content + whole.reasoning for marker in markers)
        tokens = token_texts(tokenizer, transcript.text)
        assert "".join(tokens) == transcript.text
        for seed in SEEDS:
            assert parse(kind, cut(list(transcript.text), seed)) == whole, f"characters, seed {seed}"
            assert parse(kind, cut(tokens, seed)) == whole, f"tokens, seed {seed}"


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_arguments_come_before_the_call_ends(kind: Kind) -> None:
    """Half of a long argument is there when half of the text has come, where the form allows it."""
    from tests.parsers.conftest import new_parser

    text = next(
        t.text for t in transcripts(kind) if t.calls == [("get_weather", {"city": "Paris", "days": 3, "metric": True})]
    )
    start, end = text.split("Paris")
    parser = new_parser(kind)
    early = parser.push(start + "x" * 1000)
    streamed = sum(len(part.text) for part in early if part.kind == "arguments")
    assert streamed >= 1000 or kind.tools == "pythonic", "a Python literal must be whole"
    rest = parser.push(end) + parser.flush()
    assert json.loads("".join(p.text for p in early + rest if p.kind == "arguments"))["city"] == "x" * 1000


def atoms(kind: Kind, text: str) -> list[str]:
    """Characters, and the markers that are one token in the models' vocabularies."""
    markers = (*TOOL_PARSERS.load(kind.tools).markers, "</think>", "[/THINK]", "</seed:think>")
    return [unit for unit in re.split("(" + "|".join(map(re.escape, markers)) + "|.)", text, flags=re.S) if unit]


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_every_beginning_of_a_transcript(kind: Kind) -> None:
    """Cut off anywhere (max_tokens), the pieces still agree with the whole, and what was said before remains."""
    for transcript in transcripts(kind):
        complete = parse(kind, [transcript.text])
        units = atoms(kind, transcript.text)
        for length in range(0, len(units), 3):
            text = "".join(units[:length])
            whole = parse(kind, [text])
            assert parse(kind, list(text)) == whole
            assert complete.reasoning.startswith(whole.reasoning)
            for call, other in zip(whole.calls, complete.calls, strict=False):
                assert call.name == other.name
                is_prefix = other.arguments.startswith(call.arguments.rstrip("}"))
                assert is_prefix or kind.tools in LOOSE, "its closing markers are several tokens"


def broken(text: str, rng: random.Random, markers: tuple[str, ...]) -> str:
    """The text with a piece deleted, doubled, moved, or a marker or bracket put in."""
    for _ in range(rng.randint(1, 3)):
        a, b = sorted(rng.randint(0, len(text)) for _ in range(2))
        b = min(b, a + rng.choice([1, 2, 9, 40]))
        put = rng.choice(["", "", text[a:b] * 2, rng.choice(markers), rng.choice('{}[]()"\\,:<\n'), "{" * 50])
        text = text[:a] + put + text[b:]
    return text


WORDS = re.compile(r"Paris|Osnabr|Rome|quoted|paragraphs|second line|several|thought|Calling|look it up")


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_broken_text_is_kept(kind: Kind) -> None:
    rng = random.Random(str(kind))
    markers = TOOL_PARSERS.load(kind.tools).markers
    for transcript in transcripts(kind):
        for _ in range(60):
            text = broken(transcript.text, rng, markers)
            whole = parse(kind, [text])
            assert parse(kind, cut(list(text), rng.randint(0, 999))) == whole, text
            said: Any = [whole.reasoning, whole.content, *(call.name + call.arguments for call in whole.calls)]
            assert sorted(WORDS.findall("\0".join(said))) == sorted(WORDS.findall(text)), text
            said.append(json.dumps(said, ensure_ascii=False).encode())  # can be sent


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_hostile_text_is_read_in_time(kind: Kind) -> None:
    """Every marker 500 times over, and brackets without end: linear work, no recursion."""
    for marker in (*TOOL_PARSERS.load(kind.tools).markers, '{"name": "now", "arguments": {', "[now(", "[[{(", '\\"'):
        text = marker * 500
        whole = parse(kind, [text])
        assert parse(kind, [text[i : i + 5] for i in range(0, len(text), 5)]) == whole


def test_names_are_those_of_the_tools() -> None:
    """Where nothing marks a call, only an offered tool makes one."""
    for kind, text in ((KINDS[1], '{"name": "Bob", "parameters": {}}'), (KINDS[9], '[sorted(key="x")]')):
        answer = parse(kind, list(text))
        assert (answer.content, answer.calls) == (text, [])
    assert "now" in TOOLS
