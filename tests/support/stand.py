"""Provides what a chaos case needs: an agent with an init, a bus behind a proxy, a Director and a Health Monitor.

Any command that implements the protocol can be the agent under test. After each case, ``Witness`` returns the violated
invariants. If an invariant cannot be observed from outside, its visible effects are checked instead.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import resource
import shutil
import signal
import subprocess
import time
import urllib.request
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

from agent_shim.core.paths import Paths
from agent_shim.demo.director import HealthMonitor, RpcRemoteError, RpcTimeoutError
from agent_shim.demo.pki import HEALTH_MONITOR
from agent_shim.edges import control_client
from agent_shim.host import proc, process
from tests.support.instance import AGENT, RunningAgent, world
from tests.support.ports import free_port
from tests.support.proxy import Proxy
from tests.support.witness import CANARY, Size, Witness

CONNECTED: Final = 12.0
"""Seconds that an agent may take to reconnect after the bus becomes available again."""

RESTART_PAUSE: Final = 0.2


class NotHeldError(Exception):
    """A case's expectation was not met."""


class CannotInjectError(Exception):
    """This machine cannot inject the fault."""


def expect(fact: bool, what: str) -> None:
    """Raise ``NotHeldError`` unless ``fact`` is true."""
    if not fact:
        raise NotHeldError(what)


def at_most(figure: float, limit: float, what: str) -> float:
    """Raise ``NotHeldError`` if ``figure`` exceeds ``limit``. Otherwise return ``figure``, which is shown in the case's
    scorecard row.

    ``what`` is a format string for the figure, such as ``process 1 took {:.2f} s to exit``.
    """
    expect(figure <= limit, f"{what.format(figure)}, but the limit is {limit}")
    return figure


async def until(fact: Callable[[], Any], within: float, what: str) -> float:
    """Wait until ``fact()`` is true. Return how many seconds that took.

    Raises ``NotHeldError`` after ``within`` seconds. Its message consists of ``what``, which says what did not happen
    (such as ``no alert arrived``), and the time limit.
    """
    begun_at = time.monotonic()
    while not fact():
        if time.monotonic() - begun_at > within:
            raise NotHeldError(f"{what} within {within:g} s")
        await asyncio.sleep(0.005)
    return time.monotonic() - begun_at


@dataclass
class Stand:
    """The environment of one case.

    ``jobs`` is the number of running jobs. ``involved`` are the names of the jobs that the fault or the case restarts.
    """

    world: RunningAgent
    proxy: Proxy
    monitor: HealthMonitor
    jobs: int = 0
    involved: set[str] = field(default_factory=set)
    port: int = 0
    is_full: bool = False
    """Whether the case runs at full size."""
    expected_ends: int = 0
    ends: list[int | None] = field(default_factory=list)
    omitted: dict[str, str] = field(default_factory=dict)
    """Invariants that are not checked after this case, with the reason for each."""
    between: Callable[[], object] = lambda: None
    """Function that the init calls before it restarts the agent."""
    after: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)
    """Resources of the case that stay open until the invariants have been checked."""
    told: dict[str, int | None] = field(default_factory=dict)
    """Alerts that the case expects: a pattern for "title, severity N", with the expected number of alerts. If the
    number is None, one or more are expected.
    """
    failing: set[str] = field(default_factory=set)
    """Names of jobs that are allowed to be in any state after the case."""
    figures: list[str] = field(default_factory=list)
    """Measurements that the case adds to its scorecard row."""
    lasting: set[str] = field(default_factory=set)
    """Command lines of job processes that are neither named in a pidfile nor descendants of a start program."""
    moved: dict[str, str] = field(default_factory=dict)
    """Mount points at which the case has mounted something, with a part of the mount's source for each."""
    written: set[str] = field(default_factory=set)
    """Job files that the case wrote itself, in the form ``JOB/bin/run``."""
    restarted_at: int = 0
    """Number of messages that the Health Monitor had received when the init last restarted the agent."""
    _init: asyncio.Task[None] | None = None

    def __post_init__(self) -> None:
        self.witness = Witness(self)

    # --- actions of cases ---------------------------------------------------------------------------------------------

    def of(self, scaled: int, full: int) -> int:
        """Return ``full`` if the case runs at full size, and otherwise ``scaled``."""
        return full if self.is_full else scaled

    @property
    def pid(self) -> int:
        return self.world.pid

    def contain(self) -> None:
        """Run the agent as PID 1 of a container with its own namespaces. Call this before ``boot``."""
        if os.geteuid() != 0:
            raise CannotInjectError("needs root to create namespaces")
        self.world.is_apart = True
        self.prefix("unshare --pid --mount --fork --mount-proc --kill-child --")

    def prefix(self, command: str) -> None:
        """Run the agent through ``command``. Call this before ``boot``."""
        self.world.command = f"{command} {self.world.command}"

    async def boot(self) -> float:
        """Start the agent under an init that restarts it. Return the seconds until the agent's first answer."""
        took = await self.world.start_agent()
        self._init = asyncio.create_task(self._keep(), name="init")
        return took

    async def deploy(
        self,
        jobs: int,
        packages: int = 0,
        size: int = 0,
        version: str = "1",
        more: Mapping[str, Mapping[str, str]] = MappingProxyType({}),
    ) -> dict[str, Any]:
        """Deploy ``jobs`` sleeping jobs, plus the jobs in ``more``, which maps names to files. Return the spec."""
        spec = self.world.spec(jobs, packages, size, version=version, more=more)
        self.jobs = jobs
        await self.world.run("prepare", spec)
        await self.stop()
        await self.world.run("apply", spec)
        await self.world.run("start")
        await self.world.until_running()
        return spec

    async def stop(self, limit: float | None = None) -> float:
        """Stop all jobs and return the duration in seconds.

        Check that all job processes have exited, not only those in pidfiles.
        """
        before = self.witness.processes()
        took = await self.world.run("stop", limit=limit)
        alive = {one.identity for one in proc.table().values() if one.is_alive}
        left = [line for identity, line in before.items() if identity in alive]
        expect(not left, f"{len(left)} processes are still running after a stop: {', '.join(left[:3])}")
        return took

    async def call(self, method: str, *arguments: Any, timeout: float = 5.0) -> Any:
        """Send one request and return the value in its reply."""
        return await self.world.director.value(AGENT, method, *arguments, timeout=timeout)

    async def answers(self, within: float, *, patience: float = 0.25) -> float:
        """Send pings until the agent answers one. Return how many seconds that took.

        If a ping gets no answer, the next is sent after ``patience`` seconds.
        """
        begun_at = time.monotonic()
        while time.monotonic() - begun_at < within:
            with contextlib.suppress(RpcTimeoutError):
                await self.call("ping", timeout=patience)
                return time.monotonic() - begun_at
        raise NotHeldError(f"the agent did not answer a ping within {within:g} s")

    async def heartbeat(self, within: float) -> float:
        """Wait for the next heartbeat. Return how many seconds that took."""
        before = len(self.monitor.of("heartbeat", AGENT))
        return await until(lambda: len(self.monitor.of("heartbeat", AGENT)) > before, within, "no heartbeat arrived")

    async def kill_agent(self) -> None:
        """Send the agent SIGKILL. The init restarts it."""
        self.expected_ends += 1
        agent = self.world.agent
        assert agent is not None
        agent.send(signal.SIGKILL)
        await agent.wait()

    def omit(self, invariant: str, why: str) -> None:
        """Do not check an invariant after this case. The case's scorecard row states the reason."""
        self.omitted[invariant] = why

    def dies(self, *names: str, times: int | None = 1) -> None:
        """Declare that the fault kills the processes of the jobs ``names``.

        The agent must restart the jobs and send ``times`` alerts for each, or at least one if ``times`` is None.
        """
        self.involved |= set(names)
        self.told |= {rf"^{name} \(127\.0\.0\.1\) - Does not exist - restart, severity 1$": times for name in names}

    def script(self, job: str, name: str, text: str) -> None:
        """Write a program into a job's directory, without adding it to the job's blob."""
        path = self.world.base / "jobs" / job / "bin" / name
        path.write_text(f"#!/bin/sh\n{text}\n")
        path.chmod(0o755)
        self.written.add(f"{job}/bin/{name}")

    def tell(self, figures: str) -> None:
        """Add figures to the case's scorecard row."""
        self.figures.append(figures)

    def live(self) -> dict[str, int]:
        """Map each job to the pid in its pidfile. Jobs whose process is not running are left out."""
        return {name: pid for name, pid in self.world.pids().items() if _lives(pid)}

    def scrape(self) -> str:
        """Return the text of the metrics page, or "" if it cannot be fetched."""
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/metrics", timeout=5) as answer:
                return str(answer.read().decode())
        except OSError:
            return ""

    def metric(self, name: str) -> float:
        """Return the value of a metric, or 0 if it is missing. ``name`` includes the labels."""
        return self.read_metric(name) or 0.0

    def read_metric(self, name: str) -> float | None:
        """Return the value of a metric, or None if it is missing or the page cannot be fetched."""
        lines = [line.rpartition(" ") for line in self.scrape().splitlines()]
        return next((float(value) for label, _, value in lines if label == name), None)

    def alerts(self, text: str = "") -> list[dict[str, Any]]:
        """Return the alerts so far that contain ``text``."""
        return [one.body for one in self.monitor.of("alert", AGENT) if text in json.dumps(one.body)]

    def size(self) -> Size:
        """Return the agent's current resource usage."""
        status = Path(f"/proc/{self.pid}/status").read_text()
        fields = dict(line.split(":", 1) for line in status.splitlines())
        memory = int(fields["VmRSS"].split()[0]) * 1024
        return Size(len(list(Path(f"/proc/{self.pid}/fd").iterdir())), int(fields["Threads"]), memory)

    # --- functions for the witness ------------------------------------------------------------------------------------

    def remember(self) -> None:
        """Record the reference state for the invariants. Call this after the setup but before the fault."""
        self.witness.remember()

    def remember_memory(self) -> None:
        """Use the agent's current memory as the reference.

        Call this after a first flood of requests and before the second, because memory that the allocator retains after
        a first flood is not a leak.
        """
        self.witness.remember_memory()

    # --- init ---------------------------------------------------------------------------------------------------------

    async def _keep(self) -> None:
        while True:
            agent = self.world.agent
            assert agent is not None
            self.ends.append(await agent.wait())
            await asyncio.sleep(RESTART_PAUSE)
            self.between()
            self.restarted_at = len(self.monitor.notices)
            self.world.exec_agent()

    async def end(self) -> None:
        """Stop the init so that the agent is no longer restarted."""
        if self._init is not None:
            self._init.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._init


async def asked(stand: Stand, command: str, **members: Any) -> Any:
    """Send the agent a request over its control socket, as an operator would, and return the response."""
    socket = Paths(stand.world.base).control_socket
    return await asyncio.to_thread(control_client.ask, socket, {"command": command, **members}, timeout=60)


def commands(line: str) -> int:
    """Return how many running processes have the command line ``line``."""
    words = line.replace(" ", "\0").encode() + b"\0"
    found = 0
    for stat in proc.table().values():
        with contextlib.suppress(OSError):
            found += stat.is_alive and Path(f"/proc/{stat.pid}/cmdline").read_bytes() == words
    return found


async def refused(stand: Stand, method: str, *arguments: Any) -> str:
    """Run an action that must fail, and return its error."""
    try:
        await stand.world.run(method, *arguments)
    except RpcRemoteError as exc:
        return str(exc)
    raise NotHeldError(f"{method} succeeded, but it should have been refused")


@asynccontextmanager
async def injecting(stand: Stand, *faults: str) -> AsyncIterator[None]:
    """Make system calls by the agent and its children fail during the block.

    ``faults`` use strace's notation, such as ``fsync:error=EIO``.
    """
    if shutil.which("strace") is None or os.geteuid() != 0:
        raise CannotInjectError("needs root and the Debian package strace")
    calls = ",".join(fault.partition(":")[0] for fault in faults)
    injected = [word for fault in faults for word in ("-e", f"inject={fault}")]
    # A worker may already be running, so attach to it as well. strace reports each process to which it has attached.
    # Wait for these reports, because the fault is not active until then.
    below = proc.children(proc.table()).get(stand.pid, [])
    workers = [pid for pid in below if "agent_shim.bulk.worker" in proc.command_line(pid)]
    traced = [word for pid in (stand.pid, *workers) for word in ("-p", str(pid))]
    argv = ["strace", "-f", *traced, "-o", "/dev/null", "-e", f"trace={calls}", *injected]
    tracer = await asyncio.create_subprocess_exec(*argv, stderr=subprocess.PIPE)
    try:
        assert tracer.stderr is not None
        async with asyncio.timeout(10):
            for _ in (stand.pid, *workers):
                if b"attached" not in (said := await tracer.stderr.readline()):
                    raise CannotInjectError(f"strace: {said.decode().strip()}")
        yield
    finally:
        tracer.terminate()  # strace then detaches from all processes
        await tracer.wait()


def small(stand: Stand, options: str) -> None:
    """Put the agent's data on a small tmpfs, which stays mounted until the invariants have been checked. Call this
    before ``boot``.
    """
    place = stand.world.base / "data"
    place.mkdir(parents=True)
    if os.geteuid() != 0:
        raise CannotInjectError("needs root to mount a small tmpfs")
    subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(place)], check=True)
    unmounted_after(stand, place)


def unmounted_after(stand: Stand, place: Path) -> None:
    """Unmount ``place`` once the invariants have been checked."""
    stand.after.callback(subprocess.run, ["umount", "--lazy", str(place)], check=True)


def _lives(pid: int) -> bool:
    stat = proc.stat(pid)
    return stat is not None and stat.is_alive


@asynccontextmanager
async def stand(command: str, *, is_full: bool = False) -> AsyncIterator[Stand]:
    """Provide a case's environment. The agent is not started yet."""
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(8192, resource.getrlimit(resource.RLIMIT_NOFILE)[1]),) * 2)
    monitor, port = HealthMonitor(), free_port()
    # The image's launcher sets these variables for every agent. With them, glibc returns freed memory to the system
    # sooner.
    os.environ |= {"MALLOC_ARENA_MAX": "2", "MALLOC_TRIM_THRESHOLD_": "131072"}
    async with (
        world(command, poll=0.005) as made,
        monitor.on(made.server.peer(HEALTH_MONITOR)),
        Proxy(int(made.server.url.rpartition(":")[2])) as proxy,
    ):
        made.urls = (f"nats://127.0.0.1:{proxy.port}",)
        made.http = f"127.0.0.1:{port}"
        made.kept = made.scratch / "kept"
        made.kept.mkdir()
        made.bosh = {"password": "", "secret_note": CANARY}
        one = Stand(made, proxy, monitor, port=port, is_full=is_full)
        try:
            yield one
        finally:
            await one.end()
            if made.agent is not None:
                await made.kill_agent()  # Kill the agent first, because it would restart its jobs.
            end_marked(made)
            one.after.close()


def end_marked(made: RunningAgent) -> None:
    """Kill the job processes that are still running at the end of a case."""
    marker = str(made.base).encode()
    for stat in proc.table().values():
        with contextlib.suppress(OSError):
            texts = [Path(f"/proc/{stat.pid}/{name}").read_bytes() for name in ("cmdline", "environ")]
            if any(marker in text for text in texts) and stat.pid != os.getpid():
                process.send(stat.identity, signal.SIGKILL)
