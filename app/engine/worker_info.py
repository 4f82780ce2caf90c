"""What a worker reports once it has started; plain data, so that the host half can read it without torch (I8)."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True, frozen=True)
class WorkerInfo:
    """What the workers found out while they started: the scheduler sizes itself from it."""

    num_blocks: int
    device: str
    dtype: str
    notes: list[str] = field(default_factory=list)  # one line for each choice made and why
