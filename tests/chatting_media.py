"""Tiny models that see (`tests/tiny_media.py`) with all that a conversation needs: a tokenizer, a chat template and the
settings of a processor."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from app.api.generation.served_models import load_served_model
from app.config.engine import EngineConfig
from app.config.model import ModelConfig
from app.media.processors import PROCESSORS
from app.records.media import MediaAsk
from app.records.media_info import PROCESSORS as FAMILIES
from tests.media.media_model import END, PAD, START, TEMPLATE, VIDEO, reader
from tests.tiny_media import IMAGE, MEAN, MODELS, SHAPES, STD, tiny_media_model

GRID = {"patch_size": 4, "merge_size": 2, "size": {"shortest_edge": 64, "longest_edge": 1024}}
SQUARE = {"size": {"height": 16, "width": 16}}
# Settings of a processor by the family of the tiny models.
SETTINGS: dict[str, dict[str, Any]] = {
    "qwen_vl": GRID,
    "glm_ocr": GRID,
    "paddleocr_vl": GRID,
    "kimi": {"media_proc_cfg": {"patch_size": 4, "merge_kernel_size": 2, "in_patch_limit": 64}},
    "clip": {**SQUARE, "do_center_crop": False},
    "llava_onevision": {**SQUARE, "image_grid_pinpoints": SHAPES},
    "llava_next": {},
    "phi4": {**SQUARE, "patch_size": 4, "dynamic_hd": 4},
    "pixtral": {"size": {"longest_edge": 32}},
    "aya_vision": {**SQUARE, "max_patches": 3},
    "cohere2_vision": {**SQUARE, "max_patches": 3, "patch_size": 2},
    "lfm2_vl": {
        **{"tile_size": 16, "encoder_patch_size": 4, "min_image_tokens": 2, "max_image_tokens": 6},
        "max_tiles": 2,
    },
    "lighton_ocr": {"size": {"longest_edge": 32}},
    "gemma3": {**SQUARE, "image_seq_length": 4},
    "gemma4": {"patch_size": 4, "pooling_kernel_size": 2, "max_soft_tokens": 12},
    "internvl": {**SQUARE, "max_patches": 3, "image_seq_length": 4},
    "internvl_chat": {**SQUARE, "image_seq_length": 4},
    "idefics3": {"size": {"longest_edge": 32}, "max_image_size": {"longest_edge": 16}, "image_seq_len": 4},
    "llama4": {**SQUARE, "max_patches": 3, "patch_size": 4},
}
# One that knows nothing of pictures.
TEXT_TEMPLATE = """{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
MARKS = [
    *("[IMG_BREAK]", "[IMG_END]", "<img>", "</img>", "<fake_token_around_image>", "<global-img>"),
    *(f"<row_{row}_col_{column}>" for row in (1, 2) for column in (1, 2)),
    *("<|img_thumbnail|>", *(f"<|img_row_{row}_col_{column}|>" for row in (1, 2) for column in (1, 2))),
    *("<|image_start|>", "<|image_end|>", "<|image|>", "<|tile_x_separator|>", "<|tile_y_separator|>"),
]


def family_of(name: str) -> str:
    """The family of the processor of a tiny model."""
    kind = MODELS[name].kind
    return "pixtral" if name == "pixtral" else FAMILIES[MODELS[name].published or kind]


def chatting_media_model(name: str, path: Path) -> Path:
    """Write the directory of a tiny model that can be talked to."""
    path.mkdir()
    for file in tiny_media_model(name).iterdir():
        (path / file.name).symlink_to(file)
    letters = {letter: i for i, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    backend = tokenizers.Tokenizer(models.BPE(letters, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    ends = ["<|im_start|>", "<|im_end|>"]
    backend.add_special_tokens([*ends, *(f"<|{i}|>" for i in range(258, IMAGE)), PAD, VIDEO, START, END, *MARKS])
    assert backend.token_to_id(PAD) == IMAGE
    backend.save(str(path / "tokenizer.json"))
    (path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))
    family = family_of(name)
    config = json.loads((path / "config.json").read_text())
    fields = [field for field, _ in PROCESSORS.load(family).tokens.values()]
    _write(path / "config.json", {**config, **dict(zip(fields, (302, 303), strict=False))})
    usual = f"{START}{PAD}{END}"
    written = {"gemma3": START, "llama4": "<|image|>", "aya_vision": "<image>"}.get(family, usual)
    template = TEXT_TEMPLATE if family == "internvl_chat" else TEMPLATE.replace(usual, written)
    (path / "chat_template.jinja").write_text(template)
    _write(path / "preprocessor_config.json", {**SETTINGS[family], "image_mean": MEAN, "image_std": STD})
    return path


def ask_of(path: Path, token_ids: Sequence[int], file: bytes) -> MediaAsk:
    """The record of the one picture that a prompt of the model in `path` shows, read from its file here."""
    own = reader()
    media = load_served_model(ModelConfig(name="m", engine=EngineConfig(model=str(path))), own).media
    assert media is not None
    shown = media.read("image", file)
    own.close()
    assert list(token_ids).count(IMAGE) == shown.layout.num_tokens
    return MediaAsk((shown.item(list(token_ids).index(IMAGE), shown.layout.num_tokens),))


def _write(file: Path, content: dict[str, Any]) -> None:
    file.unlink(missing_ok=True)
    file.write_text(json.dumps(content))
