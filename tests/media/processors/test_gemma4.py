"""Gemma 4's processor, judged by transformers': patches of its sizes, tokens between the texts around a picture."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from app.media.processors.gemma4 import Gemma4Processor
from tests.media.pictures import picture

TEXTS = {"placeholder": "<i>", "begin": "<b>", "end": "<e>"}


@pytest.mark.parametrize("size", [(48, 48), (97, 31), (20, 75), (3, 200), (300, 170), (1, 500), (640, 481)])
@pytest.mark.parametrize("tokens", [70, 280])
def test_patches_are_transformers(size: tuple[int, int], tokens: int) -> None:
    transformers = pytest.importorskip("transformers")
    judge = transformers.models.gemma4.image_processing_pil_gemma4.Gemma4ImageProcessorPil(max_soft_tokens=tokens)
    processor = Gemma4Processor({**Gemma4Processor.settings_of({"max_soft_tokens": tokens}, {}), **TEXTS})
    image = picture(*size)
    expected: Any = judge(image, return_tensors="np")
    layout = processor.layout(size)
    assert layout.num_tokens == expected["num_soft_tokens_per_image"][0]
    _, rows, columns = layout.grid
    found = processor.pixels(np.asarray(image), layout)[0].reshape(3, rows, 16, columns, 16).transpose(1, 3, 2, 4, 0)
    real = expected["pixel_values"][0][: rows * columns]
    np.testing.assert_allclose(found.reshape(rows * columns, -1) / 255, real, atol=1e-6)
    places = expected["image_position_ids"][0]
    assert places[: rows * columns].tolist() == [[x, y] for y in range(rows) for x in range(columns)]
    assert (places[rows * columns :] == -1).all()


def test_what_stands_around() -> None:
    settings = {**Gemma4Processor.settings_of({}, {}), **TEXTS}
    processor = Gemma4Processor(settings)
    assert (processor.written, processor.around) == ("<i>", ("<b>", "<e>"))
    assert Gemma4Processor(processor.low()).layout((1000, 1000)).num_tokens == 64
    assert Gemma4Processor({**settings, "max_soft_tokens": 1}).layout((48, 48)).num_tokens == 1
