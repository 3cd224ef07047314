"""Generates the table in docs/reliability.md that shows what an agent concludes from each state file after each fault.

The files are written and read by the real services. For failed writes, ``files.write_atomic`` is patched to fail for
one file.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import tempfile
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Final
from unittest import mock

import msgspec

from agent_shim.core.paths import Paths
from agent_shim.core.settings import UpdateSettings
from agent_shim.core.spec import ApplySpec
from agent_shim.host import files, proc
from agent_shim.services.disks import hints
from agent_shim.services.disks.hints import DiskSettings
from agent_shim.services.spec_store import SpecStore
from agent_shim.services.state_backup import StateBackup
from agent_shim.services.volume_lease import VolumeLeases
from agent_shim.supervisor.supervisor import JobFile, Supervisor

AGENT: Final = "a-1"
JOB: Final = JobFile("web", "", "check process web with pidfile /nowhere/web.pid\n  start program '/nowhere/start'\n")
DAMAGES: Final[Mapping[str, bytes | None]] = {"damaged": b"\0\0\0\0", "empty": b"", "missing": None}
"""The content that each kind of damage leaves in a file, or None if the file is missing. A crash of the machine can
leave zeros.
"""
ERRORS: Final = ("ENOSPC", "EROFS", "EIO")
FAULTS: Final = (*DAMAGES, "unwritable at first", *ERRORS)


class ScratchInstance:
    """An instance in a scratch directory. Each ``StatefulAgent`` that uses it represents a new agent process."""

    def __init__(self, base: Path) -> None:
        self.paths = Paths(base)
        self.container = 1
        self.make_root()

    def make_root(self) -> None:
        for path in (self.paths.bosh, self.paths.monit_job, self.paths.mirror, self.paths.shim_run):
            path.mkdir(parents=True, exist_ok=True)

    def incarnation(self) -> str:
        """Return an identifier for the current container's PID namespace."""
        return f"container {self.container}"

    def restart_container(self) -> None:
        """Replace the root file system and the PID namespace. Only ``data`` is preserved."""
        self.container += 1
        for path in self.paths.base.iterdir():
            if path != self.paths.data:
                files.remove_tree(path)
        self.make_root()


class StatefulAgent:
    """The parts of an agent that write state files. The agent's job has no programs to start."""

    def __init__(self, paths: Paths) -> None:
        self.paths = paths
        self.backup, self.spec = StateBackup(paths), SpecStore(paths)
        self.supervisor = Supervisor(paths, notify=lambda _: None)
        self.leases = VolumeLeases(host="host", boot="boot")
        self.is_recovered = False

    async def boot(self) -> None:
        assert self.leases.hold(self.paths.mirror) == ""
        self.backup.begin(former_holder=self.leases.former[self.paths.mirror])
        self.leases.introduce(AGENT)
        await self.backup.recover(AGENT)
        await self.spec.load()
        self.supervisor.hold()
        self.is_recovered = await self.supervisor.recover(root_is_new=self.backup.root_is_new)

    async def end(self) -> None:
        """Stop the agent without saving anything, as if it were killed."""
        self.supervisor.disown()
        await self.supervisor.close()
        for hold in self.leases.held.values():
            os.close(hold.descriptor)


Value = Callable[[StatefulAgent], Any]
Change = Callable[[StatefulAgent], Awaitable[None]]


async def _apply(agent: StatefulAgent, name: str) -> None:
    await agent.spec.save(ApplySpec(configuration_hash=name))


def _written(
    path: Callable[[Paths], Path], content: Callable[[str], bytes]
) -> Callable[[StatefulAgent, str], Awaitable[None]]:
    async def write(agent: StatefulAgent, name: str) -> None:
        files.write_atomic(path(agent.paths), content(name), mode=0o600)

    return write


def _read(path: Callable[[Paths], Path]) -> Value:
    def read(agent: StatefulAgent) -> bytes:
        with suppress(FileNotFoundError):
            return path(agent.paths).read_bytes()
        return b""

    return read


async def _keep_hint(agent: StatefulAgent, name: str) -> None:
    hints.save(agent.paths.disk_hints, {"d": DiskSettings("d", path=f"/{name}")})


async def _start_or_stop(agent: StatefulAgent, name: str) -> None:
    if name == "first":
        await agent.supervisor.configure([JOB])
        await agent.supervisor.start()
    else:
        await agent.supervisor.stop(wait=False)


def _wanted(agent: StatefulAgent) -> str:
    """Return "first" if the agent would start the jobs, and "second" if it would not.

    Without a valid state file, the agent starts the jobs in the spec unless the stopped marker exists.
    """
    is_marked = agent.paths.stopped_marker.exists()
    if agent.is_recovered:
        return "first" if agent.supervisor.is_wanted and not is_marked else "second"
    return "second" if is_marked else "first"


async def _nothing(_: StatefulAgent, __: str) -> None:
    """Do nothing. This is the action for agent_shim.json, whose stamps are not changed by any request."""


ROWS: Final[Mapping[str, tuple[Callable[[Paths], Path], Callable[[StatefulAgent, str], Awaitable[None]], Value]]] = {
    "spec.json": (lambda p: p.spec, _apply, lambda agent: agent.spec.current.configuration_hash),
    "update_settings.json": (
        lambda p: p.update_settings,
        _written(lambda p: p.update_settings, lambda name: msgspec.json.encode(UpdateSettings(trusted_certs=name))),
        _read(lambda p: p.update_settings),
    ),
    "persistent_disk_hints.json": (
        lambda p: p.disk_hints,
        _keep_hint,
        lambda agent: hints.load(agent.paths.disk_hints),
    ),
    "managed_disk_settings.json": (
        lambda p: p.managed_disk,
        _written(lambda p: p.managed_disk, str.encode),
        _read(lambda p: p.managed_disk),
    ),
    "monit/stopped": (lambda p: p.stopped_marker, _start_or_stop, _wanted),
    "data/bosh/supervisor.json": (lambda p: p.supervisor_state, _start_or_stop, _wanted),
    "agent_shim.json": (lambda p: p.stamp, _nothing, lambda agent: agent.backup.is_prepared),
    "data/bosh/agent_shim.json": (lambda p: p.mirror / "agent_shim.json", _nothing, lambda agent: agent.spec.current),
}
"""For each state file: its path, a function that changes its content to "first" or "second", and a function that
returns what the agent has read from the file.
"""


@contextmanager
def failing(path: Path, error: str) -> Iterator[None]:
    """Make each write to a file fail with ``error``. With ENOSPC an empty file can still be created, as on a full file
    system.
    """
    real, number = files.write_atomic, getattr(errno, error)

    def write(target: Path, data: bytes, **options: Any) -> None:
        if target == path and (data or number != errno.ENOSPC):
            raise files.failed(f"write {path}", OSError(number, error))
        real(target, data, **options)

    with mock.patch.object(files, "write_atomic", write):
        yield


async def concluded(row: str, fault: str, *, is_container: bool) -> str:
    """Run the experiment for one cell in the table. Return what the agent concludes after a restart."""
    place, change, value = ROWS[row]
    with tempfile.TemporaryDirectory(prefix="state-") as scratch:
        instance = ScratchInstance(Path(scratch, "vcap"))
        path = place(instance.paths)
        with mock.patch.object(proc, "incarnation", instance.incarnation):
            one, told = StatefulAgent(instance.paths), False
            if fault == "unwritable at first":
                with failing(path, "ENOSPC"), suppress(OSError):
                    await one.boot()
                    await _apply(one, "spec")
                    await change(one, "first")
            else:
                await one.boot()
                await _apply(one, "spec")
            with suppress(OSError):
                await change(one, "first")
            await one.backup.update()
            before = wanted = value(one) if change is not _start_or_stop else "first"
            if fault in DAMAGES and row == "monit/stopped":  # This file exists only while the jobs are stopped.
                before = wanted = "second"
                await change(one, "second")
                await one.backup.update()
            if fault in ERRORS:
                with failing(path, fault):
                    try:
                        await change(one, "second")
                    except OSError:
                        told = True
                    await one.backup.update()
                wanted = value(one) if change is not _start_or_stop else "second"
            await one.end()
            if fault in DAMAGES:
                _damage(path, DAMAGES[fault])
            (instance.paths.run / "web").mkdir(exist_ok=True)
            if is_container:
                instance.restart_container()
            two = StatefulAgent(instance.paths)
            await two.boot()
            found = value(two)
            is_new = two.backup.root_is_new or not (instance.paths.run / "web").exists()
            await two.end()
    if is_new is not is_container:
        return "**takes the container for another**"
    if row == "agent_shim.json":
        return "as before" if found is not is_container else "**wrong**"
    if told:
        return "refused"
    if row == "managed_disk_settings.json" and found == b"":
        return "unmounted"
    return "as before" if found == wanted == before else "holds" if found == wanted else "**lost**"


def _damage(path: Path, content: bytes | None) -> None:
    if content is None:
        path.unlink(missing_ok=True)
    else:
        path.write_bytes(content)


def table() -> str:
    """Return the table as Markdown, with a row for each file.

    Each cell contains the result of an agent restart and, if it differs, that of a container restart.
    """
    logging.disable(logging.CRITICAL)
    try:
        lines = [f"| file | {' | '.join(FAULTS)} |", f"|{'---|' * (len(FAULTS) + 1)}"]
        for row in ROWS:
            cells = []
            for fault in FAULTS:
                found = [asyncio.run(concluded(row, fault, is_container=each)) for each in (False, True)]
                cells.append(found[0] if found[0] == found[1] else "; ".join(found))
            lines.append(f"| `{row}` | {' | '.join(cells)} |")
        return "\n".join([*lines, ""])
    finally:
        logging.disable(logging.NOTSET)


if __name__ == "__main__":
    print(table())  # noqa: T201
