"""What is read from transformers' source files is what transformers itself says."""

from __future__ import annotations

from transformers import AutoConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from app.checkpoints.transformers_catalog import causal_architectures, entry_of, size_names


def test_every_language_model_of_transformers_is_listed() -> None:
    listed = causal_architectures()
    for model_type, names in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.items():
        for name in (names,) if isinstance(names, str) else names:
            assert model_type in listed[name]


def test_entries() -> None:
    for name, takes, keeps in (
        ("Starcoder2ForCausalLM", True, False),
        ("GPTJForCausalLM", False, False),
        ("MambaForCausalLM", False, True),
        ("Gemma4ForCausalLM", True, False),  # in a folder that its model type does not name
    ):
        entry = entry_of(name)
        assert entry is not None
        assert (entry.takes_attention, entry.keeps_state) == (takes, keeps), name
    assert entry_of("NobodysForCausalLM") is None


def test_sizes_have_the_names_of_the_family() -> None:
    for model_type in ("gpt_bigcode", "dbrx", "llama"):
        assert size_names(model_type) == AutoConfig.for_model(model_type).attribute_map
    assert size_names("nobody") == {}
