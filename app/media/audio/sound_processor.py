"""The contract of processors of sounds: how many tokens one is, and what the model's encoder reads of it."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import Any

from app.checkpoints.fields.kinds import check, whole
from app.media.audio.mel import Floats, MelSettings
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

    @abstractmethod
    def max_s(self, num_tokens: int) -> float:
        """Seconds of the longest sound that the model takes and that has at most so many tokens."""

    @abstractmethod
    def layout(self, num_samples: int) -> Layout:
        """Lays out a sound of so many samples; InvalidRequestError for one that the model does not take."""

    @abstractmethod
    def windows(self, features: Floats) -> Floats:
        """The features that the encoder reads, in its own order, of those [mels, frames] of all windows."""
