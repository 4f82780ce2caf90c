"""Which pictures a model takes: from its files and its configuration."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from app.errors import CheckpointError, ConfigError, UnsupportedError
from tests.media.media_model import PAD, VIDEO, reader, seeing, write_media_model
from tests.media.pictures import file_of, picture


def test_options_go_before_the_checkpoint_s_own(tmp_path: Path) -> None:
    path = write_media_model(tmp_path / "m")
    media = seeing(path, reader(max_images=9)).media
    assert media is not None
    assert (media.most("image"), media.reserved) == (9, (PAD, VIDEO))
    assert media.kinds["image"].processor.settings["max_pixels"] == 784 * 64
    assert media.num_tokens("image", file_of(picture(999, 999)), "high") == 64
    given = {"limit_mm_per_prompt": {"image": 2}, "mm_processor_kwargs": {"max_pixels": 784 * 4}}
    media = seeing(path, reader(), **given).media
    assert media is not None
    assert (media.most("image"), media.num_tokens("image", file_of(picture(999, 999)))) == (2, 4)
    with pytest.raises(ConfigError, match=r"mm_processor_kwargs\.max_pixel: .* did you mean max_pixels"):
        seeing(path, reader(), mm_processor_kwargs={"max_pixel": 1})
    with pytest.raises(ConfigError, match=r"mm_processor_kwargs\.min_pixels is 0"):
        seeing(path, reader(), mm_processor_kwargs={"min_pixels": 0})
    (path / "preprocessor_config.json").write_text(json.dumps({"patch_size": "14"}))
    with pytest.raises(CheckpointError, match="patch_size is '14'"):
        seeing(path, reader())


def test_a_model_of_text_takes_none(tmp_path: Path) -> None:
    path = write_media_model(tmp_path / "m")
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"model_type": "qwen2"}))
    assert seeing(path, reader()).media is None


def test_pictures_of_a_setting_that_is_not_known_are_refused_and_text_is_not(tmp_path: Path) -> None:
    path = write_media_model(tmp_path / "m")
    for own, name in (({"do_resize": False}, "do_resize=false"), ({"do_resize": True}, None), ({}, None)):
        (path / "preprocessor_config.json").write_text(json.dumps(own))
        media = seeing(path, reader()).media
        assert media is not None
        assert media.kinds["image"].refusal == name
        assert media.reserved == (PAD, VIDEO)  # a user's words are kept apart from them all the same
        if name is not None:
            with pytest.raises(UnsupportedError, match=f"messages.0: the model's image processor has {name}, which"):
                media.check("messages.0", "image")
