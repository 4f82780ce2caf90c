"""Puts an engine together at its start: the workers, and what schedules and admits requests by what they report."""

from __future__ import annotations

from dataclasses import dataclass

from app.checkpoints.model_info import ModelInfo, tokenizer_directory
from app.checkpoints.model_revision import model_revision
from app.config.engine import EngineConfig
from app.engine.default_drafter import start_workers
from app.engine.executor.base import Executor
from app.engine.kv_cache.create import create_manager
from app.engine.scheduler.admission import Admission
from app.engine.scheduler.encoder_share import EncoderRules
from app.engine.scheduler.prompt_time import PromptTime
from app.engine.scheduler.scheduler import Scheduler, StepRules
from app.errors import ConfigError
from app.records.encoder_info import EncoderInfo
from app.records.kv_events import KVEventSink
from app.records.media_info import MediaInfo
from app.records.parallel_plan import check_parallel_sizes
from app.records.pooling_info import PoolingInfo, pooling_info
from app.records.request_bounds import RequestBounds
from app.records.stats import StatsRecorder
from app.records.step_budget import step_budget, whole_prompts
from app.records.worker_info import WorkerInfo
from app.structured.compiler import GrammarCompiler
from app.structured.limits import GrammarLimits
from app.text.grammar_vocabulary import TokenizerVocabulary

CPU_STEP_S, GPU_STEP_S = 0.05, 0.025  # `max_step_s`, when not given


@dataclass(slots=True, frozen=True)
class EngineParts:
    """Holds what an engine consists of once its workers run."""

    executor: Executor
    config: EngineConfig  # as it runs: without a drafter that nobody asked for, where that was in the way
    workers: WorkerInfo
    scheduler: Scheduler
    admission: Admission
    grammars: GrammarCompiler


@dataclass(slots=True, frozen=True)
class Assembly:
    """Says what parts are made of, beside the options and what the workers report."""

    info: ModelInfo
    block_hash_key: bytes
    recorder: StatsRecorder | None
    kv_event_sink: KVEventSink | None
    given: EngineConfig  # the options without a drafter that nobody asked for

    def start(self, executor: Executor, config: EngineConfig) -> EngineParts:
        """Start the workers by `config`, or by what was given where such a drafter is in the way; ConfigError,
        CheckpointError, ..."""
        info, media = self.info, MediaInfo.of(self.info)
        max_model_len = _max_model_len(config, info)
        check_parallel_sizes(config, info)
        pooling, budget = pooling_info(config, info), step_budget(config, info, max_model_len)
        _check_whole_items(config, media, budget)
        executor, config, workers = start_workers(executor, config, self.given)
        budget = step_budget(config, info, max_model_len, on_gpu=workers.device != "cpu")
        kv = create_manager(
            workers,
            config.block_size,
            hash_key=self.block_hash_key,
            max_tokens_in_flight=budget * config.max_inflight_steps,
            enable_prefix_caching=config.enable_prefix_caching and info.is_causal,
            sink=self.kv_event_sink,
            connector=config.kv_connector,
        )
        rules = _step_rules(config, info, workers, media, budget)
        grammars = _grammar_compiler(config, info)
        admission = Admission(
            kv,
            _bounds(config, info, workers, pooling, media, budget, max_model_len),
            model=model_revision(info, config),
            block_hash_key=self.block_hash_key,
            grammars=grammars,
        )
        scheduler = Scheduler(kv, rules, info.eos_token_ids, self.recorder)
        return EngineParts(executor, config, workers, scheduler, admission, grammars)


def _max_model_len(config: EngineConfig, info: ModelInfo) -> int:
    most, wanted = info.max_position_embeddings, config.max_model_len
    if wanted is not None and wanted > most:
        raise ConfigError(
            f"max_model_len={wanted} is more than the model's context of {most} tokens", param="max_model_len"
        )
    return wanted or most


def _check_whole_items(config: EngineConfig, media: MediaInfo | None, budget: int) -> None:
    """ConfigError where decodes may leave a picture that cannot be cut no step that holds it."""
    least = config.max_num_seqs + (0 if media is None else media.whole_tokens)
    if media is not None and media.whole_tokens and budget < least:
        raise ConfigError(
            f"max_num_batched_tokens={budget} is less than max_num_seqs={config.max_num_seqs} and a picture "
            f"of {media.whole_tokens} tokens, which is computed in one step: set it to {least} or more",
            param="max_num_batched_tokens",
        )


def _step_rules(
    config: EngineConfig, info: ModelInfo, workers: WorkerInfo, media: MediaInfo | None, budget: int
) -> StepRules:
    asked, most_drafts = config.speculative_config, workers.num_draft_tokens
    all_drafts = (most_drafts,) if most_drafts else ()
    return StepRules(
        max_num_seqs=workers.num_rows(config.max_num_seqs),
        max_num_batched_tokens=budget,
        by_priority=config.scheduling_policy == "priority",
        whole_prompts=whole_prompts(config, info, _max_model_len(config, info)),
        draft_counts=asked.counts(most_drafts) if asked is not None and most_drafts else all_drafts,
        drafts_by_cost=asked is not None and asked.num_speculative_tokens is None,
        drafts_by_row=workers.device == "cpu",
        num_draft_slots=workers.num_draft_slots,
        num_stages=config.pipeline_parallel_size,
        prompt_time=_prompt_time(config, workers),
        max_adapters=config.max_loras if config.enable_lora else 0,
        encoders=_encoder_rules(config, media, budget, workers),
    )


def _encoder_rules(
    config: EngineConfig, media: MediaInfo | None, budget: int, workers: WorkerInfo
) -> EncoderRules | None:
    if not workers.encoder_tokens:
        return None
    step_tokens = min(budget, config.max_item_tokens)  # memory of calls was measured for such an item
    return EncoderRules(step_tokens, workers.encoder_tokens, media is not None and media.whole_tokens > 0)


def _prompt_time(config: EngineConfig, workers: WorkerInfo) -> PromptTime:
    on_cpu = workers.device == "cpu"
    usual_s = CPU_STEP_S if on_cpu else GPU_STEP_S
    return PromptTime(usual_s if config.max_step_s is None else config.max_step_s, grows=not on_cpu)


def _bounds(
    config: EngineConfig,
    info: ModelInfo,
    workers: WorkerInfo,
    pooling: PoolingInfo | None,
    media: MediaInfo | None,
    budget: int,
    max_model_len: int,
) -> RequestBounds:
    return RequestBounds(
        info.vocab_size,
        info.eos_token_ids,
        max_model_len,
        pooling=pooling,
        max_item_tokens=_max_item_tokens(config, media, budget) if workers.encoder_tokens and media else 0,
        encoder=EncoderInfo.of(info) if pooling is None else None,
    )


def _max_item_tokens(config: EngineConfig, media: MediaInfo, budget: int) -> int:
    """The longest picture, which a step holds beside all decodes where it cannot be cut."""
    if not media.whole_tokens:
        return config.max_item_tokens
    return min(config.max_item_tokens, budget - config.max_num_seqs)


def _grammar_compiler(config: EngineConfig, info: ModelInfo) -> GrammarCompiler:
    """Reads the tokenizer when the first grammar comes."""
    limits = GrammarLimits(
        config.grammar_max_bytes, config.grammar_max_depth, config.grammar_timeout_s, config.grammar_memory_bytes
    )
    source = TokenizerVocabulary(tokenizer_directory(config, info), info.vocab_size, info.eos_token_ids)
    return GrammarCompiler(source, limits, config.grammar_cache_size)
