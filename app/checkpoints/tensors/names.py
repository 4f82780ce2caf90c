"""Names of a checkpoint's tensors, turned into ours."""

from __future__ import annotations

import re
from collections.abc import Sequence

Rule = tuple[str, str]  # a pattern anywhere in the name, and what stands there instead

_TEXT: list[Rule] = [
    # transformers 5 writes Qwen2-Audio's and Voxtral's with one `model.` more.
    (r"^(?:model\.language_model|language_model\.model(?:\.model)?|model\.text_model)\.", "model."),
    (r"^language_model\.lm_head\.", "lm_head."),
]
_IMAGES = (
    "vision_tower.",
    "vision_model.",
    "multi_modal_projector.",
    "mm_projector.",
    "model.vision_tower.",
    "model.multi_modal_projector.",
    "model.visual.",
)


def renamed(name: str, rules: Sequence[Rule]) -> str:
    """`name` after all rules, one after the other."""
    for pattern, own in rules:
        name = re.sub(pattern, own, name)
    return name


def text_name(name: str) -> str | None:
    """Our name in a checkpoint that may hold more than its language model; None for what sees images."""
    return None if name.startswith(_IMAGES) else renamed(name, _TEXT)


def is_behind_last_layer(name: str, num_layers: int) -> bool:
    """True if a tensor is of a layer that predicts further tokens (DeepSeek-V3, GLM-4.5), numbered behind the last."""
    found = re.match(r"model\.layers\.(\d+)\.", name)
    return found is not None and int(found[1]) >= num_layers
