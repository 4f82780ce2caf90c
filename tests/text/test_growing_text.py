"""Text that comes in many pieces is not copied with each of them, wherever it is gathered."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from app.api.chat.blocks import BlockReader
from app.parsers.base import ParsedAnswer
from app.parsers.custom_input import InputReader
from app.parsers.scanner import Part
from app.records.outputs import CompletionOutput, EngineOutput
from app.records.step import TokenLogprobs
from app.text.growing_text import GrowingText
from app.text.output_processor import TextDelta
from tests.text.counted_text import CountedText, num_copied_by

Take = Callable[[str], object]


def in_a_block() -> Take:
    reader = BlockReader(None)
    reader.read(TextDelta("It is said:", EngineOutput("r", [1])))
    return lambda text: reader.read(TextDelta(text, EngineOutput("r", [1])))


def before_a_block() -> Take:
    reader = BlockReader(None)
    return lambda text: reader.read(TextDelta(text, EngineOutput("r", [1])))


def in_a_choice() -> Take:
    output = CompletionOutput(0)
    return lambda text: TextDelta(text, EngineOutput("r", [1])).add_to(output)


def in_a_custom_input() -> Take:
    reader = InputReader()
    reader.push("x" * 300)
    return reader.push


@pytest.mark.parametrize("place", [in_a_block, before_a_block, in_a_choice, in_a_custom_input])
def test_no_piece_copies_the_text_before_it(place: Callable[[], Take]) -> None:
    assert num_copied_by(1000, place()) <= 1000


def test_parts_that_come_together_are_joined_once() -> None:
    def take(count: int) -> int:
        CountedText.num_copied = 0
        ParsedAnswer().add([Part("content", CountedText("a")) for _ in range(count)])
        return CountedText.num_copied

    assert take(1000) <= 1000


def test_it_is_what_was_added() -> None:
    text = GrowingText()
    assert not text
    text.add("a")
    text.add("")
    assert (str(text), bool(text)) == ("a", True)
    text.add("b")
    assert str(text) == str(text) == "ab"
    text.clear()
    assert (str(text), bool(text)) == ("", False)


def test_blocks_say_what_came() -> None:
    reader = BlockReader(None)
    for text in ("\n", " ", "a", "", "\n", "b"):
        reader.read(TextDelta(text, EngineOutput("r", [1])))
    reader.read(TextDelta("", EngineOutput("r", [], "stop"), finish_reason="stop"))
    assert [(block.kind, block.text) for block in reader.blocks] == [("text", "\n a\nb")]


def test_logprobs_are_added_in_place() -> None:
    output, entry = CompletionOutput(0), TokenLogprobs([1], [-0.5], [1])
    output.append(EngineOutput("r", [1], logprobs=[entry]))
    logprobs = output.logprobs
    output.append(EngineOutput("r", [1, 1], logprobs=[entry, entry]))
    assert output.logprobs is logprobs
    assert (output.logprobs, output.cumulative_logprob) == ([entry] * 3, -1.5)


def test_a_choices_text_is_there_when_it_has_finished() -> None:
    output = CompletionOutput(0)
    for text in ("a", "", "b"):
        TextDelta(text, EngineOutput("r", [1])).add_to(output)
    TextDelta("c", EngineOutput("r", [1], "stop"), finish_reason="stop").add_to(output)
    assert output.text == "abc"
    assert output == CompletionOutput(0, "abc", [1] * 4, finish_reason="stop")
