"""Rotary tables that transformers would choose anew in each forward pass, by the longest position in it.

That needs the host, and spoils the keys that are cached already; so the context that is served decides once.
"""

from __future__ import annotations

from typing import Any

import torch

from app.errors import UnsupportedError

_FIXED = "fixed"


def _changes(kind: object) -> bool:
    return isinstance(kind, str) and ("dynamic" in kind or kind == "longrope")


def fix_ropes(hf: Any, max_model_len: int) -> None:
    """Give every rotary module the frequencies of `max_model_len`; UnsupportedError where layers have several."""
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    for module in hf.modules():
        kind = getattr(module, "rope_type", None)
        if isinstance(kind, dict) and any(map(_changes, kind.values())):
            kinds = ", ".join(sorted(set(kind.values())))
            raise UnsupportedError(f"rope types that follow the text's length: {kinds}", param="model")
        if _changes(kind):
            with torch.device("cpu"):
                module.inv_freq, module.attention_scaling = ROPE_INIT_FUNCTIONS[kind](
                    module.config, torch.device("cpu"), seq_len=max_model_len
                )
            module.rope_type = _FIXED
