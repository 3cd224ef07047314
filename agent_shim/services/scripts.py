"""Runs job scripts. Lifecycle scripts run in parallel, drain scripts print an integer, and the output of an errand is
returned to the Director.

Arguments, environment, working directory, niceness and error messages match those of the Go agent (agent/script/,
agent/action/run_errand.go). Output goes to files, because processes that a script leaves behind would keep a pipe open.
Times are in seconds.
"""

from __future__ import annotations

import asyncio
import logging
import os
import re
import tempfile
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Final

import msgspec

from agent_shim.core import safetext
from agent_shim.core.errors import ActionError
from agent_shim.core.events import ended_before, is_set_within
from agent_shim.core.paths import Paths
from agent_shim.core.spec import ApplySpec
from agent_shim.core.wire import MAX_REPLY_BYTES
from agent_shim.host import files, guarded
from agent_shim.host.descriptors import closing
from agent_shim.host.process import Process

logger = logging.getLogger(__name__)

PATH: Final = "/usr/sbin:/usr/bin:/sbin:/bin"
"""PATH for scripts, independent of the agent's own (agent/script/pathenv/pathenv.go)."""
NICE: Final = 5
"""Niceness of lifecycle scripts relative to the agent. Drain scripts and errands run with the agent's niceness."""
GRACE_S: Final = 10.0
"""Time between TERM and KILL for a cancelled script."""
MAX_OUTPUT_BYTES: Final = MAX_REPLY_BYTES - 4096
"""Maximum combined size of an errand's stdout and stderr in the reply, encoded as JSON."""

_MAX_LINE_BYTES: Final = 4096
_MAX_LINE_CHARS: Final = 300
_COMMAND_SHOWN: Final = re.compile(r"\++ ")
"""Prefix of commands traced by ``set -x``."""
SHUTDOWN_ARGUMENTS: Final = ("job_shutdown", "hash_unchanged")
STATUS_ARGUMENTS: Final = ("job_check_status", "hash_unchanged")
_INTEGER: Final = re.compile(rb"[+-]?[0-9]{1,18}")
_NEXT_STATE: Final = "BOSH_JOB_NEXT_STATE"


class Errand(msgspec.Struct, frozen=True):
    """Outcome of an errand. ``exit_code`` is 128+N after signal N."""

    stdout: str
    stderr: str
    exit_code: int


def drain_arguments(kind: str, current: ApplySpec, new: ApplySpec | None) -> list[str]:
    """Return the drain script's arguments, which describe changes to the job, its configuration and its packages
    (agent/script/drain/*_params.go).

    Raises ``ActionError`` for a ``kind`` other than ``shutdown`` and ``update``, and for an update without ``new``.
    """
    if kind == "shutdown":
        return list(SHUTDOWN_ARGUMENTS)
    if kind != "update":
        raise ActionError(f"Unexpected call with drain type '{kind}'")
    if new is None:
        raise ActionError("Drain update requires new spec")
    if not current.configuration_hash:
        change = "hash_new"
    else:
        change = "hash_unchanged" if current.configuration_hash == new.configuration_hash else "hash_changed"
    before = {name: package.sha1 for name, package in current.packages.items()}
    packages = [name for name, package in new.packages.items() if before.get(name) != package.sha1]
    return ["job_changed" if current.jobs else "job_new", change, *sorted(packages)]


def drain_environment(current: ApplySpec, new: ApplySpec | None) -> dict[str, str]:
    """Return environment variables for drain scripts. They contain the size of the current persistent disk in MiB and,
    if there is a new spec, the size of the disk in that spec.
    """
    states = {"BOSH_JOB_STATE": current} | ({_NEXT_STATE: new} if new is not None else {})
    sizes = {name: {"persistent_disk": spec.persistent_disk} for name, spec in states.items()}
    return {name: msgspec.json.encode(size).decode() for name, size in sizes.items()}


class Scripts:
    """Runs scripts in ``jobs/<job>/bin``. Every script inherits ``environ``."""

    def __init__(
        self,
        paths: Paths,
        environ: Mapping[str, str],
        spawn: Callable[..., Awaitable[Process]],
        *,
        grace: float = GRACE_S,
    ) -> None:
        """``spawn`` starts a script. It takes the job's name and the arguments of ``process.spawn`` without the working
        directory. A cancelled script is sent SIGTERM and, ``grace`` seconds later, SIGKILL.
        """
        self._spawn = spawn
        self._paths = paths
        self._environ = {**environ, "PATH": PATH}
        self._grace = grace

    async def run_all(self, name: str, jobs: Sequence[str], env: Mapping[str, str]) -> None:
        """Run ``bin/NAME`` for every job that has it, and wait without a timeout until all scripts have exited.

        Output is appended to the job's logs. If any script fails, raise ``ActionError`` with the last line that each
        failed script wrote to stderr. If stderr contains only commands traced by ``set -x``, the line is taken from one
        of the job's other logs.
        """
        last_lines: dict[str, str] = {}

        async def run(job: str) -> bool:
            log = self._log_directory(job)
            out, err = log / f"{name}.stdout.log", log / f"{name}.stderr.log"
            before = await asyncio.to_thread(_sizes, log)
            argv, environ = [str(self._script(job, name))], {**self._environ, **env}
            script = await self._spawn(job, argv, env=environ, stdout=out, stderr=err, nice=NICE)
            status = await self._end(script, cancelled=asyncio.Event())  # this event is never set
            if status != 0:
                logger.warning("%s of job %s failed: exit status %s", name, job, status)
                last_lines[job] = await asyncio.to_thread(_cause, log, name, before)
            return status == 0

        try:
            await _side_by_side(name, self._jobs_with_script(name, jobs), run)
        except ActionError as exc:
            lines = "".join(f" {job}: {line}" for job, line in last_lines.items() if line)
            raise ActionError(f"{exc}{lines}") from exc

    async def drain(
        self,
        jobs: Sequence[str],
        arguments: Sequence[str],
        current: ApplySpec,
        new: ApplySpec | None,
        cancelled: asyncio.Event,
    ) -> None:
        """Run the drain scripts with ``arguments`` (:func:`drain_arguments`) and wait until every job has drained.

        Setting ``cancelled`` terminates the scripts and ends the wait without an error. Raises ``ActionError`` if a
        script does not print a number.
        """
        environment = drain_environment(current, new)

        async def run(job: str) -> bool:
            return await self._drain_job(job, arguments, environment, cancelled)

        try:
            await _side_by_side("drain", self._jobs_with_script("drain", jobs), run)
        except ActionError:
            if not cancelled.is_set():
                raise

    async def _drain_job(
        self, job: str, arguments: Sequence[str], environment: Mapping[str, str], cancelled: asyncio.Event
    ) -> bool:
        """Drain one job: run its script, and wait for the number of seconds that the script prints. After a negative
        number, run the script again when the wait is over (agent/script/drain/concrete_script.go). Return False if the
        script does not print a number.
        """
        while True:
            answer = await self._ask_drain(job, arguments, environment, cancelled)
            if cancelled.is_set():
                return True  # regardless of what the script has printed
            if _INTEGER.fullmatch(answer) is None:
                logger.warning("drain of job %s failed: it printed %r, not a number of seconds", job, answer[:80])
                return False
            seconds = int(answer)
            if await is_set_within(abs(seconds), cancelled) or seconds >= 0:
                return True
            arguments = STATUS_ARGUMENTS
            environment = {name: value for name, value in environment.items() if name != _NEXT_STATE}

    async def _ask_drain(
        self, job: str, arguments: Sequence[str], environment: Mapping[str, str], cancelled: asyncio.Event
    ) -> bytes:
        """Run a job's drain script once, and return the first 4 KiB of its output. Its exit code is ignored."""
        with tempfile.TemporaryFile(dir=self._paths.tmp, buffering=0) as stdout:
            argv, env = [str(self._script(job, "drain")), *arguments], {**self._environ, **environment}
            err = self._log_directory(job) / "drain.stderr.log"
            script = await self._spawn(job, argv, env=env, stdout=stdout.fileno(), stderr=err)
            await self._end(script, cancelled)
            return os.pread(stdout.fileno(), 4096, 0).strip()

    async def errand(self, job: str, cancelled: asyncio.Event) -> Errand:
        """Run the errand ``bin/run`` of ``job``. If ``cancelled`` is set, the errand is terminated, and its exit code
        is returned as usual.

        If the output is too long for the reply, the reply leaves out the middle, and a file keeps the whole output
        until the job's next errand.
        """
        outputs = [self._paths.tmp / f"errand-{job}.{stream}" for stream in ("stdout", "stderr")]
        opened: list[int] = []
        kept: list[Path] = []
        try:
            for output in outputs:
                output.unlink(missing_ok=True)
                opened.append(os.open(output, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
            argv, (out, err) = [str(self._script(job, "run"))], opened
            script = await self._spawn(job, argv, env=self._environ, stdout=out, stderr=err)
            status = await self._end(script, cancelled)
            if status is None:
                raise ActionError("Running errand script: its exit status is unknown")
            stdout, stderr, kept = await asyncio.to_thread(_outputs_for_reply, *outputs)
            return Errand(stdout, stderr, status)
        except OSError as exc:
            raise ActionError(f"Running errand script: {exc}") from exc
        finally:
            for descriptor in opened:
                os.close(descriptor)
            for output in outputs:
                if output not in kept:
                    output.unlink(missing_ok=True)

    def _jobs_with_script(self, name: str, jobs: Sequence[str]) -> list[str]:
        """Return the jobs that have the script."""
        return [job for job in jobs if self._script(job, name).exists()]

    def _script(self, job: str, name: str) -> Path:
        return self._paths.jobs / job / "bin" / name

    def _log_directory(self, job: str) -> Path:
        """Return the directory for a job's logs. It is created if it is missing."""
        log = self._paths.log / job
        if not log.is_dir():
            files.make_dir(log, 0o750)
        return log

    async def _end(self, script: Process, cancelled: asyncio.Event) -> int | None:
        """Wait until the script exits, and return its exit code, or None if it is unknown. If ``cancelled`` is set or
        this task is cancelled, terminate the script's process group.
        """
        ended = asyncio.ensure_future(script.wait())
        try:
            return ended.result() if await ended_before(cancelled, ended) else await script.terminate(self._grace)
        except asyncio.CancelledError:
            await script.terminate(self._grace)
            raise
        finally:
            ended.cancel()


async def _side_by_side(name: str, jobs: Sequence[str], run: Callable[[str], Awaitable[bool]]) -> None:
    """Call ``run`` for all jobs in parallel. ``run`` executes a job's script and returns True on success. If any script
    fails, raise an ``ActionError`` that lists the jobs in the order in which their scripts finished
    (agent/script/parallel_script.go).
    """
    passed: list[str] = []
    failed: list[str] = []

    async def run_one(job: str) -> None:
        try:
            (passed if await run(job) else failed).append(job)
        except OSError as exc:
            logger.warning("%s of job %s failed: %s", name, job, exc)
            failed.append(job)

    async with asyncio.TaskGroup() as group:
        for job in jobs:
            group.create_task(run_one(job))
            await asyncio.sleep(0)  # let other tasks run before the next start, which blocks the event loop
    if failed:
        text = f"{len(failed)} of {len(jobs)} {name} scripts failed. Failed Jobs: {', '.join(failed)}."
        raise ActionError(f"{text} Successful Jobs: {', '.join(passed)}." if passed else text)


def _size(log: Path) -> int:
    """Return the size of a log, or 0 if it is missing."""
    try:
        return guarded.status(log).st_size
    except OSError:
        return 0


def _sizes(directory: Path) -> dict[str, int]:
    """Return the sizes of the logs in a job's log directory, keyed by name, or an empty map if that fails."""
    try:
        with guarded.held(directory) as top, closing(guarded.open_directory(top, "")) as fd:
            return {name: _size(directory / name) for name in guarded.names(fd) if name.endswith(".log")}
    except OSError:
        return {}


def _cause(log: Path, name: str, before: Mapping[str, int]) -> str:
    """Return the last line that a failed script wrote, shortened, or "" if there is none.

    Commands traced by ``set -x`` do not explain a failure, so if stderr contains nothing else, stdout and the job's
    other logs are searched. For example, the pre-start script of bosh-dns writes the cause to a separate log. After a
    pre-start script has failed, the other logs are searched before stdout. After any other script, they are searched
    last, because the job's processes may write to them too.
    """
    err, out = f"{name}.stderr.log", f"{name}.stdout.log"
    lines = _lines(log / err, before.get(err, 0))
    if messages := [line for line in lines if not _COMMAND_SHOWN.match(line)]:
        return messages[-1]
    skipped = (err, out, "bpm.log")  # the agent itself writes bpm.log
    others = sorted(each for each, size in _sizes(log).items() if each not in skipped and size != before.get(each, 0))
    for each in [*others, out] if name == "pre-start" else [out, *others]:
        if messages := [line for line in _lines(log / each, before.get(each, 0)) if not _COMMAND_SHOWN.match(line)]:
            return f"{each}: {messages[-1]}"[:_MAX_LINE_CHARS]
    return lines[-1] if lines else ""


def _lines(log: Path, begin: int) -> list[str]:
    """Return the last lines written to a log after offset ``begin``, each shortened."""
    try:
        with closing(guarded.open_file(log)) as file:
            size = os.fstat(file).st_size
            if begin > size:  # the log has been truncated since
                begin = 0
            start = max(begin, size - _MAX_LINE_BYTES)
            written = os.pread(file, _MAX_LINE_BYTES, start).decode(errors="replace").split("\n")
    except OSError:
        return []
    return [safetext.line(line.strip()[:_MAX_LINE_CHARS]) for line in written if line.strip()]


def _outputs_for_reply(stdout: Path, stderr: Path) -> tuple[str, str, list[Path]]:
    """Return stdout and stderr, shortened if necessary to fit into a reply, and the paths of the shortened files.
    stderr may take up half of the space, and stdout the rest.
    """
    errors = shown(stderr, MAX_OUTPUT_BYTES // 2)
    output = shown(stdout, MAX_OUTPUT_BYTES - _encoded_size(errors[0]))
    return output[0], errors[0], [path for path, (_, is_cut) in ((stdout, output), (stderr, errors)) if is_cut]


def shown(path: Path, limit: int) -> tuple[str, bool]:
    """Return a file's text, and whether it was shortened. If the text would take up more than ``limit`` bytes as JSON,
    its middle is left out.
    """
    with path.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        keep = min(size, limit)
        while True:
            text = _head_and_tail(file.fileno(), size, keep, path)
            taken = _encoded_size(text)
            if taken <= limit or keep == 0:
                return text, keep < size
            # Escapes make the JSON longer than the text. Shrink the text in proportion and by another 0.1%, so that few
            # attempts are needed, but always by at least one byte.
            keep = max(0, min(keep - 1, keep * limit // taken - len(text) // 1000))


def _head_and_tail(file: int, size: int, keep: int, path: Path) -> str:
    """Read ``keep`` bytes of a file that has ``size`` bytes, half of them from each end, with a note in between.
    Invalid UTF-8 becomes replacement characters.
    """
    if keep >= size:
        return os.pread(file, size, 0).decode(errors="replace")
    head = os.pread(file, keep // 2, 0)
    tail = os.pread(file, keep - len(head), size - (keep - len(head)))
    note = f"\n[... {size - keep} bytes left out; the whole output is in {path} ...]\n"
    return head.decode(errors="replace") + note + tail.decode(errors="replace")


def _encoded_size(text: str) -> int:
    """Return the size of the text in bytes when it is encoded as JSON, as in a reply."""
    return len(msgspec.json.encode(text))
