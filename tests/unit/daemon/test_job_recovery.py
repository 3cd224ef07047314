"""Tests requests that arrive while jobs are being recovered, with a real task queue and a fake supervisor."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from agent_shim.actions.agent import Agent
from agent_shim.actions.tasks import Tasks
from agent_shim.daemon.job_recovery import JobRecovery, RecoveryPace

PACE = RecoveryPace(first=60, limit=60, look=0.01)


class RecoveringAgent:
    """An agent on a new root file system, with a pre-start in progress."""

    def __init__(self, base: Path) -> None:
        self.begun = asyncio.Event()
        self.may_end = asyncio.Event()
        self.was_cut_short = False
        self.is_over = asyncio.Event()
        self.tasks = Tasks(base / "tasks.json")
        self.supervisor = SimpleNamespace(is_held=True, is_wanted=True, end_hold=self._go_on, hold=lambda _: None)
        self.agent = SimpleNamespace(
            tasks=self.tasks,
            supervisor=self.supervisor,
            scripts=SimpleNamespace(run_all=self._pre_start),
            spec=SimpleNamespace(current=SimpleNamespace(job_names=["web"])),
            state_backup=SimpleNamespace(is_prepared=False, prepared=self._nothing, root_is_new=True, unwritable=""),
            disks=SimpleNamespace(recover=self._nothing, problem=self._no_problem),
        )

    async def _pre_start(self, *_: object) -> None:
        self.begun.set()
        try:
            await self.may_end.wait()
        except asyncio.CancelledError:
            self.was_cut_short = True
            raise
        finally:
            self.is_over.set()

    def _go_on(self) -> None:
        self.supervisor.is_held = False

    async def _nothing(self) -> None:
        pass

    async def _no_problem(self) -> str:
        return ""


@pytest.fixture
async def recovering(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[RecoveringAgent]:
    monkeypatch.setattr("agent_shim.daemon.job_recovery.missing_files", lambda _: "")
    monkeypatch.setattr("agent_shim.daemon.job_recovery.record_health", lambda _: asyncio.sleep(0))
    made = RecoveringAgent(tmp_path)
    recovery = JobRecovery(cast("Agent", made.agent), lambda _: None, pace=PACE)
    running = [asyncio.create_task(made.tasks.run(lambda _, exc: str(exc))), asyncio.create_task(recovery.run())]
    async with asyncio.timeout(20):
        await made.begun.wait()
    yield made
    for task in running:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


async def _work() -> Any:
    return None


@pytest.mark.parametrize("method", ["apply", "drain", "migrate_disk", "run_script", "stop", "unmount_disk"])
async def test_request_that_changes_jobs_cancels_the_pre_start_during_recovery(
    recovering: RecoveringAgent, method: str
) -> None:
    """Requests such as a stop must not wait for a pre-start that may hang."""
    task = recovering.tasks.submit(method, _work)

    async with asyncio.timeout(20):
        await task.ended.wait()

    assert recovering.was_cut_short
    assert recovering.supervisor.is_held


@pytest.mark.parametrize("method", ["fetch_logs", "compile_package", "ssh"])
async def test_request_that_changes_no_job_waits_for_the_pre_start_during_recovery(
    recovering: RecoveringAgent, method: str
) -> None:
    task = recovering.tasks.submit(method, _work)
    await asyncio.sleep(10 * PACE.look)
    assert not recovering.is_over.is_set()

    recovering.may_end.set()
    async with asyncio.timeout(20):
        await task.ended.wait()

    assert not recovering.was_cut_short
    assert not recovering.supervisor.is_held
