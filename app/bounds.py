"""Bounds a string, a list or a number of a client, whatever the server's own limits allow (RequestLimits).

Every field of a body has a bound (tests/api/test_bounds.py walks them all). Strings have one by default: that of their
model's `str_max_length`, which is for names; a field that holds text says so by its type.
"""

from __future__ import annotations

from typing import Annotated, Any, TypeVar

from pydantic import Field

T = TypeVar("T")

MAX_NAME_CHARS = 1 << 12  # names, ids, salts: some clients pack JSON or a signature into one
MAX_SENT_BACK_CHARS = 1 << 16  # ids of earlier answers, into which other servers pack whole signatures
MAX_TEXT_CHARS = 1 << 25  # as many as the default of `max_body_bytes` holds
MAX_ITEMS = 1 << 17  # arrays and objects of a body (app/api/http/body.py), so also the items of one list
MAX_TOKEN_IDS = 1 << 21  # values of a body
# The widest of what OpenAI (64 characters), Anthropic (128) and servers of tools (dots) allow. A call under another
# name could not be sent back, so parsers find none.
FUNCTION_NAME = r"[a-zA-Z0-9_.-]{1,128}"
MAX_INT64 = (1 << 63) - 1
MIN_INT64 = -MAX_INT64 - 1

Text = Annotated[str, Field(max_length=MAX_TEXT_CHARS)]
Int64 = Annotated[int, Field(ge=MIN_INT64, le=MAX_INT64)]
Count = Annotated[int, Field(le=MAX_INT64)]  # its field says the least
Items = Annotated[list[T], Field(max_length=MAX_ITEMS)]
ItemTuple = Annotated[tuple[T, ...], Field(max_length=MAX_ITEMS)]
TokenIds = Annotated[list[Int64], Field(max_length=MAX_TOKEN_IDS)]
# Free form: what is in it is bounded by the body's counts of values and members, and by its depth.
JsonObject = Annotated[dict[str, Any], Field(max_length=MAX_ITEMS)]
# What OpenAI lets a client attach.
MAX_METADATA, MAX_METADATA_KEY_CHARS, MAX_METADATA_CHARS = 16, 64, 512
Metadata = Annotated[
    dict[
        Annotated[str, Field(max_length=MAX_METADATA_KEY_CHARS)], Annotated[str, Field(max_length=MAX_METADATA_CHARS)]
    ],
    Field(max_length=MAX_METADATA),
]
