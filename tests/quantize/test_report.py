"""The report's figures, from transformers' logits of both models."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch

from app.quantize.quantize import quantize
from app.quantize.settings import QuantizeSettings
from app.quantize.texts import Texts
from tests.quantize.models import judge


def test_figures_are_those_of_transformers(source: Path, texts: Path, tmp_path: Path) -> None:
    settings = QuantizeSettings(str(source), tmp_path / "out", "w4", calibration=texts, device="cpu")
    report = quantize(settings)
    assert report is not None
    held_out = Texts.read(texts, source, 128, 512, 1024).held_out
    logits, losses = [], []
    for directory in (source, tmp_path / "out"):
        model = judge(directory)
        with torch.inference_mode():
            own = [model(torch.tensor([text])).logits[0] for text in held_out]
        logits.append(torch.cat(own))
        each = [
            torch.nn.functional.cross_entropy(x[:-1], torch.tensor(text[1:]), reduction="sum")
            for x, text in zip(own, held_out, strict=True)
        ]
        losses.append(float(sum(each)) / sum(len(text) - 1 for text in held_out))
    difference = (logits[0] - logits[1]).abs()
    divergence = torch.nn.functional.kl_div(
        logits[1].log_softmax(-1), logits[0].log_softmax(-1), reduction="batchmean", log_target=True
    )
    assert report.num_tokens == len(difference)
    assert report.perplexity.original == pytest.approx(math.exp(losses[0]), rel=1e-3)
    assert report.perplexity.quantized == pytest.approx(math.exp(losses[1]), rel=1e-3)
    assert report.logits.max_error == pytest.approx(float(difference.max()), rel=1e-2)
    assert report.logits.mean_error == pytest.approx(float(difference.mean()), rel=1e-3)
    assert report.logits.kl_divergence == pytest.approx(float(divergence), rel=1e-2)
    same = logits[0].argmax(-1) == logits[1].argmax(-1)
    assert report.logits.same_top_token == pytest.approx(float(same.float().mean()), rel=1e-6)
    saved = json.loads((tmp_path / "out" / "quantization_report.json").read_text())
    assert saved["weights"] == "w4"
    assert saved["perplexity"]["original"] == report.perplexity.original
    assert any("perplexity" in line for line in report.table())
