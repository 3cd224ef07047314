"""Starts programs through ``host.sandbox_exec``, and finds out by trial which isolation this container allows."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import signal
import socket
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from pathlib import Path
from typing import Final, NamedTuple, TypeAlias

from agent_shim.core.errors import HostError
from agent_shim.host import files, job_cgroups, process, sandbox_exec
from agent_shim.host.descriptors import closing

SYSTEM: Final = ("/bin", "/etc", "/lib", "/lib64", "/sbin", "/usr", "/run/resolvconf", "/run/systemd/resolve")
"""Directories that every process may read and execute."""
NAMESPACES: Final = ("mnt", "pid", "ipc", "uts")
"""Namespaces that bpm creates. Processes keep the container's network."""
INITS: Final = ("/usr/bin/tini", "/usr/bin/tini-static", "/var/vcap/packages/bpm/bin/tini")
"""Possible paths of bpm's init. It is preferred to the one in ``host.sandbox_exec``, which takes several MB per
process.
"""
OVERFLOW_UID: Final = 65534
PREPARE_TIMEOUT_S: Final = 30.0
"""Timeout for preparing a program, which includes reading its file. A dead file server must not delay other starts."""
PROBE_PROGRAM: Final = "/bin/true"
_PROGRAM: Final = f"""\
import sys
sys.path.append({str(Path(__file__).parents[2])!r})
from agent_shim.host.sandbox_exec import main
sys.exit(main(sys.argv))"""


class Isolation(NamedTuple):
    """The isolation that is available to bpm.yml processes. ``level`` is 1 with namespaces, 2 with Landlock but no
    namespaces, and 3 with neither. ``obstacle`` is the reason why there are no namespaces, or "" if there are.

    ``memory`` and ``processes`` are True if the kernel can enforce these limits, with a cgroup for each process.
    """

    level: int
    obstacle: str
    memory: bool
    processes: bool


def bind_mount(
    path: str, *, source: str = "", write: bool = False, run: bool = False, shared: bool = False
) -> sandbox_exec.BindMount:
    """Describe a bind mount of ``source`` (by default ``path`` itself) that makes it visible at ``path``."""
    return {"path": path, "source": source or path, "write": write, "run": run, "shared": shared}


def exec_spec(argv: Sequence[str], **members: object) -> sandbox_exec.ExecSpec:
    """Return a spec that executes ``argv`` as the current user without confinement, except that ``members`` replace
    these defaults.
    """
    defaults: sandbox_exec.ExecSpec = {
        "argv": list(argv),
        "env": {},
        "cwd": "/",
        "uid": None,
        "gid": None,
        "keeps_privileges": False,
        "capabilities": [],
        "limits": {},
        "cgroups": [],
        "binds": None,
        "namespaces": [],
        "has_init": False,
        "inits": list(INITS),
        "may_signal": False,
        "gate": False,
        "enter": None,
        "terminal": None,
    }
    return {**defaults, **members}  # type: ignore[typeddict-item]


def launcher() -> list[str]:
    """Return a command that reads a spec from a descriptor and executes the program in the spec. The caller has to
    append the descriptor's number.
    """
    return [sys.executable, "-I", "-S", "-c", _PROGRAM]


Start: TypeAlias = Callable[[Sequence[str], int], Awaitable[process.Process]]
"""A function that starts a command with a descriptor as its standard input."""


@contextlib.asynccontextmanager
async def prepared(spec: sandbox_exec.ExecSpec, start: Start) -> AsyncIterator[process.Process]:
    """Yield a process that executes the program at the end of the block. If the block fails, the process exits without
    executing it.

    If the spec requests new namespaces, the yielded process is the first one in them. Its attribute ``pid`` is always
    the pid in the agent's namespace. Raises ``HostError``.
    """
    with files.attempting(f"run {spec['argv'][0]}"):
        ours, theirs = socket.socketpair()
    with ours:
        ours.setblocking(False)
        with theirs:
            started = await start([*launcher(), "0"], theirs.fileno())  # it reads the spec from its standard input
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(PREPARE_TIMEOUT_S):
                with contextlib.suppress(ConnectionError):  # the process has exited, and its status explains why
                    await loop.sock_sendall(ours, json.dumps({**spec, "gate": True}).encode() + b"\n")
                    if spec["namespaces"]:
                        started = await _child(started, ours)
        except TimeoutError:
            started.send_group(signal.SIGKILL)
            raise HostError(f"cannot isolate it: no answer within {PREPARE_TIMEOUT_S:g} seconds") from None
        yield started
        with contextlib.suppress(ConnectionError):
            await loop.sock_sendall(ours, b"\n")  # execute the program


async def _child(parent: process.Process, gate: socket.socket) -> process.Process:
    """Adopt and return the child that ``parent`` created with clone(2).

    ``parent`` sends the child's pid, or an error message, over ``gate``.
    """
    loop = asyncio.get_running_loop()
    report = await loop.sock_recv(gate, 4096)
    status = await parent.wait()
    number = re.match(rb"\d+", report)
    child = parent.adopt_child(int(number[0])) if number else None
    if child is None:
        why = report
        if number:  # the child has already exited, and its error message follows the pid
            why = report[number.end() :] or await loop.sock_recv(gate, 4096)
        raise HostError(f"cannot {why.decode(errors='replace') or f'isolate it: exit {status}'}")
    return child


async def isolation() -> Isolation:
    """Find out by trial which isolation this container allows. This takes about 50 ms."""
    offered = await asyncio.to_thread(job_cgroups.offered)
    obstacle = await _try_namespaces()
    level = 1 if not obstacle else 2 if sandbox_exec.landlock_version() else 3
    return Isolation(level, obstacle, "memory" in offered, "pids" in offered)


async def _try_namespaces() -> str:
    """Try to run a program that does nothing in new namespaces. Return the reason why this fails, or "" if it
    succeeds.
    """
    if os.geteuid() != 0:
        return "only root can create namespaces"
    binds = [bind_mount(directory, run=True) for directory in SYSTEM] + [bind_mount("/sys")]
    spec = exec_spec([PROBE_PROGRAM], uid=OVERFLOW_UID, gid=OVERFLOW_UID, binds=binds, namespaces=list(NAMESPACES))

    async def start(argv: Sequence[str], stdin: int) -> process.Process:
        return process.spawn(argv, env={}, stdin=stdin, stderr=errors)

    with closing(os.memfd_create("errors")) as errors:
        try:
            async with prepared(spec, start) as running:
                pass
            async with asyncio.timeout(PREPARE_TIMEOUT_S):  # another process of the same user could stop the probe
                status = await running.wait_or_terminate(0.0)
            if status == 0:
                return ""
            error = f"exit {status}"
        except (HostError, TimeoutError) as exc:
            error = str(exc) or f"{PROBE_PROGRAM} did not end"
        text = os.pread(errors, 4096, 0).decode(errors="replace").strip()
    return text.rpartition("\n")[2].removeprefix(f"agent-shim: cannot run {PROBE_PROGRAM}: ") or error
