"""Runs of several faults, one after the other, the deployment kept from one to the next where it can be."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import ExitStack

from loadtest.faults import runner
from loadtest.faults.fault import Fault
from loadtest.faults.mix import Ask
from loadtest.faults.results import Run
from loadtest.faults.shapes import Shape
from loadtest.faults.site import Site
from loadtest.faults.traffic import Goldens

GOLDEN_S = 300.0


class Series:
    """`with Series(label, mixed(num_tokens)) as series:` ends its deployment with the block."""

    def __init__(self, label: str, asks: Sequence[Ask]) -> None:
        self._label = label
        self._asks = asks
        self._stack = ExitStack()
        self._site: Site | None = None
        self._goldens: Goldens | None = None

    def __enter__(self) -> Series:
        return self

    def __exit__(self, *_: object) -> None:
        self._close()

    def run(self, fault: Fault, seed: int) -> Run:
        """One run. RuntimeError when no deployment comes up for it."""
        site, goldens = self._open(fault.shape)
        try:
            outcome = asyncio.run(runner.run(fault, site, goldens, self._asks, seed))
        except BaseException:
            self._close()
            raise
        outcome.commit = self._label
        if fault.ends_site or fault.leaves_marks or outcome.whole_s is None:
            self._close()
        return outcome

    def _open(self, shape: Shape) -> tuple[Site, Goldens]:
        if self._site is None or self._goldens is None or self._site.shape is not shape:
            self._close()
            self._site = self._stack.enter_context(Site(shape))
            try:
                recording = Goldens.record(self._site.base_url, self._asks, GOLDEN_S, is_exact=shape.is_exact)
                self._goldens = asyncio.run(recording)
            except RuntimeError as error:
                log = self._site.log()[-4000:]
                self._close()
                raise RuntimeError(f"{error}\n{log}") from error
        return self._site, self._goldens

    def _close(self) -> None:
        self._site = self._goldens = None
        self._stack.close()
