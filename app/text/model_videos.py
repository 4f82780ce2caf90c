"""One model's videos, as those see them that make prompts: whose processor, and the tokens that stand for them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cached_property
from typing import Any

from app.checkpoints.model_info import ModelInfo
from app.media.settings import read_settings
from app.media.videos.video_processor import VideoProcessor
from app.media.videos.video_processors import VIDEO_PROCESSORS
from app.records.media_info import MediaInfo
from app.text.tokenizer import Tokenizer


class ModelVideos:
    """A model's processor of videos under its settings. `max_items`: most of one prompt."""

    def __init__(self, info: MediaInfo, settings: Mapping[str, Any], tokenizer: Tokenizer, max_items: int) -> None:
        assert info.video_token_id is not None
        self.token_id = info.video_token_id
        self.family = info.video_processor
        self.max_items = max_items
        self.refusal: str | None = None  # a setting of the checkpoint's under which nothing is prepared
        self._tokenizer = tokenizer
        self._settings = dict(settings)

    @classmethod
    def of(
        cls, model: ModelInfo, info: MediaInfo, tokenizer: Tokenizer, given: Mapping[str, Any], max_items: int
    ) -> ModelVideos | None:
        """A model's, from its files, with the options `given` in their place; None: it takes no videos.

        CheckpointError names what of the files cannot be used.
        """
        family = family_of(info)
        if family is None or info.video_token_id is None:
            return None
        placeholder = tokenizer.id_to_token(info.video_token_id)
        own = read_settings(model.directory, "video_processor")
        settings = family.settings_of(own, model.hf_config)
        for name, (field, default) in family.tokens.items():
            settings[name] = tokenizer.id_to_token(int(model.hf_config.get(field) or default))
        if placeholder is None or None in settings.values():
            return None
        mine = {name: value for name, value in given.items() if name in family.options}
        videos = cls(info, {**settings, **mine, "placeholder": placeholder}, tokenizer, max_items)
        refused = (f"{name}={json.dumps(value)}" for name, value in family.refused.items() if own.get(name) is value)
        videos.refusal = next(refused, None)
        return videos

    @cached_property
    def processor(self) -> VideoProcessor:
        """The processor of all videos."""
        return VIDEO_PROCESSORS.load(self.family)(self._settings)

    @cached_property
    def around_ids(self) -> tuple[int | None, int | None] | None:
        """Tokens on both sides of a placeholder that a video's own tokens bring themselves; None: they do not."""
        around = self.processor.around_pad
        return (
            None if around is None else (self._tokenizer.token_to_id(around[0]), self._tokenizer.token_to_id(around[1]))
        )


def family_of(info: MediaInfo) -> type[VideoProcessor] | None:
    """The class of a model's processor of videos; None: it takes none."""
    return VIDEO_PROCESSORS.load(info.video_processor) if info.video_processor else None
