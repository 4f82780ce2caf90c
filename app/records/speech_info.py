"""Reads from the files of a model that transcribes what it takes and how it is asked (Radford et al., 2022): the tokens
of languages, tasks and times, and which are never said."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from app.checkpoints.fields.kinds import FLAG, OBJECT, Kind, check, several, whole
from app.checkpoints.json_file import read_object
from app.checkpoints.model_info import GENERATION_FILE, ModelInfo
from app.errors import CheckpointError, InvalidRequestError
from app.records.alignment_heads import AlignmentHeads
from app.records.encoder_info import SOUND_PER_POSITION, EncoderInfo
from app.records.transcription_rules import TimeRules, TranscriptionRules

HOP = 160  # samples of a frame
_ID = whole(0, 1 << 30)
_IDS = several(_ID, 1 << 12)
_NAMED = Kind("an object of token ids", lambda value: OBJECT.holds(value) and all(map(_ID.holds, value.values())))
_FIELDS: Mapping[str, Kind] = {
    **dict.fromkeys(("decoder_start_token_id", "no_timestamps_token_id", "prev_sot_token_id"), _ID),
    **dict.fromkeys(("suppress_tokens", "begin_suppress_tokens"), _IDS),
    **dict.fromkeys(("lang_to_id", "task_to_id"), _NAMED),
    "max_initial_timestamp_index": _ID,
    "is_multilingual": FLAG,
}
_MANY_LANGUAGES = 51_865  # tokens of the smallest published vocabulary of many languages, one more than that of one
# In every vocabulary these two stand before the token that says: no times.
_NO_SPEECH, _PREVIOUS = 1, 2


@dataclass(slots=True, frozen=True)
class SpeechInfo:
    """One model that transcribes."""

    sampling_rate: int
    num_mels: int
    num_frames: int  # of a window
    num_positions: int  # of the encoder's output
    max_tokens: int  # of the decoder: prompt and transcript
    start: int  # the token that every prompt has
    end: int
    previous: int | None  # before what was said before; None: it takes none
    no_timestamps: int | None  # None: it tells no times
    no_speech: int | None
    languages: Mapping[str, int]  # by their codes; {}: it knows one
    tasks: Mapping[str, int]
    suppressed: tuple[int, ...]
    suppressed_first: tuple[int, ...]
    max_initial_timestamp: int | None  # the latest time to begin with, in steps
    alignment_heads: tuple[tuple[int, int], ...]  # layers and heads that follow the sound; (): none is known to
    is_multilingual: bool = False  # whatever its files say of the languages' tokens

    @classmethod
    def of(cls, info: ModelInfo) -> SpeechInfo | None:
        """Read it; None: the model transcribes nothing. CheckpointError names a field that is unusable or lacking."""
        encoder = EncoderInfo.of(info)
        if encoder is None or encoder.kind != "audio":
            return None
        file, own = f"{info.directory}/{GENERATION_FILE}", info.generation_config
        check(own, _FIELDS, file)
        sound = read_object(info.directory / "preprocessor_config.json", optional=True)
        check(sound, {"sampling_rate": whole(1, 1 << 20), "hop_length": whole(HOP, HOP)}, f"{info.directory}: sound")
        start = own.get("decoder_start_token_id", info.hf_config.get("decoder_start_token_id"))
        if start is None or not _ID.holds(start) or not info.eos_token_ids:
            raise CheckpointError(f"{file} is not usable: it lacks decoder_start_token_id or eos_token_id")
        silent = own.get("no_timestamps_token_id")
        return cls(
            sampling_rate=int(sound.get("sampling_rate", 16_000)),
            num_mels=encoder.shape[0],
            num_frames=encoder.shape[1],
            num_positions=encoder.num_positions,
            max_tokens=info.max_position_embeddings,
            start=int(start),
            end=info.eos_token_ids[0],
            previous=own.get("prev_sot_token_id", None if silent is None else silent - _PREVIOUS),
            no_timestamps=silent,
            no_speech=None if silent is None else silent - _NO_SPEECH,
            languages=_named(own, "lang_to_id"),
            tasks=_named(own, "task_to_id"),
            suppressed=tuple(own.get("suppress_tokens") or ()),
            suppressed_first=tuple(own.get("begin_suppress_tokens") or ()),
            max_initial_timestamp=own.get("max_initial_timestamp_index"),
            alignment_heads=AlignmentHeads.of(info).heads,
            is_multilingual=bool(own.get("is_multilingual", info.vocab_size >= _MANY_LANGUAGES)),
        )

    @property
    def first_timestamp(self) -> int | None:
        """The token of time 0; each that follows is `timestamp_s` later."""
        return None if self.no_timestamps is None else self.no_timestamps + 1

    def with_tokens(
        self, languages: Mapping[str, int], tasks: Mapping[str, int], no_timestamps: int | None
    ) -> SpeechInfo:
        """The same of a model whose generation settings leave these tokens out."""
        found = replace(self, languages=languages, tasks=tasks)
        if self.no_timestamps is not None or no_timestamps is None:
            return found
        no_speech, previous = no_timestamps - _NO_SPEECH, no_timestamps - _PREVIOUS
        return replace(found, no_timestamps=no_timestamps, no_speech=no_speech, previous=previous)

    def within(self, most: int) -> SpeechInfo:
        """The same where no more than `most` tokens fit, prompt and transcript together."""
        return self if most >= self.max_tokens else replace(self, max_tokens=most)

    @property
    def timestamp_s(self) -> float:
        """Seconds from one time to the next, which are those of a position."""
        return SOUND_PER_POSITION * HOP / self.sampling_rate

    @property
    def window_s(self) -> float:
        """Seconds of sound that it hears at once."""
        return self.num_frames * HOP / self.sampling_rate

    def prompt(self, language: str | None, task: str, *, timestamps: bool, previous: Sequence[int] = ()) -> list[int]:
        """The decoder's prompt; `previous`: tokens of what was said before, the last of which are taken.

        InvalidRequestError for a language or task that the model does not know. A model of one language is told none.
        """
        said: list[int] = []
        if previous and self.previous is not None:
            said = [self.previous, *previous[max(0, len(previous) - max(0, self.max_tokens // 2 - 1)) :]]
        asked = [self.start]
        if self.languages:
            asked += [_known(self.languages, language, "language"), _known(self.tasks, task, "task")]
        elif language not in (None, "en") or task != "transcribe":
            raise InvalidRequestError("language: the model knows English alone, and translates nothing")
        if not timestamps and self.no_timestamps is not None:
            asked.append(self.no_timestamps)
        return said + asked

    def rules(self, *, timestamps: bool) -> TranscriptionRules:
        """The rules that such a request brings in its asks."""
        times, first = None, self.first_timestamp
        if timestamps and first is not None and self.no_timestamps is not None:
            latest = None if self.max_initial_timestamp is None else first + self.max_initial_timestamp
            times = TimeRules(first, self.end, latest, (self.no_timestamps,))
        return TranscriptionRules(self.suppressed, self.suppressed_first, times)


def _named(own: Mapping[str, Any], field: str) -> dict[str, int]:
    """Token ids by names without the marks around them: `<|en|>` is en."""
    return {name.removeprefix("<|").removesuffix("|>"): token for name, token in (own.get(field) or {}).items()}


def _known(tokens: Mapping[str, int], name: str | None, field: str) -> int:
    if name is None or name not in tokens:
        raise InvalidRequestError(f"{field}: {name!r} is none of {', '.join(sorted(tokens))}", param=field)
    return tokens[name]
