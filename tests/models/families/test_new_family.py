"""Families from outside of the tree that choose other blocks, one file and one line each: transformers is the judge."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel, StableLmConfig, Starcoder2Config
from transformers.models.stablelm.modeling_stablelm import StableLmForCausalLM
from transformers.models.starcoder2.modeling_starcoder2 import Starcoder2ForCausalLM

from app.models import MODELS
from tests.tiny_models import DEFAULTS, hf_greedy
from tests.worker.worker_driver import Driver, Run, greedy

STABLE = '''
from dataclasses import replace
from torch import nn
from app.layers.epilogue import PLAIN, AddNorm
from app.layers.layer_norm import LayerNorm
from app.models.blocks import Blocks
from app.models.decoder import CausalLM
from app.models.decoder_settings import DecoderSettings

class ParallelLayer(nn.Module):
    """x + attention(norm(x)) + mlp(norm(x)), with one norm."""
    def __init__(self, ctx, settings, place, blocks):
        super().__init__()
        self.input_layernorm = blocks.norm(ctx, settings, True)
        self.self_attn = blocks.attention(ctx, settings, place)
        self.mlp = blocks.mlp(ctx, settings, place)

    def forward(self, normed, x, next_norm, ctx):
        x = x + self.self_attn(normed, PLAIN, ctx)
        return self.mlp(normed, AddNorm(x, next_norm), ctx)

class StableLm(CausalLM):
    blocks = Blocks(norm=lambda ctx, s, _: LayerNorm(ctx, s.hidden_size, s.norm_eps), layer=ParallelLayer)

    @staticmethod
    def settings(info):
        return replace(DecoderSettings.from_info(info), norm_eps=info.hf_config["layer_norm_eps"])
'''
STAR = """
from dataclasses import replace
from torch import nn
from app.layers.activation import activation
from app.layers.layer_norm import LayerNorm
from app.layers.linear import ColumnLinear, RowLinear
from app.models.blocks import Blocks
from app.models.decoder import CausalLM
from app.models.decoder_settings import DecoderSettings

class PlainMLP(nn.Module):
    def __init__(self, ctx, settings, place):
        super().__init__()
        self.c_fc = ColumnLinear(ctx, settings.hidden_size, settings.intermediate_size, bias=True)
        self.c_proj = RowLinear(ctx, settings.intermediate_size, settings.hidden_size, bias=True)
        self.act = activation(settings.hidden_act)

    def forward(self, x, epilogue, ctx):
        return self.c_proj(self.act(self.c_fc(x)), epilogue)

class Starcoder2(CausalLM):
    blocks = Blocks(norm=lambda ctx, s, _: LayerNorm(ctx, s.hidden_size, s.norm_eps), mlp=PlainMLP)

    @staticmethod
    def settings(info):
        eps = info.hf_config["norm_epsilon"]
        return replace(DecoderSettings.from_info(info), norm_eps=eps, qkv_bias=True, output_bias=True)
"""
FAMILIES: dict[str, tuple[str, str, type[PreTrainedModel], StableLmConfig | Starcoder2Config]] = {
    "StableLmForCausalLM": (
        STABLE, "StableLm", StableLmForCausalLM,
        StableLmConfig(
            **DEFAULTS, use_parallel_residual=True, hidden_act="silu",
            rope_parameters={"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 1.0},
        ),
    ),
    "Starcoder2ForCausalLM": (
        STAR, "Starcoder2", Starcoder2ForCausalLM,
        Starcoder2Config(**DEFAULTS, use_bias=True, sliding_window=None, hidden_act="gelu_pytorch_tanh"),
    ),
}  # fmt: skip


@pytest.mark.parametrize("architecture", list(FAMILIES))
def test_tokens_equal_transformers(architecture: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, name, kind, config = FAMILIES[architecture]
    (tmp_path / f"family_{name}.py").write_text(source)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setitem(MODELS._table, architecture, f"family_{name}:{name}")
    torch.manual_seed(0)
    judge = kind(config).eval()  # type: ignore[call-arg]
    with torch.no_grad():
        for parameter in judge.parameters():
            if parameter.ndim == 1:
                parameter.add_(torch.randn_like(parameter) * 0.3)
    judge.save_pretrained(tmp_path / "model")
    rng = random.Random(7)
    prompts = [[rng.randrange(3, 331) for _ in range(length)] for length in (3, 17, 40)]
    found = Driver(str(tmp_path / "model"), num_blocks=32, chunk=16).run([Run(p, greedy(10)) for p in prompts])
    assert [run.tokens for run in found] == [hf_greedy(judge, prompt, 10) for prompt in prompts]
