"""The Triton kernels of experts against float64 (in the interpreter where there is no GPU)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from app.kernels.gemm import DeferredNorm, materialize
from app.kernels.moe import AddToRows, Routing, RoutingRule, reference, triton_gate, triton_ops
from app.kernels.moe.tiles import LayerTiles, layer_tiles
from app.kernels.moe.triton_gate import MOST_IN_ONE, GateTile, gate, route
from app.kernels.moe.triton_grouped import GroupedTile
from app.kernels.moe.triton_slots import to_slots
from app.kernels.moe.triton_sort import sort_pairs
from tests.kernels.moe.cases import CORRECTED, EPS, GLUS, RULES, Case, make_case, true_routing, true_sum

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TILE = GroupedTile(16, 16, 32, 4, 2)
SCANNED, SORTED = LayerTiles(TILE, TILE, is_sorted=False), LayerTiles(TILE, TILE, is_sorted=True)
SWAPPED = replace(TILE, columns=64, swap=True)
TOLERANCE = {torch.float32: 3e-6, torch.float16: 2e-3, torch.bfloat16: 1.2e-2}


@pytest.fixture(autouse=True)
def nan_in_scratch(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is not written is NaN, or an index far outside."""
    empty = torch.empty

    def filled(*shape: Any, **options: Any) -> torch.Tensor:
        made = empty(*shape, **options)
        return made.fill_(float("nan") if made.is_floating_point() else 1 << 30)

    monkeypatch.setattr(torch, "empty", filled)


def relative_error(out: torch.Tensor, truth: torch.Tensor) -> float:
    """Norm of the difference over the norm of the truth."""
    return float((out.double().cpu() - truth).norm() / truth.norm())


def check(case: Case, tiles: LayerTiles | None, dtype: torch.dtype = torch.float16) -> None:
    """The sum of the rows, plain; then with shared rows, residual and norm, which may be deferred."""
    given = case.to(dtype, DEVICE)
    rounded = given.to(torch.float64, "cpu")
    rows = triton_ops.experts(given.x, given.routing, given.weights, tiles)
    found = rows.materialize()
    assert found.dtype == dtype
    assert relative_error(found, true_sum(rounded)) < TOLERANCE[dtype]
    size = given.x.shape[1]
    weight = torch.randn(size).to(DEVICE, dtype)
    rows.shared, residual = torch.randn(2, len(given.x), size).to(DEVICE, dtype)
    truth = true_sum(rounded, rows.shared.cpu()) + residual.double().cpu()
    normed_truth = truth * (truth.square().mean(1, keepdim=True) + EPS).rsqrt() * weight.double().cpu()
    for may_defer in (False, True):
        normed, total = rows.add_norm(residual, weight, EPS, may_defer)
        assert relative_error(total, truth) < TOLERANCE[dtype]
        assert relative_error(materialize(normed), normed_truth) < TOLERANCE[dtype]


@pytest.mark.parametrize("tiles", [SCANNED, SORTED], ids=["scanned", "sorted"])
@pytest.mark.parametrize(
    ("sizes", "routed"),
    [
        ((1, 5, 1, 32, 16), "random"),
        ((3, 7, 3, 40, 24), "padded"),
        ((17, 3, 2, 48, 40), "padded"),
        ((20, 4, 1, 32, 32), "one"),
    ],
)
def test_experts(tiles: LayerTiles, sizes: tuple[int, int, int, int, int], routed: str) -> None:
    check(make_case(*sizes, routed=routed), tiles)


@pytest.mark.parametrize("is_sorted", [False, True])
@pytest.mark.parametrize(
    "tile", [SWAPPED, replace(SWAPPED, tma=True), replace(TILE, columns=32, tma=True, programs=1)], ids=str
)
def test_other_tiles(tile: GroupedTile, is_sorted: bool) -> None:
    """Widths that the tiles do not divide."""
    check(make_case(5, 4, 2, 40, 72), LayerTiles(tile, tile, is_sorted=is_sorted))


@pytest.mark.parametrize("activation", [name for name in GLUS if name != "silu"])
@pytest.mark.parametrize("weighs_input", [False, True])
def test_activations_and_biases(activation: str, weighs_input: bool) -> None:
    case = make_case(3, 3, 2, 32, 16, GLUS[activation], has_bias=True, weighs_input=weighs_input)
    check(case, SORTED if weighs_input else SCANNED)


@pytest.mark.parametrize("tiles", [None, SCANNED, SORTED], ids=["reference", "scanned", "sorted"])
@pytest.mark.parametrize(
    ("activation", "weighs_input", "has_bias"),
    [("silu", False, False), ("clamped", True, True), ("relu2", False, True)],
)
def test_what_is_added_to_both_products(
    tiles: LayerTiles | None, activation: str, weighs_input: bool, has_bias: bool
) -> None:
    """A matrix more for each expert, for every second token: the sum is that of experts that have it in theirs."""
    case = make_case(9, 4, 2, 32, 16, GLUS[activation], routed="padded", has_bias=has_bias, weighs_input=weighs_input)
    given, (gate_up, down) = case.to(torch.float32, DEVICE), (case.weights.gate_up, case.weights.down)
    assert isinstance(gate_up, torch.Tensor)
    assert isinstance(down, torch.Tensor)
    changes = [torch.randn_like(weight) / weight.shape[2] ** 0.5 for weight in (gate_up, down)]

    def adding(change: torch.Tensor) -> AddToRows:
        def add(x: torch.Tensor, tokens: torch.Tensor, experts: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            own = torch.einsum("nk,nok->no", x, change.to(x)[experts.clamp(min=0).long()])
            return torch.where((tokens % 2 == 0)[:, None] & (experts >= 0)[:, None], y + own, y)

        return add

    adders = adding(changes[0]), adding(changes[1])
    if tiles is None:
        found = reference.adapted(given.x, given.routing, given.weights, *adders).materialize()
    else:
        found = triton_ops.adapted(given.x, given.routing, given.weights, *adders, tiles).materialize()
    merged = replace(case.weights, gate_up=gate_up + changes[0], down=down + changes[1])
    sums = [true_sum(Case(case.x, case.routing, one).to(torch.float64, "cpu")) for one in (merged, case.weights)]
    truth = torch.where((torch.arange(9) % 2 == 0)[:, None], *sums)
    assert relative_error(found, truth) < TOLERANCE[torch.float32]


def test_rows_of_a_deferred_norm() -> None:
    case, norm = make_case(3, 4, 2, 32, 16), torch.randn(32)
    x = case.x
    squares = x.square().unflatten(1, (4, -1)).sum(2)
    deferred = DeferredNorm((x * norm).half().to(DEVICE), squares.to(DEVICE), EPS)
    given = case.to(torch.float16, DEVICE)
    case.x = F.rms_norm(x.double(), (32,), norm.double(), EPS)
    for tiles in (SCANNED, SORTED):
        rows = triton_ops.experts(deferred, given.routing, given.weights, tiles)
        assert relative_error(rows.materialize(), true_sum(case)) < TOLERANCE[torch.float16]


def test_the_same_bits_alone_and_in_a_batch() -> None:
    """In fp32, with the tiles that each number of tokens gets."""
    given = make_case(40, 6, 3, 48, 24).to(torch.float32, DEVICE)
    weight, residual = torch.randn(48, device=DEVICE), torch.randn(40, 48, device=DEVICE)
    gate_weight, rule = torch.randn(6, 48, device=DEVICE), RoutingRule(3, renormalize=True)

    def run(start: int, end: int) -> tuple[torch.Tensor, ...]:
        x = given.x[start:end]
        routing = gate(x, gate_weight, None, rule)
        rows = triton_ops.experts(x, routing, given.weights)
        normed, total = rows.add_norm(residual[start:end], weight, EPS, may_defer=True)
        return *routing, rows.materialize(), materialize(normed), total

    batch = run(0, 40)
    routed = Case(given.x, Routing(*batch[:2]), given.weights).to(torch.float64, "cpu")
    assert relative_error(batch[2], true_sum(routed)) < TOLERANCE[torch.float32]
    # In the interpreter NumPy's product depends on a row's place in its tile: the first token is first in all of them.
    for start in (0,) if DEVICE == "cpu" else (0, 17, 39):
        for alone, together in zip(run(start, start + 1), batch, strict=True):
            assert torch.equal(alone[0], together[start])


def test_no_tokens() -> None:
    given = make_case(2, 4, 2, 16, 16).to(torch.float16, DEVICE)
    routing = route(torch.zeros(0, 4, device=DEVICE), RoutingRule(2))
    rows = triton_ops.experts(given.x[:0], routing, given.weights)
    assert rows.materialize().shape == (0, 16)
    assert rows.add_norm(given.x[:0], given.x[0], EPS, may_defer=True)[1].shape == (0, 16)


@pytest.mark.parametrize("num_pairs", [1, 16, 512, 513, 70_000])
@pytest.mark.parametrize("num_experts", [8, 130])
def test_every_number_of_pairs_has_tiles(num_pairs: int, num_experts: int) -> None:
    tiles = layer_tiles(num_pairs, num_experts, torch.bfloat16)
    assert not tiles.is_sorted or tiles.gate_up.rows == tiles.down.rows  # they share a list of tiles


@pytest.mark.parametrize("num_experts", [1, 5, 66])
@pytest.mark.parametrize(
    ("num_tokens", "bounds"),
    [(1, ()), (50, ()), (300, ()), (300, (100,)), (300, (100, 200)), pytest.param(7000, (), marks=pytest.mark.slow)],
)
def test_sort_pairs(num_experts: int, num_tokens: int, bounds: tuple[int, ...]) -> None:
    torch.manual_seed(num_tokens)
    ids = torch.randint(-1, num_experts, (num_tokens, 5), dtype=torch.int32).contiguous()
    ids[ids == num_experts - 2] = -1  # an expert that nobody chose
    pairs = sort_pairs(ids.to(DEVICE), num_experts, 16, *bounds)
    flat = ids.flatten()
    expected = [i for i in flat.argsort(stable=True).tolist() if flat[i] >= 0]
    assert pairs.order.tolist()[: len(expected)] == expected
    assert set(pairs.order.tolist()[len(expected) :]) <= {1 << 30}
    covered = []
    for expert, start, count in pairs.tiles[:, : int(pairs.num_tiles)].T.tolist():
        assert 1 <= count <= 16
        assert {int(flat[i]) for i in expected[start : start + count]} == {expert}
        covered += range(start, start + count)
    assert covered == list(range(len(expected)))
    assert int(pairs.num_tiles) == sum(-(-int((flat == e).sum()) // 16) for e in range(num_experts))


@pytest.mark.parametrize(("name", "corrected"), CORRECTED)
def test_route(name: str, corrected: bool) -> None:
    rule, size = RULES[name], 160 if name == "v2" else 32
    if DEVICE == "cpu":  # the interpreter rounds bf16 wrong
        rule = replace(rule, logits_dtype=None, weights_dtype=None)
    torch.manual_seed(2)
    logits = torch.randn(5, size + rule.gates_shared) * 2
    correction = torch.randn(size) if corrected else None
    found = route(logits.to(DEVICE), rule, correction=None if correction is None else correction.to(DEVICE))
    true_ids, true_weights = true_routing(logits, rule, correction)
    assert found.ids.tolist() == true_ids
    torch.testing.assert_close(
        found.weights.double().cpu(), true_weights, rtol=4e-3 if rule.weights_dtype else 1e-5, atol=1e-7
    )


def test_route_takes_the_lowest_of_equals_skips_pad_rows_and_bears_nan() -> None:
    logits = torch.tensor([[0.0, 2.0, 1.0, 2.0, 1.0], [1.0] * 5, [float("nan")] * 5, [float("nan"), 0, 0, 0, 1]])
    rule = RoutingRule(3, num_shared=1)
    slots = torch.tensor([7, -1, 0, 3])
    ids = route(logits.to(DEVICE), rule, slot_mapping=slots.to(DEVICE)).ids.tolist()
    assert ids[:2] == [[1, 3, 2, 5], [-1] * 4]
    assert all(0 <= i < 5 for i in ids[2][:3])
    assert ids[3] == [4, 1, 2, 5]


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize(("num_tokens", "size"), [(1, 48), (3, 300), (33, 130)])
def test_gate(num_tokens: int, size: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Several programs for a tile of tokens, which the last one ends; K that no tile divides; the product a launch of
    its own, as where tokens are many."""
    torch.manual_seed(num_tokens)
    x, weight, bias = torch.randn(num_tokens, size), torch.randn(20, size) / size**0.5, torch.randn(20)
    x, weight, rule = x.to(dtype), weight.to(dtype), RULES["mixtral"]
    rule = replace(rule, top_k=4, weights_dtype=None)
    norm = torch.rand(size) + 0.5
    squares = (x.double().square().sum(1, keepdim=True) / 2).float().expand(-1, 2).contiguous()
    deferred = DeferredNorm((x.float() * norm).to(dtype).to(DEVICE), squares.to(DEVICE), EPS)
    scaled = deferred.rows.double().cpu() * (x.double().square().mean(1, keepdim=True) + EPS).rsqrt()
    for rows, true_rows in ((x.to(DEVICE), x.double()), (deferred, scaled)):
        for most, tile in ((MOST_IN_ONE, None), (0, None), (MOST_IN_ONE, GateTile(16, 16, 16, 1, 4, 2))):
            monkeypatch.setattr(triton_gate, "MOST_IN_ONE", most)
            found = gate(rows, weight.to(DEVICE), bias.to(DEVICE), rule, tile=tile)
            true_ids, true_weights = true_routing(F.linear(true_rows, weight.double(), bias.double()), rule)
            assert found.ids.tolist() == true_ids
            torch.testing.assert_close(found.weights.double().cpu(), true_weights, rtol=1e-4, atol=1e-6)
            gated = replace(rule, num_shared=2, gates_shared=True)
            found = gate(rows, weight.to(DEVICE), None, gated, tile=tile)
            true_ids, true_weights = true_routing(F.linear(true_rows, weight.double()), gated)
            assert found.ids.tolist() == true_ids
            torch.testing.assert_close(found.weights.double().cpu(), true_weights, rtol=1e-4, atol=1e-6)


def test_a_gate_is_one_launch_on_amd(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "hip", "7.0")
    monkeypatch.setattr(triton_gate, "product_logits", None)  # not to be called
    torch.manual_seed(0)
    x, weight = torch.randn(MOST_IN_ONE + 1, 64).half(), torch.randn(20, 64).half()
    found = gate(x.to(DEVICE), weight.to(DEVICE), None, replace(RULES["mixtral"], weights_dtype=None))
    true_ids, true_weights = true_routing(F.linear(x.double(), weight.double()), RULES["mixtral"])
    assert found.ids.tolist() == true_ids
    torch.testing.assert_close(found.weights.double().cpu(), true_weights, rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize("num_tokens", [1, 3])
def test_few_tokens(num_tokens: int) -> None:
    """The down product and the sum in one launch: padding, biases, widths that the tiles do not divide."""
    assert num_tokens <= triton_ops.MOST_FEW
    check(make_case(num_tokens, 4, 3, 40, 80, GLUS["clamped"], has_bias=True), None)
    check(make_case(num_tokens, 4, 3, 64, 72, routed="padded" if num_tokens > 1 else "random", weighs_input=True), None)


@pytest.mark.parametrize("num_tokens", [0, 1, 131])
@pytest.mark.parametrize("moves", [False, True])
def test_slots_of_a_rank(num_tokens: int, moves: bool) -> None:
    generator = torch.Generator().manual_seed(num_tokens)
    ids = torch.randint(-1, 37, (num_tokens, 3), generator=generator).int()
    table = torch.randint(-1, 9, (37, 60 if moves else 1), generator=generator).int()
    positions = torch.randint(0, 1 << 40, (num_tokens,), generator=generator)
    counts = torch.full((37,), 1 << 40)
    expected = [
        [-1 if i < 0 else int(table[i, position % 60 if moves else 0]) for i in row]
        for row, position in zip(ids.tolist(), positions.tolist(), strict=True)
    ]
    for run in (to_slots, reference.to_slots):
        own = counts.clone().to(DEVICE)
        more = (positions.to(DEVICE), own) if moves else ()
        assert run(ids.to(DEVICE), table.to(DEVICE), *more).cpu().tolist() == expected
        seen = torch.bincount(ids[ids >= 0], minlength=37) if moves else torch.zeros(37).long()
        assert (own.cpu() - counts).tolist() == seen.tolist()
