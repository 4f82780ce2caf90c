"""Steps of one token whose layers are computed at once: which steps are, and that tokens stay the same."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from app import LLM, SamplingParams
from app.checkpoints.model_info import ASSETS
from app.kernels import gemm
from app.kernels.attention import AttentionMetadata
from app.kernels.gemm import tiled
from app.kernels.gemm.fp8_block import Fp8OnlyWeight
from app.kernels.gemm.stored import StoredTiles
from app.kernels.moe import GLU
from app.kernels.moe.stacked import stack_experts
from app.kernels.whole_step import StepExperts, StepLayer, StepShape, StepToken, StepWeight
from app.kernels.whole_step.reference import whole_step
from app.layers import stored_weight
from app.layers.context import ForwardContext
from app.layers.shown import show
from app.models import whole_step as at_once
from app.models.step_experts import is_adapted, step_experts
from app.worker.graphs.static_step import LONG, StaticStep, StepKey
from tests.models.families.expert_variants import EXPERT_VARIANTS
from tests.tiny_models import tiny_model
from tests.worker.worker_driver import Driver, Run, decode_statically, greedy

GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)


@dataclass
class Counted:
    """Computes steps by the reference, of any shape."""

    shape: StepShape
    most: dict[int, int | None] = field(default_factory=lambda: {1: None})
    rows: list[int] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)
    weights: list[StepWeight] = field(default_factory=list)
    asked: StepWeight | None = None
    places: set[tuple[int | None, int]] = field(default_factory=set)  # windows and groups of layers

    def longest_with(self, weight: StepWeight, rows: int) -> int | None:
        self.asked = weight
        return self.most.get(rows, 0)

    def run(self, x: torch.Tensor, layers: Sequence[StepLayer], token: StepToken) -> torch.Tensor:
        assert x.shape[1] == self.shape.hidden
        assert all(layer.qkv.shape[1] == self.shape.hidden for layer in layers)
        self.rows.append(len(x))
        self.positions.append(int(token.seq_len[0]) - 1)
        self.places = {(layer.window, layer.group) for layer in layers}
        self.weights = [weight for layer in layers for weight in (layer.qkv, layer.output, layer.gate_up, layer.down)]
        return whole_step(x, layers, token, self.shape)


class Noted(StaticStep):
    """Notes what ran."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.noted: list[StepKey] = []

    def forward(self, key: StepKey) -> None:
        super().forward(key)
        self.noted.append(key)


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[Counted]:
    found: list[Counted] = []

    def make(shape: StepShape, device: torch.device) -> Counted:
        found.append(Counted(shape))
        return found[-1]

    monkeypatch.setattr(gemm, "LEAST_PACKED_ELEMENTS", 1 << 30)  # weights stay as they are, as on a GPU
    monkeypatch.setattr(at_once, "WHOLE_STEPS", SimpleNamespace(all_on=lambda device: (make,)))
    return found


def generated(llm: LLM, prompts: list[list[int]]) -> list[list[int]]:
    return [list(out.outputs[0].token_ids) for out in llm.generate(prompts, GREEDY, use_tqdm=False)]


def test_one_request_alone(made: list[Counted], monkeypatch: pytest.MonkeyPatch) -> None:
    """Its tokens behind the prompt; two requests go layer by layer."""
    prompt = list(range(40, 61))
    with LLM("tiny-chat", dtype="bfloat16") as llm:
        made[-1].positions.clear()
        alone = generated(llm, [prompt])
        assert made[-1].positions == list(range(21, 28))
        both = generated(llm, [prompt, prompt[::-1]])
        assert made[-1].positions == list(range(21, 28))
    monkeypatch.setattr(at_once.DecoderStep, "run", lambda self, x, ctx: None)
    with LLM("tiny-chat", dtype="bfloat16") as llm:
        assert generated(llm, [prompt]) == alone
        assert generated(llm, [prompt, prompt[::-1]]) == both


def test_a_long_context_goes_layer_by_layer(made: list[Counted], monkeypatch: pytest.MonkeyPatch) -> None:
    """The same tokens either way: from static steps, of which a long row has one of its own, and from others."""
    prompt = list(range(40, 61))
    driver = Driver("tiny-chat", dtype="bfloat16", num_blocks=64)
    made[-1].most = {1: 24}
    made[-1].positions.clear()
    ordinary = driver.run([Run(prompt, greedy(8))])[0].tokens
    assert made[-1].positions == [21, 22, 23]
    step = decode_statically(driver.worker, [1, 2], kind=Noted)
    made[-1].positions.clear()
    found = driver.run([Run(prompt, greedy(8))])[0].tokens
    assert made[-1].positions == [21, 22, 23]
    assert isinstance(step, Noted)
    assert step.noted == [StepKey(1)] * 3 + [StepKey(1, frozenset({LONG}))] * 4
    monkeypatch.setattr(at_once.DecoderStep, "run", lambda self, x, ctx: None)
    assert found == ordinary == Driver("tiny-chat", dtype="bfloat16").run([Run(prompt, greedy(8))])[0].tokens


@pytest.mark.parametrize(("longest", "are_whole"), [(None, True), (200, True), (10, False)])
def test_a_drafter_whose_contexts_may_become_too_long_goes_layer_by_layer(
    made: list[Counted], longest: int | None, are_whole: bool
) -> None:
    """In captured passes, which do not know how long rows are; the target's own steps do."""
    drafting = {"method": "draft_model", "model": str(ASSETS / "tiny-chat"), "num_speculative_tokens": 3}
    driver = Driver(
        str(ASSETS / "tiny-chat"), dtype="bfloat16", num_blocks=64, max_model_len=128, speculative_config=drafting
    )
    _, drafter = made
    drafter.most = {2: longest}
    decode_statically(driver.worker, [2])
    drafter.rows.clear()
    driver.run([Run(list(range(40, 61)), greedy(8)), Run(list(range(30, 38)), greedy(8))])
    assert (2 in drafter.rows) is are_whole


def test_several_requests(made: list[Counted], monkeypatch: pytest.MonkeyPatch) -> None:
    """Decodes of as many rows as are served, and no others; the same tokens layer by layer."""
    prompts = [list(range(40, 61)), list(range(30, 38)), [5, 6, 7], [8, 9]]
    with LLM("tiny-chat", dtype="bfloat16") as llm:
        made[-1].most |= {2: None, 3: 24}
        made[-1].rows.clear()
        found = [generated(llm, prompts[:count]) for count in (2, 3, 4)]
        assert {2, 3} <= set(made[-1].rows) <= {1, 2, 3}
    monkeypatch.setattr(at_once.DecoderStep, "run", lambda self, x, ctx: None)
    with LLM("tiny-chat", dtype="bfloat16") as llm:
        assert found == [generated(llm, prompts[:count]) for count in (2, 3, 4)]


@pytest.mark.parametrize(("quantization", "form"), [("int8", "int8"), ("fp8", "e4m3"), ("fp8_block", "e4m3")])
def test_weights_of_8_bits(made: list[Counted], quantization: str, form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are given as they are stored; inputs in an order of their own are not served."""
    monkeypatch.setattr(tiled, "TILED_KERNELS", SimpleNamespace(all_on=lambda device: ()))  # as on a GPU
    with LLM("tiny-chat", dtype="bfloat16", quantization=quantization) as llm:
        made[-1].positions.clear()
        assert len(generated(llm, [list(range(40, 61))])[0]) == GREEDY.max_tokens
        assert made[-1].positions == list(range(21, 28))
        assert all(isinstance(weight, StoredTiles) and weight.form == form for weight in made[-1].weights)
        assert made[-1].asked is made[-1].weights[0]  # how long a context may be
        monkeypatch.setattr(tiled.TiledWeight, "keeps_inputs", False)
        generated(llm, [list(range(40, 61))])
        assert made[-1].positions == list(range(21, 28))


@pytest.mark.parametrize(
    "options",
    [
        {"dtype": "float32"},
        {"dtype": "bfloat16", "deterministic": "batch", "num_threads": 1},
        {"dtype": "bfloat16", "whole_steps": "off"},
    ],
    ids=["float32", "deterministic", "off"],
)
def test_models_that_have_none(made: list[Counted], options: dict[str, Any]) -> None:
    with LLM("tiny-chat", **options) as llm:
        assert len(generated(llm, [[5, 6, 7]])[0]) == GREEDY.max_tokens
    assert not made


def test_layers_that_have_none(made: list[Counted], monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[Any] = []
    of = at_once.DecoderStep.of
    monkeypatch.setattr(at_once.DecoderStep, "of", lambda *asked: given.append(asked))
    with LLM("tiny-chat", dtype="bfloat16"):
        ctx, settings, layers, rotaries = given[0]
    step = of(ctx, settings, layers, rotaries)
    assert step is not None
    assert step.longest(1) is None
    layers[-1].self_attn.o_proj.delta = SimpleNamespace()  # adapters: no step is whole, nor has a long row its own
    assert step.longest(1) == 0
    layers[-1].self_attn.o_proj.delta = None
    assert of(ctx, settings, layers, [SimpleNamespace(cos=rotaries[0].cos[:, :16])]) is None  # type: ignore[list-item]
    assert of(ctx, settings, layers, [*rotaries, *rotaries]) is None
    assert of(ctx, settings, [*layers[1:], torch.nn.Identity()], rotaries) is None
    assert of(replace(ctx, is_exact=True), settings, layers, rotaries) is None
    other = replace(ctx.attention_ops, name="flex")
    assert of(replace(ctx, attention_ops=other), settings, layers, rotaries) is None
    layers[0].self_attn.soft_cap = 30.0
    assert of(ctx, settings, layers, rotaries) is None


def test_a_model_with_experts(made: list[Counted], monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokens are as likely either way, as far as they are the same."""
    changes = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "initializer_range": 0.1}
    directory = str(tiny_model("qwen3_moe", **changes))
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, logprobs=1)
    found = []
    for _ in range(2):
        with LLM(directory, tokenizer=str(ASSETS / "tiny-chat"), dtype="bfloat16") as llm:
            made[-1].positions.clear()
            found.append(llm.generate([list(range(40, 61))], [params], use_tqdm=False)[0].outputs[0])
        monkeypatch.setattr(at_once.DecoderStep, "run", lambda self, x, ctx: None)
    assert made[0].positions == list(range(21, 28))
    assert made[0].shape.experts == StepExperts(6, 2, weighs_chosen=False, rounds_weights=True)
    assert made[0].shape.intermediate == 64
    whole, layered = found
    for one, other in zip(whole.logprobs or [], layered.logprobs or [], strict=True):
        if one.token_ids[0] != other.token_ids[0]:
            break
        assert one.logprobs[0] == pytest.approx(other.logprobs[0], abs=0.3)


def test_experts_that_have_none(made: list[Counted], monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[Any] = []
    monkeypatch.setattr(at_once.DecoderStep, "of", lambda *asked: given.append(asked))
    directory = str(tiny_model("qwen3_moe", num_experts=6, num_experts_per_tok=2, moe_intermediate_size=64))
    with LLM(directory, tokenizer=str(ASSETS / "tiny-chat"), dtype="bfloat16"):
        ctx, mlp = given[0][0], given[0][2][0].mlp
    assert step_experts(mlp, ctx) == StepExperts(6, 2, weighs_chosen=False, rounds_weights=True)
    assert not is_adapted(mlp)
    rule = mlp.gate.rule
    for change in ({"scale": 2.0}, {"scoring": "sigmoid"}, {"num_groups": 2}, {"logits_dtype": None}):
        mlp.gate.rule = replace(rule, **change)
        assert step_experts(mlp, ctx) is None
    mlp.gate.rule = replace(rule, renormalize=True)
    assert step_experts(mlp, ctx) == StepExperts(6, 2, weighs_chosen=True, rounds_weights=True)
    places = ((mlp, "shared_experts"), (mlp, "num_identity"), (mlp.experts, "map"))
    for place, name in (*places, (mlp.gate, "e_score_correction_bias"), (mlp.experts, "weighs_input")):
        before = getattr(place, name)
        setattr(place, name, 1)
        assert step_experts(mlp, ctx) is None
        setattr(place, name, before)
    mlp.experts.down_proj.pair_delta = SimpleNamespace()
    assert is_adapted(mlp)


def test_a_model_with_sinks_and_windows(made: list[Counted], monkeypatch: pytest.MonkeyPatch) -> None:
    """Two groups of layers keep blocks of their own, and all products have biases; tokens are as likely either way."""
    directory = str(tiny_model("gpt_oss", **{**EXPERT_VARIANTS["gpt_oss"][1], "initializer_range": 0.1}))
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, logprobs=1)
    found = []
    for _ in range(2):
        with LLM(directory, tokenizer=str(ASSETS / "tiny-chat"), dtype="bfloat16") as llm:
            made[-1].positions.clear()
            found.append(llm.generate([list(range(40, 61))], [params], use_tqdm=False)[0].outputs[0])
        monkeypatch.setattr(at_once.DecoderStep, "run", lambda self, x, ctx: None)
    shape = made[0].shape
    assert made[0].positions == list(range(21, 28))
    assert (shape.has_biases, shape.has_sinks, shape.has_windows) == (True, True, True)
    assert shape.experts is not None
    assert shape.experts.activation == GLU(limit=7.0, alpha=1.702, up_offset=1.0)
    assert made[0].places == {(9, 0), (None, 1)}
    whole, layered = found
    for one, other in zip(whole.logprobs or [], layered.logprobs or [], strict=True):
        if one.token_ids[0] != other.token_ids[0]:
            break
        assert one.logprobs[0] == pytest.approx(other.logprobs[0], abs=0.3)


def test_stored_experts(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are given as they are stacked; inputs in an order of their own are not served."""
    packed = Fp8OnlyWeight.of(torch.zeros(128, 128).to(torch.float8_e4m3fn), torch.ones(1, 1), (128, 128))
    stacked = stack_experts([packed, packed], torch.bfloat16, SimpleNamespace(serves=lambda _: True))  # type: ignore[arg-type]
    linear: Any = SimpleNamespace(packed=stacked)
    assert at_once._weight(linear) is stacked
    monkeypatch.setattr(tiled.TiledWeight, "keeps_inputs", False)
    assert at_once._weight(linear) is None


def test_a_token_to_which_deep_layers_add_goes_layer_by_layer() -> None:
    step: Any = SimpleNamespace(longest_with=lambda weight, rows: None)
    layer: Any = SimpleNamespace(self_attn=SimpleNamespace(layer_index=1))
    ones = torch.ones(1, dtype=torch.int32)
    meta = AttentionMetadata(ones, ones, ones.view(1, 1), ones.long(), 1, 1, num_decodes=1)
    inputs: dict[str, torch.Tensor] = {}
    show(inputs, torch.zeros(1, dtype=torch.int64), torch.ones(2, 1, 8))
    ctx = ForwardContext(torch.zeros(1, dtype=torch.int64), [replace(meta, num_decodes=0), meta], [], inputs=inputs)
    assert at_once.DecoderStep(step, [layer], step).run(torch.ones(1, 8), ctx) is None
    with pytest.raises(AttributeError):  # without them it asks for weights, which this layer has none of
        at_once.DecoderStep(step, [layer], step).run(torch.ones(1, 8), replace(ctx, inputs={}))


def test_weights_of_few_bits(made: list[Counted], monkeypatch: pytest.MonkeyPatch) -> None:
    """Read as they are stored, where groups are of inputs side by side; others go layer by layer."""
    monkeypatch.setattr(stored_weight, "fastest", lambda weight, dtype: weight)  # as on a GPU, they stay in their tiles
    prompt = list(range(40, 61))
    with LLM("tiny-chat", dtype="bfloat16", quantization="w4") as llm:
        made[-1].positions.clear()
        alone = generated(llm, [prompt])
        assert made[-1].positions == list(range(21, 28))
    monkeypatch.setattr(at_once.DecoderStep, "run", lambda self, x, ctx: None)
    with LLM("tiny-chat", dtype="bfloat16", quantization="w4") as llm:
        assert generated(llm, [prompt]) == alone
