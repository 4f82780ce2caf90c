"""Says how the text of JSON may look under a grammar: separators and white space."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:  # the library declares it in its stub only
    from llguidance._lib import JsonCompileOptions

# White space between the parts of JSON. Bounded, since a model that may write it for ever sometimes does.
WHITESPACE = r"[ \t\n\r]{1,32}"


def json_options(disable_any_whitespace: bool = False, whitespace_pattern: str | None = None) -> JsonCompileOptions:
    """Returns how the text of JSON may look; laid over whatever the schema itself says about it (`x-guidance`)."""
    return {
        "item_separator": ",",
        "key_separator": ":",
        "whitespace_flexible": not disable_any_whitespace,
        "whitespace_pattern": None if disable_any_whitespace else whitespace_pattern or WHITESPACE,
        "coerce_one_of": False,
        "lenient": False,
    }
