"""What the client saw of one streamed answer, and the metrics that follow from it.

Definitions are those of vLLM's serving benchmark, with one exception that is stricter: TTFT ends with the first chunk
that carries something of the answer, not with the empty chunk that opens a stream.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field


@dataclass(slots=True)
class AnswerRecord:
    """One request. `begin` is in seconds since the epoch; all other times are seconds since `begin`."""

    kind: str  # the user's: chat, long-prompt, ...
    begin: float
    ttft_s: float | None = None  # to the first chunk of the answer; None when nothing came
    gaps_s: list[float] = field(default_factory=list)  # between neighbouring chunks: the samples of ITL
    total_s: float = 0.0  # to the end of the stream
    num_prompt_tokens: int = 0  # by the server's usage chunk
    num_cached_tokens: int = 0
    num_output_tokens: int = 0
    error: str | None = None

    @property
    def e2e_s(self) -> float | None:
        """Time to the last chunk of the answer."""
        return None if self.ttft_s is None else self.ttft_s + sum(self.gaps_s)

    @property
    def tpot_s(self) -> float | None:
        """(E2E - TTFT) / (output tokens - 1); None for an answer of one token or none."""
        if self.ttft_s is None or self.num_output_tokens < 2:
            return None
        return sum(self.gaps_s) / (self.num_output_tokens - 1)

    def chunk_times(self) -> list[float]:
        """When each chunk came, in seconds since the epoch."""
        if self.ttft_s is None:
            return []
        times = [self.begin + self.ttft_s]
        for gap in self.gaps_s:
            times.append(times[-1] + gap)
        return times

    def to_json(self) -> str:
        """One line; microseconds are kept."""
        fields = asdict(self)
        fields["gaps_s"] = [round(gap, 6) for gap in self.gaps_s]
        return json.dumps(fields)

    @classmethod
    def from_json(cls, line: str) -> AnswerRecord:
        """The inverse of `to_json`."""
        return cls(**json.loads(line))
