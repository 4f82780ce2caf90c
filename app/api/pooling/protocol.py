"""Bodies of the pooling endpoints."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, Literal, Self

from pydantic import Field, field_validator, model_validator
from pydantic_core import PydanticCustomError

from app.api.chat.media_parts import ImagePart
from app.api.chat.messages import ChatMessage
from app.api.generation.placement import PlacementFields
from app.api.http.prompt_field import PromptField
from app.api.http.strict_models import StrictModel
from app.bounds import Count, Items, JsonObject, Text
from app.errors import InvalidRequestError
from app.records.late_interaction import Role
from app.records.mixed_scores import ScoreKind
from app.records.pooling_params import PoolingTask
from app.records.task_prompts import QUERY, TaskPrompts

EncodingFormat = Literal["float", "base64", "sparse"]


class PooledBody(PlacementFields, StrictModel):
    """Holds the fields that every request for vectors or scores has, whatever the dialect."""

    model: str | None = Field(None, description="Which model; the server's first one when not given.")
    request_id: str | None = Field(None, description="Echoed as x-request-id.", pattern=r"^[\x21-\x7e]{1,256}$")


class PoolingBody(PooledBody):
    """Holds what the dialects of OpenAI, vLLM and Jina have besides."""

    truncate_prompt_tokens: Count | None = Field(
        None,
        ge=-1,
        description="Cut a longer prompt to so many tokens, at its end; -1: as many as the model takes. Without it, a "
        "prompt that is too long is refused.",
    )
    use_activation: bool | None = Field(
        None,
        description="Length 1 for embeddings, probabilities for classes; the model's own choice when not given.",
    )
    user: str | None = Field(None, description="Accepted; changes nothing.")

    @field_validator("truncate_prompt_tokens")
    @classmethod
    def _some_tokens(cls, value: int | None) -> int | None:
        if value == 0:
            raise PydanticCustomError("truncate_prompt_tokens", "must be -1 or at least 1")
        return value


class InputBody(PoolingBody):
    """Texts or token ids, or a conversation."""

    input: PromptField | None = Field(None, description="A text, texts, token ids, or lists of token ids.")
    messages: Items[ChatMessage] | None = Field(None, min_length=1, description="A conversation instead of an input.")
    add_special_tokens: bool = Field(True, description="Add the special tokens that the model expects around a text.")
    add_generation_prompt: bool = Field(
        False, description="End the prompt of a conversation where the assistant's turn begins."
    )
    chat_template_kwargs: JsonObject | None = Field(None, description="Further names for the template.")

    @model_validator(mode="after")
    def _one_of(self) -> Self:
        if (self.input is None) == (self.messages is None):
            raise InvalidRequestError("give either input or messages", param="input")
        if self.messages is None and (self.chat_template_kwargs is not None or self.add_generation_prompt):
            name = "add_generation_prompt" if self.chat_template_kwargs is None else "chat_template_kwargs"
            raise InvalidRequestError("is for messages; an input has no template", param=name)
        return self

    @property
    def has_texts(self) -> bool:
        """True if the inputs are texts."""
        return any(isinstance(one, str) for one in self.inputs())

    def prompt(self, prompts: TaskPrompts) -> str:
        """The text that goes before each of the inputs; InvalidRequestError for one that the model does not have."""
        return ""

    def role(self) -> Role:
        """Kind of the inputs where queries and documents are read differently."""
        return "document"

    def inputs(self) -> list[str] | list[list[int]]:
        """The inputs as a list, whichever form was sent."""
        if isinstance(self.input, str):
            return [self.input]
        if self.input and isinstance(self.input[0], int):
            return [self.input]
        return self.input or []  # type: ignore[return-value]


class VectorBody(InputBody):
    """Inputs that a model's prompt for a task may go before."""

    prompt_name: Text | None = Field(
        None, description="Puts the model's prompt of this name before each text (`prompts` of sentence-transformers)."
    )
    input_type: Text | None = Field(
        None,
        description="Kind of the inputs: `query`, `document`, as Cohere has it (`search_query`, `search_document`, "
        "`classification`, `clustering`), or a prompt's name. The model's prompt for it goes before each text.",
    )

    def prompt(self, prompts: TaskPrompts) -> str:
        """See InputBody.prompt."""
        if (self.prompt_name is not None or self.input_type is not None) and not self.has_texts:
            field = "input_type" if self.prompt_name is None else "prompt_name"
            raise InvalidRequestError("a prompt goes before texts, not token ids or messages", param=field)
        return prompts.of(self.prompt_name, self.input_type)

    def role(self) -> Role:
        """See InputBody.role: documents, unless the prompt's name says queries."""
        return "query" if (self.prompt_name or self.input_type or "").lower() in QUERY else "document"


class EmbeddingRequest(VectorBody):
    """Body of POST /v1/embeddings."""

    encoding_format: EncodingFormat = Field(
        "float",
        description="`base64`: the fp32 numbers' bytes. `sparse`: what is not 0, as `indices` and `values`; of BGE-M3 "
        "the weights of the tokens, by their ids.",
    )
    dimensions: Count | None = Field(None, ge=1, description="Shorter embeddings, of models trained for it.")
    normalize: bool | None = Field(None, description="Another name of use_activation.")

    @model_validator(mode="after")
    def _one_name(self) -> Self:
        if self.normalize is not None and self.use_activation is not None:
            raise InvalidRequestError("give either normalize or use_activation", param="normalize")
        return self


class PoolingRequest(VectorBody):
    """Body of POST /pooling."""

    task: PoolingTask | None = Field(
        None,
        description="What to return; a vector for each token when not given, scores of a classifier. `all`: of BGE-M3 "
        "`dense`, `sparse` and `vectors`.",
    )
    encoding_format: EncodingFormat = Field(
        "float", description="`base64`: the fp32 numbers' bytes. `sparse`: what is not 0, as `indices` and `values`."
    )
    dimensions: Count | None = Field(None, ge=1, description="Shorter embeddings, of models trained for it.")


class ClassifyRequest(InputBody):
    """Body of POST /classify."""


class ScoredBody(PoolingBody):
    """Texts that are compared."""

    instruction: Text | None = Field(
        None,
        description="Of a reranker that is asked in words (Qwen3-Reranker, Qwen3-VL-Reranker, Jina Reranker v3): what "
        "it is to judge by, instead of its usual instruction.",
    )
    score_weights: dict[ScoreKind, Annotated[float, Field(ge=0, le=1e6)]] | None = Field(
        None,
        max_length=3,
        description="Of BGE-M3: the score is the mean, by these weights, of those by the texts' vectors (`dense`), "
        "weights of tokens (`sparse`) and vectors of tokens (`vectors`), as {sparse: 0.3, dense: 0.7}; `dense` alone "
        "when not given.",
    )

    @field_validator("score_weights")
    @classmethod
    def _some_weight(cls, value: dict[ScoreKind, float] | None) -> dict[ScoreKind, float] | None:
        if value is not None and not any(value.values()):
            raise PydanticCustomError("score_weights", "must have one above 0")
        return value


Texts = Text | Items[Text]
_SIDES = (("text_1", "text_2"), ("queries", "documents"), ("data_1", "data_2"))


class ScoreRequest(ScoredBody):
    """Body of POST /score: one text against each of several, or pair by pair. The two sides go by three names."""

    text_1: Texts | None = Field(None, description="The text, or texts, that the others are compared with.")
    text_2: Texts | None = Field(None, description="As many texts, or several for one text_1.")
    queries: Texts | None = Field(None, description="Another name of text_1.")
    documents: Texts | None = Field(None, description="Another name of text_2.")
    data_1: Texts | None = Field(None, description="Another name of text_1.")
    data_2: Texts | None = Field(None, description="Another name of text_2.")

    @model_validator(mode="after")
    def _pairs(self) -> Self:
        self.pairs()
        return self

    def sides(self) -> tuple[str, str]:
        """Names of the fields that the request used."""
        used = [names for names in _SIDES if any(getattr(self, name) is not None for name in names)]
        if len(used) != 1 or any(getattr(self, name) is None for name in used[0]):
            raise InvalidRequestError("give both text_1 and text_2 (or queries and documents)", param="text_1")
        return used[0]

    def pairs(self) -> list[tuple[str, str]]:
        """(first, second) of each score; one first text goes with every second one."""
        first, second = self.sides()
        left, right = (_listed(getattr(self, name)) for name in (first, second))
        if not left or not right:
            raise InvalidRequestError("the list of texts is empty", param=second if left else first)
        if len(left) == 1:
            left = left * len(right)
        if len(left) != len(right):
            raise InvalidRequestError(f"{len(left)} texts in {first}, {len(right)} in {second}", param=second)
        return list(zip(left, right, strict=True))


@dataclass(slots=True, frozen=True)
class ScoredText:
    """One side of a pair: a text, a picture, or both."""

    text: str = ""
    image: ImagePart | None = None


class RerankDocument(StrictModel):
    """A document as an object: a text, a picture, or, of Qwen3-VL-Reranker, both."""

    text: Text | None = None
    image: Text | None = Field(
        None,
        description="A picture's address, a data URL or one that the server may fetch: of models that compare pages "
        "(ColPali, ColQwen2), and of Qwen3-VL-Reranker and Jina Reranker m0.",
    )

    def scored(self, field: str) -> ScoredText:
        """The same as it is scored; `field`: its place in the body."""
        image = None if self.image is None else ImagePart.of(self.image, None, f"{field}.image")
        return ScoredText(self.text or "", image)


class RerankRequest(ScoredBody):
    """Body of POST /v1/rerank."""

    query: Text | RerankDocument = Field(
        description="What the documents are ranked by: a text, or, of Qwen3-VL-Reranker, an object like theirs."
    )
    documents: Items[Text | RerankDocument] = Field(
        min_length=1, description="Texts, or objects with a `text`, an `image`, or both."
    )
    top_n: Count = Field(0, ge=0, description="Only the best so many; 0: all.")
    return_documents: bool = Field(
        True, description="Repeat each document's text in its result; pictures are not repeated."
    )
    max_tokens_per_doc: Count | None = Field(None, ge=1, description="Cut each document to so many tokens.")

    @field_validator("documents", mode="before")
    @classmethod
    def _each(cls, value: Any) -> Any:
        if isinstance(value, list):
            for i, document in enumerate(value):
                if not isinstance(document, str | dict | RerankDocument):
                    raise PydanticCustomError("documents", "document {i} must be a text or an object", {"i": i})
                if _is_empty(document):
                    raise PydanticCustomError("documents", "document {i} must have text or image", {"i": i})
        return value

    @field_validator("query", mode="before")
    @classmethod
    def _some(cls, value: Any) -> Any:
        if not isinstance(value, str | dict | RerankDocument):
            raise PydanticCustomError("query", "must be a text or an object", {})
        if _is_empty(value):
            raise PydanticCustomError("query", "must have text or image", {})
        return value

    def items(self) -> list[ScoredText]:
        """The documents, pictures with their fields."""
        return [_scored(document, f"documents.{i}") for i, document in enumerate(self.documents)]

    def asked(self) -> ScoredText:
        """The query in the same form."""
        return _scored(self.query, "query")


def _is_empty(given: Any) -> bool:
    return isinstance(given, dict) and given.get("text") is None and given.get("image") is None


def _scored(given: str | RerankDocument, field: str) -> ScoredText:
    return ScoredText(given) if isinstance(given, str) else given.scored(field)


def _listed(value: Texts) -> list[str]:
    return [value] if isinstance(value, str) else list(value)
