"""Quantized checkpoints of families whose layers keep states, against transformers with the weights that they store.

CI takes a few; `make acceptance` takes all.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from app.errors import MantaError
from tests.models.families.state_variants import STORABLE
from tests.quantization.checkpoints import check_logits, check_stored, write
from tests.quantization.stored_forms import FORMS
from tests.tiny_models import tiny_model

CASES = [(form, name) for form in ("gptq-4", "awq", "fp8-block", "w4-words", "fp8-tensor") for name in STORABLE]
SAMPLE = {("gptq-4", "qwen3_5"), ("gptq-4", "mamba"), ("awq", "bamba"), ("fp8-block", "qwen3_5")}
# Experts that lie in one tensor, and blocks' adapters, stay as they are.
LINEAR = r"(_proj(_\w+)?|shared_mlp\.\w+_linear|mqa|\.w[123])\.weight$"
PARTLY_PLAIN = ("granite_hybrid", "zamba2")
# Projections whose outputs are of several heads in turn, which these forms store by eights or in blocks.
REFUSED = {(form, "qwen3_next"): r"in_proj_ba" for form in ("gptq-4", "awq", "fp8-block")}


@pytest.mark.parametrize(
    ("form", "name"),
    [pytest.param(*case, marks=() if case in SAMPLE else pytest.mark.slow) for case in CASES if case not in REFUSED],
)
def test_stored_weights_are_read(form: str, name: str, tmp_path: Path) -> None:
    directory = stored(form, name, tmp_path)
    if name not in PARTLY_PLAIN:
        check_stored(directory)
    if not FORMS[form].rounds:
        check_logits(directory)


@pytest.mark.parametrize(("form", "name"), REFUSED)
def test_others_are_refused_by_name(form: str, name: str, tmp_path: Path) -> None:
    with pytest.raises(MantaError, match=REFUSED[form, name]):
        check_stored(stored(form, name, tmp_path))


def stored(form: str, name: str, directory: Path) -> Path:
    pack, scheme = FORMS[form].pack()
    family, sizes = STORABLE[name]
    return write(tiny_model(family, **sizes), directory, pack, scheme, LINEAR)
