"""Audio Flamingo 3's sounds: windows of 30 seconds, each heard alone, of which only the frames that are sound become
tokens."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from app.checkpoints.fields.kinds import check, whole
from app.errors import CheckpointError, InvalidRequestError
from app.media.audio.features import FeatureSettings, Floats
from app.media.audio.mel import MelSettings
from app.media.audio.sound_processor import WhisperProcessor
from app.media.processors.base import Layout

_MAX_S = {"max_audio_len": whole(1, 3_600)}
_MOST_BYTES = 1 << 28  # of the features of the longest sound: those of an hour and 128 mels are 184 MB


class AudioFlamingoProcessor(WhisperProcessor):
    """A token is the mean of two of the encoder's positions, each of which is two frames."""

    @classmethod
    def settings_of(cls, own: Mapping[str, Any], hf: Mapping[str, Any]) -> dict[str, Any]:
        """See MediaProcessor."""
        check(own, _MAX_S, "the processor")
        settings = super().settings_of(own, hf)
        if settings["mel"]["num_frames"] < 4:
            raise CheckpointError("config.json: audio_config: max_source_positions=1 are no token", param="model")
        mel, most_s = MelSettings(**settings["mel"]), int(own.get("max_audio_len", 600))
        num_bytes = 4 * mel.num_mels * mel.num_frames * math.ceil(most_s / mel.seconds)
        if num_bytes > _MOST_BYTES:
            what = f"max_audio_len={most_s} are {num_bytes} bytes of features; at most {_MOST_BYTES}"
            raise CheckpointError(f"the processor: {what}", param="model")
        return settings | {"max_s": most_s}

    def max_s(self, num_tokens: int) -> float:
        """See SoundProcessor."""
        mel = self.mel
        full, rest = divmod(num_tokens, mel.num_frames // 4)
        return min(float(self.settings["max_s"]), (full * mel.num_frames + 4 * rest + 2) * mel.hop / mel.rate)

    def layout(self, num_samples: int) -> Layout:
        """See SoundProcessor."""
        mel, most_s = self.mel, int(self.settings["max_s"])
        if num_samples > most_s * mel.rate:
            raise InvalidRequestError(f"lasts {num_samples / mel.rate:.2f} s; the model hears {most_s} s")
        frames = -(-num_samples // mel.hop)
        full, rest = divmod(frames, mel.num_frames)
        tokens = full * (mel.num_frames // 4) + ((rest - 1) // 2 + 1) // 2
        if not tokens:
            raise InvalidRequestError(f"lasts {num_samples / mel.rate:.4f} s, which is too short for the model")
        return Layout((num_samples, 1), (full + bool(rest), 1, frames), ((self.placeholder, tokens),))

    def heard(self, layout: Layout) -> FeatureSettings:
        """See SoundProcessor."""
        count = layout.grid[0]
        return replace(self.mel, num_frames=self.mel.num_frames * count, num_windows=count)

    def windows(self, features: Floats) -> Floats:
        """[mels, windows * frames] -> [windows, mels, frames]."""
        apart = features.reshape(len(features), -1, self.mel.num_frames)
        return np.ascontiguousarray(apart.transpose(1, 0, 2))
