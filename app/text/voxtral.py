"""Voxtral's transcripts: a prompt of marks around the sound, in which a language may be told."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar

from app.errors import UnsupportedError
from app.records.outputs import CompletionOutput
from app.text.chat_speech import ChatSpeech
from app.text.languages import LANGUAGES
from app.text.speech import Asked, Detected
from app.text.tokenizer import Tokenizer

MARK = "[TRANSCRIBE]"  # behind it the text comes
_PROMPT = ("<s>", "[INST]", "[BEGIN_AUDIO]", "[AUDIO]", "[/INST]")


class VoxtralSpeech(ChatSpeech):
    """`[/INST]lang:en[TRANSCRIBE]`, or no language: it then writes in the one that is spoken."""

    # It is told codes of ISO 639-1; Whisper's `jw` is none.
    names: ClassVar[Mapping[str, str]] = {code: code for code in LANGUAGES if len(code) == 2 and code != "jw"}

    @property
    def is_usable(self) -> bool:
        """See ChatSpeech; no template writes these prompts."""
        return all(self.tokenizer.token_to_id(mark) is not None for mark in (*_PROMPT, MARK))

    def context(self, text: str, tokenizer: Tokenizer) -> tuple[int, ...]:
        """See ChatSpeech."""
        if text.strip():
            raise UnsupportedError("the model takes no text before a sound", param="prompt")
        return tuple(tokenizer.encode("".join(_PROMPT), False))

    def begin(self, language: str | None) -> str:
        """See ChatSpeech."""
        return MARK if language is None else f"lang:{language}{MARK}"

    def detection(self, heard: object, context: Sequence[int]) -> Asked | None:
        """See Speech: it needs not be told."""
        return None

    def detected(self, output: CompletionOutput, tokenizer: Tokenizer) -> Detected:
        """See Speech."""
        raise NotImplementedError  # nothing was asked
