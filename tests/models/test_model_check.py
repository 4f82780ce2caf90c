"""Published config.json files of models with experts, as the check before any worker and the family read them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from app.checkpoints.model_info import ModelInfo
from app.config.engine import EngineConfig
from app.errors import CheckpointError, ConfigError, UnsupportedError
from app.layers.experts.settings import ExpertSettings
from app.models import MODELS, POOLING_MODELS
from app.models.decoder_settings import readable
from app.models.model_check import check_model
from app.worker import placement
from app.worker import save_sharded as sharded
from tests.models.families.test_deepseek import PUBLISHED

PHI = {
    **{"architectures": ["PhiMoEForCausalLM"], "model_type": "phimoe", "hidden_size": 4096, "intermediate_size": 6400},
    **{"num_attention_heads": 32, "num_key_value_heads": 8, "num_hidden_layers": 32, "num_local_experts": 16},
    **{"num_experts_per_tok": 2, "vocab_size": 32064, "max_position_embeddings": 131072, "attention_bias": True},
    **{"lm_head_bias": True, "sliding_window": 131072, "rms_norm_eps": 1e-5, "rope_theta": 10000.0},
}
SCOUT = {
    **{"model_type": "llama4_text", "hidden_size": 5120, "intermediate_size": 8192, "intermediate_size_mlp": 16384},
    **{"num_hidden_layers": 48, "num_attention_heads": 40, "num_key_value_heads": 8, "num_local_experts": 16},
    **{"num_experts_per_tok": 1, "vocab_size": 202048, "max_position_embeddings": 10485760, "head_dim": 128},
    **{"attention_chunk_size": 8192, "interleave_moe_layer_step": 1},
}
SEEING = {"architectures": ["Llama4ForConditionalGeneration"], "model_type": "llama4"}
V2, V3 = PUBLISHED["DeepSeek-V2-Lite"][1], PUBLISHED["DeepSeek-V3"][1]


A13B = {
    **{"architectures": ["HunYuanMoEV1ForCausalLM"], "model_type": "hunyuan_v1_moe", "hidden_size": 4096},
    **{"intermediate_size": 3072, "num_hidden_layers": 2, "num_attention_heads": 32, "num_key_value_heads": 8},
    **{"attention_head_dim": 128, "num_experts": 64, "moe_topk": [8, 8], "moe_intermediate_size": [3072, 3072]},
    **{"num_shared_expert": [1, 1], "vocab_size": 128167, "max_position_embeddings": 32768, "use_cla": False},
    "rope_scaling": {"alpha": 1000.0, "factor": 1.0, "type": "dynamic"},
}
DBRX: dict[str, Any] = {
    **{"architectures": ["DbrxForCausalLM"], "model_type": "dbrx", "d_model": 6144, "n_heads": 48, "n_layers": 40},
    **{"max_seq_len": 32768, "vocab_size": 100352},
    "attn_config": {"clip_qkv": 8, "kv_n_heads": 8, "rope_theta": 500000},
    "ffn_config": {"ffn_hidden_size": 10752, "moe_num_experts": 16, "moe_top_k": 4, "moe_jitter_eps": 0.01},
}


def checked(folder: Path, config: dict[str, Any], **options: Any) -> tuple[ModelInfo, ExpertSettings]:
    (folder / "config.json").write_text(json.dumps(config))
    info = check_model(EngineConfig(model=str(folder), **options))
    experts = MODELS.load(info.architecture).settings(info).experts
    assert experts is not None
    return info, experts


def test_the_class_that_the_hub_names(tmp_path: Path) -> None:
    assert checked(tmp_path, PHI)[1].num_experts == 16


@pytest.mark.parametrize(("config", "size"), [(V2, 2816), (V3, 2048)])
def test_no_shared_experts_is_none(config: dict[str, Any], size: int, tmp_path: Path) -> None:
    left_out = {name: value for name, value in config.items() if name != "n_shared_experts"}
    assert [checked(tmp_path, one)[1].shared_size for one in (config, left_out)] == [size, size]
    assert checked(tmp_path, {**config, "n_shared_experts": None})[1].shared_size == 0


def test_numbers_that_are_given_layer_by_layer_or_in_parts(tmp_path: Path) -> None:
    info, experts = checked(tmp_path, A13B)
    assert (experts.num_experts, experts.rule.top_k, experts.intermediate_size, experts.shared_size) == (
        64,
        8,
        3072,
        3072,
    )
    family = MODELS.load(info.architecture)
    rope = family.ropes(info, family.settings(info), 32768)("")
    assert (rope.rope_type, rope.theta) == ("default", pytest.approx(10000.0 * 1000.0 ** (128 / 126)))
    with pytest.raises(CheckpointError, match=r"moe_topk is \[8, 4\], not a whole number"):
        checked(tmp_path, {**A13B, "moe_topk": [8, 4]})
    with pytest.raises(UnsupportedError, match="use_cla=true"):
        checked(tmp_path, {**A13B, "use_cla": True})
    info, experts = checked(tmp_path, DBRX)
    assert (experts.num_experts, experts.rule.top_k, experts.intermediate_size) == (16, 4, 10752)
    assert (info.num_kv_heads, info.head_dim, info.max_position_embeddings) == (8, 128, 32768)
    assert MODELS.load(info.architecture).settings(info).attention_clip == 8
    with pytest.raises(UnsupportedError, match="moe_normalize_expert_weights=2"):
        checked(tmp_path, {**DBRX, "ffn_config": {**DBRX["ffn_config"], "moe_normalize_expert_weights": 2}})


def test_layers_with_experts_one_by_one(tmp_path: Path) -> None:
    named = {**V3, "moe_layer_freq": [0] * 4 + [1] * 57}
    assert checked(tmp_path, named)[1].layers == frozenset(range(4, 61))
    with pytest.raises(UnsupportedError, match="moe_layer_freq names 2 of 61 layers"):
        checked(tmp_path, {**named, "moe_layer_freq": [0, 1]})


@pytest.mark.parametrize(
    ("chunk", "context"), [({}, 8192), ({"attention_chunk_size": 4096}, 4096), ({"attention_chunk_size": None}, 10**7)]
)
def test_a_model_that_attends_in_chunks_has_the_context_of_one(
    chunk: dict[str, Any], context: int, tmp_path: Path
) -> None:
    scout = {**SEEING, "text_config": {**SCOUT, "max_position_embeddings": 10**7, **chunk}}
    assert checked(tmp_path, scout)[0].max_position_embeddings == context
    why = ", one of the chunks" if context < 10**7 else ": set"
    with pytest.raises(ConfigError, match=f"context of {context} tokens{why}") as caught:
        checked(tmp_path, scout, max_model_len=10485760)
    assert caught.value.param == "max_model_len"


@pytest.mark.parametrize("entry", ["place", "save_sharded"])
@pytest.mark.parametrize(
    ("config", "wrong", "message"),
    [
        (V3, {"topk_method": "hashed"}, "topk_method='hashed'"),
        (V2, {"topk_method": "group_limited_greedy", "n_group": None}, "it lacks 'n_group'"),
        (PHI, {"num_experts_per_tok": 3}, "num_experts_per_tok=3: this family chooses two"),
    ],
)
def test_what_only_the_family_knows_is_checked_before_weights_are_fetched(
    entry: str,
    config: dict[str, Any],
    wrong: dict[str, Any],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fetched(*_: object) -> None:
        raise AssertionError("weights are fetched")

    for module in (placement, sharded):
        monkeypatch.setattr(module, "fetch_model_weights", fetched)
    (tmp_path / "config.json").write_text(json.dumps({**config, **wrong}))
    engine = EngineConfig(model=str(tmp_path), device="cpu")
    with pytest.raises((UnsupportedError, CheckpointError), match=message):
        placement.place(engine, 0, 0, None) if entry == "place" else sharded.save_sharded(engine, tmp_path / "out")


@pytest.mark.parametrize("wrong", [{"num_hidden_layers": 2**31 - 1}, {"n_routed_experts": 2**31 - 1}])
def test_a_field_that_holds_something_else_is_named(wrong: dict[str, Any], tmp_path: Path) -> None:
    """Before anything is as large as it says."""
    with pytest.raises(CheckpointError, match=rf"config\.json is not usable: {next(iter(wrong))} is 2147483647, not"):
        checked(tmp_path, {**V3, **wrong})
    with pytest.raises(CheckpointError, match=r"config\.json names no architecture"):
        checked(tmp_path, {**V3, "architectures": "DeepseekV3ForCausalLM"})


@pytest.mark.parametrize(
    ("architecture", "wrong", "message"),
    [
        ("Llama4ForCausalLM", {**SCOUT, "no_rope_layers": [1]}, "no_rope_layers names 1 of 48 layers"),
        ("SmolLM3ForCausalLM", {**SCOUT, "no_rope_layers": [1, 0]}, "no_rope_layers names 2 of 48 layers"),
        ("HYV3ForCausalLM", {**SCOUT, "num_experts": 0}, "num_experts=0: this family"),
        ("ExaoneMoeForCausalLM", {**SCOUT, "num_experts": 0}, "num_experts=0: this family"),
        ("MixtralForCausalLM", {**PHI, "num_local_experts": 0}, "layers with experts, of which there are none"),
        ("MixtralForCausalLM", {**PHI, "num_experts_per_tok": 17}, "a token goes to 17 experts of 16 that may"),
        ("MixtralForCausalLM", {**PHI, "num_experts_per_tok": 0}, "a token goes to 0 experts of 16"),
        ("DeepseekV3ForCausalLM", {**V3, "num_experts_per_tok": 129}, "a token goes to 129 experts of 128 that may"),
        ("DeepseekV3ForCausalLM", {**V3, "n_group": 7}, "256 experts are in 7 groups"),
        ("DeepseekV3ForCausalLM", {**V3, "n_group": 0}, "256 experts are in 0 groups"),
        ("DeepseekV3ForCausalLM", {**V3, "topk_group": 9}, "9 groups are chosen of 8"),
        ("DeepseekV3ForCausalLM", {**V3, "n_group": 256, "topk_group": 8}, "256 groups of 256 experts"),
    ],
)
def test_what_a_family_cannot_read_is_named(architecture: str, wrong: dict[str, Any], message: str) -> None:
    with pytest.raises((UnsupportedError, CheckpointError), match=message):
        readable(MODELS.load(architecture).settings, ModelInfo(Path(), wrong, {}))


def test_whole_numbers_may_be_written_with_a_point(tmp_path: Path) -> None:
    assert checked(tmp_path, {**V3, "max_position_embeddings": 163840.0})[0].max_position_embeddings == 163840


def test_parts_and_stretches_that_are_none_are_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"config\.json: attn_config is 3, not an object"):
        checked(tmp_path, {**DBRX, "attn_config": 3})
    with pytest.raises(CheckpointError, match=r"rope_scaling\.alpha is \[1\], not a number"):
        checked(tmp_path, {**A13B, "rope_scaling": {**A13B["rope_scaling"], "alpha": [1]}})


@pytest.mark.parametrize(
    ("name", "same", "kind"),
    [
        ("GteNewModel", "NewModel", "new"),
        ("GteNewForSequenceClassification", "NewForSequenceClassification", "new"),
        ("BgeM3EmbeddingModel", "XLMRobertaModel", "xlm-roberta"),
    ],
)
def test_names_that_users_of_vllm_override_with(name: str, same: str, kind: str, tmp_path: Path) -> None:
    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 112}
    own = {"architectures": [same], "model_type": kind, "vocab_size": 300, "max_position_embeddings": 130}
    (tmp_path / "config.json").write_text(json.dumps({**sizes, **own}))
    info = check_model(EngineConfig(model=str(tmp_path), hf_overrides={"architectures": [name]}))
    assert POOLING_MODELS.load(info.architecture) is POOLING_MODELS.load(same)
    assert info.runner("auto") == "pooling"
