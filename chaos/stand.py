"""The environment of a case: an agent with its init, a bus behind a proxy, a Director and a Health Monitor, all real.

The agent under test is a command, known only by its protocol. After each case ``Stand.broken`` returns violations of
the ten invariants; an invariant that cannot be seen from outside is checked by its visible effects.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import resource
import shutil
import signal
import socket
import subprocess
import time
import urllib.request
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, TypeAlias

from agent_shim.core.paths import Paths
from agent_shim.demo.director import HealthMonitor, RpcTimeoutError
from agent_shim.demo.pki import HEALTH_MONITOR
from agent_shim.edges import control_client
from agent_shim.host import proc, process
from benchmarks.world import AGENT, World, world
from tests.support.proxy import Proxy

CANARY: Final = "canary-7f3a9c"
"""A secret of the settings, allowed only in files that no other user can read."""

CONNECTED: Final = 12.0
"""Seconds within which an agent reconnects to a restored bus."""

LOG_GROWTH_BYTES: Final = 1 << 20
AUDIT_BYTES: Final = 800
"""Bytes of log that one request may add: a task has two audit lines, each about 300 bytes long."""
MEMORY: Final = 5 << 20
RESTART_PAUSE: Final = 0.2


HALF_MADE: Final = re.compile(r"\.tmp-[0-9a-f]{8}$|\.part$")
"""Names of unfinished files."""
BUNDLE: Final = re.compile("[0-9a-f]{40}")
"""Name of an installed version of a job or package."""
DEAF: Final = 3.0
"""Seconds for which pings are sent after a case; each is answered within one second."""
PONG: Final = 1.0
BUSY: Final = 30.0
"""Seconds after which a busy machine no longer excuses a late ping."""
SETTLED: Final = 10.0
"""Seconds within which a restart in progress becomes visible."""
PLAIN_TEXT: Final = "managed_disk_settings.json"
"""Contains only a cid, despite its name."""
LINES: Final = "supervisor.json"
"""Contains a document in each line; a kill, unlike the end of the machine, tears none."""
Identity: TypeAlias = tuple[int, int]
"""Pid and start time of a process."""
PRIVATE_KEY: Final = re.compile(rb"PRIVATE KEY-----(.+?)-----END", re.DOTALL)


def _longest_waits(before: Mapping[str, Mapping[str, float]], after: Mapping[str, Mapping[str, float]]) -> float:
    """Sum over the processes: the longest wait of one of their threads between two readings."""
    return sum(
        max((seconds - before.get(pid, {}).get(thread, 0.0) for thread, seconds in threads.items()), default=0.0)
        for pid, threads in after.items()
    )


class NotHeldError(Exception):
    """A case did not have the expected outcome."""


class CannotInjectError(Exception):
    """This machine cannot inject the fault."""


def expect(fact: bool, what: str) -> None:
    """Raise ``NotHeldError`` unless ``fact``."""
    if not fact:
        raise NotHeldError(what)


async def until(fact: Callable[[], Any], within: float, what: str) -> float:
    """Wait until ``fact()`` is true, and return the seconds; raises ``NotHeldError`` after ``within`` seconds."""
    begun_at = time.monotonic()
    while not fact():
        if time.monotonic() - begun_at > within:
            raise NotHeldError(f"{what}: not within {within:g} s")
        await asyncio.sleep(0.005)
    return time.monotonic() - begun_at


@dataclass(frozen=True)
class Size:
    """Resources of the machine that an agent holds."""

    descriptors: int
    threads: int
    memory: int
    """Resident bytes."""

    def beyond(self, before: Size) -> list[str]:
        """Return the excess, in the words of I4."""
        found = []
        if self.descriptors > before.descriptors + 5:
            found.append(f"I4: {self.descriptors} descriptors after {before.descriptors}")
        if self.threads > before.threads + 2:
            found.append(f"I4: {self.threads} threads after {before.threads}")
        if self.memory > before.memory + MEMORY:
            found.append(f"I4: {self.memory >> 20} MiB after {before.memory >> 20} MiB")
        return found


@dataclass
class Stand:
    """``jobs`` is the number of running jobs; ``involved`` are those that the fault or the case restarts."""

    world: World
    proxy: Proxy
    monitor: HealthMonitor
    jobs: int = 0
    involved: set[str] = field(default_factory=set)
    port: int = 0
    is_full: bool = False
    """Plays the case at full size."""
    expected_ends: int = 0
    ends: list[int | None] = field(default_factory=list)
    omitted: dict[str, str] = field(default_factory=dict)
    """Invariants that are not checked after this case, each with the reason."""
    between: Callable[[], object] = lambda: None
    """Action of the init before it restarts the agent."""
    after: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)
    """Resources of a case, open until the invariants are checked."""
    _init: asyncio.Task[None] | None = None
    _before: Size | None = None
    _starts: dict[str, list[int]] = field(default_factory=dict)
    _running: dict[str, Identity] = field(default_factory=dict)
    _log_size: int = 0
    _asked: int = 0
    """Requests published when ``remember`` was called."""

    # --- what cases do ---

    def of(self, scaled: int, full: int) -> int:
        """Return a number or a duration: ``scaled``, or ``full`` for a case at full size."""
        return full if self.is_full else scaled

    @property
    def pid(self) -> int:
        return self.world.pid

    def contain(self) -> None:
        """Make the agent process 1 of a container (its own namespaces); call it before ``boot``."""
        if os.geteuid() != 0:
            raise CannotInjectError("needs root for namespaces")
        self.world.is_apart = True
        self.prefix("unshare --pid --mount --fork --mount-proc --kill-child --")

    def prefix(self, command: str) -> None:
        """Run the agent by this command; call it before ``boot``."""
        self.world.command = f"{command} {self.world.command}"

    async def boot(self) -> float:
        """Start the agent under an init that restarts it; return the seconds until its first answer."""
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
        """Deploy this number of jobs, and ``more`` given by their files; return the spec."""
        spec = self.world.spec(jobs, packages, size, version=version, more=more)
        self.jobs = jobs
        for method, *arguments in (("prepare", spec), ("stop",), ("apply", spec), ("start",)):
            await self.world.run(method, *arguments)
        await self.world.until_running()
        return spec

    async def call(self, method: str, *arguments: Any, timeout: float = 5.0) -> Any:
        """One reply's value."""
        return await self.world.director.value(AGENT, method, *arguments, timeout=timeout)

    async def answers(self, within: float) -> float:
        """Return the seconds until a ping is answered."""
        begun_at = time.monotonic()
        while time.monotonic() - begun_at < within:
            with contextlib.suppress(RpcTimeoutError):
                await self.call("ping", timeout=0.25)
                return time.monotonic() - begun_at
        raise NotHeldError(f"no pong within {within:g} s")

    async def heartbeat(self, within: float) -> float:
        """Return the seconds until the next heartbeat."""
        before = len(self.monitor.of("heartbeat", AGENT))
        return await until(lambda: len(self.monitor.of("heartbeat", AGENT)) > before, within, "heartbeat")

    async def kill_agent(self) -> None:
        """Send SIGKILL; the init restarts the agent."""
        self.expected_ends += 1
        agent = self.world.agent
        assert agent is not None
        agent.send(signal.SIGKILL)
        await agent.wait()

    def omit(self, invariant: str, why: str) -> None:
        """Skip an invariant after this case; the row gives the reason."""
        self.omitted[invariant] = why

    def live(self) -> dict[str, int]:
        """Return the living processes in the pidfiles of the jobs."""
        return {name: pid for name, pid in self.world.pids().items() if _lives(pid)}

    def scrape(self) -> str:
        """Return the text of the metrics; empty without metrics."""
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/metrics", timeout=5) as answer:
                return str(answer.read().decode())
        except OSError:
            return ""

    def metric(self, name: str) -> float:
        """Return the value of a metric (labels are part of the name); 0 without it."""
        return self.read_metric(name) or 0.0

    def read_metric(self, name: str) -> float | None:
        """Return the value of a metric; None without it, or without an answer."""
        lines = [line.rpartition(" ") for line in self.scrape().splitlines()]
        return next((float(value) for label, _, value in lines if label == name), None)

    def alerts(self, text: str = "") -> list[dict[str, Any]]:
        """Return the alerts so far that contain ``text``."""
        return [one.body for one in self.monitor.of("alert", AGENT) if text in json.dumps(one.body)]

    def size(self) -> Size:
        """Return the resources that the agent holds now."""
        status = Path(f"/proc/{self.pid}/status").read_text()
        fields = dict(line.split(":", 1) for line in status.splitlines())
        memory = int(fields["VmRSS"].split()[0]) * 1024
        return Size(len(list(Path(f"/proc/{self.pid}/fd").iterdir())), int(fields["Threads"]), memory)

    # --- invariants ---

    def remember(self) -> None:
        """Record the reference for the invariants; call it after the setup and before the fault."""
        self._before = self.size()
        self._starts, self._running = self.world.starts(), self._identities()
        self._log_size, self._asked = self._log(), self._published()

    def remember_memory(self) -> None:
        """Take the current memory of the agent as the reference; call it between a first flood and a second.

        Memory that an allocator keeps after the first flood is no leak: here up to 9 MiB, and 0.5 more after four
        further floods.
        """
        assert self._before is not None
        self._before = replace(self._before, memory=self.size().memory)

    async def broken(self) -> list[str]:
        """Return the violated invariants, each with the observation."""
        found = await self._deaf()
        found += await self._tasks()
        found += await self._grown()
        found += await self._zombies()
        found += await self._left() + self.documents() + self._talk() + self._secrets()
        found += await self._restarted()
        if len(self.ends) != self.expected_ends:
            found.append(f"I1: the agent ended {len(self.ends)} times, not {self.expected_ends}: {self.ends}")
        return [one for one in found if one.partition(":")[0] not in self.omitted]

    async def _deaf(self) -> list[str]:
        """Ping for some seconds, so that a temporary deafness is noticed too (I3).

        A late ping is sent again if the machine withheld the processors for half of its second.
        """
        begun_at = time.monotonic()
        ends_at, gives_up_at = begun_at + DEAF, begun_at + BUSY
        while time.monotonic() < ends_at:
            before = self._waits()
            try:
                await self.call("ping", timeout=PONG)
            except RpcTimeoutError:
                waited = _longest_waits(before, self._waits())
                if waited < PONG / 2 or time.monotonic() > gives_up_at:
                    return [f"I3: ping is not answered within a second, {waited:.1f} s of it without a CPU"]
                ends_at += PONG
            await asyncio.sleep(0.05)
        return []

    def _waits(self) -> dict[str, dict[str, float]]:
        """Return the seconds for which each thread waited for a CPU, by process: the agent, the bus, this one."""
        found: dict[str, dict[str, float]] = {}
        for pid in (self.pid, self.world.server.pid, os.getpid()):
            found[str(pid)] = {}
            with contextlib.suppress(OSError):  # one has ended
                for thread in Path(f"/proc/{pid}/task").iterdir():
                    found[str(pid)][thread.name] = int((thread / "schedstat").read_text().split()[1]) / 1e9
        return found

    async def _restarted(self) -> list[str]:
        """Compare the recorded starts of the jobs and the processes in their pidfiles (I2); checked last."""
        ends_at = time.monotonic() + SETTLED
        while await self._starting() and time.monotonic() < ends_at:
            await asyncio.sleep(0.1)
        now = self._identities()
        again = {name for name, identity in self._running.items() if now.get(name, identity) != identity}
        for name, pids in self.world.starts().items():
            before = self._starts.get(name, pids[:1])
            if pids != before:
                again.add(name)
        again -= self.involved
        return [f"I2: restarted though nothing happened to them: {' '.join(sorted(again)[:5])}"] if again else []

    async def _starting(self) -> bool:
        """Return True while a job that is not involved is starting."""
        with contextlib.suppress(RpcTimeoutError):
            state = await self.call("get_state", "full")
            named = {one["name"] for one in state.get("processes", ()) if one["state"] == "starting"}
            return bool(named - self.involved)
        return True

    def _identities(self) -> dict[str, Identity]:
        """Return the living processes named by the pidfiles of the jobs."""
        stats = {name: proc.stat(pid) for name, pid in self.world.pids().items()}
        return {name: stat.identity for name, stat in stats.items() if stat is not None and stat.is_alive}

    async def _grown(self) -> list[str]:
        before, now = self._before, self.size()
        if before is None:
            return ["I4: the case never called remember()"]
        for _ in range(60):
            now = self.size()
            if not now.beyond(before):
                break
            await asyncio.sleep(1)
        return now.beyond(before)

    async def _zombies(self) -> list[str]:
        def dead() -> set[tuple[int, int]]:
            return {s.identity for s in proc.table().values() if s.parent == self.pid and not s.is_alive}

        first = dead()
        if first:
            await asyncio.sleep(5)
        return [f"I5: {len(first & dead())} zombies older than 5 s"] if first & dead() else []

    async def _left(self) -> list[str]:
        """Return files that are unfinished at two checks: one that is being written has another name each time."""
        if first := self._half_made():
            await asyncio.sleep(2)
        left = first & self._half_made() if first else set()
        return [f"I6: left behind: {' '.join(sorted(map(str, left))[:3])}"] if left else []

    def _half_made(self) -> set[Path]:
        base, tmp = self.world.base, self.world.base / "data/tmp"
        places = [base / name for name in ("bosh", "jobs", "packages", "instance", "monit")]
        places += [base / "data" / name for name in ("bosh", "jobs", "packages", "blobs", "sensitive_blobs", "compile")]
        left = {path for place in places for path in _walk(place) if HALF_MADE.search(path.name)}
        kept = ("errand-", "outcomes")  # outputs too long for a reply stay until the next errand
        left |= self._strays()
        return left | {
            path for path in _walk(tmp) if not path.is_dir() and not path.relative_to(tmp).parts[0].startswith(kept)
        }

    def _strays(self) -> set[Path]:
        """Return files among jobs and packages that are neither an installed version nor a link to one."""
        base, found = self.world.base, set[Path]()
        for kind in ("jobs", "packages"):
            found |= {path for path in (base / "data" / kind).glob("*/*") if not BUNDLE.fullmatch(path.name)}
            found |= {path for path in (base / kind).glob("*") if not path.exists()}
        return found

    def documents(self) -> list[str]:
        """Return the incomplete state files (I7)."""
        base, found = self.world.base, []
        places = (base / "bosh", base / "data/bosh", base / "instance", Paths(base).shim_run)
        for path in (path for place in places for path in _walk(place) if path.suffix == ".json"):
            try:
                content = path.read_bytes()
                if path.name != PLAIN_TEXT:
                    for document in content.split(b"\n") if path.name == LINES else [content]:
                        json.loads(document)
                elif content.split() != [content.strip()]:
                    found.append(f"I7: {path} is no disk's cid")
            except ValueError:
                found.append(f"I7: {path} is no JSON")
            except FileNotFoundError:
                continue
        return found

    async def _tasks(self) -> list[str]:
        """Wait for the end of earlier requests, at most a minute."""
        running: float | None = None
        for _ in range(60):
            running = self.read_metric("agent_shim_tasks_running")
            if running == 0:
                return []
            await asyncio.sleep(1)
        if running is None:
            return ["I8: the metrics do not say how many tasks run"]
        return ["I8: a task runs with no work behind it"]

    def _talk(self) -> list[str]:
        grown, asked = self._log() - self._log_size, self._published() - self._asked
        if grown > LOG_GROWTH_BYTES + AUDIT_BYTES * asked:
            return [f"I9: its log grew by {grown >> 10} KiB over {asked} requests"]
        return []

    def _secrets(self) -> list[str]:
        secrets, found = self.secrets(), list[str]()

        def look(content: bytes, place: str) -> None:
            found.extend(f"I10: {name} is in {place}" for name, secret in secrets.items() if secret in content)

        look((self.world.scratch / "agent.log").read_bytes(), "the log")
        metrics = self.scrape()
        if not metrics:
            found.append("I10: the metrics are silent: what they show cannot be seen")
        look(metrics.encode(), "the metrics")
        for pid in [int(path.name) for path in Path("/proc").iterdir() if path.name.isdigit()]:
            for place in ("cmdline", "environ"):
                with contextlib.suppress(OSError):
                    if pid != os.getpid():
                        look(Path(f"/proc/{pid}/{place}").read_bytes(), f"the {place} of process {pid}")
        for path in _walk(self.world.base):
            with contextlib.suppress(OSError):
                if path.is_file() and not path.is_symlink() and path.stat().st_mode & 0o044:
                    look(path.read_bytes(), f"{path}, which others can read")
        return found

    def secrets(self) -> dict[str, bytes]:
        """Return the secrets in use by kind: a note in the settings, and each private key of the agent."""
        keys = {f"a private key of the bus ({number})": key for number, key in enumerate(sorted(self._keys()))}
        return {"a note of the settings": CANARY.encode(), **keys}

    def _keys(self) -> set[bytes]:
        """A line from the middle of each key, which is the same in PEM, in JSON and in a log."""
        keys = set()
        for path in (self.world.source, Paths(self.world.base).update_settings, Paths(self.world.base).former_mbus):
            with contextlib.suppress(FileNotFoundError):
                for body in PRIVATE_KEY.findall(path.read_bytes().replace(rb"\n", b"\n")):
                    keys.add(max(body.split(), key=len))
        return keys

    def _published(self) -> int:
        peer = self.world.director._peer
        return peer.published if peer is not None else 0

    def _log(self) -> int:
        """Bytes of its log."""
        return (self.world.scratch / "agent.log").stat().st_size

    # --- init ---

    async def _keep(self) -> None:
        while True:
            agent = self.world.agent
            assert agent is not None
            self.ends.append(await agent.wait())
            await asyncio.sleep(RESTART_PAUSE)
            self.between()
            self.world.exec_agent()

    async def end(self) -> None:
        """Stop starting it again."""
        if self._init is not None:
            self._init.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._init


async def asked(stand: Stand, command: str, **members: Any) -> Any:
    """Return the agent's response to an operator, on its socket."""
    socket = Paths(stand.world.base).control_socket
    return await asyncio.to_thread(control_client.ask, socket, {"command": command, **members}, timeout=60)


def commands(line: str) -> int:
    """Return the number of living processes with this command line."""
    words = line.replace(" ", "\0").encode() + b"\0"
    found = 0
    for stat in proc.table().values():
        with contextlib.suppress(OSError):
            found += stat.is_alive and Path(f"/proc/{stat.pid}/cmdline").read_bytes() == words
    return found


@asynccontextmanager
async def injecting(stand: Stand, *faults: str) -> AsyncIterator[None]:
    """Make system calls of the agent and its children fail for the length of the block: ``fsync:error=EIO``."""
    if shutil.which("strace") is None or os.geteuid() != 0:
        raise CannotInjectError("needs root and the Debian package strace")
    calls = ",".join(fault.partition(":")[0] for fault in faults)
    injected = [word for fault in faults for word in ("-e", f"inject={fault}")]
    # strace reports the attached processes: from then on the fault is active.
    argv = ["strace", "-f", "-p", str(stand.pid), "-o", "/dev/null", "-e", f"trace={calls}", *injected]
    tracer = await asyncio.create_subprocess_exec(*argv, stderr=subprocess.PIPE)
    try:
        assert tracer.stderr is not None
        async with asyncio.timeout(10):
            if b"attached" not in (said := await tracer.stderr.readline()):
                raise CannotInjectError(f"strace: {said.decode().strip()}")
        yield
    finally:
        tracer.terminate()  # it detaches from all processes
        await tracer.wait()


def small(stand: Stand, options: str) -> None:
    """Put the agent's data on a tmpfs, before ``boot``; it stays until the invariants are checked."""
    place = stand.world.base / "data"
    place.mkdir(parents=True)
    if os.geteuid() != 0:
        raise CannotInjectError("needs root for a small tmpfs")
    subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(place)], check=True)
    unmounted_after(stand, place)


def unmounted_after(stand: Stand, place: Path) -> None:
    """Unmount ``place`` once the invariants are checked."""
    stand.after.callback(subprocess.run, ["umount", "--lazy", str(place)], check=True)


def _walk(top: Path) -> Iterator[Path]:
    """Yield everything below ``top`` without following links; entries that vanish meanwhile are left out."""
    for here, directories, names in os.walk(top):
        for name in (*directories, *names):
            yield Path(here, name)


def _lives(pid: int) -> bool:
    stat = proc.stat(pid)
    return stat is not None and stat.is_alive


def _free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


@asynccontextmanager
async def stand(command: str, *, is_full: bool = False) -> AsyncIterator[Stand]:
    """Provide a stand with a bus and no client."""
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(8192, resource.getrlimit(resource.RLIMIT_NOFILE)[1]),) * 2)
    monitor, port = HealthMonitor(), _free_port()
    # Set by the image's launcher for every agent: memory of threads returns to the system.
    os.environ |= {"MALLOC_ARENA_MAX": "2", "MALLOC_TRIM_THRESHOLD_": "131072"}
    async with (
        world(command) as made,
        monitor.on(made.server.peer(HEALTH_MONITOR)),
        Proxy(int(made.server.url.rpartition(":")[2])) as proxy,
    ):
        made.urls = (f"nats://127.0.0.1:{proxy.port}",)
        made.http = f"127.0.0.1:{port}"
        made.bosh = {"password": "", "secret_note": CANARY}
        one = Stand(made, proxy, monitor, port=port, is_full=is_full)
        try:
            yield one
        finally:
            await one.end()
            end_marked(made)
            one.after.close()


def end_marked(made: World) -> None:
    """Kill all remaining processes of the jobs of a world."""
    marker = str(made.base).encode()
    for stat in proc.table().values():
        with contextlib.suppress(OSError):
            texts = [Path(f"/proc/{stat.pid}/{name}").read_bytes() for name in ("cmdline", "environ")]
            if any(marker in text for text in texts) and stat.pid != os.getpid():
                process.send(stat.identity, signal.SIGKILL)
