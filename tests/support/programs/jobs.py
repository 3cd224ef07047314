"""Creates jobs with real ctl scripts in a scratch directory, and runs a supervisor with short intervals for them."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

from agent_shim.core.paths import Paths
from agent_shim.host import reaper
from agent_shim.supervisor.supervisor import Event, JobFile, ServiceInfo, Supervisor, Timing
from tests.support.programs import argv, end_kept, end_marked
from tests.support.waiting import until

FAST = Timing(settle=0.3, backoff_first=0.05, backoff_limit=0.4, stop=2, grace=0.3, linger=0.15, look=0.02, cycle=0.1)
LASTING = "exec sleep 600"


class JobTree:
    """Jobs in one directory tree. Their scripts write to ``log``."""

    def __init__(self, base: Path, timing: Timing = FAST) -> None:
        self.base = base
        self.paths = Paths(base)
        self.timing = timing
        self.events: list[Event] = []
        self.log = base / "log"
        self.paths.bosh.mkdir(parents=True)
        self.paths.monit.mkdir()
        self.paths.shim_run.mkdir(parents=True)
        self.paths.mirror.mkdir(parents=True)

    def job(
        self,
        name: str,
        start: str | None = None,
        stop: str | None = "kill $(cat $pidfile)",
        *statements: str,
        group: str = "group vcap",
        timeout: int = 5,
        file: str = "",
    ) -> JobFile:
        """Add a job with one process.

        ``start`` and ``stop`` are shell scripts in which ``$pidfile``, ``$log`` and ``$name`` are set.

        Without ``start``, the job's process writes its own pidfile and keeps running.
        """
        lines = [f"check process {name} with pidfile {self.pidfile(name)}"]
        script = self.script(name, "start", f"echo $$ >$pidfile; {LASTING}" if start is None else start)
        lines.append(f'start program "{script}" with timeout {timeout} seconds')
        if stop is not None:
            lines.append(f'stop program "{self.script(name, "stop", stop)}" with timeout {timeout} seconds')
        return JobFile(name, file, "\n".join([*lines, *statements, group, ""]))

    def script(self, name: str, verb: str, body: str) -> Path:
        """Write a shell script for a job."""
        path = self.base / "jobs" / name / "bin" / verb
        path.parent.mkdir(parents=True, exist_ok=True)
        new = path.with_name(f"{verb}.new")  # An earlier version may be starting, so do not write to its file.
        new.write_text(f"#!/bin/sh\nname={name} log={self.log} pidfile={self.pidfile(name)}\n{body}\n")
        new.chmod(0o755)
        return new.rename(path)

    def pidfile(self, name: str) -> Path:
        return self.base / f"{name}.pid"

    def lines(self) -> list[str]:
        """Return the lines that the scripts have logged."""
        return self.log.read_text().splitlines() if self.log.exists() else []

    def supervisor(self) -> Supervisor:
        return Supervisor(self.paths, notify=self.events.append, timing=self.timing)

    @contextlib.asynccontextmanager
    async def supervising(self, *files: JobFile) -> AsyncIterator[Supervisor]:
        """Run a supervisor for the jobs in ``files``. During the block, this process adopts and reaps orphans."""
        with reaper.reaping():
            async with self.supervisor() as supervisor:
                await supervisor.configure(files)
                await supervisor.start()
                yield supervisor

    @contextlib.asynccontextmanager
    async def checking(self, *files: JobFile) -> AsyncIterator[Supervisor]:
        """Run a supervisor as ``supervising`` does, but let it also check the jobs' monit rules."""
        async with self.supervising(*files) as supervisor:
            running = asyncio.create_task(supervisor.run())
            try:
                yield supervisor
                assert not running.done(), running
            finally:
                running.cancel()

    def told(self, event: str) -> list[tuple[str, str]]:
        """Return the service and the action of each reported event whose type is ``event``."""
        return [(each.service, each.action) for each in self.events if each.event == event]

    def open(self) -> None:
        """Allow every user to write to the directory."""
        for path in (self.base.parent, self.base):
            path.chmod(0o777)

    def end(self) -> None:
        """Kill the jobs' remaining processes."""
        end_kept(self.paths)
        end_marked("TEST_OF", str(self.base))


def program(name: str, *arguments: object) -> str:
    """Return the shell command for a program in ``tests/support/programs``."""
    return " ".join(argv(name, *arguments))


def info(supervisor: Supervisor, name: str) -> ServiceInfo:
    """Return the supervisor's information about one service."""
    return next(each for each in supervisor.services() if each.process.name == name)


async def in_state(supervisor: Supervisor, name: str, *states: str) -> ServiceInfo:
    """Wait until the service ``name`` is in one of the ``states``. Return the supervisor's information about it."""
    await until(lambda: info(supervisor, name).state in states, f"{name} {states}")
    return info(supervisor, name)
