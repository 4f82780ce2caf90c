"""One model's pictures as those see them that make prompts: which it takes, and how each is prepared."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cached_property
from typing import Any

from app.checkpoints.fields.kinds import expect
from app.checkpoints.model_info import ModelInfo
from app.config.engine import EngineConfig
from app.errors import ConfigError, UnsupportedError
from app.media.processors import PROCESSORS
from app.media.processors.base import Detail, Layout, Processor
from app.media.reader import MediaReader
from app.media.settings import read_settings
from app.records.media_info import MediaInfo
from app.registry import suggestion
from app.text.tokenizer import Tokenizer


class ModelMedia:
    """A model's processor under its settings, and the `reader` of all pictures. `max_images`: most of one prompt."""

    def __init__(
        self,
        info: MediaInfo,
        settings: Mapping[str, Any],
        tokenizer: Tokenizer,
        reader: MediaReader,
        max_images: int,
        max_item_tokens: int,
    ) -> None:
        self.info = info
        self.family = info.processor
        self.reader = reader
        self.max_images = min(max_images, reader.config.max_images)
        self.max_item_tokens = max_item_tokens  # of one picture
        self.refusal: str | None = None  # a setting of the checkpoint's under which no picture is prepared
        self._tokenizer = tokenizer
        self._class: type[Processor] = PROCESSORS.load(info.processor)
        self._settings = dict(settings)

    @classmethod
    def of(cls, model: ModelInfo, tokenizer: Tokenizer, reader: MediaReader, config: EngineConfig) -> ModelMedia | None:
        """A model's, from its files, under the configuration's options; None: it takes text only.

        CheckpointError names what of the files cannot be used, ConfigError an option that the processor does not have.
        """
        info = MediaInfo.of(model)
        if info is None or info.image_token_id is None or info.processor not in PROCESSORS:
            return None
        placeholder = tokenizer.id_to_token(info.image_token_id)
        if placeholder is None:
            return None
        family: type[Processor] = PROCESSORS.load(info.processor)
        own = read_settings(model.directory)
        settings = family.settings_of(own, model.hf_config)
        for name, (field, default) in family.tokens.items():
            settings[name] = tokenizer.id_to_token(int(model.hf_config.get(field) or default))
        given = _checked(family, config.mm_processor_kwargs)
        most = config.limit_mm_per_prompt.get("image", reader.config.max_images)
        media = cls(
            info, {**settings, **given, "placeholder": placeholder}, tokenizer, reader, most, config.max_item_tokens
        )
        refused = (f"{name}={json.dumps(value)}" for name, value in family.refused.items() if own.get(name) is value)
        media.refusal = next(refused, None)
        return media

    def check(self, field: str) -> None:
        """UnsupportedError, which names the field, where the checkpoint prepares pictures in a way that is not known
        here."""
        if self.refusal is not None:
            what = f"the model's image processor has {self.refusal}, which is not supported; text is served"
            raise UnsupportedError(f"{field}: {what}", param=field)

    @cached_property
    def processor(self) -> Processor:
        """The processor for pictures of any detail."""
        return self._class(self._settings)

    @cached_property
    def _low(self) -> Processor:
        return self._class(self.processor.low())

    def processor_for(self, detail: Detail) -> Processor:
        """The processor for a picture of which a request asks for so much detail."""
        return self._low if detail == "low" else self.processor

    @property
    def reserved(self) -> tuple[str, ...]:
        """Texts that stand for pictures and videos, which a user's text may not bring into a prompt as such."""
        ids = self.info.image_token_id, self.info.video_token_id
        names = (self._tokenizer.id_to_token(token) for token in ids if token is not None)
        return tuple(dict.fromkeys((self.processor.written, *filter(None, names))))

    def token_ids(self, layout: Layout) -> list[int]:
        """The tokens of a picture."""
        return [token for text, count in layout.runs for token in self._ids[text] * count]

    @cached_property
    def _ids(self) -> _TokenIds:
        return _TokenIds(self._tokenizer)


class _TokenIds(dict[str, list[int]]):
    """Token ids of texts that stand beside a picture's placeholders, each looked up once."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        super().__init__()
        self._tokenizer = tokenizer

    def __missing__(self, text: str) -> list[int]:
        ids = self[text] = self._tokenizer.encode(text, add_special_tokens=False)
        return ids


def _checked(family: type[Processor], options: Mapping[str, Any]) -> dict[str, Any]:
    """Options for a processor, all of which it has; ConfigError otherwise."""
    for name, value in options.items():
        field = f"mm_processor_kwargs.{name}"
        if name not in family.options:
            raise ConfigError(
                f"{field}: this model's processor has none; {suggestion(name, family.options)}", param=field
            )
        expect(value, family.options[name], field, ConfigError)
    return dict(options)
