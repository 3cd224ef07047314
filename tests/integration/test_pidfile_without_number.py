"""Tests pidfiles that contain no valid pid even though the process is running. In this case, the agent runs the start
program again, as monit does.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
from collections.abc import AsyncIterator

import pytest
from msgspec.structs import replace

from agent_shim.host import guarded
from agent_shim.supervisor.supervisor import Supervisor
from tests.support.programs import foreign, is_alive
from tests.support.programs.jobs import LASTING, JobTree, in_state, info
from tests.support.waiting import until


@contextlib.asynccontextmanager
async def cycling(supervisor: Supervisor) -> AsyncIterator[None]:
    """Check the pidfiles periodically, as the agent does."""
    running = asyncio.create_task(supervisor.run())
    try:
        yield
    finally:
        running.cancel()


COUNTED = f"echo start >>$log; echo $$ >$pidfile; {LASTING}"


@pytest.mark.parametrize("text", ["", "0\n", "-1\n", "abc\n", "99999999999999\n", "4194304\n", None])
async def test_invalid_pidfile_restarts_the_service(world: JobTree, text: str | None) -> None:
    async with world.supervising(world.job("web", COUNTED)) as supervisor:
        before = (await in_state(supervisor, "web", "running")).pid
        if text is None:
            world.pidfile("web").unlink()
        else:
            world.pidfile("web").write_text(text)
        async with cycling(supervisor):
            await until(lambda: info(supervisor, "web").pid not in (0, before))
        await until(lambda: not is_alive(before))

        assert (await in_state(supervisor, "web", "running")).restarts == 1
        assert world.lines() == ["start"] * 2
        assert [(e.event, e.action, e.description) for e in world.events[:1]] == [
            ("Does not exist", "restart", "process is not running")
        ]
        assert info(supervisor, "web").exits == {}
        await supervisor.stop(wait=True)


async def test_start_after_an_invalid_pidfile_may_keep_the_running_process(world: JobTree) -> None:
    """If the process is already running, cf-rabbitmq-release's start program only writes its pid."""
    start = "echo start >>$log; if [ -e $log.pid ]; then cp $log.pid $pidfile; "
    start += f"else echo $$ | tee $log.pid >$pidfile; {LASTING}; fi"
    async with world.supervising(world.job("web", start)) as supervisor:
        before = (await in_state(supervisor, "web", "running")).pid
        world.pidfile("web").write_text("0\n")
        async with cycling(supervisor):
            await until(lambda: len(world.lines()) == 2)

        assert (await in_state(supervisor, "web", "running")).pid == before
        await supervisor.stop(wait=True)
        assert not is_alive(before)


async def test_second_start_after_an_invalid_pidfile_kills_the_old_process(world: JobTree) -> None:
    """The first start fails if the old process still holds a port or a lock."""
    start = f"echo start >>$log; exec 9>$log.lock; flock -n 9 || exit 1; echo $$ >$pidfile; {LASTING}"
    async with world.supervising(world.job("web", start, timeout=1)) as supervisor:
        before = (await in_state(supervisor, "web", "running")).pid
        world.pidfile("web").unlink()
        async with cycling(supervisor):
            await until(lambda: info(supervisor, "web").pid not in (0, before))

        assert not is_alive(before)
        await supervisor.stop(wait=True)


async def test_unrelated_pid_in_the_pidfile_of_a_running_service_is_ignored(world: JobTree) -> None:
    stranger = foreign("/bin/sleep", 600, TEST_OF=str(world.base))
    async with world.supervising(world.job("web", COUNTED, "exit 0")) as supervisor:
        before = (await in_state(supervisor, "web", "running")).pid
        world.pidfile("web").write_text(f"{stranger}\n")
        await supervisor.check_pidfiles()

        assert (info(supervisor, "web").state, info(supervisor, "web").pid) == ("running", before)
        await supervisor.stop(wait=True)
        assert is_alive(stranger)


async def test_momentarily_empty_pidfile_causes_no_restart(world: JobTree) -> None:
    world.timing = replace(world.timing, cycle=600, look=0.5)
    async with world.supervising(world.job("web", COUNTED)) as supervisor:
        before = (await in_state(supervisor, "web", "running")).pid
        world.pidfile("web").write_text("")
        checking = asyncio.create_task(supervisor.check_pidfiles())
        for _ in range(10):
            await asyncio.sleep(0)
        world.pidfile("web").write_text(f"{before}\n")
        await checking

        assert (info(supervisor, "web").state, info(supervisor, "web").pid) == ("running", before)
        assert world.events == []
        await supervisor.stop(wait=True)


async def test_restarted_agent_replaces_a_process_whose_pidfile_is_missing(world: JobTree) -> None:
    async with world.supervising(world.job("web", COUNTED)) as supervisor:
        before = (await in_state(supervisor, "web", "running")).pid
        supervisor.hold()
        world.pidfile("web").unlink()
        async with cycling(supervisor):
            await in_state(supervisor, "web", "restarting")
    async with world.supervisor() as supervisor, cycling(supervisor):
        assert await supervisor.recover()
        await until(lambda: info(supervisor, "web").pid not in (0, before))
        await until(lambda: not is_alive(before))
        await supervisor.stop(wait=True)


async def test_unreadable_pidfile_is_not_treated_as_invalid(world: JobTree, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    async with world.supervising(world.job("web", COUNTED)) as supervisor:
        before = (await in_state(supervisor, "web", "running")).pid
        with monkeypatch.context() as full:
            full.setattr(guarded, "open_file", refuse)
            await supervisor.check_pidfiles()

        assert (info(supervisor, "web").state, info(supervisor, "web").pid) == ("running", before)
        world.pidfile("web").write_text("")
        await supervisor.check_pidfiles()
        await until(lambda: info(supervisor, "web").pid not in (0, before))
        await supervisor.stop(wait=True)
