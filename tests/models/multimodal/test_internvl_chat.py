"""InternVL as published: which model is built for its config.json, and what of it is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from app.checkpoints.model_info import ModelInfo
from app.distributed.parallel_groups import ParallelGroups
from app.errors import UnsupportedError
from app.kernels.attention import reference
from app.layers.context import BuildContext
from app.models.multimodal.internvl_chat import InternChatEncoder
from app.records.media_info import MediaInfo
from tests.tiny_internvl import IMAGE
from tests.tiny_media import tiny_media_model


def info_with(path: Path, **fields: Any) -> ModelInfo:
    for file in tiny_media_model("internvl_chat").glob("*.json"):
        (path / file.name).write_text(file.read_text())
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, **fields}))
    return ModelInfo.from_directory(str(path))


def test_it_writes_and_its_placeholder_is_found_among_added_tokens(tmp_path: Path) -> None:
    info = info_with(tmp_path)
    assert info.runner("auto") == "generate"
    media = MediaInfo.of(info)
    assert media is not None
    assert (media.processor, media.image_token_id) == ("internvl_chat", IMAGE)
    (tmp_path / "added_tokens.json").unlink()
    media = MediaInfo.of(info_with(tmp_path, image_token_id=7))
    assert media is not None
    assert media.image_token_id == 7  # no file need name the token
    assert info_with(tmp_path, architectures=["Qwen2_5OmniModel"]).runner("auto") == "generate"


@pytest.mark.parametrize("fields", [{"ps_version": "v1"}, {"ps_version": None}, {"select_layer": -2}])
def test_what_is_built_otherwise_is_refused(fields: dict[str, Any], tmp_path: Path) -> None:
    ctx = BuildContext(torch.float32, torch.device("meta"), 256, reference.OPS, ParallelGroups())
    InternChatEncoder(ctx, info_with(tmp_path))
    (name,) = fields
    with pytest.raises(UnsupportedError, match=f"{name}="):
        InternChatEncoder(ctx, info_with(tmp_path, **fields))
