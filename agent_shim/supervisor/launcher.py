"""Starts and stops a service's process, either with the programs in its monit file or with the agent's own bpm.

A monit file may start a process with bpm and stop it with a script, so a service chooses one launcher for starts and
one for stops.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import time
from typing import Protocol

from agent_shim.host.process import Process
from agent_shim.supervisor.bpm_runner import Bpm
from agent_shim.supervisor.ctl_programs import Programs, end_of_last_line
from agent_shim.supervisor.ownership.process_finder import LateError, Timing
from agent_shim.supervisor.plan import ProcessSpec


class Launcher(Protocol):
    """Starts and stops one service's process."""

    writes_pidfile: bool
    """True if the agent itself writes the pidfile. In that case, the pidfile cannot name another process while the
    service's process runs.
    """

    async def start(self, spec: ProcessSpec) -> Process:
        """Start the process. Return the process or, if only its start program is known so far, the start program.

        Raises ``LateError`` if the start takes too long but may still succeed. Other failures raise ``HostError`` or
        ``ConfigError``.
        """

    async def stop(self, spec: ProcessSpec, running: Process | None, *, pid: int, may_signal: bool, by: float) -> None:
        """Stop the process and wait until it has exited. ``running`` is None if the process is unknown.

        ``pid`` is passed to the stop program. Without a stop program, the process gets TERM, but only if ``may_signal``
        is set. ``by`` is the deadline (monotonic time).

        Raises ``TimeoutError`` if the process is still running when the stop times out. In that case, the caller kills
        the process. Other failures raise ``HostError``.
        """

    async def last_output(self, spec: ProcessSpec) -> str:
        """Return the last line that the process has printed, or ""."""


class CtlLauncher:
    """Runs the start and stop programs in a monit file."""

    writes_pidfile = False

    def __init__(self, programs: Programs, timing: Timing) -> None:
        self._programs = programs
        self._timing = timing
        self._stopper: Process | None = None
        """The last stop program, for which the next start waits. It may outlive the stop if the monit file becomes
        invalid during the stop.
        """

    async def start(self, spec: ProcessSpec) -> Process:
        """Run the start program and return it, without waiting for the process."""
        assert spec.start is not None
        return await self._programs.spawn(spec.name, spec.start, "Started")

    async def stop(self, spec: ProcessSpec, running: Process | None, *, pid: int, may_signal: bool, by: float) -> None:
        """Run the stop program or, if there is none, send TERM. Wait until both the program and the process have
        exited. If there is no stop program and ``may_signal`` is False, the process is left alone.
        """
        stopper = None
        if spec.stop is not None:
            stopper = self._stopper = await self._programs.spawn(spec.name, spec.stop, "Stopped", pid=pid)
        elif running is not None and may_signal:
            running.send(signal.SIGTERM)
        else:
            return
        patience = spec.stop.timeout if spec.stop else self._timing.stop
        try:
            async with asyncio.timeout(_seconds_left(patience, by)):
                for process in filter(None, (stopper, running)):
                    await process.wait()
        except TimeoutError:
            if stopper is not None:
                await stopper.terminate(_seconds_left(self._timing.grace, by))
            raise

    async def finish_stop(self, spec: ProcessSpec) -> None:
        """Wait for a stop program that is still running, and terminate it after its timeout. Called before a start,
        because the stop program could otherwise stop the new process.
        """
        if (stopper := self._stopper) is None:
            return
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(spec.stop.timeout if spec.stop else self._timing.stop):
                await stopper.wait()
        if stopper.is_alive:
            await stopper.terminate(self._timing.grace)
        self._stopper = None

    def forget_stop(self) -> None:
        """Forget a stop program that is still running, so that the next start does not wait for it."""
        self._stopper = None

    async def last_output(self, spec: ProcessSpec) -> str:
        return end_of_last_line(await self._programs.printed(spec.name))


class BpmLauncher:
    """Starts and stops a bpm.yml process."""

    writes_pidfile = True

    def __init__(self, bpm: Bpm) -> None:
        self._bpm = bpm
        self._start: asyncio.Task[Process] | None = None
        """The start in progress. It continues if the call to ``start`` times out."""

    @property
    def is_starting(self) -> bool:
        """True while a start is in progress, even if it has exceeded its timeout."""
        return self._start is not None and not self._start.done()

    async def start(self, spec: ProcessSpec) -> Process:
        """Start the process. If the previous start is still in progress, because a slow ``pre_start`` hook has exceeded
        the timeout, wait for that start instead.
        """
        assert spec.start is not None
        assert spec.start_call is not None
        name = f"start {spec.start_call.job}"
        self._start = self._start or asyncio.create_task(self._bpm.start(spec.start_call), name=name)
        done, _ = await asyncio.wait({self._start}, timeout=spec.start.timeout)
        if not done:
            raise LateError(f"no process after {spec.start.timeout:g} seconds, and its start still runs")
        task, self._start = self._start, None
        return task.result()

    async def end_start(self) -> None:
        """Cancel a start in progress, which terminates its hook."""
        task, self._start = self._start, None
        if task is not None:
            task.cancel()
            await asyncio.wait({task})

    def forget_start(self) -> None:
        """Forget a late start whose process has appeared, so that the next ``start`` does not return that process."""
        self._start = None

    async def stop(
        self,
        spec: ProcessSpec,
        running: Process | None,  # noqa: ARG002
        *,
        pid: int,  # noqa: ARG002
        may_signal: bool,  # noqa: ARG002
        by: float,
    ) -> None:
        """Stop the process with bpm's sequence of signals, the last of which is KILL."""
        assert spec.stop is not None
        assert spec.stop_call is not None
        await self._bpm.stop(spec.stop_call, min(by, time.monotonic() + spec.stop.timeout))

    async def last_output(self, spec: ProcessSpec) -> str:
        assert spec.start_call is not None
        return await self._bpm.last_output(spec.start_call)


def _seconds_left(wanted: float, by: float) -> float:
    """Return the seconds until ``by``, at most ``wanted``."""
    return max(0.0, min(wanted, by - time.monotonic()))
