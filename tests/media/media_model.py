"""A model directory that takes pictures, with everything but weights: Qwen2-VL's tokens, template and processor."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import tokenizers

from app.config.engine import EngineConfig
from app.config.media import MediaConfig
from app.media.reader import MediaReader
from app.text.model_media import ModelMedia
from app.text.served_model import ServedModel
from tests import limits
from tests.api.conftest import served, write_model

PAD, VIDEO, START, END = "<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>"
TEMPLATE = """{%- if tools %}<|im_start|>system
{{ tools | tojson }}<|im_end|>
{% endif %}{%- for m in messages %}<|im_start|>{{ m.role }}
{% if m.content is string %}{{ m.content }}{% else %}{% for part in m.content %}{% if part.type == 'image' -%}
<|vision_start|><|image_pad|><|vision_end|>{% elif part.type == 'video' -%}
<|vision_start|><|video_pad|><|vision_end|>{% else %}{{ part.text }}{% endif %}{% endfor %}{% endif %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""


def write_media_model(path: Path, max_len: int = 512, kind: str = "qwen2_vl") -> Path:
    """Write the directory."""
    write_model(path, max_len)
    backend = tokenizers.Tokenizer.from_file(str(path / "tokenizer.json"))
    backend.add_special_tokens([PAD, VIDEO, START, END])
    backend.save(str(path / "tokenizer.json"))
    (path / "chat_template.jinja").write_text(TEMPLATE)
    config = json.loads((path / "config.json").read_text()) | {
        "architectures": ["Qwen2VLForConditionalGeneration"],
        "model_type": kind,
        "vocab_size": backend.get_vocab_size(),
        "image_token_id": backend.token_to_id(PAD),
        "video_token_id": backend.token_to_id(VIDEO),
        "vision_start_token_id": backend.token_to_id(START),
        "vision_end_token_id": backend.token_to_id(END),
        "vision_config": {"model_type": "qwen2_vl", "patch_size": 14, "spatial_merge_size": 2},
    }
    (path / "config.json").write_text(json.dumps(config))
    videos = {"size": {"shortest_edge": 784, "longest_edge": 784 * 64}, "patch_size": 14}
    (path / "video_preprocessor_config.json").write_text(json.dumps(videos))
    (path / "preprocessor_config.json").write_text(json.dumps({"min_pixels": 784, "max_pixels": 784 * 64}))
    return path


def reader(**options: Any) -> MediaReader:
    """A reader for a busy machine."""
    return MediaReader(MediaConfig(**{"decode_timeout_s": limits.patience_s(), **options}), b"k" * 32)


def seeing(path: Path, own: MediaReader, name: str = "m", **options: Any) -> ServedModel:
    """The model in `path` as the ingress would serve it."""
    model = served(path, name)
    model.media = ModelMedia.of(model.info, model.tokenizer, own, EngineConfig(**options))
    return model
