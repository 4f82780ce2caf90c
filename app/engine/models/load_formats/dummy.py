"""Random weights, made on the device: no checkpoint is read."""

from __future__ import annotations

import torch

from app.engine.layers.norm import Norm
from app.engine.models.base import EngineModel
from app.engine.models.load_formats.base import LoadFormat, LoadRequest

STD = 0.02


class Dummy(LoadFormat):
    """Normal numbers that follow the seed; norms are 1."""

    def fill(self, model: EngineModel, request: LoadRequest) -> None:
        """Draw every parameter."""
        device = request.ctx.device
        generator = torch.Generator(device).manual_seed(request.seed)
        for parameter in model.parameters():
            if parameter.dtype.itemsize > 1:
                drawn = parameter.data if parameter.device == device else torch.empty_like(parameter, device=device)
                parameter.data.copy_(drawn.normal_(0.0, STD, generator=generator))
            else:  # stored in 8 bits, for which PyTorch draws nothing
                drawn = torch.empty(parameter.shape, device=device).normal_(0.0, 1.0, generator=generator)
                parameter.data.copy_(drawn)
        for module in model.modules():
            if isinstance(module, Norm):
                module.weight.data.fill_(1.0)
