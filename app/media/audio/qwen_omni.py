"""Sounds of Qwen2.5-Omni, Qwen3-Omni and Qwen3-ASR: of any length, in chunks that the encoder reads one by one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

from app.checkpoints.fields.kinds import check, whole
from app.errors import InvalidRequestError, UnsupportedError
from app.media.audio.features import FeatureSettings, Floats
from app.media.audio.mel import MelSettings
from app.media.audio.sound_processor import SoundProcessor
from app.media.processors.base import Layout, agree

_WIDTH = whole(1, 1 << 14)
_KINDS = {
    **dict.fromkeys(("feature_size", "hop_length", "n_fft"), _WIDTH),
    **{"sampling_rate": whole(1, 1 << 20), "chunk_length": whole(1, 1 << 12), "min_length": whole(0, 1 << 20)},
}
_EARS = {"num_mel_bins": _WIDTH, "n_window": whole(1, 1 << 12)}
CHUNK_TOKENS = 13  # of a whole chunk of Qwen3-Omni's
_CHUNK_FRAMES = 100


def halved(frames: int, times: int) -> int:
    """Frames that are left behind so many convolutions that keep every second one."""
    for _ in range(times):
        frames = -(-frames // 2)
    return frames


class OmniSounds(SoundProcessor):
    """Prepares features of all of a sound, as long as it is, for all of them."""

    least_samples: ClassVar[int] = 0  # of a sound; a shorter one has silence behind it, where files say nothing

    @classmethod
    def settings_of(cls, own: Mapping[str, Any], hf: Mapping[str, Any]) -> dict[str, Any]:
        """See MediaProcessor."""
        ears: Mapping[str, Any] = hf["audio_config"]
        check(own, _KINDS, "the feature extractor")
        check(ears, _EARS, "config.json: audio_config")
        mels = int(ears.get("num_mel_bins", 128))
        found = MelSettings(
            int(own.get("sampling_rate", 16_000)),
            int(own.get("feature_size", mels)),
            1,
            int(own.get("n_fft", 400)),
            int(own.get("hop_length", 160)),
        )
        agree("feature_size", found.num_mels, "num_mel_bins", mels)
        own_mel = replace(found, least=int(own.get("min_length", cls.least_samples)))
        return {"mel": own_mel.as_json(), "longest_s": int(own.get("chunk_length", 300))}

    @property
    def mel(self) -> MelSettings:
        """Says how a sound is heard."""
        return MelSettings(**self.settings["mel"])

    @property
    def rate(self) -> int:
        """See SoundProcessor."""
        return self.mel.rate

    def _laid_out(self, num_samples: int, frames: int, tokens: int) -> Layout:
        if tokens < 1 or num_samples <= self.mel.fft // 2:
            raise InvalidRequestError(f"lasts {num_samples / self.rate:.4f} s, which is too short for the model")
        return Layout((num_samples, 1), (1, 1, frames), ((self.placeholder, tokens),))


class Qwen2_5OmniSounds(OmniSounds):
    """A token is the mean of two positions, each of which is two frames; behind the sound there is silence."""

    def max_s(self, num_tokens: int) -> float:
        """See SoundProcessor."""
        mel = self.mel
        return min(float(self.settings["longest_s"]), (4 * num_tokens + 2) * mel.hop / mel.rate)

    def layout(self, num_samples: int) -> Layout:
        """See SoundProcessor."""
        frames = -(-num_samples // self.mel.hop)
        if num_samples > self.settings["longest_s"] * self.rate:
            longest = self.settings["longest_s"]
            raise InvalidRequestError(f"lasts {num_samples / self.rate:.2f} s; the model hears {longest} s")
        return self._laid_out(num_samples, frames, halved(frames, 1) // 2)

    def heard(self, layout: Layout) -> FeatureSettings:
        """See SoundProcessor: with the frames behind it that its last ones see."""
        return replace(self.mel, num_frames=layout.grid[2] + self._behind, least=None)

    def windows(self, features: Floats) -> Floats:
        """See SoundProcessor."""
        return features[:, : features.shape[1] - self._behind]

    @property
    def _behind(self) -> int:
        return -(-self.mel.fft // self.mel.hop)


class Qwen3OmniSounds(OmniSounds):
    """A whole chunk, a second, is 13 tokens; behind the sound there is nothing."""

    @classmethod
    def settings_of(cls, own: Mapping[str, Any], hf: Mapping[str, Any]) -> dict[str, Any]:
        """See MediaProcessor."""
        found = super().settings_of(own, hf)
        if (window := hf["audio_config"].get("n_window", _CHUNK_FRAMES // 2)) != _CHUNK_FRAMES // 2:
            raise UnsupportedError(f"config.json: audio_config.n_window={window}; 50 is supported", param="model")
        return found

    def max_s(self, num_tokens: int) -> float:
        """See SoundProcessor."""
        mel = self.mel
        whole_chunks, rest = divmod(num_tokens, CHUNK_TOKENS)
        frames = whole_chunks * _CHUNK_FRAMES + 8 * rest  # and less than one more, which is not heard
        return ((frames + 1) * mel.hop - 1) / mel.rate

    def layout(self, num_samples: int) -> Layout:
        """See SoundProcessor."""
        num_samples = max(num_samples, self.mel.least or 0)
        frames = num_samples // self.mel.hop
        whole_chunks, rest = divmod(frames, _CHUNK_FRAMES)
        tokens = whole_chunks * CHUNK_TOKENS + halved(rest, 3)
        return self._laid_out(num_samples, frames, tokens)

    def heard(self, layout: Layout) -> FeatureSettings:
        """See SoundProcessor."""
        return replace(self.mel, num_frames=layout.grid[2])

    def windows(self, features: Floats) -> Floats:
        """See SoundProcessor."""
        return features


class Qwen3AsrSounds(Qwen3OmniSounds):
    """The same; a sound lasts at least half a second."""

    least_samples = 8_000
