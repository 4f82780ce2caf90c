"""Parsers look at each character a bounded number of times, however the text is cut; pieces say what the whole does."""

from __future__ import annotations

import random
import re
import time
from collections.abc import Iterator
from typing import Any

import pytest

from app.parser_tables import REASONING_PARSERS, TOOL_PARSERS
from app.parsers import scanner
from app.parsers.base import FormatParser
from app.parsers.harmony import _HEADER, MAX_HEADER
from app.parsers.scanner import MAX_NAME, Mismatch, Scanner, Steps

TOOLS = {"f": {"type": "object", "properties": {"a": {"type": "string"}, "b": {"type": "integer"}}}}
MARKERS = [
    *("<tool_call>", "</tool_call>", '{"name": "f", "arguments": {"a": "', '"}}', "<function=f>", "<parameter=a>"),
    *("</parameter>", "</function>", "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "f{", "<｜tool▁calls▁begin｜>"),
    *("<｜tool▁call▁begin｜>", "function<｜tool▁sep｜>f\n```json\n", "<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>"),
    *("[f(a='", "')]", "f(a=[", "<|python_start|>", "<|python_end|>", "<|tool_call_start|>", "<|python_tag|>"),
    *("<think>", "</think>", "[THINK]", "[/THINK]", "<seed:think>", "</seed:think>", "<seed:tool_call>"),
    *("<|channel|>analysis<|message|>", "<|channel|>", "<|message|>", "<|end|>", "<|start|>assistant", "<|call|>"),
    *("<|channel|>commentary to=functions.f <|constrain|>json<|message|>", "<|return|>", "<minimax:tool_call>"),
    *('<invoke name="f">', '<parameter name="a">', "</invoke>", "</minimax:tool_call>", "<arg_key>a</arg_key>"),
    *("<arg_value>", "</arg_value>", '{"', "\\", '"', "'", "(", ")", "[", "]", "{", "}", ",", ";", "\n", " ", "a"),
    *("<", "```", "<｜", "1e5", "null", "x" * 250, " " * 250, "\U0001f642"),
]
BODIES = ["\n", "\n\n  x", "a", "<", "[f(a='", "{"]
PARSERS = [(registry, name) for registry in (TOOL_PARSERS, REASONING_PARSERS) for name in registry]


def new_parser(registry: Any, name: str) -> FormatParser:
    made: FormatParser = registry.load(name)(TOOLS) if registry is TOOL_PARSERS else registry.load(name)(True)
    return made


def said(registry: Any, name: str, pieces: list[str]) -> list[tuple[str, str]]:
    """What the pieces say, neighbours of a kind joined."""
    parser = new_parser(registry, name)
    joined: list[tuple[str, str]] = []
    for part in [part for piece in pieces for part in parser.push(piece)] + parser.flush():
        if joined and part.kind == joined[-1][0] != "call":
            joined[-1] = (part.kind, joined[-1][1] + part.text)
        else:
            joined.append((part.kind, part.text))
    return joined


@pytest.mark.parametrize(("registry", "name"), PARSERS)
def test_pieces_say_what_the_whole_does(registry: Any, name: str) -> None:
    rng = random.Random(name)
    for _ in range(60):
        text = "".join(rng.choice(MARKERS) for _ in range(rng.randint(1, 25)))
        cuts = sorted(rng.sample(range(len(text) + 1), min(len(text), rng.randint(1, 12))))
        pieces = [text[begin:end] for begin, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]
        whole = said(registry, name, [text])
        assert said(registry, name, pieces) == whole, (text, cuts)
        assert said(registry, name, list(text)) == whole, text


class Meter:
    """Counts the characters that are searched for markers, and those that wait when more text comes."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.count = 0
        markers, feed = scanner._markers, Scanner.feed

        def counted_markers(names: tuple[str, ...]) -> Any:
            found = scanner._Markers(names)
            found.pattern = self._counted(markers(names).pattern)  # type: ignore[assignment]
            return found

        def counted_feed(scan: Scanner, text: str) -> None:
            self.count += len(scan._text)
            feed(scan, text)

        monkeypatch.setattr(scanner, "_markers", counted_markers)
        monkeypatch.setattr(Scanner, "feed", counted_feed)

    def _counted(self, pattern: re.Pattern[str]) -> Any:
        meter = self

        class Counted:
            def search(self, text: str, start: int, end: int = 1 << 62) -> re.Match[str] | None:
                hit = pattern.search(text, start, end)
                meter.count += (hit.end() if hit else min(end, len(text))) - start
                return hit

        return Counted()


def endless(registry: Any, name: str) -> Iterator[tuple[str, str]]:
    """What an answer may begin with, and what it may go on with for ever."""
    openings = [marker for marker in MARKERS if marker.startswith(new_parser(registry, name).markers)]
    prefixes = ["", "x", *openings, *random.Random(name).sample(MARKERS, 6)]
    return ((prefix, body) for prefix in prefixes for body in BODIES)


@pytest.mark.parametrize(("registry", "name"), PARSERS)
def test_an_endless_answer_is_searched_once(registry: Any, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    meter = Meter(monkeypatch)

    def work(prefix: str, body: str, num_chars: int) -> int:
        parser, meter.count = new_parser(registry, name), 0
        text = prefix + body * (num_chars // len(body))
        for at in range(0, len(text), 4):
            parser.push(text[at : at + 4])
        return meter.count

    short, long = 500, 2000
    for prefix, body in endless(registry, name):
        assert work(prefix, body, long) < 6 * work(prefix, body, short) + 60 * short, (prefix, body)


def test_a_whole_answer_is_searched_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A marker that is never followed by another is looked for near it only, though all text is there at once."""
    meter = Meter(monkeypatch)
    text = "<｜tool▁call▁begin｜>" * 3000
    parser = new_parser(TOOL_PARSERS, "deepseek_v31")
    parser.push(text)
    parser.flush()
    assert meter.count < 100 * len(text)


@pytest.mark.parametrize("length", range(MAX_NAME - 12, MAX_NAME + 13))
def test_a_limit_does_not_depend_on_the_pieces(length: int) -> None:
    def outcome(pieces: list[str]) -> str:
        scan, found = Scanner(), []

        def steps() -> Steps[None]:
            try:
                found.append((yield from scan.until("<end of name>", limit=MAX_NAME))[0])
            except Mismatch:
                found.append("")

        running = steps()
        for piece in pieces:
            scan.feed(piece)
            next(running, None)
        return found[0]

    text = "n" * length + "<end of name>"
    assert outcome([text]) == outcome(list(text)) == ("n" * length if length <= MAX_NAME else "")


def test_a_header_of_white_space_is_matched_in_one_way() -> None:
    """Work that grows with the cube of the header's length was 64 times as much for one four times as long."""

    def cpu_s(length: int) -> float:
        begun = time.thread_time()
        for _ in range(3):
            assert not _HEADER.fullmatch("assistant" + " " * length + "!")
        return time.thread_time() - begun

    assert min(cpu_s(MAX_HEADER) for _ in range(3)) < 30 * min(cpu_s(MAX_HEADER // 4) for _ in range(3)) + 1e-3
