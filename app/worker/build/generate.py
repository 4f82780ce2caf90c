"""The parts of a worker whose model generates."""

from __future__ import annotations

from functools import partial

from app.config.engine import EngineConfig
from app.distributed.stage_link import StageLink
from app.kernels.recurrent import DraftRoom
from app.layers.experts.expert_mlp import Experts
from app.layers.state_layer import StateLayer
from app.loading.loader import format_named, load_model, names_of_other_ranks
from app.models.base import EngineModel
from app.platforms import platform_of
from app.worker.attention.kv_cache import KVCache, KVCacheSpec, describe_scales
from app.worker.build.parts import Parts
from app.worker.cascade_choice import CascadeChoice, select_cascade
from app.worker.features import create_features
from app.worker.features.context import FeatureContext
from app.worker.forward_pass import ForwardPass
from app.worker.graphs.graph_setup import GraphSetup
from app.worker.heads.base import Head
from app.worker.heads.relay import RelayHead
from app.worker.heads.sampling import SamplingHead
from app.worker.kv_group_choice import select_groups
from app.worker.kv_sizing import describe_encoded, num_encoded_slots
from app.worker.placement import Placement
from app.worker.rows.row_state import RowState
from app.worker.rows.step_inputs import StepInputs
from app.worker.rows.worker_feature import WorkerFeatures
from app.worker.spec_decode import create_proposer
from app.worker.spec_decode.base import Proposer, ProposerContext
from app.worker.spec_decode.draft_report import DraftReport
from app.worker.spec_decode.drafted_states import DraftedStates, RelayedStates, Within
from app.worker.spec_decode.drafting import Drafting
from app.worker.state_limits import refuse_with_states
from app.worker.warmup.plan import generation_plan
from app.worker.warmup.warm_up import WarmUp


def build(config: EngineConfig, place: Placement) -> Parts:
    """Raises ConfigError, CheckpointError and UnsupportedError with what to change."""
    ctx, info, device = place.build, place.info, place.device
    model = load_model(info, ctx, config.load_format, config.seed)
    link = StageLink(ctx.groups, info.hidden_size, ctx.dtype, device, config.max_inflight_steps + 2)
    inputs = StepInputs(config.max_num_seqs)
    proposer = create_proposer(ProposerContext(config, model, info, inputs, ctx, link.is_last))
    num_drafts, own_layers = (0, []) if proposer is None else (proposer.num_draft_tokens, proposer.attention_layers)
    layers = [*model.attention_layers, *own_layers]
    windows = select_groups(config, layers, ctx)
    spec = KVCacheSpec.of(layers, config.block_size, windows)
    refuse_with_states(config, spec)
    width = ctx.max_model_len + num_drafts
    state = RowState(config.max_num_seqs, width, config.block_size, device, len(windows), inputs)
    cache = KVCache(spec, device, config.max_num_seqs, num_encoded_slots(config, spec, device))
    forward = ForwardPass(model, cache, link, info.vocab_size, ctx.dtype, own_layers, ctx.stage_layers)
    drafting = _drafting(config, proposer, state, forward)
    head = _head(config, forward, state, num_drafts, drafting)
    features = WorkerFeatures(
        [
            *([] if proposer is None else [proposer]),  # first: its cache is whole before another one copies blocks
            *create_features(FeatureContext(config, forward, state, elsewhere=partial(_elsewhere, config, place))),
            *head.features,
            *([DraftReport(state.columns, num_drafts)] if num_drafts and link.is_last else []),
        ]
    )
    forward.want(features.reads_layers)
    cascade = select_cascade(config, state, layers, ctx.dtype)
    graphs = GraphSetup(
        config,
        forward,
        state,
        ctx.groups.tp,
        features,
        shares_prefixes=cascade is not None,
        draft_counts=() if config.speculative_config is None else config.speculative_config.counts(num_drafts),
        drafting=drafting,
    )
    plan = generation_plan(
        config,
        ctx.max_model_len,
        on_gpu=platform_of(device).is_async,
        compiles=forward.is_capturable,
        short_query=max((layer.short_query for layer in layers), default=0),
        has_experts=any(isinstance(module, Experts) for module in model.modules()),
    )
    return Parts(
        config=config,
        model=model,
        forward=forward,
        state=state,
        head=head,
        features=features,
        warm_up=WarmUp(
            config, plan, forward, device, features, shares_prefixes=cascade is not None, num_drafts=num_drafts
        ),
        cascade=cascade,
        graphs=graphs,
        notes=[*describe_encoded(spec, cache.num_encoded), *_notes(model, cascade)],
    )


def _drafting(
    config: EngineConfig, proposer: Proposer | None, state: RowState, forward: ForwardPass
) -> Drafting | None:
    """The end of steps that verify drafts, with room for what layers that keep states need until then."""
    if proposer is None or not forward.link.is_last:
        return None
    layers = _state_layers(forward.model)
    places = config.max_num_seqs * (1 + proposer.num_draft_tokens)
    states = DraftedStates(layers, forward.cache, _within(forward), places) if layers else None
    return Drafting(proposer, state.columns, forward.link, forward.vocab_size, states)


def _within(forward: ForwardPass) -> Within:
    """Has a feature that comes later say what it is."""
    return lambda accepted: forward.within_states(accepted)


def _state_layers(model: EngineModel) -> list[StateLayer]:
    return [layer for layer in model.attention_layers if isinstance(layer, StateLayer)]


def _elsewhere(config: EngineConfig, place: Placement) -> frozenset[str]:
    """Names of tensors that the layers of all stages are filled from."""
    form = format_named(place.info, config.load_format)
    return names_of_other_ranks(place.info, place.build, form).filled


def _notes(model: EngineModel, cascade: CascadeChoice | None) -> list[str]:
    """Lines of the start about what was chosen here."""
    offload = [] if model.offload is None else [model.offload.note]
    return [*offload, *describe_scales(model.attention_layers), *([] if cascade is None else [cascade.note])]


def _head(
    config: EngineConfig, forward: ForwardPass, state: RowState, num_drafts: int, drafting: Drafting | None
) -> Head:
    """The end of this stage's steps."""
    if not forward.link.is_last:
        layers, room = _state_layers(forward.model), DraftRoom(config.max_num_seqs, 1 + num_drafts)
        states = RelayedStates(layers, forward.cache, _within(forward), room) if layers and num_drafts else None
        return RelayHead(forward.link, state, num_drafts, states)
    if drafting is None:
        forward.read_ends()
    # Steps of which the host has not heard when it writes a message: those in flight, and one held back by the worker.
    slack = num_drafts * (config.max_inflight_steps + 1)
    return SamplingHead(forward, state, drafting, slack, config.logits_processors, exact=config.is_exact)
