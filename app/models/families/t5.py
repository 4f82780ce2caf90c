"""T5's encoder (sentence-t5, GTR, Instructor): relative position bias instead of positions, RMS norms, scores that are
not scaled."""

from __future__ import annotations

from torch import nn

from app.checkpoints.model_info import ModelInfo
from app.layers.attention import AttentionSettings
from app.layers.context import BuildContext
from app.layers.encoder_attention import EncoderAttention
from app.layers.mlp import GatedMLP
from app.layers.norm import RMSNorm
from app.layers.plain_mlp import PlainMLP
from app.layers.relative_bias import RelativeBias
from app.layers.vocab import VocabEmbedding
from app.models.encoder import EncoderModel
from app.models.pre_norm_encoder import PreNormEncoder, PreNormEncoderLayer

_GATED = "gated-"


class T5EncoderModel(EncoderModel):
    """The encoder; a checkpoint's decoder is left out."""

    prefix = ""
    roots = ("shared.", "encoder.block.", "encoder.final_layer_norm.")
    names = (
        (r"^shared\.", "word_embeddings."),
        (r"^encoder\.", ""),
        (r"^block\.0\.layer\.0\.SelfAttention\.relative_attention_bias\.", "shared."),
        (r"^block\.(\d+)\.layer\.", r"layers.\1."),
        (r"\.0\.SelfAttention\.(q|k|v|o)\.", r".attention.\1_proj."),
        (r"\.0\.layer_norm\.", ".attention_norm."),
        (r"\.1\.layer_norm\.", ".mlp_norm."),
        (r"\.1\.DenseReluDense\.wi_0\.", ".mlp.gate_proj."),
        (r"\.1\.DenseReluDense\.(wi_1|wi)\.", ".mlp.up_proj."),
        (r"\.1\.DenseReluDense\.wo\.", ".mlp.down_proj."),
        (r"^final_layer_norm\.", "final_norm."),
    )

    def make_encoder(self, ctx: BuildContext, info: ModelInfo) -> nn.Module:
        """A head's width is a number of its own."""
        hf, size = info.hf_config, info.hidden_size
        eps = float(hf.get("layer_norm_epsilon", 1e-6))
        attention = AttentionSettings(
            hidden_size=size,
            num_heads=info.num_heads,
            num_kv_heads=info.num_heads,
            head_dim=int(hf["d_kv"]),
            qkv_bias=False,
            output_bias=False,
            norm_eps=eps,
            scale=1.0,
        )
        buckets = int(hf.get("relative_attention_num_buckets", 32))
        relative = RelativeBias(ctx, buckets, info.num_heads, int(hf.get("relative_attention_max_distance", 128)))
        layers = [
            PreNormEncoderLayer(
                RMSNorm(ctx, size, eps),
                EncoderAttention(ctx, attention, place, by_distance=relative),
                RMSNorm(ctx, size, eps),
                _mlp(ctx, info),
            )
            for place in range(info.num_layers)
        ]
        return PreNormEncoder(
            VocabEmbedding(ctx, info.vocab_size, size), None, layers, RMSNorm(ctx, size, eps), relative
        )


def _mlp(ctx: BuildContext, info: ModelInfo) -> GatedMLP | PlainMLP:
    made = GatedMLP if is_gated(info) else PlainMLP
    return made(ctx, info.hidden_size, info.intermediate_size, activation_of(info), False)


def is_gated(info: ModelInfo) -> bool:
    """True if the feed-forward layers have a gate."""
    return _kind_of(info).startswith(_GATED)


def activation_of(info: ModelInfo) -> str:
    """The function in the feed-forward layers: `gated-gelu` means the approximation by tanh."""
    kind = _kind_of(info)
    return "gelu_new" if kind == "gated-gelu" else kind.removeprefix(_GATED)


def _kind_of(info: ModelInfo) -> str:
    """`relu`, `gated-gelu`: the function, and whether there is a gate."""
    return str(info.hf_config.get("feed_forward_proj", "relu"))
