"""Pairs of texts as a language model is asked about them: one conversation, with the roles `query` and `document`.

The template is rendered once, with marks in the places of the texts: no text of a request goes through it.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from app.errors import InvalidRequestError, UnsupportedError
from app.records.pooling_info import PoolingInfo
from app.text.chat_template import ChatTemplate, RenderLimits
from app.text.tokenizer import Tokenizer

_JUDGE = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct "
    'provided. Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n<Instruct>: '
)
_TURN = "<|im_end|>\n<|im_start|>assistant\n"
# Marks of characters for private use.
_QUERY, _DOCUMENT, _INSTRUCTION = (f"\ue000{name}\ue001" for name in ("query", "document", "instruction"))


@dataclass(slots=True, frozen=True)
class PairTemplate:
    """Holds what stands before the query, between it and the document, and after that."""

    head: str
    middle: str
    tail: str
    around: tuple[str, str] | None = field(default=None, compare=False)  # an instruction in `head`; None: it takes none
    picture: str = ""  # is written before the text that it belongs to; "": it takes none
    document_first: bool = False  # the query stands behind the document
    ends: tuple[int, ...] = ()  # token ids behind the whole

    @classmethod
    def of(cls, template: ChatTemplate, pooling: PoolingInfo) -> PairTemplate | None:
        """The checkpoint's, where it has one that shows both texts, else Qwen3-Reranker's for such a model; None: pairs
        are read without a template."""
        if not pooling.is_causal or len(pooling.labels) != 1:
            return None
        if pooling.pairs:
            return _JINA_VL
        if found := cls._rendered(template, pooling.prompts.usual):
            other = cls._rendered(template, _INSTRUCTION)
            if other is not None and other.head.count(_INSTRUCTION) == 1 and "\ue000" not in other.middle + other.tail:
                before, _, behind = other.head.partition(_INSTRUCTION)
                return replace(found, around=(before, behind))
            return found
        if pooling.verdict is None or not pooling.verdict.asked:
            return None
        own = _QWEN3 if pooling.verdict.asked == "qwen3" else _QWEN3_VL
        return own.instructed(pooling.prompts.usual) if pooling.prompts.usual else own

    @classmethod
    def _rendered(cls, template: ChatTemplate, instruction: str) -> PairTemplate | None:
        if template.is_confined or not template.source_for(has_tools=False):
            return None
        messages = [{"role": "query", "content": _QUERY}, {"role": "document", "content": _DOCUMENT}]
        if instruction:
            messages.insert(0, {"role": "system", "content": instruction})
        try:
            text = template.render(messages, limits=RenderLimits(max_s=1.0))
        except InvalidRequestError:  # it knows no such roles
            return None
        head, found, rest = text.partition(_QUERY)
        middle, also, tail = rest.partition(_DOCUMENT)
        return cls(head, middle, tail) if found and also and _QUERY not in tail + middle else None

    def instructed(self, instruction: str) -> PairTemplate:
        """The same with an instruction of the request's; UnsupportedError where it takes none."""
        if self.around is None:
            raise UnsupportedError("the model's template takes no instruction", param="instruction")
        return replace(self, head=instruction.join(self.around))

    def holds(self, query: str) -> bool:
        """True if a query brings the template with it, as clients of servers without one write it."""
        opening = self.head.partition("\n")[0]
        return bool(opening) and query.startswith(opening)

    def text(self, query: str, document: str) -> str:
        """The whole prompt, but for the tokens that end it."""
        first, second = (document, query) if self.document_first else (query, document)
        return f"{self.head}{first}{self.middle}{second}{self.tail}"

    def num_tokens(self, tokenizer: Tokenizer) -> int:
        """Tokens of a prompt without texts."""
        return len(tokenizer.encode(self.text("", ""), add_special_tokens=False)) + len(self.ends)


def _asked(instruction: str, query: str, document: str, tail: str, picture: str = "") -> PairTemplate:
    return PairTemplate(f"{_JUDGE}{instruction}{query}", document, tail, (_JUDGE, query), picture)


_QWEN3 = _asked(
    "Given a web search query, retrieve relevant passages that answer the query",
    "\n<Query>: ",
    "\n<Document>: ",
    f"{_TURN}<think>\n\n</think>\n\n",
)
# Jina Reranker m0 reads its score from a token of its own behind the pair.
_JINA_VL = PairTemplate(
    "**Document**:\n",
    "\n**Query**:\n",
    "",
    picture="<|vision_start|><|image_pad|><|vision_end|>",
    document_first=True,
    ends=(100,),
)
_QWEN3_VL = _asked(
    "Given a search query, retrieve relevant candidates that answer the query.",
    "<Query>:",
    "\n<Document>:",
    _TURN,
    picture="<|vision_start|><|image_pad|><|vision_end|>",
)
