"""Says what joins a language model and what sees or hears for it: the contract of encoders, and the model that has
some."""

from __future__ import annotations

import re
from abc import abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch

from app.checkpoints.model_info import ModelInfo
from app.checkpoints.tensors.checkpoint import StoredTensor
from app.checkpoints.tensors.names import Rule, renamed, text_name
from app.distributed.parallel_groups import RankGroup
from app.layers.context import BuildContext
from app.layers.layer import Layer
from app.models.base import EngineModel
from app.models.decoder import CausalLM, Decoder
from app.models.decoder_settings import DecoderSettings
from app.records.media import MediaKind
from app.records.media_info import MediaInfo

FEATURE = "app.worker.media.media:create"
OWN, OWN_EARS = "encoder.", "ears."  # where encoders' tensors stand in the model
_PARTS = (
    *("visual", "vision_tower", "vision_model", "vision_encoder", "vision_projection", "embed_vision", "audio_tower"),
    "embed_tokens_extend",
    *("multi_modal_projector", "mm_projector", "mlp1", "connector", "projector", "mlp_AR", "visual_projection"),
)
_SEES = re.compile(rf"^(model\.)?(({'|'.join(_PARTS)})\.|image_newline$)")
_HEARS = re.compile(r"^(model\.)?(audio_tower|embed_audio|embed_tokens_extend\.audio_embed)\.")


@dataclass(slots=True, frozen=True)
class Picture:
    """An item as an encoder reads it."""

    pixels: torch.Tensor  # on the encoder's device, in its own order: uint8, of a sound fp32 features
    grid: tuple[int, int, int]  # frames, rows, columns of patches; of a sound windows, 1, frames that are sound


class MediaEncoder(Layer):
    """Turns pixels into what stands in for placeholder tokens. Every rank that needs its output holds all of it."""

    num_deep: int = 0  # layers of the language model to which further features are added
    later_bytes: int = 0  # of the device, that it keeps beside its weights as pictures come
    # A picture of a grid that came before is encoded by launches alone: nothing is sent, nothing is waited for.
    is_capturable: ClassVar[bool] = False
    rules: ClassVar[Sequence[Rule]] = ()  # from a checkpoint's names, without "model.", to ours

    @abstractmethod
    def forward(self, pictures: Sequence[Picture]) -> torch.Tensor:
        """Embeddings [1 + num_deep, n, C] of the placeholders of all pictures, one behind the other."""

    @abstractmethod
    def num_tokens(self, grid: tuple[int, int, int]) -> int:
        """Placeholders of a picture."""

    def largest(self, num_tokens: int) -> Picture:
        """A picture of about so many placeholders, as large as an item may be, to be measured and warmed with."""
        raise NotImplementedError

    def constants(self, grid: tuple[int, int, int]) -> object:
        """Returns what encoding a picture of a grid reads beside weights and pixels; nobody else may hold it."""
        return None

    def own_tensors(self, name: str, tensor: StoredTensor) -> Iterable[tuple[str, StoredTensor]]:
        """A tensor of the checkpoint under the encoder's own names."""
        return [(renamed(name, self.rules), tensor)]


EncoderOf = Callable[[BuildContext, ModelInfo], MediaEncoder]


class SeeingModel(EngineModel):
    """A model with an encoder, in the stages that need its output; mixed into the family of its text."""

    features = (FEATURE,)
    seen_both_ways: bool = False  # tokens of a picture see each other, those behind them too
    rope_seconds: float = 0.0  # positions that a second of a video takes; 0: a frame takes one
    positions_by_time: bool = False  # what follows a video goes on behind its last second, where that is furthest
    media: MediaInfo | None  # None: text alone
    tp: RankGroup  # whose ranks each hold the encoders
    encoder: MediaEncoder | None  # where this stage needs its output
    ears: MediaEncoder | None  # of a model that sees and hears: what hears for it
    model: Decoder
    decoder_settings: DecoderSettings

    def see(self, ctx: BuildContext, info: ModelInfo, encoder_of: EncoderOf) -> None:
        """Build the encoders that config.json describes; once the text is there."""
        self.media, self.tp = MediaInfo.of(info), ctx.groups.tp
        self.encoder = self.ears = None
        # Every stage knows the names of its tensors; a tuple, so that it is no part of a model without memory for it.
        self._described = () if self.media is None else (encoder_of(ctx, info),)
        first = ctx.stage_layers.start if ctx.stage_layers is not None else 0
        embeds = ctx.groups.is_first_stage or self.model.layer_inputs is not None
        for encoder in self._described:
            if embeds or first < encoder.num_deep:
                self.encoder = encoder
        self._heard = () if self.media is None else tuple(filter(None, (self.ears_of(ctx, info),)))
        for ears in self._heard:
            self.ears = ears if embeds else None

    @classmethod
    def ears_of(cls, ctx: BuildContext, info: ModelInfo) -> MediaEncoder | None:
        """Hears for a model whose encoder sees; None: it hears nothing, or its encoder does."""
        return None

    def encoder_for(self, kind: MediaKind) -> MediaEncoder | None:
        """The encoder of such items; None: this stage does without its output."""
        return self.ears if kind == "audio" and self._heard else self.encoder

    @property
    def num_deep(self) -> int:
        """Layers to which further features are added."""
        return 0 if self.encoder is None else self.encoder.num_deep

    @property
    def vector_size(self) -> int:
        """Numbers that a token of a picture is."""
        return self.decoder_settings.hidden_size

    @property
    def has_axes(self) -> bool:
        """True if tokens of pictures have positions of their own to rotate by."""
        return any(rotary.axes is not None for rotary in self.model.rotaries.values())

    def own_tensors(self, name: str, tensor: StoredTensor) -> Iterable[tuple[str, StoredTensor]]:
        """The text's as its family has it; the encoder's where there is one here."""
        if self._heard and _HEARS.match(name) is not None:
            heard = name.removeprefix("model.")
            return [(OWN_EARS + part, s) for ears in self._heard for part, s in ears.own_tensors(heard, tensor)]
        if _SEES.match(name) is None:
            own = text_name(name)
            return [] if own is None else super().own_tensors(own, tensor)
        own = name.removeprefix("model.")
        return [(OWN + part, s) for encoder in self._described for part, s in encoder.own_tensors(own, tensor)]


class MediaModel(SeeingModel, CausalLM):
    """A language model that sees."""

    def __init__(self, ctx: BuildContext, info: ModelInfo) -> None:
        super().__init__(ctx, info)
        self.see(ctx, info, self.encoder_of)

    @classmethod
    @abstractmethod
    def encoder_of(cls, ctx: BuildContext, info: ModelInfo) -> MediaEncoder:
        """The encoder that config.json describes."""
