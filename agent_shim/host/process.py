"""Processes, ours and adopted, each known by a pidfd and its start time: a number alone is used again.

One kernel child has one place where it is reaped, ``reap``, called when its pidfd turns readable or by ``host.reaper``;
the exit status goes to every ``Process`` that stands for it. So nothing else may fork: a child that is not known here
is a stranger (an orphan that came to us) and its status is thrown away.

Call everything here on the event loop's thread. A spawn holds the loop until the program is executed, about 2 ms.
"""

from __future__ import annotations

import array
import asyncio
import contextlib
import errno
import fcntl
import grp
import logging
import os
import pwd
import resource
import select
import signal
import subprocess
import warnings
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final, NamedTuple

from agent_shim.core.errors import HostError
from agent_shim.host import clock, files, guarded, loop_guard, proc

logger = logging.getLogger(__name__)

POLL: Final = 0.02
"""Seconds between looks at what no descriptor tells: a group that empties, a process where pidfd is missing."""
KILL_PATIENCE: Final = 10.0
"""Seconds that a killed group may take to go; what hangs in the kernel longer is left."""

# include/uapi/linux/pidfd.h: struct pidfd_info, version 0 of 64 bytes: mask, cgroup, eleven ids, exit code.
_PIDFD_GET_INFO: Final = 0xC040FF0B
_PIDFD_INFO_EXIT: Final = 8
_STATUS_DELAYS: Final = (0.001, 0.004, 0.016, 0.064)
"""Seconds to wait, in turn, for the parent of an adopted process to reap it: only then the kernel tells its status."""

_watched: dict[int, list[Process]] = {}
"""Every ``Process`` that has not ended, by number: the kernel has one set of children, and so has this module."""
_due: deque[Process] = deque()
"""Those whose end was seen and has not been noted yet."""
_spawned: dict[int, int] = {}
"""Number and start ticks of the children that ``spawn`` has made and that are not reaped."""
takes_orphans = False
"""Whether orphans of our descendants come to us (``host.reaper``)."""


class Process:
    """One process. Ends are noticed, and children reaped, without anybody waiting."""

    def __init__(self, stat: proc.Stat, pidfd: int | None, *, leads: bool) -> None:
        self.pid: Final = stat.pid
        self.start_ticks: Final = stat.start_ticks
        self.seen_ticks = stat.start_ticks
        """The tick until which it was known to live; a child of ours until it was reaped, its number being its own."""
        self.cgroups: Sequence[str] = ()
        """The directories of those that ``spawn`` has put it in."""
        self._leads = leads
        self._has_heirs = False
        """Its group has outlived it, so far."""
        self._pidfd = pidfd
        self._status: int | None = None
        self._is_over = False
        self._is_due = False
        """Its end was seen, its turn to be noted is still to come."""
        self._waiters: list[asyncio.Future[None]] = []
        """No event: it has room for 64 of them, and there are hundreds of processes."""
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        _watched.setdefault(self.pid, []).append(self)
        if pidfd is None:
            self._look()
        else:
            self._loop.add_reader(pidfd, self._end_seen)

    def __repr__(self) -> str:
        return f"<Process {self.pid}>"

    @property
    def identity(self) -> tuple[int, int]:
        """Number and start time."""
        return self.pid, self.start_ticks

    @property
    def is_alive(self) -> bool:
        """False from the moment of its death, reaped or not."""
        if self._is_over:
            return False
        now = clock.boot_ticks()
        if self._pidfd is None:
            found = proc.stat(self.pid)
            is_alive = found is not None and found.is_alive and found.start_ticks == self.start_ticks
        else:
            is_alive = not _is_readable(self._pidfd)
        if is_alive:
            self.seen_ticks = now
        return is_alive

    @property
    def is_over(self) -> bool:
        """Whether its end was seen; asks nobody."""
        return self._is_over or self._is_due

    async def wait(self) -> int | None:
        """Its exit code, 128+N when signal N killed it, None when nobody can tell (adopted, older kernels)."""
        if not self._is_over:
            waiter = self._loop.create_future()
            self._waiters.append(waiter)
            try:
                await waiter
            finally:
                self._waiters.remove(waiter)
        return self._status

    def send(self, sig: int) -> bool:
        """Signal it; False if it is gone."""
        if self._pidfd is None:
            return self.is_alive and send(self.identity, sig)
        return not self._is_over and _send(self._pidfd, self.pid, sig)

    def send_group(self, sig: int) -> None:
        """Signal its process group; itself alone when it does not lead one."""
        if not self._leads:
            self.send(sig)
        elif self.is_alive or (not self._is_over and _is_child(self.pid)):
            # Alive, or dead and not reaped: nobody else can have its number.
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.pid, sig)
        else:
            for member in self._members():
                send(member.identity, sig)

    async def terminate(self, grace: float) -> int | None:
        """TERM to the group, KILL after ``grace`` seconds or when cancelled; its status once the group is gone."""
        self.send_group(signal.SIGTERM)
        # Not asyncio.timeout: before Python 3.11.3 it never times out in a task that was cancelled, as callers are.
        gone = asyncio.ensure_future(self._group_ended())
        try:
            await asyncio.wait({gone}, timeout=grace)
            if not gone.done():
                self.send_group(signal.SIGKILL)
                await asyncio.wait({gone}, timeout=KILL_PATIENCE)
        except asyncio.CancelledError:
            self.send_group(signal.SIGKILL)
            raise
        finally:
            gone.cancel()
        return self._status

    def release(self) -> None:
        """Take no notice of it any more and leave it alone; whoever waits for it now waits for ever."""
        if not self._is_over:
            self._forget()
            others = _watched.get(self.pid, [])
            if self in others:
                others.remove(self)
            if not others:
                _watched.pop(self.pid, None)

    async def _group_ended(self) -> int | None:
        await self.wait()
        while self._leads and _group_exists(self.pid) and self._members():  # noqa: ASYNC110 - nothing tells
            await asyncio.sleep(POLL)
        return self._status

    def _members(self) -> list[proc.Stat]:
        """What lives in the group that it led. When that has emptied, the number may become another group's.

        Who was in it while the leader was known to live shows that it has lasted.
        """
        found = [s for s in proc.table().values() if s.group == self.pid and s.start_ticks >= self.start_ticks]
        seen = self.seen_ticks + self._has_heirs
        has_lasted = any(s.start_ticks < seen or s.identity == self.identity for s in found)
        return [s for s in found if s.is_alive] if has_lasted else []

    def _look(self) -> None:
        """The way without pidfd."""
        if self.is_alive:
            self._timer = self._loop.call_later(POLL, self._look)
        else:
            self._ended()

    def _end_seen(self) -> None:
        """Its pidfd is readable: let its end be noted when its turn comes."""
        assert self._pidfd is not None
        self._loop.remove_reader(self._pidfd)
        self._is_due = True
        if _due and _due[0]._loop is not self._loop:  # noqa: SLF001 - one class, two halves
            _due.clear()  # of a loop that is closed
        if not _due:
            self._loop.call_soon(_note_ends)
        _due.append(self)

    def _ended(self, attempt: int = 0) -> None:
        """It is dead: reap it, or learn from the kernel what its parent reaped."""
        if self._is_over or reap(self.pid):
            return
        status = _exit_info(self._pidfd)
        if status is None and self._pidfd is not None and attempt < len(_STATUS_DELAYS):
            self._timer = self._loop.call_later(_STATUS_DELAYS[attempt], self._ended, attempt + 1)
        else:
            self.release()
            self._finish(status)

    def _finish(self, status: int | None, seen_ticks: int = 0, *, has_heirs: bool = False) -> None:
        self._forget()
        self._status = status
        self.seen_ticks = max(self.seen_ticks, seen_ticks)
        self._has_heirs = has_heirs
        self._is_over = True
        for waiter in self._waiters:
            if not waiter.done():
                waiter.set_result(None)

    def _forget(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        if self._pidfd is not None:
            if not self._is_due:
                self._loop.remove_reader(self._pidfd)
            os.close(self._pidfd)
            self._pidfd = None
        self._is_due = False


def _note_ends() -> None:
    """Note one end that is due, and the others in the next turns of the loop.

    So of hundreds that end together the first is acted upon before the last is noted.
    """
    process = _due.popleft()
    if _due:
        process._loop.call_soon(_note_ends)  # noqa: SLF001 - one class, two halves
    if process._is_due:  # noqa: SLF001
        process._ended()  # noqa: SLF001


def spawn(
    argv: Sequence[str],
    *,
    env: Mapping[str, str],
    cwd: Path | str = "/",
    stdin: int | None = None,
    stdout: int | Path | None = None,
    stderr: int | Path | None = None,
    user: str | None = None,
    group: str | None = None,
    nice: int = 0,
    umask: int = 0o022,
    session: bool = False,
    limits: Mapping[int, tuple[int, int]] = {},
    cgroups: Sequence[str] = (),
) -> Process:
    """Run a program in a process group (or ``session``) of its own, without a shell.

    None stands for ``/dev/null``; a path is appended to. ``user`` and ``group`` are names or numbers, taken with the
    supplementary groups of the user; an ordinary user cannot change them, so there they are passed over. ``limits``
    maps ``resource.RLIMIT_*`` to soft and hard values, lowered to what may be had. ``cgroups`` are directories that it
    is in before it is executed. Raises ``HostError`` "cannot run PROGRAM: why", where why names the step that failed.
    """
    with contextlib.ExitStack() as opened:
        try:
            out, err = (_output(opened, target) for target in (stdout, stderr))
            becoming = _Becoming(
                _ids(user, group) if os.geteuid() == 0 else _Ids(), user, limits, nice, cgroups, opened
            )
            if becoming.is_needed:
                # Newer Pythons warn of any code between fork and exec; this one does some system calls.
                opened.enter_context(warnings.catch_warnings())
                warnings.simplefilter("ignore", DeprecationWarning)
            opened.enter_context(loop_guard.spawning())
            popen = subprocess.Popen(
                argv,
                env=env,
                cwd=cwd,
                stdin=subprocess.DEVNULL if stdin is None else stdin,
                stdout=out,
                stderr=err,
                umask=umask,
                start_new_session=session,
                process_group=None if session else 0,
                preexec_fn=becoming if becoming.is_needed else None,  # noqa: PLW1509 - see above
            )
        except OSError as exc:
            raise _cannot_run(argv[0], exc) from exc
        except (LookupError, ValueError) as exc:
            raise HostError(f"cannot run {argv[0]}: {exc}") from exc
        except subprocess.SubprocessError as exc:
            raise HostError(f"cannot run {argv[0]}: {becoming.failure() or exc}") from exc
    # Reaping is ours: without a return code Popen would try it as well.
    popen.returncode = 0
    stat = proc.stat(popen.pid)
    assert stat is not None, "a child that is not reaped has a stat line"
    _spawned[popen.pid] = stat.start_ticks
    made = Process(stat, _open(popen.pid), leads=True)
    made.cgroups = tuple(cgroups)
    return made


def adopt(pid: int, start_ticks: int | None = None) -> Process | None:
    """The process with this number; None if it is gone, a zombie, or another one than started at ``start_ticks``."""
    pidfd = _open(pid)
    stat = proc.stat(pid)
    if (
        stat is None
        or not stat.is_alive
        or start_ticks not in (None, stat.start_ticks)
        or (pidfd is not None and _is_readable(pidfd))  # died after it was opened: the line may be another's
    ):
        if pidfd is not None:
            os.close(pidfd)
        return None
    return Process(stat, pidfd, leads=stat.group == pid)


def default_signals() -> None:
    """Let no child inherit what whoever started us ignores or blocks, as nohup and ``&`` do: it could not be stopped.

    We ourselves go on ignoring those signals, by a handler, which an exec takes away.
    """
    signal.pthread_sigmask(signal.SIG_SETMASK, [])
    for number in signal.valid_signals():
        # The two that Python ignores by itself are given back by subprocess.
        if signal.getsignal(number) is signal.SIG_IGN and number not in (signal.SIGPIPE, signal.SIGXFSZ):
            signal.signal(number, _ignore)


def environment_of_scripts(environ: Mapping[str, str]) -> dict[str, str]:
    """What scripts of releases inherit: nothing that is meant for this program alone."""
    return {name: value for name, value in environ.items() if not name.startswith(("AGENT_SHIM_", "MALLOC_"))}


NO_CORE: Final = 1
"""Bytes of a core dump: too few for a file, and the one limit that a ``core_pattern`` that is a pipe respects."""


def leave_no_core(*, for_good: bool = False) -> None:
    """Let no core dump show what we know; jobs begin with the same, as on a stemcell, and may raise it.

    ``for_good``, nothing that this process starts may.
    """
    hard = resource.getrlimit(resource.RLIMIT_CORE)[1]
    try:
        resource.setrlimit(resource.RLIMIT_CORE, (NO_CORE, NO_CORE if for_good or hard == 0 else hard))
    except ValueError:  # not ours to raise: files, if no pipes
        resource.setrlimit(resource.RLIMIT_CORE, (0, hard))


def send(identity: tuple[int, int], sig: int) -> bool:
    """Signal the process with this number and start time; False if it is gone."""
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


def kill_group_of(ended: proc.Stat) -> None:
    """Kill the group of a process that has ended and is not reaped: all of it at once, whatever it forks meanwhile.

    Until it is reaped no other group can have the number.
    """
    if ended.group != os.getpgrp():
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(ended.group, signal.SIGKILL)


def reap(pid: int) -> bool:
    """Collect a dead child and tell every ``Process`` that stands for it; False if it is no dead child of ours."""
    now = clock.boot_ticks()  # From the reaping on the number can be used again.
    try:
        info = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG)
    except ChildProcessError:
        return False
    if info is None:
        return False
    _spawned.pop(pid, None)
    status = info.si_status if info.si_code == os.CLD_EXITED else 128 + info.si_status
    has_heirs = _leaves_children(pid) if takes_orphans else _group_exists(pid) and proc.stat(pid) is None
    for process in _watched.pop(pid, []):
        process._finish(status, now, has_heirs=has_heirs)  # noqa: SLF001 - one class, two halves
    return True


def is_spawned(identity: tuple[int, int]) -> bool:
    """Whether this process was made by ``spawn``, and not by a child of ours that has left it to us."""
    return _spawned.get(identity[0]) == identity[1]


def is_watched(pid: int) -> bool:
    """Whether any ``Process`` stands for this number."""
    return pid in _watched


def _leaves_children(group: int) -> bool:
    """Whether orphans of a group that has just lost its leader came to us.

    That there is such a group would say less: the number is free by now, and somebody else may have it already.
    """
    try:
        os.waitid(os.P_PGID, group, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return False
    return True


def _ignore(number: int, frame: object) -> None:
    """A handler instead of ``SIG_IGN``."""


def _open(pid: int) -> int | None:
    """A pidfd, or None: no such process, an old kernel, a strict seccomp profile, no descriptor left."""
    try:
        return os.pidfd_open(pid)
    except OSError:
        return None


def _send(pidfd: int | None, pid: int, sig: int) -> bool:
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
    """Whether the process behind it has ended."""
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    return bool(poll.poll(0))


def _is_child(pid: int) -> bool:
    try:
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return False
    return True


def _group_exists(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def _exit_info(pidfd: int | None) -> int | None:
    """The status that somebody else reaped (Linux 6.15 and later)."""
    if pidfd is None:
        return None
    words = array.array("I", bytes(64))
    words[0] = _PIDFD_INFO_EXIT
    try:
        fcntl.ioctl(pidfd, _PIDFD_GET_INFO, words)
    except OSError:
        return None
    if not words[0] & _PIDFD_INFO_EXIT:
        return None
    return 128 + code if (code := words[15] & 0x7F) else words[15] >> 8 & 0xFF


def _output(opened: contextlib.ExitStack, target: int | Path | None) -> int:
    if isinstance(target, Path):
        target = guarded.open_log(target, 0o640)
        opened.callback(os.close, target)
    return subprocess.DEVNULL if target is None else target


class _Ids(NamedTuple):
    """What ``Popen`` needs to know to run as somebody else; None leaves things as they are."""

    user: int | None = None
    group: int | None = None
    groups: list[int] | None = None


def _ids(user: str | None, group: str | None) -> _Ids:
    """Numbers for names or numbers, with all groups of the user; raises ``LookupError``."""
    ids = _Ids()
    try:
        if user is not None and user.isdigit():
            ids = _Ids(int(user), None, [])
        elif user is not None:
            entry = pwd.getpwnam(user)
            ids = _Ids(entry.pw_uid, entry.pw_gid, os.getgrouplist(user, entry.pw_gid))
    except KeyError:
        raise LookupError(f"there is no user {user}") from None
    try:
        if group is not None:
            ids = ids._replace(group=int(group) if group.isdigit() else grp.getgrnam(group).gr_gid)
    except KeyError:
        raise LookupError(f"there is no group {group}") from None
    return ids


class _Becoming:
    """What the child does between fork and exec, step by step; which step failed is told to the parent.

    A limit above what it may have becomes what it may have.
    """

    def __init__(
        self,
        ids: _Ids,
        user: str | None,
        limits: Mapping[int, tuple[int, int]],
        nice: int,
        cgroups: Sequence[str],
        opened: contextlib.ExitStack,
    ) -> None:
        """Raises ``OSError`` for a cgroup that cannot be joined."""
        self._ids, self._user, self._nice = ids, user, nice
        self._limits = []
        for what, (soft, hard) in limits.items():
            ceiling = resource.getrlimit(what)[1]
            self._limits.append((what, (_lower(soft, ceiling), _lower(hard, ceiling))))
        self._groups = []
        for each in cgroups:
            # Opened here: the right to join is that of who opened it.
            descriptor = os.open(f"{each}/cgroup.procs", os.O_WRONLY | os.O_CLOEXEC)
            opened.callback(os.close, descriptor)
            self._groups.append((each, descriptor))
        self.is_needed = bool(self._limits or nice or self._groups or ids != _Ids())
        if self.is_needed:
            self._told = os.memfd_create("failure", os.MFD_CLOEXEC)
            opened.callback(os.close, self._told)

    def __call__(self) -> None:
        step = ""
        try:
            for path, descriptor in self._groups:
                step = f"enter the cgroup {path}"
                os.write(descriptor, b"0")
            for what, values in self._limits:
                step = f"set limit {what} to {values[0]}"
                resource.setrlimit(what, values)
            if self._nice:
                with contextlib.suppress(PermissionError):
                    os.nice(self._nice)
            step = f"become user {self._user}"
            if self._ids.groups is not None:
                os.setgroups(self._ids.groups)
            if self._ids.group is not None:
                os.setresgid(self._ids.group, self._ids.group, self._ids.group)
            if self._ids.user is not None:
                os.setresuid(self._ids.user, self._ids.user, self._ids.user)
        except OSError as exc:
            os.write(self._told, f"cannot {step}: {exc.strerror}".encode())
            raise

    def failure(self) -> str:
        """What the child has told of the step that failed."""
        return os.pread(self._told, 1000, 0).decode(errors="replace") if self.is_needed else ""


def _cannot_run(program: str, exc: OSError) -> HostError:
    """``exc`` is what ``Popen`` raises when the program cannot be executed or the directory not be entered."""
    if exc.filename not in (None, program):
        return files.failed(f"run {program} with {exc.filename}", exc)
    if exc.errno == errno.ENOENT and os.path.exists(program):  # noqa: PTH110 - text
        return files.failed(f"run {program}", OSError(exc.errno, "the interpreter that it names is missing"))
    return files.failed(f"run {program}", exc)


def _lower(value: int, ceiling: int) -> int:
    if resource.RLIM_INFINITY in (value, ceiling):
        return ceiling if value == resource.RLIM_INFINITY else value
    return min(value, ceiling)
