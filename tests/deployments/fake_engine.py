"""A deterministic engine without a model: every step each running request gets one token, its prompt over and over.

It keeps the hashes of its prompts' blocks as an engine with a prefix cache would, and announces them.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from app.checkpoints.model_info import ModelInfo
from app.checkpoints.model_revision import model_revision
from app.config.engine import EngineConfig
from app.errors import EngineDeadError, InvalidRequestError
from app.records.block_hash import hash_blocks, root_hash
from app.records.kv_events import KVEventSink
from app.records.outputs import EngineOutput
from app.records.request import CANARY_TENANT, EngineRequest
from app.records.stats import EngineStats, RequestTimings, StatsRecorder, StepStats
from app.records.step import TokenLogprobs
from app.records.worker_info import WorkerInfo

STEP_S = float(os.environ.get("MANTA_FAKE_STEP_S", "0.004"))
FATAL_SEED = 666_001  # kills the engine at the request's fifth token
REFUSED_SEED = 666_002
ERROR_SEED = 666_003  # the request alone fails
HOLD_SEED = 666_004  # no token as long as the file HOLD is there
HOLD = Path(os.environ.get("MANTA_FAKE_HOLD", "/nowhere"))
NUM_BLOCKS = 4096


@dataclass(slots=True)
class _Running:
    request: EngineRequest
    num_cached: int = 0
    num_tokens: int = 0
    paused: bool = False
    begin: float = 0.0
    first: float = 0.0
    last: float = 0.0


class FakeEngine:
    """See ReplicaEngine."""

    def __init__(
        self,
        config: EngineConfig,
        block_hash_key: bytes,
        on_outputs: Callable[[list[EngineOutput]], None],
        on_fatal: Callable[[BaseException], None],
        recorder: StatsRecorder,
        kv_event_sink: KVEventSink,
    ) -> None:
        assert len(block_hash_key) == 32
        self._config = config
        self._on_outputs = on_outputs
        self._on_fatal = on_fatal
        self._recorder = recorder
        self._key = block_hash_key
        self._revision = model_revision(ModelInfo.from_directory(config.model), config)
        self._sink = kv_event_sink
        self._cached: dict[bytes, None] = {}
        self._requests: dict[str, _Running] = {}
        self._lock = threading.Lock()
        self._wake = threading.Event()
        self._dead: str | None = None
        self._stopping = False
        self.num_generated = 0
        self.num_steps = 0
        self._thread = threading.Thread(target=self._run, daemon=True)

    def start(self) -> WorkerInfo:
        self._thread.start()
        return WorkerInfo(NUM_BLOCKS, "none", "none", ["fake engine: no model at all"])

    def add_request(self, request: EngineRequest) -> None:
        if request.sampling.seed == REFUSED_SEED:
            raise InvalidRequestError("the fake engine refuses this seed", param="seed")
        num_cached = self._cache(request)
        with self._lock:
            generated = len(request.output_token_ids)
            self._requests[request.request_id] = _Running(request, num_cached, generated, begin=time.monotonic())
        self._wake.set()

    def _cache(self, request: EngineRequest) -> int:
        """Cached tokens of the prompt, all of whose blocks are cached from now on."""
        root = root_hash(self._key, model=self._revision, cache_root=request.cache_root)
        hashes = hash_blocks(self._key, root, request.prompt_token_ids, self._config.block_size)
        new = [block_hash for block_hash in hashes if block_hash not in self._cached]
        self._cached.update(dict.fromkeys(new))
        if new:
            self._sink.report_stored(root, new)
        return (len(hashes) - len(new)) * self._config.block_size

    def knows_grammar(self, spec: object) -> bool:
        return True

    def abort(self, request_ids: list[str]) -> None:
        with self._lock:
            for request_id in request_ids:
                running = self._requests.pop(request_id, None)
                if running is not None:
                    self._finish(running, "abort")

    def end_late(self) -> None:
        """It serves at once."""

    def pause(self, request_id: str) -> None:
        with self._lock:
            if request_id in self._requests:
                self._requests[request_id].paused = True

    def resume(self, request_id: str) -> None:
        with self._lock:
            if request_id in self._requests:
                self._requests[request_id].paused = False
        self._wake.set()

    def control(self, name: str, arguments: Mapping[str, Any]) -> Future[Any]:
        """Says what it was asked; `wait` never comes to its end."""
        answer: Future[Any] = Future()
        if name == "refuse":
            answer.set_exception(InvalidRequestError("not this", param="what"))
        elif name != "wait":
            answer.set_result([name, dict(arguments)])
        return answer

    def stats(self) -> EngineStats:
        with self._lock:
            running = list(self._requests.values())
        left = sum((r.request.sampling.max_tokens or 16) - r.num_tokens for r in running)
        return EngineStats(
            num_running=len(running),
            num_waiting=0,
            num_paused=sum(r.paused for r in running),
            num_deferred=0,
            num_blocks=NUM_BLOCKS,
            num_free_blocks=NUM_BLOCKS - len(running),
            num_cached_blocks=len(self._cached),
            outstanding_prefill_tokens=0,
            outstanding_decode_tokens=left,
            steps_total=self.num_steps,
            prefill_token_s=0.0,
            decode_step_s=STEP_S,
            prefill_s_total=0.0,
            figures={"generation_tokens": self.num_generated},
        )

    def step_limit_s(self) -> float:
        return 30.0

    def check_health(self) -> None:
        if self._dead is not None:
            raise EngineDeadError(self._dead)

    def shutdown(self) -> None:
        self._stopping = True
        self._wake.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._stopping:
            outputs = self._step()
            if outputs:
                self._on_outputs(outputs)
            if self._dead is not None:
                self._on_fatal(EngineDeadError(self._dead))
                return
            if outputs:
                time.sleep(STEP_S)
            else:
                self._wake.wait(STEP_S * 10)  # those that are held wake nobody
                self._wake.clear()

    def _step(self) -> list[EngineOutput]:
        outputs: list[EngineOutput] = []
        with self._lock:
            for request_id, running in list(self._requests.items()):
                held = running.request.sampling.seed == HOLD_SEED and HOLD.exists()
                if not running.paused and not held:
                    outputs.append(self._token(request_id, running))
        if outputs:
            self.num_steps += 1
            self._recorder.record_step(
                StepStats(len(outputs), len(outputs), len(self._requests), 0, STEP_S, itl_s=np.full(1, STEP_S))
            )
        if self._dead is not None:  # as AsyncEngine does: every live request is told
            outputs += [EngineOutput(name, [], "error", error=self._dead) for name in self._requests]
        return outputs

    def _token(self, request_id: str, running: _Running) -> EngineOutput:
        request, params = running.request, running.request.sampling
        token = request.prompt_token_ids[running.num_tokens % len(request.prompt_token_ids)]
        running.num_tokens += 1
        self.num_generated += request.placement.tenant != CANARY_TENANT
        running.last = time.monotonic()
        running.first = running.first or running.last
        if params.seed == FATAL_SEED and running.num_tokens == 5:
            self._dead = "the fake worker was killed"
        if params.seed == ERROR_SEED and running.num_tokens == 5:
            del self._requests[request_id]
            self._finish(running, "error")
            return EngineOutput(request_id, [], "error", error="this request has failed")
        done = running.num_tokens >= (params.max_tokens or 16)
        if done:
            del self._requests[request_id]
            self._finish(running, "length")
        logprobs = None
        if params.logprobs:
            ids = [token, *range(params.logprobs)]
            logprobs = [TokenLogprobs(ids, [-0.5] * len(ids), [1, *range(1, len(ids))])]
        return EngineOutput(
            request_id, [token], "length" if done else None, logprobs=logprobs, num_cached_tokens=running.num_cached
        )

    def _finish(self, running: _Running, reason: str) -> None:
        if running.request.placement.tenant == CANARY_TENANT:
            return  # a real engine does not count it either
        now = time.monotonic()
        self._recorder.record_finished(
            RequestTimings(
                spec=running.request,
                finish_reason=reason,  # type: ignore[arg-type]
                num_prompt_tokens=len(running.request.prompt_token_ids),
                num_generation_tokens=running.num_tokens,
                num_cached_tokens=0,
                num_preemptions=0,
                num_resumed_tokens=0,
                max_tokens=running.request.sampling.max_tokens or 16,
                e2e_s=now - running.begin,
                ttft_s=running.first - running.begin if running.first else None,
                queue_s=0.0,
                prefill_s=0.0,
                decode_s=running.last - running.first,
                inference_s=running.last - running.first,
            )
        )
