"""Qwen2-Audio's sounds: one window, of which only the frames that are sound become tokens."""

from __future__ import annotations

from app.errors import InvalidRequestError
from app.media.audio.features import Floats
from app.media.audio.sound_processor import WhisperProcessor
from app.media.processors.base import Layout


class Qwen2AudioProcessor(WhisperProcessor):
    """A token is the mean of two of the encoder's positions, each of which is two frames."""

    def max_s(self, num_tokens: int) -> float:
        """See SoundProcessor."""
        mel = self.mel
        return min(mel.num_frames, 4 * num_tokens + 2) * mel.hop / mel.rate

    def layout(self, num_samples: int) -> Layout:
        """See SoundProcessor."""
        mel = self.mel
        frames = -(-num_samples // mel.hop)
        if frames > mel.num_frames:
            raise InvalidRequestError(f"lasts {num_samples / mel.rate:.2f} s; the model hears {mel.seconds:g} s")
        tokens = ((frames - 1) // 2 + 1) // 2
        if not tokens:
            raise InvalidRequestError(f"lasts {num_samples / mel.rate:.4f} s, which is too short for the model")
        return Layout((num_samples, 1), (1, 1, frames), ((self.placeholder, tokens),))

    def windows(self, features: Floats) -> Floats:
        """See SoundProcessor."""
        return features
