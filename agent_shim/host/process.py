"""Starts, watches and signals processes. Each process is identified by a pidfd and its start time, because the kernel
reuses pids.

Every child is reaped by ``reap``, which passes the exit status to every ``Process`` with the child's pid. It is called
when the child's pidfd becomes readable, and by ``host.reaper``. In the agent's process, no other module may fork,
because a child that this module does not know about is treated as an adopted orphan, and its status is discarded.

All functions except ``send``, ``spawned`` and ``is_spawned`` must be called on the event loop's thread. Starting a
process blocks the loop until the exec, for about half a millisecond. The child does not change its user before the
exec, because other processes of that user could stop it and thereby block the loop.
"""

from __future__ import annotations

import array
import asyncio
import contextlib
import errno
import fcntl
import logging
import os
import resource
import select
import signal
import subprocess
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Final, Protocol

from agent_shim.core.errors import HostError
from agent_shim.host import files, guarded, proc
from agent_shim.host.descriptors import closing

logger = logging.getLogger(__name__)

SETPRIV: Final = "/usr/bin/setpriv"
"""The util-linux program that runs another program as a different user. Its full path is given, because each program
has its own PATH.
"""
POLL_S: Final = 0.02
"""Poll interval for exits that no descriptor reports: those of whole process groups, and those of processes without a
pidfd.
"""
KILL_TIMEOUT_S: Final = 10.0
"""How long to wait until a killed group has disappeared. A process that is stuck in the kernel for longer is
abandoned.
"""

# Constants from include/uapi/linux/pidfd.h, for version 0 of struct pidfd_info, which has 64 bytes: a mask, a cgroup
# id, eleven other ids, and the exit code.
_PIDFD_GET_INFO: Final = 0xC040FF0B
_PIDFD_INFO_EXIT: Final = 8
_STATUS_DELAYS_S: Final = (0.001, 0.004, 0.016, 0.064)
"""Delays between attempts to read an adopted process's status. The kernel reports the status only once the parent has
reaped the process.
"""

_watched: dict[int, list[Process]] = {}
"""Every ``Process`` whose exit has not been noticed yet, by pid. It is global, because all of this process's children
are reaped in one place.
"""
_spawned: dict[int, int] = {}
"""Start ticks by pid, for all children that ``spawn`` started and that have not been reaped yet."""
_files_of_children: Final[list[tuple[int, int]]] = []
"""The open-file limits for children. The list is empty until ``raise_file_limit`` has raised the limits of this
process.
"""


class KeeperProtocol(Protocol):
    """What a ``Process`` needs from the keeper (``host.keeper``) that is its ancestor."""

    async def status_of(self, identity: tuple[int, int]) -> int | None:
        """Return the status of a process that has exited, as ``Process.wait`` does, or None if it is unknown."""

    def processes(self) -> list[proc.Stat]:
        """List the living descendants. This method blocks."""

    def adopt(self, pid: int) -> Process | None:
        """Watch a descendant of the keeper. Return None in the same cases as the ``adopt`` function."""


class Process:
    """One process. The exit is noticed, and a child is reaped, even if no task waits for the process."""

    def __init__(
        self,
        stat: proc.Stat,
        pidfd: int | None,
        *,
        leads: bool,
        keeper: KeeperProtocol | None = None,
        is_over: bool = False,
    ) -> None:
        """Start watching a process. Without a ``pidfd``, it is polled.

        ``leads`` says whether the process leads its process group. If ``is_over`` is set, it has already exited, so it
        is not watched. ``keeper`` is the keeper above the process, if any.
        """
        self.pid: Final = stat.pid
        self.start_ticks: Final = stat.start_ticks
        self.identity: Final = stat.identity
        """Pid and start time."""
        self.is_ending = False
        """True if ``terminate`` was called. In that case, the rest of the process group is killed when the process
        exits.
        """
        self._keeper = keeper
        self._asking: asyncio.Task[None] | None = None
        """The task that asks the keeper for the status, while it runs."""
        self._leads = leads
        self._pidfd = pidfd
        self._status: int | None = None
        self._over = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        """The next poll, or the next attempt to read the status from the kernel."""
        if is_over:
            return
        _watched.setdefault(self.pid, []).append(self)
        if pidfd is None:
            self._poll()
        else:
            self._loop.add_reader(pidfd, self._exited)

    def __repr__(self) -> str:
        return f"<Process {self.pid}>"

    @property
    def is_alive(self) -> bool:
        """True until the process exits. A zombie does not count as alive."""
        if self.is_over:
            return False
        if self._pidfd is not None:
            return not _is_readable(self._pidfd)
        stat = proc.stat(self.pid)
        return stat is not None and stat.is_alive and stat.start_ticks == self.start_ticks

    @property
    def is_over(self) -> bool:
        """True once the exit has been noticed. Reading this makes no system call."""
        return self._over.is_set()

    async def wait(self) -> int | None:
        """Wait until the process exits. Return its exit code, 128+N after signal N, or None if that is unknown (for an
        adopted process on an older kernel).
        """
        await self._over.wait()
        return self._status

    async def wait_or_terminate(self, grace: float) -> int | None:
        """Like ``wait``, but on cancellation, first terminate the process, with ``grace`` seconds between SIGTERM and
        SIGKILL.
        """
        try:
            return await self.wait()
        except asyncio.CancelledError:
            await self.terminate(grace)
            raise

    def send(self, sig: int) -> bool:
        """Send the process a signal. Return False if it is gone."""
        if self._pidfd is None:
            return self.is_alive and send(self.identity, sig)
        return not self.is_over and _send(self._pidfd, self.pid, sig)

    def send_group(self, sig: int) -> None:
        """Send a signal to the process group, or to the process alone if it does not lead a group.

        Nothing is sent once the process has been reaped, because its pid may then be the id of another group.
        """
        if not self._leads:
            self.send(sig)
        elif is_spawned(self.identity) or self.is_alive:
            # The kernel reports EPERM only if we are not allowed to signal any process in the group.
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.pid, sig)

    def adopt_child(self, pid: int) -> Process | None:
        """Watch a process that was started by this ``Process``, even if the keeper has become its parent. Return None
        in the same cases as ``adopt``.
        """
        return adopt(pid) if self._keeper is None else self._keeper.adopt(pid)

    async def terminate(self, grace: float) -> int | None:
        """Send SIGTERM to the group, then SIGKILL after ``grace`` seconds or on cancellation. Return the status of the
        process once the group is gone.

        If the group still exists ``KILL_TIMEOUT_S`` after SIGKILL, return anyway. The result is None if the process
        itself is still running.

        If the process is our child, the rest of its group is killed as soon as the process exits. Under a keeper, the
        rest of the group gets the whole grace period.
        """
        self.is_ending = True
        await self._signal_group(signal.SIGTERM)
        # Do not use asyncio.timeout, because the calling task may be in the middle of a cancellation. Before Python
        # 3.11.3, the timeout never expires in such a task.
        gone = asyncio.ensure_future(self._group_ended())
        try:
            await asyncio.wait({gone}, timeout=grace)
            if not gone.done():
                await self._signal_group(signal.SIGKILL)
                await asyncio.wait({gone}, timeout=KILL_TIMEOUT_S)
        except asyncio.CancelledError:
            self.send_group(signal.SIGKILL)
            raise
        finally:
            gone.cancel()
        return self._status

    def release(self) -> None:
        """Stop watching the process and leave it running. Pending calls of ``wait`` never return."""
        if not self.is_over:
            self._forget()
            others = _watched.get(self.pid, [])
            if self in others:
                others.remove(self)
            if not others:
                _watched.pop(self.pid, None)

    async def _group_ended(self) -> None:
        """Wait until the process and, under a keeper, the rest of its group have exited."""
        await self.wait()
        while await self._left_of_group():  # noqa: ASYNC110 - members of a group send no event
            await asyncio.sleep(POLL_S)

    async def _signal_group(self, sig: int) -> None:
        """Like ``send_group``, but under a keeper the signal also reaches a group that has outlived its leader."""
        self.send_group(sig)
        if not self.is_alive:
            for member in await self._left_of_group():
                send(member.identity, sig)

    async def _left_of_group(self) -> list[proc.Stat]:
        """Return the living members of the process group if it is under a keeper, otherwise an empty list. Under a
        keeper, the list is complete, because no process can escape from the keeper.
        """
        if self._keeper is None or not self._leads:
            return []
        descendants = await asyncio.to_thread(self._keeper.processes)
        return [descendant for descendant in descendants if descendant.group == self.pid]

    def _poll(self) -> None:
        """Check periodically whether a process without a pidfd has exited."""
        # Schedule the next check first, because ``is_alive`` raises an error while no descriptor is free.
        self._timer = self._loop.call_later(POLL_S, self._poll)
        if not self.is_alive:
            self._timer.cancel()
            self._collect()

    def _exited(self) -> None:
        """Handle the process's exit when its pidfd becomes readable."""
        assert self._pidfd is not None
        self._loop.remove_reader(self._pidfd)
        self._collect()

    def _collect(self, attempt: int = 0) -> None:
        """Get the status of the exited process: reap it if it is our child, otherwise ask its keeper or the kernel.

        ``attempt`` is the number of earlier attempts to ask the kernel.
        """
        if self.is_over or reap(self.pid):  # reap has called _finish
            return
        if self._keeper is not None:
            self._asking = self._loop.create_task(self._ask_keeper(self._keeper), name=f"status of {self.pid}")
            return
        status = _exit_info(self._pidfd)
        if status is None and self._pidfd is not None and attempt < len(_STATUS_DELAYS_S):
            self._timer = self._loop.call_later(_STATUS_DELAYS_S[attempt], self._collect, attempt + 1)
        else:
            self.release()
            self._finish(status)

    async def _ask_keeper(self, keeper: KeeperProtocol) -> None:
        """Ask the keeper for the process's status or, if the keeper does not know it, the kernel."""
        status = None
        with contextlib.suppress(OSError):  # without a free descriptor, the status is unknown
            status = await keeper.status_of(self.identity)
        if status is None:
            status = _exit_info(self._pidfd)
        self._asking = None  # this is the current task, which ``release`` would cancel
        self.release()
        self._finish(status)

    def _finish(self, status: int | None) -> None:
        """Store the exit status, and wake the tasks that are waiting for it."""
        self._forget()
        self._status = status
        self._over.set()

    def _forget(self) -> None:
        """Cancel the task and the timer, and close the pidfd."""
        if self._asking is not None:
            self._asking.cancel()
        if self._timer is not None:
            self._timer.cancel()
        if self._pidfd is not None:
            self._loop.remove_reader(self._pidfd)
            os.close(self._pidfd)
            self._pidfd = None


def spawn(
    argv: Sequence[str],
    *,
    env: Mapping[str, str],
    cwd: Path | str = "/",
    stdin: int | None = None,
    stdout: int | Path | None = None,
    stderr: int | Path | None = None,
    executable: Path | None = None,
    inherited: Sequence[int] = (),
) -> Process:
    """Run a program without a shell, in a new session.

    The new session keeps the program from using the agent's terminal, and from joining another program's process group
    and receiving that group's signals.

    A stream of None means ``/dev/null``, and a path is opened for appending. ``executable`` is the file to execute if
    it is not ``argv[0]``. ``inherited`` lists additional descriptors, which keep their numbers. Raises ``HostError``
    "cannot run PROGRAM: why".
    """
    program = argv[0]
    with contextlib.ExitStack() as opened:
        try:
            out, err = (
                opened.enter_context(closing(guarded.open_log(stream, 0o640))) if isinstance(stream, Path) else stream
                for stream in (stdout, stderr)
            )
            popen = subprocess.Popen(
                argv,
                env=env,
                cwd=cwd,
                stdin=subprocess.DEVNULL if stdin is None else stdin,
                stdout=subprocess.DEVNULL if out is None else out,
                stderr=subprocess.DEVNULL if err is None else err,
                umask=0o022,
                start_new_session=True,
                executable=executable,
                pass_fds=inherited,
            )
        except OSError as exc:
            raise _cannot_run(program, exc) from exc
        except ValueError as exc:
            raise HostError(f"cannot run {program}: {exc}") from exc
    # Set a return code so that Popen does not try to reap the child too.
    popen.returncode = 0
    with files.attempting(f"run {program}"):
        stat = proc.stat(popen.pid)
    assert stat is not None, "a child that is not reaped has a stat line"
    _spawned[popen.pid] = stat.start_ticks
    if limits := file_limits_of_children():
        with contextlib.suppress(OSError):  # the child has exited, or already runs as another user
            resource.prlimit(popen.pid, resource.RLIMIT_NOFILE, limits)
    return Process(stat, _open(popen.pid), leads=True)


def adopt(pid: int, start_ticks: int | None = None, keeper: KeeperProtocol | None = None) -> Process | None:
    """Watch a running process. Return None if it is gone, is a zombie, or did not start at ``start_ticks``.

    ``keeper`` provides the status of the process once it has exited.
    """
    pidfd = _open(pid)
    try:
        stat = proc.stat(pid)
    except OSError:
        if pidfd is not None:
            os.close(pidfd)
        raise
    if (
        stat is None
        or not stat.is_alive
        or start_ticks not in (None, stat.start_ticks)
        # If the process exited after the pidfd was opened, the stat line may be that of another process.
        or (pidfd is not None and _is_readable(pidfd))
    ):
        if pidfd is not None:
            os.close(pidfd)
        return None
    return Process(stat, pidfd, leads=stat.group == pid, keeper=keeper)


def ended(identity: tuple[int, int], status: int | None, keeper: KeeperProtocol | None = None) -> Process:
    """Return a ``Process`` that has already exited. ``status`` is None if it is unknown. If ``keeper`` is given, the
    process led a group, and the keeper lists the members that remain.
    """
    pid, start_ticks = identity
    stat = proc.Stat(pid, "X", 0, pid, pid, 0, start_ticks, 0)  # only the pid and the start time are used
    process = Process(stat, None, leads=keeper is not None, keeper=keeper, is_over=True)
    process._finish(status)  # noqa: SLF001 - same module
    return process


def default_signals() -> None:
    """Keep children from ignoring or blocking the signals that this process's parent ignored or blocked (nohup, ``&``).
    Such children could not be stopped.

    This process still ignores the same signals, but with a handler, which exec resets to the default action.
    """
    signal.pthread_sigmask(signal.SIG_SETMASK, [])
    for number in signal.valid_signals():
        # Leave out the two signals that Python itself ignores, because the subprocess module restores them.
        if signal.getsignal(number) is signal.SIG_IGN and number not in (signal.SIGPIPE, signal.SIGXFSZ):
            signal.signal(number, _ignore)


def on_signal(number: signal.Signals, call: Callable[[], None]) -> None:
    """Call ``call`` on the running loop after each signal ``number``. Must be called on the main thread.

    The loop's ``add_signal_handler`` would lose a signal while a burst of SIGCHLD fills the loop's buffer.
    """
    loop = asyncio.get_running_loop()

    def handle(*_: object) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed, because this process is exiting
            loop.call_soon_threadsafe(call)

    signal.signal(number, handle)


_OWN_VARIABLES: Final = ("AGENT_SHIM_", "CREDENTIALS_DIRECTORY", "LISTEN_", "MALLOC_")
"""Prefixes of the environment variables that configure the agent itself or that a service manager sets only for the
agent.
"""


MAX_ENVIRONMENT_BYTES: Final = 6 << 20
"""Linux limits the arguments and the environment of a program to three quarters of the maximum stack size of 8 MiB."""


def script_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the environment for release scripts, without the variables that are meant for the agent.

    ``environ`` is this process's environment. Python sets ``LC_CTYPE`` in it if the locale is C (PEP 538), so scripts
    get the value with which the agent was started, or none.
    """
    entries = os.fsdecode(proc.read(os.getpid(), "environ", MAX_ENVIRONMENT_BYTES)).split("\0")
    initial = {name: value for name, _, value in (entry.partition("=") for entry in entries) if name == "LC_CTYPE"}
    others = {name: value for name, value in environ.items() if name != "LC_CTYPE"}
    return {name: value for name, value in (others | initial).items() if not name.startswith(_OWN_VARIABLES)}


CORE_LIMIT_BYTES: Final = 1
"""Core size limit. It is too small for a core file, and 1 is the only value that also disables core dumps to a pipe
(``core_pattern``).
"""


def disable_core_dumps(*, for_good: bool = False) -> None:
    """Disable core dumps, because they would contain secrets. Jobs inherit the soft limit, as on a stemcell, and are
    allowed to raise it.

    If ``for_good`` is set, the hard limit is lowered too, so that no child can raise the limit again.
    """
    hard = resource.getrlimit(resource.RLIMIT_CORE)[1]
    # A limit of 0 does not prevent core dumps to a pipe, so raise a hard limit of 0, which only root can do.
    try:
        new_hard = CORE_LIMIT_BYTES if for_good or hard == 0 else hard
        resource.setrlimit(resource.RLIMIT_CORE, (CORE_LIMIT_BYTES, new_hard))
    except ValueError:  # only root can raise a hard limit of 0, which at least prevents core files
        resource.setrlimit(resource.RLIMIT_CORE, (0, hard))


def raise_file_limit() -> None:
    """Raise the soft limit on open files. Children get the original limit, as they do from Go programs and from monit.

    If another program later changes the agent's limits, as os-conf's ``limits`` job does, children inherit the new
    limits, because they are meant for the jobs.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < hard - 1:  # see ``_raised``
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, _raised((soft, hard)))
            _files_of_children[:] = [(soft, hard)]
        except (ValueError, OSError) as exc:  # the limit exceeds fs.nr_open
            logger.warning("cannot use more than %d open files: %s", soft, exc)


def file_limits_of_children() -> tuple[int, int] | None:
    """Return the open-file limits for a child, or None if it inherits those of this process.

    A child also inherits limits that were changed with ``prlimit``, because those are meant for the jobs.
    """
    for limits in _files_of_children:
        if resource.getrlimit(resource.RLIMIT_NOFILE) == _raised(limits):
            return limits
    return None


def _raised(limits: tuple[int, int]) -> tuple[int, int]:
    """Return the raised limits for this process. The soft limit is one below the hard limit, so that they can be
    distinguished from limits that another program set.
    """
    return limits[1] - 1, limits[1]


def take_name(name: str) -> None:
    """Set the process name that ``ps`` and ``pgrep`` use."""
    with contextlib.suppress(OSError), open("/proc/self/comm", "w") as file:
        file.write(name)


def send(identity: tuple[int, int], sig: int) -> bool:
    """Send a signal to the process with this pid and start time. Return False if it is gone."""
    pid, start_ticks = identity
    pidfd = _open(pid)
    try:
        stat = proc.stat(pid)
        if stat is None or stat.start_ticks != start_ticks:
            return False
        return _send(pidfd, pid, sig)
    finally:
        if pidfd is not None:
            os.close(pidfd)


async def send_all(processes: Collection[tuple[int, int]], sig: int, timeout: float) -> Collection[tuple[int, int]]:
    """Send a signal to each process, and wait up to ``timeout`` seconds until all have exited. Return the processes
    that have not.

    Signals are sent in a thread, because a job may have thousands of processes.
    """

    def living() -> set[tuple[int, int]]:
        stats = (proc.stat(pid) for pid, _ in processes)
        return {stat.identity for stat in stats if stat is not None and stat.is_alive and stat.identity in processes}

    give_up_at = time.monotonic() + timeout
    await asyncio.to_thread(lambda: [send(identity, sig) for identity in processes])
    while (processes := await asyncio.to_thread(living)) and time.monotonic() <= give_up_at:  # noqa: ASYNC110 - they are not our children
        await asyncio.sleep(POLL_S / 4)
    return processes


def reap(pid: int) -> bool:
    """Reap a dead child and pass its status to every ``Process`` with its pid. Return False if ``pid`` does not belong
    to a dead child.
    """
    try:
        info = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return False
    if info is None:
        return False
    watching = _watched.pop(pid, [])
    for watcher in watching:
        # A process that is being terminated takes the rest of its group with it. Signal the group before reaping,
        # because until then, the pid cannot be the id of another group.
        if watcher.is_ending:
            watcher.send_group(signal.SIGKILL)
    os.waitid(os.P_PID, pid, os.WEXITED)
    _spawned.pop(pid, None)
    status = info.si_status if info.si_code == os.CLD_EXITED else 128 + info.si_status
    for watcher in watching:
        watcher._finish(status)  # noqa: SLF001 - same module
    return True


def spawned() -> set[int]:
    """Return the pids of the processes that ``spawn`` started and that have not been reaped yet. The supervisor leaves
    them out when it looks for orphans of killed keepers.
    """
    return set(_spawned)


def is_spawned(identity: tuple[int, int]) -> bool:
    """Return True if the process was started with ``spawn``, and False if it is an adopted orphan."""
    return _spawned.get(identity[0]) == identity[1]


def _ignore(number: int, frame: object) -> None:
    """A signal handler that does nothing, used instead of ``SIG_IGN``."""


def _open(pid: int) -> int | None:
    """Open a pidfd. Return None if the process is gone, the kernel is too old, seccomp forbids it, or no descriptor is
    free.
    """
    try:
        return os.pidfd_open(pid)
    except OSError:
        return None


def _send(pidfd: int | None, pid: int, sig: int) -> bool:
    """Send a signal with a pidfd or, if that is None, with the pid. Return False if the process is gone."""
    try:
        if pidfd is None:
            os.kill(pid, sig)
        else:
            signal.pidfd_send_signal(pidfd, sig)
    except ProcessLookupError:
        return False
    except PermissionError as exc:
        logger.warning("cannot send signal %d to process %d: %s", sig, pid, exc.strerror)
    return True


def _is_readable(pidfd: int) -> bool:
    """Return True if the process to which this pidfd refers has exited."""
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    return bool(poll.poll(0))


def _exit_info(pidfd: int | None) -> int | None:
    """Return the status of a process that another process has reaped: its exit code, or 128+N for signal N. Return None
    if the kernel does not report it, which is always the case before Linux 6.15.
    """
    if pidfd is None:
        return None
    words = array.array("I", bytes(64))  # struct pidfd_info as 32-bit words: the mask comes first, the exit code last
    words[0] = _PIDFD_INFO_EXIT
    try:
        fcntl.ioctl(pidfd, _PIDFD_GET_INFO, words)
    except OSError:
        return None
    if not words[0] & _PIDFD_INFO_EXIT:
        return None
    number, code = words[15] & 0x7F, words[15] >> 8 & 0xFF  # the signal's number is in the low bits, as for wait(2)
    return 128 + number if number else code


def _cannot_run(program: str, exc: OSError) -> HostError:
    """Return an error that says why ``Popen`` could not execute the program or enter the directory."""
    if exc.filename not in (None, program):  # the error is about the working directory or a log file
        return files.failed(f"run {program} with {exc.filename}", exc)
    if exc.errno == errno.ENOENT and os.path.exists(program):  # noqa: PTH110 - the path is a str
        return files.failed(f"run {program}", OSError(exc.errno, "the interpreter that it names is missing"))
    return files.failed(f"run {program}", exc)
