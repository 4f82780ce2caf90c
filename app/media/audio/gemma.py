"""Sounds of Gemma 4: at most half a minute, four frames of which become a token, between two marks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

from app.checkpoints.fields.kinds import FLAG, check, number, several, whole
from app.errors import InvalidRequestError, UnsupportedError
from app.media.audio.features import FeatureSettings, Floats
from app.media.audio.framed_mel import FramedMelSettings
from app.media.audio.qwen_omni import halved
from app.media.audio.sound_processor import SoundProcessor
from app.media.processors.base import Layout

_KINDS = {
    **{"feature_size": whole(1, 1 << 10), "sampling_rate": whole(1000, 1 << 18)},
    **dict.fromkeys(("frame_length_ms", "hop_length_ms"), number(above=0, most=1e3)),
    **dict.fromkeys(("min_frequency", "max_frequency"), number(0, 1e5)),
    **dict.fromkeys(("preemphasis", "dither", "mel_floor"), number(0, 1)),
    **{"preemphasis_htk_flavor": FLAG, "fft_overdrive": FLAG, "input_scale_factor": number(0, 1e6)},
    **dict.fromkeys(("per_bin_mean", "per_bin_stddev"), several(number(-1e6, 1e6), 1 << 10)),
}
LONGEST_S = 30.0
_HALVINGS = 2  # times that the encoder keeps every second frame


class Gemma4Sounds(SoundProcessor):
    """Prepares as transformers' Gemma4AudioFeatureExtractor does."""

    tokens: ClassVar[Mapping[str, tuple[str, int]]] = {
        "begin": ("boa_token_id", 256_000),
        "end": ("eoa_token_index", 258_883),
    }

    @classmethod
    def settings_of(cls, own: Mapping[str, Any], hf: Mapping[str, Any]) -> dict[str, Any]:
        """See MediaProcessor."""
        check(own, _KINDS, "the feature extractor")
        rate, scale = int(own.get("sampling_rate", 16_000)), float(own.get("input_scale_factor", 1.0))
        frame, hop = (
            round(rate * float(own.get(name, usual)) / 1000)
            for name, usual in (("frame_length_ms", 20.0), ("hop_length_ms", 10.0))
        )
        emphasis = float(own.get("preemphasis", 0.0))
        for name, value in (
            ("dither", own.get("dither", 0.0) or 0.0),
            ("preemphasis_htk_flavor", bool(emphasis) and own.get("preemphasis_htk_flavor") is False),
        ):
            if value:
                raise UnsupportedError(f"the feature extractor: {name}={own[name]} is not supported", param="model")
        fft = (1 << (frame - 1).bit_length()) * (2 if own.get("fft_overdrive") else 1)
        mel = FramedMelSettings(
            rate=rate,
            num_mels=int(own.get("feature_size", 128)),
            num_frames=1,
            frame=frame,
            hop=max(1, hop),
            fft=fft,
            low=float(own.get("min_frequency", 0.0)),
            high=float(own.get("max_frequency", rate / 2)),
            emphasis=emphasis,
            silence=frame // 2,
            floor=float(own.get("mel_floor", 1e-3)),
            is_floor_added=True,
            scale=scale,
            mean=tuple(own.get("per_bin_mean", ())),
            deviation=tuple(own.get("per_bin_stddev", ())),
        )
        return {"mel": mel.as_json()}

    @property
    def mel(self) -> FramedMelSettings:
        """Says how a frame is heard."""
        return FramedMelSettings(**self.settings["mel"])

    @property
    def around(self) -> tuple[str, str]:
        """See MediaProcessor."""
        return str(self.settings["begin"]), str(self.settings["end"])

    @property
    def rate(self) -> int:
        """See SoundProcessor."""
        return self.mel.rate

    def max_s(self, num_tokens: int) -> float:
        """See SoundProcessor."""
        mel = self.mel
        return min(LONGEST_S, (4 * num_tokens * mel.hop + mel.frame - mel.silence) / mel.rate)

    def layout(self, num_samples: int) -> Layout:
        """See SoundProcessor. Frames are those that hear nothing behind the sound."""
        if num_samples > LONGEST_S * self.rate:
            raise InvalidRequestError(f"lasts {num_samples / self.rate:.2f} s; the model hears {LONGEST_S:g} s")
        mel = self.mel
        frames = (num_samples - 1 - (mel.frame - mel.silence)) // mel.hop + 1
        if frames < 1:
            raise InvalidRequestError(f"lasts {num_samples / self.rate:.4f} s, which is too short for the model")
        tokens = halved(frames, _HALVINGS)
        return Layout((num_samples, 1), (1, 1, frames), ((self.placeholder, tokens),))

    def heard(self, layout: Layout) -> FeatureSettings:
        """See SoundProcessor."""
        return replace(self.mel, num_frames=layout.grid[2])

    def windows(self, features: Floats) -> Floats:
        """See SoundProcessor."""
        return features
