"""The search for replicas outlives trouble of the control plane, and ends when it is told to."""

from __future__ import annotations

import asyncio
from typing import NoReturn

from app.deployments.channel.replica_finder import Discovery, ReplicaFinder
from tests.limits import run, until


def test_a_failed_search_is_repeated() -> None:
    answers: list[Discovery | Exception] = [ConnectionError("no controller"), Discovery(frozenset("a"), complete=True)]
    found: list[Discovery] = []

    async def discover() -> Discovery:
        answer = answers.pop(0) if len(answers) > 1 else answers[0]
        if isinstance(answer, Exception):
            raise answer
        return answer

    async def main() -> None:
        finder = ReplicaFinder("m", discover, found.append, lambda: bool(found))
        assert not finder.is_searching
        finder.start()
        await until(lambda: bool(found))
        assert finder.is_searching
        await finder.close()
        assert not finder.is_searching

    run(main())


def test_a_swallowed_cancellation_ends_the_search_all_the_same() -> None:
    """Serve turns the cancellation of its own calls into an ordinary exception."""
    asked = asyncio.Event()

    async def discover() -> NoReturn:
        asked.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError as error:
            raise RuntimeError("cancelled") from error
        raise AssertionError

    async def main() -> None:
        finder = ReplicaFinder("m", discover, lambda discovery: None, lambda: False)
        finder.start()
        await asked.wait()
        await finder.close()

    run(main())
