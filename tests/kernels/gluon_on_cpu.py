"""Runs Gluon kernels on a CPU, for what they mean: neither layouts nor what may run side by side.

A kernel's functions are called with stand-ins for Gluon's: tensors are PyTorch's, shared memory is bytes, partitions of
warps are threads, and barriers count what arrives. Copies and products are done at once.
"""

from __future__ import annotations

import threading
import time
import types
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any

import torch
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from app.kernels.gemm.stored import bit_moves, code_bits
from app.kernels.quick_launch import QuickKernel

_PANEL = 64  # columns that lie together, of 16-bit numbers in shared memory
_PATIENCE_S = 120.0
_ONE_AT_A_TIME = threading.Lock()
_has_failed = threading.Event()  # whoever waits for what another thread writes need not do so any more


class Numbers(torch.Tensor):
    """A tensor of a kernel's: its type has a layout."""

    @property
    def type(self) -> Any:
        return types.SimpleNamespace(layout=None)

    def to(self, dtype: torch.dtype, *, bitcast: bool = False) -> torch.Tensor:  # type: ignore[override]
        """Of 32 bits are all numbers that a kernel sees otherwise, also those that have 64 here."""
        if not bitcast:
            return super().to(dtype)
        return (self if self.is_floating_point() else super().to(torch.int32)).view(dtype)


class Pointer:
    """A place in a tensor, or many."""

    def __init__(self, numbers: torch.Tensor, offset: Any = 0) -> None:
        self.numbers, self.offset = numbers, offset
        self.dtype = types.SimpleNamespace(element_ty=numbers.dtype)

    def __add__(self, offset: Any) -> Pointer:
        return Pointer(self.numbers, self.offset + offset)

    def __sub__(self, offset: Any) -> Pointer:
        return Pointer(self.numbers, self.offset - offset)

    def to(self, dtype: Any, bitcast: bool = False) -> Pointer:
        """As a number, which assembly reads from; or as a pointer to numbers of another type."""
        if not bitcast:
            return self
        num_bytes = (self.numbers.storage_offset() + int(self.offset)) * self.numbers.itemsize
        assert num_bytes % dtype.itemsize == 0
        storage = self.numbers.untyped_storage()
        return Pointer(torch.empty(0, dtype=dtype).set_(storage, num_bytes // dtype.itemsize, (1,), (1,)))

    def places(self, mask: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """All numbers from the tensor's first one on, which of them are meant, and where these are seen."""
        size = self.numbers.untyped_storage().nbytes() // self.numbers.element_size()
        flat = self.numbers.as_strided((size - self.numbers.storage_offset(),), (1,))
        places, seen = torch.broadcast_tensors(torch.as_tensor(self.offset), torch.as_tensor(mask))
        assert bool(((places >= 0) & (places < len(flat)) | ~seen).all()), "outside of the tensor"
        return flat, places, seen


class Shared:
    """A part of shared memory. Rows of more than one panel lie panel by panel, as the copy engine leaves them."""

    def __init__(
        self, memory: torch.Tensor, dtype: torch.dtype, shape: Sequence[int], seen: torch.Tensor | None = None
    ) -> None:
        """`seen`: where its numbers lie, if otherwise."""
        self.memory, self.dtype, self.shape, self.seen, self.layout = memory, dtype, list(shape), seen, None

    @property
    def numbers(self) -> torch.Tensor:
        count = int(torch.Size(self.shape).numel())
        return self.memory[: count * self.dtype.itemsize].view(self.dtype)

    @property
    def places(self) -> torch.Tensor:
        """Where each number lies among `numbers`."""
        if self.seen is not None:
            return self.seen
        plain = torch.arange(len(self.numbers))
        if len(self.shape) == 2 and self.dtype.itemsize == 2 and self.shape[1] > _PANEL:
            plain = plain.view(-1, self.shape[0], _PANEL).transpose(0, 1)
        return plain.reshape(self.shape)

    def index(self, i: Any) -> Shared:
        assert 0 <= int(i) < self.shape[0]
        assert self.seen is None
        size = int(torch.Size(self.shape[1:]).numel()) * self.dtype.itemsize
        return Shared(self.memory[int(i) * size :], self.dtype, self.shape[1:])

    def slice(self, first: int, length: int) -> Shared:
        """Some rows of a part that lies row by row."""
        assert self.seen is None
        assert self.places.equal(torch.arange(len(self.numbers)).view(self.shape))
        size = int(torch.Size(self.shape[1:]).numel()) * self.dtype.itemsize
        return Shared(self.memory[first * size :], self.dtype, [length, *self.shape[1:]])

    def reshape(self, shape: Sequence[int]) -> Shared:
        return Shared(self.memory, self.dtype, shape, self.places.reshape(shape))

    def permute(self, order: Sequence[int]) -> Shared:
        seen = self.places.permute(*order)
        return Shared(self.memory, self.dtype, seen.shape, seen)

    def _reinterpret(self, dtype: torch.dtype, shape: Sequence[int], layout: Any) -> Shared:
        found = Shared(self.memory, dtype, shape)
        assert found.numbers.nbytes <= self.numbers.nbytes
        return found

    def load(self, layout: Any = None) -> torch.Tensor:
        return self.numbers[self.places].as_subclass(Numbers)

    def store(self, x: torch.Tensor) -> None:
        assert (list(x.shape), x.dtype) == (self.shape, self.dtype)
        self.numbers[self.places] = x.as_subclass(torch.Tensor)


class Barrier:
    """Counts phases: one ends when all have arrived and all bytes that were expected."""

    def __init__(self) -> None:
        self.phase = self.count = self.missing = self.bytes = 0
        self.changed = threading.Condition()

    def change(self, *, arrivals: int = 0, num_bytes: int = 0) -> None:
        with self.changed:
            self.missing -= arrivals
            self.bytes += num_bytes
            if self.missing == self.bytes == 0:
                self.phase, self.missing = self.phase + 1, self.count
                self.changed.notify_all()

    def wait(self, parity: Any) -> None:
        with self.changed:
            assert self.changed.wait_for(lambda: self.phase & 1 != int(parity), _PATIENCE_S), "nothing arrives"


class Barriers:
    """Barriers one behind the other; alone it is the first of them."""

    def __init__(self, count: int) -> None:
        self.all = [Barrier() for _ in range(count)]

    def index(self, i: Any) -> Barrier:
        return self.all[int(i)]


def _one(barrier: Barrier | Barriers) -> Barrier:
    return barrier if isinstance(barrier, Barrier) else barrier.all[0]


def _init(barrier: Barrier | Barriers, count: int) -> None:
    _one(barrier).count = _one(barrier).missing = count


@dataclass
class Copied:
    """A tensor that the copy engine reads and writes; what lies behind it in its memory, too, if the shape says so."""

    base: torch.Tensor
    block_shape: list[int]
    layout: Any = None

    @classmethod
    def of(cls, desc: TensorDescriptor) -> Copied:
        is_whole = list(desc.base.shape) == list(desc.shape)
        return cls(desc.base if is_whole else desc.base.as_strided(desc.shape, desc.strides), list(desc.block_shape))

    @property
    def dtype(self) -> torch.dtype:
        return self.base.dtype


def _bring(desc: Copied, at: Sequence[Any], barrier: Barrier | Barriers, to: Shared, pred: Any = True) -> None:
    if not pred:
        return
    assert to.shape == list(desc.block_shape)
    found = torch.zeros(to.shape, dtype=desc.base.dtype)
    ends = zip(at, desc.block_shape, desc.base.shape, strict=True)
    part = desc.base[tuple(slice(int(a), min(int(a) + n, most)) for a, n, most in ends)]
    found[tuple(slice(size) for size in part.shape)] = part
    to.numbers.copy_(found.reshape(-1))
    _one(barrier).change(num_bytes=-found.nbytes)


def _take(desc: Copied, at: Sequence[Any], source: Shared) -> None:
    assert source.shape == list(desc.block_shape)
    ends = zip(at, desc.block_shape, strict=True)
    desc.base[tuple(slice(int(a), int(a) + n) for a, n in ends)] = source.load().as_subclass(torch.Tensor)


def _product(a: Any, b: Any, acc: torch.Tensor, *, use_acc: bool = True, is_async: bool = False) -> torch.Tensor:
    first, second = (x.load() if isinstance(x, Shared) else x for x in (a, b))
    assert first.dtype == second.dtype
    made = first.float() @ second.float()
    return acc + made if use_acc else made


def _unpacked(words: torch.Tensor, part: int, form: str, dtype: torch.dtype) -> torch.Tensor:
    """Part `part` of words of two numbers of 8 bits, or of four nibbles, which come by 136 too large."""
    if form == "e2m1":
        wide = words.as_subclass(torch.Tensor).to(torch.int32)
        moves = bit_moves(code_bits("e2m1", part), code_bits("e2m1", 0)).items()  # the first lies where bf16 has it
        bits = sum((wide << left if left >= 0 else wide >> -left) & mask for left, mask in moves)
        return torch.as_tensor(bits).to(torch.int16).view(dtype).as_subclass(Numbers)
    if form == "nibble":
        return (words.to(torch.int32) >> 4 * part & 15).add(128).to(dtype)
    codes = (words.as_subclass(torch.Tensor) >> 8 * part & 0xFF).to(torch.uint8)
    return codes.view(torch.int8 if form == "int8" else torch.float8_e4m3fn).to(dtype).as_subclass(Numbers)


def _wait(outstanding: int, deps: Sequence[torch.Tensor]) -> Any:
    return deps[0] if len(deps) == 1 else tuple(deps)


def _allocate(dtype: torch.dtype, shape: Sequence[int], layout: Any) -> Shared | Barriers:
    if dtype == torch.int64:
        return Barriers(shape[0])
    count = int(torch.Size(shape).numel())
    return Shared(torch.full((count * dtype.itemsize,), 255, dtype=torch.uint8), dtype, shape)  # no numbers


def _load(pointer: Pointer, mask: Any = True, other: float = 0.0, cache_modifier: str = "") -> torch.Tensor:
    flat, places, seen = pointer.places(mask)
    return torch.where(seen, flat[torch.where(seen, places, 0)], torch.as_tensor(other).to(flat)).as_subclass(Numbers)


def _store(pointer: Pointer, x: torch.Tensor | float, mask: Any = True) -> None:
    flat, places, seen = pointer.places(mask)
    x = torch.as_tensor(x, dtype=None if isinstance(x, torch.Tensor) else flat.dtype)
    assert x.dtype == flat.dtype
    flat[places[seen]] = x.broadcast_to(places.shape)[seen].as_subclass(torch.Tensor)


def _add(pointer: Pointer, x: int, sem: str, scope: str) -> torch.Tensor:
    """Adds to a number that programs share; what it was."""
    flat, places, _ = pointer.places(True)
    with _ONE_AT_A_TIME:
        before = flat[places].clone()
        flat[places] += x
    return before.as_subclass(Numbers)


def _side_by_side(partitions: Sequence[tuple[Callable[..., None], Sequence[Any]]], *_: Any) -> None:
    failures: list[BaseException] = []

    def run(partition: Callable[..., None], given: Sequence[Any]) -> None:
        try:
            partition(*given)
        except BaseException as failure:
            failures.append(failure)
            _has_failed.set()
            raise

    threads = [threading.Thread(target=run, args=one, daemon=True) for one in partitions]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures, failures


def _assembly(text: str, constraints: str, given: Sequence[Any], **_: Any) -> torch.Tensor:
    if text.startswith(("ld.acquire.gpu.global.b32", "ld.relaxed.gpu.global.b32")):
        assert not _has_failed.is_set(), "another thread has failed"
        time.sleep(1e-3)  # it asks again and again for what another thread writes, which has more use of the time
        return _load(given[0])
    assert text.startswith("ex2.approx.ftz.f32"), "no stand-in for it"
    return torch.exp2(given[0])


def _least(a: Any, b: Any) -> torch.Tensor:
    return torch.minimum(torch.as_tensor(a), torch.as_tensor(b).to(torch.as_tensor(a).dtype))


def _most(a: Any, b: Any) -> torch.Tensor:
    return torch.maximum(torch.as_tensor(a), torch.as_tensor(b).to(torch.as_tensor(a).dtype))


def _where(condition: Any, a: Any, b: Any) -> torch.Tensor:
    return torch.where(torch.as_tensor(condition), torch.as_tensor(a), torch.as_tensor(b)).as_subclass(Numbers)


def _count(*bounds: Any) -> Iterator[torch.Tensor]:
    """`range`, of numbers as a kernel's."""
    return (torch.tensor(i).as_subclass(Numbers) for i in range(*map(int, bounds)))


def _nothing(*_: Any, **__: Any) -> None:
    return None


def _arrive(barrier: Barrier | Barriers, count: int, num_bytes: int = 0, pred: Any = True) -> None:
    if pred:
        _one(barrier).change(arrivals=count, num_bytes=num_bytes)


def _language(program: Sequence[int], grid: Sequence[int]) -> types.SimpleNamespace:
    """Stands in for `gl`, in one program of a grid."""
    layouts = "NVMMASharedLayout SwizzledSharedLayout BlockedLayout SliceLayout NVMMADistributedLayout DotOperandLayout"
    return types.SimpleNamespace(
        **dict.fromkeys(layouts.split(), _nothing),
        **{name: getattr(torch, name) for name in ("float16", "bfloat16", "float32", "int16", "int32", "int64")},
        **{name: getattr(torch, name) for name in ("exp", "exp2", "log", "log2", "rsqrt", "reshape")},
        constexpr=object, static_range=range, thread_barrier=_nothing, convert_layout=lambda x, layout: x,
        program_id=lambda i: torch.tensor(program[i]).as_subclass(Numbers),
        num_programs=lambda i: torch.tensor(grid[i]).as_subclass(Numbers),
        arange=lambda first, end, layout=None: torch.arange(first, end).as_subclass(Numbers),
        zeros=lambda shape, dtype, layout=None: torch.zeros(shape, dtype=dtype).as_subclass(Numbers),
        full=lambda shape, x, dtype, layout=None: torch.full(shape, x, dtype=dtype).as_subclass(Numbers),
        minimum=_least, maximum=_most, where=_where, sum=lambda x, axis: x.sum(axis), max=lambda x, axis: x.amax(axis),
        pointer_type=lambda dtype: dtype, permute=lambda x, order: x.permute(order),
        broadcast=lambda a, b: torch.broadcast_tensors(a, b),
        expand_dims=lambda x, axis: x.unsqueeze(axis), tuple=tuple, atomic_add=_add, cdiv=lambda a, b: -(-a // b),
        associative_scan=lambda x, axis, _: x.cumsum(axis), inline_asm_elementwise=_assembly,
        load=_load, store=_store, allocate_shared_memory=_allocate, warp_specialize=_side_by_side,
    )  # fmt: skip


_HOPPERS = {
    "mbarrier": types.SimpleNamespace(
        MBarrierLayout=_nothing, init=_init, wait=lambda barrier, parity: _one(barrier).wait(parity),
        expect=lambda barrier, num_bytes, pred=True: _arrive(barrier, 1, num_bytes, pred), arrive=_arrive,
    ),
    "tma": types.SimpleNamespace(
        async_copy_global_to_shared=_bring, async_copy_shared_to_global=_take, store_wait=_nothing
    ),
    "fence_async_shared": _nothing, "thread_barrier": _nothing, "warpgroup_mma": _product,
    "warpgroup_mma_wait": _wait, "mma_v2": _product, "unpack": _unpacked,
    "async_copy": types.SimpleNamespace(
        async_copy_global_to_shared=lambda to, pointer, mask=True: to.store(_load(pointer, mask)),
        mbarrier_arrive=lambda barrier, increment_count: _one(barrier).change(arrivals=32),  # a warp's threads
    ),
    "side_type": lambda form, side: getattr(torch, form.split()[1 + side]),
}  # fmt: skip


def _stand_in(function: Any, language: types.SimpleNamespace) -> Callable[..., Any]:
    """The Python function of a kernel's, with stand-ins for what it calls."""
    python = function.fn

    def replaced(name: str, value: Any) -> Any:
        if value is gl:
            return language
        if name in _HOPPERS:
            return _HOPPERS[name]
        if isinstance(value, gl.constexpr):
            return value.value
        return _stand_in(value, language) if hasattr(value, "fn") and name in python.__code__.co_names else value

    known = {name: replaced(name, value) for name, value in python.__globals__.items()}
    return types.FunctionType(python.__code__, {**known, "range": _count}, python.__name__, python.__defaults__)


class OnCpu:
    """A kernel to launch in the place of the GPU's: `kernel[grid](*arguments, **constants_and_options)`. Programs run
    one after another, or all at once where they wait for each other."""

    def __init__(self, kernel: Any, *, all_at_once: bool = False) -> None:
        self.function = kernel.function if isinstance(kernel, QuickKernel) else kernel
        self.all_at_once = all_at_once
        self.names = set(self.function.arg_names)

    def __getitem__(self, grid: Sequence[int]) -> Callable[..., None]:
        def launch(*given: Any, **more: Any) -> None:
            _has_failed.clear()
            seen = [self._seen(one) for one in given]
            constants = {name: value for name, value in more.items() if name in self.names}
            whole = [*grid, 1, 1][:3]
            places = [place[::-1] for place in product(*(range(n) for n in reversed(whole)))]
            programs = [partial(_stand_in(self.function, _language(place, whole)), **constants) for place in places]
            if self.all_at_once:
                _side_by_side([(program, seen) for program in programs])
                return
            for program in programs:
                program(*seen)

        return launch

    @staticmethod
    def _seen(given: Any) -> Any:
        if isinstance(given, TensorDescriptor):
            return Copied.of(given)
        return Pointer(given) if isinstance(given, torch.Tensor) else given
