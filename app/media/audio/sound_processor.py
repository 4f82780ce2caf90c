"""The contract of processors of sounds: how many tokens one is, and what the model's encoder reads of it; and what
those of Whisper's features have in common."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from app.checkpoints.fields.kinds import check, whole
from app.media.audio.features import FeatureSettings, Floats
from app.media.audio.mel import MelSettings
from app.media.processors.base import Layout, MediaProcessor, agree

_WIDTH = whole(1, 1 << 14)
_KINDS = {
    "feature_size": _WIDTH,
    "hop_length": _WIDTH,
    "n_fft": _WIDTH,
    "sampling_rate": whole(1, 1 << 20),
    "chunk_length": whole(1, 1 << 12),
}
_EARS = {"num_mel_bins": _WIDTH, "max_source_positions": _WIDTH}


class SoundProcessor(MediaProcessor):
    """That of sounds."""

    @property
    @abstractmethod
    def rate(self) -> int:
        """Samples a second of what it hears."""

    @abstractmethod
    def max_s(self, num_tokens: int) -> float:
        """Seconds of the longest sound that the model takes and that has at most so many tokens."""

    @abstractmethod
    def layout(self, num_samples: int) -> Layout:
        """Lays out a sound of so many samples; InvalidRequestError for one that the model does not take."""

    @abstractmethod
    def heard(self, layout: Layout) -> FeatureSettings:
        """Says how features of a whole sound are made."""

    @abstractmethod
    def windows(self, features: Floats) -> Floats:
        """The features that the encoder reads, in its own order, of those [mels, frames] of all of the sound."""


class WhisperProcessor(SoundProcessor):
    """That of Whisper's features, of which the encoder reads windows of one length."""

    @classmethod
    def settings_of(cls, own: Mapping[str, Any], hf: Mapping[str, Any]) -> dict[str, Any]:
        """See MediaProcessor."""
        ears: Mapping[str, Any] = hf["audio_config"]
        check(own, _KINDS, "the feature extractor")
        check(ears, _EARS, "config.json: audio_config")
        mels, positions = int(ears.get("num_mel_bins", 80)), int(ears.get("max_source_positions", 1500))
        found = MelSettings(
            int(own.get("sampling_rate", 16_000)),
            int(own.get("feature_size", mels)),
            2 * positions,
            int(own.get("n_fft", 400)),
            int(own.get("hop_length", 160)),
        )
        agree("feature_size", found.num_mels, "num_mel_bins", mels)
        window = None if "chunk_length" not in own else int(own["chunk_length"]) * found.rate // found.hop
        agree("chunk_length in frames", found.num_frames, "what preprocessor_config.json says", window)
        return {"mel": found.as_json()}

    @property
    def mel(self) -> MelSettings:
        """Says how a window is heard."""
        return MelSettings(**self.settings["mel"])

    @property
    def rate(self) -> int:
        """See SoundProcessor."""
        return self.mel.rate

    def heard(self, layout: Layout) -> FeatureSettings:
        """See SoundProcessor."""
        return replace(self.mel, num_frames=self.mel.num_frames * layout.grid[0])
