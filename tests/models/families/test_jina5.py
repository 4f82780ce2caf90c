"""Jina Embeddings v5 in their published layout; the judge is PEFT over transformers' Qwen3 and EuroBERT."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoConfig, AutoModel

from app.checkpoints.adapters.adapter_files import AdapterFiles
from app.checkpoints.adapters.task_adapter import TASKS
from app.checkpoints.model_info import ASSETS, ModelInfo
from app.engine.control.weights import update_weights
from app.errors import CheckpointError, UnsupportedError
from tests.hf_logprobs import prompts
from tests.worker.pooling.pooling_driver import PoolingDriver

TOKENIZER = str(ASSETS / "tiny-chat")
PROMPTS = prompts((1, 17, 3, 60, 33))
SIZES = {"hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 2, "num_attention_heads": 4, "head_dim": 16}
SIZES |= {"num_key_value_heads": 2, "vocab_size": 512, "max_position_embeddings": 130, "initializer_range": 0.3}
MODULES = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def published(directory: Path, kind: str) -> None:
    """Writes a random model with an adapter for each task."""
    torch.manual_seed(0)
    own = SIZES if kind == "qwen3" else {name: value for name, value in SIZES.items() if name != "head_dim"}
    ids = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "mask_token_id": 3}
    base = AutoModel.from_config(AutoConfig.for_model(kind, **own, **ids))
    base.save_pretrained(directory)
    for task in TASKS[:2]:
        adapted = get_peft_model(base, LoraConfig(r=4, lora_alpha=6, target_modules=MODULES))
        with torch.no_grad():
            for name, parameter in adapted.named_parameters():
                if "lora_B" in name:
                    parameter.normal_(std=0.3)
        adapted.save_pretrained(directory / "adapters" / task)
        base = adapted.unload()
    file = directory / "config.json"
    marks = {"architectures": ["JinaEmbeddingsV5Model"], "model_type": "jina_embeddings_v5", "task_names": list(TASKS)}
    marks |= {"is_decoder": False} if kind == "eurobert" else {}
    (directory / "base").mkdir()
    for name in ("config.json", "model.safetensors"):
        shutil.copy(directory / name, directory / "base")
    file.write_text(json.dumps(json.loads(file.read_text()) | marks))


def judged(directory: Path, task: str) -> list[np.ndarray[Any, Any]]:
    base = AutoModel.from_pretrained(directory / "base", dtype=torch.float32)
    judge = PeftModel.from_pretrained(base, str(directory / "adapters" / task)).eval()
    with torch.inference_mode():
        found = [judge(input_ids=torch.tensor([prompt])).last_hidden_state[0, -1] for prompt in PROMPTS]
    return [torch.nn.functional.normalize(one, dim=0).numpy() for one in found]


@pytest.mark.parametrize("kind", ["qwen3", "eurobert"])
def test_vectors_of_each_task(tmp_path: Path, kind: str) -> None:
    published(tmp_path, kind)
    tasks = {"": TASKS[0], TASKS[1]: TASKS[1]}
    expected = {task: judged(tmp_path, task) for task in tasks.values()}
    assert np.abs(expected[TASKS[0]][1] - expected[TASKS[1]][1]).max() > 1e-2
    for given, task in tasks.items():
        config = json.loads((tmp_path / "config.json").read_text())
        (tmp_path / "config.json").write_text(json.dumps(config | ({"jina_task": given} if given else {})))
        with PoolingDriver(tmp_path, tokenizer=TOKENIZER, max_model_len=128) as driver:
            found = driver.pool(PROMPTS, task="embed")
        for vector, judge in zip(found, expected[task], strict=True):
            np.testing.assert_allclose(vector, judge, atol=1e-4)


def test_an_update_brings_the_adapter_beside_it_and_none_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(AdapterFiles, "content", None)  # all of the file in memory
    first, second = tmp_path / "first", tmp_path / "second"
    published(first, "qwen3")
    shutil.copytree(first, second)
    shutil.rmtree(second / "adapters" / TASKS[0])
    shutil.move(second / "adapters" / TASKS[1], second / "adapters" / TASKS[0])
    with PoolingDriver(first, tokenizer=TOKENIZER, max_model_len=128) as driver:
        for directory in (first, second):
            if directory == second:
                for _ in update_weights(driver.core, str(second)):
                    pass
            for vector, judge in zip(driver.pool(PROMPTS, task="embed"), judged(directory, TASKS[0]), strict=True):
                np.testing.assert_allclose(vector, judge, atol=1e-4)


def test_what_cannot_be(tmp_path: Path) -> None:
    published(tmp_path, "qwen3")
    options: dict[str, Any] = {"tokenizer": TOKENIZER, "max_model_len": 128}
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"jina_task": "../retrieval"}))
    with pytest.raises(UnsupportedError, match="jina_task"):
        PoolingDriver(tmp_path, **options)
    (tmp_path / "config.json").write_text(json.dumps(config | {"jina_task": TASKS[3]}))
    with pytest.raises(CheckpointError, match=r"adapter_config\.json"):  # which is not there
        PoolingDriver(tmp_path, **options)
    (tmp_path / "config.json").write_text(json.dumps(config | {"is_decoder": True}))
    assert ModelInfo.from_directory(str(tmp_path)).is_causal
