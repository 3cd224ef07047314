"""Many at once, and the event loop is not held for long."""

from __future__ import annotations

import asyncio
import itertools

from agent_shim.supervisor.programs import Turns


async def test_few_pass_in_each_turn_of_the_loop() -> None:
    """All pass in the end, in the order they came."""
    turns, passed, seen = Turns(2), [], [0]

    async def one(number: int) -> None:
        await turns.take()
        passed.append(number)

    tasks = [asyncio.create_task(one(number)) for number in range(9)]
    while len(passed) < len(tasks):
        await asyncio.sleep(0)
        seen.append(len(passed))

    assert passed == list(range(9))
    assert max(after - before for before, after in itertools.pairwise(seen)) <= 2
