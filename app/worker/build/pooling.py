"""The parts of a worker whose model gives vectors or scores.

A decoder's prompts come in chunks and lie in the KV cache, as if they were to be continued. An encoder has no cache:
its prompts come whole, and blocks are numbers that keep the host's books.
"""

from __future__ import annotations

from app.config import EngineConfig
from app.engine.attention.kv_cache import KVCache, KVCacheSpec, describe_scales
from app.engine.distributed.stage_link import StageLink
from app.engine.models.loader import load_pooling_model
from app.engine.parallel_plan import refuse_stages
from app.engine.pooling.info import PoolingInfo, step_budget
from app.engine.pooling.params import PoolingParams
from app.engine.pooling.pooler import Pooler
from app.engine.row_feature import RowFeatures
from app.engine.worker.build.parts import Parts
from app.engine.worker.cascade_choice import refuse_cascade
from app.engine.worker.features import create_row_features
from app.engine.worker.features.context import FeatureContext
from app.engine.worker.forward_pass import ForwardPass
from app.engine.worker.heads.pooling import PoolingHead
from app.engine.worker.host_tier.host_tier import refuse_host_tier
from app.engine.worker.kv_group_choice import select_groups
from app.engine.worker.placement import Placement
from app.engine.worker.row_state import RowState
from app.engine.worker.warmup.plan import pooling_plan
from app.engine.worker.warmup.warm_up import WarmUp
from app.errors import ConfigError
from app.platforms import platform_of


def build(config: EngineConfig, place: Placement) -> Parts:
    """Raises ConfigError, CheckpointError and UnsupportedError with what to change."""
    refuse_stages(config)
    refuse_host_tier(config)
    refuse_cascade(config)
    ctx, info, device = place.build, place.info, place.device
    pooling = PoolingInfo.of(info, config.matryoshka)
    model = load_pooling_model(info, ctx, config.load_format, config.seed)
    classify = model.classify if model.num_labels else None
    head = PoolingHead(Pooler(pooling, device, classify, dummy=config.load_format == "dummy"), device)
    windows = select_groups(config, model.attention_layers, ctx)
    spec = KVCacheSpec.of(model.attention_layers, config.block_size, windows)
    state = RowState(config.max_num_seqs, ctx.max_model_len, config.block_size, device, len(windows))
    _refuse_kv_dtype(config, spec)
    link = StageLink(ctx.groups, 0, ctx.dtype, device, 0)
    forward = ForwardPass(model, KVCache(spec, device), link, info.vocab_size, ctx.dtype)
    features = create_row_features(FeatureContext(config, forward, state, pooling))
    budget = step_budget(config, info, ctx.max_model_len)
    plan = pooling_plan(config, ctx.max_model_len, budget, on_gpu=platform_of(device).is_async)
    task = PoolingParams(task=pooling.raw_task)
    return Parts(
        config=config,
        model=model,
        forward=forward,
        state=state,
        head=head,
        features=RowFeatures([*features, *head.features]),
        warm_up=WarmUp(config, plan, forward, device, pooling=task),
        notes=[f"pooling: {pooling.pooling}, {', '.join(pooling.tasks)}", *describe_scales(model.attention_layers)],
    )


def _refuse_kv_dtype(config: EngineConfig, spec: KVCacheSpec) -> None:
    if config.kv_cache_dtype != "auto" and not spec.layers:
        raise ConfigError(
            f"kv_cache_dtype={config.kv_cache_dtype}: this model has no KV cache; leave it out", param="kv_cache_dtype"
        )
