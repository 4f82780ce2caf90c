"""Holds what is asked of `manta quantize`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from app.backends import PLATFORMS
from app.errors import ConfigError

FORMS = ("fp8", "fp8_block", "int8", "w4")
MOST_SAMPLES = 100_000
MOST_TOKENS = 1 << 20  # of a text
KVScales = Literal["tensor", "head"]
_OF_TEXTS = ("calibration", "samples", "length")


@dataclass(slots=True, frozen=True)
class QuantizeSettings:
    """One run."""

    model: str
    output: Path
    form: str | None  # of FORMS; None: weights stay as they are
    group_size: int = 128  # inputs that share a scale in 4 bits
    awq: bool = False  # search a scale for each input of linear layers
    kv: KVScales | None = None  # what has a scale in a KV cache of 8 bits
    calibration: Path | None = None  # texts; None: those that come with Manta
    samples: int = 128  # most texts to calibrate with
    length: int = 512  # most tokens of each
    device: str = "auto"
    report: bool = True
    questions: int = 84  # most of a model's own that are answered for the report
    shard_bytes: int = 5 << 30

    def __post_init__(self) -> None:
        if self.device not in (devices := ("auto", *PLATFORMS)):
            raise ConfigError(f"--device: {self.device!r} is none of {', '.join(devices)}")
        if self.form is None and self.kv is None:
            raise ConfigError(f"--to: one of {', '.join(FORMS)}; or --kv fp8, to calibrate the KV cache alone")
        if self.awq and self.form != "w4":
            raise ConfigError("--awq: for 4-bit weights only: add --to w4")
        if self.group_size != 128 and self.form != "w4":
            raise ConfigError("--group-size: for 4-bit weights only: add --to w4")
        for name in () if self.report else ("questions", *(() if self.calibrates else _OF_TEXTS)):
            if getattr(self, name) != self.__dataclass_fields__[name].default:
                raise ConfigError(f"--{name}: nothing here reads them: leave it out, or --no-report")

    @property
    def calibrates(self) -> bool:
        """True if texts decide about what is written."""
        return self.awq or self.kv is not None
