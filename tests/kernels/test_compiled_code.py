"""The checks of compiled code find what they are for, in code made up for them."""

from __future__ import annotations

import pytest

from tests.kernels.compiled_code import Launch, fault_of

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
