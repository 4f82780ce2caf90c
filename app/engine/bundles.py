"""Bundles in an engine: their parts run as requests of their own, and one output comes of them (records/bundle.py)."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import msgspec

from app.records.outputs import EngineOutput, PooledResult


@dataclass(slots=True)
class _Open:
    """A bundle whose output has not been made."""

    parts: dict[str, int]  # ids of those that run, and their places in it
    results: list[PooledResult | None]
    num_cached_tokens: int = 0
    num_preemptions: int = 0


class Bundles:
    """Those of one engine; its thread alone calls it."""

    def __init__(self) -> None:
        self._open: dict[str, _Open] = {}
        self._bundle_of: dict[str, str] = {}  # by the id of a part

    def add(self, request_id: str, parts: list[str]) -> None:
        """Gather the results of these."""
        self._open[request_id] = _Open({part: i for i, part in enumerate(parts)}, [None] * len(parts))
        self._bundle_of.update(dict.fromkeys(parts, request_id))

    def running(self, request_ids: Iterable[str]) -> list[str]:
        """The ids as the scheduler knows them: of a bundle those of its parts that run."""
        found: list[str] = []
        for request_id in request_ids:
            bundle = self._open.get(request_id)
            found += [request_id] if bundle is None else bundle.parts
        return found

    def gather(self, outputs: list[EngineOutput]) -> tuple[list[EngineOutput], list[str]]:
        """The outputs with those of parts left out, and those of bundles that have ended with them; the first part
        that brings no result ends its bundle with what it says. Also the parts that nobody waits for any more."""
        if not self._open and not self._bundle_of:
            return outputs, []
        shown: list[EngineOutput] = []
        left: list[str] = []
        for output in outputs:
            request_id = self._bundle_of.get(output.request_id)
            if request_id is None:
                shown.append(output)
                continue
            if output.finish_reason is not None:
                del self._bundle_of[output.request_id]
            bundle = self._open.get(request_id)
            if bundle is None:
                continue  # it has ended
            if (ended := self._take(request_id, bundle, output)) is not None:
                del self._open[request_id]
                left += bundle.parts
                shown.append(ended)
        return shown, left

    def _take(self, request_id: str, bundle: _Open, output: EngineOutput) -> EngineOutput | None:
        """Adds a part's output; the bundle's own if that was the last one."""
        place = bundle.parts[output.request_id]
        bundle.num_cached_tokens += output.num_cached_tokens
        bundle.num_preemptions += output.num_preemptions
        if output.pooled is not None:
            bundle.results[place] = output.pooled
        if output.finish_reason is None:
            return None
        del bundle.parts[output.request_id]
        if bundle.results[place] is None:
            return msgspec.structs.replace(output, request_id=request_id)
        if bundle.parts:
            return None
        return msgspec.structs.replace(
            output,
            request_id=request_id,
            pooled=None,
            bundled=[result for result in bundle.results if result is not None],
            num_cached_tokens=bundle.num_cached_tokens,
            num_preemptions=bundle.num_preemptions,
        )
