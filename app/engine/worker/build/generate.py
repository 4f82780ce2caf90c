"""The parts of a worker whose model generates."""

from __future__ import annotations

from app.config import EngineConfig
from app.engine.attention.kv_cache import KVCache, KVCacheSpec, describe_scales
from app.engine.distributed.stage_link import StageLink
from app.engine.layers.experts.expert_mlp import Experts
from app.engine.models.loader import load_model
from app.engine.row_feature import RowFeatures
from app.engine.spec_decode import create_proposer
from app.engine.spec_decode.base import Proposer, ProposerContext
from app.engine.spec_decode.drafting import Drafting
from app.engine.worker.build.parts import Parts
from app.engine.worker.cascade_choice import select_cascade
from app.engine.worker.features import create_row_features
from app.engine.worker.features.context import FeatureContext
from app.engine.worker.forward_pass import ForwardPass
from app.engine.worker.graphs.graph_setup import GraphSetup
from app.engine.worker.heads.base import Head
from app.engine.worker.heads.relay import RelayHead
from app.engine.worker.heads.sampling import SamplingHead
from app.engine.worker.kv_group_choice import select_groups
from app.engine.worker.placement import Placement
from app.engine.worker.row_state import RowState
from app.engine.worker.warmup.plan import generation_plan
from app.engine.worker.warmup.warm_up import WarmUp
from app.platforms import platform_of


def build(config: EngineConfig, place: Placement) -> Parts:
    """Raises ConfigError, CheckpointError and UnsupportedError with what to change."""
    ctx, info, device = place.build, place.info, place.device
    model = load_model(info, ctx, config.load_format, config.seed)
    windows = select_groups(config, model.attention_layers, ctx)
    spec = KVCacheSpec.of(model.attention_layers, config.block_size, windows)
    state = RowState(config.max_num_seqs, ctx.max_model_len, config.block_size, device, len(windows))
    hidden_size = info.hidden_size
    link = StageLink(ctx.groups, hidden_size, ctx.dtype, device, config.max_inflight_steps + 2)
    forward = ForwardPass(model, KVCache(spec, device), link, info.vocab_size, ctx.dtype)
    context = FeatureContext(config, forward, state)
    features = create_row_features(context)
    proposer = create_proposer(ProposerContext(config, model, state, link.is_last))
    head = _head(config, forward, state, proposer)
    all_features = RowFeatures([*features, *([] if proposer is None else [proposer]), *head.features])
    cascade = select_cascade(config, state, model.attention_layers, ctx.dtype)
    shares = cascade is not None
    graphs = GraphSetup(
        config, forward, state, ctx.groups.tp, all_features, shares_prefixes=shares, drafts=proposer is not None
    )
    plan = generation_plan(
        config,
        ctx.max_model_len,
        on_gpu=platform_of(device).is_async,
        compiles=forward.is_capturable,
        short_query=max((layer.short_query for layer in model.attention_layers), default=0),
        has_experts=any(isinstance(module, Experts) for module in model.modules()),
    )
    notes = [] if model.offload is None else [model.offload.note]
    notes += describe_scales(model.attention_layers)
    notes += [] if cascade is None else [cascade.note]
    return Parts(
        config=config,
        model=model,
        forward=forward,
        state=state,
        head=head,
        features=all_features,
        warm_up=WarmUp(config, plan, forward, device, shares_prefixes=shares),
        cascade=cascade,
        graphs=graphs,
        notes=notes,
    )


def _head(config: EngineConfig, forward: ForwardPass, state: RowState, proposer: Proposer | None) -> Head:
    """The end of this stage's steps."""
    link, num_drafts = forward.link, 0 if proposer is None else proposer.num_draft_tokens
    if not link.is_last:
        return RelayHead(link, state, num_drafts)
    drafting = None if proposer is None else Drafting(proposer, state.columns, link)
    # Steps of which the host has not heard when it writes a message: those in flight, and one held back by the worker.
    slack = num_drafts * (config.max_inflight_steps + 1)
    return SamplingHead(forward, state, drafting, slack, config.logits_processors)
