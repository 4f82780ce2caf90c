# mypy: disable-error-code="no-untyped-def, untyped-decorator"
"""Reads tiles of stored weights in kernels: one function for all forms, which is compiled for one.

A block of a row is BK inputs, stored in `parts_of(FORM)` parts: element j of the block holds input j in its lowest
bits, input BK / parts + j in the next, and so on. So each part of a tile of elements, [BN, BK / parts], comes out of it
with a shift, and is multiplied by inputs that lie side by side: nothing is moved between threads.

Elements are int16, four numbers of 4 bits or two of 8, and NVIDIA's GPUs unpack two elements, a register, at a time:
bits go into the mantissa of a number whose exponent makes the lowest of them worth 1 (Kim et al., 2022), or where a
float has such bits, and one more instruction takes away what is too much.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import triton
import triton.language as tl

from app.kernels.gemm.stored import Form, bit_moves, code_bits

# NVIDIA's assembly. The interpreter and AMD's GPUs run instead what a compiler turns into more instructions.
BY_ASSEMBLY = tl.constexpr(not triton.knobs.runtime.interpret and torch.version.hip is None)

# Constants by type. Of a nibble: what is put over it, 1, -(that + 8). Of floats: where their bits go, lowest first, and
# what sets the exponent right. Of int8: what is put over 7 bits, and -1.
_NIBBLE = {"bf16": (0x4300, 0x3F80, 0xC308), "f16": (0x6400, 0x3C00, 0xE408)}
_FLOATS: dict[tuple[Form, str], tuple[tuple[int, ...], int]] = {
    ("e2m1", "bf16"): ((6, 7, 8, 15), 0x7E80),
    ("e2m1", "f16"): ((9, 10, 11, 15), 0x7400),
    ("e4m3", "bf16"): ((4, 5, 6, 7, 8, 9, 10, 15), 0x7B80),
    ("e4m3", "f16"): ((7, 8, 9, 10, 11, 12, 13, 15), 0x5C00),
}
_INT8 = {"bf16": (0x4300, 0xBF80), "f16": (0x6400, 0xBC00)}


# Numbers of floats whose exponents are not set right are smaller by two to the power of so much; x is multiplied by one
# factor, and the sums by the other: neither leaves the type's range then, unless x is beyond 2^63 or below 2^-60.
RAW_EXPONENTS = tl.constexpr(
    {("e2m1", "bf16"): (64, 62), ("e4m3", "bf16"): (64, 56), ("e2m1", "f16"): (0, 14), ("e4m3", "f16"): (0, 8)}
)


@triton.constexpr_function
def raw_exponent(table, form, dtype, which):
    """That of x (0), or of sums (1); 0 where there is none."""
    return table.get((form, "bf16" if dtype.name == "bf16" else "f16"), (0, 0))[which]


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


def _raw(form: Form, kind: str, part: int, to: str = "$0") -> str:
    """Bits go to where the type has them: numbers that are too small (RAW_EXPONENTS)."""
    steps, moves = [], bit_moves(code_bits(form, part), _FLOATS[form, kind][0])
    for i, (left, mask) in enumerate(moves.items()):
        moved, target = "b" if left else "$1", to if i + 1 == len(moves) else "a"
        steps.append(_shifted("b", left) if left else "")
        steps.append(f"{'lop3' if i else 'and'}.b32 {target}, {moved}, {_twice(mask)}{', a, 0xEA' if i else ''};")
    return "\n".join(steps)


def _float(form: Form, kind: str, part: int) -> str:
    """The exponent set right."""
    return (
        _raw(form, kind, part, to="a")
        + f"""
        mov.b32 b, {_twice(_FLOATS[form, kind][1])};
        mov.b32 c, 0x80008000;
        fma.rn.{kind}x2 $0, a, b, c;"""
    )


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


def _moved(kind: str, part: int) -> str:
    return f"""
        shr.u32 a, $1, {4 * part};
        lop3.b32 $0, a, 0x000F000F, {_twice(_NIBBLE[kind][0])}, 0xEA;"""


def _look_up() -> str:
    """$0..$3: the entries of all parts of two elements, $4. The higher bytes of 16 entries lie in $5, $7, $9 and $11,
    the lower ones in $13 to $19 (an argument has two registers, here the same). A permutation picks bytes of eight
    entries by three bits of four codes; the fourth bit chooses between two of them."""
    lines = ["and.b32 s, $4, 0x77777777;", "shr.u32 t, $4, 1;", "and.b32 t, t, 0x44444444;"]
    for half in "ef":
        lines.append("prmt.b32 k, 0, 0xFFFFFFFF, t;")
        for name, first in (("h", 5), ("l", 13)):
            e0, e1, e2, e3 = (f"${first + 2 * i}" for i in range(4))
            lines += [
                f"prmt.b32 a, {e0}, {e1}, s;", f"prmt.b32 b, {e2}, {e3}, s;", f"lop3.b32 {name}, k, b, a, 0xCA;",
            ]  # fmt: skip
        lines += [f"prmt.b32 {half}0, l, h, 0x5140;", f"prmt.b32 {half}1, l, h, 0x7362;"]
        if half == "e":
            lines += ["shr.u32 s, s, 16;", "shr.u32 t, t, 16;"]
    lines += [f"prmt.b32 ${2 * i + j}, e{i}, f{i}, {('0x5410', '0x7632')[j]};" for i in (0, 1) for j in (0, 1)]
    return "{\n.reg .b32 a, b, s, t, k, h, l, e0, e1, f0, f1;\n" + "\n".join(lines) + "\n}"


LOOK_UP = tl.constexpr(_look_up())
LOOK_UP_CONSTRAINTS = tl.constexpr(",".join(["=&r"] * 4 + ["r"] * 17))
_MAKERS: dict[str, Callable[[str, int], str]] = {
    "nibble": _nibble, "moved": _moved, "e2m1": partial(_float, "e2m1"), "int8": _int8, "e4m3": partial(_float, "e4m3"),
    "raw e2m1": partial(_raw, "e2m1"), "raw e4m3": partial(_raw, "e4m3"),
}  # fmt: skip
# Instructions of NVIDIA's for two elements, by form, type and part.
ASSEMBLY = tl.constexpr(
    {
        (form, kind, part): "{\n.reg .b32 a, b, c;" + make(kind, part) + "\n}"
        for form, make in _MAKERS.items()
        for kind in ("bf16", "f16")
        for part in range(2 if form.endswith(("int8", "e4m3")) else 4)
    }
)


# (how far to the right, which bits then) of the two steps that bring a code of e2m1 together, by part.
_MOVES = tl.constexpr(
    {
        (part, step): (-left, mask)
        for part in range(4)
        for step, (left, mask) in enumerate(bit_moves(code_bits("e2m1", part), range(4)).items())
    }
)


@triton.constexpr_function
def assembly(table, form, dtype, part, raw):
    """The entry of ASSEMBLY."""
    return table[("raw " + form if raw else form, "bf16" if dtype.name == "bf16" else "f16", part)]


@triton.constexpr_function
def moved_by(dtype):
    """Returns what form "moved" makes of a nibble, less what it is worth."""
    return 136.0 if dtype.name == "bf16" else 1032.0


@triton.constexpr_function
def move(table, part, step):
    """The entry of _MOVES."""
    return table[(part, step)]


@triton.jit
def moved_bits(b_words, PART: tl.constexpr):
    """The codes of part PART of e2m1."""
    FIRST: tl.constexpr = move(_MOVES, PART, 0)
    SECOND: tl.constexpr = move(_MOVES, PART, 1)
    return ((b_words >> FIRST[0]) & FIRST[1]) | ((b_words >> SECOND[0]) & SECOND[1])


@triton.jit
def exponent_scale(b_words, part):
    """fp32 of the scales of part `part` of four (`exponent_words`)."""
    return (((b_words >> (8 * part)) & 0xFF) << 23).to(tl.float32, bitcast=True)


@triton.jit
def unpack_part(
    b_words, p_table, PART: tl.constexpr, FORM: tl.constexpr, DTYPE: tl.constexpr, RAW: tl.constexpr = False
):
    """Part PART of the elements b_words [BN, BK / parts], as numbers of DTYPE without their scales. p_table: of form
    "table" its 16 entries, or [BN, 1] pointers to those of each row."""
    BITS: tl.constexpr = 16 // parts_of(FORM)
    if FORM == "e2m1":
        b_codes = moved_bits(b_words.to(tl.int32), PART)
    else:
        b_codes = (b_words.to(tl.int32) >> (BITS * PART)) & ((1 << BITS) - 1)
    if FORM == "table":
        b_part = tl.load(p_table + b_codes).to(DTYPE)
    elif BY_ASSEMBLY and DTYPE.primitive_bitwidth == 16:
        ASM: tl.constexpr = assembly(ASSEMBLY, FORM, DTYPE, PART, RAW)
        b_bits = tl.inline_asm_elementwise(ASM, "=r,r", [b_words], dtype=tl.int16, is_pure=True, pack=2)
        b_part = b_bits.to(DTYPE, bitcast=True)
    elif FORM == "nibble":
        b_part = (b_codes - 8).to(DTYPE)
    elif FORM == "int8":
        b_part = ((b_codes ^ 128) - 128).to(DTYPE)
    elif FORM == "e4m3":
        b_part = raw_or_not(_small_float(b_codes, 4, 3), FORM, DTYPE, RAW).to(DTYPE)
    else:
        b_part = raw_or_not(_small_float(b_codes, 2, 1), FORM, DTYPE, RAW).to(DTYPE)
    return b_part


@triton.jit
def raw_or_not(b_part, FORM: tl.constexpr, DTYPE: tl.constexpr, RAW: tl.constexpr):
    """RAW: as small as without an exponent set right."""
    if RAW:
        UP: tl.constexpr = raw_exponent(RAW_EXPONENTS, FORM, DTYPE, 0) + raw_exponent(RAW_EXPONENTS, FORM, DTYPE, 1)
        b_part *= 2.0 ** (-UP)
    return b_part


@triton.jit
def _small_float(b_codes, EXPONENT: tl.constexpr, MANTISSA: tl.constexpr):
    """fp32 of the numbers that the lowest bits code: a sign, EXPONENT bits, MANTISSA bits; no infinities."""
    SIZE: tl.constexpr = EXPONENT + MANTISSA
    b_value = ((b_codes & ((1 << SIZE) - 1)) << (23 - MANTISSA)).to(tl.float32, bitcast=True)
    b_value *= tl.exp2(128.0 - (1 << (EXPONENT - 1)))
    return tl.where((b_codes >> SIZE) == 1, -b_value, b_value)
