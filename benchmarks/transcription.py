"""Sounds on random weights: how many seconds of sound an engine writes down in a second, and the encoder alone.

    python -m benchmarks.transcription --shape whisper-large-v3 [--streams 1 32] [--tokens 120] [--out FILE]

Features come prepared, as the engine gets them: nothing is decoded. Clips are of 30 seconds, each one new; a stream
sends the next one when the last is written down.
"""

from __future__ import annotations

import argparse
import json
import secrets
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from app.checkpoints.model_info import ModelInfo
from app.config.engine import EngineConfig
from app.engine.core import EngineCore
from app.engine.executor.in_process import InProcessExecutor
from app.records.encoder_info import EncoderInfo
from app.records.encoder_input import EncoderInput
from app.records.request import EngineRequest
from app.records.sampling_params import SamplingParams
from benchmarks.offline import write
from benchmarks.shapes import write_shape
from benchmarks.step_profile import kernels_of_a_step, show

CLIP_S = 30.0
PROMPT = [50258, 50259, 50360, 50364]
REPEATS = 6


class Bench:
    """One engine in this process."""

    def __init__(self, shape: str, num_tokens: int, **options: Any) -> None:
        with tempfile.TemporaryDirectory() as folder:
            config = EngineConfig(
                model=str(write_shape(shape, Path(folder))), load_format="dummy", executor="in_process",
                **{"max_num_seqs": 64, "max_num_batched_tokens": 12_000, **options},
            )  # fmt: skip
            info = ModelInfo.of(config)
            self.executor = InProcessExecutor(config)
            self.core = EngineCore(config, info, self.executor, b"a key for benchmarks")
            self.notes = self.core.start().notes
        encoder = EncoderInfo.of(info)
        assert encoder is not None
        self._encoder, self._num_tokens, self._count = encoder, num_tokens, 0
        self._values = np.random.default_rng(0).normal(0, 1, encoder.shape).astype("<f4").tobytes()

    def request(self) -> EngineRequest:
        """A clip that nobody has sent before."""
        self._count += 1
        sound = EncoderInput(
            "audio", secrets.token_bytes(16), self._encoder.num_positions, self._encoder.shape, self._values
        )
        params = SamplingParams(temperature=0, max_tokens=self._num_tokens, ignore_eos=True, seed=0)
        return EngineRequest(f"r{self._count}", PROMPT, params, asks=(sound,))

    def streams(self, count: int, clips_each: int) -> dict[str, float]:
        """Seconds of sound a second, of so many streams side by side, and the time of a clip."""
        begun: dict[str, float] = {}
        times: list[float] = []

        def send() -> None:
            request = self.request()
            begun[request.request_id] = time.perf_counter()
            self.core.add_request(request)

        begin, left = time.perf_counter(), count * (clips_each - 1)
        for _ in range(count):
            send()
        while self.core.has_work():
            for output in self.core.step():
                if output.finish_reason is not None:
                    times.append(time.perf_counter() - begun[output.request_id])
                    if left:
                        left -= 1
                        send()
        taken = time.perf_counter() - begin
        rate = CLIP_S * count * clips_each / taken
        return {f"x_real_time_{count}": rate, f"clip_ms_{count}": 1e3 * float(np.median(times))}

    def profile(self, count: int) -> dict[str, Any]:
        """Kernels of a step that writes for so many clips, by name."""

        def run(length: int) -> None:
            self._num_tokens, asked = length, self._num_tokens
            self.streams(count, 1)
            self._num_tokens = asked

        return kernels_of_a_step(run)

    def encoder(self, counts: tuple[int, ...] = (1, 8)) -> dict[str, float]:
        """Milliseconds of the encoder alone, for so many clips at once."""
        worker: Any = self.executor._worker
        encoder, device = worker._parts.model.encoder, worker._device
        rows: dict[str, float] = {}
        for count in counts:
            seconds = []
            for _ in range(REPEATS):
                _wait(device)
                begin = time.perf_counter()
                with torch.inference_mode():
                    encoder([encoder.largest()] * count)
                _wait(device)
                seconds.append(time.perf_counter() - begin)
            rows[f"encoder_ms_{count}"] = 1e3 * min(seconds)
        return rows

    def close(self) -> None:
        """Give the memory back."""
        self.core.shutdown()


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def main() -> None:
    """Measure, print, write JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="whisper-large-v3")
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 32])
    parser.add_argument("--clips", type=int, default=4, help="Clips of each stream.")
    parser.add_argument("--tokens", type=int, default=120, help="Tokens of a clip.")
    parser.add_argument("--profile", action="store_true", help="Show the kernels of a step, too; on a GPU.")
    parser.add_argument("--engine", type=json.loads, default={}, help="Engine options, as JSON.")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    bench = Bench(args.shape, args.tokens, **args.engine)
    figures: dict[str, Any] = {"shape": args.shape, "tokens": args.tokens, "notes": bench.notes}
    for count in args.streams:
        bench.streams(count, 1)  # warm
        figures |= bench.streams(count, args.clips)
    figures |= bench.encoder()
    for count in args.streams if args.profile else ():
        figures[f"step_{count}"] = bench.profile(count)
        show(f"{args.shape}, {count} streams", figures[f"step_{count}"])
    print(", ".join(f"{name} {value:.4g}" for name, value in figures.items() if isinstance(value, float)), flush=True)
    write(args.out, figures)
    bench.close()


if __name__ == "__main__":
    main()
