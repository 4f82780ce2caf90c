# mypy: disable-error-code="no-untyped-def, untyped-decorator"
"""How kernels read tiles of stored weights: one function for all forms, which is compiled for one.

A block of a row is BK inputs, stored in `parts_of(FORM)` parts: element j of the block holds input j in its lowest
bits, input BK / parts + j in the next, and so on. So each part of a tile of elements, [BN, BK / parts], comes out of it
with a shift, and is multiplied by inputs that lie side by side: nothing is moved between threads.

Elements are int16, four numbers of 4 bits or two of 8, and NVIDIA's GPUs unpack two elements, a register, at a time:
bits go into the mantissa of a number whose exponent makes the lowest of them worth 1 (Kim et al., 2022), or where a
float has such bits, and one more instruction takes away what is too much.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

# NVIDIA's assembly. The interpreter and AMD's GPUs run instead what a compiler turns into more instructions.
BY_ASSEMBLY = tl.constexpr(not triton.knobs.runtime.interpret and torch.version.hip is None)

# Constants by type. Of a nibble: what is put over it, 1, -(that + 8). Of floats: how far the lowest part is shifted to
# the left, where its exponent and mantissa are then, what sets the exponent right. Of int8: what is put over 7 bits,
# and -1.
_NIBBLE = {"bf16": (0x4300, 0x3F80, 0xC308), "f16": (0x6400, 0x3C00, 0xE408)}
_E2M1 = {"bf16": (6, 0x01C0, 0x7E80), "f16": (9, 0x0E00, 0x7400)}
_E4M3 = {"bf16": (4, 0x07F0, 0x7B80), "f16": (7, 0x3F80, 0x5C00)}
_INT8 = {"bf16": (0x4300, 0xBF80), "f16": (0x6400, 0xBC00)}


@triton.constexpr_function
def parts_of(form):
    """Parts of a block."""
    return 2 if form in ("int8", "e4m3") else 4


def _nibble(kind: str, part: int) -> str:
    over, one, less = _NIBBLE[kind]
    return f"""
        shr.u32 a, $1, {4 * part};
        lop3.b32 a, a, 0x000F000F, {_twice(over)}, 0xEA;
        mov.b32 b, {_twice(one)};
        mov.b32 c, {_twice(less)};
        fma.rn.{kind}x2 $0, a, b, c;"""


def _e2m1(kind: str, part: int) -> str:
    shift, mask, factor = _E2M1[kind]
    return f"""
        {_shifted("a", 12 - 4 * part)}
        {_shifted("b", shift - 4 * part)}
        and.b32 a, a, 0x80008000;
        lop3.b32 a, b, {_twice(mask)}, a, 0xEA;
        mov.b32 b, {_twice(factor)};
        mov.b32 c, 0x80008000;
        fma.rn.{kind}x2 $0, a, b, c;"""


def _e4m3(kind: str, part: int) -> str:
    shift, mask, factor = _E4M3[kind]
    return f"""
        {_shifted("a", 8 - 8 * part)}
        {_shifted("b", shift - 8 * part)}
        and.b32 a, a, 0x80008000;
        lop3.b32 a, b, {_twice(mask)}, a, 0xEA;
        mov.b32 b, {_twice(factor)};
        mov.b32 c, 0x80008000;
        fma.rn.{kind}x2 $0, a, b, c;"""


def _int8(kind: str, part: int) -> str:
    """-128 .. 127 are 7 bits over 128 (1024 in f16), less that, and 128 less where they are negative."""
    over, minus_one = _INT8[kind]
    return f"""
        shr.u32 a, $1, {8 * part};
        lop3.b32 b, a, 0x00800080, {_twice(over)}, 0xEA;
        lop3.b32 a, a, 0x007F007F, {_twice(over)}, 0xEA;
        mov.b32 c, {_twice(minus_one)};
        fma.rn.{kind}x2 $0, b, c, a;"""


def _twice(half: int) -> str:
    return f"0x{half:04X}{half:04X}"


def _shifted(to: str, left: int) -> str:
    return f"shl.b32 {to}, $1, {left};" if left >= 0 else f"shr.u32 {to}, $1, {-left};"


_MAKERS = {"nibble": (_nibble, 4), "e2m1": (_e2m1, 4), "int8": (_int8, 2), "e4m3": (_e4m3, 2)}
# Instructions of NVIDIA's for two elements, by form, type and part.
_ASSEMBLY = tl.constexpr(
    {
        (form, kind, part): "{\n.reg .b32 a, b, c, d;" + make(kind, part) + "\n}"
        for form, (make, parts) in _MAKERS.items()
        for kind in ("bf16", "f16")
        for part in range(parts)
    }
)


@triton.constexpr_function
def assembly(table, form, dtype, part):
    """The entry of _ASSEMBLY."""
    return table[(form, "bf16" if dtype.name == "bf16" else "f16", part)]


@triton.jit
def unpack_part(b_words, p_table, PART: tl.constexpr, FORM: tl.constexpr, DTYPE: tl.constexpr):
    """Part PART of the elements b_words [BN, BK / parts], as numbers of DTYPE without their scales. p_table: of form
    "table" its 16 entries, or [BN, 1] pointers to those of each row."""
    BITS: tl.constexpr = 16 // parts_of(FORM)
    b_codes = (b_words.to(tl.int32) >> (BITS * PART)) & ((1 << BITS) - 1)
    if FORM == "table":
        b_part = tl.load(p_table + b_codes).to(DTYPE)
    elif BY_ASSEMBLY and DTYPE.primitive_bitwidth == 16:
        ASM: tl.constexpr = assembly(_ASSEMBLY, FORM, DTYPE, PART)
        b_bits = tl.inline_asm_elementwise(ASM, "=r,r", [b_words], dtype=tl.int16, is_pure=True, pack=2)
        b_part = b_bits.to(DTYPE, bitcast=True)
    elif FORM == "nibble":
        b_part = (b_codes - 8).to(DTYPE)
    elif FORM == "int8":
        b_part = ((b_codes ^ 128) - 128).to(DTYPE)
    elif FORM == "e4m3":
        b_part = _small_float(b_codes, 4, 3).to(DTYPE)
    else:
        b_part = _small_float(b_codes, 2, 1).to(DTYPE)
    return b_part


@triton.jit
def _small_float(b_codes, EXPONENT: tl.constexpr, MANTISSA: tl.constexpr):
    """fp32 of the numbers that the lowest bits code: a sign, EXPONENT bits, MANTISSA bits; no infinities."""
    SIZE: tl.constexpr = EXPONENT + MANTISSA
    b_value = ((b_codes & ((1 << SIZE) - 1)) << (23 - MANTISSA)).to(tl.float32, bitcast=True)
    b_value *= tl.exp2(128.0 - (1 << (EXPONENT - 1)))
    return tl.where((b_codes >> SIZE) == 1, -b_value, b_value)
