"""The types that a GGUF file stores tensors in: so many numbers of a row in so many bytes (ggml's `ggml_type`)."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True, frozen=True)
class BlockType:
    """A type by its own name; a plain one has blocks of one number."""

    name: str
    size: int  # numbers in a block, which are neighbours in a row
    num_bytes: int


_BY_ID = {
    0: BlockType("F32", 1, 4),
    1: BlockType("F16", 1, 2),
    30: BlockType("BF16", 1, 2),
    2: BlockType("Q4_0", 32, 18),
    3: BlockType("Q4_1", 32, 20),
    6: BlockType("Q5_0", 32, 22),
    7: BlockType("Q5_1", 32, 24),
    8: BlockType("Q8_0", 32, 34),
    10: BlockType("Q2_K", 256, 84),
    11: BlockType("Q3_K", 256, 110),
    12: BlockType("Q4_K", 256, 144),
    13: BlockType("Q5_K", 256, 176),
    14: BlockType("Q6_K", 256, 210),
    20: BlockType("IQ4_NL", 32, 18),
    23: BlockType("IQ4_XS", 256, 136),
    39: BlockType("MXFP4", 32, 17),
}
BLOCK_TYPES = {block.name: block for block in _BY_ID.values()}
PLAIN = frozenset(block.name for block in _BY_ID.values() if block.size == 1)

# Types that exist, for the message that none of ours reads them.
_OTHERS = {
    9: "Q8_1",
    15: "Q8_K",
    16: "IQ2_XXS",
    17: "IQ2_XS",
    18: "IQ3_XXS",
    19: "IQ1_S",
    21: "IQ3_S",
    22: "IQ2_S",
    24: "I8",
    25: "I16",
    26: "I32",
    27: "I64",
    28: "F64",
    29: "IQ1_M",
    34: "TQ1_0",
    35: "TQ2_0",
    40: "NVFP4",
    41: "Q1_0",
}


def block_type(number: int) -> BlockType:
    """The type with this number; ValueError names one that is not read here."""
    if number not in _BY_ID:
        known = ", ".join(sorted(BLOCK_TYPES))
        raise ValueError(
            f"is stored as {_OTHERS.get(number, f'type {number}')}, which is not supported; known: {known}"
        )
    return _BY_ID[number]
