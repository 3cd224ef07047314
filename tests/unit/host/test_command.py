"""Tests the input, output, timeout and cancellation of short commands."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path

import pytest

from agent_shim.core.errors import HostError
from agent_shim.host import command


async def test_command_gets_its_input_and_returns_its_output() -> None:
    """Secrets are passed as input, because arguments are visible in the process list."""
    assert await command.run("/bin/sh", "-c", "cat; echo end", given="secret ") == "secret end\n"


async def test_failed_command_error_contains_its_output() -> None:
    with pytest.raises(HostError, match=re.escape("cannot run /bin/sh: exit status 3: no lock")):
        await command.run("/bin/sh", "-c", "echo no lock >&2; exit 3")


async def test_hanging_command_is_killed() -> None:
    with pytest.raises(HostError, match="cannot run /bin/sleep: no result within 0 seconds"):
        await command.run("/bin/sleep", "600", timeout=0.05)


async def test_cancelled_command_is_killed(tmp_path: Path) -> None:
    running = asyncio.create_task(command.run("/bin/sh", "-c", f"sleep 0.2; touch {tmp_path}/late"))
    await asyncio.sleep(0.05)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    await asyncio.sleep(0.3)

    assert not (tmp_path / "late").exists()
