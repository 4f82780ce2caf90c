"""The two files of a batch: requests in, one JSON object a line; results out, in the order in which they came.

A result is written with one call and never changed, so after a kill only the last line can be cut. It is taken off
when the file is opened again; the requests whose results are there are not sent again.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import sys
import tempfile
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from app.api.batches.lines import BadLine, BatchRequest
from app.cli.batch.short_lines import LineReader
from app.errors import ConfigError

_BEGINNING = b'{"id": "batch_req_'


@contextmanager
def seekable(path: Path) -> Iterator[Path]:
    """`path` itself, or a copy that lasts as long as the block where it can be read only once: a pipe, or `-`, which
    is standard input. ConfigError when it cannot be read."""
    if path.is_file():
        yield path
        return
    with tempfile.NamedTemporaryFile(prefix="manta-batch-", suffix=".jsonl") as copy:
        try:
            if str(path) == "-":
                shutil.copyfileobj(sys.stdin.buffer, copy)
            else:
                with path.open("rb") as pipe:
                    shutil.copyfileobj(pipe, copy)
        except OSError as error:
            raise ConfigError(f"{path}: {error.strerror}") from None
        copy.flush()
        yield Path(copy.name)


def read_requests(path: Path, reader: LineReader) -> Iterator[BatchRequest | BadLine]:
    """The lines of a batch, one at a time; empty ones do not count. ConfigError when the file cannot be read."""
    seen: set[str] = set()
    try:
        with path.open("rb") as file:
            for number, raw in enumerate(file, 1):
                if raw.strip():
                    line = reader.read(number, raw)
                    if isinstance(line, BatchRequest):
                        if line.custom_id in seen:
                            line = BadLine(number, line.custom_id, f"custom_id {line.custom_id!r} is there twice")
                        else:
                            seen.add(line.custom_id)
                    yield line
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from None


@dataclass(slots=True)
class Results:
    """The file of results, open to be added to. Use as `with Results.open(path) as results`."""

    _descriptor: int
    _custom_ids: set[str] = field(default_factory=set)  # the requests that have a result
    _bad_lines: set[int] = field(default_factory=set)  # numbers of the bad lines that have one
    _failed: set[str] = field(default_factory=set)  # those of them whose result is an error

    @classmethod
    def open(cls, path: Path, *, forget_failed: bool = False) -> Self:
        """Opens a file of results. What is there stays, except a last line that was cut, and failures if they are to be
        forgotten. ConfigError when it is no file of results, or when another run has it open.
        """
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            results = cls(os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644))
        except OSError as error:
            raise ConfigError(f"{path}: {error.strerror}") from None
        try:
            results._take_up(path)
            if forget_failed and (results._failed or results._bad_lines):
                results._forget_failed(path.resolve())
        except OSError as error:
            os.close(results._descriptor)
            raise ConfigError(f"{path}: {error.strerror}") from None
        except BaseException:
            os.close(results._descriptor)
            raise
        return results

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        os.close(self._descriptor)

    def has(self, line: BatchRequest | BadLine) -> bool:
        """True if a line of the input needs nothing more."""
        return line.number in self._bad_lines if isinstance(line, BadLine) else line.custom_id in self._custom_ids

    def failed(self, line: BatchRequest | BadLine) -> bool:
        """True if the result of a line is an error."""
        return isinstance(line, BadLine) or line.custom_id in self._failed

    def add_answer(self, request: BatchRequest, status: int, request_id: str, body: Any) -> None:
        """Write what the server answered, good or bad."""
        self._custom_ids.add(request.custom_id)
        if status >= 400:
            self._failed.add(request.custom_id)
        response = {"status_code": status, "request_id": request_id, "body": body}
        self._write({"custom_id": request.custom_id, "response": response, "error": None})

    def add_fault(self, line: BadLine) -> None:
        """Write the result of a line that was never sent."""
        self._bad_lines.add(line.number)
        error = {"code": "invalid_line", "message": f"line {line.number}: {line.message}", "line": line.number}
        self._write({"custom_id": line.custom_id, "response": None, "error": error})

    def _write(self, fields: dict[str, Any]) -> None:
        line = json.dumps({"id": f"batch_req_{uuid.uuid4().hex}", **fields}, ensure_ascii=False) + "\n"
        rest = memoryview(line.encode("utf-8", "surrogatepass"))
        while rest:
            rest = rest[os.write(self._descriptor, rest) :]

    def _take_up(self, path: Path) -> None:
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise ConfigError(f"{path}: another run is writing it") from None
        end = 0
        with path.open("rb") as file:
            for number, raw in enumerate(file, 1):
                whole = raw.endswith(b"\n")
                if not raw.startswith(_BEGINNING) and not (not whole and _BEGINNING.startswith(raw)):
                    raise ConfigError(f"{path}: line {number} is no result of a batch; give another file")
                if whole:
                    self._remember(raw, f"{path}: line {number}")
                    end += len(raw)
        os.ftruncate(self._descriptor, end)

    def _remember(self, raw: bytes, where: str) -> None:
        try:
            entry = json.loads(raw)
            if entry["error"] is None:
                self._custom_ids.add(str(entry["custom_id"]))
                if int(entry["response"]["status_code"]) >= 400:
                    self._failed.add(str(entry["custom_id"]))
            else:
                self._bad_lines.add(int(entry["error"]["line"]))
        except (ValueError, KeyError, TypeError):
            raise ConfigError(f"{where} is no result of a batch; give another file") from None

    def _forget_failed(self, path: Path) -> None:
        """Take the failures out of the file: another one takes its place at once, so a kill loses no result."""
        copy = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
        descriptor = os.open(copy, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_APPEND, 0o644)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            os.fchmod(descriptor, path.stat().st_mode)
            with path.open("rb") as file, open(descriptor, "ab", closefd=False) as kept:
                for raw in file:
                    entry = json.loads(raw)
                    if entry["error"] is None and entry["custom_id"] not in self._failed:
                        kept.write(raw)
            os.replace(copy, path)
        except BaseException:
            os.close(descriptor)
            copy.unlink(missing_ok=True)
            raise
        os.close(self._descriptor)
        self._descriptor = descriptor
        self._custom_ids -= self._failed
        self._failed.clear()
        self._bad_lines.clear()
