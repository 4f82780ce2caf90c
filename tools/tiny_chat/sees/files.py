"""Everything of `tiny-chat-sees` but its weights and its card, made of `tiny-chat`'s files.

python -m tools.tiny_chat.sees.files
"""

from __future__ import annotations

import json
from typing import Any

from tools.tiny_chat.sees.front import MEAN, STD, config
from tools.tiny_chat.sees.rows import ASSETS, IMAGE_TOKEN, MARK, PATCH, SIDE

TEXT, OWN = ASSETS / "tiny-chat", ASSETS / "tiny-chat-sees"
# A message's pictures come first, however its parts are ordered, each on a line of its own: so training wrote them.
_PICTURES = (
    "{%- for part in content if part.type is defined and part.type == 'image' -%}<image>{{- '\\n' -}}{%- endfor -%}"
)
_BEFORE = "{%- for part in content -%}{%- if part is string -%}"


def chat_template() -> str:
    """The text's, which writes `<image>` for a picture; the same without one."""
    template = (TEXT / "chat_template.jinja").read_text(encoding="utf-8")
    assert template.count(_BEFORE) == 1
    return template.replace(_BEFORE, _PICTURES + _BEFORE)


def added_token(**more: Any) -> dict[str, Any]:
    """`<image>` as tokenizers write a special token."""
    return {"content": MARK, "single_word": False, "lstrip": False, "rstrip": False, "normalized": False, **more}


def tokenizer() -> dict[str, Any]:
    """tokenizer.json: the byte that no text holds has become `<image>`, so the vocabulary keeps its size."""
    own: dict[str, Any] = json.loads((TEXT / "tokenizer.json").read_text(encoding="utf-8"))
    vocab = own["model"]["vocab"]
    assert vocab["ÿ"] == IMAGE_TOKEN
    own["model"]["vocab"] = {MARK if token == "ÿ" else token: number for token, number in vocab.items()}
    token = {"id": IMAGE_TOKEN, **added_token(special=True)}
    own["added_tokens"] = sorted([*own["added_tokens"], token], key=lambda one: int(one["id"]))
    return own


def main() -> None:
    """Write them."""
    OWN.mkdir(exist_ok=True)
    settings = json.loads((TEXT / "tokenizer_config.json").read_text(encoding="utf-8"))
    settings["added_tokens_decoder"][str(IMAGE_TOKEN)] = added_token(special=True)
    settings["additional_special_tokens"].append(MARK)
    settings |= {"extra_special_tokens": {"image_token": MARK}, "processor_class": "LlavaProcessor"}
    settings["chat_template"] = chat_template()
    image = {
        "image_processor_type": "CLIPImageProcessor",
        **{"do_convert_rgb": True, "do_resize": True, "size": {"height": SIDE, "width": SIDE}, "resample": 3},
        **{"do_center_crop": False, "do_rescale": True, "rescale_factor": 1 / 255, "do_normalize": True},
        **{"image_mean": [MEAN] * 3, "image_std": [STD] * 3},
    }
    processor = {
        **{"processor_class": "LlavaProcessor", "patch_size": PATCH, "num_additional_image_tokens": 1},
        **{"vision_feature_select_strategy": "default", "image_token": MARK},
    }
    for name, value in (
        ("config.json", config()),
        ("preprocessor_config.json", image),
        ("processor_config.json", processor),
        ("tokenizer_config.json", settings),
    ):
        (OWN / name).write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    written = json.dumps(tokenizer(), ensure_ascii=False, separators=(",", ":"))
    (OWN / "tokenizer.json").write_text(written, encoding="utf-8")
    (OWN / "chat_template.jinja").write_text(chat_template(), encoding="utf-8")
    (OWN / "generation_config.json").write_bytes((TEXT / "generation_config.json").read_bytes())


if __name__ == "__main__":
    main()
