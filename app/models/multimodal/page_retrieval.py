"""Models that give a vector of each token of a page's picture, in transformers' layout: a model that sees, and a linear
layer."""

from __future__ import annotations

from collections.abc import Iterable

from app.checkpoints.tensors.checkpoint import StoredTensor
from app.models.multimodal.media_pooling import MediaForPooling
from app.records.late_interaction import PICTURED


class PageRetrieval(MediaForPooling):
    """The model within is `vlm` in the checkpoint."""

    def own_tensors(self, name: str, tensor: StoredTensor) -> Iterable[tuple[str, StoredTensor]]:
        """The inner model's; the pooler reads the layer behind it by itself."""
        if name.startswith(f"{PICTURED[type(self).__name__].layer}."):
            return []
        own = name.removeprefix("vlm.")
        bare = own.startswith("language_model.") and not own.startswith(("language_model.model.", "language_model.lm_"))
        return super().own_tensors(f"model.{own}" if bare else own, tensor)
