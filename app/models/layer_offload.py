"""Weights larger than the device: those of some layers lie in host memory and are copied in ahead of their use.

A ring of buffers on the device holds the weights of the next such layers. A stream of its own fills them: a buffer as
soon as the layer that had it has computed, so that copies go on beside all other layers. The layers are spread evenly
with the last one among them: then the bus rests least. The stream is forked from the step's and joined to it again, so
a CUDA graph captures copies and all; buffers have fixed addresses. Only products' weights move, norms and biases stay.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from app.errors import ConfigError
from app.layers.experts.expert_linear import ExpertLinear
from app.layers.linear import Linear
from app.layers.weight import Weight
from app.platforms import platform_of

GIB = 1 << 30
RING = 2  # one is read while the other is filled
ALIGNMENT = 512  # bytes, of each weight in a layer's memory


@dataclass(slots=True, frozen=True)
class _Place:
    """Says where a weight lies in the memory of its layer."""

    linear: Linear | ExpertLinear
    leaf: str
    begin: int

    def put(self, memory: torch.Tensor) -> None:
        """Have the weight lie in `memory`, uint8 [layer's bytes], whatever that holds."""
        old: Weight = getattr(self.linear, self.leaf)
        view = memory[self.begin : self.begin + old.nbytes].view(old.dtype).view(old.shape)
        setattr(self.linear, self.leaf, Weight(view, old.spec))


class LayerOffload:
    """Made while the model has no memory: `hold`, fill the weights, `attach`; then steps call what `begin` gives."""

    def __init__(self, layers: Iterable[nn.Module], num_bytes: int, device: torch.device) -> None:
        """Choose layers of at least `num_bytes` together, or all of them."""
        self._layers = list(layers)
        self._device = device
        self._platform = platform_of(device)
        places = [_places(layer) for layer in self._layers]
        self._sizes = [_size(of_layer) for of_layer in places]
        self._chosen = spread(self._sizes, num_bytes)
        self._places = [places[index] for index in self._chosen]
        self._host: list[torch.Tensor] = []
        self._ring: list[torch.Tensor] = []
        self._calls: list[Any] = []

    @property
    def num_bytes(self) -> int:
        """Weights in host memory."""
        return sum(self._sizes[index] for index in self._chosen)

    @property
    def note(self) -> str:
        """A line for the start-up notes."""
        return (
            f"weights in host memory: {len(self._chosen)} of {len(self._layers)} layers "
            f"({self.num_bytes / GIB:.2f} GiB), copied in for every step"
        )

    def hold(self) -> None:
        """Memory for the weights on the host; ConfigError where it is not to be had."""
        physical = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        if self.num_bytes > physical:  # it would seem to work, until a page is touched
            message = f"cpu_offload_gb: {self.num_bytes} bytes are more than this machine has ({physical})"
            raise ConfigError(message, param="cpu_offload_gb")
        for index, places in zip(self._chosen, self._places, strict=True):
            try:
                memory = torch.empty(self._sizes[index], dtype=torch.uint8)
                self._platform.pin(memory)
            except RuntimeError as error:
                message = f"cpu_offload_gb: no host memory to be had: {error}"
                raise ConfigError(message, param="cpu_offload_gb") from error
            self._host.append(memory)
            for place in places:
                place.put(memory)

    def attach(self) -> None:
        """The weights are there: from now on they lie in the ring, when their layer runs."""
        largest = max(memory.nbytes for memory in self._host)
        self._ring = [torch.empty(largest, dtype=torch.uint8, device=self._device) for _ in self._host[:RING]]
        runtime = self._platform.runtime
        self._stream = None if runtime is None else runtime.Stream(self._device)
        self._copied = [None if runtime is None else runtime.Event() for _ in self._ring]
        self._read = [None if runtime is None else runtime.Event() for _ in self._ring]
        self._calls = list(self._layers)
        for number, index in enumerate(self._chosen):
            for place in self._places[number]:
                place.put(self._ring[number % RING])
                place.linear.is_streamed = True
            self._calls[index] = partial(self._run, number, self._layers[index])

    def begin(self) -> Sequence[Any]:
        """Start the first copies of a step; returns the layers to call in their places."""
        for number in range(len(self._ring)):
            self._copy(number)
        return self._calls

    def end(self) -> None:
        """All layers have been called: whatever the step's stream does next comes after all copies."""
        if self._stream is not None:
            self._platform.runtime.current_stream(self._device).wait_stream(self._stream)

    def _run(self, number: int, layer: nn.Module, *arguments: Any) -> Any:
        """Call a layer, once its weights are there; then its buffer is the next one's."""
        if (copied := self._copied[number % RING]) is not None:
            self._platform.runtime.current_stream(self._device).wait_event(copied)
        result = layer(*arguments)
        if number + RING < len(self._host):
            self._copy(number + RING)
        return result

    def _copy(self, number: int) -> None:
        """Enqueue a layer's weights, behind all that the step's stream has been given."""
        slot, runtime = number % RING, self._platform.runtime
        source = self._host[number]
        target = self._ring[slot][: source.nbytes]
        if runtime is None:
            target.copy_(source)
            return
        read, copied = self._read[slot], self._copied[slot]
        assert read is not None
        assert copied is not None
        read.record(runtime.current_stream(self._device))
        with runtime.stream(self._stream):
            runtime.current_stream(self._device).wait_event(read)
            target.copy_(source, non_blocking=True)
            copied.record(runtime.current_stream(self._device))

    def close(self) -> None:
        """Unlock the host's memory, once nothing is under way any more."""
        if self._platform.runtime is not None:
            self._platform.runtime.synchronize(self._device)
        for memory in self._host:
            self._platform.unpin(memory)
        self._host = []


def spread(sizes: Sequence[int], num_bytes: int) -> list[int]:
    """Indices of layers with at least `num_bytes` together, as far from each other as can be, the last one included."""
    for count in range(1, len(sizes)):
        chosen = [-(-(number + 1) * len(sizes) // count) - 1 for number in range(count)]
        if sum(sizes[index] for index in chosen) >= num_bytes:
            return chosen
    return list(range(len(sizes)))


def _places(layer: nn.Module) -> list[_Place]:
    places, end = [], 0
    for module in layer.modules():
        if not isinstance(module, Linear | ExpertLinear):
            continue
        for leaf in [name for weight in module.stored for name in weight.attributes.values()]:
            places.append(_Place(module, leaf, end))
            end += -(-getattr(module, leaf).nbytes // ALIGNMENT) * ALIGNMENT
    return places


def _size(places: Sequence[_Place]) -> int:
    last = places[-1]
    return last.begin + -(-int(getattr(last.linear, last.leaf).nbytes) // ALIGNMENT) * ALIGNMENT
