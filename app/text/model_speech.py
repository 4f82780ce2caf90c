"""Speech of a model that transcribes and does nothing else, Whisper's: its decoder attends to a window of sound, and is
told by tokens what to write."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from app.checkpoints.fields.kinds import expect, whole
from app.checkpoints.model_info import ModelInfo
from app.errors import CheckpointError, EngineDeadError, UnsupportedError
from app.media.audio.mel import MelSettings
from app.media.audio.reader import SoundReader
from app.media.audio.sound import Piece
from app.media.settings import read_settings
from app.records.encoder_info import SOUND_PER_POSITION
from app.records.encoder_input import EncoderInput
from app.records.outputs import CompletionOutput
from app.records.sampling_params import SamplingParams
from app.records.speech_info import HOP, SpeechInfo
from app.records.step import TokenLogprobs
from app.text.languages import LANGUAGES
from app.text.speech import Asked, Detected, Speech
from app.text.tokenizer import Tokenizer

_WIDTH = whole(1, 1 << 14)
_TASKS, _SILENT = ("transcribe", "translate"), "notimestamps"


@dataclass(frozen=True)
class ModelSpeech(Speech):
    """Holds what a model that transcribes was trained to hear, and the `reader` of all sounds."""

    tells_silence = True

    info: SpeechInfo
    settings: MelSettings
    reader: SoundReader
    num_stages: int = 1  # of the engine's pipeline

    @classmethod
    def of(cls, model: ModelInfo, reader: SoundReader, tokenizer: Tokenizer, num_stages: int = 1) -> ModelSpeech | None:
        """A model's, from its files; None: it does not transcribe. CheckpointError names what cannot be used."""
        info = SpeechInfo.of(model)
        if info is None:
            return None
        if info.is_multilingual and not info.languages:
            info = _with_languages(info, tokenizer)
        own = read_settings(model.directory, "feature_extractor")
        widths = {name: own.get(name, usual) for name, usual in (("n_fft", 400), ("hop_length", 160))}
        for name, width in widths.items():
            expect(width, _WIDTH, f"preprocessor_config.json: {name}", CheckpointError)
        settings = MelSettings(
            info.sampling_rate, info.num_mels, info.num_frames, widths["n_fft"], widths["hop_length"]
        )
        return cls(info, settings, reader, num_stages)

    @property
    def rate(self) -> int:
        """See Speech."""
        return self.settings.rate

    @property
    def piece_s(self) -> float:
        """See Speech."""
        return self.settings.seconds

    @property
    def end(self) -> int:
        """See Speech."""
        return self.info.end

    @property
    def first_timestamp(self) -> int | None:  # type: ignore[override]
        """See Speech."""
        return self.info.first_timestamp

    @property
    def timestamp_s(self) -> float:  # type: ignore[override]
        """See Speech."""
        return self.info.timestamp_s

    @property
    def languages(self) -> Collection[str]:
        """See Speech."""
        return self.info.languages

    @property
    def num_bytes(self) -> int:
        """See Speech."""
        return 4 * self.settings.num_mels * self.settings.num_frames

    @property
    def alignment_bytes(self) -> int:  # type: ignore[override]
        """See Speech."""
        return 4 * self.info.num_positions * self.info.max_tokens

    def heard(self, piece: Piece, tenant: str = "") -> EncoderInput:
        """See Speech."""
        values = self.reader.features(piece, self.settings)
        digest = self.reader.digest(piece, self.settings, tenant)
        shape = self.settings.num_mels, self.settings.num_frames
        return EncoderInput("audio", digest, self.info.num_positions, shape, values)

    def context(self, text: str, tokenizer: Tokenizer) -> tuple[int, ...]:
        """See Speech; whatever it spells, it has no marks."""
        if not text.strip():
            return ()
        if self.info.previous is None:
            raise UnsupportedError("the model takes no text before a sound", param="prompt")
        tokens = tokenizer.encode(f" {text.strip()}", add_special_tokens=False)
        return tuple(token for token in tokens if self.is_text(token, tokenizer))

    def detection(self, heard: object, context: Sequence[int]) -> Asked | None:
        """See Speech: one token behind the first, whose most likely one that is a language is taken."""
        info = self.info
        wanted = [*info.languages.values(), *(() if info.no_speech is None else (info.no_speech,))]
        params = SamplingParams(temperature=0.0, max_tokens=1, logprobs=1, logprob_token_ids=wanted)
        return Asked([info.start], (heard,), params) if wanted else None

    def detected(self, output: CompletionOutput, tokenizer: Tokenizer) -> Detected:
        """See Speech."""
        if not output.logprobs:
            raise EngineDeadError("the engine gave no logprobs of languages")
        info, entry = self.info, output.logprobs[0]
        logprobs = dict(zip(entry.token_ids, entry.logprobs, strict=True))
        codes = info.languages
        language = max(codes, key=lambda code: logprobs.get(codes[code], -math.inf)) if codes else None
        silence = -math.inf if info.no_speech is None else logprobs.get(info.no_speech, -math.inf)
        return Detected(language, math.exp(min(0.0, silence)))

    def asked(
        self, heard: object, context: Sequence[int], language: str | None, task: str, most: int, *, timestamps: bool
    ) -> Asked:
        """See Speech."""
        info = self.info.within(most)
        prompt = info.prompt(language, task, timestamps=timestamps, previous=context)
        params = SamplingParams(max_tokens=max(1, info.max_tokens - len(prompt)))
        return Asked(prompt, (heard, info.rules(timestamps=timestamps)), params)

    def silence(self, prompt: Sequence[int], logprobs: Sequence[TokenLogprobs | None] | None) -> float | None:
        """See Speech: the token behind the first mark says it."""
        behind = len(prompt) - prompt[::-1].index(self.info.start)
        entry = None if logprobs is None or behind >= len(logprobs) else logprobs[behind]
        if entry is None or self.info.no_speech is None:
            return None
        known = dict(zip(entry.token_ids, entry.logprobs, strict=True))
        return math.exp(min(0.0, known.get(self.info.no_speech, -math.inf)))

    def is_text(self, token: int, tokenizer: Tokenizer) -> bool:
        """See Speech."""
        first = self.info.first_timestamp
        is_mark = token == self.info.end or token in tokenizer.special_token_ids
        return not is_mark and (first is None or token < first)

    def check_times(self) -> None:
        """See Speech: a model without times tells when pieces begin and end."""

    def check_words(self) -> None:
        """See Speech."""
        param = "timestamp_granularities"
        if not self.info.alignment_heads:
            why = "its generation_config.json names no alignment_heads of its own"
            raise UnsupportedError(f"the model tells no times of words: {why}", param=param)
        if self.num_stages > 1:
            raise UnsupportedError("times of words need pipeline_parallel_size=1", param=param)

    def num_positions(self, piece: Piece) -> int:
        """See Speech."""
        return min(max(1, -(-len(piece.samples) // HOP) // SOUND_PER_POSITION), self.info.num_positions)

    def check_task(self, task: str) -> None:
        """See Speech."""
        if task not in self.info.tasks and (task != "transcribe" or self.info.tasks):
            raise UnsupportedError(f"the model does not {task}", param="model")


def _with_languages(info: SpeechInfo, tokenizer: Tokenizer) -> SpeechInfo:
    """The same with the tokens of languages, tasks and no times by their names, which older generation settings do not
    list; as it is where the tokenizer has none."""
    found = {name: tokenizer.token_to_id(f"<|{name}|>") for name in (*LANGUAGES, *_TASKS, _SILENT)}
    known = {name: token for name, token in found.items() if token is not None}
    languages = {code: known[code] for code in LANGUAGES if code in known}
    tasks = info.tasks or {task: known[task] for task in _TASKS if task in known}
    if not languages or "transcribe" not in tasks:
        return info
    return info.with_tokens(languages, tasks, known.get(_SILENT))
