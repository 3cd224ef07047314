"""Kills an agent at a chosen system call that changes files, or makes such calls fail."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

from agent_shim.demo.director import RpcRemoteError, RpcTimeoutError
from tests.support.stand import CannotInjectError, Stand, expect, until

Told = dict[str, Any]
"""The tracer's report about a kill, or an empty dictionary if ``work`` made too few calls for a kill."""


async def killed(
    stand: Stand, number: int, who: str, places: Sequence[Path], work: Callable[[], Awaitable[None]]
) -> Told:
    """Kill processes at the ``number``-th system call that changes a file below ``places`` during ``work``.

    ``who`` selects the agent or its children (see ``tracer.py``). Return the tracer's report once the agent is running
    again. By then, ``work`` may have failed or may still be unfinished.
    """
    pid = stand.pid
    async with tracing(pid, number, who, places) as lines:
        working = asyncio.ensure_future(work())
        telling = asyncio.create_task(lines.readline())
        await asyncio.wait([working, telling], return_when=asyncio.FIRST_COMPLETED)
    # The tracer may have killed the process after the work had finished but before the tracer was stopped, so read its
    # report.
    told: Told = json.loads(await telling or "{}")
    if not told:
        await working
        return {}
    if pid in told["killed"]:
        stand.expected_ends += 1
        working.cancel()
        await until(lambda: len(stand.ends) == stand.expected_ends, 60, "the killed agent did not exit")
        await stand.answers(60)
    with contextlib.suppress(asyncio.CancelledError, RpcRemoteError, RpcTimeoutError):
        await working
    return told


async def recorded(stand: Stand, places: Sequence[Path], work: Callable[[], Awaitable[None]]) -> list[Told]:
    """Run ``work`` without killing anything. Return a report on each system call that changes a file below ``places``.

    Calls by the agent and by its children are reported.
    """
    async with tracing(stand.pid, 0, "root", places) as lines:
        reading = asyncio.create_task(lines.read())
        await work()
    return [json.loads(line) for line in (await reading).splitlines()]


async def _end_workers(pid: int) -> None:
    """Kill the agent's idle workers, because the tracer would not follow them. It follows only children that are forked
    after it has attached, and the agent forks new workers when it needs them.
    """
    while workers := [child for child in _children(pid) if b"agent_shim.bulk.worker" in _command_line(child)]:
        for worker in workers:
            with contextlib.suppress(ProcessLookupError):
                os.kill(worker, signal.SIGKILL)
        await asyncio.sleep(0.01)


def _children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def _command_line(pid: int) -> bytes:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    return b""


@contextlib.asynccontextmanager
async def tracing(pid: int, number: int, who: str, places: Sequence[Path]) -> AsyncIterator[asyncio.StreamReader]:
    """Run a tracer that follows a process. Yield the tracer's output."""
    await _end_workers(pid)
    argv = ["-m", "tests.support.tracer", str(pid), str(number), who, *map(str, places)]
    tracer = await asyncio.create_subprocess_exec(sys.executable, *argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert tracer.stdout is not None
    assert tracer.stderr is not None
    try:
        if await tracer.stdout.readline() != b"following\n":
            raise CannotInjectError((await tracer.stderr.read()).decode()[-200:].strip() or "no tracer")
        yield tracer.stdout
    finally:
        if tracer.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                # terminate() may reap the process, and asyncio would then lose its exit status.
                os.kill(tracer.pid, signal.SIGTERM)
        await tracer.wait()


async def sweep(point: Callable[[str], Awaitable[Told]], step: int) -> tuple[int, int]:
    """Call ``point`` for every ``step``-th system call number. ``point`` kills the agent at that call.

    Stop when two runs in a row finish before they reach their call. One such run is not enough, because the number of
    calls varies by one or two between runs.

    Return the number of kills and the number of the last call.
    """
    count, last, beyond, number = 0, 0, 0, 1
    while beyond < 2:
        if await point(f"v{number}"):
            count, last, beyond = count + 1, number, 0
        else:
            beyond += 1
        number += step
    expect(count > 1, f"expected at least two kills or failed calls, but there were {count}")
    return count, last


async def tidied(places: Sequence[Path], where: str) -> None:
    """Check that no half-written files have been left behind.

    Each temporary file that exists now must disappear within 5 s. Temporary files of later writes have new names and
    are ignored.
    """

    def left() -> set[Path]:
        return {path for place in places for glob in (".*.tmp-*", "worker-*") for path in place.rglob(glob)}

    first = left()
    await until(lambda: not first & left(), 5, f"{where}: {len(first)} temporary files were not removed")


def places_of_state(base: Path) -> list[Path]:
    """Return the directories that contain state files."""
    return [base / "bosh", base / "data/bosh", base / "instance", base / "monit"]


def changes(stand: Stand, version: str) -> Sequence[tuple[Any, ...]]:
    """Change the settings file as a CPI would, and return requests that together change every state file."""
    document = json.loads(stand.world.source.read_text())
    document["vm"]["name"] = version
    stand.world.source.write_text(json.dumps(document))
    blobstore = {"provider": "local", "options": {"blobstore_path": str(stand.world.store), "version": version}}
    update = {"trusted_certs": "", "disk_associations": [], "unknown": version, "blobstores": [blobstore]}
    return (
        ("update_settings", update),
        ("add_persistent_disk", f"disk-{version}", {"path": f"/dev/{version}"}),
        ("stop",),
        ("apply", stand.world.spec(2, 0, version=version)),
        ("start",),
        ("remove_persistent_disk", f"disk-{version}"),
    )
