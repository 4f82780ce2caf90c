"""A checkpoint's settings, from the files of older and of newer transformers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from app.errors import CheckpointError
from app.media.settings import read_settings


def test_newer_files_go_before_older_ones(tmp_path: Path) -> None:
    assert read_settings(tmp_path) == {}
    (tmp_path / "preprocessor_config.json").write_text(json.dumps({"patch_size": 14, "resample": 2, "size": None}))
    assert read_settings(tmp_path) == {"patch_size": 14, "resample": 2}
    newer = {"image_processor": {"resample": 3}, "image_seq_length": 9}
    (tmp_path / "processor_config.json").write_text(json.dumps(newer))
    assert read_settings(tmp_path) == {"patch_size": 14, "resample": 3, "image_seq_length": 9}
    (tmp_path / "processor_config.json").write_text(json.dumps({"image_processor": 3}))
    with pytest.raises(CheckpointError, match="image_processor is no object"):
        read_settings(tmp_path)
