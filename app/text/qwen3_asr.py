"""Qwen3-ASR's transcripts: an answer begins with the language that is spoken, unless that is given."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import ClassVar

from app.records.outputs import CompletionOutput
from app.records.sampling_params import SamplingParams
from app.text.chat_speech import ChatSpeech
from app.text.languages import code_of
from app.text.speech import Asked, Detected
from app.text.tokenizer import Tokenizer

MARK = "<asr_text>"  # between the language and the text
_LANGUAGE = re.compile(r"\s*(language\s+)?([^<\n]+)", re.IGNORECASE)
_NOBODY = "language none"
_LANGUAGE_TOKENS = 12  # in which one is named


class Qwen3AsrSpeech(ChatSpeech):
    """`language English<asr_text>` stands before the text; `language None`, where nobody speaks."""

    names: ClassVar[Mapping[str, str]] = {
        **{"ar": "Arabic", "cs": "Czech", "da": "Danish", "de": "German", "el": "Greek", "en": "English"},
        **{"es": "Spanish", "fa": "Persian", "fi": "Finnish", "fil": "Filipino", "fr": "French", "hi": "Hindi"},
        **{"hu": "Hungarian", "id": "Indonesian", "it": "Italian", "ja": "Japanese", "ko": "Korean"},
        **{"mk": "Macedonian", "ms": "Malay", "nl": "Dutch", "pl": "Polish", "pt": "Portuguese", "ro": "Romanian"},
        **{"ru": "Russian", "sv": "Swedish", "th": "Thai", "tr": "Turkish", "vi": "Vietnamese", "yue": "Cantonese"},
        "zh": "Chinese",
    }

    def begin(self, language: str | None) -> str:
        """See ChatSpeech."""
        return "" if language is None else f"language {language}{MARK}"

    def language(self, given: str | None) -> str | None:
        """See Speech; by the model's own names, too."""
        own = {name.lower(): code for code, name in self.names.items()}
        return super().language(own.get((given or "").strip().lower(), given))

    def detection(self, heard: object, context: Sequence[int]) -> Asked | None:
        """See Speech: the answer up to the mark, which is not answered a second time."""
        mark = self.tokenizer.token_to_id(MARK)
        params = SamplingParams(
            temperature=0.0, max_tokens=_LANGUAGE_TOKENS, stop_token_ids=[] if mark is None else [mark]
        )
        return self.request(heard, context, "", params, 1 << 30)

    def detected(self, output: CompletionOutput, tokenizer: Tokenizer) -> Detected:
        """See Speech; a language that cannot be given comes back by the name before the mark. An answer without the
        mark is a text, if it is no language that can be given."""
        before, mark, _ = tokenizer.decode(output.token_ids, True).partition(MARK)
        if before.strip().lower() == _NOBODY:
            return Detected(None, 0.0, is_silent=True)
        found = _LANGUAGE.match(before)
        name = found[2].strip() if found is not None and (mark or found[1]) else ""
        own = {own.lower(): code for code, own in self.names.items()}
        code = own.get(name.lower(), code_of(name))
        return Detected(code if code in self.names else (mark and name) or None, 0.0)

    def is_text(self, token: int, tokenizer: Tokenizer) -> bool:
        """See Speech."""
        return token != tokenizer.token_to_id(MARK) and super().is_text(token, tokenizer)
