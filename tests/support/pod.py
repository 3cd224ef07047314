"""Runs an instance whose containers can be replaced while its volumes are kept, with a bus and a Director. Needs root.

Each container is a new machine (``tests.support.machine``) with new pids and a new root file system. The test decides
which volumes to keep. A container is stopped by killing its processes with SIGKILL, as a container runtime does after
the grace period.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import ExitStack, asynccontextmanager, suppress
from ipaddress import ip_address
from pathlib import Path
from typing import Any, Final

from agent_shim.core.paths import Paths
from agent_shim.demo.director import Director, RpcTimeoutError
from tests.support import jobs
from tests.support.broker import NatsServer
from tests.support.cpi import CpiTraits
from tests.support.machine import Machine, machine
from tests.support.waiting import TIMEOUT_S

AGENT: Final = "pod-agent"
NETWORKS: Final = {"default": {"type": "manual", "ip": "127.0.0.1", "prefix": "32", "netmask": "255.0.0.0"}}
BLOBS: Final = Path("/var/vcap/blobs")
Files = Mapping[str, Mapping[str, str | bytes]]
SLEEPER: Final[Files] = {"web": jobs.sleeper(Paths(), "web")}
"""A job that sleeps."""
PORT: Final = "cable0"
"""Name of the containers' network interface. The host must not have an interface with this name, because the host's
``/sys`` is visible inside the containers.
"""


def end(entered: subprocess.Popen[bytes], number: signal.Signals = signal.SIGTERM) -> None:
    """Send a signal to the program that ``Machine.popen`` started, and wait until the program has exited.

    ``entered`` is the process that has entered the machine's namespaces. The program is a child of that process.
    """
    for child in Path(f"/proc/{entered.pid}/task/{entered.pid}/children").read_text().split():
        os.kill(int(child), number)
    entered.wait()


def _cable(pid: int, gateway: str) -> None:
    """Connect a process's network namespace to the current one with a veth pair. ``gateway`` becomes the address of the
    end in the current namespace.

    The pair disappears along with the process's namespace.
    """
    ours, theirs = f"t{pid}", str(ip_address(gateway) + 1)
    inside = ["nsenter", "-t", str(pid), "-n"]
    for command in (
        ["ip", "link", "add", ours, "type", "veth", "peer", "name", PORT, "netns", str(pid)],
        ["ip", "address", "add", f"{gateway}/30", "dev", ours],
        ["ip", "link", "set", ours, "up"],
        [*inside, "ip", "address", "add", f"{theirs}/30", "dev", PORT],
        [*inside, "ip", "link", "set", PORT, "up"],
    ):
        subprocess.run(command, check=True)


class PodInstance:
    """An instance whose container can be replaced.

    ``disks`` are the cids of attached volumes. With ``keeps_root``, all containers use the same root file system.
    ``prefix`` is put in front of the agent's command line. ``seen`` maps paths inside the containers to additional host
    directories that are mounted there.
    """

    def __init__(self, scratch: Path, server: NatsServer, director: Director, cpi: CpiTraits | None = None) -> None:
        self.cpi = cpi or CpiTraits()
        self.scratch = scratch
        self.server = server
        self.director = director
        self.disks: list[str] = []
        self.env: dict[str, Any] = {}
        self.keeps_root = False
        self.prefix: Sequence[str] = ()
        self.http = "off"
        self.shim: dict[str, Any] = {}
        self.gateway = ""
        """If set, each container gets its own network, in which this is the address of the machine that runs the tests.
        """
        self.url = server.url
        self.seen: dict[str, Path] = {}
        self.agent_id = AGENT
        self._stack = ExitStack()
        self._agents: list[subprocess.Popen[bytes]] = []
        self._machine: Machine | None = None
        self._number = 0
        for name in ("data", "blobs", "root"):
            (scratch / name).mkdir()

    @property
    def machine(self) -> Machine:
        """Return the current container."""
        assert self._machine is not None
        return self._machine

    @property
    def vcap(self) -> Path:
        """The container's ``/var/vcap`` as seen from outside."""
        return self.machine.vcap

    @property
    def data(self) -> Path:
        """The data volume's directory, which exists even without a container."""
        return self.scratch / "data"

    def volume(self, cid: str) -> Path:
        """Return a persistent disk's directory, which exists even without a container."""
        return self.scratch / "disks" / cid

    @property
    def log(self) -> str:
        """Return the log of the current container's agent."""
        return (self.scratch / f"agent-{self._number}.log").read_text()

    def attach(self, cid: str) -> None:
        """Attach an additional disk, which appears when the next container is started."""
        self.volume(cid).mkdir(parents=True, exist_ok=True)
        self.disks.append(cid)

    def lose_data(self) -> None:
        """Replace the data volume with an empty one, as some CPIs do when they recreate a container."""
        shutil.rmtree(self.data)
        self.data.mkdir()

    def start_container(self) -> None:
        """Start a new container without an agent."""
        self._number += 1
        volumes = {str(BLOBS): self.scratch / "blobs", "/var/vcap/data": self.data} | self.seen
        if self.cpi.attaches != "live":
            volumes |= {self.cpi.disk(cid): self.volume(cid) for cid in self.disks}
        if self.keeps_root:
            volumes = {"/var/vcap": self.scratch / "root"} | volumes
        place = self.scratch / f"container-{self._number}"
        place.mkdir()
        self._machine = self._stack.enter_context(machine(place, volumes, has_network=bool(self.gateway)))
        if self.gateway:
            _cable(self._machine.pid, self.gateway)
        if self.cpi.start:
            self.machine.run(self.cpi.start)
        sources = [{"Type": "File", "SettingsPath": path} for path in self.cpi.sources]
        settings = {"Infrastructure": {"Settings": {"Sources": sources}}, "AgentShim": {"http": self.http, **self.shim}}
        self.machine.write("/var/vcap/bosh/agent.json", settings)
        if not self.cpi.is_late:
            self.deliver()

    def deliver(self) -> None:
        """Write the settings of an instance with the attached disks, as the CPI does."""
        mbus = self.server.mbus(self.agent_id)
        cert = {"ca": mbus.ca, "certificate": mbus.certificate, "private_key": mbus.private_key}
        blobstore = {"provider": "local", "options": {"blobstore_path": str(BLOBS)}}
        bosh = {"mbus": {"urls": [self.url], "cert": cert}, "blobstores": [blobstore]}
        own = dict(self.cpi.members)
        disks = own.pop("disks", {}) | {"persistent": {cid: self.cpi.hint(cid) for cid in self.disks}}
        document = {
            "agent_id": self.agent_id,
            "vm": {"name": "vm-1"},
            "networks": NETWORKS,
            "disks": disks,
            "env": {"bosh": bosh | self.env},
        }
        self.cpi.deliver(self.machine, self.cpi.settings, document | own)

    def exec_agent(self) -> subprocess.Popen[bytes]:
        """Start an agent in this container, without waiting for it to answer."""
        log = self._stack.enter_context((self.scratch / f"agent-{self._number}.log").open("ab"))
        argv = [*self.prefix, sys.executable, "-m", "agent_shim.cli", "run", "-C", "/var/vcap/bosh/agent.json"]
        agent = self.machine.popen(argv, stdout=log, stderr=subprocess.STDOUT)
        self._agents.append(agent)
        return agent

    async def start(self) -> float:
        """Start a new container and its agent. Return the monotonic time at which the agent was started."""
        self.start_container()
        return await self.start_agent()

    async def start_agent(self) -> float:
        """Start an agent and wait until it answers. Return the monotonic time at which it was started."""
        begun_at = time.monotonic()
        self.exec_agent()
        if self.cpi.is_late:
            self.deliver()
        async with asyncio.timeout(TIMEOUT_S):
            while True:
                try:
                    # On a slow machine, wait longer for each answer.
                    patience = 0.02 if time.monotonic() - begun_at < 5 else 1.0
                    await self.director.value(self.agent_id, "ping", timeout=patience)
                    break
                except RpcTimeoutError:
                    continue
        if self.cpi.finish:
            self.machine.run(self.cpi.finish)
        return begun_at

    def end_agent(self, number: signal.Signals = signal.SIGTERM) -> None:
        """Stop the agent with a signal, as its service manager does. The container keeps running."""
        end(self._agents.pop(), number)

    def kill(self) -> None:
        """Kill the container with everything that runs in it."""
        self._stack.close()
        self._machine = None
        while self._agents:
            self._agents.pop().wait()

    async def restart(self) -> float:
        """Kill the container and start the next one."""
        self.kill()
        return await self.start()

    async def until(self, *job_states: str) -> dict[str, Any]:
        """Wait until the instance is in one of the ``job_states``. Return the reply to ``get_state``."""
        async with asyncio.timeout(TIMEOUT_S):
            while True:
                state: dict[str, Any] = await self.director.value(self.agent_id, "get_state")
                if state["job_state"] in job_states:
                    return state
                await asyncio.sleep(0.02)

    async def stop_copying(self, into: str) -> int:
        """Suspend a migration's worker once it has copied some of the files. Return the worker's pid as seen from
        outside.
        """
        target = self.volume(into)
        async with asyncio.timeout(TIMEOUT_S):
            while True:
                # The worker may exit before it gets the signal.
                with suppress(ProcessLookupError):
                    if (number := self._worker()) and len(list(target.iterdir())) > 5:
                        os.kill(number, signal.SIGSTOP)
                        return number
                await asyncio.sleep(0)

    def _worker(self) -> int:
        for pid in self.machine.pids():
            with suppress(OSError):
                if b"agent_shim.bulk.worker" in Path(f"/proc/{pid}/cmdline").read_bytes():
                    return pid
        return 0

    async def run(self, method: str, *arguments: Any) -> Any:
        """Run an action and return its value."""
        return await self.director.run(self.agent_id, method, *arguments)

    async def apply(self, files: Files = SLEEPER, packages: Files | None = None, version: str = "1") -> dict[str, Any]:
        """Apply a spec with the jobs in ``files``, which maps each name to the job's files. Return the spec."""
        spec = jobs.spec(self.scratch / "blobs", files, packages, version=version)
        await self.run("apply", spec)
        return spec

    async def deploy(self, files: Files = SLEEPER, packages: Files | None = None) -> dict[str, Any]:
        """Apply a spec and start its jobs as the Director does, except for pre-start, and wait until they are running.

        Return the spec.
        """
        spec = await self.apply(files, packages)
        await self.run("start")
        await self.until("running")
        return spec


@asynccontextmanager
async def pod(scratch: Path, cpi: CpiTraits | None = None) -> AsyncIterator[PodInstance]:
    """Create an instance without a container. At the end, everything that runs in its containers is killed."""
    director = Director(poll=0.01)
    async with NatsServer(scratch / "bus") as server, director.on(server.peer()):
        await server.add_agent(AGENT)
        made = PodInstance(scratch, server, director, cpi)
        try:
            yield made
        finally:
            made.kill()
