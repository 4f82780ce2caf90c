"""Prompts of a query and many documents, as Jina Reranker v3 was trained on them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from app.records.listwise import DOCUMENT_MARK, QUERY_MARK, Listwise
from app.text.pooling_prompt import PoolingPrompt, cut_text
from app.text.tokenizer import Tokenizer

_HEAD = (
    "<|im_start|>system\nYou are a search relevance expert who can determine a ranking of the passages based on how "
    "relevant they are to the query. If the query is a question, how relevant a passage is depends on how well it "
    "answers the question. If not, try to analyze the intent of the query and assess how well each passage satisfies "
    "the intent. If an instruction is provided, you should follow the instruction when determining the ranking."
    "<|im_end|>\n<|im_start|>user\n"
)
_TAIL = "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
_MORE = 4  # tokens that a part may have more within the whole than by itself


@dataclass(slots=True, frozen=True)
class ListwiseAsk:
    """One query with its documents, in order."""

    query: str
    documents: Sequence[str]


def listwise_prompts(
    tokenizer: Tokenizer,
    listwise: Listwise,
    ask: ListwiseAsk,
    room: int,
    instruction: str | None = None,
    max_document_tokens: int | None = None,
) -> list[PoolingPrompt]:
    """Prompts that hold all documents, as few as can, of at most `room` tokens each: of texts less the marks that they
    bring, cut to the lengths that the model was trained with."""
    limit = min(listwise.document_tokens, max_document_tokens or listwise.document_tokens)
    query = cut_text(tokenizer, _unmarked(ask.query), listwise.query_tokens)
    texts = [cut_text(tokenizer, _unmarked(text), limit) for text in ask.documents]
    plain = tokenizer.encode_plain(texts)
    counted = (_text(query, [], instruction), _passage(listwise.num_documents, ""))
    empty, around = (len(tokenizer.encode(text, add_special_tokens=False)) + _MORE for text in counted)
    prompts: list[PoolingPrompt] = []
    block: list[str] = []
    left = room - empty
    for text, encoding in zip(texts, plain, strict=True):
        needed = len(encoding.ids) + around
        if block and (len(block) == listwise.num_documents or needed > left):
            prompts.append(_prompt(tokenizer, query, block, instruction))
            block, left = [], room - empty
        block.append(text)
        left -= needed
    return [*prompts, _prompt(tokenizer, query, block, instruction)]


def _prompt(tokenizer: Tokenizer, query: str, documents: Sequence[str], instruction: str | None) -> PoolingPrompt:
    return PoolingPrompt(tokenizer.encode(_text(query, documents, instruction), add_special_tokens=False))


def _text(query: str, documents: Sequence[str], instruction: str | None) -> str:
    asked = "" if instruction is None else f"<instruct>\n{_unmarked(instruction)}\n</instruct>\n"
    passages = "\n".join(_passage(i, document) for i, document in enumerate(documents))
    return (
        f"{_HEAD}I will provide you with {len(documents)} passages, each indicated by a numerical identifier. "
        f"Rank the passages based on their relevance to query: {query}\n{asked}{passages}\n"
        f"<query>\n{query}{QUERY_MARK}\n</query>{_TAIL}"
    )


def _passage(number: int, document: str) -> str:
    return f'<passage id="{number}">\n{document}{DOCUMENT_MARK}\n</passage>'


def _unmarked(text: str) -> str:
    """The text less its marks; a space is where what is left of it would make one."""
    for instead in ("", " "):
        text = text.replace(QUERY_MARK, instead).replace(DOCUMENT_MARK, instead)
    return text
