"""Start and stop programs of services, and scripts of jobs."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import os
import re
import socket
import time
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final

from agent_shim.core.paths import Paths
from agent_shim.host import guarded, job_cgroups, process
from agent_shim.host.process import Process
from agent_shim.supervisor.monit.ast import Program
from agent_shim.supervisor.ownership import process_record
from agent_shim.supervisor.ownership.evidence import Left, Ownership
from agent_shim.supervisor.ownership.process_record import ProcessRecord, is_rule_label
from agent_shim.supervisor.ownership.remains import Remains

logger = logging.getLogger(__name__)

MAX_DESCRIPTION_CHARS: Final = 236
"""Length of the text of an event in the environment of a program, as in monit."""
MAX_CONCURRENT_SPAWNS: Final = 3
"""Each takes a thread, a processor and turns of the event loop."""
MAX_OUTPUT_BYTES: Final = 256 * 1024
"""Approximate size of a service's output file. See ``trim``."""
MAX_LAST_BYTES: Final = 400
"""Length of the last output line in the report of a failure."""
MAX_TAIL_BYTES: Final = 4096
"""Length of output searched for that line."""
_OUTSIDE: Final = "%s: cannot use a cgroup, tracking its processes by descent: %s"
_VARIABLE: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_TRACE: Final = re.compile(r"\++ ")
"""Prefix of commands traced by ``set -x``."""
_LIMIT_REFUSED: Final = re.compile(r".*\bulimit: .*(cannot modify limit|error setting limit).*")
"""Message of bash and dash for a limit above the container's."""


class Programs:
    """Runs start and stop programs as monit does (monit 5.2.5 spawn.c, env.c).

    Their environment holds monit's variables and the agent's mark, which identifies their processes. ``base`` keeps it
    distinct from the mark of another agent. Their output goes to one file per service in ``output``.

    Programs and scripts start in an empty directory that root owns: stackdriver-nozzle of gcp-tools-release gives
    ``.`` to vcap, which is monit's service directory under runit. It is directly below ``base``, as is the Go agent's
    working directory: an errand of shared-redis-release reads ``../jobs/smoke-tests/config.json``.
    """

    def __init__(self, base: Path, output: Path) -> None:
        self._base = base
        self._empty = Paths(base).empty
        self._output = output
        self.ownership = Ownership(base)
        self.remains = Remains(self.ownership)
        self.scripts: dict[str, ProcessRecord] = {}
        """Records, by label, of the processes that the scripts and the rules of each job start."""
        self._gate = asyncio.Semaphore(MAX_CONCURRENT_SPAWNS)

    async def run(
        self,
        name: str,
        program: Program,
        event: str,
        *,
        description: str = "",
        label: str = "",
        pid: int = 0,
    ) -> Process:
        """Run a program for the service ``name``, whose process is ``pid``, after ``event``. Raises ``HostError``.

        ``label`` is the mark, by default the name. A program of a rule (``process_record.rule_label``) is no part of
        the service and survives its stop, which it may itself request.
        """
        label = label or name
        async with self._gate:  # with nothing made yet: hundreds wait
            await asyncio.sleep(0)
            env = {
                "PATH": "/bin:/usr/bin:/sbin:/usr/sbin",
                "MONIT_DATE": time.strftime("%a, %d %b %Y %H:%M:%S %z"),
                "MONIT_SERVICE": name,
                "MONIT_HOST": socket.gethostname(),
                "MONIT_EVENT": event,
                "MONIT_DESCRIPTION": (description or event)[:MAX_DESCRIPTION_CHARS],
                "MONIT_PROCESS_PID": str(pid),
                "MONIT_PROCESS_MEMORY": "0",
                "MONIT_PROCESS_CHILDREN": "0",
                "MONIT_PROCESS_CPU_PERCENT": "0.0",
            }
            if "TZ" in os.environ:
                env["TZ"] = os.environ["TZ"]
            with contextlib.ExitStack() as opened:
                # The last words of the process are not those of a stop program or of a rule's.
                output = self._open(name if event == "Started" else f"{name}~", opened)
                env[process_record.MARK] = process_record.mark(label, self._base)
                enter = partial(_enter, self.ownership.cgroup(label), label)
                user, group = program.uid or None, program.gid or None
                started = await process.spawn_prepared(
                    enter,
                    program.argv,
                    env=env,
                    cwd=self.directory(),
                    stdout=output,
                    stderr=output,
                    user=user,
                    group=group,
                )
            if is_rule_label(label):
                self._record(label, started)
            return started

    async def run_script(self, job: str, argv: Sequence[str], *, env: Mapping[str, str], **how: Any) -> Process:
        """Run a script of a job as ``process.spawn`` does: what it starts and leaves belongs to the job."""
        label = process_record.script_label(job)
        env = {**env, process_record.MARK: process_record.mark(label, self._base)}
        how["cwd"] = self.directory()
        if all(_VARIABLE.fullmatch(name) for name in env):
            enter = partial(_enter, self.ownership.cgroup(label), label)
            script = await process.spawn_prepared(enter, argv, env=env, **how)
        else:  # a Director's names, which a shell would not pass on
            script = process.spawn(argv, env=env, **how)
        self._record(label, script)
        return script

    async def end_left_by_scripts(self, jobs: Iterable[str], grace: float) -> list[Left]:
        """End the processes that scripts of jobs have left and that no service has taken over. Return the survivors.

        ``jobs`` may have had scripts below an earlier agent. A failed pre-start may leave a process that holds the port
        of one that the next pre-start starts.
        """
        labels = {process_record.script_label(job) for job in jobs} | self.scripts.keys()
        records = {each: self.scripts.get(each, ProcessRecord()) for each in labels if not is_rule_label(each)}
        members = await asyncio.gather(*(self.remains.members(*each) for each in records.items()))  # one pass for all
        left: list[Left] = []
        for (label, record), found in zip(records.items(), members, strict=True):
            if found:
                left += await self.remains.sweep(label, record, found, grace, is_usual=True)
        return left

    def _record(self, label: str, script: Process) -> None:
        """Record a script of a job, or a program of its rules: a pidfile may name what it started."""
        record = self.scripts.setdefault(label, ProcessRecord())
        record.begin(script.identity, None)
        record.is_in_cgroup = script.is_in_cgroup

        def end() -> None:
            record.ended(script.identity, script.session, script.seen_ticks)
            asyncio.get_running_loop().run_in_executor(None, self.ownership.cgroup(label).remove)

        script.on_end = end

    def directory(self) -> Path:
        """Return the working directory of programs and scripts."""
        return self._empty if self._empty.is_dir() else Path("/")

    # --- program output ---------------------------------------------------------------------------------------------

    async def refused_limit(self, name: str) -> str:
        """Return the last shell message about a limit that a script could not set. "" without one."""
        lines = await self.printed(name)
        return next((line[-MAX_LAST_BYTES:] for line in reversed(lines) if _LIMIT_REFUSED.match(line)), "")

    async def printed(self, name: str) -> list[str]:
        """Return the last lines of a service's programs. Most programs print nothing, and need no thread."""
        path = self._output / f"{name.replace('/', '_')}.log"
        with contextlib.suppress(OSError):
            if not path.stat(follow_symlinks=False).st_size:
                return []
        return await _lines(name, path, self._output)

    async def trim(self) -> None:
        """Truncate large output files to their end: a start program that became the daemon may print forever.

        A thread for the usual look would take longer than its calls of stat.
        """
        with os.scandir(self._output) as entries:
            for entry in entries:
                found = entry.stat(follow_symlinks=False)
                # A job can allocate blocks beyond the end. File systems do so too, to twice the size.
                taken = max(found.st_size, found.st_blocks * guarded.BLOCK_BYTES // 4)
                if entry.name.endswith(".log") and taken > MAX_OUTPUT_BYTES:
                    await asyncio.to_thread(_cut, Path(entry.path), found.st_size)

    def _open(self, name: str, opened: contextlib.ExitStack) -> int | None:
        """Open the output file. None if that fails, because a full disk must not prevent a start."""
        try:
            self._output.mkdir(mode=0o700, parents=True, exist_ok=True)
            output = guarded.open_log(self._output / f"{name.replace('/', '_')}.log", 0o640)
        except OSError as exc:
            logger.warning("cannot capture the output of %s: %s", name, exc)
            return None
        opened.callback(os.close, output)
        return output


def _enter(cgroup: job_cgroups.JobCgroup | None, label: str, program: Process) -> None:
    """Move a program that does not run yet into the cgroup of its service, if any, where that is possible."""
    try:
        if cgroup is not None:
            cgroup.take(program)
    except OSError as exc:
        logger.warning(_OUTSIDE, label, exc)


async def last_line(whose: str, path: Path, root: Path) -> str:
    """Return the last meaningful line of a file below ``root``. "" if it cannot be read.

    ``whose`` is the label of the service that may write the file.
    """
    return last_word(await _lines(whose, path, root))


def last_word(lines: list[str]) -> str:
    """Return the end of the last line. Commands traced by ``set -x`` count only if there is nothing else."""
    words = [line for line in lines if not _TRACE.match(line)] or lines
    return words[-1][-MAX_LAST_BYTES:] if words else ""


def _cut(path: Path, size: int) -> None:
    """Keep the end of an output file of ``size`` bytes."""
    with path.open("r+b", buffering=0) as stream:
        stream.seek(max(0, size - MAX_OUTPUT_BYTES // 2))
        end = stream.read(MAX_OUTPUT_BYTES // 2)
        # Writers append: output written meanwhile follows, or is lost.
        stream.truncate(0)
        stream.seek(0)
        stream.write(end)


async def _lines(whose: str, path: Path, root: Path) -> list[str]:
    try:
        text = await guarded.aside(whose, partial(guarded.tail, path, MAX_TAIL_BYTES, root))
    except OSError as exc:
        if exc.errno != errno.ENOENT:
            logger.warning("cannot read the last output of %s: %s", whose, exc)
        return []
    return [line.strip() for line in text.decode(errors="replace").split("\n") if line.strip()]


class TokenBucket:
    """Rate limit shared by all services: a ``burst`` at once, then ``rate`` a second."""

    def __init__(self, burst: float, rate: float) -> None:
        self._burst, self._rate = burst, rate
        self._left = burst
        self._filled_at = time.monotonic()

    async def take(self) -> None:
        """Wait for a token."""
        now = time.monotonic()
        self._left = min(self._burst, self._left + (now - self._filled_at) * self._rate) - 1
        self._filled_at = now
        if self._left < 0:
            try:
                await asyncio.sleep(-self._left / self._rate)
            except asyncio.CancelledError:
                self._left += 1  # returned to the next caller
                raise
