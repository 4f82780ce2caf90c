"""Manta serves large language models as a Ray Serve application; `LLM` runs one in this process.

`import app` is cheap: neither torch nor Ray is imported before `LLM` or a deployment is asked for.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from app.engine.beam_search import BeamSearchParams
    from app.engine.sampling_params import SamplingParams
    from app.llm import LLM

__all__ = ["LLM", "BeamSearchParams", "SamplingParams"]


def __getattr__(name: str) -> Any:
    if name == "LLM":
        from app.llm import LLM

        return LLM
    if name == "SamplingParams":
        from app.engine.sampling_params import SamplingParams

        return SamplingParams
    if name == "BeamSearchParams":
        from app.engine.beam_search import BeamSearchParams

        return BeamSearchParams
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
