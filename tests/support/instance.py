"""A scratch directory with a private bus, a Director, and an agent that runs as a separate process."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import random
import shlex
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

from agent_shim.core.errors import HostError
from agent_shim.core.paths import Paths
from agent_shim.demo.director import Director, RpcTimeoutError
from agent_shim.demo.release import archive
from agent_shim.edges.bus.nats import NatsBus
from agent_shim.host import guarded, process
from tests.support.broker import NatsServer
from tests.support.programs import end_kept
from tests.support.readings import cpu_seconds, own_memory, pss
from tests.support.residue import remove_cgroups

AGENT: Final = "bench-agent"
BYSTANDER: Final = "bystander"
NETWORKS: Final = {"default": {"type": "manual", "ip": "127.0.0.1", "prefix": "32", "netmask": "255.0.0.0"}}
PROGRAM: Final = os.environ.get("BENCH_PROGRAM", "")
"""Directory in which ``./dev bench`` has installed the program as in the image. "" means that the checkout is run."""
INTERPRETER: Final = f"{PROGRAM}/bin/python3" if PROGRAM else sys.executable
_RUN: Final = f"{shlex.quote(PROGRAM)}/bin/agent-shim" if PROGRAM else f"{shlex.quote(INTERPRETER)} -m agent_shim.cli"
COMMAND: Final = f"{_RUN} run -C {{config}} -b {{base}}"

ENVIRONMENT: Final = {"MALLOC_ARENA_MAX": "2", "MALLOC_TRIM_THRESHOLD_": "131072"}
"""Environment variables that the image sets for the agent."""
ROOT: Final = Path(__file__).parents[2]
MAX_PIDFILE_BYTES: Final = 64
MAX_KEPT_BYTES: Final = 64 << 20

_CTL = """
#!/bin/sh
run={base}/data/sys/run/{job}
case $1 in
start) mkdir -p $run; echo $$ | tee -a {base}/data/{job}/starts > $run/{job}.pid; exec sleep 100000 ;;
stop) kill $(cat $run/{job}.pid); rm -f $run/{job}.pid ;;
esac
"""
_MONIT = """
check process {job}
  with pidfile {base}/data/sys/run/{job}/{job}.pid
  start program "{base}/jobs/{job}/bin/ctl start"
  stop program "{base}/jobs/{job}/bin/ctl stop"
  group vcap
"""


@dataclass
class RunningAgent:
    """A scratch directory with a bus and an agent.

    ``command`` is the agent's command line, with the placeholders ``{config}`` and ``{base}``.
    """

    scratch: Path
    command: str
    server: NatsServer
    director: Director
    agent: process.Process | None = None
    urls: tuple[str, ...] = ()
    """Bus addresses in the agent's settings, if they differ from the server's own address."""
    http: str = "127.0.0.1:0"
    bosh: dict[str, Any] = field(default_factory=dict)
    """Additional members of ``env.bosh``."""
    is_apart: bool = False
    """Whether the command runs the agent as its only child, which is PID 1 of a new PID namespace.

    If so, the pids in pidfiles have no meaning outside that namespace.
    """
    agent_id: str = AGENT
    applied: dict[str, Any] | None = None
    """The spec of the last successful ``apply``."""
    is_started: bool = False
    """True between ``start`` and ``stop``."""
    kept: Path | None = None
    """Directory that keeps copies of small blobs, because ``apply`` deletes the blob with the rendered templates."""

    @property
    def base(self) -> Path:
        return self.scratch / "vcap"

    @property
    def pid(self) -> int:
        assert self.agent is not None
        if not self.is_apart:
            return self.agent.pid
        return int(Path(f"/proc/{self.agent.pid}/task/{self.agent.pid}/children").read_text().split()[0])

    @property
    def beside(self) -> Path:
        """The directory with the pidfiles of programs that ``command`` runs alongside the agent.

        The processes named in its ``*.pid`` files are included in the agent's measurements. Its ``group`` file contains
        the ID of a process group that keeps running when the agent is killed or restarted. ``end_programs_beside``
        kills that group.
        """
        return self.scratch / "beside"

    def pss(self) -> float:
        """Return the memory (PSS in MB) that the agent and the programs alongside it use."""
        return sum(map(pss, self.together()))

    def own_memory(self) -> float:
        """Return the private dirty memory, in MB, of the agent and the programs alongside it.

        Unlike PSS, this value does not depend on other processes, so the difference between two measurements is
        meaningful.
        """
        return sum(map(own_memory, self.together()))

    def cpu_seconds(self) -> float:
        """Return the CPU time, in seconds, that the agent and the programs alongside it have used."""
        return sum(map(cpu_seconds, self.together()))

    def together(self) -> list[int]:
        """Return the pids of the agent and the programs alongside it."""
        return [self.pid, *(int(path.read_text()) for path in self.beside.glob("*.pid"))]

    async def start_agent(self) -> float:
        """Start the agent.

        Return the seconds from exec to the agent's first pong. Raises ``HostError`` if the agent exits before then.
        """
        if not self.config.exists():
            self.write_settings()
        begun_at = time.monotonic()
        self.exec_agent()
        async with asyncio.timeout(120):
            while True:
                try:
                    # On a slow machine, wait longer for each answer.
                    patience = 0.01 if time.monotonic() - begun_at < 5 else 1.0
                    await self.director.value(self.agent_id, "ping", timeout=patience)
                    return time.monotonic() - begun_at
                except RpcTimeoutError:
                    if not self.is_apart and self.agent is not None and self.agent.is_over:
                        raise HostError(f"cannot start the agent: it has exited: {self._last_words()}") from None

    def _last_words(self) -> str:
        lines = self._log.read_text(errors="replace").split("\n")
        return next((line.strip() for line in reversed(lines) if line.strip()), "it said nothing")

    def log_text(self) -> str:
        """Return the agent's log, or "" if there is none."""
        return self._log.read_text(errors="replace") if self._log.exists() else ""

    def forget_log(self) -> None:
        """Delete the log. The agent writes a new one when it is started again."""
        self._log.unlink(missing_ok=True)

    @property
    def _log(self) -> Path:
        return self.scratch / "agent.log"

    def exec_agent(self) -> None:
        """Start the agent with the current settings, without waiting for it to answer."""
        self.agent = process.spawn(
            self.argv(), env={**os.environ, **ENVIRONMENT}, cwd=self.scratch, stdout=self._log, stderr=self._log
        )

    def argv(self) -> list[str]:
        """Return the agent's command-line arguments."""
        return [word.format(config=self.config, base=self.base) for word in shlex.split(self.command)]

    @property
    def config(self) -> Path:
        """Path of agent.json."""
        return self.scratch / "agent.json"

    @property
    def source(self) -> Path:
        """Path of the settings file that a CPI would write."""
        return self.scratch / "settings.json"

    async def kill_agent(self) -> None:
        """Kill the agent."""
        assert self.agent is not None
        self.agent.send(signal.SIGKILL)
        await self.agent.wait()
        self.agent = None

    def starts(self) -> dict[str, list[int]]:
        """Return, for each job, the pids that its start script has recorded."""
        return {
            path.parent.name: [int(line) for line in path.read_text().split()]
            for path in (self.base / "data").glob("*/starts")
        }

    async def stop_agent(self) -> int | None:
        """Stop the agent if it is running, and return its exit code.

        An agent in its own PID namespace gets SIGKILL. Any other agent gets SIGTERM.
        """
        if self.agent is None:
            return None
        self.agent.send(signal.SIGKILL if self.is_apart else signal.SIGTERM)
        code = await self.agent.wait()
        self.agent = None
        return code

    async def deploy(self, jobs: int = 1, packages: int = 0, size: int = 0, **options: Any) -> dict[str, int]:
        """Deploy ``jobs`` and ``packages``. Start an agent first if none is running. Return the pids of the running
        jobs.
        """
        if self.agent is None:
            await self.start_agent()
        await self.run("apply", self.spec(jobs, packages, size, **options))
        await self.run("start")
        await self.until_running()
        return self.pids()

    async def execute(self, *words: str, module: str = "cli") -> tuple[int | None, str]:
        """Run ``agent-shim`` for this agent. Return its exit code and output."""
        out = self.scratch / f"{words[0]}.out"
        out.unlink(missing_ok=True)
        argv = [INTERPRETER, "-m", f"agent_shim.{module}", *words, "-b", str(self.base)]
        status = await process.spawn(argv, env=dict(os.environ), stdout=out, stderr=out).wait()
        return status, out.read_text()

    def end_programs_beside(self) -> None:
        """Kill the programs that run alongside the agent. Stop the agent first, because it would restart the jobs."""
        with suppress(FileNotFoundError, ProcessLookupError):
            os.killpg(int((self.beside / "group").read_text()), signal.SIGKILL)

    def write_settings(self) -> None:
        """Write the files that the agent needs to start. ``start_agent`` calls this if they do not exist yet."""
        mbus = self.server.mbus(self.agent_id)
        cert = {"ca": mbus.ca, "certificate": mbus.certificate, "private_key": mbus.private_key}
        self.store.mkdir(exist_ok=True)
        document = {
            "agent_id": self.agent_id,
            "vm": {"name": "vm-bench"},
            "networks": NETWORKS,
            "blobstore": {"provider": "local", "options": {"blobstore_path": str(self.store)}},
            "env": {"bosh": {"mbus": {"urls": list(self.urls or mbus.urls), "cert": cert}, **self.bosh}},
        }
        self.source.touch(mode=0o600)
        self.source.write_text(json.dumps(document))
        sources = {"Sources": [{"Type": "File", "SettingsPath": str(self.source)}]}
        options = {"Infrastructure": {"Settings": sources}, "AgentShim": {"http": self.http}}
        self.config.write_text(json.dumps(options))

    @property
    def store(self) -> Path:
        """Directory of the local blobstore."""
        return self.scratch / "blobs"

    def blob(self, name: str, content: bytes) -> dict[str, str]:
        """Store a blob. Return its id and digest."""
        (self.store / name).write_bytes(content)
        if self.kept is not None and len(content) <= MAX_KEPT_BYTES:
            (self.kept / name).write_bytes(content)
        return {"blobstore_id": name, "sha1": hashlib.sha1(content).hexdigest()}

    def spec(
        self,
        jobs: int,
        packages: int,
        size: int = 0,
        *,
        version: str = "1",
        more: Mapping[str, Mapping[str, str]] = MappingProxyType({}),
    ) -> dict[str, Any]:
        """Return a spec with ``jobs`` sleeping jobs and ``packages`` packages.

        Each package contains ``size`` bytes, half of them random. ``more`` maps the names of additional jobs to their
        files.
        """
        names = [f"job{number}" for number in range(jobs)]
        files: dict[str, str | bytes] = {f"{job}/{path}": text for job, of in more.items() for path, text in of.items()}
        for name in names:
            words = {"base": self.base, "job": name}
            files[f"{name}/monit"] = _MONIT.format(**words)
            files[f"{name}/bin/ctl"] = _CTL.format(**words)
            files[f"{name}/version"] = version
        packed = {
            f"package{number}": {
                "name": f"package{number}",
                "version": version,
                **self.blob(f"package{number}-{version}", _content(number, size)),
            }
            for number in range(packages)
        }
        templates = [{"name": name, "version": version} for name in (*names, *more)]
        return {
            "deployment": "bench",
            "job": {"name": "bench", "template": names[0], "version": version, "templates": templates},
            "index": 0,
            "id": "bench-instance",
            "name": "bench",
            "az": "z1",
            "networks": NETWORKS,
            "packages": packed,
            "configuration_hash": version,
            "persistent_disk": 0,
            "rendered_templates_archive": self.blob(f"templates-{version}", archive(files)),
        }

    def pids(self) -> dict[str, int]:
        """Return the pids in the jobs' pidfiles, including those that bpm writes."""
        found: dict[str, int] = {}
        if self.is_apart:
            return found
        run = self.base / "data/sys/run"
        for path in (*run.glob("*/*.pid"), *run.glob("bpm/*/*.pid")):
            # A chaos case may have replaced the pidfile with a pipe, on which open() would block. ``guarded.head``
            # rejects pipes.
            with suppress(OSError):
                text = guarded.head(path, MAX_PIDFILE_BYTES).strip()
                if text.isdigit() and int(text) > 1:
                    found[path.stem] = int(text)
        return found

    async def run(self, method: str, *arguments: Any, limit: float | None = None) -> float:
        """Run an action, wait for its task to finish, and return the duration in seconds. ``limit`` is the timeout in
        seconds.
        """
        begun_at = time.monotonic()
        await self.director.run(self.agent_id, method, *arguments, limit=limit)
        took = time.monotonic() - begun_at
        if method == "apply":
            self.applied = arguments[0]
        elif method in ("start", "stop"):
            self.is_started = method == "start"
        return took

    async def until_running(self) -> float:
        """Wait until the agent reports the jobs as running. Return how long this took in seconds."""
        begun_at = time.monotonic()
        async with asyncio.timeout(120):
            while (await self.director.value(self.agent_id, "get_state"))["job_state"] != "running":
                await asyncio.sleep(max(self.director.poll, 0.002))
        return time.monotonic() - begun_at


async def _echo(data: bytes) -> tuple[str, bytes]:
    await asyncio.sleep(0.001)  # Without this pause, the agent would be polled in every iteration of the loop.
    return json.loads(data)["reply_to"], b'{"value":"pong"}'


@asynccontextmanager
async def bystander(w: RunningAgent) -> AsyncIterator[None]:
    """Run ``BYSTANDER``, a client on the bus that only answers requests.

    A slow machine delays the bystander's answers as well, so a comparison with them shows how much of the agent's delay
    is due to the machine.
    """
    await w.server.add_agent(BYSTANDER)
    bus = NatsBus(BYSTANDER, w.server.mbus(BYSTANDER), _echo)
    running = asyncio.create_task(bus.run())
    try:
        await bus.wait_connected()
        yield
    finally:
        running.cancel()
        await asyncio.wait([running])


def _content(seed: int, size: int) -> bytes:
    """Return a package's content: half random bytes, half text."""
    random_half = random.Random(seed).randbytes(size // 2)
    text_half = (b"all work and no play makes a dull package\n" * (size // 80 + 1))[: size // 2]
    return archive({"content": random_half + text_half})


@asynccontextmanager
async def world(command: str, *, poll: float = 0) -> AsyncIterator[RunningAgent]:
    """Provide a scratch directory with a bus and a Director. No agent is running yet.

    ``poll`` is the pause in seconds between two task queries. Without a pause, measured times are exact, but the
    queries keep a CPU busy.
    """
    scratch = Path(tempfile.mkdtemp(prefix="agent-shim-bench-"))
    director = Director(poll=poll)
    try:
        async with NatsServer(scratch / "bus") as server:
            await server.add_agent(AGENT)
            async with director.on(server.peer()):
                made = RunningAgent(scratch, command, server, director)
                try:
                    yield made
                finally:
                    await made.stop_agent()
                    made.end_programs_beside()
                    for pid in made.pids().values():
                        survivor = process.adopt(pid)
                        if survivor is not None:
                            await survivor.terminate(1)
                    await asyncio.to_thread(end_kept, Paths(made.base))
    finally:
        remove_cgroups(scratch)
        shutil.rmtree(scratch, ignore_errors=True)
