"""Layers that keep states: their shapes on a rank, how a checkpoint's tensors are shared out."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from app.checkpoints.tensors.leaf import Share
from app.distributed.parallel_groups import ParallelGroups, RankGroup
from app.errors import ConfigError
from app.kernels.recurrent import DeltaHeads, StateStep
from app.layers.cache_spec import LayerStateSpec, StateTensor
from app.layers.context import BuildContext
from app.layers.gated_delta_net import DeltaSettings, GatedDeltaNet
from app.layers.gated_group_norm import GatedGroupNorm
from app.layers.gated_short_conv import GatedShortConv
from app.layers.mamba import Mamba, MambaSettings
from app.layers.mamba2 import Mamba2, Mamba2Settings
from app.layers.short_conv import HeadNumbers, ShortConv
from app.layers.weight import ShapeMismatch
from app.worker.attention.backend import select_attention
from tests.kernels.recurrent.cases import CASES, metadata
from tests.layers.test_tensor_parallel_shares import Recorded

CPU = torch.device("cpu")
SETTINGS = DeltaSettings(DeltaHeads(num_keys=2, num_values=4, key_dim=16, value_dim=24), 4, 1e-6)


def context(rank: int = 0, size: int = 1) -> BuildContext:
    groups = ParallelGroups(tp=RankGroup.unconnected(rank, size))
    return BuildContext(torch.float32, CPU, 64, select_attention("auto", CPU)[0], groups)


def test_a_rank_keeps_the_states_of_its_heads() -> None:
    whole, half = (GatedDeltaNet(context(0, size), 32, SETTINGS, 0).state_spec() for size in (1, 2))
    assert [tensor.shape for tensor in whole.tensors] == [(3, 2 * 32 + 96), (4, 24, 16)]
    assert [tensor.shape for tensor in half.tensors] == [(3, 2 * 16 + 48), (2, 24, 16)]
    assert whole.num_bytes == 4 * (3 * 160 + 4 * 24 * 16) == 2 * half.num_bytes


def test_bytes_of_a_state() -> None:
    spec = LayerStateSpec((StateTensor((3, 5), torch.bfloat16), StateTensor((2, 2, 2), torch.float32)))
    assert spec.num_bytes == 30 + 32


def test_channels_of_each_part_are_shared_out() -> None:
    """A rank's channels of a convolution over two parts that lie one behind the other in the checkpoint."""
    conv = ShortConv(context(), [Share(0, 2, 2, 4), Share(2, 3, 3, 6)], 4, bias=True)
    weight, bias = torch.randn(10, 1, 4), torch.randn(10)
    conv.weight.weight_loader(Recorded(weight))
    assert conv.bias is not None
    conv.bias.weight_loader(Recorded(bias))
    own = [2, 3, 7, 8, 9]
    assert torch.equal(conv.weight.data, weight[own, 0])
    assert torch.equal(conv.bias.data, bias[own])
    with pytest.raises(ShapeMismatch, match="the model expects 10 channels"):
        conv.weight.weight_loader(Recorded(weight[:9]))
    apart = ShortConv(context(), conv.shares, 4, bias=True, parts=("first", "second"))
    for parameter, whole in ((apart.weight, weight), (apart.bias, bias)):
        assert parameter is not None
        parameter.weight_loader(Recorded(whole[:4]), "first")
        parameter.weight_loader(Recorded(whole[4:]), "second")
    assert torch.equal(apart.weight.data, weight[own, 0])
    assert apart.bias is not None
    assert torch.equal(apart.bias.data, bias[own])


def test_numbers_of_heads() -> None:
    numbers = HeadNumbers(Share(0, 2, 2, 4)).weight(0.0)
    numbers.weight_loader(Recorded(torch.tensor([1.0, 2.0, 3.0, 4.0])))
    assert numbers.tolist() == [3.0, 4.0]
    with pytest.raises(ShapeMismatch):
        numbers.weight_loader(Recorded(torch.ones(5)))


def test_a_step_says_where_states_are_read_and_left() -> None:
    """A request that begins reads none, a row that pads leaves none; of drafts it is left once they were verified."""
    meta = metadata(CASES["drafts-padded"], "cpu")
    layer = GatedDeltaNet(context(), 32, SETTINGS, 0)
    layer.plan(meta, 16)
    step = meta.plan
    assert isinstance(step, StateStep)
    assert meta.rows is not None
    rows = meta.rows.tolist()
    assert step.slots.tolist() == [-1] * 4
    assert step.drafts is not None
    assert step.drafts.slots.tolist() == [*rows[:3], -1]
    assert step.sources.tolist() == [rows[0], -1, rows[2], -1]
    assert (step.num_short, step.short_len, step.num_long) == (4, 3, 0)
    assert step.row_of_token.tolist() == [0, 0, 0, 1, 1, 1, 2, 2, 2, 3, 3, 3]


def test_prompts_are_cut_into_chunks() -> None:
    step = StateStep.of(metadata(CASES["mixed"], "cpu"))
    assert step.chunks.tolist() == [[2, 132], [66, 132], [130, 132], [132, 134], [134, 135]]
    assert (step.num_short, step.num_long) == (2, 3)


MAMBA2 = Mamba2Settings(
    num_heads=8, head_dim=6, num_groups=2, state_size=5, conv_width=4, conv_bias=True, bias=False, norm_eps=1e-5,
    norm_groups=1,
)  # fmt: skip


@pytest.mark.parametrize(("size", "groups"), [(1, 2), (2, 1), (4, 1)])
def test_ranks_share_groups_of_mamba_2_where_there_are_too_few(size: int, groups: int) -> None:
    layer = Mamba2(context(size - 1, size), 32, MAMBA2, 0)
    shares = layer.in_proj.output_shares
    heads = 8 // size
    assert [shares[name].size for name in shares] == [heads * 6, heads * 6, groups * 5, groups * 5, heads]
    assert shares["in_proj_b"].start == (2 - groups) * 5, "the last rank reads the last groups"
    spec = layer.state_spec()
    assert [tensor.shape for tensor in spec.tensors] == [(3, heads * 6 + 2 * groups * 5), (heads, 6, 5)]


def test_groups_that_ranks_cannot_share_are_refused() -> None:
    with pytest.raises(ConfigError, match="groups of a layer's B and C"):
        Mamba2(context(0, 3), 32, replace(MAMBA2, num_heads=9), 0)
    with pytest.raises(ConfigError, match=r"does not divide the 3 groups .*n_groups"):
        GatedGroupNorm(context(0, 2), Share(0, 6, 0, 12), 3, 1e-5)


@pytest.mark.parametrize(("norms_first", "sigmoid"), [(False, False), (True, False), (True, True)])
def test_gated_norm_of_groups(norms_first: bool, sigmoid: bool) -> None:
    norm = GatedGroupNorm(context(), Share(0, 12, 0, 12), 3, 1e-5, norms_first=norms_first, sigmoid=sigmoid)
    activate = torch.sigmoid if sigmoid else torch.nn.functional.silu
    x, gate, factor = torch.randn(4, 12), torch.randn(4, 12), torch.rand(12)
    norm.weight.weight_loader(Recorded(factor))
    read = x if norms_first else x * activate(gate)
    expected = torch.nn.functional.rms_norm(read.view(4, 3, 4), (4,), None, 1e-5).view(4, 12) * factor
    expected = expected * activate(gate) if norms_first else expected
    torch.testing.assert_close(norm(x, gate), expected)


def test_a_rank_keeps_the_states_of_its_channels() -> None:
    settings = MambaSettings(channels=24, state_size=5, dt_rank=4, conv_width=4, conv_bias=True, bias=False)
    mamba = Mamba(context(1, 2), 12, settings, 0)
    assert [tensor.shape for tensor in mamba.state_spec().tensors] == [(3, 12), (12, 5)]
    decays = torch.randn(24, 5)
    mamba.A_log.weight_loader(Recorded(decays))
    assert torch.equal(mamba.A_log.data, decays[12:])
    assert [tensor.shape for tensor in GatedShortConv(context(1, 2), 12, 3, False, 0).state_spec().tensors] == [(2, 6)]
