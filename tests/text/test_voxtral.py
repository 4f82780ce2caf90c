"""Voxtral's own prompt for transcripts, as Mistral's tokenizer (mistral-common 1.13.1) writes it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from app.errors import InvalidRequestError, UnsupportedError
from app.text.chat_speech import CHAT_SPEECH
from app.text.voxtral import VoxtralSpeech

MARKS = ("<s>", "[INST]", "[BEGIN_AUDIO]", "[AUDIO]", "[/INST]", "[TRANSCRIBE]")


class Marks:
    """A tokenizer that knows some marks, and writes a text as it is."""

    def __init__(self, *known: str) -> None:
        self.known = known

    def token_to_id(self, mark: str) -> int | None:
        return self.known.index(mark) if mark in self.known else None

    def encode(self, text: str, add_special_tokens: bool = True) -> list[str]:
        assert not add_special_tokens
        return [text]


def speech(*known: str) -> VoxtralSpeech:
    kind: Any = CHAT_SPEECH.load("voxtral")
    assert kind is VoxtralSpeech
    media: Any = SimpleNamespace(reader=SimpleNamespace(sounds=None))
    found: VoxtralSpeech = kind(media, None, Marks(*known), 2)
    return found


def test_the_prompt() -> None:
    own, tokenizer = speech(*MARKS), Marks(*MARKS)
    whole: Any = tokenizer
    assert own.context(" ", whole) == ("<s>[INST][BEGIN_AUDIO][AUDIO][/INST]",)
    assert own.begin(None) == "[TRANSCRIBE]"
    assert own.begin("de") == "lang:de[TRANSCRIBE]"
    with pytest.raises(UnsupportedError, match="no text before a sound") as refused:
        own.context("Ada", whole)
    assert refused.value.param == "prompt"


def test_languages_are_short_codes() -> None:
    own = speech(*MARKS)
    assert [own.language(name) for name in ("en", "German", " FR ", None)] == ["en", "de", "fr", None]
    for unknown in ("yue", "haw", "jw", "Klingon"):
        with pytest.raises(InvalidRequestError, match="hears no language"):
            own.language(unknown)


@pytest.mark.parametrize("lacking", MARKS)
def test_without_its_marks_it_does_not_transcribe(lacking: str) -> None:
    assert speech(*MARKS).is_usable
    assert not speech(*(mark for mark in MARKS if mark != lacking)).is_usable
