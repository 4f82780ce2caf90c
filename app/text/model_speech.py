"""One model's speech as those hear it that make its requests: how a piece of sound becomes what its encoder reads."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from app.checkpoints.fields.kinds import expect, whole
from app.checkpoints.model_info import ModelInfo
from app.errors import CheckpointError, InvalidRequestError, UnsupportedError
from app.media.audio.mel import MelSettings
from app.media.audio.reader import SoundReader
from app.media.audio.sound import Piece
from app.media.settings import read_settings
from app.records.encoder_info import SOUND_PER_POSITION
from app.records.encoder_input import EncoderInput
from app.records.speech_info import HOP, SpeechInfo
from app.text.languages import LANGUAGES, code_of
from app.text.tokenizer import Tokenizer

_WIDTH = whole(1, 1 << 14)
_TASKS, _SILENT = ("transcribe", "translate"), "notimestamps"
MAX_SHOWN = 128  # languages that an error names


@dataclass(slots=True, frozen=True)
class ModelSpeech:
    """Holds what a model that transcribes was trained to hear, and the `reader` of all sounds."""

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
    def num_bytes(self) -> int:
        """Memory of what the encoder reads of a piece."""
        return 4 * self.settings.num_mels * self.settings.num_frames

    @property
    def alignment_bytes(self) -> int:
        """Memory of what aligns the longest transcript of a piece with it."""
        return 4 * self.info.num_positions * self.info.max_tokens

    def heard(self, piece: Piece, tenant: str = "") -> EncoderInput:
        """A piece of a tenant's as the encoder reads it. Blocks on a process; errors as those of SoundReader."""
        values = self.reader.features(piece, self.settings)
        digest = self.reader.digest(piece, self.settings, tenant)
        shape = self.settings.num_mels, self.settings.num_frames
        return EncoderInput("audio", digest, self.info.num_positions, shape, values)

    def is_text(self, token: int, tokenizer: Tokenizer) -> bool:
        """True for a token that is said, and no mark or time."""
        first = self.info.first_timestamp
        is_mark = token == self.info.end or token in tokenizer.special_token_ids
        return not is_mark and (first is None or token < first)

    def text(self, token_ids: Sequence[int], tokenizer: Tokenizer) -> str:
        """Says what a transcript says, without marks and times: the tokens of times need not be special ones."""
        return tokenizer.decode([token for token in token_ids if self.is_text(token, tokenizer)], True)

    def language(self, given: str | None) -> str | None:
        """The code of a language that a request names; None where it names none, or there is only one.

        InvalidRequestError where the model does not know it.
        """
        known: Collection[str] = self.info.languages
        if given is None or not given.strip():
            return None
        code = code_of(given)
        if code in known:
            return code
        if not known and code == "en":
            return None
        names = ", ".join(sorted(known)[:MAX_SHOWN]) or "en"
        raise InvalidRequestError(f"the model hears no language {given!r:.66}; it knows {names}", param="language")

    def check_words(self) -> None:
        """UnsupportedError where nothing tells when words are said."""
        param = "timestamp_granularities"
        if not self.info.alignment_heads:
            why = "its generation_config.json names no alignment_heads of its own"
            raise UnsupportedError(f"the model tells no times of words: {why}", param=param)
        if self.num_stages > 1:
            raise UnsupportedError("times of words need pipeline_parallel_size=1", param=param)

    def num_positions(self, piece: Piece) -> int:
        """Positions of the encoder's output that are the piece's own; what is behind them is silence."""
        return min(max(1, -(-len(piece.samples) // HOP) // SOUND_PER_POSITION), self.info.num_positions)

    def check_task(self, task: str) -> None:
        """UnsupportedError where the model does not do it."""
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
