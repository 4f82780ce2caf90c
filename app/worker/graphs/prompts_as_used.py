"""Graphs of steps with prompts that are captured once they are in use, for an engine that never idles (`LLM`).

The third step that one would have served is held up by its capture, some tenths of a second: whose like came so often
is expected to come again. A start does nothing for them, and keeps no memory for them: they take what the device has
left. Steps of as many tokens as one in which the device does not wait for launches are never captured.
"""

from __future__ import annotations

import logging
from collections import Counter

import torch

from app.heap import set_aside
from app.layers.context import HiddenStates
from app.worker.graphs.prompt_graphs import PromptGraphs, waits
from app.worker.graphs.prompt_step import PromptKey, PromptStep
from app.worker.graphs.recording import Recorder
from app.worker.rows.input_batch import InputBatch

logger = logging.getLogger("manta.graphs")

USES = 3  # of a step: the last of them is captured
LEAST_FREE_BYTES = 1 << 30  # of the device, or no more are


class PromptsAsUsed(PromptGraphs):
    """Replays of the steps that came several times."""

    def __init__(self, step: PromptStep, recorder: Recorder) -> None:
        super().__init__(step, recorder)
        self._came = Counter[PromptKey]()  # steps that ran launch by launch, by the smallest that would have served
        self._most_tokens = step.sizes[-1] if step.sizes else 0  # of those that may be captured

    @property
    def missing(self) -> list[PromptKey]:
        """None: idle time has nothing to do for them."""
        return []

    def hidden(self, batch: InputBatch) -> HiddenStates | None:
        """See PromptReplays; a step that it finds none for may be captured now."""
        hidden = super().hidden(batch)
        if hidden is not None:
            return hidden
        keys = self.keys_for(batch)
        return super().hidden(batch) if keys and self._is_captured(keys[0]) else None

    def _is_captured(self, key: PromptKey) -> bool:
        """Count a step that would have run as this one, which is captured if that is the one too many."""
        if key.tokens > self._most_tokens:
            return False
        self._came[key] += 1
        if self._came[key] < USES:
            return False
        try:
            with set_aside():  # before a capture Python looks at all that may be garbage
                self._most_tokens = self._capture_or_bound(key)
        except Exception as error:  # whatever a kernel or a library raises while it is captured
            logger.warning("CUDA graphs: a step with prompts cannot be captured; no more are", exc_info=error)
            self._most_tokens = 0
        return key in self.replays

    def _capture_or_bound(self, key: PromptKey) -> int:
        """Capture it, if there is room and the device waits in it; returns the most tokens of the next one."""
        device = self.step.device
        if self.is_full or torch.cuda.mem_get_info(device)[0] < LEAST_FREE_BYTES:
            return 0
        if not waits(self.step, key, device):
            return key.tokens - 1
        self.capture([key])
        return self._most_tokens
