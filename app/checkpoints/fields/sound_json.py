"""The fields of `audio_config` in config.json that encoders of sound read, with kinds and ranges. No torch (I8)."""

from __future__ import annotations

from collections.abc import Mapping

from app.checkpoints.fields.kinds import FLAG, TEXT, Kind, number, several, whole

_SIZE, _LAYERS = whole(1, 1 << 16), whole(1, 1 << 10)

SOUND_FIELDS: Mapping[str, Kind] = {
    **dict.fromkeys(("d_model", "hidden_size", "encoder_ffn_dim", "intermediate_size"), _SIZE),
    **dict.fromkeys(("encoder_layers", "num_hidden_layers", "encoder_attention_heads"), _LAYERS),
    **dict.fromkeys(("num_attention_heads", "num_mel_bins"), _LAYERS),
    **dict.fromkeys(("max_source_positions", "output_dim", "downsample_hidden_size", "n_window_infer"), _SIZE),
    "n_window": whole(1, 1 << 12),
    **dict.fromkeys(("activation_function", "projector_hidden_act", "model_type"), TEXT),
    "scale_embedding": FLAG,
    # Fields of Gemma 3n.
    **dict.fromkeys(("input_feat_size", "conf_num_hidden_layers", "conf_num_attention_heads"), _LAYERS),
    **dict.fromkeys(("conf_conv_kernel_size", "conf_attention_chunk_size"), whole(1, 1 << 8)),
    **{"conf_attention_context_left": whole(1, 1 << 8), "conf_attention_context_right": whole(0, 1 << 8)},
    **{"conf_attention_logit_cap": number(above=0, most=1e38), "conf_residual_weight": number(0, 1e3)},
    **{"conf_reduction_factor": whole(1, 16), "sscp_conv_group_norm_eps": number(above=0, most=1)},
    "sscp_conv_channel_size": several(whole(1, 1 << 12), 2, 2),
    **dict.fromkeys(("sscp_conv_kernel_size", "sscp_conv_stride_size"), several(several(whole(1, 8), 2, 2), 2, 2)),
    # Fields of Gemma 4.
    "subsampling_conv_channels": several(whole(4, 1 << 12), 2, 2),
    **dict.fromkeys(("conv_kernel_size", "attention_chunk_size"), whole(1, 1 << 8)),
    **{"attention_context_left": whole(2, 1 << 8), "attention_context_right": whole(0, 1 << 8)},
    **dict.fromkeys(("attention_logit_cap", "gradient_clipping"), number(above=0, most=1e38)),
    **{"residual_weight": number(0, 1e3), "rms_norm_eps": number(above=0, most=1)},
    **{"use_clipped_linears": FLAG, "hidden_act": TEXT, "output_proj_dims": _SIZE},
}
