"""`manta models` and docs/models.md say what the tables hold."""

from __future__ import annotations

import pytest

from app.cli import main
from app.models import MODELS, POOLING_MODELS
from tests.models.families.expert_variants import EXPERT_VARIANTS
from tests.models.families.test_families import VARIANTS
from tests.rooms import ROOT


def test_every_architecture_has_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["models"]) == 0
    lines = dict(line.split(None, 1) for line in capsys.readouterr().out.splitlines())
    through = {name for name, use in lines.items() if "(through transformers)" in use}
    assert lines.keys() - through == set(MODELS) | (set(POOLING_MODELS) - through)
    assert {"Starcoder2ForCausalLM", "ApertusForCausalLM"} <= through
    assert not through & {*MODELS, "RwkvForCausalLM", "GPTJForCausalLM"}
    assert lines["LlamaForCausalLM"] == "generate (TP, PP, quantized), pooling (TP)"
    assert lines["GPT2LMHeadModel"] == "generate (TP, PP, quantized)"
    assert main(["models", "--runner", "pooling"]) == 0
    assert {line.split()[0] for line in capsys.readouterr().out.splitlines()} == set(POOLING_MODELS)


def test_the_page_names_every_architecture_and_every_variant() -> None:
    page = (ROOT / "docs" / "models.md").read_text()
    rows = [line.split("|") for line in page.splitlines() if line.startswith("| ")]
    named = {name.strip(" `") for row in rows for name in row[2].split(",")}
    assert {*MODELS} <= named
    variants = {name.strip() for row in rows for name in row[3].split(",")}
    assert {*VARIANTS, *EXPERT_VARIANTS} <= variants
