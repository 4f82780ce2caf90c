"""Equal files give equal revisions wherever they lie; other weights, types or descriptions give others."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from app.config import EngineConfig
from app.engine.kv_cache.model_revision import model_revision
from app.engine.model_info import ModelInfo


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
