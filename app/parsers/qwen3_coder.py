"""Tool calls of Qwen3-Coder: <function=name> with a <parameter=key> element for each argument, in <tool_call>."""

from __future__ import annotations

from app.parsers.xml_parameters import XmlParametersParser


class Qwen3CoderParser(XmlParametersParser):
    """Qwen3-Coder."""

    open, close = "<tool_call>", "</tool_call>"
    function = ("<function=", ">", "</function>")
    parameter = ("<parameter=", ">", "</parameter>")
    has_lines = True
    markers = (open, close)
