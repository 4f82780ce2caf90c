"""Compile the Triton kernels for a GPU on a machine without one, with the arguments that models call them with.

    env -u TRITON_INTERPRET python -m tests.kernels.compile_for_gpu [h200 | gfx942] [how many, a seed]

gfx942 is AMD's MI300, for which nothing of files for Hopper is compiled. All kernels, or some that the seed draws.

The interpreter accepts programs that the compiler refuses (types, shapes, bf16). Launches are caught before the driver
and compiled ahead of time instead, down to the GPU's binary; for an H200 as launches that may come early
(app/kernels/launch.py). Prints shared memory, registers and spilled bytes of each kernel, and of an early one that it
waits before it touches global memory. Exits 1 if a kernel does not compile, has an option that the GPU's compiler does
not know, does not wait in time, lets memory go that it may still read, or asks for more shared memory than there is.

What one version of Triton compiles another may refuse: run it with both ends of the range that pyproject.toml allows.
"""

from __future__ import annotations

import random
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.compiler.compiler import make_backend
from triton.experimental.gluon._runtime import GluonASTSource
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.runtime.jit import JITFunction
from triton.tools import tensor_descriptor

from app.kernels import launch
from app.kernels.attention import triton_tile_fp8
from app.kernels.gemm import triton_forms
from app.kernels.sampling import triton_sample
from tests.kernels import gpu_calls as of_several
from tests.kernels.attention import gpu_calls as of_attention
from tests.kernels.compiled_code import LET_STAGES_GO, Launch, fault_of, fault_of_stages
from tests.kernels.drafts import gpu_calls as of_drafts
from tests.kernels.fused import gpu_calls as of_fused
from tests.kernels.gemm import gpu_calls as of_gemm
from tests.kernels.lora import gpu_calls as of_lora
from tests.kernels.mla import gpu_calls as of_mla
from tests.kernels.moe import gpu_calls as of_moe
from tests.kernels.recurrent import gpu_calls as of_recurrent
from tests.kernels.rows import gpu_calls as of_rows
from tests.kernels.sampling import gpu_calls as of_sampling
from tests.kernels.target_gpu import IS_AMD
from tests.kernels.whole_step import gpu_calls as of_whole_step

FAMILIES = (
    of_sampling,
    of_rows,
    of_drafts,
    of_fused,
    of_attention,
    of_mla,
    of_gemm,
    of_lora,
    of_recurrent,
    of_moe,
    of_whole_step,
    of_several,
)
TARGET = GPUTarget("hip", "gfx942", 64) if IS_AMD else GPUTarget("cuda", 90, 32)
KNOWN = vars(make_backend(TARGET).parse_options({})).keys()
OPTIONS = {"num_warps", "num_stages", "maxnreg", "launch_pdl", "launch_cooperative_grid", "enable_fp_fusion"}
EARLY_LAUNCH = {"EARLY": True, "launch_pdl": True}
SHARED_BYTES = 65_536 if IS_AMD else 232_448  # a program's at most
TYPES = {
    torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16", torch.float8_e4m3fn: "fp8e4nv",
    torch.int8: "i8", torch.bool: "i1", torch.int16: "i16", torch.int32: "i32", torch.int64: "i64",
}  # fmt: skip
ALIGNED = [["tt.divisibility", 16]]
kernels: dict[tuple[Any, ...], tuple[ASTSource, dict[str, Any], bool | None]] = {}


def compile_instead(kernel: Any, *arguments: Any, grid: Any, warmup: bool = False, **keywords: Any) -> None:
    """Stands in for JITFunction.run."""
    options = {name: value for name, value in keywords.items() if name in OPTIONS}
    values = dict(zip((p.name for p in kernel.params), arguments, strict=False)) | keywords
    signature: dict[str, str] = {}
    constants: dict[tuple[int, ...], Any] = {}
    attributes: dict[tuple[int, ...], Any] = {}
    for index, parameter in enumerate(kernel.params):
        value = values[parameter.name]
        kind, aligned = type_of(value, parameter.is_constexpr, parameter.do_not_specialize)
        aligned = aligned and not parameter.do_not_specialize_on_alignment
        signature[parameter.name] = kind
        if kind == "constexpr":
            constants[(index,)] = value
        if aligned:
            attributes[(index,)] = ALIGNED
    key = (kernel.__name__, *signature.items(), *map(str, constants.items()), *options.items())
    if key not in kernels:
        source = GluonASTSource if kernel.is_gluon() else ASTSource
        kernels[key] = source(kernel, signature, constants, attributes), options, values.get("EARLY")


def type_of(value: Any, is_constexpr: bool, do_not_specialize: bool) -> tuple[str, bool]:
    """(the type as the compiler writes it, whether it is known to be a multiple of 16)."""
    is_one = isinstance(value, int) and value == 1 and not do_not_specialize
    if is_constexpr or value is None or is_one:
        return "constexpr", False
    if isinstance(value, TensorDescriptor):
        return f"tensordesc<{TYPES[value.base.dtype]}{list(value.block_shape)},{value.layout!r}>", False
    if isinstance(value, tensor_descriptor.TensorDescriptor):
        return f"tensordesc<{TYPES[value.base.dtype]}{list(value.block_shape)}>", False
    if isinstance(value, torch.Tensor):
        return f"*{TYPES[value.dtype]}", True
    if isinstance(value, int):
        return "i32" if abs(value) < 1 << 31 else "i64", value % 16 == 0 and not do_not_specialize
    assert isinstance(value, float), value
    return "fp32", False


def compiled(source: ASTSource, options: dict[str, Any], is_early: bool | None) -> str:
    """Shared memory, registers and stack, or what is wrong. is_early: the kernel's EARLY; None: it has none."""
    if unknown := options.keys() - KNOWN:
        return f"FAILED launched with {sorted(unknown)}, which this GPU's compiler does not know"
    try:
        kernel = triton.compile(source, target=TARGET, options=options)
    except Exception as error:
        return f"FAILED {type(error).__name__}: {error}"
    if kernel.metadata.shared > SHARED_BYTES:
        return f"FAILED {kernel.metadata.shared} bytes of shared memory"
    if IS_AMD:
        registers = re.findall(r"\.(?:vgpr|sgpr|vgpr_spill)_count:\s+\d+", kernel.asm["amdgcn"])
        return f"shared {kernel.metadata.shared}, {' '.join(registers)}, {len(kernel.asm['hsaco'])} bytes"
    launch = called(source, options, is_early)
    if fault := fault_of(launch, kernel.asm["ptx"]):
        return f"FAILED {fault}"
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        usage = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=False).stdout
        if launch.kernel in LET_STAGES_GO:
            sass = subprocess.run([tool, "-sass", file.name], capture_output=True, text=True, check=False).stdout
            if fault := fault_of_stages(launch, sass):
                return f"FAILED {fault}"
    found = re.search(r"REG:(\d+) STACK:(\d+)", usage)
    waits = ", waits first" if is_early else ""
    return f"shared {kernel.metadata.shared}, {found.group(0) if found else 'usage unknown'}{waits}"


def called(source: ASTSource, options: dict[str, Any], is_early: bool | None) -> Launch:
    """What the checks of its code ask of a launch."""
    names = [parameter.name for parameter in source.fn.params]
    constants = {names[i]: value for (i,), value in source.constants.items()}
    given = {name for name in names if source.signature.get(name, "constexpr") != "constexpr"}
    return Launch(source.fn.__name__, constants, given, is_early, comes_early=bool(options.get("launch_pdl")))


def stand_in(name: str, answer: Any) -> None:
    """What the target's GPU would answer, for a CPU's tensors too: in every module that has imported the function."""
    function = getattr(launch, name)
    for module in list(sys.modules.values()):
        if getattr(module, name, None) is function:
            setattr(module, name, lambda asked: answer)


def found(calls: list[Callable[[], None]]) -> list[tuple[ASTSource, dict[str, Any], bool | None]]:
    """The kernels that the calls launch; or of as many calls as the command line asks for, one of each."""
    numbers = [int(argument) for argument in sys.argv[1:] if argument.isdigit()]
    if not numbers:
        for call in calls:
            call()
        return list(kernels.values())
    count, rng, chosen = numbers[0], random.Random(numbers[1]), []
    for call in rng.sample(calls, count):
        kernels.clear()
        call()
        chosen.append(rng.choice(list(kernels.values())))
    return chosen


def compiled_aloud(source: ASTSource, options: dict[str, Any], is_early: bool | None) -> str:
    """As `compiled`, and told."""
    result = compiled(source, options, is_early)
    print(f"{source.fn.__name__:28s} {options} {result}", flush=True)
    return result


def all_calls() -> list[Callable[[], None]]:
    """What models call kernels with."""
    return [call for family in FAMILIES for call in family.gpu_calls()]


def main() -> int:
    """Return 1 if a kernel failed."""
    JITFunction.run = compile_instead
    stand_in("shared_memory", SHARED_BYTES)
    if IS_AMD:
        stand_in("register_limit", {})
        torch.version.hip = "7.0"  # who asks is AMD's
        triton_tile_fp8._BY_ASSEMBLY = triton_forms.BY_ASSEMBLY = triton_sample.BY_ASSEMBLY = tl.constexpr(False)
    else:
        stand_in("early_launch", EARLY_LAUNCH)
    results = [compiled_aloud(*kernel) for kernel in found(all_calls())]
    failed = [result for result in results if result.startswith("FAILED")]
    num_early = sum(result.endswith("waits first") for result in results)
    print(f"each must fit {SHARED_BYTES} bytes of shared memory; {num_early} come early, and must wait first")
    print(f"{len(results)} kernels, {len(failed)} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
