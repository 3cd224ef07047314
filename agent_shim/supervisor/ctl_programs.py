"""Runs services' start and stop programs, and job scripts."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import os
import re
import socket
import time
from collections.abc import Collection, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Final

from agent_shim.core.errors import HostError
from agent_shim.core.paths import Paths
from agent_shim.host import blocking, guarded, keeper
from agent_shim.host.process import Process
from agent_shim.supervisor.monit.ast import MonitProgram
from agent_shim.supervisor.ownership.keepers import Keepers, Left, script_label
from agent_shim.supervisor.ownership.process_record import Identity

logger = logging.getLogger(__name__)

MAX_DESCRIPTION_CHARS: Final = 236
"""Maximum length of an event description in a program's environment, as in monit."""
MAX_CONCURRENT_SPAWNS: Final = 3
"""Maximum number of programs that are being started at the same time. It is limited because each start takes a thread,
CPU time and iterations of the event loop.
"""
MAX_OUTPUT_BYTES: Final = 256 * 1024
"""Size above which a service's output file is truncated by ``trim``."""
MAX_LAST_BYTES: Final = 400
"""Maximum length of the line that is quoted from a program's output when it fails."""
MAX_TAIL_BYTES: Final = 4096
"""How many bytes at the end of the output are searched for the last line."""
_TRACE: Final = re.compile(r"\++ ")
"""Prefix of commands traced by ``set -x``."""
_LIMIT_REFUSED: Final = re.compile(r".*\bulimit: .*(cannot modify limit|error setting limit).*")
"""Matches the message that bash and dash print if a script requests a limit above the container's."""


class Programs:
    """Runs start and stop programs as monit does (monit 5.2.5 spawn.c, env.c), each under a separate keeper.

    ``output`` has two files for each service: ``NAME.log`` with the output of the start program, and ``NAME~.log`` with
    that of all other programs.

    The working directory of programs and scripts is an empty directory owned by root, because some of them change the
    owner of their working directory. For example, stackdriver-nozzle in gcp-tools-release gives ``.`` to vcap (under
    runit, this is monit's service directory). The directory is directly below the base, as is the Go agent's working
    directory, because an errand in shared-redis-release reads ``../jobs/smoke-tests/config.json``.
    """

    def __init__(self, paths: Paths) -> None:
        self.keepers: Final = Keepers(paths)
        self._empty = paths.empty
        self._output = paths.shim_run / "output"
        self._gate = asyncio.Semaphore(MAX_CONCURRENT_SPAWNS)

    async def spawn(
        self,
        name: str,
        program: MonitProgram,
        event: str,
        *,
        description: str = "",
        label: str = "",
        pid: int = 0,
    ) -> Process:
        """Run a program for the service ``name``, whose process is ``pid``, in response to ``event``. Raises
        ``HostError``.

        ``label`` is the label of the program's keeper, by default the service's name. A program run by a rule
        (``keepers.rule_label``) does not belong to the service. It keeps running when the service is stopped, because
        the program itself may request the stop.
        """
        async with self._gate:  # wait before creating files or objects, because hundreds of starts may be waiting
            await asyncio.sleep(0)  # let other tasks run, because many starts may follow
            env = {
                "PATH": "/bin:/usr/bin:/sbin:/usr/sbin",
                "MONIT_DATE": time.strftime("%a, %d %b %Y %H:%M:%S %z"),
                "MONIT_SERVICE": name,
                "MONIT_HOST": socket.gethostname(),
                "MONIT_EVENT": event,
                "MONIT_DESCRIPTION": (description or event)[:MAX_DESCRIPTION_CHARS],
                "MONIT_PROCESS_PID": str(pid),
                # Unlike monit, the agent does not pass the figures from the last cycle.
                "MONIT_PROCESS_MEMORY": "0",
                "MONIT_PROCESS_CHILDREN": "0",
                "MONIT_PROCESS_CPU_PERCENT": "0.0",
            }
            if "TZ" in os.environ:
                env["TZ"] = os.environ["TZ"]
            try:
                user = keeper.user(program.uid or None, program.gid or None)
            except HostError as exc:
                raise HostError(f"cannot run {program.argv[0]}: {exc}") from None
            started = keeper.Program(program.argv, env, cwd=str(self.directory()), user=user)
            with contextlib.ExitStack() as opened:
                # Programs other than the start program write to a separate file, because their output must not be shown
                # as output of the process.
                output = self._open(name if event == "Started" else f"{name}~", opened)
                return await self.keepers.spawn(label or name, started, output, output)

    async def spawn_script(
        self,
        job: str,
        argv: Sequence[str],
        *,
        env: Mapping[str, str],
        stdout: int | Path | None = None,
        stderr: int | Path | None = None,
        nice: int = 0,
    ) -> Process:
        """Run a job script. Any processes that it leaves running belong to the job. ``stdout`` and ``stderr`` are
        passed to ``Keepers.spawn``.
        """
        script = keeper.Program(argv, env, cwd=str(self.directory()), nice=nice)
        return await self.keepers.spawn(script_label(job), script, stdout, stderr)

    async def end_left_by_scripts(self, grace: float, spared: Collection[Identity]) -> list[Left]:
        """Terminate the processes that job scripts have left running and that no service has taken over. Return the
        survivors.

        This is necessary because a failed pre-start may leave a process that occupies a port needed by the next
        attempt. ``spared`` are the processes of services that keep running. If a job's script started one of them, all
        processes started by that job's scripts are left alone.
        """
        in_use = set(map(self.keepers.owner, spared))
        labels = [label for label in self.keepers.of_scripts() if label not in in_use]
        return await self.keepers.end(labels, (), grace, is_usual=True)

    def directory(self) -> Path:
        """Return the working directory of programs and scripts: the empty directory or, if it is missing, the root
        directory.
        """
        return self._empty if self._empty.is_dir() else Path("/")

    # --- program output -----------------------------------------------------------------------------------------------

    async def refused_limit(self, name: str) -> str:
        """Return the last error message about a failed ``ulimit`` in the output of a start program, or "" if there is
        none. ``name`` is the name of the service.
        """
        lines = await self.printed(name)
        return next((line[-MAX_LAST_BYTES:] for line in reversed(lines) if _LIMIT_REFUSED.match(line)), "")

    async def printed(self, name: str) -> list[str]:
        """Return the last non-empty lines that a service's start program has printed. If the output file is empty, as
        is usual, no thread is used.
        """
        path = self._output / f"{name.replace('/', '_')}.log"
        with contextlib.suppress(OSError):
            if not path.stat(follow_symlinks=False).st_size:
                return []
        return await _lines(name, path, self._output)

    async def trim(self) -> None:
        """Truncate large output files, keeping their end, because a start program that has become the daemon may keep
        printing forever.

        The check itself is done without a thread, because starting one would take longer than the stat calls.
        """
        with os.scandir(self._output) as entries:
            for entry in entries:
                status = entry.stat(follow_symlinks=False)
                # Look at the allocated blocks too, because a job can allocate blocks beyond the end of the file. Count
                # only a quarter of them, because file systems may allocate up to twice the file's size in advance.
                taken = max(status.st_size, status.st_blocks * guarded.BLOCK_BYTES // 4)
                if entry.name.endswith(".log") and taken > MAX_OUTPUT_BYTES:
                    await asyncio.to_thread(_cut, Path(entry.path), status.st_size)

    def _open(self, name: str, opened: contextlib.ExitStack) -> int | None:
        """Open an output file, and register it with ``opened``, which closes it. Return None on failure, because a full
        disk must not prevent a start.
        """
        try:
            self._output.mkdir(mode=0o700, parents=True, exist_ok=True)
            output = guarded.open_log(self._output / f"{name.replace('/', '_')}.log", 0o640)
        except OSError as exc:
            logger.warning("cannot capture the output of %s: %s", name, exc)
            return None
        opened.callback(os.close, output)
        return output


async def last_line(whose: str, path: Path, root: Path) -> str:
    """Return the last line of a file below ``root``, or "" if the file cannot be read. Empty lines and, if possible,
    ``set -x`` traces are skipped.

    ``whose`` is the label of the service that can write to the file. If reading hangs, only that service's files are
    affected (``blocking.call``).
    """
    return end_of_last_line(await _lines(whose, path, root))


def end_of_last_line(lines: list[str]) -> str:
    """Return the end of the last of the ``lines``. Prefer lines that are not commands traced by ``set -x``."""
    candidates = [line for line in lines if not _TRACE.match(line)] or lines
    return candidates[-1][-MAX_LAST_BYTES:] if candidates else ""


def _cut(path: Path, size: int) -> None:
    """Truncate an output file of ``size`` bytes, keeping its end. Only half of the maximum size is kept, so that the
    next truncation is not due at once.
    """
    with path.open("r+b", buffering=0) as stream:
        stream.seek(max(0, size - MAX_OUTPUT_BYTES // 2))
        end = stream.read(MAX_OUTPUT_BYTES // 2)
        # Output that programs append in the meantime ends up after the kept part or is lost.
        stream.truncate(0)
        stream.seek(0)
        stream.write(end)


async def _lines(whose: str, path: Path, root: Path) -> list[str]:
    """Return the last non-empty lines of a file below ``root``. The list is empty if the file cannot be read."""
    try:
        text = await blocking.call(whose, partial(guarded.tail, path, MAX_TAIL_BYTES, root))
    except OSError as exc:
        if exc.errno != errno.ENOENT:
            logger.warning("cannot read the last output of %s: %s", whose, exc)
        return []
    return [line.strip() for line in text.decode(errors="replace").split("\n") if line.strip()]


class TokenBucket:
    """A rate limit shared by all services: at first ``burst`` tokens are available, then ``rate`` tokens per second."""

    def __init__(self, burst: float, rate: float) -> None:
        self._burst, self._rate = burst, rate
        self._left = burst
        self._filled_at = time.monotonic()

    async def take(self) -> None:
        """Wait for a token."""
        now = time.monotonic()
        # A negative number means that waiting tasks have already reserved future tokens.
        self._left = min(self._burst, self._left + (now - self._filled_at) * self._rate) - 1
        self._filled_at = now
        if self._left < 0:
            try:
                await asyncio.sleep(-self._left / self._rate)
            except asyncio.CancelledError:
                self._left += 1  # return the token if this task is cancelled
                raise
