"""One rank of an engine, wherever it runs: in this process, or inside an actor.

Letters are executed one after another. On a device that computes in the background, a call enqueues its step and
returns the outputs of the steps before; a `flush` letter returns everything (I2). On a CPU a call returns its own.
"""

from __future__ import annotations

import gc
import logging
import threading
from collections import deque
from functools import partial

import torch

from app.config import EngineConfig
from app.engine.attention.backend import select_attention
from app.engine.attention.kv_cache import KVCacheSpec, describe_scales, select_kv_dtype
from app.engine.distributed.parallel_groups import ParallelGroups
from app.engine.distributed.process_groups import connect_store, join_groups, leave_groups
from app.engine.distributed.stage_link import StageLink
from app.engine.distributed.symmetric_all_reduce import with_small_all_reduce
from app.engine.layers.context import BuildContext
from app.engine.model_info import ModelInfo
from app.engine.models.loader import load_model
from app.engine.parallel_plan import refuse_stages, stage_layers
from app.engine.quantization import select_quantization
from app.engine.step import ModelRunnerOutput, SchedulerOutput
from app.engine.worker import kv_sizing
from app.engine.worker.cascade_choice import refuse_cascade, select_cascade
from app.engine.worker.device import enter_thread, num_threads, select_device, select_dtype
from app.engine.worker.graphs.graph_setup import GraphSetup
from app.engine.worker.host_tier.host_tier import HostTier, refuse_host_tier
from app.engine.worker.host_tier.kv_transfer import KVTransfer
from app.engine.worker.model_runner import ModelRunner
from app.engine.worker.pending_step import PendingStep
from app.engine.worker.pooling_runner import PoolingRunner, start_pooling
from app.engine.worker.profile import Profile
from app.engine.worker.row_state import RowState
from app.engine.worker.warmup.dummy_step import dummy_forward, full_step, warm_letters, warm_steps
from app.engine.worker.warmup.rehearsal import rehearse
from app.engine.worker_info import Meeting, WorkerInfo
from app.errors import InvalidRequestError

logger = logging.getLogger("manta.worker")


class Worker:
    """`start` once, then `execute` letter after letter (any one thread at a time), then `shutdown`."""

    def __init__(
        self,
        config: EngineConfig,
        rank: int = 0,
        world_size: int = 1,
        local_rank: int = 0,
        meeting: Meeting | None = None,
    ) -> None:
        """`local_rank` is the number of this worker's device among those that the process sees."""
        assert world_size == config.world_size
        assert world_size == 1 or meeting is not None, "several ranks need a meeting place"
        self._config = config
        self._rank = rank
        self._local_rank = local_rank
        self._meeting = meeting
        self._device = torch.device("cpu")
        self._threads = num_threads(config)
        self._thread: int | None = None  # the one whose settings were made last
        self._runner: ModelRunner | PoolingRunner | None = None
        self._transfer: KVTransfer | None = None  # to and from the host-memory tier, if there is one
        self._pending: deque[PendingStep] = deque()
        self._profile: Profile | None = None

    def start(self) -> WorkerInfo:
        """Load the model, size and allocate the KV cache, warm the first step.

        Raises ConfigError or CheckpointError with what to change.
        """
        config = self._config
        info = ModelInfo.from_directory(config.model)
        max_model_len = config.max_model_len or info.max_position_embeddings
        self._device, device_note = select_device(config.device, self._local_rank)
        dtype, dtype_note = select_dtype(config.dtype, self._device, info)
        ops, attention_note = select_attention(config.attention_backend, self._device)
        self._enter_thread()
        groups, all_reduce_note = self._join_groups(dtype)
        with torch.inference_mode():
            layers = stage_layers(info.num_layers, config.pipeline_parallel_size, config.pipeline_partition)
            quantization, quantization_notes = select_quantization(config.quantization, self._device, dtype)
            kv_dtype = select_kv_dtype(config.kv_cache_dtype, self._device)
            ctx = BuildContext(
                dtype, self._device, max_model_len, ops, groups, layers[groups.pp.rank], quantization, kv_dtype
            )
            if info.runner(config.runner) == "pooling":
                refuse_stages(config)
                refuse_host_tier(config)
                refuse_cascade(config)
                self._runner, num_blocks, note = start_pooling(config, info, ctx)
                notes = [device_note, dtype_note, attention_note, *quantization_notes]
                notes += [*self._parallel_notes(layers, all_reduce_note), note]
                return WorkerInfo(num_blocks, str(self._device), str(dtype).removeprefix("torch."), notes)
            model = load_model(info, ctx, config.load_format, config.seed)
            spec = KVCacheSpec.of(model.attention_layers, config.block_size, kv_dtype or dtype)
            state = RowState(config.max_num_seqs, max_model_len, config.block_size, self._device)
            hidden_size = int(info.hf_config["hidden_size"])
            link = StageLink(groups, hidden_size, dtype, self._device, config.max_inflight_steps + 2)
            tier = HostTier(config, spec, self._device)  # before sizing, which counts its buffers
            caches = spec.allocate(1, self._device)
            runner = ModelRunner(model, caches, state, info.vocab_size, self._device, link)
            runner.cascade = select_cascade(config, state, model.attention_layers, dtype, spec.dtype)
            graphs = GraphSetup(config, runner, dtype, self._device, groups.tp)
            rehearse(config, runner, graphs, max_model_len, self._device)
            num_blocks = self._allocate_kv_cache(runner, spec, max_model_len, graphs)
            graphs.capture()
            self._warm(runner, max_model_len)
            self._transfer = tier.connect(runner.kv_caches)
            self._runner = runner
        notes = [
            device_note,
            dtype_note,
            attention_note,
            *quantization_notes,
            *self._parallel_notes(layers, all_reduce_note),
            kv_sizing.describe(spec, num_blocks),
            *describe_scales(model.attention_layers),
            *tier.notes,
        ]
        notes += [runner.cascade.note] if runner.cascade is not None else []
        notes.append(f"threads: {self._threads}" if self._device.type == "cpu" else graphs.note)
        name = str(dtype).removeprefix("torch.")
        return WorkerInfo(num_blocks, str(self._device), name, notes, tier.num_blocks, tier.block_bytes)

    def execute(self, letter: SchedulerOutput) -> list[ModelRunnerOutput]:
        """Run the letter's step; returns the outputs that are ready, in the order of their steps."""
        assert self._runner is not None, "execute before start"
        self._enter_thread()
        with torch.inference_mode():
            if self._transfer is not None:
                self._transfer.execute(letter)
            self._pending.append(self._runner.execute(letter))
            keep = 1 if self._device.type == "cuda" and not letter.flush else 0
            outputs = [self._pending.popleft().finish() for _ in range(len(self._pending) - keep)]
            if self._transfer is not None and outputs:
                outputs[-1].loading_since = self._transfer.loading_since()
            return outputs

    def start_profile(self, directory: str) -> None:
        """Record every step from now on; InvalidRequestError where that is done already."""
        if self._profile is not None:
            raise InvalidRequestError("a profile is being recorded: stop it first")
        self._profile = Profile(directory, self._rank, self._device.type)

    def stop_profile(self) -> str:
        """The path of the trace; InvalidRequestError where nothing is recorded."""
        if self._profile is None:
            raise InvalidRequestError("no profile is being recorded")
        path = self._profile.stop()
        self._profile = None
        return path

    def shutdown(self) -> None:
        """Free the model and the KV cache; idempotent."""
        if self._profile is not None:  # a process that ends within a recording crashes
            try:
                self.stop_profile()
            except Exception as error:
                logger.warning("the profile is lost", exc_info=error)
        if self._transfer is not None:
            self._transfer.close()
            self._transfer = None
        self._pending.clear()
        if isinstance(self._runner, ModelRunner):
            self._runner.decode = None  # it refers back to the runner: together they would outlive this call
        self._runner = None
        leave_groups()
        if self._device.type == "cuda":
            gc.collect()
            torch.cuda.empty_cache()

    def _join_groups(self, dtype: torch.dtype) -> tuple[ParallelGroups, str]:
        """This rank's groups, and a line on how their sums are computed."""
        config, meeting = self._config, self._meeting
        if meeting is None:
            return ParallelGroups(), ""
        store = connect_store(meeting.address, config.world_size)
        sizes = (config.tensor_parallel_size, config.pipeline_parallel_size)
        groups = join_groups(store, self._rank, *sizes, self._device, meeting.address[0])
        first = self._rank - groups.tp.rank
        one_node = meeting.share_a_node(range(first, first + groups.tp.size))
        return with_small_all_reduce(groups, config.small_all_reduce, dtype, self._device, one_node)

    def _parallel_notes(self, layers: list[range], all_reduce: str) -> list[str]:
        config = self._config
        if config.world_size == 1:
            return []
        note = f"parallel: TP {config.tensor_parallel_size} x PP {config.pipeline_parallel_size}"
        if config.pipeline_parallel_size > 1:
            note += f", layers a stage {'+'.join(str(len(stage)) for stage in layers)}"
        return [note, all_reduce] if config.tensor_parallel_size > 1 else [note]

    def _enter_thread(self) -> None:
        """A compiled graph calls `execute` from another thread than `start`."""
        if self._thread != threading.get_ident():
            enter_thread(self._device, self._threads)
            self._thread = threading.get_ident()

    def _allocate_kv_cache(self, runner: ModelRunner, spec: KVCacheSpec, max_model_len: int, graphs: GraphSetup) -> int:
        config = self._config
        largest = partial(
            full_step, runner, config.max_num_batched_tokens, config.max_num_seqs, config.block_size, max_model_len,
            self._device,
        )  # fmt: skip
        num_blocks = kv_sizing.size_kv_cache(config, spec, max_model_len, self._device, largest, graphs.reserve)
        runner.kv_caches = []  # the one block that the measurement used
        runner.kv_caches = kv_sizing.allocate_kv_cache(spec, num_blocks, self._device)
        return num_blocks

    def _warm(self, runner: ModelRunner, max_model_len: int) -> None:
        """A decode and a prefill, short and (where kernels are compiled) long, so that the first request finds all
        made that it needs."""
        for counts, context in warm_steps(self._config, max_model_len, on_gpu=self._device.type == "cuda"):
            hidden = dummy_forward(runner, counts, context, self._config.block_size, self._device)
            if runner.is_last_stage:
                runner.logits(hidden[-1:]).argmax(dim=-1)
        if min(max_model_len, self._config.block_size, self._config.max_num_batched_tokens) >= 4:
            warm_letters(runner)
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
