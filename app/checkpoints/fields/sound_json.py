"""The fields of `audio_config` in config.json that encoders of sound read, with kinds and ranges. No torch (I8)."""

from __future__ import annotations

from collections.abc import Mapping

from app.checkpoints.fields.kinds import FLAG, TEXT, Kind, whole

_SIZE, _LAYERS = whole(1, 1 << 16), whole(1, 1 << 10)

SOUND_FIELDS: Mapping[str, Kind] = {
    **dict.fromkeys(("d_model", "hidden_size", "encoder_ffn_dim", "intermediate_size"), _SIZE),
    **dict.fromkeys(("encoder_layers", "num_hidden_layers", "encoder_attention_heads"), _LAYERS),
    **dict.fromkeys(("num_attention_heads", "num_mel_bins"), _LAYERS),
    "max_source_positions": _SIZE,
    **dict.fromkeys(("activation_function", "projector_hidden_act", "model_type"), TEXT),
    "scale_embedding": FLAG,
}
