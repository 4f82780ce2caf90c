"""Reasoning between two markers at the beginning of an answer: <think>...</think>.

Where the prompt already opens the reasoning, the answer begins inside it. New lines around reasoning belong to neither
side, as the models' templates take them off. Reasoning that is not closed when the text ends is reasoning all the same.
"""

from __future__ import annotations

from app.parsers.base import ReasoningParser
from app.parsers.scanner import Scanner, Steps

NEW_LINES = "\n"


class ThinkParser(ReasoningParser):
    """Qwen3, DeepSeek-V3.1, tiny-chat and others whose prompt says whether the answer begins inside the reasoning."""

    open, close = "<think>", "</think>"
    markers: tuple[str, ...] = ("<think>", "</think>")

    @classmethod
    def starts_inside(cls, prompt_end: str, continued: str | None) -> bool:
        """The prompt ends with opened reasoning, or the message to continue holds one."""
        if continued is not None:
            return continued.rfind(cls.open) > continued.rfind(cls.close)
        return prompt_end.rstrip().endswith(cls.open)

    @classmethod
    def reasoning_markers(cls) -> tuple[str, str]:
        """Both markers."""
        return cls.open, cls.close

    @classmethod
    def reasoning_end(cls, inside: bool) -> str:
        """The closing marker, where reasoning is open."""
        return cls.close if inside else ""

    @classmethod
    def may_open(cls, prompt_end: str, continued: str | None) -> str:
        """Returns `open` where the prompt neither opens reasoning nor closes one, as where thinking is off; else ""."""
        if continued is not None or cls.starts_inside(prompt_end, continued):
            return ""
        return "" if prompt_end.rstrip().endswith(cls.close) else cls.open

    def parse(self) -> Steps[None]:
        """Reasoning, if the text begins with one; the rest is content."""
        scan = self.scan
        before = yield from scan.space()
        if (yield from scan.match(self.open)) or self.inside:
            yield from self._reasoning(scan, before)
        else:
            scan.say_content(before)

    def _reasoning(self, scan: Scanner, before: str) -> Steps[None]:
        """Up to the closing marker, without the new lines at both ends."""
        spaces = before + (yield from scan.space())
        marker = yield from scan.match(self.close)
        if not marker:
            if (yield from scan.peek()):
                scan.say("reasoning", spaces.lstrip(NEW_LINES))
            marker = yield from scan.pass_until((self.close,), lambda text: scan.say("reasoning", text), NEW_LINES)
        while marker and (yield from scan.match(NEW_LINES)):
            pass


class DeepSeekR1Parser(ThinkParser):
    """DeepSeek-R1 and others that always think, though neither prompt nor answer may open the reasoning."""

    @classmethod
    def starts_inside(cls, prompt_end: str, continued: str | None) -> bool:
        """Always, unless the prompt has closed the reasoning or the message to continue is past it."""
        return super().starts_inside(prompt_end, continued) or (continued is None and cls.close not in prompt_end)


class MistralThinkParser(ThinkParser):
    """Magistral: [THINK]...[/THINK]."""

    open, close = "[THINK]", "[/THINK]"
    markers = ("[THINK]", "[/THINK]")
