"""From hidden states to results: pooling modes by name, one file and one line each."""

from __future__ import annotations

from typing import TYPE_CHECKING

from app.registry import Registry

if TYPE_CHECKING:  # the table alone needs no torch
    from app.engine.pooling.base import Pooling

POOLINGS: Registry[type[Pooling]] = Registry(
    "pooling mode",
    {
        "cls": "app.engine.pooling.cls:ClsPooling",
        "last": "app.engine.pooling.last:LastPooling",
        "max": "app.engine.pooling.max:MaxPooling",
        "mean": "app.engine.pooling.mean:MeanPooling",
        "mean_sqrt_len": "app.engine.pooling.mean:MeanSqrtLenPooling",
    },
)
