"""Reads from the files of a model that transcribes which of its heads follow the sound (Radford et al., 2022)."""

from __future__ import annotations

from dataclasses import dataclass

from app.checkpoints.fields.kinds import check, several, whole
from app.checkpoints.model_info import GENERATION_FILE, ModelInfo
from app.errors import CheckpointError

MAX_MEDIAN = 63
_PAIRS = several(several(whole(0, 1 << 14), 2, 2), 1 << 10)


@dataclass(slots=True, frozen=True)
class AlignmentHeads:
    """Holds heads of cross attention, and how what they attend to is smoothed."""

    heads: tuple[tuple[int, int], ...]  # layer and head; (): none is known to follow the sound
    median_width: int  # positions of which a median is taken

    @classmethod
    def of(cls, info: ModelInfo) -> AlignmentHeads:
        """Read them; none where some are not the model's: distilled ones name those of their teacher. CheckpointError
        names a field that is unusable."""
        own = info.generation_config
        check(own, {"alignment_heads": _PAIRS}, f"{info.directory}/{GENERATION_FILE}")
        named = tuple((int(layer), int(head)) for layer, head in own.get("alignment_heads") or ())
        is_own = all(layer < info.num_layers and head < info.num_heads for layer, head in named)
        width, file = info.hf_config.get("median_filter_width", 7), f"{info.directory}/config.json"
        check({"median_filter_width": width}, {"median_filter_width": whole(1, MAX_MEDIAN)}, file)
        if width % 2 == 0:
            raise CheckpointError(f"{file}: median_filter_width must be odd, not {width}", param="model")
        return cls(tuple(sorted(set(named))) if is_own else (), int(width))
