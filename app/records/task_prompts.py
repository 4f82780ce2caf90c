"""The texts that an embedding model wants in front of its inputs, by task: `prompts` of sentence-transformers. No torch
(I8)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from app.errors import InvalidRequestError

QUERY = ("query", "search_query", "retrieval.query")
DOCUMENT = ("document", "passage", "corpus", "search_document", "retrieval.passage")
# Prompts that stand for a kind of input as clients name it (Cohere, NVIDIA, Voyage), the first that a model has.
_INPUT_TYPES: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(QUERY, QUERY),
    **dict.fromkeys(DOCUMENT, DOCUMENT),
    "classification": ("classification",),
    "clustering": ("clustering",),
}


@dataclass(slots=True, frozen=True)
class TaskPrompts:
    """Names and texts, and the name of what is used where nobody says; None: nothing."""

    texts: tuple[tuple[str, str], ...] = ()
    default: str | None = None

    def of(self, prompt_name: str | None = None, input_type: str | None = None) -> str:
        """The text before an input; InvalidRequestError names a prompt that the model does not have."""
        if prompt_name is not None:
            if input_type is not None:
                raise InvalidRequestError("give either prompt_name or input_type", param="input_type")
            return self._named(prompt_name, "prompt_name")
        if input_type is None:
            return self.usual
        if input_type in dict(self.texts):
            return dict(self.texts)[input_type]
        if input_type not in _INPUT_TYPES:
            return self._named(input_type, "input_type")
        return self.first_of(_INPUT_TYPES[input_type])

    @property
    def usual(self) -> str:
        """The text where nobody names a task."""
        return "" if self.default is None else dict(self.texts)[self.default]

    def first_of(self, names: tuple[str, ...]) -> str:
        """The text of the first of these names, in whatever case, that the model has; else the usual one."""
        by_name = {name.lower(): text for name, text in self.texts}
        return next((by_name[name] for name in names if name in by_name), self.usual)

    def of_documents(self, marks: Mapping[str, str]) -> TaskPrompts:
        """The same for a model that reads queries and documents differently, whose usual texts are documents; less the
        mark that a prompt may begin with."""
        texts = {name: text.removeprefix(marks.get(name, "")) for name, text in self.texts}
        usual = next((name for name in texts if name.lower() in DOCUMENT), self.default)
        if not any(name.lower() in QUERY for name in texts):
            texts[QUERY[0]] = self.usual
        return TaskPrompts(tuple(texts.items()), usual)

    def _named(self, name: str, field: str) -> str:
        texts = dict(self.texts)
        if name not in texts:
            known = ", ".join(texts) or "none"
            kinds = f", and the kinds {', '.join(_INPUT_TYPES)}" if field == "input_type" else ""
            raise InvalidRequestError(f"unknown {field} {name!r:.80}; this model has: {known}{kinds}", param=field)
        return texts[name]


NO_PROMPTS = TaskPrompts()
