"""Processes of bpm.yml, run without runc (bpm-release ``src/bpm/runc/adapter``, ``src/bpm/runc/lifecycle``).

Directories, log files, environment, pid file and the way to stop are bpm's. Isolation is what the container allows:

- level 1: namespaces of its own and a root that holds the view that bpm gives and nothing else;
- level 2: Landlock rules over the same view;
- level 3: neither. In all: no capabilities, no new privileges, resource limits.

A process is known by its job and name, whoever asked for its start: a monit file or a script that calls ``bpm start``.
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
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Final

from agent_shim.core.errors import ConfigError, HostError
from agent_shim.core.paths import Paths
from agent_shim.host import (
    capabilities,
    clock,
    files,
    guarded,
    job_cgroups,
    proc,
    process,
)
from agent_shim.supervisor import process_record
from agent_shim.supervisor.ctl_programs import Programs, last_line
from agent_shim.supervisor.plan import BpmCall, bpm_label
from agent_shim.supervisor.process_record import MARK, Identity, ProcessRecord

if TYPE_CHECKING:
    # Loaded where they are used: an agent whose jobs have no bpm.yml does without YAML and ctypes.
    from agent_shim.host import sandbox, sandbox_exec
    from agent_shim.supervisor.bpm import config as bpm

logger = logging.getLogger(__name__)

ASK_PATIENCE: Final = 15.0
"""Seconds between the first signal and QUIT (``src/bpm/commands/stop.go``)."""
QUIT_PATIENCE: Final = 2.0
OPEN_FILES: Final = 524288
"""What bpm's wrapper asks for where bpm.yml names no limit (``jobs/bpm/templates/bpm``)."""
SETTLED: Final = 5.0
"""Seconds within which the pid file follows the start of its process."""

TEMPORARY: Final = ("/tmp", "/var/tmp")  # noqa: S108 - without a mount namespace these are everybody's
SCRATCH: Final = ("/dev", "/proc", *TEMPORARY)
PATH: Final = "{jobs}/{job}/bin:/usr/local/bin:/usr/local/sbin:/usr/bin:/usr/sbin:/bin:/sbin:."

HONOURED: Final[Mapping[str, tuple[str, str, str]]] = {
    "name": ("yes", "yes", "yes"),
    "executable": ("yes", "yes", "yes"),
    "args": ("yes", "yes", "yes"),
    "env": ("yes", "yes", "yes"),
    "workdir": ("yes", "yes", "yes"),
    "hooks.pre_start": ("yes", "yes", "yes"),
    "capabilities": ("those the container has", "those the container has", "those the container has, root only"),
    "limits.memory": ("a cgroup, else a watchdog", "a cgroup, else a watchdog", "a cgroup, else a watchdog"),
    "limits.open_files": ("up to the container's", "up to the container's", "up to the container's"),
    "limits.processes": ("with a cgroup", "with a cgroup", "with a cgroup"),
    "limits.core_file_size": ("up to the container's", "up to the container's", "up to the container's"),
    "ephemeral_disk": ("yes", "yes", "made; no rules"),
    "persistent_disk": ("yes", "yes", "made; no rules"),
    "additional_volumes[].path": ("yes", "yes", "made; no rules"),
    "additional_volumes[].writable": ("yes", "yes", "no rules"),
    "additional_volumes[].allow_executions": ("yes", "yes", "no rules"),
    "additional_volumes[].mount_only": ("yes", "yes", "yes"),
    "additional_volumes[].shared": ("yes", "not needed: no mounts", "not needed: no mounts"),
    "unsafe.privileged": ("yes", "what the container has, no rules", "what the container has"),
    "unsafe.unrestricted_volumes": ("yes", "yes; one opens all below it", "no rules"),
    "unsafe.host_pid_namespace": ("yes", "yes: may signal; all see all", "always so"),
    "shutdown_signal": ("yes", "yes", "yes"),
}
"""What of a process is honoured in levels 1, 2 and 3; ``docs/bpm.md`` shows it."""


def key_table() -> str:
    """``HONOURED`` as a table in Markdown."""
    rows = [f"| `{key}` | {' | '.join(levels)} |" for key, levels in HONOURED.items()]
    return "\n".join(["| Key | Level 1 | Level 2 | Level 3 |", "|---|---|---|---|", *rows])


class UnknownProcessError(ConfigError):
    """The bpm.yml of the job has no process of this name."""


@dataclass(frozen=True, slots=True)
class Row:
    """A line of ``bpm list``; ``pid`` is 0 unless it is running."""

    name: str
    pid: int
    status: str


@dataclass(frozen=True, slots=True)
class MemoryKill:
    """A process that was killed because its tree used more memory than it may; bytes."""

    job: str
    process: str
    used: int
    limit: int


class Bpm:
    """Starts, finds and stops processes of bpm.yml, one thing at a time for each.

    ``user`` is who they run as when we are root; None leaves them ours, as below another base than /var/vcap.
    With ``is_strict`` what cannot be honoured is an error, else a warning.
    """

    def __init__(
        self, paths: Paths, programs: Programs, *, user: str | None = None, is_strict: bool = False, level: int = 0
    ) -> None:
        """``level`` is the strongest isolation to be used, by default what the container allows."""
        self._paths = paths
        self._programs = programs
        self._user = user
        self._is_strict = is_strict
        self._level = level
        self._locks: dict[tuple[str, str], asyncio.Lock] = {}
        self._runs: dict[tuple[str, str], process.Process] = {}
        self._limits: dict[tuple[str, str], tuple[int, int]] = {}
        self._isolation: sandbox.Isolation | None = None
        self._trying = asyncio.Lock()
        self._counting = threading.Lock()
        self._ooms: dict[str, int] = {}
        self._hogs: list[MemoryKill] = []
        """Found at their end or when their cgroup was taken away, not told yet."""
        self._victims: set[str] = set()
        """Killed for their memory, by label, until their end is explained by that."""

    async def isolation(self) -> sandbox.Isolation:
        """What processes that are started now can have; the container is tried once."""
        from agent_shim.host import sandbox

        async with self._trying:
            if self._isolation is None:
                self._isolation = await sandbox.isolation()
        found = self._isolation
        return found._replace(level=max(self._level, found.level))

    # --- what is known ----------------------------------------------------------------------------------------------

    def definition(self, job: str, name: str) -> bpm.Process:
        """The process as its bpm.yml says; raises ``ConfigError`` or ``HostError``."""
        found = self._file(job).process(name)
        if found is None:
            config = self._paths.jobs / job / "config/bpm.yml"
            raise UnknownProcessError(f'process "{name}" not present in job configuration ({config})')
        return found

    def check_volumes(self, job: str, volumes: Sequence[bpm.Volume]) -> None:
        """Raise ``ConfigError`` for volumes of a command line that bpm.yml could not have either."""
        from agent_shim.supervisor.bpm import config as bpm

        for volume in volumes:
            bpm.check_volume(volume.path, job=job, root=PurePosixPath(self._paths.base))

    def find(self, job: str, name: str) -> Identity | None:
        """The living process, started by this agent or an earlier one."""
        pidfile = process_record.read(self._pidfile(job, name))
        found = proc.stat(pidfile.pid) if pidfile else None
        if pidfile is None or found is None or not found.is_alive or found.pid in (1, os.getpid()):
            return None
        label = bpm_label(job, name)
        if (caged := self._programs.ownership.label_of(found.pid)) is not None:
            return found.identity if caged == label else None
        # The pid file is ours alone and was written when it started.
        age = pidfile.modified - clock.wall_time_of(found.start_ticks)
        if -0.1 < age < SETTLED:
            return found.identity
        # The wall clock may have been set since. The process decides how long it takes to read this.
        is_ours = proc.variable(found.pid, MARK) == process_record.mark(label, self._paths.base)
        return found.identity if is_ours else None

    def rows(self) -> tuple[list[Row], list[str]]:
        """All processes of all jobs as ``bpm list`` shows them, and what is wrong with configurations."""
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
                left = "failed" if self._pidfile(job, each.name).exists() else "stopped"
                shown = job if job == each.name else f"{job}.{each.name}"
                rows.append(Row(shown, found[0] if found else 0, "running" if found else left))
        return rows, complaints

    async def last_words(self, call: BpmCall) -> str:
        """The last line of its error log, where the process may have put anything else."""
        return await last_line(
            bpm_label(call.job, call.process), self._log(call.job, call.process, "stderr"), self._paths.sys / "log"
        )

    # --- start and stop ---------------------------------------------------------------------------------------------

    async def start(self, call: BpmCall) -> process.Process:
        """Have it run; one that runs is left alone. Raises ``HostError`` or ``ConfigError``; returns once it runs."""
        async with self._only(call), self._noted(call, "start"):
            if (found := self.find(call.job, call.process)) and (running := process.adopt(*found)):
                return running
            wanted = await asyncio.to_thread(self.definition, call.job, call.process)
            return await self._launch(call, wanted)

    async def stop(self, call: BpmCall, by: float = float("inf")) -> None:
        """Signal, QUIT, KILL, then whatever is left of it, then the pid file; by monotonic time ``by``."""
        async with self._only(call), self._noted(call, "stop"):
            signal_name = "TERM"
            with contextlib.suppress(ConfigError, OSError):
                wanted = await asyncio.to_thread(self.definition, call.job, call.process)
                signal_name = wanted.shutdown_signal
            label = bpm_label(call.job, call.process)
            found = self.find(call.job, call.process)
            left = await self._programs.members(label, ProcessRecord(), [found] if found else [])
            left += await asyncio.to_thread(self._cage(label).members)
            running = process.adopt(*found) if found else None
            if running is not None and await _end(running, signal.Signals[f"SIG{signal_name}"], by):
                self._programs.killed.add(label)
            await self._programs.sweep(label, ProcessRecord(), left, 0.0, is_usual=True)
            await asyncio.to_thread(self._open_cage, call.job, call.process)
            await asyncio.to_thread(self._pidfile(call.job, call.process).unlink, missing_ok=True)

    async def run(self, call: BpmCall, volumes: Sequence[bpm.Volume], env: Mapping[str, str]) -> int:
        """Run it to its end, as for an errand, without a pid file; its exit code. 0 at once if it runs already."""
        async with self._only(call), self._noted(call, "run"):
            if self.find(call.job, call.process):
                return 0
            wanted = await asyncio.to_thread(self.definition, call.job, call.process)
            more = (*wanted.additional_volumes, *volumes)
            wanted = replace(wanted, env={**wanted.env, **env}, additional_volumes=more)
            running = await self._launch(call, wanted, has_pidfile=False)
            self._runs[call.job, call.process] = running
            try:
                status = await running.wait()
            except asyncio.CancelledError:
                await running.terminate(QUIT_PATIENCE)
                raise
            finally:
                del self._runs[call.job, call.process]
            await self._programs.sweep(bpm_label(call.job, call.process), ProcessRecord(), [], 0.0)
            await asyncio.to_thread(self._open_cage, call.job, call.process)
            return 1 if status is None else status

    async def end_run(self, call: BpmCall) -> None:
        """End what ``run`` waits for, if it does."""
        if running := self._runs.get((call.job, call.process)):
            await running.terminate(ASK_PATIENCE)

    @contextlib.asynccontextmanager
    async def _only(self, call: BpmCall) -> AsyncIterator[None]:
        async with self._locks.setdefault((call.job, call.process), asyncio.Lock()):
            yield

    @contextlib.asynccontextmanager
    async def _noted(self, call: BpmCall, verb: str) -> AsyncIterator[None]:
        """Have the log of bpm say that it begins and ends, and why it fails."""
        await asyncio.to_thread(self._note, call, f"{verb}.starting")
        try:
            yield
        except (ConfigError, OSError) as exc:
            await asyncio.to_thread(self._note, call, f"{verb}.failed-to-{verb}", str(exc))
            raise
        finally:
            await asyncio.to_thread(self._note, call, f"{verb}.complete")

    def _note(self, call: BpmCall, message: str, error: str = "") -> None:
        """A line of ``sys/log/JOB/bpm.log``, as bpm's library for logs writes it (lager's ``PrettySink``)."""
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
            descriptor = guarded.open_log(root / call.job / "bpm.log", 0o600)
            try:
                os.fchown(descriptor, *files.owner_ids(owner))
                os.write(descriptor, json.dumps(line).encode() + b"\n")
            finally:
                os.close(descriptor)
        except FileNotFoundError:
            return  # no job of this name
        except OSError as exc:
            logger.warning("cannot write the log of bpm for %s: %s", call.job, exc)

    async def _launch(self, call: BpmCall, wanted: bpm.Process, *, has_pidfile: bool = True) -> process.Process:
        from agent_shim.host import sandbox

        job, name = call.job, call.process
        isolation = await self.isolation()
        self._complain(job, wanted, isolation)
        label = bpm_label(job, name)
        left = await asyncio.to_thread(self._cage(label).members)
        await self._programs.sweep(label, ProcessRecord(), left, 0.0)
        await asyncio.to_thread(self._make_directories, job, wanted)
        if wanted.pre_start:
            await self._run_hook(job, wanted)
        await asyncio.to_thread(self._open_cage, job, name)
        self._victims.discard(label)
        order = await asyncio.to_thread(self.order, job, wanted, isolation)
        mark = {MARK: process_record.mark(label, self._paths.base)}
        order["env"] |= mark
        logs = {"stdout": self._log(job, name, "stdout"), "stderr": self._log(job, name, "stderr")}
        async with sandbox.prepared(order, env=mark, **logs) as running:
            if has_pidfile:
                await files.save(self._pidfile(job, name), str(running.pid).encode())
        return running

    async def _run_hook(self, job: str, wanted: bpm.Process) -> None:
        """As root and outside of everything, before the process; raises ``HostError`` when it fails."""
        hook = process.spawn(
            [wanted.pre_start],
            env={**self._env(job, wanted), MARK: process_record.mark(bpm_label(job, wanted.name), self._paths.base)},
            stdout=self._log(job, wanted.name, "stdout"),
            stderr=self._log(job, wanted.name, "stderr"),
            session=True,
        )
        try:
            status = await hook.wait()
        except asyncio.CancelledError:
            await hook.terminate(QUIT_PATIENCE)
            raise
        if status != 0:
            raise HostError(f"the pre_start hook {wanted.pre_start} failed: exit {status}")

    # --- what is made -----------------------------------------------------------------------------------------------

    def order(self, job: str, wanted: bpm.Process, isolation: sandbox.Isolation) -> sandbox_exec.ExecSpec:
        """What the process becomes; its cgroups are made. Raises ``HostError``."""
        from agent_shim.host import sandbox

        is_root = os.geteuid() == 0
        ids: tuple[int | None, int | None] = (None, None)
        if is_root and self._user is not None and not wanted.unsafe.privileged:
            ids = files.owner_ids(self._user)
        held = capabilities.privileges().effective if is_root else frozenset[str]()
        limits = {"RLIMIT_NOFILE": wanted.limits.open_files or _most(resource.RLIMIT_NOFILE, OPEN_FILES, held)}
        if wanted.limits.core_file_size is not None:
            limits["RLIMIT_CORE"] = wanted.limits.core_file_size
        wanted_capabilities = {each.removeprefix("CAP_").upper() for each in wanted.capabilities}
        is_apart = isolation.level == 1
        has_view = is_apart or (isolation.level == 2 and not wanted.unsafe.privileged)
        left_out = {"pid"} if wanted.unsafe.host_pid_namespace else set[str]()
        return sandbox.exec_spec(
            [wanted.executable, *wanted.args],
            env=self._env(job, wanted),
            cwd=wanted.workdir or str(self._paths.jobs / job),
            uid=ids[0],
            gid=ids[1],
            keeps_privileges=wanted.unsafe.privileged,
            capabilities=sorted(capabilities.NAMES.index(each) for each in wanted_capabilities & held),
            limits=limits,
            cgroups=self._make_cage(job, wanted, isolation),
            places=self._places(job, wanted, is_apart=is_apart) if has_view else None,
            namespaces=[each for each in sandbox.NAMESPACES if each not in left_out] if is_apart else [],
            has_init=True,
            may_signal=wanted.unsafe.host_pid_namespace,
        )

    async def shell_order(self, job: str, wanted: bpm.Process) -> sandbox_exec.ExecSpec:
        """What a shell beside the running process becomes; raises ``HostError`` when none runs."""
        isolation = await self.isolation()
        found = self.find(job, wanted.name)
        if found is None:
            raise HostError("process is not running or could not be found")
        limits = replace(wanted.limits, memory=None, processes=None)
        order = await asyncio.to_thread(self.order, job, replace(wanted, limits=limits), isolation)
        order["enter"] = found[0] if order["namespaces"] else None
        return order

    def _env(self, job: str, wanted: bpm.Process) -> dict[str, str]:
        home = self._paths.data / job
        return {
            "TMPDIR": str(home / "tmp"),
            "LANG": "en_US.UTF-8",
            "PATH": PATH.format(jobs=self._paths.jobs, job=job),
            "HOME": str(home),
            **wanted.env,
        }

    def _places(self, job: str, wanted: bpm.Process, *, is_apart: bool) -> list[sandbox_exec.BindMount]:
        """What the process may open, the first of each path: a volume cannot open what bpm has closed."""
        from agent_shim.host import sandbox

        paths, place = self._paths, sandbox.place
        temporary = str(paths.data / job / "tmp")
        found = [place(each, run=True) for each in sandbox.SYSTEM]
        found.append(place("/sys"))
        if not is_apart:
            found += [place(each, write=True) for each in SCRATCH]
            # Names of other jobs show there: bosh-dns reads this of each, and ends where it may not.
            found += [place(str(each)) for each in paths.jobs.glob("*/.bosh")]
        elif paths.is_system:
            found += [place(each, source=temporary, write=True) for each in TEMPORARY]
        found += [place(str(each), run=True) for each in (paths.packages, paths.data_packages, paths.jobs / job)]
        writable = [temporary, str(paths.sys / "log" / job), str(paths.sys / "run" / job)]
        if wanted.ephemeral_disk:
            writable.append(str(paths.data / job))
        if wanted.persistent_disk:
            writable.append(str(paths.store / job))
        found += [place(each, write=True) for each in writable]
        given = [*writable, *(str(each) for each in (paths.packages, paths.data_packages, paths.jobs / job))]
        unrestricted = _matching(wanted.unsafe.unrestricted_volumes)
        # What bpm gives at or above a volume of this kind it gives as it is.
        free = [each for each in unrestricted if not any(f"{each.path}/".startswith(f"{place}/") for place in given)]
        for volume in (*wanted.additional_volumes, *free):
            found.append(place(volume.path, write=volume.writable, run=volume.allow_executions, shared=volume.shared))
        return list({each["path"]: each for each in reversed(found)}.values())

    def _cage(self, label: str) -> job_cgroups.JobCgroup:
        return job_cgroups.JobCgroup(process_record.mark(label, self._paths.base))

    def _make_cage(self, job: str, wanted: bpm.Process, isolation: sandbox.Isolation) -> list[str]:
        """Cgroups with the limits of a process, as far as there can be any; the directories to join."""
        memory = wanted.limits.memory if isolation.memory else None
        processes = wanted.limits.processes if isolation.processes else None
        try:
            return self._cage(bpm_label(job, wanted.name)).make(memory=memory, processes=processes)
        except OSError as exc:
            raise files.failed(f"limit {bpm_label(job, wanted.name)}", exc) from exc

    def _open_cage(self, job: str, name: str) -> None:
        """Take away the cgroups of a process that has ended, but not what they know of its end."""
        label = bpm_label(job, name)
        if hog := self._killed_by_kernel(job, name):
            self._hogs.append(hog)
        cage = self._cage(label)
        cage.remove()
        # One that could not go counts on: the next process has no part in what is counted there.
        with self._counting:
            self._ooms[label] = (cage.memory() or (0, 0))[0]

    def _killed_by_kernel(self, job: str, name: str) -> MemoryKill | None:
        """Who had no memory left in its cgroup since this was asked last."""
        label = bpm_label(job, name)
        with self._counting:
            kills, peak = self._cage(label).memory() or (0, 0)
            before, self._ooms[label] = self._ooms.get(label, 0), kills
        return MemoryKill(job, name, peak, self._memory_limit(job, name)) if kills > before else None

    def _make_directories(self, job: str, wanted: bpm.Process) -> None:
        """Directories and log files with bpm's modes; raises ``HostError``."""
        paths = self._paths
        own, theirs = ("root:root", f"{self._user}:{self._user}") if self._user else (None, None)
        directory = self._pidfile(job, wanted.name).parent
        files.make_dir(directory.parent, 0o755, own)  # everybody may write above it
        files.make_dir(directory, 0o700, own)
        private = [paths.sys / "run" / job, paths.data / job, paths.data / job / "tmp"]
        if wanted.persistent_disk:
            if not paths.store.is_dir():
                raise HostError("requested persistent disk does not exist")
            private.append(paths.store / job)
        made = [Path(volume.path) for volume in wanted.additional_volumes if not volume.mount_only]
        # bpm changes the mode of what is there for volumes alone.
        _make_kept(paths.sys / "log" / job, 0o750, theirs)
        for path in private:
            _make_kept(path, 0o700, theirs)
        for path in made:
            if path.is_dir() or not path.exists():
                files.make_dir(path, 0o700, theirs)
        for stream in ("stdout", "stderr"):
            _make_log(self._log(job, wanted.name, stream), theirs)

    def _complain(self, job: str, wanted: bpm.Process, isolation: sandbox.Isolation) -> None:
        """Say what it will not have, or raise ``HostError`` where that matters."""
        lacking = []
        held = capabilities.privileges().effective if os.geteuid() == 0 else frozenset[str]()
        lacking += [f"capability {each}" for each in wanted.capabilities if each.upper() not in held]
        if wanted.limits.processes is not None and not isolation.processes:
            lacking.append("limits.processes")
        for key, which in (("open_files", resource.RLIMIT_NOFILE), ("core_file_size", resource.RLIMIT_CORE)):
            asked = getattr(wanted.limits, key) or 0
            if asked > _most(which, asked, held):
                lacking.append(f"limits.{key} of {asked}")
        if wanted.unsafe.privileged and "SYS_ADMIN" not in held:
            lacking.append("unsafe.privileged")
        if not lacking:
            return
        text = f"{bpm_label(job, wanted.name)} cannot have {', '.join(lacking)} in this container"
        if self._is_strict:
            raise HostError(text)
        logger.warning("%s", text)

    def _file(self, job: str) -> bpm.BpmFile:
        from agent_shim.supervisor.bpm import config as bpm

        path = self._paths.jobs / job / "config/bpm.yml"
        try:
            text = path.read_text(encoding="utf-8", errors="surrogateescape")
        except OSError as exc:
            raise files.failed(f"read {path}", exc) from exc
        return bpm.parse(text, origin=str(path), job=job, root=PurePosixPath(self._paths.base))

    def _pidfile(self, job: str, name: str) -> Path:
        return self._paths.sys / "run/bpm" / job / f"{name}.pid"

    def _log(self, job: str, name: str, stream: str) -> Path:
        return self._paths.sys / "log" / job / f"{name}.{stream}.log"

    # --- memory -----------------------------------------------------------------------------------------------------

    @property
    def is_in_use(self) -> bool:
        """Whether a process of bpm.yml was ever started here."""
        return (self._paths.sys / "run/bpm").is_dir()

    def kill_hogs(self) -> list[MemoryKill]:
        """Every process that used more memory than bpm.yml allows, killed with its tree; blocks for some milliseconds.

        Where the kernel keeps the limit it has begun to do so.
        """
        hogs, self._hogs = self._hogs, []
        limited = []
        for path in self._paths.sys.glob("run/bpm/*/*.pid"):
            job, name = path.parent.name, path.stem
            limit = self._memory_limit(job, name)
            cage = self._cage(bpm_label(job, name))
            members = cage.members()  # before it is asked: who comes later is a new start
            if cage.memory() is not None:
                if hog := self._killed_by_kernel(job, name):
                    hogs.append(hog)
                    self._victims.add(bpm_label(job, name))
                    for member in members:
                        process.send(member, signal.SIGKILL)
            elif limit and (found := self.find(job, name)):
                limited.append((job, name, limit, found))
        if not limited:
            return hogs
        processes = proc.table()
        below = proc.children(processes)
        for job, name, limit, found in limited:
            tree = proc.descent(below, [found[0]]) & processes.keys()
            # Resident memory counts what is shared once for each; only when that seems too much it is counted exactly.
            if sum(processes[pid].resident_kb for pid in tree) * 1024 > limit:
                used = sum(proc.proportional_kb(pid) or processes[pid].resident_kb for pid in tree) * 1024
                if used > limit:
                    self._victims.add(bpm_label(job, name))
                    # The process first: else it may end by itself for want of its children.
                    for pid in sorted(tree, key=found[0].__ne__):
                        process.send(processes[pid].identity, signal.SIGKILL)
                    hogs.append(MemoryKill(job, name, used, limit))
        return hogs

    def was_killed_for_memory(self, call: BpmCall) -> bool:
        """Whether that explains that it was killed just now, once."""
        label = bpm_label(call.job, call.process)
        if hog := self._killed_by_kernel(call.job, call.process):
            self._hogs.append(hog)
            self._victims.add(label)
        if label not in self._victims:
            return False
        self._victims.remove(label)
        return True

    def _memory_limit(self, job: str, name: str) -> int:
        """Bytes, 0 without a limit; read again when the file has changed."""
        try:
            modified = (self._paths.jobs / job / "config/bpm.yml").stat().st_mtime_ns
            known = self._limits.get((job, name))
            if known is None or known[0] != modified:
                known = modified, self.definition(job, name).limits.memory or 0
                self._limits[job, name] = known
            return known[1]
        except (OSError, ConfigError, HostError):
            return 0


async def _end(running: process.Process, first: signal.Signals, by: float) -> bool:
    """The ladder of bpm: only the process itself is signalled, as its init passes signals on to it alone.

    True when it had to be killed.
    """
    try:
        for sig, patience in (
            (first, ASK_PATIENCE),
            (signal.SIGQUIT, QUIT_PATIENCE),
            (signal.SIGKILL, process.KILL_TIMEOUT_S),
        ):
            running.send(sig)
            left = patience if sig is signal.SIGKILL else max(0.0, min(patience, by - time.monotonic()))
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(left):
                    await running.wait()
                    return sig is signal.SIGKILL
        return True
    finally:
        running.release()


def _most(which: int, wanted: int, held: Container[str]) -> int:
    """As much of a limit as is wanted, or what may be had of it."""
    hard = resource.getrlimit(which)[1]
    return wanted if "SYS_RESOURCE" in held or hard == resource.RLIM_INFINITY else min(wanted, hard)


def _matching(volumes: Sequence[bpm.Volume]) -> list[bpm.Volume]:
    """Each volume for everything that its pattern finds now; nothing is no error."""
    return [replace(volume, path=path) for volume in volumes for path in glob.glob(volume.path)]  # noqa: PTH207 - text


def _make_kept(path: Path, mode: int, owner: str | None) -> None:
    """Make a directory; one that is there keeps its mode."""
    files.make_dir(path, path.stat().st_mode & 0o7777 if path.is_dir() else mode, owner)


def _make_log(path: Path, owner: str | None) -> None:
    try:
        descriptor = guarded.open_log(path, 0o600)
        try:
            os.fchmod(descriptor, 0o600)
            os.fchown(descriptor, *files.owner_ids(owner))
        finally:
            os.close(descriptor)
    except OSError as exc:
        raise files.failed(f"make the log file {path}", exc) from exc
