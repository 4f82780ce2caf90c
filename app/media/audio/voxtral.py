"""Voxtral's sounds: windows of 30 seconds, each of which becomes as many tokens, silence at the end included."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from app.checkpoints.fields.kinds import check, whole
from app.errors import CheckpointError
from app.media.audio.features import Floats
from app.media.audio.sound_processor import WhisperProcessor
from app.media.processors.base import Layout

_SIZE = whole(1, 1 << 20)


class VoxtralProcessor(WhisperProcessor):
    """Positions of a window stand side by side in groups, as many as make a token's width."""

    @classmethod
    def settings_of(cls, own: Mapping[str, Any], hf: Mapping[str, Any]) -> dict[str, Any]:
        """See MediaProcessor."""
        settings, ears = super().settings_of(own, hf), hf["audio_config"]
        sizes = {name: ears.get(name) for name in ("hidden_size", "intermediate_size")}
        check(sizes, dict.fromkeys(sizes, _SIZE), "config.json: audio_config")
        if None in sizes.values():
            raise CheckpointError("config.json: audio_config lacks hidden_size or intermediate_size", param="model")
        positions = settings["mel"]["num_frames"] // 2
        tokens, rest = divmod(positions * sizes["hidden_size"], sizes["intermediate_size"])
        if rest or not tokens:
            raise CheckpointError(
                f"config.json: audio_config: {positions} positions of hidden_size={sizes['hidden_size']} are no whole "
                f"number of tokens of intermediate_size={sizes['intermediate_size']}",
                param="model",
            )
        return settings | {"tokens_each": tokens}

    def max_s(self, num_tokens: int) -> float:
        """See SoundProcessor."""
        return num_tokens // int(self.settings["tokens_each"]) * self.mel.seconds

    def layout(self, num_samples: int) -> Layout:
        """See SoundProcessor."""
        mel = self.mel
        count = max(1, -(-num_samples // mel.num_samples))
        tokens = count * int(self.settings["tokens_each"])
        return Layout((num_samples, 1), (count, 1, mel.num_frames), ((self.placeholder, tokens),))

    def windows(self, features: Floats) -> Floats:
        """[mels, windows * frames] -> [windows, mels, frames]."""
        apart = features.reshape(len(features), -1, self.mel.num_frames)
        return np.ascontiguousarray(apart.transpose(1, 0, 2))
