"""Sparse vectors over the vocabulary; sentence-transformers' SparseEncoder is the judge."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sentence_transformers import SparseEncoder
from sentence_transformers.base.modules import Transformer
from sentence_transformers.sparse_encoder.modules import SpladePooling
from transformers import AutoConfig, AutoModelForMaskedLM

from app.errors import UnsupportedError
from tests.models.families.test_encoder_families import SIZES
from tests.tiny_encoders import texts, tiny_encoder
from tests.worker.pooling.pooling_driver import PoolingDriver

ASKED = texts(9)
FAMILIES: dict[str, dict[str, Any]] = {
    "bert": {},
    "distilbert": {"dim": 48, "n_layers": 2, "n_heads": 4, "hidden_dim": 80},
    "roberta": {"pad_token_id": 1, "type_vocab_size": 1},
}


def written(family: str, directory: Path, **pooling: str) -> tuple[Path, SparseEncoder]:
    """A directory as sentence-transformers saves it, and its own model of it."""
    plain = directory / "plain"
    shutil.copytree(tiny_encoder("roberta" if family == "roberta" else "bert"), plain)
    torch.manual_seed(0)
    model = AutoModelForMaskedLM.from_config(AutoConfig.for_model(family, **{**SIZES, **FAMILIES.get(family, {})}))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(torch.randn_like(parameter) * 0.2)
    model.save_pretrained(plain)
    modules = [Transformer(str(plain), transformer_task="fill-mask"), SpladePooling(**pooling)]
    SparseEncoder(modules=modules, device="cpu").save(str(directory / "sparse"))
    return directory / "sparse", SparseEncoder(str(directory / "sparse"), device="cpu")


@pytest.mark.parametrize(
    ("family", "strategy", "activation"),
    [("bert", "max", "relu"), ("bert", "sum", "log1p_relu"), ("distilbert", "max", "relu"), ("roberta", "max", "relu")],
)
def test_weights_of_the_vocabulary(family: str, strategy: str, activation: str, tmp_path: Path) -> None:
    directory, judge = written(family, tmp_path, pooling_strategy=strategy, activation_function=activation)
    expected = judge.encode(ASKED, convert_to_sparse_tensor=False).numpy()
    with PoolingDriver(directory) as driver:
        found = np.stack(driver.pool(ASKED))
    np.testing.assert_allclose(found, expected, atol=1e-4)
    assert 0 < (expected == 0).sum() < expected.size, "the vectors are not sparse, or empty"


def test_over_two_ranks(tmp_path: Path) -> None:
    directory, judge = written("bert", tmp_path)
    with PoolingDriver(directory, executor="local_processes", tensor_parallel_size=2) as driver:
        found = np.stack(driver.pool(ASKED))
    np.testing.assert_allclose(found, judge.encode(ASKED, convert_to_sparse_tensor=False).numpy(), atol=1e-4)


def test_an_encoder_whose_head_is_not_read_is_refused(tmp_path: Path) -> None:
    directory, _ = written("mpnet", tmp_path)
    with pytest.raises(UnsupportedError, match="sparse vectors of MPNetForMaskedLM"):
        PoolingDriver(directory)
