"""The process in which pictures are decoded: it may be killed, the server may not.

Asked a job (a line of JSON, then the picture's file), it answers with a line of JSON (the picture's size and the shape
of its pixels, or an error), then the pixels. Run as `python -m app.media.decoder_process MEMORY_BYTES`.
"""

from __future__ import annotations

import json
import os
import resource
import sys
from functools import lru_cache

import numpy as np

from app.errors import InvalidRequestError
from app.limited_process import serve
from app.media.decoding import DecodingError, decode
from app.media.processors import PROCESSORS
from app.media.processors.base import Processor

MAX_OPEN_FILES = 64


def main() -> None:
    """Answer jobs until the input ends."""
    resource.setrlimit(resource.RLIMIT_NOFILE, (MAX_OPEN_FILES, MAX_OPEN_FILES))
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    serve(int(sys.argv[1]), _answer)


def _answer(asked: bytes) -> bytes:
    line, _, data = asked.partition(b"\n")
    job = json.loads(line)
    try:
        image = decode(data, job["format"], job["max_pixels"], job["max_side"])
        size = image.shape[1], image.shape[0]
        processor = _processor(job["family"], json.dumps(job["settings"]))
        pixels = np.ascontiguousarray(processor.pixels(image, processor.layout(size)))
    except MemoryError:
        os._exit(1)  # what was computed so far cannot be told from what was not
    except DecodingError as error:
        return json.dumps({"error": str(error)}).encode()
    except InvalidRequestError as error:
        return json.dumps({"error": error.message}).encode()
    return json.dumps({"size": size, "shape": pixels.shape}).encode() + b"\n" + pixels.tobytes()


@lru_cache(maxsize=8)
def _processor(family: str, settings: str) -> Processor:
    return PROCESSORS.load(family)(json.loads(settings))


if __name__ == "__main__":
    main()
