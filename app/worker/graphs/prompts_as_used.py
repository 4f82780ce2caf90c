"""Graphs of steps with prompts that are captured once they are in use, for an engine that never idles (`LLM`).

The third step that one would have served is held up by its capture, some tenths of a second: whose like came so often
is expected to come again; the step's clock does not count that. A start captures nothing for them, and keeps no memory:
they take a little of what the KV cache left. Steps of as many tokens as one in which the device does not wait for
launches are never captured.
"""

from __future__ import annotations

import logging
from collections import Counter

import torch

from app.heap import set_aside
from app.layers.context import HiddenStates
from app.worker.graphs.prompt_graphs import MOST_OF_DEVICE, PromptGraphs, waits
from app.worker.graphs.prompt_step import PromptKey, PromptStep
from app.worker.graphs.recording import Recorder
from app.worker.rows.input_batch import InputBatch
from app.worker.rows.pending_step import StepClock

logger = logging.getLogger("manta.graphs")

USES = 3  # of a step: the last of them is captured
LEAST_FREE_BYTES = 1 << 30  # of the device, or no more are captured


class PromptsAsUsed(PromptGraphs):
    """Replays of the steps that came several times."""

    def __init__(self, step: PromptStep, recorder: Recorder, unused: float) -> None:
        """`unused`: the share of the device that the sizing of the KV cache left to nobody."""
        super().__init__(step, recorder)
        self._most_of_device = min(MOST_OF_DEVICE, unused / 2)  # the last one may take more than is left
        self._least_free: int | None = None  # bytes; None: none was captured yet
        self._came = Counter[PromptKey]()  # steps that ran launch by launch, by the smallest that would have served
        self._most_tokens = step.sizes[-1] if step.sizes else 0  # of those that may be captured

    @property
    def missing(self) -> list[PromptKey]:
        """None: idle time has nothing to do for them."""
        return []

    def hidden(self, batch: InputBatch, clock: StepClock) -> HiddenStates | None:
        """See PromptReplays; a step that it finds none for may be captured now."""
        hidden = super().hidden(batch, clock)
        if hidden is not None:
            return hidden
        keys = self.keys_for(batch)
        if not keys or not self._is_due(keys[0]):
            return None
        self._capture_once(keys[0])
        clock.restart()
        return super().hidden(batch, clock)

    def _is_due(self, key: PromptKey) -> bool:
        """Count a step that would have run as this one; True if that is the one too many."""
        if key.tokens > self._most_tokens:
            return False
        self._came[key] += 1
        return self._came[key] >= USES

    def _capture_once(self, key: PromptKey) -> None:
        """Capture it; after one that fails there are no others."""
        try:
            with set_aside():  # before a capture Python looks at all that may be garbage
                self._most_tokens = self._capture_or_bound(key)
        except Exception as error:  # whatever a kernel or a library raises while it is captured
            logger.warning("CUDA graphs: a step with prompts cannot be captured; no more are", exc_info=error)
            self._most_tokens = 0

    def _capture_or_bound(self, key: PromptKey) -> int:
        """Capture it, if there is room and the device waits in it; returns the most tokens of the next one."""
        if not self._has_room():
            return 0
        if not waits(self.step, key, self.step.device):
            return key.tokens - 1
        self.capture([key])
        return self._most_tokens

    def _has_room(self) -> bool:
        """True until their share is taken, by what the device has left: the rest is the largest step's."""
        torch.cuda.empty_cache()  # what steps before it used counts as left
        free, total = torch.cuda.mem_get_info(self.step.device)
        if self._least_free is None:
            self._least_free = max(LEAST_FREE_BYTES, free - int(self._most_of_device * total))
        return free > self._least_free
