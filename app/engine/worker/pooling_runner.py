"""One step of a pooling model: inputs, forward pass, results of the prompts that end. The ModelRunner's counterpart.

A decoder's prompts come in chunks and lie in the KV cache, as if they were to be continued. An encoder has no cache:
its prompts come whole, and blocks are numbers that keep the host's books.
"""

from __future__ import annotations

from functools import partial

import numpy as np
import torch

from app.config import EngineConfig
from app.engine.attention.kv_cache import KVCacheSpec, describe_scales
from app.engine.layers.context import BuildContext, ForwardContext
from app.engine.model_info import ModelInfo
from app.engine.models.loader import load_pooling_model
from app.engine.models.pooling_model import PoolingModel
from app.engine.pooling.pooler import Pooler
from app.engine.pooling_info import PoolingInfo, step_budget
from app.engine.pooling_params import NO_SAMPLING, PoolingParams
from app.engine.sampling.transfer import to_device
from app.engine.step import NewRequest, SchedulerOutput
from app.engine.worker import kv_sizing
from app.engine.worker.input_batch import InputBatch, build_input_batch
from app.engine.worker.pending_step import PendingStep, StepClock, StepResults
from app.engine.worker.row_state import RowState
from app.errors import ConfigError
from app.kernels.attention.encoder import plan_encoder

LONGEST = np.iinfo(np.int64).max


class PoolingRunner:
    """Executes letters one after another. Callers hold torch.inference_mode()."""

    def __init__(
        self,
        model: PoolingModel,
        pooler: Pooler,
        kv_caches: list[torch.Tensor],
        state: RowState,
        device: torch.device,
        *,
        has_token_types: bool,
    ) -> None:
        self.kv_caches = kv_caches
        self._model = model
        self._pooler = pooler
        self._state = state
        self._device = device
        self._attention = next(iter(model.attention_layers), None)
        self._copy_stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        # Where each row's second text begins; tokens before it are of type 0.
        self._second_text_at = np.full(len(state.num_tokens), LONGEST) if has_token_types else None

    def execute(self, letter: SchedulerOutput) -> PendingStep:
        """Compute (on a GPU: enqueue) the letter's step."""
        clock = StepClock(self._device)
        for row in letter.freed_rows:
            self._pooler.remove(row)
        for request in letter.new_requests:
            self._enter(request)
        self._state.apply(letter)
        results = StepResults(letter.step_id, torch.empty(0, dtype=torch.int64, device=self._device), pooled=[])
        if len(letter.rows):
            batch = build_input_batch(letter, self._state)
            hidden = self._forward(batch, letter)
            lengths = batch.first_positions + letter.num_scheduled_tokens
            ends: list[bool] = letter.samples.tolist()
            results.pooled = self._pooler.compute(letter.rows.tolist(), ends, batch.query_start_loc, lengths, hidden)
            self._state.advance(letter)
        return PendingStep(results, clock, self._copy_stream)

    def warm(self, max_num_batched_tokens: int) -> None:
        """On a GPU the largest step there can be, else a small one, so that the first request finds everything made."""
        max_num_seqs, longest = self._state.token_ids.shape
        if self._device.type == "cpu":
            lengths = [min(16, longest)]
        else:
            full, rest = divmod(max_num_batched_tokens, longest)
            lengths = ([longest] * full + [rest] * (rest > 0))[:max_num_seqs]
        params = PoolingParams(task="classify" if self._model.num_labels else "token_embed")
        first, requests = 0, []
        for row, length in enumerate(lengths):
            blocks = list(range(first, first + -(-length // self._state.block_size)))
            ids = np.zeros(length, np.int32)
            requests.append(NewRequest(row, ids, length, 0, blocks, NO_SAMPLING, 0, (), (), pooling_params=params))
            first += len(blocks)
        rows, none = np.arange(len(lengths), dtype=np.int32), np.zeros(0, np.int32)
        counts, ends = np.array(lengths, np.int32), np.ones(len(lengths), np.bool_)
        self.execute(SchedulerOutput(-1, rows, counts, ends, requests)).finish()
        self.execute(SchedulerOutput(-1, none, none, none.astype(np.bool_), freed_rows=rows.tolist())).finish()

    def _enter(self, request: NewRequest) -> None:
        self._pooler.add(request)
        params = request.pooling_params
        if self._second_text_at is not None and params is not None:
            self._second_text_at[request.row] = LONGEST if params.second_text_at is None else params.second_text_at

    def _forward(self, batch: InputBatch, letter: SchedulerOutput) -> torch.Tensor:
        """Hidden states [T, C]."""
        meta, layer, types = batch.attention, self._attention, None
        if layer is None:
            meta.plan = plan_encoder(batch.query_start_loc.tolist(), self._device)
        else:
            layer.ops.prepare(
                meta,
                num_heads=layer.num_heads,
                num_kv_heads=layer.num_kv_heads,
                head_dim=layer.head_dim,
                block_size=self._state.block_size,
            )
        if self._second_text_at is not None:
            counts = letter.num_scheduled_tokens
            offsets = np.arange(batch.query_start_loc[-1]) - np.repeat(
                batch.query_start_loc[:-1] - batch.first_positions, counts
            )
            second = np.repeat(self._second_text_at[letter.rows], counts)
            types = to_device((offsets >= second).astype(np.int64), self._device)
        ctx = ForwardContext(batch.positions, meta, self.kv_caches, token_types=types)
        hidden: torch.Tensor = self._model(batch.input_ids, ctx)
        return hidden


def start_pooling(config: EngineConfig, info: ModelInfo, ctx: BuildContext) -> tuple[PoolingRunner, int, str]:
    """A runner ready for its first letter, the number of KV blocks, and a line for the start-up notes.

    Raises ConfigError, CheckpointError and UnsupportedError with what to change.
    """
    pooling = PoolingInfo.of(info, config.matryoshka)
    model = load_pooling_model(info, ctx, config.load_format, config.seed)
    classify = model.classify if model.num_labels else None
    pooler = Pooler(pooling, ctx.device, classify, dummy=config.load_format == "dummy")
    state = RowState(config.max_num_seqs, ctx.max_model_len, config.block_size, ctx.device)
    runner = PoolingRunner(model, pooler, [], state, ctx.device, has_token_types=pooling.has_token_types)
    budget = step_budget(config, info, ctx.max_model_len)
    if not model.attention_layers:
        if ctx.kv_dtype is not None:
            raise ConfigError(
                f"kv_cache_dtype={config.kv_cache_dtype}: this model has no KV cache; leave it out",
                param="kv_cache_dtype",
            )
        num_blocks = config.max_num_seqs * -(-ctx.max_model_len // config.block_size)
        note = "KV cache: none, every prompt is computed in one step"
    else:
        spec = KVCacheSpec.of(model.attention_layers, config.block_size, ctx.kv_dtype or ctx.dtype)
        needed = -(-budget // config.block_size) + config.max_num_seqs  # blocks of the largest step there can be
        runner.kv_caches = kv_sizing.allocate_kv_cache(spec, needed, ctx.device)
        warm = partial(runner.warm, budget)
        num_blocks = kv_sizing.size_kv_cache(config, spec, ctx.max_model_len, ctx.device, warm, lambda: 0)
        runner.kv_caches = []  # the few that the measurement used
        runner.kv_caches = kv_sizing.allocate_kv_cache(spec, num_blocks, ctx.device)
        note = "; ".join([kv_sizing.describe(spec, num_blocks), *describe_scales(model.attention_layers)])
    runner.warm(min(budget, max(1, num_blocks - config.max_num_seqs) * config.block_size))
    return runner, num_blocks, f"pooling: {pooling.pooling}, {', '.join(pooling.tasks)}; {note}"
