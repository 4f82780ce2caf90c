"""Start-up of the graphs of static steps, and of steps with prompts: whether to have them, the memory they will take,
their capture, a note."""

from __future__ import annotations

import logging
from bisect import bisect_left
from collections.abc import Callable, Sequence
from functools import partial

import torch

from app.config.engine import EngineConfig
from app.distributed.parallel_groups import RankGroup
from app.errors import ConfigError
from app.platforms import platform_of
from app.worker.forward_pass import ForwardPass
from app.worker.graphs import cuda_graphs, prompt_graphs
from app.worker.graphs.cuda_graphs import CudaGraphs
from app.worker.graphs.prompt_graphs import PromptGraphs
from app.worker.graphs.prompt_step import MOST_TOKENS, PromptStep
from app.worker.graphs.prompts_as_used import PromptsAsUsed
from app.worker.graphs.recording import Recorder
from app.worker.graphs.static_step import MOST_EMPTY, Static, StaticStep, StepKey
from app.worker.rows.row_state import RowState
from app.worker.rows.worker_feature import WorkerFeatures
from app.worker.spec_decode.drafting import Drafting

logger = logging.getLogger("manta.graphs")

MOST_AT_START = 128  # graphs: some 0.03 s each, of a large model 0.15
LEAST_FREE_BYTES = 256 << 20  # of the device, or no more graphs are captured in idle time


class GraphSetup:
    """Made once the model is there; `reserve` before the KV cache is sized, `capture` once it is allocated.

    Raises ConfigError where `cuda_graphs=on` and there can be none, or one of several ranks cannot capture them.
    """

    def __init__(
        self,
        config: EngineConfig,
        forward: ForwardPass,
        state: RowState,
        tp: RankGroup,
        features: WorkerFeatures,
        *,
        shares_prefixes: bool,
        draft_counts: Sequence[int] = (),
        drafting: Drafting | None = None,
    ) -> None:
        self._config = config
        self._are_bound = tp.size > 1  # ranks that meet in sums must have the same graphs
        self._device = state.device
        self.step: StaticStep | None = None  # None: there will be no graphs
        self.note = ""
        self.prompt_step: PromptStep | None = None  # None: steps with prompts are not captured
        self.prompts: PromptGraphs | None = None
        self._graphs: CudaGraphs | None = None
        self._reserved: int | None = None  # bytes; None: nobody asked, as the size of the KV cache was given
        self._of_prompts: int | None = None  # those of them; None: not measured yet
        self._no_prompts: str | None = None  # why steps with prompts are not captured
        self._are_as_used = config.cuda_graph_prompt_tokens == "as_used"
        unused = 1.0 - config.gpu_memory_utilization
        self._make_prompts: Callable[[PromptStep, Recorder], PromptGraphs] = (
            partial(PromptsAsUsed, unused=unused) if self._are_as_used else PromptGraphs
        )
        self._is_full = False  # no more is captured
        refused = refusal(config, state.device, is_capturable=forward.is_capturable)
        if refused is None:
            sizes = cuda_graphs.graph_sizes(config)
            shared = cuda_graphs.cascade_sizes(sizes) if shares_prefixes else []
            most = config.max_num_batched_tokens
            self.step = StaticStep(forward, state, features, sizes, shared, draft_counts, most, drafting)
            asked = config.cuda_graph_prompt_tokens
            self._no_prompts = prompt_graphs.refusal(config, forward)
            if self._no_prompts is None:
                most = min(most, asked if isinstance(asked, int) else MOST_TOKENS)
                self.prompt_step = PromptStep(forward, state, most)
            elif config.cuda_graphs == "on" and asked and isinstance(asked, int):
                reason = f"cuda_graph_prompt_tokens={asked}, but {self._no_prompts}; use auto"
                raise ConfigError(reason, param="cuda_graph_prompt_tokens")
        else:
            self._go_without(refused)

    def reserve(self) -> int:
        """Bytes to keep free for the graphs."""
        if self.step is None:
            return 0
        try:
            self._reserved = cuda_graphs.measure(partial(CudaGraphs, self.step, self._device), self._device)
            self._reserved += self._measure_prompts()
            return self._reserved
        except ConfigError:
            raise
        except Exception as error:  # whatever a kernel or a library raises while it is captured
            self._fail(error)
            return 0

    def capture(self) -> Static | None:
        """The steps captured over the KV cache as it is now, which must stay where it is; None: there are no graphs.
        What is more than a start has time for is left to `capture_next`."""
        self._graphs, self.prompts, self._is_full = None, None, False
        if self.step is None:
            return None
        try:
            graphs = CudaGraphs(self.step, self._device)
            seconds = graphs.capture(at_start(self.step, MOST_AT_START))
            mib = graphs.pool_bytes() >> 20
        except Exception as error:  # as above
            self._fail(error)
            return None
        self._graphs = graphs
        self._measure_prompts()
        if self.prompt_step is not None and self.prompt_step.keys:
            self.prompts = self._make_prompts(self.prompt_step, graphs.recorder)
        sizes, left = self.step.sizes, self.num_missing
        extra = f"; {left} more while the engine idles" if left else ""
        if self.prompts is not None and self._are_as_used:
            extra += "; those of steps with prompts as they come"
        elif self.prompts is not None:
            extra += f", those of steps with up to {self.prompts.step.sizes[-1]} prompt tokens among them"
        elif self._no_prompts is not None and self._config.cuda_graph_prompt_tokens not in ("auto", 0):
            extra += f"; steps with prompts: none ({self._no_prompts})"
        self.note = (
            f"CUDA graphs: {graphs.num_captured} for {len(sizes)} batch sizes up to {sizes[-1]}, {mib} MiB of "
            f"temporary memory, captured in {seconds:.1f} s{extra}"
        )
        return graphs

    @property
    def num_missing(self) -> int:
        """Graphs that are left to `capture_next`."""
        return 0 if self._is_full else len(self._missing())

    def capture_next(self) -> int:
        """One more of the graphs that the start left out, on all ranks the same; how many are left after it. None are
        where they have taken the memory that was kept for them, or a capture fails."""
        graphs = self._graphs
        if graphs is None or not self.num_missing:
            return 0
        try:
            if graphs.missing or self.prompts is None:
                graphs.capture(graphs.missing[:1])
            else:
                self.prompts.capture(self.prompts.missing[:1])
                self._is_full |= self.prompts.is_full
        except Exception as error:  # as above
            self._is_full = True
            if self._are_bound:  # the others have captured it, or wait in its sums
                raise
            logger.warning("CUDA graphs: a capture failed; no more are made", exc_info=error)
        # Told by what is returned, so that no rank begins one that another has no memory for.
        self._is_full |= self._reserved is not None and graphs.pool_bytes() > self._reserved
        self._is_full |= torch.cuda.mem_get_info(self._device)[0] < LEAST_FREE_BYTES
        return self.num_missing

    def _missing(self) -> list[object]:
        """The steps that are not captured yet."""
        found = () if self._graphs is None else self._graphs.missing
        return [*found, *(() if self.prompts is None else self.prompts.missing)]

    def _measure_prompts(self) -> int:
        """Bytes to keep for graphs of steps with prompts; there are none where the device does not wait for the
        host."""
        step = self.prompt_step
        if step is None or self._are_as_used or self._of_prompts is not None:
            return self._of_prompts or 0
        try:
            if self._config.cuda_graph_prompt_tokens == "auto":
                step.limit(prompt_graphs.waits_up_to(step, self._device))
            make = partial(PromptGraphs, step, Recorder(self._device))
            self._of_prompts = cuda_graphs.measure(make, self._device) if step.keys else 0
            most = int(prompt_graphs.MOST_OF_DEVICE * torch.cuda.mem_get_info(self._device)[1])
            self._of_prompts = min(self._of_prompts, most)
        except Exception as error:  # as above
            logger.warning("CUDA graphs: steps with prompts cannot be captured", exc_info=error)
            if self._config.cuda_graphs == "on":
                reason = f"steps with prompts cannot be captured: {type(error).__name__}: {error}"
                raise ConfigError(
                    f"{reason}; set cuda_graph_prompt_tokens=0", param="cuda_graph_prompt_tokens"
                ) from error
            self.prompt_step, self._of_prompts = None, 0
        return self._of_prompts

    def _fail(self, error: Exception) -> None:
        """Go on without graphs; not where other ranks wait in the sums of the step that failed here, in which no vote
        reaches them."""
        logger.warning("CUDA graphs: the capture failed", exc_info=error)
        reason = f"capture failed: {type(error).__name__}: {error}"
        if self._are_bound:
            raise ConfigError(f"{reason}; set cuda_graphs=off", param="cuda_graphs") from error
        self.step = None
        self._go_without(reason)

    def _go_without(self, reason: str) -> None:
        if self._config.cuda_graphs == "on":
            raise ConfigError(f"cuda_graphs=on, but {reason}; use auto", param="cuda_graphs")
        self.note = f"CUDA graphs: off ({reason})"


def at_start(step: StaticStep, most: int) -> list[StepKey]:
    """The steps to capture before traffic, the largest of each kind first: those by which no batch is padded to more
    than about twice its size, then those halfway between them, after which it is half of it at most; and all between
    two of these where so many places for drafts would be empty that the step would run without a graph. Whoever waits
    for a replica waits for each of the others, too."""
    ladder = set(cuda_graphs.telling_sizes(step.sizes))
    halfway = {next((size for size in step.sizes if 2 * size >= 3 * first), first) for first in ladder}
    first = sorted(ladder | halfway)

    def is_needed(key: StepKey) -> bool:
        place = bisect_left(first, key.size)
        is_first = first[place] == key.size
        return is_first or (first[place] - first[place - 1]) * step.places_each(key) > MOST_EMPTY

    ordered = sorted(step.keys, key=lambda key: key.size not in ladder)
    chosen = set([key for key in ordered if is_needed(key)][:most])
    return [key for key in step.keys if key in chosen]


def refusal(config: EngineConfig, device: torch.device, *, is_capturable: bool) -> str | None:
    """Why there are no graphs; None: there are."""
    if config.cuda_graphs == "off":
        return "as configured"
    if not platform_of(device).has_graphs:
        return "no GPU"
    if not is_capturable:
        return f"attention_backend={config.attention_backend} plans each step on the host"
    return None
