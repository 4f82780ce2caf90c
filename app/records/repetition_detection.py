"""When an answer that goes in circles is ended: fields and meaning are vLLM's."""

from __future__ import annotations

from typing import Self

from pydantic import BaseModel, ConfigDict, Field, model_validator


class RepetitionDetection(BaseModel):
    """The output ends when its last tokens are one pattern, several times over."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    max_pattern_size: int = Field(ge=1, le=256, description="Most tokens of a pattern.")
    min_pattern_size: int = Field(1, ge=0, le=256, description="Fewest tokens of a pattern; 0 means 1.")
    min_count: int = Field(ge=2, le=4096, description="How often the pattern must stand there in a row.")

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.min_pattern_size > self.max_pattern_size:
            raise ValueError(f"min_pattern_size is more than max_pattern_size={self.max_pattern_size}")
        return self
