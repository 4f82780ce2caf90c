"""Finds in a kernel's code for an H200 (PTX) what its source promised and the compiler may have made otherwise."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

# Kernels that begin to read weights, or states, or where a step's requests begin, which the kernel before does not
# write, before they wait.
READ_FIRST = {
    "streamed_linear_kernel", "held_linear_kernel", "encoded_kernel", "add_layer_norm_kernel", "plain_linear_kernel",
    "delta_step_kernel", "delta_chunk_gluon_kernel", "delta_scan_gluon_kernel", "sum_add_norm_kernel",
    "rotated_decode_kernel",
}  # fmt: skip
# Those that come early in steps of few requests alone.
MAY_COME_LATE = {"causal_conv_kernel", "delta_step_kernel"}
# Those that wait late where they follow a launch that only adds to what they read (kernels/gemm/triton_low_rank.py), or
# that reads the same.
WAIT_LATE = {"small_linear_kernel", "small_linear_add_kernel", "packed_linear_kernel"}
# A call's callee may do any of it.
GLOBAL_ACCESS = re.compile(r"^\s*(?:@!?%\w+\s+)?(?:[\w.:]+\.global\b|ld\.volatile|cp\.async|call\b)", re.MULTILINE)
GLOBAL_WRITE = re.compile(r"^\s*(?:@!?%\w+\s+)?(?:st|atom|red)[\w.:]*\.global\b", re.MULTILINE)
# Kernels that are bound by how fast they copy rows: 16 bytes at a time, or the compiler lacks a hint.
COPY_WIDELY = {"small_linear_kernel", "small_linear_add_kernel", "small_linear_sum_kernel"}
# Kernels that read and write rows as they go: 16 bytes at a time, too, where their sizes allow it.
ACCESS_WIDELY = {"expand_kernel"}
NARROW_ACCESS = re.compile(r"(?:ld|st)\.global\.b16")
NARROW_COPY = re.compile(r"cp\.async\.ca\.shared\.global [^,]+,[^,]+, 0x[48],")
# Kernels whose words of eight bytes another rank reads while they are written (kernels/fused/triton_ranks.py).
SEND_WORDS = {"sum_add_norm_kernel", "small_linear_sum_kernel"}
WORD_STORE = re.compile(r"\bst\.global(?:\.v(\d))?\.b64\b")
WORD_LOAD = re.compile(r"\bld\.volatile\.global(?:\.v(\d))?\.b64\b")
ANY_VOLATILE = re.compile(r"\b(?:ld|st)\.volatile\b")
# Kernels whose heads must not depend on their neighbours in a tile: no product is left unrounded (kernels/launch.py).
ROUND_PRODUCTS = {"rotate_and_write_kernel", "rotate_heads_kernel", "rotate_and_write_latent_kernel"}
JOINED = re.compile(r"\bfma\.|\b(?:mul|add|sub)\.(?:ftz\.)?f32\b")

# Kernels that let stages go that plain loads have read.
LET_STAGES_GO = {
    "whole_step_kernel", "sinks_step_kernel", "latent_step_kernel", "rows_step_kernel", "decode_gluon_kernel",
}  # fmt: skip
INSTRUCTION = re.compile(r"/\*([0-9a-f]{4,})\*/\s+([^;\n]+?)\s*;\s+/\* 0x[0-9a-f]{16} \*/\s+/\* 0x([0-9a-f]{16}) \*/")
ARRIVAL = "SYNCS.ARRIVE.TRANS64.A1T0"
BARRIER = "BAR.SYNC"
WAIT_OF_STAGE = "SYNCS.PHASECHK"
PROXY_FENCE = "FENCE.VIEW.ASYNC"
SHARED_LOAD = re.compile(r"(?<!@!PT )\bLDSM?\b")  # one that is never done is padding
KEPT_LOAD = re.compile(r"\bLDS R")  # of a scale of a whole product
BEHIND = re.compile(r"\+0x([0-9a-f]+)\]")


@dataclass(slots=True, frozen=True)
class Launch:
    """A kernel as it was launched."""

    kernel: str
    constants: dict[str, Any]
    given: set[str]  # arguments that are no constants, None neither
    is_early: bool | None  # the kernel's EARLY; None: it has none
    comes_early: bool  # whether it is launched so


def fault_of(launch: Launch, ptx: str) -> str | None:
    """Says what is wrong with the code."""
    is_late = launch.kernel in WAIT_LATE and (launch.constants.get("BESIDE") is True or "p_hidden" in launch.given)
    # What adapters add is too small for wide copies.
    if launch.kernel in COPY_WIDELY and not is_late and NARROW_COPY.search(ptx):
        return "copies less than 16 bytes at a time"
    if launch.kernel in ACCESS_WIDELY and launch.constants.get("EVEN") is True and NARROW_ACCESS.search(ptx):
        return "reads or writes numbers one by one"
    if launch.kernel in SEND_WORDS and not has_whole_words(ptx, launch.constants["RANKS"]):
        return "stores or loads words of ranks in pieces"
    if launch.kernel in ROUND_PRODUCTS and JOINED.search(ptx):
        return "leaves a product unrounded, or may"
    return _fault_of_waits(launch, ptx, is_late)


def _fault_of_waits(launch: Launch, ptx: str, is_late: bool) -> str | None:
    comes_late = launch.is_early is False and launch.kernel in MAY_COME_LATE and not launch.comes_early
    if comes_late or (launch.is_early is None and not launch.comes_early):
        return None
    if not (launch.is_early and launch.comes_early):
        return f"EARLY is {launch.is_early}, launch_pdl {launch.comes_early}"
    if is_late:
        return None if ptx.count("griddepcontrol.wait") == 1 else "does not wait, or twice"
    access = GLOBAL_WRITE if launch.kernel in READ_FIRST else GLOBAL_ACCESS
    if waits_first(ptx, access):
        return None
    return "touches global memory, or lets the next kernel begin, before it waits for the kernel before"


def waits_first(ptx: str, access: re.Pattern[str]) -> bool:
    """Whether the entry, which may come after functions that it calls, waits before any such access, and before it
    lets the next kernel begin."""
    entry = ptx[ptx.index(".entry") :].split(".func", 1)[0]
    wait, found = entry.find("griddepcontrol.wait"), access.search(entry)
    trigger = entry.find("griddepcontrol.launch_dependents")
    return wait >= 0 and found is not None and wait < found.start() and (trigger < 0 or trigger > wait)


def has_whole_words(ptx: str, num_ranks: int) -> bool:
    """Whether each word goes to each other rank by one store, and is loaded by one load wherever it is looked for: once
    in every rank's box, and once more in the loop behind. A vector of words is as good: each is stored whole."""
    stored, loaded = _words(WORD_STORE, ptx), _words(WORD_LOAD, ptx)
    is_whole = len(WORD_LOAD.findall(ptx)) == len(ANY_VOLATILE.findall(ptx))
    return is_whole and stored > 0 and loaded * (num_ranks - 1) == 2 * stored * num_ranks


def _words(access: re.Pattern[str], ptx: str) -> int:
    return sum(int(width or 1) for width in access.findall(ptx))


def fault_of_stages(launch: Launch, sass: str) -> str | None:
    """Says where a stage of shared memory is let go to the copy engine while a warp's load of it may be on its way:
    the threads' barrier in front of an arrival is passed before the load's scoreboard was waited for, or that of a
    fence behind it. Where no barrier stands between a wait and an arrival, one warp arrives for itself."""
    c = launch.constants
    # The stages come first. Of what lies behind them those of 4 bits have parts, too.
    is_of_bits = str(c.get("FORM", "nibble ")).startswith("nibble ")
    size = None if is_of_bits else c["STAGES"] * c["GROUP"] * c["CL"] * 128
    code = [Instruction.of(found) for found in INSTRUCTION.finditer(sass)]
    for at, one in enumerate(code):
        if ARRIVAL not in one.text:
            continue
        barrier = _before(code, at, (BARRIER, WAIT_OF_STAGE))
        wait = _before(code, barrier, (WAIT_OF_STAGE,))
        if wait < barrier and (left := _on_their_way(code[wait : barrier + 1], size)):
            return f"lets a stage go at {one.address} while {left[0].text} at {left[0].address} may be on its way"
    return None if code else "has no machine code that is known"


def _before(code: list[Instruction], at: int, names: tuple[str, ...]) -> int:
    """The place of the last such instruction up to there; 0: there is none."""
    return next((k for k in range(at, -1, -1) if any(name in code[k].text for name in names)), 0)


def _on_their_way(code: list[Instruction], size: int | None) -> list[Instruction]:
    """Loads of stages, which have the first `size` bytes of shared memory (None: all of it), that the last of these
    instructions does not wait for."""
    left: list[Instruction] = []
    for one in code:
        come = [place for place, load in enumerate(left) if one.waits >> load.scoreboard & 1]
        left = left[come[-1] + 1 :] if come else left  # loads come in their order; some have no scoreboard of their own
        if SHARED_LOAD.search(one.text):
            left.append(one)
        elif PROXY_FENCE in one.text and left:  # it has waited for them once it has its own result
            left = [one]
    return [load for load in left if size is None or not _is_kept(load.text, size)]


def _is_kept(load: str, size: int) -> bool:
    behind = BEHIND.search(load)
    return KEPT_LOAD.search(load) is not None or (behind is not None and int(behind[1], 16) >= size)


@dataclass(slots=True, frozen=True)
class Instruction:
    """One of the GPU's as cuobjdump shows it, with what its last bits say."""

    address: str
    text: str
    scoreboard: int  # which is set until its result is there; 7: none
    waits: int  # for scoreboards, a bit each

    @classmethod
    def of(cls, found: re.Match[str]) -> Instruction:
        control = int(found[3], 16) >> 41
        return cls(found[1], found[2], control >> 5 & 7, control >> 11 & 63)
