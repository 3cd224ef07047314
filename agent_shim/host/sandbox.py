"""Starts programs through ``host.sandbox_exec``, and finds out what isolation this container allows by trying it."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import importlib.util
import json
import os
import re
import socket
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from typing import Final, NamedTuple

from agent_shim.core.errors import HostError
from agent_shim.host import job_cgroups, process, sandbox_exec

SYSTEM: Final = ("/bin", "/etc", "/lib", "/lib64", "/sbin", "/usr", "/run/resolvconf", "/run/systemd/resolve")
"""What everybody may read and execute."""
APART: Final = ("mnt", "pid", "ipc", "uts")
"""The namespaces that bpm makes; the network is that of the container."""
INITS: Final = ("/usr/bin/tini", "/usr/bin/tini-static", "/var/vcap/packages/bpm/bin/tini")
"""Where a container may have the init of bpm. Ours needs some MB for each process."""
NOBODY: Final = 65534
NOTHING: Final = "/bin/true"


class Isolation(NamedTuple):
    """What processes of bpm.yml can have here; ``obstacle`` is why the level is not 1.

    ``memory`` and ``processes`` say whether the kernel can be told to limit them (a cgroup of their own).
    """

    level: int
    obstacle: str
    memory: bool
    processes: bool


def place(
    path: str, *, source: str = "", write: bool = False, run: bool = False, shared: bool = False
) -> sandbox_exec.BindMount:
    """Seen where it is unless another ``source`` is given."""
    return {"path": path, "source": source or path, "write": write, "run": run, "shared": shared}


def order(argv: Sequence[str], **members: object) -> sandbox_exec.ExecSpec:
    """To run ``argv`` as who we are, with nothing gained and nothing hidden unless ``members`` say so."""
    made: sandbox_exec.ExecSpec = {
        "argv": list(argv),
        "env": {},
        "cwd": "/",
        "uid": None,
        "gid": None,
        "keeps_privileges": False,
        "capabilities": [],
        "limits": {},
        "cgroups": [],
        "places": None,
        "namespaces": [],
        "has_init": False,
        "inits": list(INITS),
        "may_signal": False,
        "gate": False,
        "enter": None,
        "terminal": None,
    }
    return {**made, **members}  # type: ignore[typeddict-item]


def command(descriptor: int) -> list[str]:
    """What becomes the program once it has read an order from ``descriptor``."""
    return [sys.executable, "-I", "-S", _program(), str(descriptor)]


@functools.cache
def _program() -> str:
    """The compiled module: as a program the source would be compiled anew at every start of a job."""
    compiled = importlib.util.cache_from_source(sandbox_exec.__file__)
    with contextlib.suppress(OSError):
        if Path(compiled).stat().st_mtime >= Path(sandbox_exec.__file__).stat().st_mtime:
            return compiled
    return sandbox_exec.__file__


def write_order(order: sandbox_exec.ExecSpec) -> int:
    """A descriptor from which an order is read; in memory, because an environment may be secret."""
    descriptor = os.memfd_create("order")
    os.write(descriptor, _encoded(order))
    os.lseek(descriptor, 0, os.SEEK_SET)
    return descriptor


def _encoded(order: sandbox_exec.ExecSpec) -> bytes:
    return json.dumps(order).encode() + b"\n"


@contextlib.asynccontextmanager
async def prepared(
    order: sandbox_exec.ExecSpec, *, env: Mapping[str, str], stdout: int | Path | None, stderr: int | Path | None
) -> AsyncIterator[process.Process]:
    """The process that becomes the program when the block ends; when that fails the process ends without it.

    In namespaces of its own it is their first process, by its number out here. ``env`` is its environment until then.
    Raises ``HostError``.
    """
    ours, theirs = socket.socketpair()
    with ours:
        ours.setblocking(False)
        with theirs:
            started = process.spawn(
                command(0), env=env, stdin=theirs.fileno(), stdout=stdout, stderr=stderr, session=True
            )
        loop = asyncio.get_running_loop()
        with contextlib.suppress(ConnectionError):  # it has ended; its status says how
            await loop.sock_sendall(ours, _encoded({**order, "gate": True}))
            if order["namespaces"]:
                started = await _child(started, ours)
        yield started
        with contextlib.suppress(ConnectionError):
            await loop.sock_sendall(ours, b"\n")


async def _child(parent: process.Process, gate: socket.socket) -> process.Process:
    """The process that ``parent`` has left behind: the gate tells its number, and why it ended, if it has ended."""
    loop = asyncio.get_running_loop()
    told = await loop.sock_recv(gate, 4096)
    status = await parent.wait()
    number = re.match(rb"\d+", told)
    child = process.adopt(int(number[0])) if number else None
    if child is None:
        why = told[number.end() :] or await loop.sock_recv(gate, 4096) if number else told
        raise HostError(f"cannot {why.decode(errors='replace') or f'set it apart: exit {status}'}")
    return child


async def isolation() -> Isolation:
    """What this container allows, found out by doing it: some 50 milliseconds."""
    offered = await asyncio.to_thread(job_cgroups.offered)
    obstacle = await _try_apart()
    level = 1 if not obstacle else 2 if sandbox_exec.landlock_version() else 3
    return Isolation(level, obstacle, "memory" in offered, "pids" in offered)


async def _try_apart() -> str:
    """Run something that does nothing in namespaces of its own; why that fails."""
    if os.geteuid() != 0:
        return "only root can make namespaces"
    places = [place(each, run=True) for each in SYSTEM] + [place("/sys")]
    wanted = order([NOTHING], uid=NOBODY, gid=NOBODY, places=places, namespaces=list(APART))
    errors = os.memfd_create("errors")
    try:
        async with prepared(wanted, env={}, stdout=None, stderr=errors) as running:
            pass
        status = await running.wait()
        said = ""
    except HostError as exc:
        status, said = None, str(exc)
    finally:
        text = os.pread(errors, 4096, 0).decode(errors="replace").strip()
        os.close(errors)
    return (
        ""
        if status == 0
        else text.rpartition("\n")[2].removeprefix(f"agent-shim: cannot run {NOTHING}: ") or said or f"exit {status}"
    )
