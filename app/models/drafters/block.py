"""DFlash 1 and 2 (Chen et al., 2026) and DSpark (DeepSeek, 2026): a whole block of drafts in one pass.

Layers of Qwen3's attend to keys and values that they make of what layers of the target read, for all that is computed,
and of the block itself: the newest token and masks behind it, which see each other both ways. DFlash's masks each tell
the token in their own place; version 2 ties them to those before (`BlockConvolution`, `CandidateSelector`). DSpark's
places each tell the next one, and a low-rank table adds what the token before makes likely. In layers with a window a
place sees none behind it, unless config.json says otherwise. Checkpoints as the authors publish them, or as the
project "speculators" does.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import nn

from app.checkpoints.fields.kinds import FLAG, check, whole
from app.checkpoints.model_info import ModelInfo
from app.checkpoints.tensors.checkpoint import StoredTensor
from app.errors import CheckpointError, UnsupportedError
from app.layers.context import BuildContext, ForwardContext, HiddenStates
from app.layers.norm import RMSNorm
from app.layers.replicated import ReplicatedLinear
from app.layers.rope_scaling import RopeSettings
from app.layers.rotary import RotaryEmbedding
from app.layers.vocab import LMHead, VocabEmbedding
from app.models.base import EngineModel
from app.models.blocks import Blocks, LayerPlace
from app.models.decoder_layers.pre_norm import PreNormLayer
from app.models.decoder_settings import readable
from app.models.drafters.base import Target, TokenIds, expect_layers, ids_by_offset, without_prefix
from app.models.drafters.block_convolution import ConvolvedLayer
from app.models.drafters.token_links import CandidateSelector, MarkovHead, TokenLink
from app.models.families.qwen3 import Qwen3ForCausalLM

_FIELDS = {
    **dict.fromkeys(("block_size", "draft_vocab_size", "target_hidden_size", "sliding_window"), whole(1, 1 << 30)),
    **dict.fromkeys(("mask_token_id", "markov_rank"), whole(0, 1 << 30)),
    "swa_window_size": whole(1, 1 << 30),
    "conv_kernel_size": whole(1, 64),
    "conv_group_size": whole(1, 1 << 30),
    "selector_rank": whole(1, 1 << 16),
    "selector_top_k": whole(1, 1 << 10),
    **dict.fromkeys(("causal", "is_causal", "sample_from_anchor"), FLAG),
}
# Switches that nobody here reads, and what they are when nothing hangs on them; another value is another model.
_UNREAD: Mapping[str, tuple[Any, ...]] = {
    **dict.fromkeys(("use_swa", "attention_sink_bias", "add_swa_attention_sink_bias"), (None, False)),
    "final_logit_softcapping": (None,),
    **dict.fromkeys(("output_multiplier", "input_embedding_scale"), (None, 1)),
    "projector_type": (None, "dflash", "dflash2"),
    "markov_head_type": (None, "vanilla"),
    "shift_label": (None, False),
}
_FULL, _SLIDING = "full_attention", "sliding_attention"
_IN_A_BLOCK = 16  # tokens, where config.json says nothing
MOST_LAYERS = 64


class BlockForm(NamedTuple):
    """Says how a checkpoint's blocks are made, by its config.json."""

    reads_layers: tuple[int, ...]  # of the target: those whose inputs are read
    size: int  # places of a block, the newest token's among them
    mask: int  # the token that stands in the others
    tells_next: bool  # each place tells the token behind it, the first one's too
    windows: tuple[int | None, ...]  # of its layers: the positions that a place sees, its own included
    is_causal: tuple[bool, ...]  # of its layers: a place sees none behind it
    taps: int  # of convolutions around the parts of layers, a place's own among them; 0: it has none
    group: int  # channels that they weigh alike
    rank: int  # of the codes by which one of a place's best tokens is selected; 0: it is the best one
    best: int  # tokens of which it is one

    @property
    def most_drafts(self) -> int:
        """Drafts of a block."""
        return self.size - (not self.tells_next)

    @classmethod
    def of(cls, info: ModelInfo, target: ModelInfo) -> BlockForm:
        """CheckpointError where it lacks something, UnsupportedError names a switch that nobody reads, ConfigError what
        the target has not."""
        hf, place = info.hf_config, f"{info.directory}/config.json"
        if info.num_layers > MOST_LAYERS:
            raise CheckpointError(f"{info.directory}: {info.num_layers} layers are no drafter's", param="model")
        given = {**hf, **_mapping(hf.get("dflash_config"))}
        check(given, _FIELDS, place)
        for name, plain in _UNREAD.items():
            if given.get(name) not in plain:
                raise UnsupportedError(f"speculative_config: {name}={given[name]!r:.40} of {place} is not supported")
        if given.get("mask_token_id") is None:
            raise CheckpointError(f"{place} lacks mask_token_id", param="model")
        is_spark = given.get("markov_rank") is not None
        windows = _windows(given, info.num_layers, place)
        said = given.get("causal") if given.get("is_causal") is None else given["is_causal"]
        taps, group = _pair(given, "conv_kernel_size", "conv_group_size", place)
        rank, best = _pair(given, "selector_rank", "selector_top_k", place)
        return cls(
            reads_layers=_layers_read(given, target.num_layers, place),
            size=int(given.get("block_size") or _IN_A_BLOCK),
            mask=int(given["mask_token_id"]),
            tells_next=bool(given.get("sample_from_anchor", is_spark)),
            windows=windows,
            is_causal=tuple(window is not None if said is None else bool(said) for window in windows),
            taps=taps,
            group=group,
            rank=rank,
            best=best,
        )


class BlockDrafter(EngineModel):
    """The drafter of a checkpoint whose tensors have these names."""

    def __init__(self, ctx: BuildContext, info: ModelInfo, target: Target, *, names: Collection[str]) -> None:
        """Embedding and head are the target's, unless the checkpoint has its own."""
        super().__init__()
        hf, own = info.hf_config, {name.removeprefix("model.").split(".")[0] for name in names}
        self.form, self.target = BlockForm.of(info, target.info), target
        s = replace(readable(Qwen3ForCausalLM.settings, info), sliding_windows=self.form.windows)
        width = int(hf.get("target_hidden_size") or s.hidden_size)
        target.expect("the hidden size of what it reads", width, target.info.hidden_size)
        target.expect("vocab_size", s.vocab_size, target.info.vocab_size)
        target.expect("mask_token_id, less than vocab_size", min(self.form.mask, s.vocab_size - 1), self.form.mask)
        self.num_tokens = int(hf.get("draft_vocab_size") or s.vocab_size)
        self.embed_tokens = self.lm_head = None
        self._shared: tuple[VocabEmbedding, ...] = ()
        if "embed_tokens" in own:
            self.embed_tokens = VocabEmbedding(ctx, s.vocab_size, s.hidden_size)
        else:
            target.expect("hidden_size, as it has no embed_tokens", s.hidden_size, target.info.hidden_size)
            self._shared = (target.embedding,)
        if "lm_head" in own:
            self.lm_head = LMHead(ctx, self.num_tokens, s.hidden_size)
        else:
            target.expect("draft_vocab_size, as it has no lm_head", self.num_tokens, target.info.vocab_size)
            target.expect("hidden_size, as it has no lm_head", s.hidden_size, target.info.hidden_size)
        self.fc = ReplicatedLinear(ctx, len(self.form.reads_layers) * width, s.hidden_size, bias=False)
        self.hidden_norm, self.norm = (RMSNorm(ctx, s.hidden_size, s.norm_eps) for _ in range(2))
        rope = RopeSettings.from_hf(hf, s.head_dim, ctx.max_model_len)
        rotary = RotaryEmbedding(rope, ctx.max_model_len, ctx.dtype, ctx.device)
        places = [LayerPlace(index, index, rotary) for index in range(s.num_layers)]
        form, blocks = self.form, Blocks()
        if form.taps and s.hidden_size % form.group:
            what = f"conv_group_size {form.group} does not divide hidden_size {s.hidden_size}"
            raise CheckpointError(f"{info.directory}/config.json: {what}", param="model")
        self.layers = nn.ModuleList(
            ConvolvedLayer(ctx, s, place, blocks, form.taps, form.group)
            if form.taps
            else PreNormLayer(ctx, s, place, blocks)
            for place in places
        )
        ids = TokenIds(self.num_tokens, s.vocab_size, is_offset=True)
        self.d2t = ids.weight() if self.num_tokens != s.vocab_size else None
        rank = int(hf.get("markov_rank") or 0)
        self.markov_head = MarkovHead(ctx, s.vocab_size, self.num_tokens, rank) if rank else None
        self.candidate_selector = None
        if form.rank:
            target.expect("draft_vocab_size, as it selects candidates", self.num_tokens, target.info.vocab_size)
            self.candidate_selector = CandidateSelector(ctx, s.vocab_size, s.hidden_size, form.rank, form.best)

    @property
    def token_ids(self) -> torch.Tensor | None:
        """int64 [Vd] the target's id of each token that it may draft; None: all of them, in the target's order."""
        return ids_by_offset(self.d2t)

    @property
    def link(self) -> TokenLink | None:
        """Ties each draft to the one before; None: nothing does."""
        return self.markov_head if self.candidate_selector is None else self.candidate_selector

    def own_tensors(self, name: str, tensor: StoredTensor) -> Iterable[tuple[str, StoredTensor]]:
        """See EngineModel; the confidence of drafts is not asked for, as their number follows the cost."""
        unread = {"t2d", "verifier_norm", "verifier_lm_head", "confidence_head"}
        return without_prefix(name, tensor, unread | ({"d2t"} if self.d2t is None else set()))

    def keep(self, hidden: HiddenStates, ctx: ForwardContext) -> None:
        """Have each layer keep keys and values of a step's T tokens, of which the target computed these states."""
        read = torch.cat([hidden.inputs_of[layer] for layer in self.form.reads_layers], dim=-1)
        features = self.hidden_norm(self.fc(read))
        for layer in self.layers:
            attention: Any = layer.self_attn
            attention.keep(features, ctx)

    def forward(self, input_ids: torch.Tensor, ctx: ForwardContext, width: int = 1) -> torch.Tensor:
        """int [T] the tokens of blocks, `width` of each -> features [T, C]."""
        table = self.embed_tokens if self.embed_tokens is not None else self._shared[0]
        x, layers = table(input_ids), [*self.layers]
        normed = layers[0].input_layernorm(x)
        more = (width,) if self.form.taps else ()
        for layer, following in zip(layers, [*(one.input_layernorm for one in layers[1:]), self.norm], strict=True):
            normed, x = layer(normed, x, following, ctx, *more)
        return normed  # type: ignore[no-any-return]

    def raw_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Features [N, C] -> [N, Vd]."""
        return self.target.model.raw_logits(hidden) if self.lm_head is None else self.lm_head(hidden)


def _mapping(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _pair(given: Mapping[str, Any], first: str, other: str, place: str) -> tuple[int, int]:
    """Two numbers that stand together; 0 and 0 where both are left out."""
    if (given.get(first) is None) != (given.get(other) is None):
        raise CheckpointError(f"{place} has one of {first} and {other} alone", param="model")
    return int(given.get(first) or 0), int(given.get(other) or 0)


def _windows(given: Mapping[str, Any], num_layers: int, place: str) -> tuple[int | None, ...]:
    """One of each layer, as `layer_types` names them. UnsupportedError where it does not say it of each."""
    kinds, window = given.get("layer_types"), given.get("swa_window_size") or given.get("sliding_window")
    if kinds is None and not given.get("use_sliding_window"):
        return (None,) * num_layers
    if not isinstance(kinds, list) or len(kinds) != num_layers or any(kind not in (_FULL, _SLIDING) for kind in kinds):
        what = f"layer_types={kinds!r:.80} of {place} is not supported; known: {_FULL}, {_SLIDING}, one for each layer"
        raise UnsupportedError(f"speculative_config: {what}")
    if window is None and _SLIDING in kinds:
        raise CheckpointError(f"{place} lacks sliding_window, of which layer_types speaks", param="model")
    return tuple(window if kind == _SLIDING else None for kind in kinds)


def _layers_read(given: Mapping[str, Any], num_layers: int, place: str) -> tuple[int, ...]:
    """The authors name layers whose outputs are read, "speculators" those whose inputs are."""
    named, behind = given.get("aux_hidden_state_layer_ids"), 0
    if named is None:
        named, behind = given.get("target_layer_ids"), 1
    if not isinstance(named, list) or not named or not all(type(layer) is int for layer in named):
        raise CheckpointError(f"{place}: target_layer_ids is {named!r:.80}, no list of layers", param="model")
    return expect_layers([layer + behind for layer in named], num_layers)
