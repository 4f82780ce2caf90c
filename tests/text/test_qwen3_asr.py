"""Languages of Qwen3-ASR's answers are read as transformers reads them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from transformers.models.qwen3_asr import processing_qwen3_asr as judge

from app.errors import InvalidRequestError, UnsupportedError
from app.records.outputs import CompletionOutput
from app.text.chat_speech import CHAT_SPEECH
from app.text.qwen3_asr import Qwen3AsrSpeech

ANSWERS = [
    *(f"language {name}<asr_text>what is said" for name in judge.LANGUAGE_CODE_TO_NAME.values()),
    *("language None<asr_text>", "language German", " language Thai <asr_text>", "no language at all", ""),
]


class Decoder:
    """A tokenizer that has one text."""

    def __init__(self, text: str) -> None:
        self._text = text

    def decode(self, token_ids: Any, skip_special_tokens: bool = True) -> str:
        return self._text


@pytest.fixture
def speech() -> Qwen3AsrSpeech:
    kind = CHAT_SPEECH.load("qwen3_asr")
    assert kind is Qwen3AsrSpeech
    media: Any = SimpleNamespace(reader=SimpleNamespace(sounds=None))
    nothing: Any = None
    return Qwen3AsrSpeech(media, nothing, nothing, 2)


def test_languages_are_transformers(speech: Qwen3AsrSpeech) -> None:
    assert dict(speech.names) == judge.LANGUAGE_CODE_TO_NAME
    for code, name in judge.LANGUAGE_CODE_TO_NAME.items():
        assert speech.language(code) == speech.language(name) == speech.language(f" {name.upper()} ") == code
        assert speech.begin(name) == f"language {name}<asr_text>"
    assert speech.language(None) is None
    with pytest.raises(InvalidRequestError, match="no language 'Klingon'"):
        speech.language("Klingon")


@pytest.mark.parametrize("answer", ANSWERS)
def test_the_language_of_an_answer(speech: Qwen3AsrSpeech, answer: str) -> None:
    decoder: Any = Decoder(answer)
    found = speech.detected(CompletionOutput(0), decoder).language
    # The judge takes an answer without the mark, which ours asks for no further than, for a text.
    name = judge._parse_single_output(answer if "<asr_text>" in answer else f"{answer}<asr_text>")["language"]
    assert found == {own: code for code, own in judge.LANGUAGE_CODE_TO_NAME.items()}.get(name)


@pytest.mark.parametrize(
    "answer",
    [
        *("language Ukrainian<asr_text>", "Klingon<asr_text>", "language <asr_text>", "<asr_text>", "no language"),
        *("language lessons are dear", "None of it", "language None of it", ""),
    ],
)
def test_only_none_is_silence(speech: Qwen3AsrSpeech, answer: str) -> None:
    """Other languages come back by their names, as the judge has them; where none is named the text is asked for."""
    decoder: Any = Decoder(answer)
    found = speech.detected(CompletionOutput(0), decoder)
    expected = judge._parse_single_output(answer)["language"]
    assert (found.language, found.is_silent) == (expected, False)
    for nobody in ("language None<asr_text>", " Language none <asr_text>", "language None"):
        decoder = Decoder(nobody)
        assert speech.detected(CompletionOutput(0), decoder).is_silent


def test_what_it_does_not_do(speech: Qwen3AsrSpeech) -> None:
    for refused in (speech.check_times, speech.check_words, lambda: speech.check_task("translate")):
        with pytest.raises(UnsupportedError):
            refused()
    speech.check_task("transcribe")
    assert [speech.joint(code) for code in ("en", "ja", "zh", None)] == [" ", "", "", " "]
