"""Pixels of odd pictures, judged by Pillow's own conversions of the same pixels."""

from __future__ import annotations

import io

import numpy as np
import pytest
from PIL import Image, ImageOps

from app.errors import InvalidRequestError
from app.media.decoding import DecodingError, decode
from tests.media.pictures import file_of, picture

LIMITS = 1 << 20, 1 << 10


@pytest.mark.parametrize("orientation", range(1, 9))
def test_pictures_stand_upright(orientation: int) -> None:
    exif = Image.Exif()
    exif[0x0112] = orientation
    data = file_of(picture(), "JPEG", exif=exif, quality=95)
    with Image.open(io.BytesIO(data)) as judge:
        np.testing.assert_array_equal(decode(data, "JPEG", *LIMITS), np.asarray(ImageOps.exif_transpose(judge)))


@pytest.mark.parametrize("mode", ["1", "L", "P", "RGB", "CMYK"])
def test_every_mode_becomes_rgb(mode: str) -> None:
    kind = "JPEG" if mode == "CMYK" else "PNG"
    data = file_of(picture(mode=mode), kind)
    with Image.open(io.BytesIO(data)) as judge:
        assert judge.mode == mode
        np.testing.assert_array_equal(decode(data, kind, *LIMITS), np.asarray(judge.convert("RGB")))


def test_what_is_transparent_is_white() -> None:
    image = picture(mode="RGBA")
    image.putalpha(Image.linear_gradient("L").resize(image.size))
    pixels, alpha = np.asarray(image)[..., :3].astype(float), np.asarray(image)[..., 3:] / 255
    expected = pixels * alpha + 255 * (1 - alpha)
    np.testing.assert_allclose(decode(file_of(image), "PNG", *LIMITS), expected, atol=1)
    clear = Image.new("P", (4, 4), 0)
    clear.info["transparency"] = 0
    assert (decode(file_of(clear, transparency=0), "PNG", *LIMITS) == 255).all()


def test_sixteen_bits_keep_their_upper_eight() -> None:
    grey = np.arange(64 * 64, dtype=np.uint16).reshape(64, 64) * 16
    found = decode(file_of(Image.fromarray(grey)), "PNG", *LIMITS)
    np.testing.assert_array_equal(found, np.repeat((grey >> 8).astype(np.uint8)[..., None], 3, axis=2))


@pytest.mark.parametrize("kind", ["GIF", "WEBP", "PNG"])
def test_of_what_moves_the_first_frame_is_seen(kind: str) -> None:
    frames = [Image.new("RGB", (8, 8), color) for color in ("red", "lime", "blue")]
    data = file_of(frames[0], kind, save_all=True, append_images=frames[1:], duration=100)
    found = decode(data, kind, *LIMITS)
    assert found.shape == (8, 8, 3)
    np.testing.assert_allclose(found[0, 0], [255, 0, 0], atol=3)


def test_the_format_is_the_one_of_the_header() -> None:
    """What Pillow could read as another format is malformed."""
    with pytest.raises(DecodingError, match="is a malformed PNG"):
        decode(file_of(picture(), "JPEG"), "PNG", *LIMITS)
    data = file_of(picture(64, 64))
    with pytest.raises(DecodingError, match="is a malformed PNG"):
        decode(data[: len(data) // 2], "PNG", *LIMITS)
    with pytest.raises(InvalidRequestError, match="64 x 64"):
        decode(data, "PNG", 64 * 64 - 1, 99)
