"""Sounds of Gemma 3n and 4: at most half a minute, between two marks."""

from __future__ import annotations

from abc import abstractmethod
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
SOUND_TOKENS = 188  # of any sound of Gemma 3n
_HALVINGS = 2  # times that the encoder keeps every second frame
_MULTIPLE = 128  # of samples that Gemma 3n's extractor hears


class GemmaSounds(SoundProcessor):
    """Prepares as transformers' extractor of the family does; `usual` is what its files may leave out."""

    usual: ClassVar[Mapping[str, Any]]

    @classmethod
    def mel_of(cls, given: Mapping[str, Any]) -> FramedMelSettings:
        """Settings from the extractor's file."""
        check(given, _KINDS, "the feature extractor")
        own = {**cls.usual, **given}
        rate, emphasis = int(own.get("sampling_rate", 16_000)), float(own["preemphasis"])
        frame, hop = (round(rate * float(own[name]) / 1000) for name in ("frame_length_ms", "hop_length_ms"))
        for name, value in (
            ("dither", own.get("dither", 0.0) or 0.0),
            ("preemphasis_htk_flavor", bool(emphasis) and own.get("preemphasis_htk_flavor") is False),
        ):
            if value:
                raise UnsupportedError(f"the feature extractor: {name}={own[name]} is not supported", param="model")
        return FramedMelSettings(
            rate=rate,
            num_mels=int(own.get("feature_size", 128)),
            num_frames=1,
            frame=frame,
            hop=max(1, hop),
            fft=(1 << (frame - 1).bit_length()) * (2 if own["fft_overdrive"] else 1),
            low=float(own["min_frequency"]),
            high=float(own.get("max_frequency", rate / 2)),
            emphasis=emphasis,
            floor=float(own["mel_floor"]),
            scale=float(own.get("input_scale_factor", 1.0)),
            mean=tuple(own.get("per_bin_mean", ())),
            deviation=tuple(own.get("per_bin_stddev", ())),
        )

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

    @property
    def longest_s(self) -> float:
        """Seconds of the longest sound that the model hears."""
        return LONGEST_S

    def layout(self, num_samples: int) -> Layout:
        """See SoundProcessor. Frames are those that hear nothing behind the sound."""
        if num_samples > self.longest_s * self.rate:
            raise InvalidRequestError(f"lasts {num_samples / self.rate:.2f} s; the model hears {self.longest_s:g} s")
        frames = self.num_frames(num_samples)
        if frames < 1:
            raise InvalidRequestError(f"lasts {num_samples / self.rate:.4f} s, which is too short for the model")
        return Layout((num_samples, 1), (1, 1, frames), ((self.placeholder, self.num_tokens(frames)),))

    @abstractmethod
    def num_frames(self, num_samples: int) -> int:
        """Frames of a sound of so many samples."""

    @abstractmethod
    def num_tokens(self, num_frames: int) -> int:
        """Tokens of a sound of so many frames."""

    def heard(self, layout: Layout) -> FeatureSettings:
        """See SoundProcessor."""
        return replace(self.mel, num_frames=layout.grid[2])

    def windows(self, features: Floats) -> Floats:
        """See SoundProcessor."""
        return features


class Gemma4Sounds(GemmaSounds):
    """Four frames become a token."""

    usual: ClassVar[Mapping[str, Any]] = {
        **{"frame_length_ms": 20.0, "hop_length_ms": 10.0, "min_frequency": 0.0, "preemphasis": 0.0},
        **{"fft_overdrive": False, "mel_floor": 1e-3},
    }
    tokens: ClassVar[Mapping[str, tuple[str, int]]] = {
        "begin": ("boa_token_id", 256_000),
        "end": ("eoa_token_index", 258_883),
    }

    @classmethod
    def settings_of(cls, own: Mapping[str, Any], hf: Mapping[str, Any]) -> dict[str, Any]:
        """See MediaProcessor."""
        mel = cls.mel_of(own)
        return {"mel": replace(mel, silence=mel.frame // 2, is_floor_added=True).as_json()}

    def max_s(self, num_tokens: int) -> float:
        """See SoundProcessor."""
        mel = self.mel
        return min(LONGEST_S, (4 * num_tokens * mel.hop + mel.frame - mel.silence) / mel.rate)

    def num_frames(self, num_samples: int) -> int:
        """See GemmaSounds."""
        mel = self.mel
        return (num_samples - 1 - (mel.frame - mel.silence)) // mel.hop + 1

    def num_tokens(self, num_frames: int) -> int:
        """See GemmaSounds."""
        return halved(num_frames, _HALVINGS)


class Gemma3nSounds(GemmaSounds):
    """Any sound has as many tokens as the longest."""

    usual: ClassVar[Mapping[str, Any]] = {
        **{"frame_length_ms": 32.0, "hop_length_ms": 10.0, "min_frequency": 125.0, "max_frequency": 7600.0},
        **{"preemphasis": 0.97, "fft_overdrive": True, "mel_floor": 1e-5},
    }
    tokens: ClassVar[Mapping[str, tuple[str, int]]] = {
        "begin": ("boa_token_id", 256_000),
        "end": ("eoa_token_id", 262_272),
    }

    @classmethod
    def settings_of(cls, own: Mapping[str, Any], hf: Mapping[str, Any]) -> dict[str, Any]:
        """See MediaProcessor."""
        ears = hf.get("audio_config") or {}
        check(ears, {"conf_reduction_factor": whole(1, 16)}, "config.json: audio_config")
        check(hf, {"audio_soft_tokens_per_image": whole(1, 1 << 12)}, "config.json")
        each = int(hf.get("audio_soft_tokens_per_image") or SOUND_TOKENS)
        most = 4 * int(ears.get("conf_reduction_factor", 4)) * each  # frames
        return {"mel": cls.mel_of(own).as_json(), "tokens_each": each, "most_frames": most}

    @property
    def around(self) -> tuple[str, str]:
        """See MediaProcessor."""
        begin, end = super().around
        return f"\n\n{begin}", f"{end}\n\n"

    @property
    def longest_s(self) -> float:
        """See GemmaSounds."""
        mel = self.mel
        samples = (self.settings["most_frames"] * mel.hop + mel.frame) // _MULTIPLE * _MULTIPLE
        return float(min(LONGEST_S, samples / mel.rate))

    def max_s(self, num_tokens: int) -> float:
        """See SoundProcessor."""
        return self.longest_s if num_tokens >= self.settings["tokens_each"] else 0.0

    def num_frames(self, num_samples: int) -> int:
        """See GemmaSounds; the extractor wants a sample behind the last frame."""
        padded = -(-num_samples // _MULTIPLE) * _MULTIPLE
        return (padded - self.mel.frame - 1) // self.mel.hop + 1

    def num_tokens(self, num_frames: int) -> int:
        """See GemmaSounds."""
        return int(self.settings["tokens_each"])
