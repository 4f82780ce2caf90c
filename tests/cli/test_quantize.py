"""`manta quantize` as it is typed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.cli.conftest import Manta


def test_the_built_in_model(manta: Manta, tmp_path: Path) -> None:
    output = tmp_path / "out"
    done = manta("quantize", "tiny-chat", output, "--to", "w4", "--no-report", "--device", "cpu")
    assert done.code == 0, done.err
    assert "42 of 42 linear layers quantized" in done.out
    assert f"serve it with: manta serve {output}\n" in done.out
    config = json.loads((output / "config.json").read_text())["quantization_config"]
    assert config["quant_method"] == "compressed-tensors"
    assert config["config_groups"]["group_0"]["weights"]["num_bits"] == 4


@pytest.mark.slow
def test_it_answers_and_its_cache_is_calibrated(manta: Manta, tmp_path: Path) -> None:
    output = tmp_path / "out"
    few = ("--samples", 6, "--length", 48, "--questions", 6, "--device", "cpu")
    done = manta("quantize", "tiny-chat", output, "--to", "w4", "--awq", "--kv", "fp8", *few)
    assert done.code == 0, done.err
    report = json.loads((output / "quantization_report.json").read_text())
    assert "the checkpoint is complete: " in done.out
    assert "(--no-report: without)" in done.out
    assert "perplexity" in done.out
    assert (report["weights"], report["num_texts"]) == ("w4", 2)
    assert f"serve it with: manta serve {output} --kv-cache-dtype fp8\n" in done.out
    assert "right answers" in done.out
    answers = report["answers"]
    assert isinstance(answers, dict)
    assert answers["original"] >= 5
    assert answers["quantized"] >= 4
    options = ("--temperature", 0, "--max-model-len", 256, "--kv-cache-dtype", "fp8")
    assert manta("generate", "What is 3 + 4?", "--model", output, *options).out == "3 + 4 = 7.\n"


def test_mistakes_are_one_line(manta: Manta, tmp_path: Path) -> None:
    assert "--to: one of fp8" in manta("quantize", "tiny-chat", tmp_path / "out").mistake
    missing = manta("quantize", "tiny-chat", tmp_path / "out", "--to", "int8", "--calibration", tmp_path / "none.txt")
    assert "--calibration: cannot read" in missing.mistake
    assert "--samples: 0 is less than 1" in manta("quantize", "tiny-chat", "x", "--to", "int8", "--samples", 0).mistake
    for option, value, message in (
        ("--kv-scales", "head", "--kv-scales: for --kv fp8 only: add it"),
        ("--samples", 10**21, f"--samples: {10**21} is more than 100000"),
    ):
        assert message in manta("quantize", "tiny-chat", tmp_path / "out", "--to", "int8", option, value).mistake
    assert not any(tmp_path.iterdir())
