"""Which block a layer gets, as config.json says it in its several ways."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from app.checkpoints.model_info import ModelInfo
from app.errors import UnsupportedError
from app.models.mixers import FULL, LINEAR, ByKind, dt_limit, kinds_of, mamba2_settings


def info(**fields: Any) -> ModelInfo:
    return ModelInfo(Path("m"), {"num_hidden_layers": 2, "hidden_size": 24, **fields}, {})


def test_kinds_have_older_names() -> None:
    assert kinds_of(info(layer_types=["mamba", "attention"]), []) == (LINEAR, FULL)
    assert kinds_of(info(layers_block_type=[FULL, LINEAR]), []) == (FULL, LINEAR)
    assert kinds_of(info(), [LINEAR, FULL]) == (LINEAR, FULL)


def test_unknown_kinds_are_refused_by_name() -> None:
    with pytest.raises(UnsupportedError, match=r"unknown .'ring'"):
        kinds_of(info(layer_types=["ring", FULL]), [])
    with pytest.raises(UnsupportedError, match="names 3 of 2 layers"):
        kinds_of(info(layer_types=[FULL] * 3), [])


def test_a_layer_gets_the_mixer_of_its_kind() -> None:
    def place(index: int) -> Any:
        return type("Place", (), {"index": index})()

    mixers: Any = {LINEAR: lambda *_: "state", FULL: lambda *_: "attention"}
    choose: Any = ByKind((LINEAR, FULL), mixers)
    assert [choose(None, None, place(i)) for i in range(2)] == ["state", "attention"]


def test_limits_of_dt() -> None:
    assert dt_limit(None) == (0.0, float("inf"))
    assert dt_limit([0.1, {"__float__": "Infinity"}]) == (0.1, float("inf"))


def test_sizes_of_mamba_2_that_do_not_fit_are_refused() -> None:
    settings = mamba2_settings(info(mamba_n_heads=6, mamba_d_head="auto"))
    assert (settings.num_heads, settings.head_dim) == (6, 8)
    with pytest.raises(UnsupportedError, match="mamba_n_heads=6 of mamba_d_head=7 are not 48 channels"):
        mamba2_settings(info(mamba_n_heads=6, mamba_d_head=7))
    with pytest.raises(UnsupportedError, match="no multiple of 4 groups"):
        mamba2_settings(info(mamba_n_heads=6, mamba_n_groups=4))
    with pytest.raises(UnsupportedError, match="heads of 192 numbers: state spaces have at most 128"):
        mamba2_settings(info(mamba_n_heads=1, mamba_expand=8))
    with pytest.raises(UnsupportedError, match="silu alone"):
        mamba2_settings(info(mamba_n_heads=6, hidden_act="gelu"))
