"""The process in which sounds are decoded and heard: it may be killed, the server may not.

Asked a job (a line of JSON, then bytes), it answers with a line of JSON, padded so that numbers behind it lie at
multiples of their size, then bytes: a file's samples as int16, or a piece's features as float32. Samples come as they
are decoded, half a minute an answer: where it says that there are `more`, the next job is to ask for them, or to `end`
the file, which it then forgets. Run as `python -m app.media.audio.sound_process MEMORY_BYTES`.
"""

from __future__ import annotations

import json
import math
import os
import resource
import sys
from collections.abc import Iterator
from functools import lru_cache
from typing import Any

import numpy as np

from app.limited_process import allow, serve
from app.media.audio.decoding import DecodingError, SoundBounds, decode
from app.media.audio.features import FEATURES, Features

MAX_OPEN_FILES = 64
HEAD_BYTES = 512
ANSWER_BYTES = 1 << 20  # of samples


def main() -> None:
    """Answer jobs until the input ends."""
    resource.setrlimit(resource.RLIMIT_NOFILE, (MAX_OPEN_FILES, MAX_OPEN_FILES))
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    serve(int(sys.argv[1]), SoundJobs().answer)


class SoundJobs:
    """Answers jobs one after the other; between two it holds the file of which there is more."""

    def __init__(self) -> None:
        self._blocks: Iterator[bytes] = iter(())

    def answer(self, asked: bytes) -> bytes | bytearray:
        """Gives what a job asks for, or says what is wrong with its file."""
        line, _, data = asked.partition(b"\n")
        job = json.loads(line)
        allow(job["most_s"])
        try:
            return _heard(job, data) if job["do"] == "hear" else self._decoded(job, data)
        except MemoryError:
            os._exit(1)  # what was computed so far cannot be told from what was not
        except DecodingError as error:
            return _head({"error": str(error)})

    def _decoded(self, job: dict[str, Any], data: bytes) -> bytearray:
        if job["do"] == "decode":
            self._blocks = decode(data, job["kind"], SoundBounds(job["rate"], job["max_s"]))
            if job["kept"] is not None or job["behind"]:
                return _within(self._next(math.inf), job)
        elif job["do"] == "end":
            self._blocks = iter(())
        return self._next(ANSWER_BYTES)

    def _next(self, num_bytes: float) -> bytearray:
        """Returns the next blocks, at least so many bytes, or all that are left."""
        answer = bytearray(HEAD_BYTES)
        for block in self._blocks:
            answer += block
            if len(answer) - HEAD_BYTES >= num_bytes:
                answer[:HEAD_BYTES] = _head({"more": True})
                return answer
        answer[:HEAD_BYTES] = _head({})
        return answer


def _within(answer: bytearray, job: dict[str, Any]) -> bytearray:
    """The same without the samples around a stretch."""
    end = max(HEAD_BYTES, len(answer) - 2 * job["behind"])
    begin = HEAD_BYTES if job["kept"] is None else max(HEAD_BYTES, end - 2 * job["kept"])
    del answer[end:], answer[HEAD_BYTES:begin]
    return answer


def _heard(job: dict[str, Any], data: bytes) -> bytes:
    samples = np.frombuffer(data, "<i2").astype(np.float32) / np.float32(32_768)
    made = _features(job["maker"], json.dumps(job["settings"], sort_keys=True)).of(samples)
    return _head({}) + np.ascontiguousarray(made, "<f4").tobytes()


@lru_cache(maxsize=8)
def _features(maker: str, settings: str) -> Features:
    made: Features = FEATURES.load(maker).of_json(json.loads(settings))
    return made


def _head(said: dict[str, Any]) -> bytes:
    return json.dumps(said).encode().ljust(HEAD_BYTES - 1) + b"\n"


if __name__ == "__main__":
    main()
