"""What DeepSeek's configurations and checkpoints hold beyond the tiny ones: published numbers, layers for drafts, rules
that are unknown."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3Attention

from app.checkpoints.model_info import ModelInfo
from app.cli.model_memory import kv_bytes_per_token
from app.errors import CheckpointError, UnsupportedError
from app.loading.load_formats import open_checkpoint
from app.loading.weight_update import WeightUpdate
from app.models.families.deepseek import DeepseekV2ForCausalLM, DeepseekV3ForCausalLM
from app.models.families.longcat_flash import LongcatFlashForCausalLM
from app.models.latent import LatentCausalLM
from tests.hf_logprobs import prompts
from tests.models.families.expert_variants import EXPERT_VARIANTS
from tests.tiny_models import hf_greedy, hf_model, tiny_model
from tests.worker.worker_driver import Driver, Run, all_logits, greedy

YARN = {"type": "yarn", "factor": 40, "original_max_position_embeddings": 4096, "beta_fast": 32, "beta_slow": 1}
COMMON = {
    **{"kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "rope_theta": 10000},
    **{"max_position_embeddings": 163840, "moe_layer_freq": 1, "attention_bias": False, "rms_norm_eps": 1e-6},
}
# As published; what the softmax's scale is multiplied by, chosen experts, bytes of a token in bf16.
PUBLISHED: dict[str, tuple[type[LatentCausalLM], dict[str, Any], float, tuple[Any, ...], int]] = {
    "DeepSeek-V2-Lite": (
        DeepseekV2ForCausalLM,
        {
            **{**COMMON, "model_type": "deepseek_v2", "architectures": ["DeepseekV2ForCausalLM"], "vocab_size": 102400},
            **{"hidden_size": 2048, "intermediate_size": 10944, "num_hidden_layers": 27, "num_attention_heads": 16},
            **{"num_key_value_heads": 16, "q_lora_rank": None, "first_k_dense_replace": 1, "n_group": 1},
            **{"moe_intermediate_size": 1408, "n_routed_experts": 64, "n_shared_experts": 2, "topk_group": 1},
            **{"num_experts_per_tok": 6, "norm_topk_prob": False, "routed_scaling_factor": 1.0},
            **{"scoring_func": "softmax", "topk_method": "greedy"},
            "rope_scaling": {**YARN, "mscale": 0.707, "mscale_all_dim": 0.707},
        },
        1.590,
        ("softmax", 6, 1, 1, "max", False, 1.0),
        31_104,
    ),
    "DeepSeek-V3": (
        DeepseekV3ForCausalLM,
        {
            **{**COMMON, "model_type": "deepseek_v3", "architectures": ["DeepseekV3ForCausalLM"], "vocab_size": 129280},
            **{"hidden_size": 7168, "intermediate_size": 18432, "num_hidden_layers": 61, "num_attention_heads": 128},
            **{"num_key_value_heads": 128, "q_lora_rank": 1536, "first_k_dense_replace": 3, "n_group": 8},
            **{"moe_intermediate_size": 2048, "n_routed_experts": 256, "n_shared_experts": 1, "topk_group": 4},
            **{"num_experts_per_tok": 8, "norm_topk_prob": True, "routed_scaling_factor": 2.5},
            **{"scoring_func": "sigmoid", "topk_method": "noaux_tc", "num_nextn_predict_layers": 1},
            "rope_scaling": {**YARN, "mscale": 1.0, "mscale_all_dim": 1.0},
        },
        1.874,
        ("sigmoid", 8, 8, 4, "top2", True, 2.5),
        70_272,
    ),
}


@pytest.mark.parametrize("name", list(PUBLISHED))
def test_published_configurations(name: str, tmp_path: Path) -> None:
    family, config, stretch, chosen, token_bytes = PUBLISHED[name]
    (tmp_path / "config.json").write_text(json.dumps(config))
    info = ModelInfo.from_directory(str(tmp_path))
    settings = family.settings(info)
    assert settings.latent is not None
    assert settings.experts is not None
    judge = AutoConfig.from_pretrained(tmp_path)
    with torch.device("meta"):
        scale = DeepseekV3Attention(judge, 0).scaling
    assert settings.latent.scale == pytest.approx(scale)
    assert settings.latent.scale * 192**0.5 == pytest.approx(stretch, abs=5e-4)
    rope = family.ropes(info, settings, 4096)("")
    inv_freq, factor = rope.frequencies()
    assert (rope.dim, len(inv_freq), factor) == (64, 32, 1.0)
    rule = settings.experts.rule
    got = rule.scoring, rule.top_k, rule.num_groups, rule.groups_chosen, rule.group_score, rule.renormalize, rule.scale
    assert got == chosen
    assert settings.experts.layers == frozenset(range(judge.first_k_dense_replace, judge.num_hidden_layers))
    assert kv_bytes_per_token(info, "bfloat16") == token_bytes


def test_the_first_one_has_attention_of_llama(tmp_path: Path) -> None:
    """As published, whose code is no part of transformers: its Llama with feed-forward layers of its DeepSeek V2."""
    family, changes = EXPERT_VARIANTS["deepseek_v2"]
    routed = {"routed_scaling_factor": 1.0, "num_hidden_layers": 3}
    experts = tiny_model(family, **{**changes, **routed})
    llama = tiny_model("llama", num_hidden_layers=3)
    tensors = load_file(llama / "model.safetensors")
    tensors = {name: x for name, x in tensors.items() if ".mlp." not in name}
    tensors |= {name: x for name, x in load_file(experts / "model.safetensors").items() if ".mlp." in name}
    save_file(tensors, tmp_path / "model.safetensors")
    names = ("n_routed_experts", "num_experts_per_tok", "moe_intermediate_size", "first_k_dense_replace")
    config = json.loads((llama / "config.json").read_text()) | {name: changes[name] for name in names}
    own = {"architectures": ["DeepseekForCausalLM"], "model_type": "deepseek", "scoring_func": "softmax"}
    (tmp_path / "config.json").write_text(json.dumps({**config, **own, "moe_layer_freq": 1, "n_shared_experts": 2}))
    judge, other = hf_model(llama), hf_model(experts)
    for mine, theirs in zip(judge.model.layers, other.model.layers, strict=True):
        mine.mlp = theirs.mlp
    prompt = prompts((37,))[0]
    with torch.inference_mode():
        expected = judge(torch.tensor([prompt])).logits[0]
    found = all_logits(Driver(str(tmp_path), num_blocks=16), prompt)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-3)


def test_the_text_part_of_kimi_k25(tmp_path: Path) -> None:
    """Of a checkpoint whose config.json says nothing of what sees (`multimodal/test_kimi.py` looks at pictures)."""
    family, changes = EXPERT_VARIANTS["deepseek_v3-plain"]
    plain = tiny_model(family, **changes)
    tensors = {f"language_model.{name}": x for name, x in load_file(plain / "model.safetensors").items()}
    images = {name: torch.ones(8) for name in ("vision_tower.patch_embed.proj.bias", "mm_projector.pre_norm.weight")}
    save_file({**tensors, **images}, tmp_path / "model.safetensors")
    text = {**json.loads((plain / "config.json").read_text()), "model_type": "kimi_k2"}
    config = {"architectures": ["KimiK25ForConditionalGeneration"], "model_type": "kimi_k25", "text_config": text}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (asked,) = prompts((37,))
    (run,) = Driver(str(tmp_path), max_model_len=128).run([Run(asked, greedy(6))])
    assert run.tokens == hf_greedy(hf_model(plain), asked, 6)


def test_what_longcat_caches(tmp_path: Path) -> None:
    """As published: two latents in each of 28 layers, which transformers counts as 56."""
    config = {**COMMON, "model_type": "longcat_flash", "architectures": ["LongcatFlashForCausalLM"], "num_layers": 28}
    for more in ({}, {"num_hidden_layers": 56}):
        (tmp_path / "config.json").write_text(json.dumps({**config, **more}))
        info = ModelInfo.from_directory(str(tmp_path))
        assert (info.num_layers, kv_bytes_per_token(info, "bfloat16")) == (28, 64_512)


def test_a_layer_of_longcat_that_drafts_with_experts_is_refused() -> None:
    info = ModelInfo(Path("of-a-test"), {"nextn_use_scmoe": True}, {})
    with pytest.raises(UnsupportedError, match="nextn_use_scmoe"):
        LongcatFlashForCausalLM.blocks_behind(info)


def test_layers_for_drafts_are_left_out(tmp_path: Path) -> None:
    family, changes = EXPERT_VARIANTS["deepseek_v3"]
    plain = tiny_model(family, **changes)
    directory = Path(shutil.copytree(plain, tmp_path / "model"))
    tensors = load_file(directory / "model.safetensors")
    drafts = {
        name.replace(".2.", ".3."): x.clone() for name, x in tensors.items() if name.startswith("model.layers.2.")
    }
    more = {f"model.layers.3.{name}.weight": torch.ones(64) for name in ("enorm", "hnorm", "shared_head.norm")}
    save_file({**tensors, **drafts, **more}, directory / "model.safetensors")
    asked, judge = prompts((3, 37)), hf_model(plain)
    driver = Driver(str(directory), max_model_len=128)
    tokens = [run.tokens for run in driver.run([Run(prompt, greedy(6)) for prompt in asked])]
    assert tokens == [hf_greedy(judge, prompt, 6) for prompt in asked]
    assert driver.worker._parts is not None
    WeightUpdate(driver.worker._parts.model, torch.device("cpu")).check(open_checkpoint(directory))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"topk_method": "hashed"}, "topk_method='hashed' of config.json; known: greedy, group_limited_greedy, noaux"),
        ({"scoring_func": "tanh"}, "scoring_func='tanh' of config.json; known: softmax, sigmoid"),
    ],
)
def test_a_rule_that_is_unknown_is_named(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**PUBLISHED["DeepSeek-V3"][1], **changes}))
    with pytest.raises(UnsupportedError, match=message):
        DeepseekV3ForCausalLM.settings(ModelInfo.from_directory(str(tmp_path)))


def test_what_config_json_lacks_is_named(tmp_path: Path) -> None:
    family, changes = EXPERT_VARIANTS["deepseek_v2"]
    directory = Path(shutil.copytree(tiny_model(family, **changes), tmp_path / "model"))
    config = json.loads((directory / "config.json").read_text())
    del config["kv_lora_rank"]
    (directory / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=r"config\.json is not usable: it lacks 'kv_lora_rank'"):
        Driver(str(directory))
