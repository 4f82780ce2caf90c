"""Quantized checkpoints of families whose layers keep states, against transformers with the weights that they store."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.models.families.state_variants import DELTA, MAMBA2
from tests.quantization.checkpoints import check_logits, check_stored, write
from tests.quantization.stored_forms import FORMS
from tests.tiny_models import tiny_model

# Heads whose numbers can be stored by eights.
DELTA_SIZES = {
    **{**DELTA, "linear_num_key_heads": 4, "linear_num_value_heads": 8, "linear_value_head_dim": 16},
    **{"intermediate_size": 160, "initializer_range": 0.1},
}
MAMBA2_SIZES = {
    **{**MAMBA2, "hidden_size": 64, "mamba_n_heads": 8, "mamba_d_head": 16, "num_attention_heads": 4},
    **{"attn_layer_indices": [1, 3], "intermediate_size": 160, "initializer_range": 0.1},
}
CASES: list[tuple[str, str, dict[str, Any]]] = [
    ("gptq-4", "qwen3_5_text", DELTA_SIZES),
    ("awq", "bamba", MAMBA2_SIZES),
    ("fp8-block", "qwen3_5_text", DELTA_SIZES),
]


@pytest.mark.parametrize(("form", "family", "sizes"), CASES, ids=[f"{form}-{family}" for form, family, _ in CASES])
def test_stored_weights_are_read(form: str, family: str, sizes: dict[str, Any], tmp_path: Path) -> None:
    pack, scheme = FORMS[form].pack()
    directory = write(tiny_model(family, **sizes), tmp_path, pack, scheme, r"_proj(_\w+)?\.weight$")
    check_stored(directory)
    if not FORMS[form].rounds:
        check_logits(directory)
