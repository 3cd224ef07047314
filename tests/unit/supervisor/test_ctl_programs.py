"""Tests the restart rate limit, and how program output is truncated. ``integration/test_ctl_programs.py`` runs
programs.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

from agent_shim.core.paths import Paths
from agent_shim.supervisor.ctl_programs import MAX_OUTPUT_BYTES, Programs, TokenBucket
from tests.support.played import played


@played
async def test_token_bucket_refills_over_time() -> None:
    """A caller that is cancelled while it waits takes no token."""
    clock, bucket = asyncio.get_running_loop().time, TokenBucket(5, 1)
    for seconds, takes, after in ((0, 5, 0), (0, 3, 3), (2, 2, 5), (100, 5, 105), (0, 1, 106)):
        await asyncio.sleep(seconds)
        for _ in range(takes):
            await bucket.take()
        assert round(clock(), 6) == after
    waiting = [asyncio.create_task(bucket.take()) for _ in range(10)]
    await asyncio.sleep(0.5)
    for each in waiting:
        each.cancel()
    await asyncio.wait(waiting)
    await bucket.take()
    assert round(clock(), 6) == 107


async def test_large_program_output_is_truncated_to_its_end(tmp_path: Path) -> None:
    """The end of the output is kept, because it contains the most recent messages."""
    large = b"".join(b"%d\n" % number for number in range(60_000))
    assert len(large) > MAX_OUTPUT_BYTES
    paths = Paths(tmp_path)
    output = paths.shim_run / "output"
    output.mkdir(parents=True)
    for name, content in (("large.log", large), ("small.log", b"x\n"), ("full.log", bytes(MAX_OUTPUT_BYTES))):
        (output / name).write_bytes(content)
    (output / "other").write_bytes(large)

    await Programs(paths).trim()

    assert (output / "large.log").read_bytes() == large[-MAX_OUTPUT_BYTES // 2 :]
    assert (output / "small.log").read_bytes() == b"x\n"
    assert (output / "full.log").stat().st_size == MAX_OUTPUT_BYTES
    assert (output / "other").read_bytes() == large
