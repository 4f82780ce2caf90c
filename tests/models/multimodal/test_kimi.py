"""Kimi K2.5 with the config.json of Moonshot's files, and Kimi-VL, which sees pictures as it does: the logits are those
of transformers' K2.5 (`test_families_that_see.py`), whose own files name things otherwise."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from app.errors import CheckpointError
from tests.tiny_kimi import named
from tests.tiny_media import IMAGE, judged, prompt_of, tiny_media_model
from tests.worker.worker_driver import Driver, all_logits

KIMI_VL = (
    (r"^mm_projector\.proj\.0\.", "multi_modal_projector.linear_1."),
    (r"^mm_projector\.proj\.2\.", "multi_modal_projector.linear_2."),
    (r"^mm_projector\.", "multi_modal_projector."),
)
SIZES = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
SHOWN = [[5, 6, 7], (6, 8, 1), [8, 9], (2, 10, 2), [10]]


def published(path: Path, kind: str, **changes: Any) -> str:
    """The tiny K2.5 as Moonshot would publish it, or as a Kimi-VL."""
    source = tiny_media_model("kimi_k25")
    config = json.loads((source / "config.json").read_text())
    eyes, text = config["vision_config"], config["text_config"]
    prefix = "vt_" if kind == "kimi_k25" else ""
    own = {
        **{prefix + name: eyes[name] for name in SIZES},
        **{"init_pos_emb_height": eyes["pos_emb_height"], "init_pos_emb_width": eyes["pos_emb_width"]},
        **{"patch_size": eyes["patch_size"], "merge_kernel_size": eyes["merge_kernel_size"]},
        **changes,
    }
    architecture = {"kimi_k25": "KimiK25ForConditionalGeneration", "kimi_vl": "KimiVLForConditionalGeneration"}[kind]
    config = {"architectures": [architecture], "model_type": kind, "media_placeholder_token_id": IMAGE}
    (path / "config.json").write_text(json.dumps({**config, "text_config": text, "vision_config": own}))
    tensors = load_file(source / "model.safetensors")
    rules = KIMI_VL if kind == "kimi_vl" else ()
    save_file({named(name, rules): x for name, x in tensors.items()}, path / "model.safetensors")
    pixels = json.loads((source / "preprocessor_config.json").read_text())
    nested = {"media_proc_cfg": pixels} if kind == "kimi_k25" else pixels
    (path / "preprocessor_config.json").write_text(json.dumps(nested))
    return str(path)


@pytest.mark.parametrize("kind", ["kimi_k25", "kimi_vl"])
def test_as_published(kind: str, tmp_path: Path) -> None:
    tokens, ask = prompt_of("kimi_k25", SHOWN)
    expected, _ = judged("kimi_k25", tokens, ask, 1)
    driver = Driver(published(tmp_path, kind), max_model_len=256, num_blocks=64)
    torch.testing.assert_close(all_logits(driver, tokens, ask), expected, atol=1e-3, rtol=1e-3)


def test_text_alone(tmp_path: Path) -> None:
    expected, _ = judged("kimi_k25", words := list(range(5, 30)), prompt_of("kimi_k25", [words])[1], 1)
    driver = Driver(published(tmp_path, "kimi_k25"), num_blocks=64, language_model_only=True)
    torch.testing.assert_close(all_logits(driver, words), expected, atol=1e-3, rtol=1e-3)


def test_what_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="merge_kernel_size is no square"):
        Driver(published(tmp_path, "kimi_k25", merge_kernel_size=[2, 1]))
    with pytest.raises(CheckpointError, match="init_pos_emb_width is"):
        Driver(published(tmp_path, "kimi_k25", init_pos_emb_width=0))
