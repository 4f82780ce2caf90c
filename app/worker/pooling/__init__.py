"""From hidden states to results: pooling modes by name, one file and one line each."""

from __future__ import annotations

from typing import TYPE_CHECKING

from app.registry import Registry

if TYPE_CHECKING:  # the table alone needs no torch
    from app.worker.pooling.base import Pooling

POOLINGS: Registry[type[Pooling]] = Registry(
    "pooling mode",
    {
        "cls": "app.worker.pooling.cls:ClsPooling",
        "last": "app.worker.pooling.last:LastPooling",
        "max": "app.worker.pooling.max:MaxPooling",
        "mean": "app.worker.pooling.mean:MeanPooling",
        "mean_sqrt_len": "app.worker.pooling.mean:MeanSqrtLenPooling",
        "sum": "app.worker.pooling.mean:SumPooling",
        "weightedmean": "app.worker.pooling.mean:WeightedMeanPooling",
    },
)
