"""Steps with prompts as CUDA graphs: the host launches their layers in one replay, where launch after launch takes it
longer than a device needs to compute a small or many-layered model.

They are captured while the engine idles, up to where the device is the slower, unless someone asked for more: larger
steps gain nothing, and would be filled up with padding. Until then, and where a step has what none of these has, it
runs as ever. Each is timed once it is captured: a library's products of some numbers of rows take longer than those of
more (on an H200 of 448 a third longer than of 512), so of the steps that a batch fits in the quickest runs.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from app.config.engine import EngineConfig
from app.layers.context import HiddenStates
from app.layers.rotary import ROPE_POSITIONS
from app.records.step import ModelRunnerOutput
from app.worker.forward_pass import ForwardPass
from app.worker.graphs.cuda_graphs import MOST_OF_DRIVER
from app.worker.graphs.prompt_step import PromptKey, PromptStep
from app.worker.graphs.recording import Recorder, no_collection
from app.worker.rows.input_batch import InputBatch
from app.worker.rows.pending_step import StepClock

MOST_OF_DEVICE = 0.02  # of its memory, for graphs of steps with prompts: they gain time, but no room
RUNS = 3  # of each, of which the quickest counts
REPLAYS = 2  # the same, while a request may wait
NO_SLOWER = 1.02  # times as long: of steps that differ by less the smallest runs
PROBES = (256, 512, 768, 1024, 1536, 2048)  # tokens of steps that are timed
# The share of a step's time that is left when the host has launched all of it: less, and the device waits, if not at a
# start, then where the host has traffic to serve beside (one whose start was calm took 25 to 29 ms for prefills of
# 1,024 tokens of an 8B model launch by launch, 23.3 from a graph). Of larger steps more is padding: so these must be
# bound by the host at a start, too.
LEAST_BEHIND, CLOSE_TOKENS, LEAST_BEHIND_LARGE = 0.7, 1024, 1 / 3


class PromptReplays:
    """The steps with prompts that there is a replay for."""

    def __init__(self, step: PromptStep) -> None:
        self.step = step
        self.replays: dict[PromptKey, Callable[[], Any]] = {}
        self.seconds: dict[PromptKey, float] = {}  # that they take, where that is known
        self._num_replayed = 0  # since the last report

    @property
    def missing(self) -> list[PromptKey]:
        """The steps that have none, the most needed first."""
        return [key for key in self.step.keys if key not in self.replays]

    def hidden(self, batch: InputBatch, clock: StepClock) -> HiddenStates | None:
        """The hidden states of a step from a replay; None: it brings what none has, or there is none for it. The
        step's `clock` does not count what others will not need."""
        fitting = [key for key in self.keys_for(batch) if key in self.replays]
        if not fitting:
            return None
        least_s = min(map(self._seconds_of, fitting))
        key = next(key for key in fitting if self._seconds_of(key) <= NO_SLOWER * least_s)
        self.step.load(key, batch)
        self.replays[key]()
        self._num_replayed += 1
        return self.step.hidden_of(key, batch)

    def keys_for(self, batch: InputBatch) -> Sequence[PromptKey]:
        """The steps that such a one can run as, the smallest first; none: it brings what none of them has."""
        meta, brought = batch.attention, batch.view.layer_inputs
        is_moved = brought.keys() == {ROPE_POSITIONS} and brought[ROPE_POSITIONS].ndim == 1
        if meta.cascade or meta.drafted is not None or (brought and not is_moved):
            return ()
        return self.step.keys_for(meta)

    def report(self, output: ModelRunnerOutput) -> None:
        """Count the replays in what goes back to the host."""
        output.figures["prompt_steps_replayed"], self._num_replayed = self._num_replayed, 0

    def release(self) -> None:
        """Forget them: the addresses that they know hold no longer."""
        self.replays.clear()
        self.seconds.clear()

    def _seconds_of(self, key: PromptKey) -> float:
        return self.seconds.get(key, 0.0)


class PromptGraphs(PromptReplays):
    """Replays of captured steps."""

    def __init__(self, step: PromptStep, recorder: Recorder) -> None:
        """`recorder`: its graphs share their temporary memory with these."""
        super().__init__(step)
        self._recorder = recorder
        self._graphs: list[torch.cuda.CUDAGraph] = []
        self._taken = 0  # bytes of the device

    @property
    def is_full(self) -> bool:
        """True if they have taken their share of the device."""
        return self._taken > MOST_OF_DEVICE * torch.cuda.mem_get_info(self.step.device)[1]

    def capture(self, keys: Sequence[PromptKey]) -> None:
        """Capture these steps in their order. Nothing runs meanwhile. What the driver keeps of each is in no pool, so
        what they take is told by what the device has left, as by a trial (`cuda_graphs.measure`)."""
        before = torch.cuda.mem_get_info(self.step.device)[0]
        with no_collection():
            for key in keys:
                self.step.pad_all(key)
                graph = self._recorder.record(partial(self.step.run, key))
                self._graphs.append(graph)
                self.replays[key] = graph.replay
                self.seconds[key] = min(_replayed_s(graph) for _ in range(REPLAYS))
        torch.cuda.synchronize()
        torch.cuda.empty_cache()  # what the runs before the captures used on the side stream
        taken = before - torch.cuda.mem_get_info(self.step.device)[0]
        self._taken += min(max(0, taken), MOST_OF_DRIVER * len(keys))

    def release(self) -> None:
        """See PromptReplays."""
        super().release()
        torch.cuda.synchronize()
        for graph in self._graphs:
            graph.reset()
        self._graphs.clear()

    def pool_bytes(self) -> int:
        """Temporary memory that the recorder's graphs share."""
        return self._recorder.pool_bytes()


def waits_up_to(step: PromptStep, device: torch.device) -> int:
    """Tokens of the largest step, of those that are timed, in which the device waits for the host's launches, or may:
    little of its time is left behind them. 0: in none."""
    found = 0
    for key in (PromptKey(size, 1) for size in step.sizes if size in PROBES or size == step.sizes[-1]):
        if not waits(step, key, device):
            break
        found = key.tokens
    return found


def waits(step: PromptStep, key: PromptKey, device: torch.device) -> bool:
    """True if in this step the device waits for the host's launches, or may. Nothing runs meanwhile."""
    step.pad_all(key)
    step.run(key)  # loads what was not compiled yet
    with no_collection():
        launch_s, whole_s = min((_timed(step, key, device) for _ in range(RUNS)), key=lambda times: times[1])
    return whole_s - launch_s <= (LEAST_BEHIND if key.tokens <= CLOSE_TOKENS else LEAST_BEHIND_LARGE) * whole_s


def _replayed_s(graph: torch.cuda.CUDAGraph) -> float:
    """Seconds that the device takes for it, and nothing else."""
    torch.cuda.synchronize()
    began = time.perf_counter()
    graph.replay()
    torch.cuda.synchronize()
    return time.perf_counter() - began


def _timed(step: PromptStep, key: PromptKey, device: torch.device) -> tuple[float, float]:
    """Seconds until all is launched, and until all is done."""
    torch.cuda.synchronize(device)
    began = time.perf_counter()
    step.run(key)
    launched = time.perf_counter()
    torch.cuda.synchronize(device)
    return launched - began, time.perf_counter() - began


def refusal(config: EngineConfig, forward: ForwardPass) -> str | None:
    """Why no steps with prompts are captured; None: they are."""
    if config.cuda_graph_prompt_tokens == 0:
        return "as configured"
    if config.world_size > 1:
        return "several ranks"
    if not forward.captures_prompts:
        return "layers that plan such steps on the host"
    if config.cuda_graph_prompt_tokens == "auto" and not forward.captures_context:
        return "latent attention: only where a number is given, or as_used"
    return None
