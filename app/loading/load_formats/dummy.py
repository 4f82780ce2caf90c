"""Random weights, made on the device: no checkpoint is read."""

from __future__ import annotations

import torch

from app.layers.norm import Norm
from app.layers.weight import Weight
from app.loading.load_formats.base import LoadFormat, LoadRequest
from app.models.base import EngineModel

STD = 0.02


class Dummy(LoadFormat):
    """Normal numbers that follow the seed; norms are 1."""

    def fill(self, model: EngineModel, request: LoadRequest) -> None:
        """Draw every parameter."""
        device = request.ctx.device
        generator = torch.Generator(device).manual_seed(request.seed)
        for parameter in model.parameters():
            if isinstance(parameter, Weight) and parameter.spec.dummy is not None:
                dtype = torch.float32 if parameter.dtype.is_floating_point else parameter.dtype
                parameter.data.copy_(torch.full(parameter.shape, parameter.spec.dummy, dtype=dtype, device=device))
            elif not parameter.dtype.is_floating_point:  # codes, of which any bits are some
                drawn = torch.empty(parameter.shape, dtype=parameter.dtype, device=device).view(torch.uint8)
                parameter.data.copy_(drawn.random_(0, 256, generator=generator).view(parameter.dtype))
            elif parameter.dtype.itemsize > 1:
                drawn = parameter.data if parameter.device == device else torch.empty_like(parameter, device=device)
                parameter.data.copy_(drawn.normal_(0.0, STD, generator=generator))
            else:  # stored in 8 bits, for which PyTorch draws nothing
                drawn = torch.empty(parameter.shape, device=device).normal_(0.0, 1.0, generator=generator)
                parameter.data.copy_(drawn)
        for module in model.modules():
            if isinstance(module, Norm):
                module.weight.data.fill_(1.0)
