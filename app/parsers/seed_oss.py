"""Seed-OSS: tool calls as Qwen3-Coder's within <seed:tool_call>, reasoning within <seed:think>."""

from __future__ import annotations

from app.parsers.think import ThinkParser
from app.parsers.xml_parameters import XmlParametersParser


class SeedOssParser(XmlParametersParser):
    """<function=name> with a <parameter=key> element for each argument."""

    open, close = "<seed:tool_call>", "</seed:tool_call>"
    function = ("<function=", ">", "</function>")
    parameter = ("<parameter=", ">", "</parameter>")
    markers = (open, close)


class SeedOssThinkParser(ThinkParser):
    """The reasoning before the answer."""

    open, close = "<seed:think>", "</seed:think>"
    markers = (open, close)
