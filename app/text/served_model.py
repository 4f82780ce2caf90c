"""One model as those see it that turn requests into tokens and tokens into answers."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field, replace
from functools import cached_property

from app.checkpoints.model_info import ModelInfo
from app.records.adapter import AdapterAsk
from app.records.encoder_info import EncoderInfo
from app.records.pooling_info import PoolingInfo
from app.records.request_bounds import RequestBounds
from app.text.chat_template import ChatTemplate
from app.text.message_marks import message_marks
from app.text.model_media import ModelMedia
from app.text.model_speech import ModelSpeech
from app.text.pair_template import PairTemplate
from app.text.speech import Speech
from app.text.tokenizer import Tokenizer


@dataclass
class ServedModel:
    """Holds names, text tools and limits of a model."""

    name: str
    info: ModelInfo
    tokenizer: Tokenizer
    chat_template: ChatTemplate
    max_model_len: int
    max_kv_tokens: int | None = None  # tokens that the whole KV cache of one replica holds; None while unknown
    aliases: tuple[str, ...] = ()
    created: int = 0  # seconds since the epoch
    max_num_seqs: int | None = None  # requests that all replicas together run at a time; None where unknown
    num_replicas: int = 1  # that those are, at least
    pooling: PoolingInfo | None = None  # set for a model that gives vectors; None: it generates
    tool_parser: str = "auto"  # as ModelConfig has them
    reasoning_parser: str = "auto"
    media: ModelMedia | None = None  # how its pictures are read; None: it takes text only
    speech: ModelSpeech | None = None  # how it hears what it transcribes; None: it does not, or it does more than that
    chat_speech: Speech | None = None  # how a model that chats is asked to transcribe; None: it is not
    adapter: AdapterAsk | None = None  # what its requests are answered with; None: the model as it is
    parent: str | None = None  # the name of the model that the adapter is for
    root: str = ""  # the directory of the adapter
    _marks: frozenset[int] | None = field(default=None, init=False, repr=False, compare=False)
    _bounds: RequestBounds | None = field(default=None, init=False, repr=False, compare=False)

    def adapted(self, adapter: AdapterAsk, root: str = "") -> ServedModel:
        """The same model with an adapter, under the adapter's name."""
        return replace(self, name=adapter.name, aliases=(), adapter=adapter, parent=self.engine_name, root=root)

    @property
    def engine_name(self) -> str:
        """The name of the model whose engines compute it."""
        return self.parent or self.name

    @property
    def input_modalities(self) -> tuple[str, ...]:
        """Returns what a request may bring: of a model that transcribes, sounds alone."""
        if self.speech is not None:
            return ("audio",)
        return "text", *(self.media.kinds if self.media is not None else ())

    @property
    def message_marks(self) -> frozenset[int]:
        """Returns the tokens that open messages in its prompts: found once, by its chat template."""
        if self._marks is None:
            self._marks = message_marks(self.chat_template, self.tokenizer)
        return self._marks

    @cached_property
    def pair_template(self) -> PairTemplate | None:
        """Returns how it is asked about two texts; None: they are read one behind the other, or it gives no scores."""
        return None if self.pooling is None else PairTemplate.of(self.chat_template, self.pooling)

    @property
    def bounds(self) -> RequestBounds:
        """Returns what one request may ask of it: settled once, and again when the size of the KV cache is known."""
        if self._bounds is None or self._bounds.max_kv_tokens != self.max_kv_tokens:
            own = self.info.vocab_size, self.info.eos_token_ids
            seen = 0 if self.media is None else self.media.max_item_tokens
            encoder = None if self.pooling is not None else EncoderInfo.of(self.info)
            self._bounds = RequestBounds(*own, self.max_model_len, self.max_kv_tokens, self.pooling, seen, encoder)
        return self._bounds

    @property
    def max_running(self) -> int:
        """Requests of one HTTP request that may be in the engines at a time: they leave a quarter of the rows to
        others, who so need not wait for all of them."""
        return sys.maxsize if self.max_num_seqs is None else _most_of(self.max_num_seqs)

    @property
    def max_running_of_prompt(self) -> int:
        """The same for the choices of one prompt, which all run on one replica."""
        return sys.maxsize if self.max_num_seqs is None else _most_of(self.max_num_seqs // self.num_replicas)


def _most_of(num_rows: int) -> int:
    return max(1, num_rows - max(1, num_rows // 4))
