"""Writes what was heard in a sound, in the forms that OpenAI's clients ask for."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from app.api.http.work_pool import DECODE_S_PER_TOKEN, WRITE_S_PER_LOGPROB
from app.api.openai.audio.attempts import Ask
from app.api.openai.audio.listening import Heard
from app.api.openai.audio.segments import Segment, segments_of
from app.api.openai.audio.subtitles import srt, vtt
from app.api.openai.audio.words import WITHOUT_SPACES, Word, words_of
from app.api.openai.logprobs import chat_position
from app.records.step import TokenLogprobs
from app.text.languages import name_of

AUDIO_TOKENS_PER_S = 50  # positions of the encoder that a second of sound becomes
SEEKS_PER_S = 100  # frames of features, which `seek` counts


@dataclass(slots=True, frozen=True)
class Transcript:
    """A sound's pieces and what was asked of them."""

    ask: Ask
    heard: Sequence[Heard]
    language: str | None  # a code; None: the model has one language
    seconds: float

    @property
    def writing_cost_s(self) -> float:
        """Estimates the work of writing it in any form."""
        num_tokens = sum(len(one.attempt.output.token_ids) for one in self.heard)
        return (DECODE_S_PER_TOKEN + WRITE_S_PER_LOGPROB) * num_tokens

    @property
    def spoken(self) -> list[Heard]:
        """Pieces in which somebody speaks."""
        return [one for one in self.heard if not one.is_silence]

    @property
    def text(self) -> str:
        """All that is said."""
        return "".join(one.attempt.text for one in self.spoken).strip()

    def segments(self) -> list[tuple[Segment, Heard]]:
        """All segments in order, each with its piece."""
        first, end = self.ask.speech.first_timestamp, self.ask.speech.end
        return [
            (segment, one)
            for one in self.spoken
            for segment in segments_of(
                [token for token in one.attempt.output.token_ids if token != end],
                first,
                one.piece.begin_s,
                one.piece.end_s,
                self._decode,
            )
        ]

    def _decode(self, token_ids: Sequence[int]) -> str:
        return self.ask.speech.text(token_ids, self.ask.model.tokenizer)

    def json(self, with_logprobs: bool) -> dict[str, Any]:
        """`json`: the text, and the logprobs of its tokens where they are wanted."""
        body: dict[str, Any] = {"text": self.text}
        if with_logprobs:
            entries = [entry for one in self.spoken for entry in one.attempt.output.logprobs or ()]
            body["logprobs"] = token_logprobs(entries, self.ask)
        return {**body, "usage": self._duration()}

    def words(self) -> list[Word]:
        """All words in order, with their times in the sound."""
        first = self.ask.speech.first_timestamp
        return [
            word
            for one in self.spoken
            for word in words_of(
                one.attempt.output.token_ids,
                one.ends_s,
                lambda token: self.ask.speech.is_text(token, self.ask.model.tokenizer),
                lambda token: first is not None and token >= first,
                self._decode,
                (one.piece.begin_s, one.piece.end_s),
                has_spaces=self.language not in WITHOUT_SPACES,
            )
        ]

    def verbose_json(self, has_segments: bool = True) -> dict[str, Any]:
        """`verbose_json`: language, length, segments and words, too, as far as they are wanted."""
        timed: dict[str, Any] = {}
        if self.ask.has_words:
            timed["words"] = [asdict(word) for word in self.words()]
        if has_segments:
            timed["segments"] = [_described(i, segment, one) for i, (segment, one) in enumerate(self.segments())]
        return {
            "task": self.ask.task,
            "language": "english" if self.ask.task == "translate" else name_of(self.language or "en"),
            "duration": self.seconds,
            "text": self.text,
            **timed,
            "usage": self._duration(),
        }

    def plain(self, form: str) -> str:
        """`text`, `srt` or `vtt`."""
        if form == "text":
            return self.text + "\n"
        write: Callable[[Sequence[Segment]], str] = srt if form == "srt" else vtt
        return write([segment for segment, _ in self.segments()])

    def _duration(self) -> dict[str, Any]:
        return {"type": "duration", "seconds": math.ceil(self.seconds)}

    def token_usage(self) -> dict[str, Any]:
        """Tokens in and out, as streams say them."""
        heard = sum(one.attempt.num_heard for one in self.heard)
        audio = heard if self.ask.speech.hears_in_prompt else math.ceil(self.seconds * AUDIO_TOKENS_PER_S)
        text = sum(one.attempt.num_prompt_tokens for one in self.heard) - heard
        output = sum(len(one.attempt.output.token_ids) for one in self.heard)
        return {
            "type": "tokens",
            "input_tokens": audio + text,
            "input_token_details": {"audio_tokens": audio, "text_tokens": text},
            "output_tokens": output,
            "total_tokens": audio + text + output,
        }


def token_logprobs(entries: Sequence[TokenLogprobs], ask: Ask) -> list[dict[str, Any]]:
    """The logprobs of tokens that are text."""
    tokenizer = ask.model.tokenizer
    text = [entry for entry in entries if ask.speech.is_text(entry.token_ids[0], tokenizer)]
    return [_without_others(chat_position(entry, tokenizer)) for entry in text]


def _without_others(position: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in position.items() if name != "top_logprobs"}


def _described(number: int, segment: Segment, heard: Heard) -> dict[str, Any]:
    attempt = heard.attempt
    return {
        "id": number,
        "seek": int(heard.piece.begin_s * SEEKS_PER_S),
        "start": round(segment.begin_s, 3),
        "end": round(segment.end_s, 3),
        "text": segment.text,
        "tokens": list(segment.token_ids),
        "temperature": attempt.temperature,
        "avg_logprob": attempt.mean_logprob,
        "compression_ratio": attempt.compression,
        "no_speech_prob": attempt.no_speech or 0.0,
    }
