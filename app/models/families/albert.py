"""ALBERT (paraphrase-albert): BERT whose layers share their weights, behind tables that are narrower than they."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import nn

from app.checkpoints.fields.kinds import expect, whole
from app.checkpoints.model_info import ModelInfo
from app.errors import UnsupportedError
from app.layers.context import BuildContext, ForwardContext
from app.models.encoder import Encoder, EncoderClassifier, EncoderModel, EncoderSettings
from app.models.families.bert import BERT_NAMES


class RepeatedEncoder(Encoder):
    """Goes through each of its layers several times before the next one."""

    def __init__(self, ctx: BuildContext, settings: EncoderSettings, num_groups: int) -> None:
        super().__init__(ctx, replace(settings, num_layers=num_groups))
        self.places = [i * num_groups // settings.num_layers for i in range(settings.num_layers)]

    def forward(self, input_ids: torch.Tensor, ctx: ForwardContext) -> torch.Tensor:
        """int [T] -> hidden states [T, C]."""
        x = self.embeddings(input_ids, ctx)
        for place in self.places:
            x = self.layers[place](x, ctx)
        return x  # type: ignore[no-any-return]


class AlbertModel(EncoderModel):
    """ALBERT without a head."""

    prefix = "albert."
    names = (
        (r"^encoder\.embedding_hidden_mapping_in\.", "embeddings.project."),
        (r"^encoder\.albert_layer_groups\.(\d+)\.albert_layers\.0\.", r"layers.\1."),
        (r"\.attention\.LayerNorm\.", ".attention_norm."),
        (r"\.attention\.(q|k|v)(uery|ey|alue)\.", r".attention.\1_proj."),
        (r"\.attention\.dense\.", ".attention.o_proj."),
        (r"\.ffn\.", ".mlp.up_proj."),
        (r"\.ffn_output\.", ".mlp.down_proj."),
        (r"\.full_layer_layer_norm\.", ".output_norm."),
        *BERT_NAMES,
    )

    @classmethod
    def settings(cls, info: ModelInfo) -> EncoderSettings:
        """GELU in its tanh form, and tables of 128 columns, where config.json says nothing."""
        hf = {"hidden_act": "gelu_new", "embedding_size": 128, **info.hf_config}
        return EncoderSettings.from_info(replace(info, hf_config=hf))

    def make_encoder(self, ctx: BuildContext, info: ModelInfo) -> nn.Module:
        """An encoder of as many layers as there are groups. UnsupportedError for groups of several."""
        hf, settings = info.hf_config, self.settings(info)
        groups = hf.get("num_hidden_groups", 1)
        expect(groups, whole(1, settings.num_layers), f"{info.directory}/config.json: num_hidden_groups")
        if hf.get("inner_group_num", 1) != 1:
            what = f"inner_group_num={hf['inner_group_num']!r:.80}"
            raise UnsupportedError(f"{info.architecture} with {what} is not supported", param="model")
        return RepeatedEncoder(ctx, settings, int(groups))


class AlbertForSequenceClassification(EncoderClassifier, AlbertModel):
    """tanh(pooler(first token)), then the classifier."""

    head_names = ("albert.pooler.", "classifier.")
