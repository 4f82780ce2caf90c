"""The checks of compiled code find what they are for, in code made up for them."""

from __future__ import annotations

import pytest

from tests.kernels.compiled_code import Launch, fault_of, fault_of_stages

WAIT = "griddepcontrol.wait;"
STORE = "@%p1 st.global.b32 [ %rd1 + 0 ], { %r1 };"
LOAD = "ld.global.v4.b32 { %r1, %r2, %r3, %r4 }, [ %rd1 + 0 ];"
SENT = "st.global.v2.b64 [ %rd1 + 0 ], { %rd2, %rd3 };"
SENT_IN_PIECES = "st.global.v4.b32 [ %rd1 + 0 ], { %r2, %r3, %r4, %r5 };"
FOUND = "ld.volatile.global.v2.b64 { %rd4, %rd5 }, [ %rd1 + 0 ];"
FOUND_IN_PIECES = "ld.volatile.global.v4.b32 { %r4, %r5, %r6, %r7 }, [ %rd1 + 0 ];"
NARROW = "cp.async.ca.shared.global [ %r1 + 0 ], [ %rd1 + 0 ], 0x4, %r2;"


def fault(kernel: str, *lines: str, is_early: bool | None = True, **constants: object) -> str:
    launch = Launch(kernel, constants, set(), is_early, comes_early=bool(is_early))
    return fault_of(launch, "\n".join((".visible .entry kernel(", *lines))) or ""


def test_an_early_kernel_waits_before_it_touches_memory() -> None:
    assert not fault("some_kernel", WAIT, LOAD, STORE)
    assert "before it waits" in fault("some_kernel", LOAD, WAIT, STORE)
    assert "before it waits" in fault("some_kernel", "griddepcontrol.launch_dependents;", WAIT, STORE)
    assert not fault("rotated_decode_kernel", LOAD, WAIT, STORE)
    assert "before it waits" in fault("rotated_decode_kernel", STORE, WAIT)
    assert "EARLY is False" in fault("some_kernel", LOAD, STORE, is_early=False)
    assert not fault("causal_conv_kernel", LOAD, STORE, is_early=False)


def test_rows_are_copied_widely() -> None:
    assert "16 bytes" in fault("small_linear_kernel", WAIT, NARROW, STORE)
    assert not fault("some_kernel", WAIT, NARROW, STORE)
    assert "one by one" in fault("expand_kernel", WAIT, "ld.global.b16 %rs1, [ %rd1 ];", STORE, EVEN=True)


@pytest.mark.parametrize(
    ("sent", "found", "is_right"),
    [
        ([SENT], [FOUND] * 4, True),
        ([SENT_IN_PIECES], [FOUND] * 4, False),
        ([SENT], [FOUND_IN_PIECES] * 4, False),
        ([SENT], [FOUND] * 4 + [FOUND_IN_PIECES], False),
        ([SENT, SENT_IN_PIECES], [FOUND] * 8, False),
    ],
)
def test_words_of_ranks_are_stored_and_loaded_whole(sent: list[str], found: list[str], is_right: bool) -> None:
    assert (fault("sum_add_norm_kernel", WAIT, *sent, *found, RANKS=2) == "") == is_right


@pytest.mark.parametrize(
    ("line", "is_right"),
    [
        ("mul.rn.f32 %r1, %r2, %r3;", True),
        ("fma.rn.f32 %r1, %r2, %r3, %r4;", False),
        ("add.f32 %r1, %r2, %r3;", False),
    ],
)
def test_a_rotation_rounds_its_products(line: str, is_right: bool) -> None:
    """`add.f32` without a rounding is one that the assembler may join with the product before it."""
    assert (fault("rotate_heads_kernel", WAIT, line, STORE) == "") == is_right


Line = tuple[str, int, set[int]]  # an instruction, the scoreboard that it sets, those that it waits for
WAIT_FOR_STAGE: Line = ("SYNCS.PHASECHK.TRANS64.TRYWAIT P2, [R1+URZ+0x38600], R2", 0, set())
BARRIER: Line = ("BAR.SYNC.DEFER_BLOCKING 0x0, 0x80", 7, set())
ARRIVAL: Line = ("@!P0 SYNCS.ARRIVE.TRANS64.A1T0 RZ, [R1+URZ+0x38660], RZ", 7, set())
WORDS: Line = ("LDSM.16.M88.4 R8, [R41+UR13]", 1, set())
LAST_WORDS: Line = ("LDSM.16.M88.4 R12, [R41+UR13+0x800]", 2, set())
PRODUCT: Line = ("HMMA.16816.F32.BF16 R16, R8, R4, R16", 7, {1})
LAST_PRODUCT: Line = ("HMMA.16816.F32.BF16 R16, R12, R4, R16", 7, {2})
MEMORY: Line = ("MEMBAR.ALL.CTA", 7, set())
FENCE: Line = ("FENCE.VIEW.ASYNC.S", 3, set())
BEHIND_FENCE: Line = (BARRIER[0], 7, {3})
SCALE: Line = ("LDS R20, [R106+UR7]", 4, set())
VECTOR: Line = ("LDSM.16.M88.4 R24, [R44+UR8+0x30000]", 5, set())


def fault_of_lines(*lines: Line, form: str = "int8") -> str:
    """As cuobjdump shows them: an instruction, and in its second word's last bits what it sets and waits for."""
    shown = [
        f"\t/*{place * 16:04x}*/    {text} ;  /* 0x{0:016x} */\n\t/* 0x{_control(sets, waits) << 41:016x} */\n"
        for place, (text, sets, waits) in enumerate(lines)
    ]
    sizes = {"FORM": form, "STAGES": 12, "GROUP": 16, "CL": 8}
    return fault_of_stages(Launch("whole_step_kernel", sizes, set(), None, False), "".join(shown)) or ""


def _control(sets: int, waits: set[int]) -> int:
    return 1 | sets << 5 | 7 << 8 | sum(1 << one for one in waits) << 11


def test_a_stage_is_let_go_when_its_loads_have_come() -> None:
    loads = (WAIT_FOR_STAGE, WORDS, LAST_WORDS, PRODUCT)
    assert not fault_of_lines(*loads, LAST_PRODUCT, BARRIER, ARRIVAL)
    assert not fault_of_lines(*loads, (BARRIER[0], 7, {2}), ARRIVAL)
    assert "at 0060 while LDSM.16.M88.4 R12" in fault_of_lines(*loads, BARRIER, LAST_PRODUCT, ARRIVAL)
    assert "at 0050 while LDSM.16.M88.4 R8" in fault_of_lines(*loads[:3], LAST_WORDS, BARRIER, ARRIVAL, PRODUCT)
    assert fault_of_lines()


def test_loads_come_in_their_order() -> None:
    unmarked: Line = (WORDS[0], 7, set())
    assert not fault_of_lines(WAIT_FOR_STAGE, unmarked, LAST_WORDS, LAST_PRODUCT, BARRIER, ARRIVAL)
    assert "R8" in fault_of_lines(WAIT_FOR_STAGE, LAST_WORDS, unmarked, LAST_PRODUCT, BARRIER, ARRIVAL)


def test_a_fence_waits_for_loads_where_the_barrier_waits_for_it() -> None:
    loads = (WAIT_FOR_STAGE, WORDS, LAST_WORDS)
    assert not fault_of_lines(*loads, MEMORY, FENCE, BEHIND_FENCE, ARRIVAL)
    assert "FENCE" in fault_of_lines(*loads, MEMORY, FENCE, BARRIER, ARRIVAL)
    assert "R12" in fault_of_lines(*loads[:2], MEMORY, FENCE, LAST_WORDS, BEHIND_FENCE, ARRIVAL)


@pytest.mark.parametrize("load", [SCALE, VECTOR])
def test_what_no_stage_holds_may_be_on_its_way(load: Line) -> None:
    """With weights of 4 bits stages hold scales, too."""
    lines = (WAIT_FOR_STAGE, WORDS, PRODUCT, load, BARRIER, ARRIVAL)
    assert not fault_of_lines(*lines)
    assert load[0] in fault_of_lines(*lines, form="nibble float16")


def test_one_warp_arrives_for_itself() -> None:
    assert not fault_of_lines(BARRIER, WAIT_FOR_STAGE, WORDS, ARRIVAL)
