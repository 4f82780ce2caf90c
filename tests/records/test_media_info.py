"""What config.json says of pictures, judged by the defaults of transformers' configurations."""

from __future__ import annotations

from pathlib import Path

import pytest

from app.checkpoints.model_info import ModelInfo
from app.records.media_info import PROCESSORS, MediaInfo


def info_of(config: dict) -> MediaInfo | None:
    return MediaInfo.of(ModelInfo(Path("."), config, {}))


PUBLISHED_ALONE = {"kimi_vl", "internvl_chat"}  # transformers has no classes of them


@pytest.mark.parametrize("kind", [kind for kind in PROCESSORS if kind not in PUBLISHED_ALONE])
def test_placeholders_are_those_of_transformers(kind: str) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.AutoConfig.for_model(kind)
    fields = config.to_dict()
    info = info_of({**fields, "vision_config": fields["vision_config"] or {}})  # Gemma 4's is none by itself
    assert info is not None
    places = config, config.vision_config  # Phi-4's stands there
    names = ((place, name) for place in places for name in ("image_token_id", "image_token_index"))
    expected = next((getattr(place, name) for place, name in names if hasattr(place, name)), 0)  # 0: it has none
    assert info.image_token_id == expected
    assert info.is_alone == (expected == 0)
    left_out = info_of({"model_type": kind, "vision_config": {}})
    assert left_out is None or left_out.image_token_id == info.image_token_id


def test_a_model_of_text_takes_none() -> None:
    assert info_of({"model_type": "llama"}) is None
    pixtral = info_of({"model_type": "llava", "image_token_index": 10, "vision_config": {"model_type": "pixtral"}})
    assert pixtral is not None
    assert (pixtral.processor, pixtral.placeholder("image"), pixtral.placeholder("video")) == ("pixtral", 10, None)
