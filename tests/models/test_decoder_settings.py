"""What a family reads from config.json: its defaults are transformers', and null is what is left out."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as ARCHITECTURES

from app.checkpoints.model_info import ModelInfo
from app.errors import CheckpointError
from app.layers.rope_scaling import RopeSettings
from app.models import MODELS
from app.models.decoder_settings import NO_ROPE, DecoderSettings, readable

FAMILIES = {
    name: kind
    for kind, name in ARCHITECTURES.items()
    if name in MODELS and not name.endswith("ForConditionalGeneration")
}
SIZES: dict[str, Any] = {
    **{"vocab_size": 331, "hidden_size": 128, "intermediate_size": 112, "num_hidden_layers": 8},
    **{"num_attention_heads": 4, "num_key_value_heads": 2},
}
LATENT_SIZES = {"kv_lora_rank": 32, "q_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16}
LATENT = {
    f"{name}ForCausalLM"
    for name in ("DeepseekV2", "DeepseekV3", "Glm4MoeLite", "MiniCPM3", "Youtu", "LongcatFlash", "AXK1")
}
NO_HEADS = {"MambaForCausalLM", "Mamba2ForCausalLM", "FalconMambaForCausalLM"}
OWN: dict[str, dict[str, Any]] = {
    "NemotronHForCausalLM": {"hybrid_override_pattern": "M-M*M-M-"},
    "Mamba2ForCausalLM": {"hidden_size": 4096},  # half of what its heads have by default
    # Whose defaults are of the published sizes.
    "CodeGenForCausalLM": {"rotary_dim": 16},
    "GPTJForCausalLM": {"rotary_dim": 16},
    "GPTNeoForCausalLM": {"attention_types": [[["global", "local"], 4]]},
    "Gemma3nForCausalLM": {"num_kv_shared_layers": 2},
    "Zamba2ForCausalLM": {"layers_block_type": ["linear_attention", "hybrid"] * 4},
}
ACTIVATIONS = {"BloomForCausalLM": "gelu_new", "MptForCausalLM": "gelu"}  # which config.json cannot name
NEEDED = {*SIZES, *LATENT_SIZES, "architectures", "model_type", "hybrid_override_pattern"}
NEEDED |= {"rotary_dim", "attention_types", "num_kv_shared_layers", "layers_block_type"}


class Recorded(dict[str, Any]):
    """A configuration that knows what was asked of it."""

    def __init__(self, content: dict[str, Any]) -> None:
        super().__init__(content)
        self.asked: set[str] = set()

    def get(self, key: str, default: Any = None) -> Any:
        self.asked.add(key)
        return super().get(key, default)


def sizes(architecture: str) -> dict[str, Any]:
    """What no configuration leaves out."""
    without = {"num_attention_heads", "num_key_value_heads"} if architecture in NO_HEADS else set()
    own = LATENT_SIZES if architecture in LATENT else OWN.get(architecture, {})
    return {name: value for name, value in {**SIZES, **own}.items() if name not in without}


def described(directory: Path, architecture: str, **more: Any) -> ModelInfo:
    directory.mkdir(exist_ok=True)
    own = {"architectures": [architecture], "model_type": FAMILIES[architecture]}
    (directory / "config.json").write_text(json.dumps({**own, **sizes(architecture), **more}))
    return ModelInfo.from_directory(str(directory))


def read(info: ModelInfo) -> tuple[DecoderSettings, dict[str, RopeSettings]]:
    family = MODELS.load(info.architecture)
    settings = family.settings(info)
    of = family.ropes(info, settings, 4096)
    kinds = dict.fromkeys(settings.rope_types or ("",))
    return settings, {kind: of(kind) for kind in kinds if kind != NO_ROPE}


@pytest.mark.parametrize("architecture", sorted(FAMILIES))
def test_what_a_family_leaves_out_is_what_transformers_means(architecture: str, tmp_path: Path) -> None:
    settings, ropes = read(described(tmp_path, architecture))
    judge = CONFIG_MAPPING[FAMILIES[architecture]](**sizes(architecture))
    assert settings.tie_word_embeddings == judge.tie_word_embeddings
    names = ("hidden_activation", "hidden_act", "activation_function", "activation", "mlp_hidden_act")
    of_dbrx = getattr(judge, "ffn_config", None)
    of_others = (getattr(judge, name) for name in names if getattr(judge, name, None))
    named = of_dbrx.ffn_act_fn["name"] if of_dbrx else next(of_others, "silu")  # LFM2's has no name
    named = ACTIVATIONS.get(architecture, named)
    assert settings.hidden_act == named
    parameters = getattr(judge, "rope_parameters", None) or {}
    for kind, rope in ropes.items():
        expected = parameters.get(kind, parameters)
        if not expected:  # GPT-J's configuration names neither
            assert (rope.rope_type, rope.theta, rope.dim) == ("default", 10_000.0, judge.rotary_dim)
            continue
        partial = expected.get("partial_rotary_factor", getattr(judge, "partial_rotary_factor", None)) or 1.0
        assert (rope.rope_type, rope.theta) == (expected["rope_type"], expected["rope_theta"])
        if rope.rope_type != "proportional":  # of a whole head, which is of the layer's width
            assert rope.dim == int(settings.head_dim * partial)


@pytest.mark.parametrize("architecture", sorted(FAMILIES))
def test_null_is_what_is_left_out(architecture: str, tmp_path: Path) -> None:
    info = described(tmp_path / "without", architecture)
    hf = Recorded(info.hf_config)
    object.__setattr__(info, "hf_config", hf)
    expected = read(info)
    unset = (hf.asked | {"partial_rotary_factor", "rope_theta"}) - NEEDED
    meant = {"sliding_window", "attn_logit_softcapping", "final_logit_softcapping", "n_shared_experts"}
    nulls = dict.fromkeys(unset - meant)
    assert read(described(tmp_path / "null", architecture, **nulls)) == expected
    if "rope_scaling" in unset and architecture not in ("Gemma3ForCausalLM", "Gemma3nForCausalLM", "Olmo3ForCausalLM"):
        inner = {"rope_scaling": {"rope_type": None, "type": "linear", "factor": 2.0, "rope_theta": None}}
        for rope in read(described(tmp_path / "inner", architecture, **inner))[1].values():
            assert (rope.rope_type, rope.number("factor")) == ("linear", 2.0)


@pytest.mark.parametrize("architecture", ["MistralForCausalLM", "Gemma2ForCausalLM"])
def test_null_where_it_means_something(architecture: str, tmp_path: Path) -> None:
    nulls = {"sliding_window": None, "attn_logit_softcapping": None, "final_logit_softcapping": None}
    settings, _ = read(described(tmp_path, architecture, **nulls))
    assert set(settings.sliding_windows) == {None}
    assert settings.attention_soft_cap is settings.logit_soft_cap is None
    assert set(read(described(tmp_path, architecture))[0].sliding_windows) > {4096} or architecture[0] == "M"


@pytest.mark.parametrize(
    ("architecture", "wrong"),
    [
        ("GraniteForCausalLM", {"embedding_multiplier": [2]}),
        ("CohereForCausalLM", {"logit_scale": "much"}),
        ("Qwen2ForCausalLM", {"use_sliding_window": True, "max_window_layers": {}}),
        ("GraniteForCausalLM", {"logits_scaling": 0}),
    ],
)
def test_what_is_no_number_names_the_file(architecture: str, wrong: dict[str, Any], tmp_path: Path) -> None:
    info = described(tmp_path, architecture, **wrong)
    with pytest.raises(CheckpointError, match=r"config\.json is not usable"):
        readable(MODELS.load(architecture).settings, info)


@pytest.mark.parametrize("wrong", [{"rope_theta": "big"}, {"rope_theta": [1]}, {"partial_rotary_factor": True}])
def test_a_rope_that_is_no_number_is_named(wrong: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=f"{next(iter(wrong))} is .*, not a number"):
        read(described(tmp_path, "LlamaForCausalLM", **wrong))


@pytest.mark.parametrize("wrong", [{"rope_theta": 1}, {"rope_theta": -1}, {"original_max_position_embeddings": 0}])
def test_a_rope_that_has_no_frequencies_is_named(wrong: dict[str, Any]) -> None:
    parameters = {"rope_type": "yarn", "rope_theta": 10_000.0, "factor": 2.0, **wrong}
    with pytest.raises(CheckpointError, match=f"rope_type 'yarn' with rope_theta .*{next(iter(wrong))}"):
        RopeSettings.from_hf({"rope_parameters": parameters}, 32, 64).frequencies()
