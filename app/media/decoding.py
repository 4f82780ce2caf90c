"""A picture's pixels by Pillow: its first frame, upright, as RGB. Runs in a process that may be killed."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
import numpy.typing as npt
from PIL import ExifTags, GifImagePlugin, Image, JpegImagePlugin, MpoImagePlugin, PngImagePlugin, WebPImagePlugin

from app.media.header import check_size

Pixels = npt.NDArray[np.uint8]
# Loaded now: the process opens no files later.
PLUGINS = (GifImagePlugin, JpegImagePlugin, MpoImagePlugin, PngImagePlugin, WebPImagePlugin)
_TURNS = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
_WITH_ALPHA = ("LA", "La", "PA", "RGBA", "RGBa")
_WHITE = (255, 255, 255, 255)


class DecodingError(Exception):
    """The file is not what its header promised."""


def decode(data: bytes, kind: str, max_pixels: int, max_side: int) -> Pixels:
    """The pixels [H, W, 3] of a picture of this format, on white where it is transparent.

    DecodingError says what is wrong with it, InvalidRequestError that it is too large after all.
    """
    Image.MAX_IMAGE_PIXELS = None  # the limits here are stricter, and no warnings
    try:
        with Image.open(io.BytesIO(data), formats=[kind]) as image:
            check_size(*image.size, max_pixels, max_side)
            image.load()
            check_size(*image.size, max_pixels, max_side)  # a GIF's frame may be larger than its screen
            return np.asarray(as_rgb(_upright(image)))
    except MemoryError:
        raise
    except (OSError, SyntaxError, ValueError, EOFError, LookupError, TypeError, ArithmeticError, RuntimeError) as error:
        raise DecodingError(f"is a malformed {kind}: {_reason(error)}") from error


def _reason(error: Exception) -> str:
    return f"{error!s:.120}" if str(error) and "0x" not in str(error) else type(error).__name__


def _upright(image: Image.Image) -> Image.Image:
    try:
        turn = _TURNS.get(image.getexif().get(ExifTags.Base.Orientation, 1))
    except Exception:  # of tags that a camera wrote wrongly; the picture itself may be right
        turn = None
    return image if turn is None else image.transpose(turn)


def as_rgb(image: Image.Image) -> Image.Image:
    """The same as RGB, on white where it is transparent."""
    if image.mode.startswith("I"):  # 16 bits of grey
        grey: npt.NDArray[Any] = np.asarray(image).clip(0, 65_535) >> 8
        return Image.fromarray(grey.astype(np.uint8)).convert("RGB")
    if image.mode in _WITH_ALPHA or "transparency" in image.info:
        image = image.convert("RGBA")
        return Image.alpha_composite(Image.new("RGBA", image.size, _WHITE), image).convert("RGB")
    return image if image.mode == "RGB" else image.convert("RGB")
