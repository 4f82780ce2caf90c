"""MobileNet v5 sees what timm's sees: a tower of few channels whose weights follow from their names. timm 1.0.31 gave
the numbers in `mobilenet_v5.json` for them; it is not installed with the tests, as it wants a torchvision for this very
PyTorch. `python -m tests.models.multimodal.test_mobilenet_v5` writes them anew."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from zlib import crc32

import numpy as np
import pytest
import torch
from torch import nn

from app.distributed.parallel_groups import ParallelGroups
from app.errors import CheckpointError, MantaError, UnsupportedError
from app.kernels.attention import reference
from app.layers.context import BuildContext
from app.models.multimodal.mobilenet_v5 import MobileNetV5, scale_of

SCALE = 0.05
SIDES = (512, 96)  # the mean of four places is a token, as of published sizes; what lies between places
FILE = Path(__file__).with_name("mobilenet_v5.json")


def fill(tower: nn.Module) -> nn.Module:
    """Weights by name: those of sums are small, factors near one, factors of layers a third."""
    for name, weight in tower.state_dict().items():
        values = np.random.default_rng(crc32(name.encode())).normal(0, 1, tuple(weight.shape))
        size = float(np.prod(weight.shape[1:])) ** -0.5 if weight.ndim > 1 else 0.1
        around = 1.0 if name.endswith("weight") and weight.ndim == 1 else 0.3 if name.endswith("gamma") else 0.0
        weight.copy_(torch.from_numpy(values * size + around))
    return tower.eval()


def picture(side: int) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(side).uniform(0, 1, (1, 3, side, side)).astype(np.float32))


def some(seen: torch.Tensor) -> list[list[float]]:
    """Numbers of the tokens [256, 2048]: of every 16th and every 128th channel, so that all rows and columns occur."""
    return [[round(value, 6) for value in token[index % 128 :: 128]] for index, token in enumerate(seen[::17].tolist())]


@torch.inference_mode()
def test_tokens_are_timms() -> None:
    ctx = BuildContext(torch.float32, torch.device("cpu"), 256, reference.OPS, ParallelGroups())
    tower = fill(MobileNetV5(ctx, SCALE, 2048))
    expected: Mapping[str, Any] = json.loads(FILE.read_text())
    assert sorted(tower.state_dict()) == sorted(expected["names"])
    for side in SIDES:
        found = torch.tensor(some(tower(picture(side))[0]))
        torch.testing.assert_close(found, torch.tensor(expected[str(side)]), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    ("vision", "error", "says"),
    [
        ({"architecture": "resnet50"}, UnsupportedError, "architecture='resnet50' is not supported"),
        ({"model_args": {"depth": 3}}, UnsupportedError, "model_args.depth is not supported"),
        ({"model_args": {"channel_multiplier": 0}}, CheckpointError, "channel_multiplier is 0"),
        ({"model_args": {"channel_multiplier": "wide"}}, CheckpointError, "channel_multiplier is 'wide'"),
        ({"model_args": [1]}, CheckpointError, "model_args is no object"),
    ],
)
def test_another_tower_is_refused(vision: dict[str, Any], error: type[MantaError], says: str) -> None:
    with pytest.raises(error, match=says):
        scale_of(vision)
    assert scale_of({}) == 1.0


def main() -> None:
    import timm

    tower = fill(timm.create_model("mobilenetv5_300m_enc", channel_multiplier=SCALE))
    with torch.inference_mode():
        found = {str(side): some(tower(picture(side))[0].flatten(1).T) for side in SIDES}
    FILE.write_text(json.dumps({"names": sorted(tower.state_dict()), **found}) + "\n")


if __name__ == "__main__":
    main()
