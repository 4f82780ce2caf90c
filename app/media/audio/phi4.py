"""Sounds of Phi-4-multimodal: eight frames of which become a token."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from app.checkpoints.fields.kinds import check, number, whole
from app.errors import InvalidRequestError
from app.media.audio.features import FeatureSettings, Floats
from app.media.audio.framed_mel import FramedMelSettings
from app.media.audio.sound_processor import SoundProcessor
from app.media.processors.base import Layout, agree

_WIDTH = whole(1, 1 << 14)
_KINDS = {
    **dict.fromkeys(("feature_size", "hop_length", "n_fft", "win_length"), _WIDTH),
    **dict.fromkeys(("audio_compression_rate", "audio_downsample_rate", "audio_feat_stride"), whole(1, 1 << 10)),
    **{"sampling_rate": whole(1000, 1 << 18), "preemphasis": number(0, 1)},
    **dict.fromkeys(("mel_min_frequency", "mel_max_frequency"), number(0, 1e5)),
}
FRAMES_EACH = 8  # of a token
_SCALE = 32_768.0


class Phi4Sounds(SoundProcessor):
    """Prepares as transformers' Phi4MultimodalFeatureExtractor does a sound alone."""

    @classmethod
    def settings_of(cls, own: Mapping[str, Any], hf: Mapping[str, Any]) -> dict[str, Any]:
        """See MediaProcessor."""
        check(own, _KINDS, "the feature extractor")
        ears: Mapping[str, Any] = hf["audio_config"]
        check(ears, {"input_size": _WIDTH, "time_reduction": whole(1, 1 << 10)}, "config.json: audio_config")
        for name, fixed in (("audio_downsample_rate", 1), ("audio_feat_stride", 1)):
            agree(name, own.get(name, fixed), "what is supported", fixed)
        agree("audio_compression_rate", own.get("audio_compression_rate", FRAMES_EACH), "time_reduction", FRAMES_EACH)
        agree("time_reduction", ears.get("time_reduction", FRAMES_EACH), "what is supported", FRAMES_EACH)
        mels = int(ears.get("input_size", 80))
        mel = FramedMelSettings(
            rate=int(own.get("sampling_rate", 16_000)),
            num_mels=int(own.get("feature_size", mels)),
            num_frames=1,
            frame=int(own.get("win_length", 400)),
            hop=int(own.get("hop_length", 160)),
            fft=int(own.get("n_fft", 512)),
            low=float(own.get("mel_min_frequency", 0)),
            high=float(own.get("mel_max_frequency", 7690)),
            emphasis=float(own.get("preemphasis", 0.97)),
            floor=1.0,
            power=2,
            scale=_SCALE,
            is_kaldi=True,
        )
        agree("feature_size", mel.num_mels, "input_size", mels)
        agree("win_length within n_fft", mel.frame <= mel.fft, "it", True)
        return {"mel": mel.as_json()}

    @property
    def mel(self) -> FramedMelSettings:
        """Says how a frame is heard."""
        return FramedMelSettings(**self.settings["mel"])

    @property
    def rate(self) -> int:
        """See SoundProcessor."""
        return self.mel.rate

    def max_s(self, num_tokens: int) -> float:
        """See SoundProcessor."""
        mel = self.mel
        return ((FRAMES_EACH * num_tokens - 1) * mel.hop + mel.frame) / mel.rate

    def layout(self, num_samples: int) -> Layout:
        """See SoundProcessor."""
        mel = self.mel
        frames = (num_samples - mel.frame) // mel.hop + 1
        if frames < 1:
            raise InvalidRequestError(f"lasts {num_samples / mel.rate:.4f} s, which is too short for the model")
        tokens = -(-frames // FRAMES_EACH)
        return Layout((num_samples, 1), (1, 1, frames), ((self.placeholder, tokens),))

    def heard(self, layout: Layout) -> FeatureSettings:
        """See SoundProcessor."""
        return replace(self.mel, num_frames=layout.grid[2])

    def windows(self, features: Floats) -> Floats:
        """See SoundProcessor."""
        return features
