"""Reads how a checkpoint's weights are quantized, where config.json does not say it: in a file of the tool that wrote
it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

# The files in the order in which they are looked for, and whose they are if they do not name a `quant_method`.
_FILES = {
    "quantize_config.json": "gptq",  # of AutoGPTQ; of AutoAWQ with names of its own
    "quant_config.json": "awq",  # of AutoAWQ, and of SqueezeLLM with a name of its own
    "hf_quant_config.json": "modelopt",
}
_OWN_NAMES = {"w_bit": "awq", "q_group_size": "awq", "zero_point": "awq", "wbits": "squeezellm"}


def older_scheme(read: Callable[[str], Mapping[str, Any]]) -> dict[str, Any]:
    """The scheme with its `quant_method`; empty where there is none of these files. `read` gives a file's object by
    name, empty where it is not there."""
    for file, method in _FILES.items():
        if found := read(file):
            named = next((own for name, own in _OWN_NAMES.items() if name in found), method)
            return {**found, "quant_method": found.get("quant_method") or named}
    return {}
