"""Manta serves large language models as a Ray Serve application; `LLM` runs one in this process.

`import app` is cheap: neither torch nor Ray is imported before `LLM` or a deployment is asked for.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from app.heap import uncollected

if TYPE_CHECKING:
    from app.beams.search import BeamSearchParams
    from app.offline.llm import LLM
    from app.offline.lora_request import LoRARequest
    from app.records.pooling_params import PoolingParams
    from app.records.sampling_params import SamplingParams
    from app.structured.structured_outputs import StructuredOutputs

__all__ = ["LLM", "BeamSearchParams", "LoRARequest", "PoolingParams", "SamplingParams", "StructuredOutputs"]

_MODULES = {
    "LLM": "app.offline.llm",
    "BeamSearchParams": "app.beams.search",
    "LoRARequest": "app.offline.lora_request",
    "PoolingParams": "app.records.pooling_params",
    "SamplingParams": "app.records.sampling_params",
    "StructuredOutputs": "app.structured.structured_outputs",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    with uncollected():
        return getattr(importlib.import_module(_MODULES[name]), name)
