"""The fields of `vision_config` in config.json that encoders read, each with its kind and range. No torch (I8)."""

from __future__ import annotations

from collections.abc import Mapping

from app.checkpoints.fields.kinds import FLAG, TEXT, Kind, either, number, several, whole

_SIZE, _COUNT, _LAYER = whole(1, 1 << 16), whole(0, 1 << 16), whole(-(1 << 10), 1 << 10)
_SIDE = either(whole(1, 1 << 14), several(whole(1, 1 << 14), 2, 2))

VISION_FIELDS: Mapping[str, Kind] = {
    **dict.fromkeys(("hidden_size", "embed_dim", "intermediate_size", "out_hidden_size"), _SIZE),
    **dict.fromkeys(
        ("num_attention_heads", "num_key_value_heads", "num_heads", "in_channels", "num_channels", "in_chans"), _SIZE
    ),
    **dict.fromkeys(("projector_input_dim", "projector_output_dim", "vision_output_dim"), _SIZE),
    "pixel_shuffle_ratio": number(above=0.06, most=1),
    **dict.fromkeys(("depth", "num_hidden_layers", "vt_num_hidden_layers", "head_dim"), whole(1, 1 << 10)),
    **dict.fromkeys(("vt_hidden_size", "vt_intermediate_size", "vt_num_attention_heads"), _SIZE),
    **dict.fromkeys(
        ("pos_emb_height", "pos_emb_width", "init_pos_emb_height", "init_pos_emb_width"), whole(1, 1 << 10)
    ),
    "merge_kernel_size": either(whole(1, 16), several(whole(1, 16), 2, 2)),
    **dict.fromkeys(("spatial_merge_size", "temporal_patch_size", "scale_factor", "pooling_kernel_size"), whole(1, 16)),
    **dict.fromkeys(("patch_size", "image_size", "crop_size"), _SIDE),
    "feature_layer": _LAYER,
    **dict.fromkeys(
        ("window_size", "num_position_embeddings", "num_patches", "position_embedding_size", "projection_dim"), _COUNT
    ),
    **dict.fromkeys(("fullatt_block_indexes", "deepstack_visual_indexes"), several(_LAYER, 1 << 10)),
    **dict.fromkeys(("layer_norm_eps", "rms_norm_eps"), number(above=0, most=1)),
    **dict.fromkeys(("rope_theta", "tokens_per_second", "mlp_ratio"), number(above=0, most=1e9)),
    **dict.fromkeys(("hidden_act", "hidden_activation", "model_type", "norm_type", "architecture"), TEXT),
    **dict.fromkeys(("attention_bias", "use_qk_norm", "use_mean_pooling", "vision_use_head"), FLAG),
    **dict.fromkeys(("use_absolute_position_embeddings", "use_mask_token", "use_clipped_linears", "standardize"), FLAG),
}
# Those beside it that join an encoder and a text.
JOINT_FIELDS: Mapping[str, Kind] = {
    "vision_feature_layer": either(_LAYER, several(_LAYER, 64)),
    **dict.fromkeys(("vision_feature_select_strategy", "projector_hidden_act", "vision_aspect_ratio"), TEXT),
    **dict.fromkeys(("multimodal_projector_bias", "projector_bias", "projector_use_layernorm"), FLAG),
    **dict.fromkeys(("scale_factor", "spatial_merge_size", "downsample_factor"), whole(1, 16)),
    **dict.fromkeys(("projector_hidden_size", "alignment_intermediate_size"), _SIZE),
    "adapter_layer_norm_eps": number(above=0, most=1),
    "downsample_ratio": number(above=0.06, most=1),
    "mm_tokens_per_image": _SIZE,
    "position_id_per_seconds": number(above=0, most=1e4),
}
