"""Reads from a model's config.json what its encoder takes, where a decoder attends to an encoder's output."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

import numpy as np

from app.checkpoints.fields.kinds import check, whole
from app.checkpoints.model_info import ModelInfo
from app.errors import CheckpointError, InvalidRequestError, PromptTooLongError, UnsupportedError
from app.records.encoder_input import INPUT_TYPES, EncoderInput, EncoderKind
from app.records.media import DIGEST_BYTES

_ID = whole(0, 1 << 30)
SOUND_PER_POSITION = 2  # frames of a sound that become one position


@dataclass(slots=True, frozen=True)
class EncoderInfo:
    """One model's encoder."""

    kind: EncoderKind
    num_positions: int  # most of an input
    shape: tuple[int, ...] = ()  # of the values, always; (): a text of any length
    start: tuple[int, ...] = ()  # the decoder's prompt behind a text

    @classmethod
    def of(cls, info: ModelInfo) -> EncoderInfo | None:
        """Read it; None: no decoder of the model attends to an encoder."""
        read = _FAMILIES.get(str(info.hf_config.get("model_type")))
        return None if read is None or not info.is_causal else read({**info.hf_config, **info.generation_config})

    def of_text(self, token_ids: Sequence[int], cache_root: bytes = b"") -> EncoderInput:
        """A text for the encoder; `cache_root`: whose it is, and so its identity. PromptTooLongError where it is too
        long."""
        if len(token_ids) > self.num_positions:
            raise PromptTooLongError(
                f"prompt: the model's encoder reads {self.num_positions} tokens, but the prompt has {len(token_ids)}",
                param="prompt",
            )
        values = np.asarray(token_ids, INPUT_TYPES["text"]).tobytes()
        whose = len(cache_root).to_bytes(4, "little") + cache_root
        digest = blake2b(whose + values, digest_size=DIGEST_BYTES, person=b"encoder text").digest()
        return EncoderInput("text", digest, len(token_ids), (len(token_ids),), values)

    def silence(self) -> EncoderInput | None:
        """A sound without a sound, for a request of the replica's own; None: the encoder reads text."""
        if self.kind != "audio":
            return None
        values = np.zeros(self.shape, INPUT_TYPES["audio"]).tobytes()
        return EncoderInput("audio", bytes(DIGEST_BYTES), self.num_positions, self.shape, values)

    def check(self, given: EncoderInput) -> None:
        """InvalidRequestError for an input that the encoder does not take."""
        if given.kind != self.kind:
            raise UnsupportedError(f"the model's encoder reads {self.kind}, not {given.kind}", param="model")
        expected = self.shape or (given.length,)
        length = self.num_positions if self.shape else given.length
        if given.shape != expected or given.length != length or not 0 < length <= self.num_positions:
            raise InvalidRequestError(
                f"input: the encoder's input has {given.length} positions and shape {list(given.shape)}, not "
                f"{length} and {list(expected)}, of at most {self.num_positions} positions",
                param="input",
            )
        size = INPUT_TYPES[given.kind].itemsize
        if len(given.values) != math.prod(given.shape) * size or len(given.digest) != DIGEST_BYTES:
            raise InvalidRequestError("input: the encoder's values or digest are cut off", param="input")
        if given.kind == "audio" and not np.isfinite(given.array()).all():
            raise InvalidRequestError("input: the sound holds numbers that are not finite", param="input")


def _whisper(hf: Mapping[str, Any]) -> EncoderInfo:
    positions = int(hf.get("max_source_positions", 1500))
    return EncoderInfo("audio", positions, (int(hf.get("num_mel_bins", 80)), positions * SOUND_PER_POSITION))


def _bart(hf: Mapping[str, Any]) -> EncoderInfo:
    return _of_text(hf, "max_position_embeddings", 1024)


def _t5(hf: Mapping[str, Any]) -> EncoderInfo:
    return _of_text(hf, "n_positions", 512)


def _of_text(hf: Mapping[str, Any], length: str, usual: int) -> EncoderInfo:
    """`length`: the field that says how long a text may be."""
    start = (hf.get("decoder_start_token_id"), hf.get("forced_bos_token_id"))
    check({"start": start[0], "bos": start[1]}, {"start": _ID, "bos": _ID}, "config.json: decoder_start_token_id")
    if start[0] is None:
        raise CheckpointError("config.json is not usable: it lacks decoder_start_token_id", param="model")
    own = tuple(int(token) for token in start if token is not None)
    return EncoderInfo("text", int(hf.get(length, usual)), start=own)


_FAMILIES: Mapping[str, Callable[[Mapping[str, Any]], EncoderInfo]] = {
    **dict.fromkeys(("bart", "m2m_100", "marian", "mbart", "pegasus"), _bart),
    **dict.fromkeys(("t5", "mt5"), _t5),
    "whisper": _whisper,
}
