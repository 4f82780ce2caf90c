"""Equal files give equal revisions wherever they lie; other weights, types or descriptions give others."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from app.checkpoints import model_revision as module
from app.checkpoints.model_info import ModelInfo
from app.checkpoints.model_revision import model_revision
from app.config.engine import EngineConfig


def write(path: Path, rows: int = 4, vocab_size: int = 10) -> Path:
    path.mkdir()
    (path / "config.json").write_text(json.dumps({"architectures": ["X"], "vocab_size": vocab_size}))
    save_file({"a": np.zeros((rows, 3), dtype=np.float32)}, str(path / "model.safetensors"))
    return path


def revision(path: Path, **options: object) -> str:
    config = EngineConfig.model_validate({"model": str(path), **options})
    return model_revision(ModelInfo.from_directory(str(path)), config)


def test_the_content_counts_and_the_place_does_not(tmp_path: Path) -> None:
    first = revision(write(tmp_path / "a"))
    assert revision(write(tmp_path / "b")) == first
    assert revision(write(tmp_path / "c", rows=5)) != first
    assert revision(write(tmp_path / "d", vocab_size=11)) != first
    assert len(first) == 32


def test_what_changes_the_weights_changes_the_revision(tmp_path: Path) -> None:
    path = write(tmp_path / "a")
    names = [
        revision(path),
        revision(path, dtype="bfloat16"),
        revision(path, kv_cache_dtype="fp8"),
        revision(path, quantization="fp8"),
        revision(path, load_format="dummy"),
        revision(path, load_format="dummy", seed=1),
    ]
    assert len(set(names)) == len(names)
    assert revision(path, kv_cache_dtype="fp8_e4m3") == revision(path, kv_cache_dtype="fp8")
    assert revision(path, seed=1) == names[0]  # the seed of dummy weights: there are none here
    assert revision(path, max_num_seqs=3) == names[0]


@pytest.mark.parametrize("tensor", range(3))
def test_other_weights_of_equal_shape_are_another_model(tmp_path: Path, tensor: int) -> None:
    """One tensor of a file that was trained further."""
    rng = np.random.default_rng(0)
    shapes = [(100, 64), (64,), (2,)]  # two bytes too small for a sample at each place
    tensors = {str(i): rng.standard_normal(shape).astype(np.float16) for i, shape in enumerate(shapes)}
    path = write(tmp_path / "a")
    save_file(tensors, str(path / "model.safetensors"))
    (path / "model.safetensors.index.json").write_text("{}")
    first = revision(path)
    assert revision(path) == first
    tensors[str(tensor)] += np.float16(0.01)
    save_file(tensors, str(path / "model.safetensors"))
    assert revision(path) != first


def test_the_adapter_that_is_added_to_the_weights_counts_and_others_do_not(tmp_path: Path) -> None:
    """Jina Embeddings v5: one task's is served."""
    path = write(tmp_path / "a")
    marks = {"architectures": ["JinaEmbeddingsV5Model"], "model_type": "jina_embeddings_v5"}
    (path / "config.json").write_text(json.dumps({**marks, "vocab_size": 10}))

    def train(task: str, value: float, scale: int = 4) -> str:
        folder = path / "adapters" / task
        folder.mkdir(parents=True, exist_ok=True)
        save_file({"lora_A": np.full((4, 3), value, np.float32)}, str(folder / "adapter_model.safetensors"))
        (folder / "adapter_config.json").write_text(json.dumps({"r": 4, "lora_alpha": scale}))
        return revision(path)

    served = [train("retrieval", 1.0), train("retrieval", 2.0), train("retrieval", 2.0, scale=8)]
    assert len(set(served)) == 3
    assert train("clustering", 1.0) == served[2]
    (path / "config.json").write_text(json.dumps({**marks, "vocab_size": 10, "jina_task": "clustering"}))
    assert train("clustering", 1.0) != train("clustering", 2.0)


def test_a_file_that_only_looks_like_weights_does_no_harm(tmp_path: Path) -> None:
    path = write(tmp_path / "a")
    first = revision(path)
    (path / "other.safetensors").write_text("version https://git-lfs.github.com/spec/v1")
    assert revision(path) != first


def test_few_bytes_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, count = write(tmp_path / "a"), 0
    save_file({str(i): np.zeros(100_000, np.float32) for i in range(20)}, str(path / "model.safetensors"))
    samples = module._samples

    def counted(*arguments: Any) -> Iterator[bytes]:
        nonlocal count
        for part in samples(*arguments):
            count += len(part)
            yield part

    monkeypatch.setattr(module, "_samples", counted)
    revision(path)
    assert count < 20_000
