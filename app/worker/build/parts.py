"""The parts of a worker between `build` and the first step: sized, then warmed."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial

from app.config.engine import EngineConfig
from app.models.base import EngineModel
from app.platforms import platform_of
from app.worker import kv_sizing
from app.worker.attention.kv_cache import KVCache
from app.worker.cascade_choice import CascadeChoice
from app.worker.forward_pass import ForwardPass
from app.worker.graphs.graph_setup import GraphSetup
from app.worker.graphs.static_step import Static
from app.worker.graphs.token_graphs import TokenGraphs
from app.worker.heads.base import Head
from app.worker.model_runner import ModelRunner
from app.worker.rows.row_state import RowState
from app.worker.rows.worker_feature import WorkerFeatures
from app.worker.warmup.warm_up import WarmUp


@dataclass(slots=True, frozen=True)
class Parts:
    """The parts of a worker, all allocated but for the KV cache."""

    config: EngineConfig
    model: EngineModel
    forward: ForwardPass
    state: RowState
    head: Head
    features: WorkerFeatures
    warm_up: WarmUp
    cascade: CascadeChoice | None = None
    graphs: GraphSetup | TokenGraphs | None = None  # None: no steps of this kind of model are captured
    notes: list[str] = field(default_factory=list)

    @property
    def cache(self) -> KVCache:
        """The KV caches; empty until `size`."""
        return self.forward.cache

    def size(self, max_model_len: int) -> int:
        """Blocks of the KV cache, which is allocated; ConfigError where memory does not hold one request."""
        self.cache.allocate(self.warm_up.plan.measured_blocks * len(self.cache.spec.windows))
        graphs = self.graphs
        self.warm_up.compile(*(None, None) if graphs is None else (graphs.step, graphs.prompt_step))
        free_bytes = partial(
            kv_sizing.free_device_bytes,
            self.config,
            self.state.device,
            partial(self._largest, self._runner(None)),
            lambda: self.features.later_bytes + (0 if self.graphs is None else self.graphs.reserve()),
        )
        num_blocks = kv_sizing.size_kv_cache(self.config, self.cache.spec, max_model_len, self.state.device, free_bytes)
        self.cache.allocate(num_blocks)
        self.cache.keep(kv_sizing.num_state_slots(self.config, self.cache.spec, self.state.device, free_bytes))
        self.features.connect(self.cache.places)
        return num_blocks

    def _largest(self, runner: ModelRunner) -> None:
        self.warm_up.largest(runner)
        self.features.run_largest()

    def warm(self, num_blocks: int) -> ModelRunner:
        """A runner that is ready for its first step."""
        if platform_of(self.state.device).is_async:
            self.features.run_largest()
        runner = self._runner(None if self.graphs is None else self.graphs.capture())
        self.warm_up.run(runner, num_blocks)
        return runner

    @property
    def num_deferred(self) -> int:
        """Graphs that the start left out."""
        return 0 if self.graphs is None else self.graphs.num_missing

    def capture_next(self) -> int:
        """One more graph of those that the start left out; how many are left after it."""
        return 0 if self.graphs is None else self.graphs.capture_next()

    def again(self) -> ModelRunner:
        """A runner over memory that lies elsewhere than that of the one before, whose graphs have been released."""
        return self._runner(None if self.graphs is None else self.graphs.capture())

    def _runner(self, static: Static | None) -> ModelRunner:
        prompts = None if self.graphs is None else self.graphs.prompts
        return ModelRunner(self.forward, self.state, self.head, self.features, self.cascade, static, prompts)
