"""A drafter that does not fit its target is refused, with both numbers; what nobody reads of a checkpoint, by name."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from app.checkpoints.model_info import ModelInfo
from app.distributed.parallel_groups import ParallelGroups
from app.errors import CheckpointError, ConfigError, MantaError, UnsupportedError
from app.layers.context import BuildContext
from app.layers.weight import ShapeMismatch
from app.models.base import EngineModel
from app.models.drafters.base import Target, TokenIds
from app.models.drafters.block import BlockDrafter
from app.models.drafters.eagle import EagleDrafter
from app.models.drafters.eagle3 import Eagle3Drafter, layers_read
from app.models.drafters.medusa import MedusaDrafter
from app.models.drafters.mlp_speculator import MLPSpeculator
from app.models.drafters.mtp import MtpDrafter
from app.worker.attention.backend import select_attention
from tests.worker.spec_decode.drafters import CONFIG, SIZE, VOCAB

CPU = torch.device("cpu")
CONTEXT = BuildContext(torch.float32, CPU, 64, select_attention("torch", CPU)[0], ParallelGroups())
ANY: Any = SimpleNamespace()
LLAMA = {"num_hidden_layers": 8, "hidden_size": SIZE, "vocab_size": VOCAB, "architectures": ["LlamaForCausalLM"]}
TARGET = Target(ANY, ModelInfo(Path("target"), LLAMA, {}))
HEADS = [f"{head}.0.linear.weight" for head in range(3)] + [f"{head}.1.weight" for head in range(3)]


def info(**changes: Any) -> ModelInfo:
    return ModelInfo(Path("drafter"), {**CONFIG, **changes}, {})


def eagle3(**changes: Any) -> EngineModel:
    return Eagle3Drafter(CONTEXT, info(**changes), TARGET, has_embedding=True)


def eagle(**changes: Any) -> EngineModel:
    return EagleDrafter(CONTEXT, info(**changes), TARGET, has_embedding=True, has_bias=True)


def block(*names: str, **changes: Any) -> EngineModel:
    config = {"model_type": "qwen3", "mask_token_id": 7, "target_layer_ids": [0, 2], "block_size": 8, **changes}
    return BlockDrafter(CONTEXT, info(**config), TARGET, names=[f"{name}.weight" for name in names])


def medusa(num_tokens: int = 3, **config: Any) -> EngineModel:
    return MedusaDrafter(CONTEXT, ModelInfo(Path("d"), config, {}), TARGET, names=HEADS, num_tokens=num_tokens)


def speculator(num_tokens: int = 3, **config: Any) -> EngineModel:
    return MLPSpeculator(CONTEXT, ModelInfo(Path("d"), config, {}), TARGET, num_tokens=num_tokens)


ONE_WINDOW = {"layer_types": ["sliding_attention"]}


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: eagle3(vocab_size=330), "vocab_size is 330 of the drafter, 331 of the target"),
        (lambda: eagle3(target_hidden_size=80), "what it reads is 80 of the drafter, 64 of the target"),
        (lambda: eagle3(eagle_aux_hidden_state_layer_ids=[2, 4, 9]), "reads the layers [2, 4, 9], the target has 8"),
        (lambda: eagle(hidden_size=128, num_attention_heads=4), "hidden_size is 128 of the drafter, 64 of the target"),
        (lambda: eagle(vocab_size=400), "vocab_size is 400 of the drafter, 331 of the target"),
        (lambda: block(mask_token_id=400), "mask_token_id, less than vocab_size is 330 of the drafter, 400"),
        (lambda: block(target_layer_ids=[2, 8]), "reads the layers [3, 9], the target has 8"),
        (lambda: block("embed_tokens", draft_vocab_size=97), "as it has no lm_head is 97 of the drafter, 331"),
        (
            lambda: block(hidden_size=128, target_hidden_size=64),
            "hidden_size, as it has no embed_tokens is 128 of the drafter, 64",
        ),
        (lambda: medusa(4), "at most its number of heads is 3 of the drafter, 4 of the target"),
        (lambda: medusa(hidden_size=32), "hidden_size is 32 of the drafter, 64 of the target"),
        (lambda: speculator(5, n_predict=4), "at most its n_predict is 4 of the drafter, 5 of the target"),
        (lambda: speculator(emb_dim=32), "emb_dim, the hidden size that it reads is 32 of the drafter, 64"),
        (lambda: speculator(vocab_size=7), "vocab_size is 7 of the drafter, 331 of the target"),
    ],
)
def test_both_numbers_are_told(make: Callable[[], EngineModel], said: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(said)) as caught, torch.device("meta"):
        make()
    assert caught.value.param == "speculative_config"


@pytest.mark.parametrize(
    ("make", "error", "said"),
    [
        (lambda: eagle3(num_hidden_layers=2), UnsupportedError, "an EAGLE-3 drafter of 2 layers"),
        (lambda: eagle(num_hidden_layers=2), UnsupportedError, "an EAGLE drafter of 2 layers"),
        (lambda: eagle3(eagle_aux_hidden_state_layer_ids="all"), CheckpointError, "'all', no list of layers"),
        (lambda: block(target_layer_ids="all"), CheckpointError, "'all', no list of layers"),
        (lambda: block(mask_token_id=None), CheckpointError, "lacks mask_token_id"),
        (lambda: block(block_size=-1), CheckpointError, "block_size"),
        (lambda: block(layer_types=["sliding_attention"]), CheckpointError, "lacks sliding_window"),
        (lambda: block(layer_types=["sliding_attention"] * 2), UnsupportedError, "one for each layer"),
        (lambda: block(layer_types=["linear_attention"]), UnsupportedError, "'linear_attention'"),
        (lambda: block(use_sliding_window=True), UnsupportedError, "layer_types=None"),
        (lambda: block(**ONE_WINDOW, sliding_window="all"), CheckpointError, "sliding_window"),
        (lambda: block(use_swa=True), UnsupportedError, "use_swa=True"),
        (lambda: block(dflash_config={"selector_rank": 16}), CheckpointError, "selector_rank and selector_top_k alone"),
        (
            lambda: block("embed_tokens", conv_kernel_size=2, conv_group_size=7),
            CheckpointError,
            "7 does not divide hidden_size 64",
        ),
        (lambda: block(conv_kernel_size=10**9, conv_group_size=8), CheckpointError, "conv_kernel_size"),
        (lambda: block(markov_rank=4, markov_head_type="rnn"), UnsupportedError, "markov_head_type='rnn'"),
        (lambda: block("embed_tokens", num_hidden_layers=65), CheckpointError, "65 layers are no drafter's"),
        (lambda: speculator(n_predict=100), CheckpointError, "n_predict"),
        (lambda: eagle3(draft_vocab_size="many"), CheckpointError, "draft_vocab_size"),
        (lambda: eagle3(norm_output="yes"), CheckpointError, "norm_output"),
        (lambda: eagle3(eagle_config={"norm_before_fc": "false"}), CheckpointError, "norm_before_fc"),
        (lambda: eagle3(eagle_config={"norm_before_residual": 1}), CheckpointError, "norm_before_residual"),
        (lambda: block(dflash_config={"causal": "no"}), CheckpointError, "causal"),
        (lambda: eagle3(draft_vocab_size=-3), CheckpointError, "draft_vocab_size"),
        (lambda: eagle3(target_hidden_size=[1]), CheckpointError, "target_hidden_size"),
        (lambda: medusa(truncated_vocab_size=-5), CheckpointError, "truncated_vocab_size"),
        (lambda: medusa(medusa_num_heads="x"), CheckpointError, "medusa_num_heads"),
        (lambda: MtpDrafter(CONTEXT, TARGET.info, TARGET), ConfigError, "method=mtp: the model (LlamaForCausalLM"),
        (lambda: Target(ANY, TARGET.info).embedding, UnsupportedError, "the drafter's checkpoint has no embed_tokens"),
    ],
)
def test_what_nobody_reads_is_named(make: Callable[[], object], error: type[MantaError], said: str) -> None:
    with pytest.raises(error, match=re.escape(said)), torch.device("meta"):
        make()


def test_layers_that_are_read() -> None:
    assert layers_read({}, 32) == (2, 16, 29)
    assert layers_read({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 8]}}, 8) == (1, 8)


class Stored:
    """A tensor of a checkpoint."""

    def __init__(self, values: torch.Tensor) -> None:
        self.values, self.shape = values, tuple(values.shape)

    def narrow(self, dim: int, start: int, length: int) -> torch.Tensor:
        return self.values.narrow(dim, start, length)


@pytest.mark.parametrize(
    ("ids", "is_offset", "said"),
    [
        ([0, 5, 331], False, "names token 331, of a vocabulary of 331"),
        ([0, -1, 3], False, "names token -1"),
        ([0, 1 << 40, 3], False, f"names token {1 << 40}"),
        ([0, 7, 7], False, "names a token twice"),
        ([0, 0, 329], True, "names token 331"),
        ([0, 5, 4], True, "names a token twice"),
        ([0.0, 1.0, 2.0], False, "holds float32, not token ids"),
        ([0, 1], False, "has shape"),
    ],
)
def test_tokens_that_a_drafter_knows_are_the_targets(ids: list[Any], is_offset: bool, said: str) -> None:
    known: Any = TokenIds(3, VOCAB, is_offset)
    with pytest.raises(ShapeMismatch, match=said):
        known.load(known.weight(), Stored(torch.tensor(ids)), "")


def test_tokens_that_are_known() -> None:
    known: Any = TokenIds(3, VOCAB, is_offset=True)
    weight = known.weight()
    known.load(weight, Stored(torch.tensor([0, 9, 328])), "")
    assert weight.tolist() == [0, 9, 328]
