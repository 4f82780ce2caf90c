"""Steps of one token whose layers of latents and experts are computed at once: which, and how likely tokens are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from app import LLM, SamplingParams
from app.checkpoints.model_info import ASSETS
from app.kernels.whole_step import StepToken
from app.kernels.whole_step.latents import LatentLayer, LatentShape
from app.kernels.whole_step.reference_latents import latent_step
from app.models import whole_latents as at_once
from tests.tiny_models import tiny_model

SIZES = {"kv_lora_rank": 64, "qk_nope_head_dim": 32, "qk_rope_head_dim": 16, "v_head_dim": 32, "q_lora_rank": None}
EXPERTS = {"n_routed_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "n_shared_experts": 2}
CHOICE = {"topk_method": "greedy", "norm_topk_prob": False, "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1}
PROMPT = list(range(40, 61))


@dataclass
class Counted:
    """Computes steps by the reference, of any shape."""

    shape: LatentShape
    longest: int | None = None
    positions: list[int] = field(default_factory=list)
    counts: set[int] = field(default_factory=set)

    def serves(self, x: torch.Tensor, layers: Sequence[LatentLayer]) -> bool:
        return x.dtype == torch.bfloat16

    def run(self, x: torch.Tensor, layers: Sequence[LatentLayer], token: StepToken) -> torch.Tensor:
        self.positions.append(int(token.seq_len) - 1)
        self.counts.add(len(layers))
        return latent_step(x, layers, token, self.shape)


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[Counted]:
    found: list[Counted] = []

    def make(shape: LatentShape, device: torch.device) -> Counted:
        found.append(Counted(shape))
        return found[-1]

    monkeypatch.setattr(at_once, "LATENT_STEPS", SimpleNamespace(all_on=lambda device: (make,)))
    return found


def engine(**options: Any) -> LLM:
    more = {"num_hidden_layers": 3, "initializer_range": 0.1, "scoring_func": "softmax", "routed_scaling_factor": 1.0}
    directory = tiny_model("deepseek_v2", **SIZES, **EXPERTS, **CHOICE, **more)
    return LLM(str(directory), tokenizer=str(ASSETS / "tiny-chat"), **{"dtype": "bfloat16", **options})


def test_tokens_are_as_likely_either_way(made: list[Counted]) -> None:
    """Those behind a prompt; two requests go layer by layer."""
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, logprobs=1)
    found = []
    for whole_steps in ("auto", "off"):
        with engine(whole_steps=whole_steps) as llm:
            made[0].positions.clear()
            found.append(llm.generate([PROMPT], [params], use_tqdm=False)[0].outputs[0])
            assert made[0].positions == (list(range(21, 28)) if whole_steps == "auto" else [])
            llm.generate([PROMPT, PROMPT[::-1]], [params, params], use_tqdm=False)
            assert len(made[0].positions) == (7 if whole_steps == "auto" else 0)
    shape = made[0].shape
    assert made[0].counts == {2}  # behind the one without experts
    assert (shape.heads, shape.nope, shape.rope, shape.value, shape.rank) == (2, 32, 16, 32, 64)
    assert (shape.intermediate, shape.experts, shape.chosen, shape.shared) == (64, 6, 2, 2)
    whole, layered = found
    for one, other in zip(whole.logprobs or [], layered.logprobs or [], strict=True):
        if one.token_ids[0] != other.token_ids[0]:
            break
        assert one.logprobs[0] == pytest.approx(other.logprobs[0], abs=0.3)


def test_a_long_context_goes_layer_by_layer(made: list[Counted]) -> None:
    with engine() as llm:
        made[-1].longest = 24
        made[-1].positions.clear()
        params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
        assert len(llm.generate([PROMPT], [params], use_tqdm=False)[0].outputs[0].token_ids) == 8
        assert made[-1].positions == [21, 22, 23]


@pytest.mark.parametrize("options", [{"dtype": "float32"}, {"quantization": "int8"}], ids=["float32", "int8"])
def test_engines_that_have_none(made: list[Counted], options: dict[str, Any]) -> None:
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    with engine(**options) as llm:
        assert len(llm.generate([[5, 6, 7]], [params], use_tqdm=False)[0].outputs[0].token_ids) == 4
    assert not any(one.positions for one in made)


def test_layers_that_have_none(made: list[Counted], monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[Any] = []
    of = at_once.LatentDecoderStep.of
    monkeypatch.setattr(at_once.LatentDecoderStep, "of", lambda *asked: given.append(asked))
    with engine():
        ctx, settings, layers, rotaries = given[0]
    step = of(ctx, settings, layers, rotaries)
    assert step is not None
    assert step.longest(1) is None
    layers[-1].self_attn.o_proj.delta = SimpleNamespace()  # adapters: no step is whole, nor has a long row its own
    assert step.longest(1) == 0
    layers[-1].self_attn.o_proj.delta = None
    assert of(replace(ctx, is_exact=True), settings, layers, rotaries) is None
    assert of(ctx, replace(settings, latent=None), layers, rotaries) is None
    assert of(ctx, replace(settings, num_layers=1), layers[:1], rotaries) is None
    assert of(ctx, settings, [*layers[:2], layers[0]], rotaries) is None
    rule = layers[2].mlp.gate.rule
    for change in ({"scale": 2.0}, {"scoring": "sigmoid"}, {"renormalize": True}, {"logits_dtype": torch.bfloat16}):
        layers[2].mlp.gate.rule = replace(rule, **change)
        assert of(ctx, settings, layers, rotaries) is None
    layers[2].mlp.gate.rule = rule
    mlp, attention = layers[2].mlp, layers[2].self_attn
    places = ((mlp, "num_identity"), (mlp.gate, "bias"), (mlp.experts, "map"), (attention.o_proj, "bias"))
    for place, name in (*places, (attention, "q_b_proj"), (mlp.experts, "weighs_input")):
        before = getattr(place, name)
        setattr(place, name, torch.ones(1) if name == "bias" else 1)
        assert of(ctx, settings, layers, rotaries) is None
        setattr(place, name, before)
    assert not at_once._is_changed(layers[2])
    mlp.experts.down_proj.pair_delta = SimpleNamespace()
    assert at_once._is_changed(layers[2])
