"""Logits and greedy tokens of families by their makers' layouts equal those of a page of plain matrices each."""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from app.checkpoints.model_info import ModelInfo
from app.errors import UnsupportedError
from app.models import MODELS
from app.models.decoder_settings import readable
from tests.hf_logprobs import prompts
from tests.models.families.published import PUBLISHED, greedy_tokens, judge, published
from tests.models.families.test_families_in_parallel import LAYOUTS, run_layout
from tests.worker.worker_driver import Driver, Run, all_logits, greedy

CASES = [(name, layout) for name in PUBLISHED for layout in LAYOUTS]
SAMPLE = random.Random(17).sample(CASES, 2)


@pytest.mark.parametrize("name", list(PUBLISHED))
def test_tokens_and_logits_equal_the_reference(name: str) -> None:
    logits_of, asked = judge(name), prompts((3, 16, 37, 70))
    expected = [greedy_tokens(logits_of, prompt, 8) for prompt in asked]
    assert len({tuple(tokens) for tokens in expected}) == len(asked), "the model says the same whatever it is asked"
    directory = str(published(name))
    assert ModelInfo.from_directory(directory).runner("auto") == "generate"
    driver = Driver(directory, chunk=20, max_model_len=128)
    assert [run.tokens for run in driver.run([Run(prompt, greedy(8)) for prompt in asked])] == expected
    logits = all_logits(driver, asked[-1])
    assert (logits - logits_of(asked[-1])).abs().max() < 1e-3


@pytest.mark.parametrize(
    ("name", "layout"),
    [pytest.param(*case, marks=() if case in SAMPLE else pytest.mark.slow, id="-".join(case)) for case in CASES],
)
def test_over_two_ranks(name: str, layout: str) -> None:
    logits_of = judge(name)
    run_layout(published(name), LAYOUTS[layout], lambda prompt: greedy_tokens(logits_of, prompt, 8))


@pytest.mark.parametrize(
    ("name", "changes", "reason"),
    [
        ("chatglm3", {"rmsnorm": False}, "rmsnorm=False"),
        ("chatglm3", {"pre_seq_len": 128}, "pre_seq_len=128"),
        ("chatglm3", {"multi_query_group_num": 3}, "multi_query_group_num=3"),
        ("minicpm", {"sparse_config": {"topk": 64}}, "sparse_config"),
        ("decilm", {"num_key_value_heads_per_layer": [2]}, "1 of 2 layers"),
        ("decilm", {"num_key_value_heads_per_layer": [2, 3]}, "4 heads over 3"),
        ("nemotron-nas", {"block_configs": [{"attention": {"replace_with_linear": True}, "ffn": {}}]}, "replace_with"),
    ],
)
def test_what_is_refused(name: str, changes: dict[str, Any], reason: str, tmp_path: Path) -> None:
    shutil.copytree(published(name), tmp_path / "model")
    file = tmp_path / "model" / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))
    info = ModelInfo.from_directory(str(tmp_path / "model"))
    with pytest.raises(UnsupportedError, match=reason):
        readable(MODELS.load(info.architecture).settings, info)


@pytest.mark.gpu
@pytest.mark.parametrize("name", list(PUBLISHED))
def test_on_a_gpu(name: str) -> None:
    """In bf16, prompts in chunks: logits beside the reference's of the same weights."""
    driver = Driver(str(published(name)), device="cuda", chunk=20, max_model_len=128)
    asked = prompts((37,))[0]
    exact = judge(name)(asked)
    assert (all_logits(driver, asked).cpu().float() - exact).abs().max() < 0.05 * exact.abs().max()
    torch.cuda.synchronize()
