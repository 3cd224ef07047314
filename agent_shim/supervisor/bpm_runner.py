"""Runs bpm.yml processes without runc (bpm-release ``src/bpm/runc/adapter``, ``src/bpm/runc/lifecycle``).

Directories, log files, environment, pidfile and stop sequence match bpm. Isolation depends on the container:

- level 1: separate namespaces, and a root file system with only what bpm shows to the process;
- level 2: Landlock rules that allow access to the same paths;
- level 3: neither.

At all levels, processes have no capabilities beyond those in bpm.yml, cannot gain privileges, and have resource limits.

A process is identified by its job and name. It does not matter whether a monit file or a script started it with ``bpm
start``.
"""

from __future__ import annotations

import asyncio
import contextlib
import glob
import json
import logging
import os
import resource
import signal
import threading
import time
from collections.abc import AsyncIterator, Container, Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Final

import msgspec

from agent_shim.core.errors import ConfigError, HostError
from agent_shim.core.paths import VCAP, Paths
from agent_shim.host import capabilities, clock, files, guarded, job_cgroups, keeper, proc, process, trusted_path
from agent_shim.host.descriptors import closing
from agent_shim.supervisor.bpm.calls import BpmCall, bpm_label
from agent_shim.supervisor.ctl_programs import Programs, last_line
from agent_shim.supervisor.ownership import process_record
from agent_shim.supervisor.ownership.process_record import Identity

if TYPE_CHECKING:
    # These modules are imported when they are used, because an agent without bpm jobs needs neither YAML nor ctypes.
    from agent_shim.host import sandbox, sandbox_exec
    from agent_shim.supervisor.bpm import config as bpm

logger = logging.getLogger(__name__)

SIGNAL_TIMEOUT_S: Final = 15.0
"""Seconds between the first signal and QUIT (``src/bpm/commands/stop.go``)."""
QUIT_TIMEOUT_S: Final = 2.0
DEFAULT_OPEN_FILES: Final = 524288
"""The limit on open files that bpm's wrapper requests if bpm.yml sets none (``jobs/bpm/templates/bpm``)."""
MAX_PIDFILE_DELAY_S: Final = 5.0
"""A pidfile is written at most this many seconds after its process was started."""

TEMPORARY: Final = ("/tmp", "/var/tmp")  # noqa: S108 - jobs share these without a mount namespace
SCRATCH: Final = ("/dev", "/proc", *TEMPORARY)
PATH: Final = "{jobs}/{job}/bin:/usr/local/bin:/usr/local/sbin:/usr/bin:/usr/sbin:/bin:/sbin:."


class UnknownProcessError(ConfigError):
    """The job's bpm.yml does not define a process with this name."""


class BpmListRow(msgspec.Struct, frozen=True):
    """A line of ``bpm list``. ``pid`` is 0 unless the process is running."""

    name: str
    pid: int
    status: str


class MemoryKill(msgspec.Struct, frozen=True):
    """A process that was killed because its process tree exceeded the memory limit. Sizes are in bytes."""

    job: str
    process: str
    used: int
    limit: int


class BpmProcess:
    """A process defined in bpm.yml, whether it is running or not, with its files, its cgroups and the state that the
    agent keeps for it.
    """

    def __init__(self, paths: Paths, job: str, name: str) -> None:
        self.job = job
        self.name = name
        self.label = bpm_label(job, name)
        self.pidfile = paths.sys / "run/bpm" / job / f"{name}.pid"
        self.logs = {stream: paths.sys / "log" / job / f"{name}.{stream}.log" for stream in ("stdout", "stderr")}
        self.cgroup = job_cgroups.JobCgroup(f"{self.label}@{paths.base}")
        self.turn = asyncio.Lock()
        """Lock that allows only one operation on the process at a time."""
        self.errand: process.Process | None = None
        """The process that ``run`` waits for."""
        self.oom_kills = 0
        """Number of OOM kills in the cgroup that have already been reported."""
        self.is_victim = False
        """True if the process was killed because of its memory use, and its exit has not been attributed to that kill
        yet.
        """
        self.limit = 0, -1
        """The memory limit in bytes (0 for none), and the modification time of the file that sets it (-1 before it is
        read).
        """


class Bpm:
    """Starts, finds and stops bpm.yml processes, one operation at a time per process.

    The processes run as ``user`` if the agent is root. If ``user`` is None (when the base directory is not /var/vcap),
    they run as the agent's user. If bpm.yml requests something that this container does not support, a warning is
    logged or, if ``is_strict`` is set, the process is not started.
    """

    def __init__(self, paths: Paths, programs: Programs, *, user: str | None = None, is_strict: bool = False) -> None:
        self._paths = paths
        self._programs = programs
        self._user = user
        self._is_strict = is_strict
        self._entries: dict[tuple[str, str], BpmProcess] = {}
        """The processes that have been used so far, by job and name."""
        self._has_started = asyncio.Event()
        """Set once this agent has started a process, other than an errand."""
        self._isolation: sandbox.Isolation | None = None
        self._probing = asyncio.Lock()
        self._counting = threading.Lock()
        """Lock for reading and updating the number of reported OOM kills, which several threads do."""
        self._hogs: list[MemoryKill] = []
        """OOM kills that were found when a process exited or a cgroup was removed, and that have not been reported
        yet.
        """
        self._unknown_keys: dict[Path, list[str]] = {}
        """The unknown keys that have already been logged, by file."""

    def _entry(self, job: str, name: str) -> BpmProcess:
        """Return the state of a process, which is created by the first call."""
        # Add the entry atomically, because other threads look up entries too.
        return self._entries.get((job, name)) or self._entries.setdefault(
            (job, name), BpmProcess(self._paths, job, name)
        )

    async def isolation(self) -> sandbox.Isolation:
        """Return the isolation that is available to new processes. The container is probed only once."""
        from agent_shim.host import sandbox

        async with self._probing:
            if self._isolation is None:
                self._isolation = await sandbox.isolation()
        return self._isolation

    # --- state --------------------------------------------------------------------------------------------------------

    def definition(self, job: str, name: str) -> bpm.ProcessConfig:
        """Look up the process in its bpm.yml. Raises ``ConfigError`` or ``HostError``."""
        definition = self._file(job).process(name)
        if definition is None:
            config = self._paths.jobs / job / "config/bpm.yml"
            raise UnknownProcessError(f'process "{name}" not present in job configuration ({config})')
        return definition

    def check_volumes(self, job: str, volumes: Sequence[bpm.Volume]) -> None:
        """Raise ``ConfigError`` if a volume given to ``bpm run`` is not valid as an additional volume."""
        from agent_shim.supervisor.bpm import config as bpm

        for volume in volumes:
            bpm.check_volume(volume.path, job=job, root=PurePosixPath(self._paths.base))

    def find(self, job: str, name: str) -> Identity | None:
        """Return the pid and start time of the process if it is running, otherwise None. The process is found even if
        an earlier agent started it. Blocks while it reads the pidfile and /proc.
        """
        entry = self._entry(job, name)
        pidfile = process_record.read_own(entry.pidfile)
        found = proc.stat(pidfile.pid) if pidfile else None
        keepers = self._programs.keepers
        if pidfile is None or found is None or not found.is_alive:
            return None
        if found.pid in (1, os.getpid()) or found.pid in keepers.pids:  # the pid in an old pidfile was reused
            return None
        if owner := keepers.owner(found.identity):
            return found.identity if owner == entry.label else None
        # The process was started by an agent without keepers, which wrote the pidfile right after the start. Check that
        # the times match, with a tolerance because file times come from a coarse clock.
        age = pidfile.modified - clock.wall_time_of(found.start_ticks)
        return found.identity if -0.1 < age < MAX_PIDFILE_DELAY_S else None

    def rows(self) -> tuple[list[BpmListRow], list[str]]:
        """Return a row for every process of every job, as in ``bpm list``, and the errors in invalid bpm.yml files."""
        rows, complaints = [], []
        for directory in sorted(self._paths.jobs.glob("*")):
            if not (directory / "config/bpm.yml").exists():
                continue
            job = directory.name
            try:
                processes = self._file(job).processes
            except (ConfigError, HostError) as exc:
                complaints.append(f"invalid config for {job}: {exc}")
                continue
            for each in processes:
                found = self.find(job, each.name)
                idle_status = "failed" if self._entry(job, each.name).pidfile.exists() else "stopped"
                shown = job if job == each.name else f"{job}.{each.name}"
                rows.append(BpmListRow(shown, found[0] if found else 0, "running" if found else idle_status))
        return rows, complaints

    async def last_output(self, call: BpmCall) -> str:
        """Return the last line of the process's error log. The process may have replaced the log, so it is read with
        ``host.guarded``.
        """
        entry = self._entry(call.job, call.process)
        return await last_line(entry.label, entry.logs["stderr"], self._paths.sys / "log")

    # --- start and stop -----------------------------------------------------------------------------------------------

    async def start(self, call: BpmCall) -> process.Process:
        """Start the process, or find it if it is already running. Raises ``HostError`` or ``ConfigError``."""
        async with self._exclusively(call, "start"):
            found = await asyncio.to_thread(self.find, call.job, call.process)
            if found and (running := self._programs.keepers.adopt(found)):
                return running
            wanted = await asyncio.to_thread(self.definition, call.job, call.process)
            return await self._launch(self._entry(call.job, call.process), wanted)

    async def stop(self, call: BpmCall, by: float = float("inf")) -> None:
        """Stop the process: send the shutdown signal, then QUIT, then KILL. ``by`` is the deadline for KILL (monotonic
        time). Afterwards, kill the process's remaining descendants, and remove the pidfile.
        """
        async with self._exclusively(call, "stop"):
            signal_name = "TERM"
            with contextlib.suppress(ConfigError, OSError):  # stop the process even if its bpm.yml cannot be read
                wanted = await asyncio.to_thread(self.definition, call.job, call.process)
                signal_name = wanted.shutdown_signal
            entry = self._entry(call.job, call.process)
            found = await asyncio.to_thread(self.find, call.job, call.process)
            running = self._programs.keepers.adopt(found) if found else None
            if running is not None and await _end(running, signal.Signals[f"SIG{signal_name}"], by):
                self._programs.keepers.killed.add(entry.label)
            # The process is not under a keeper if an agent without keepers (0.2.0) started it.
            others = [found] if found else []
            # Descendants are usually killed, so only a kill of the process itself is recorded in ``killed``.
            if survivors := await self._programs.keepers.end([entry.label], others, grace=0.0, is_usual=True):
                raise HostError(f"cannot end {', '.join(map(str, survivors))}")
            await asyncio.to_thread(self._remove_cgroup, entry)
            await asyncio.to_thread(_remove_pidfile, entry.pidfile)

    async def run(self, call: BpmCall, volumes: Sequence[bpm.Volume], env: Mapping[str, str]) -> int:
        """Run the process as an errand, without a pidfile, and return its exit code, or 1 if that is unknown. If the
        process is already running, return 0 immediately.
        """
        async with self._exclusively(call, "run"):
            if await asyncio.to_thread(self.find, call.job, call.process):
                return 0
            wanted = await asyncio.to_thread(self.definition, call.job, call.process)
            more = (*wanted.additional_volumes, *volumes)
            wanted = msgspec.structs.replace(wanted, env={**wanted.env, **env}, additional_volumes=more)
            entry = self._entry(call.job, call.process)
            entry.errand = await self._launch(entry, wanted, has_pidfile=False)
            try:
                status = await entry.errand.wait_or_terminate(QUIT_TIMEOUT_S)
            finally:
                entry.errand = None
            # Kill the processes that the errand has left running.
            if survivors := await self._programs.keepers.end([entry.label], [], grace=0.0):
                raise HostError(f"cannot end {', '.join(map(str, survivors))}")
            await asyncio.to_thread(self._remove_cgroup, entry)
            return 1 if status is None else status

    async def end_run(self, call: BpmCall) -> None:
        """Terminate the process that ``run`` waits for, if any, because the user has interrupted ``bpm run``."""
        if errand := self._entry(call.job, call.process).errand:
            await errand.terminate(SIGNAL_TIMEOUT_S)

    @contextlib.asynccontextmanager
    async def _exclusively(self, call: BpmCall, verb: str) -> AsyncIterator[None]:
        """Prevent other operations on the process while the block runs. Log the start, a failure and the end of the
        operation to ``bpm.log``. As in bpm, the end is logged as ``complete`` even after a failure.
        """
        async with self._entry(call.job, call.process).turn:
            await asyncio.to_thread(self._note, call, f"{verb}.starting")
            try:
                yield
            except (ConfigError, OSError) as exc:
                await asyncio.to_thread(self._note, call, f"{verb}.failed-to-{verb}", str(exc))
                raise
            finally:
                await asyncio.to_thread(self._note, call, f"{verb}.complete")

    def _note(self, call: BpmCall, message: str, error: str = "") -> None:
        """Append a line to ``sys/log/JOB/bpm.log`` in the format of bpm's log library (lager's ``PrettySink``)."""
        now = clock.wall_time()
        data = {"job": call.job, "process": call.process} | ({"error": error} if error else {})
        line = {
            "timestamp": time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(now)) + f".{int(now % 1 * 1e9):09}Z",
            "level": "error" if error else "info",
            "source": "bpm",
            "message": f"bpm.{message}",
            "data": data,
        }
        root = self._paths.sys / "log"
        owner = f"{self._user}:{self._user}" if self._user else None
        try:
            if (self._paths.jobs / call.job).is_dir():
                _make_kept(root / call.job, 0o750, owner)
            ids = files.owner_ids(owner)
            with closing(guarded.open_log(root / call.job / "bpm.log", 0o600, owner=ids)) as descriptor:
                os.write(descriptor, json.dumps(line).encode() + b"\n")
        except FileNotFoundError:
            return  # there is no job with this name
        except OSError as exc:
            logger.warning("cannot write the bpm log of %s: %s", call.job, exc)

    async def _launch(
        self, entry: BpmProcess, wanted: bpm.ProcessConfig, *, has_pidfile: bool = True
    ) -> process.Process:
        """Start the process, which must not be running. ``has_pidfile`` is False for an errand."""
        from agent_shim.host import sandbox

        isolation = await self.isolation()
        self._complain(entry, wanted, isolation)
        if survivors := await self._programs.keepers.end([entry.label], [], grace=0.0):
            raise HostError(f"cannot end remaining processes of the last run: {', '.join(map(str, survivors))}")
        await asyncio.to_thread(self._make_directories, entry, wanted)
        if wanted.pre_start:
            await self._run_hook(entry, wanted)
        await asyncio.to_thread(_require_volumes, wanted)
        await asyncio.to_thread(self._remove_cgroup, entry)
        entry.is_victim = False  # a kill in the last run does not explain the next exit
        order = await asyncio.to_thread(self.order, entry.job, wanted, isolation)

        async def start(argv: Sequence[str], stdin: int) -> process.Process:
            program = keeper.Program(argv, {}, stdin=stdin)
            return await self._programs.keepers.spawn(entry.label, program, *entry.logs.values())

        async with sandbox.prepared(order, start) as running:
            if has_pidfile:  # ``kill_hogs`` finds processes by their pidfiles
                self._has_started.set()
                await asyncio.to_thread(files.write_atomic, entry.pidfile, str(running.pid).encode())
        return running

    async def _run_hook(self, entry: BpmProcess, wanted: bpm.ProcessConfig) -> None:
        """Run the pre_start hook as root and without isolation. Raises ``HostError`` if the hook fails.

        The hook runs in the working directory of start programs. Under the real bpm, the hook inherits that directory
        from the start program that calls bpm.
        """
        env, directory = self._env(entry.job, wanted), str(self._programs.directory())
        program = keeper.Program([wanted.pre_start], env, cwd=directory)
        hook = await self._programs.keepers.spawn(entry.label, program, *entry.logs.values())
        status = await hook.wait_or_terminate(QUIT_TIMEOUT_S)
        if status != 0:
            raise HostError(f"the pre_start hook {wanted.pre_start} failed: exit {status}")

    # --- execution ----------------------------------------------------------------------------------------------------

    def order(self, job: str, wanted: bpm.ProcessConfig, isolation: sandbox.Isolation) -> sandbox_exec.ExecSpec:
        """Build the exec spec that starts a process, and create its cgroups. Whatever the container does not support is
        left out. Raises ``HostError``.
        """
        from agent_shim.host import sandbox

        is_root = os.geteuid() == 0
        ids: tuple[int | None, int | None] = (None, None)
        if is_root and self._user is not None and not wanted.unsafe.privileged:
            ids = files.owner_ids(self._user)
        held = capabilities.privileges().effective if is_root else frozenset[str]()
        limits = {
            "RLIMIT_NOFILE": wanted.limits.open_files
            or _settable_limit(resource.RLIMIT_NOFILE, DEFAULT_OPEN_FILES, held)
        }
        if wanted.limits.core_file_size is not None:
            limits["RLIMIT_CORE"] = wanted.limits.core_file_size
        # At level 1, the process gets its own root file system.
        is_apart = isolation.level == 1
        # At level 2, do not restrict a privileged process, because Landlock would keep it from mounting file systems.
        has_view = is_apart or (isolation.level == 2 and not wanted.unsafe.privileged)
        shared_namespaces = {"pid"} if wanted.unsafe.host_pid_namespace else set[str]()
        memory = wanted.limits.memory if isolation.memory else None
        processes = wanted.limits.processes if isolation.processes else None
        entry = self._entry(job, wanted.name)
        with files.attempting(f"limit {entry.label}"):
            cgroups = entry.cgroup.make(memory=memory, processes=processes)
        return sandbox.exec_spec(
            [wanted.executable, *wanted.args],
            env=self._env(job, wanted),
            cwd=wanted.workdir or str(self._paths.jobs / job),
            uid=ids[0],
            gid=ids[1],
            keeps_privileges=wanted.unsafe.privileged,
            capabilities=sorted(capabilities.NAMES.index(each) for each in held.intersection(wanted.capabilities)),
            limits=limits,
            cgroups=cgroups,
            binds=self._binds(job, wanted, is_apart=is_apart) if has_view else None,
            namespaces=[each for each in sandbox.NAMESPACES if each not in shared_namespaces] if is_apart else [],
            has_init=True,
            may_signal=wanted.unsafe.host_pid_namespace,
        )

    async def shell_order(self, job: str, wanted: bpm.ProcessConfig) -> sandbox_exec.ExecSpec:
        """Build the exec spec for a shell in a running process's namespaces. The caller, ``bpm shell``, replaces the
        process's own program in it with the shell. Raises ``HostError`` if the process is not running.
        """
        isolation = await self.isolation()
        found = await asyncio.to_thread(self.find, job, wanted.name)
        if found is None:
            raise HostError("process is not running or could not be found")
        # Without these limits, the shell runs outside the process's cgroups and does not use up its memory limit.
        limits = msgspec.structs.replace(wanted.limits, memory=None, processes=None)
        order = await asyncio.to_thread(self.order, job, msgspec.structs.replace(wanted, limits=limits), isolation)
        order["enter"] = found[0] if order["namespaces"] else None
        return order

    def _env(self, job: str, wanted: bpm.ProcessConfig) -> dict[str, str]:
        """Return bpm's default environment variables, overridden by those in bpm.yml."""
        home = self._paths.data / job
        return {
            "TMPDIR": str(home / "tmp"),
            "LANG": "en_US.UTF-8",
            "PATH": PATH.format(jobs=self._paths.jobs, job=job),
            "HOME": str(home),
            **wanted.env,
        }

    def _binds(self, job: str, wanted: bpm.ProcessConfig, *, is_apart: bool) -> list[sandbox_exec.BindMount]:
        """Return a bind mount for each path that the process is allowed to access. ``is_apart`` is True if the process
        gets its own root file system.

        If a path occurs several times, the first entry wins. Therefore, a volume cannot extend the access to a path
        that bpm restricts.
        """
        from agent_shim.host import sandbox

        paths, bind = self._paths, sandbox.bind_mount
        temporary = str(paths.data / job / "tmp")
        found = [bind(each, run=True) for each in sandbox.SYSTEM]
        # bosh-dns reads the DNS records and the instance's health in ``paths.instance``. The real bpm hides that
        # directory, but showing it is harmless, because it contains no secrets.
        found += [bind("/sys"), bind(str(paths.instance))]
        if not is_apart:
            found += [bind(each, write=True) for each in SCRATCH]
            # These mounts reveal the names of other jobs, but bosh-dns exits if it cannot read the files of each job.
            found += [bind(str(each)) for each in paths.jobs.glob("*/.bosh")]
        # A test's base directory may be below /tmp, and must not be hidden by the job's own /tmp.
        elif paths.is_system:
            found += [bind(each, source=temporary, write=True) for each in TEMPORARY]
        found += [bind(str(each), run=True) for each in (paths.packages, paths.data_packages, paths.jobs / job)]
        found += [bind(each, run=True) for each in self._packages_elsewhere()]
        writable = [temporary, str(paths.sys / "log" / job), str(paths.sys / "run" / job)]
        if wanted.ephemeral_disk:
            writable.append(str(paths.data / job))
        if wanted.persistent_disk:
            writable.append(str(paths.store / job))
        found += [bind(each, write=True) for each in writable]
        given = [*writable, *(str(each) for each in (paths.packages, paths.data_packages, paths.jobs / job))]
        unrestricted = _matching(wanted.unsafe.unrestricted_volumes)
        # Leave out an unrestricted volume if bpm already provides its path or a directory above it.
        free = [each for each in unrestricted if not any(f"{each.path}/".startswith(f"{path}/") for path in given)]
        for volume in (*wanted.additional_volumes, *free):
            found.append(bind(volume.path, write=volume.writable, run=volume.allow_executions, shared=volume.shared))
        # Releases hard-code paths in /var/vcap, so bind the directories of a different base there too.
        if is_apart and not paths.is_system:
            inside = [each for each in found if Path(each["path"]).is_relative_to(paths.base)]
            found += [{**each, "path": str(VCAP / Path(each["path"]).relative_to(paths.base))} for each in inside]
        return list({each["path"]: each for each in reversed(found)}.values())

    def _packages_elsewhere(self) -> list[str]:
        """Return the package directories that are not below the agent's ``packages`` or ``data/packages``. A deployment
        without a Director, for example, only creates links to its packages, and the links may point anywhere.
        """
        ends = {os.path.realpath(each) for each in self._paths.packages.glob("*")}
        own = [os.path.realpath(each) for each in (self._paths.packages, self._paths.data_packages)]
        return sorted(end for end in ends if not any(f"{end}/".startswith(f"{each}/") for each in own))

    def _remove_cgroup(self, entry: BpmProcess) -> None:
        """Remove the cgroups of an exited process. First record any kill by the kernel's OOM killer, because the
        counter is removed too.
        """
        if hog := self._killed_by_kernel(entry):
            self._hogs.append(hog)
        entry.cgroup.remove()
        # If the cgroup could not be removed, the next process uses it, and the kernel does not reset the OOM counter.
        # Remember the current count, so that earlier kills are not attributed to the next process.
        with self._counting:
            entry.oom_kills = (entry.cgroup.memory() or (0, 0))[0]

    def _killed_by_kernel(self, entry: BpmProcess) -> MemoryKill | None:
        """Return the OOM kill that happened in the process's cgroup since the last call, or None. Several kills since
        then count as one.
        """
        with self._counting:
            kills, peak = entry.cgroup.memory() or (0, 0)
            before, entry.oom_kills = entry.oom_kills, kills
        if kills <= before:
            return None
        return MemoryKill(entry.job, entry.name, peak, self._memory_limit(entry))

    def _make_directories(self, entry: BpmProcess, wanted: bpm.ProcessConfig) -> None:
        """Create the process's directories and log files with the same modes as bpm. Raises ``HostError``."""
        paths, job = self._paths, entry.job
        # ``own`` is the owner of the agent's directories, and ``theirs`` of the directories that the process uses. None
        # leaves the owner unchanged.
        own, theirs = ("root:root", f"{self._user}:{self._user}") if self._user else (None, None)
        # ``sys/run`` is world-writable, so a job may already have created ``sys/run/bpm``.
        files.make_own_dir(entry.pidfile.parent.parent, 0o755, own)
        files.make_own_dir(entry.pidfile.parent, 0o700, own)
        private = [paths.sys / "run" / job, paths.data / job, paths.data / job / "tmp"]
        if wanted.persistent_disk:
            if not paths.store.is_dir():
                raise HostError("requested persistent disk does not exist")
            private.append(paths.store / job)
        volumes = [Path(volume.path) for volume in wanted.additional_volumes if not volume.mount_only]
        # As in bpm, the mode of an existing directory is changed only if it is a volume.
        _make_kept(paths.sys / "log" / job, 0o750, theirs)
        for path in private:
            _make_kept(path, 0o700, theirs)
        for path in volumes:
            if path.is_dir() or not path.exists():
                files.make_dir(path, 0o700, theirs)
        for log in entry.logs.values():
            with files.attempting(f"make the log file {log}"):
                os.close(guarded.open_log(log, 0o600, owner=files.owner_ids(theirs)))

    def _complain(self, entry: BpmProcess, wanted: bpm.ProcessConfig, isolation: sandbox.Isolation) -> None:
        """Log a warning if bpm.yml requests something that this container does not support. In strict mode, raise
        ``HostError`` instead.
        """
        held = capabilities.privileges().effective if os.geteuid() == 0 else frozenset[str]()
        lacking = [f"capability {each}" for each in wanted.capabilities if each not in held]
        if wanted.limits.processes is not None and not isolation.processes:
            lacking.append("limits.processes")
        for key, which in (("open_files", resource.RLIMIT_NOFILE), ("core_file_size", resource.RLIMIT_CORE)):
            asked = getattr(wanted.limits, key) or 0
            if asked > _settable_limit(which, asked, held):
                lacking.append(f"limits.{key} of {asked}")
        if wanted.unsafe.privileged and "SYS_ADMIN" not in held:
            lacking.append("unsafe.privileged")
        if not lacking:
            return
        text = f"{entry.label} cannot have {', '.join(lacking)} in this container"
        if self._is_strict:
            raise HostError(text)
        logger.warning("%s", text)

    def _file(self, job: str) -> bpm.BpmFile:
        """Read the job's bpm.yml, and log its unknown keys unless they have already been logged. Raises ``ConfigError``
        or ``HostError``.
        """
        from agent_shim.supervisor.bpm import config as bpm

        path = self._paths.jobs / job / "config/bpm.yml"
        # Read one byte more than allowed, so that ``parse`` can reject a file that is too large.
        with files.attempting(f"read {path}"):
            text = guarded.head(path, bpm.MAX_BYTES + 1).decode(errors="surrogateescape")
        unknown: list[str] = []
        found = bpm.parse(text, origin=str(path), job=job, root=PurePosixPath(self._paths.base), unknown=unknown)
        if unknown != self._unknown_keys.get(path, []):
            self._unknown_keys[path] = unknown
            for key in unknown:
                logger.warning("%s: ignoring, as bpm does, %s", path, key)
        return found

    # --- memory limits ------------------------------------------------------------------------------------------------

    async def used(self) -> None:
        """Wait until this agent or an earlier one has started a bpm.yml process. Until then, no process can exceed a
        memory limit, so ``kill_hogs`` need not be called.
        """
        # If root or the agent's user has created the run directory, an earlier agent has started a process.
        with contextlib.suppress(OSError):
            if guarded.status(self._paths.sys / "run/bpm").st_uid in trusted_path.trusted_users():
                return
        await self._has_started.wait()

    def kill_hogs(self) -> list[MemoryKill]:
        """Kill the process trees that exceed their memory limit, and return the kills. Blocks for a few milliseconds.

        If the kernel enforces the limit, one process in the tree is already dead, and this method kills the rest.
        """
        hogs, self._hogs = self._hogs, []  # begin with the kills that were found since the last call
        limited = []
        for path in self._paths.sys.glob("run/bpm/*/*.pid"):
            entry = self._entry(path.parent.name, path.stem)
            limit = self._memory_limit(entry)
            now = clock.boot_ticks()
            # If the process has a memory cgroup, the kernel enforces the limit.
            if entry.cgroup.memory() is not None:
                if hog := self._killed_by_kernel(entry):
                    hogs.append(hog)
                    entry.is_victim = True
                    for member in entry.cgroup.members():
                        if member[1] < now:  # otherwise, the process belongs to the next run
                            process.send(member, signal.SIGKILL)
            elif limit and (found := self.find(entry.job, entry.name)):
                limited.append((entry, limit, found))
        if not limited:
            return hogs
        processes = proc.table()
        below = proc.children(processes)
        for entry, limit, found in limited:
            tree = proc.descent(below, [found[0]]) & processes.keys()
            # The sum of the processes' resident memory counts shared pages several times. The exact memory use is slow
            # to determine, so it is read only if that sum exceeds the limit.
            if sum(processes[pid].resident_kb for pid in tree) * 1024 > limit:
                used = sum(proc.proportional_kb(pid) or processes[pid].resident_kb for pid in tree) * 1024
                if used > limit:
                    entry.is_victim = True
                    # Kill the main process first. If its children were killed before it, it might exit with a different
                    # status.
                    for pid in sorted(tree, key=found[0].__ne__):
                        process.send(processes[pid].identity, signal.SIGKILL)
                    hogs.append(MemoryKill(entry.job, entry.name, used, limit))
        return hogs

    def was_killed_for_memory(self, call: BpmCall) -> bool:
        """Return True if the process last exited because it was killed for exceeding its memory limit. A kill explains
        only one exit, so the next call returns False unless there was another kill.
        """
        entry = self._entry(call.job, call.process)
        if hog := self._killed_by_kernel(entry):
            self._hogs.append(hog)
            entry.is_victim = True
        is_victim, entry.is_victim = entry.is_victim, False
        return is_victim

    def _memory_limit(self, entry: BpmProcess) -> int:
        """Return the memory limit in bytes, or 0 if there is none or bpm.yml cannot be read. The file is read again
        only if it has changed.
        """
        try:
            modified = (self._paths.jobs / entry.job / "config/bpm.yml").stat().st_mtime_ns
            if entry.limit[1] != modified:
                limits = self.definition(entry.job, entry.name).limits
                entry.limit = limits.memory or 0, modified
            return entry.limit[0]
        except (OSError, ConfigError):
            return 0


async def _end(running: process.Process, first: signal.Signals, by: float) -> bool:
    """Stop a process with bpm's sequence of signals, and return True if it had to be killed. ``by`` is the deadline for
    KILL (monotonic time).

    The signals go to the init process above the program, which forwards them to the program but not to its descendants.
    """
    steps = (first, SIGNAL_TIMEOUT_S), (signal.SIGQUIT, QUIT_TIMEOUT_S), (signal.SIGKILL, process.KILL_TIMEOUT_S)
    try:
        for sig, patience in steps:
            running.send(sig)
            left = patience if sig is signal.SIGKILL else max(0.0, min(patience, by - time.monotonic()))
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(left):
                    await running.wait()
                    return sig is signal.SIGKILL
        return True
    finally:
        running.release()


def _settable_limit(which: int, wanted: int, held: Container[str]) -> int:
    """Return the limit ``wanted``, or the hard limit if that is lower and the capabilities ``held`` are not sufficient
    to raise it.
    """
    hard = resource.getrlimit(which)[1]
    return wanted if "SYS_RESOURCE" in held or hard == resource.RLIM_INFINITY else min(wanted, hard)


def _matching(volumes: Sequence[bpm.Volume]) -> list[bpm.Volume]:
    """Expand the glob of each volume. It is not an error if nothing matches."""
    return [msgspec.structs.replace(volume, path=path) for volume in volumes for path in glob.glob(volume.path)]  # noqa: PTH207 - the paths are strings


def _make_kept(path: Path, mode: int, owner: str | None) -> None:
    """Create a directory with ``mode``. If the directory already exists, keep its mode."""
    files.make_dir(path, path.stat().st_mode & 0o7777 if path.is_dir() else mode, owner)


def _require_volumes(wanted: bpm.ProcessConfig) -> None:
    """Raise ``HostError`` if a ``mount_only`` volume is missing. A process that is started without the volume would not
    see it even if another job created it later.
    """
    for volume in wanted.additional_volumes:  # the other volumes have just been created
        if not Path(volume.path).exists():
            raise HostError(f"volume {volume.path} does not exist: with mount_only, another job has to make it")


def _remove_pidfile(pidfile: Path) -> None:
    with contextlib.suppress(OSError), guarded.held(pidfile.parent) as directory:
        os.unlink(pidfile.name, dir_fd=directory)
