"""The paged KV cache on the device: one tensor [B, ...] for each attention layer, as its `cache_spec` says."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch

from app.errors import ConfigError
from app.kernels.attention import KV_FP8, KV_INT8
from app.layers.attention_layer import AttentionLayer
from app.layers.cache_spec import LayerCacheSpec, LayerStateSpec
from app.platforms import platform_of
from app.records.kv_groups import WHOLE, KVGroups, Window, Windows
from app.worker.attention.zero_pages import zero


def select_kv_dtype(name: str, device: torch.device) -> torch.dtype | None:
    """The type that `kv_cache_dtype` asks for; None: the model's own. ConfigError where the device lacks it."""
    if name == "auto":
        return None
    if name == "int8_per_token_head":
        if device.type != "cpu":
            raise ConfigError(f"kv_cache_dtype={name}: only CPUs have it; use fp8 or auto", param="kv_cache_dtype")
        return KV_INT8
    if (refusal := platform_of(device).fp8_refusal(device)) is not None:
        raise ConfigError(f"kv_cache_dtype={name}: {refusal}; use auto", param="kv_cache_dtype")
    return KV_FP8


def describe_scales(layers: Sequence[AttentionLayer]) -> list[str]:
    """A line for the start-up notes where the cache is quantized."""
    scales = [layer.kv_scales for layer in layers if layer.kv_scales is not None]
    if not scales:
        return []
    given = sum(bool((scale != 1).any()) for scale in scales)
    if not given:
        return ["KV cache scales: 1 (the checkpoint brings no others)"]
    return [f"KV cache scales: from the checkpoint, in {given} of {len(scales)} layers"]


@dataclass(slots=True, frozen=True)
class KVCacheSpec:
    """The cache on this rank, layer by layer; the number of blocks is decided later.

    A layer has one of the places in a block; a place holds one layer of each group (app/records/kv_groups.py).
    """

    layers: tuple[LayerCacheSpec, ...]  # of those that keep something of tokens
    block_size: int
    windows: Windows = WHOLE  # of the groups, the same on every rank
    # What each of all layers keeps of a request (None: nothing); (): none of them keeps any.
    states: tuple[LayerStateSpec | None, ...] = ()
    # The same of an encoder's output: blocks that are no others', as many for each request.
    encoded: tuple[LayerCacheSpec | None, ...] = ()

    @classmethod
    def of(cls, layers: Sequence[AttentionLayer], block_size: int, windows: Windows = WHOLE) -> KVCacheSpec:
        """The cache that these layers need, in the order of their `layer_index`."""
        states = tuple(layer.state_spec() for layer in layers)
        encoded = tuple(_encoded_spec(layer) for layer in layers)
        return cls(
            tuple(layer_specs(layers)),
            block_size,
            windows,
            states if any(states) else (),
            encoded if any(encoded) else (),
        )

    @property
    def bytes_per_encoded(self) -> int:
        """Memory of what all layers keep of an encoder's output for one request."""
        size, specs = self.block_size, [spec for spec in self.encoded if spec is not None]
        return sum(spec.num_encoder_blocks(size) * size * spec.bytes_per_token for spec in specs)

    @property
    def bytes_per_state(self) -> int:
        """Memory of one request's states in all layers."""
        return sum(spec.num_bytes for spec in self.states if spec is not None)

    @property
    def blocks_per_state(self) -> int:
        """Blocks that hold one request's states; 0 where nothing is kept of tokens."""
        return -(-self.bytes_per_state // self.bytes_per_block) if self.layers else 0

    @property
    def is_quantized(self) -> bool:
        """True if a layer keeps less than it computes with."""
        return bool(self.quantized_to)

    @property
    def quantized_to(self) -> str:
        """Says what it is quantized to, for people; "" where it is not."""
        names = {KV_FP8: "fp8", KV_INT8: "int8"}
        return next((names[layer.dtype] for layer in self.layers if layer.dtype in names), "")

    @property
    def copy_dtype(self) -> torch.dtype:
        """The type in which whole blocks are copied: one that PyTorch indexes on every device, whatever it means."""
        dtypes = {layer.dtype for layer in self.layers}
        return torch.int16 if self.is_quantized or len(dtypes) > 1 else dtypes.pop()

    @property
    def groups(self) -> KVGroups:
        """Returns how many blocks a request holds."""
        return KVGroups(self.windows, self.block_size)

    @property
    def whole(self) -> KVGroups:
        """The same if all layers kept the whole context."""
        return KVGroups(WHOLE, self.block_size)

    @property
    def positions(self) -> list[tuple[int, int]]:
        """(group, place) of each layer: those of a window are dealt to its groups in turn."""
        dealt: Counter[Window] = Counter()
        found = []
        for layer in self.layers:
            window = layer.sliding_window if layer.sliding_window in self.windows else None
            groups = [group for group, other in enumerate(self.windows) if other == window]
            found.append((groups[dealt[window] % len(groups)], dealt[window] // len(groups)))
            dealt[window] += 1
        return found

    def groups_of(self, layers: Sequence[AttentionLayer]) -> list[int]:
        """The group of each of these layers, which the cache is for; of one that keeps nothing of tokens the first."""
        groups = iter(self.positions)
        return [next(groups)[0] if _keeps_tokens(layer) else 0 for layer in layers]

    @property
    def place_specs(self) -> list[LayerCacheSpec]:
        """Returns what each place of a block holds: layers of several groups all keep the same."""
        of_place = {place: layer for layer, (_, place) in zip(self.layers, self.positions, strict=True)}
        return [of_place[place] for place in range(len(of_place))]

    @property
    def bytes_per_block(self) -> int:
        """Memory of one block in all places."""
        return sum(layer.bytes_per_token for layer in self.place_specs) * self.block_size

    @property
    def bytes_per_token(self) -> int:
        """Memory of one token in all layers."""
        return sum(layer.bytes_per_token for layer in self.layers)

    def copy_slices(self) -> list[slice]:
        """Returns where each place of a block lies when all are put in a row, in elements of `copy_dtype`."""
        sizes = [layer.bytes_per_token * self.block_size // self.copy_dtype.itemsize for layer in self.place_specs]
        return [slice(end - size, end) for size, end in zip(sizes, accumulate(sizes), strict=True)]

    def of_layers(self, places: Sequence[torch.Tensor], others: Sequence[torch.Tensor | None]) -> list[torch.Tensor]:
        """The tensor of each layer: its own one of `others`, else that of its place."""
        found = iter(places[place] for _, place in self.positions)
        return [next(found) if other is None else other for other in others]

    def allocate_others(self, num_requests: int, device: torch.device) -> list[torch.Tensor | None]:
        """The tensor of each layer that keeps nothing of tokens, blocks of an encoder's output where it keeps these;
        None where it has a place in the blocks of tokens."""
        if self.encoded:
            size = self.block_size
            return [
                None if spec is None else _blocks(spec, num_requests * spec.num_encoder_blocks(size), size, device)
                for spec in self.encoded
            ]
        nothing = torch.empty(0, device=device)
        return [None if state is None else nothing for state in self.states or (None,) * len(self.layers)]

    def allocate_states(self, num_slots: int, device: torch.device) -> list[tuple[torch.Tensor, ...]]:
        """The states of each layer, a tensor [num_slots, ...] for each kind. Whoever begins there reads none of it."""
        return [
            tuple(torch.zeros(num_slots, *kind.shape, dtype=kind.dtype, device=device) for kind in spec.tensors)
            if spec is not None
            else ()
            for spec in self.states
        ]

    def allocate(self, num_blocks: int, device: torch.device) -> list[torch.Tensor]:
        """A tensor for each place. Zeroed, so that slots nobody wrote are finite when a masked product touches them."""
        return [_blocks(layer, num_blocks, self.block_size, device) for layer in self.place_specs]


def _blocks(spec: LayerCacheSpec, num_blocks: int, block_size: int, device: torch.device) -> torch.Tensor:
    tensor = torch.empty((num_blocks, *spec.block_shape(block_size)), dtype=spec.dtype, device=device)
    zero(tensor)
    return tensor


def _encoded_spec(layer: AttentionLayer) -> LayerCacheSpec | None:
    spec = layer.cache_spec()
    return None if spec is None or spec.encoder_positions is None else spec


def _keeps_tokens(layer: AttentionLayer) -> bool:
    return layer.cache_spec() is not None and _encoded_spec(layer) is None


def layer_specs(layers: Sequence[AttentionLayer]) -> list[LayerCacheSpec]:
    """Returns what those layers keep of tokens that keep anything of them."""
    specs = [layer.cache_spec() for layer in layers if layer.state_spec() is None and _encoded_spec(layer) is None]
    kept = [spec for spec in specs if spec is not None]
    assert len(kept) in (0, len(specs)), "a model with and without a KV cache"
    return kept


class KVCache:
    """The cache of this rank's layers. `tensors` (one for each layer) is one list for good: whoever holds it sees a new
    allocation. Layers at the same place of a block have the same tensor, and blocks of their own."""

    def __init__(self, spec: KVCacheSpec, device: torch.device, num_rows: int = 0, num_encoded: int = 0) -> None:
        """`num_rows`: of running requests, each of which has its states at the place of its row; `num_encoded`: slots
        for what is kept of an encoder's output. ConfigError when the device does not have the memory."""
        self.spec, self.num_encoded = spec, num_encoded
        try:
            self.states = spec.allocate_states(num_rows, device)
        except RuntimeError as error:  # also torch.OutOfMemoryError
            mib = num_rows * spec.bytes_per_state >> 20
            message = f"max_num_seqs={num_rows}: the states of so many requests need {mib} MiB on {device}: {error}"
            raise ConfigError(message, param="max_num_seqs") from error
        try:
            self.others = spec.allocate_others(num_encoded, device)  # of layers without a place in blocks of tokens
        except RuntimeError as error:
            mib = num_encoded * spec.bytes_per_encoded >> 20
            message = f"max_num_seqs: what {num_encoded} requests keep of encoded inputs needs {mib} MiB on {device}"
            raise ConfigError(f"{message}: {error}", param="max_num_seqs") from error
        self.kept: list[tuple[torch.Tensor, ...]] = []  # copies of states in slots, [num_slots, ...] each
        self.num_slots: int | None = 0  # for copies of states; None: they lie in blocks
        self.tensors: list[torch.Tensor] = []
        self.places: list[torch.Tensor] = []  # the same tensors, each once
        self._device = device

    def allocate(self, num_blocks: int) -> None:
        """Exchange what there is for so many blocks; ConfigError when the device does not have the memory."""
        self.tensors.clear()
        self.places.clear()
        try:
            self.places.extend(self.spec.allocate(num_blocks, self._device))
        except RuntimeError as error:  # also torch.OutOfMemoryError
            mib = num_blocks * self.spec.bytes_per_block >> 20
            raise ConfigError(
                f"num_blocks={num_blocks} needs {mib} MiB on {self._device}: {error}", param="num_blocks"
            ) from error
        self.tensors.extend(self.spec.of_layers(self.places, self.others))

    def keep(self, num_states: int | None) -> None:
        """Make room for so many copies of states; None: in blocks. ConfigError when the device does not have the
        memory."""
        self.num_slots = num_states
        if not num_states:
            return
        try:
            self.kept = self.spec.allocate_states(num_states, self._device)
        except RuntimeError as error:  # also torch.OutOfMemoryError
            mib = num_states * self.spec.bytes_per_state >> 20
            message = f"{num_states} copies of states need {mib} MiB on {self._device}: {error}; lower max_num_seqs"
            raise ConfigError(message, param="max_num_seqs") from error

    def free(self) -> None:
        """Give the memory back; the tensors stay, without any."""
        for tensor in self._all:
            tensor.untyped_storage().resize_(0)

    @property
    def is_free(self) -> bool:
        """True if `free` took the memory."""
        return any(tensor.untyped_storage().nbytes() == 0 for tensor in self._all)

    @property
    def _all(self) -> list[torch.Tensor]:
        encoded = self.others if self.spec.encoded else ()
        own = (tensor for tensor in encoded if tensor is not None)
        return [*self.places, *own, *(tensor for layer in (*self.states, *self.kept) for tensor in layer)]

    def restore(self) -> None:
        """Memory for the tensors again, zeroed as at first; elsewhere than before. OutOfMemoryError."""
        for tensor in self._all:
            tensor.untyped_storage().resize_(tensor.numel() * tensor.itemsize)
            zero(tensor)
