"""The parts of a worker whose model gives vectors or scores.

A decoder's prompts come in chunks and lie in the KV cache, as if they were to be continued. An encoder has no cache:
its prompts come whole, and blocks are numbers that keep the host's books.
"""

from __future__ import annotations

from collections.abc import Mapping

from app.checkpoints.model_info import ModelInfo
from app.config.engine import EngineConfig
from app.distributed.stage_link import StageLink
from app.errors import ConfigError, UnsupportedError
from app.loading.loader import load_pooling_model
from app.models.decoder_pooling import DecoderForPooling
from app.platforms import platform_of
from app.records.parallel_plan import refuse_stages
from app.records.pooling_info import PoolingInfo
from app.records.pooling_params import PoolingParams
from app.records.step_budget import step_budget
from app.worker.attention.kv_cache import KVCache, KVCacheSpec, describe_scales
from app.worker.build.parts import Parts
from app.worker.cascade_choice import refuse_cascade
from app.worker.features import create_features
from app.worker.features.context import FeatureContext
from app.worker.forward_pass import ForwardPass
from app.worker.graphs.token_graphs import TokenForward, TokenGraphs, attends_by_tiles
from app.worker.heads.pooling import PoolingHead
from app.worker.host_tier.host_tier import refuse_host_tier
from app.worker.kv_group_choice import select_groups
from app.worker.placement import Placement
from app.worker.pooling.pooler import Pooler
from app.worker.rows.row_state import RowState
from app.worker.rows.worker_feature import WorkerFeatures
from app.worker.state_limits import refuse_state_dtype
from app.worker.warmup.plan import pooling_plan
from app.worker.warmup.warm_up import WarmUp


def build(config: EngineConfig, place: Placement) -> Parts:
    """Raises ConfigError, CheckpointError and UnsupportedError with what to change."""
    refuse_stages(config)
    refuse_host_tier(config)
    refuse_cascade(config)
    ctx, info, device = place.build, place.info, place.device
    pooling = PoolingInfo.of(info, config.matryoshka)
    model = load_pooling_model(info, ctx, config.load_format, config.seed)
    if model.saturates != pooling.saturates:
        raise UnsupportedError(f"sparse vectors of {info.architecture} are not supported", param="model")
    windows = select_groups(config, model.attention_layers, ctx)
    spec = KVCacheSpec.of(model.attention_layers, config.block_size, windows)
    state = RowState(config.max_num_seqs, ctx.max_model_len, config.block_size, device, len(windows))
    _refuse_kv_dtype(config, spec)
    link = StageLink(ctx.groups, 0, ctx.dtype, device, 0)
    has_tiles = attends_by_tiles(model)
    kind = TokenForward if has_tiles else ForwardPass
    forward = kind(model, KVCache(spec, device), link, info.vocab_size, ctx.dtype)
    classify = model.classify if model.num_labels else None
    is_dummy, within = config.load_format == "dummy", lambda rows: forward.within_classes(rows)  # a feature sets it
    head = PoolingHead(Pooler(pooling, device, classify, dummy=is_dummy, within=within), device)
    features = WorkerFeatures([*create_features(FeatureContext(config, forward, state, pooling)), *head.features])
    budget = step_budget(config, info, ctx.max_model_len, on_gpu=device.type != "cpu")
    graphs = TokenGraphs(config, forward, budget, device) if isinstance(forward, TokenForward) else None
    plan = pooling_plan(config, ctx.max_model_len, budget, on_gpu=platform_of(device).is_async)
    task = PoolingParams(task=pooling.raw_task)
    return Parts(
        config=config,
        model=model,
        forward=forward,
        state=state,
        head=head,
        features=features,
        warm_up=WarmUp(config, plan, forward, device, features, pooling=task),
        graphs=graphs,
        notes=[
            f"pooling: {pooling.pooling}, {', '.join(pooling.tasks)}",
            *_own_code(info, type(model) is DecoderForPooling),
            *describe_scales(model.attention_layers),
        ],
    )


def _own_code(info: ModelInfo, is_plain: bool) -> list[str]:
    """A line where a decoder's makers run code of their own by a common class's name, which may see the whole text."""
    named = info.hf_config.get("auto_map")
    own = named.get("AutoModel") if isinstance(named, Mapping) else None
    if own is None or not is_plain or not info.is_causal:
        return []
    remedy = "if its tokens see the whole text, start with --hf-overrides '{\"is_causal\": false}'"
    return [f"auto_map names {own!r:.80}, which is not run (tokens look back only): {remedy}"]


def _refuse_kv_dtype(config: EngineConfig, spec: KVCacheSpec) -> None:
    refuse_state_dtype(config, spec)
    if config.kv_cache_dtype != "auto" and not spec.layers:
        raise ConfigError(
            f"kv_cache_dtype={config.kv_cache_dtype}: this model has no KV cache; leave it out", param="kv_cache_dtype"
        )
