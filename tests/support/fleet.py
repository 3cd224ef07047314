"""Runs a bus, a Director, and several machines with one agent each.

The agents are ``agent-shim run`` as root with a real ``/var/vcap``.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

from agent_shim.demo.director import Director
from tests.support.broker import NatsServer
from tests.support.machine import Machine, machine
from tests.support.ports import free_port

BLOBS = Machine.SCRATCH / "blobs"
"""Path of the local blobstore inside a machine."""

CONFIG: dict[str, Any] = {
    "Platform": {"Linux": {"UseDefaultTmpDir": True, "SkipDiskSetup": True}},
    "Infrastructure": {
        "Settings": {"Sources": [{"Type": "File", "SettingsPath": "/var/vcap/bosh/warden-cpi-agent-env.json"}]}
    },
}


@dataclass
class Fleet:
    """Machines with one agent each, keyed by agent ID. All of them are killed when the ``fleet`` block exits."""

    scratch: Path
    server: NatsServer
    director: Director
    stack: ExitStack
    machines: dict[str, Machine] = field(default_factory=dict)
    ends: dict[str, ExitStack] = field(default_factory=dict)
    ssh_port: int = field(default_factory=free_port)

    def blobs(self, agent_id: str) -> Path:
        """Return the blobstore directory of a machine as seen from outside."""
        return self.scratch / agent_id / "blobs"

    def credentials(self, agent_id: str, *, bootstrap: bool = False) -> dict[str, str]:
        """Return a new client certificate in the settings format."""
        mbus = self.server.mbus(agent_id, bootstrap=bootstrap)
        return {"ca": mbus.ca, "certificate": mbus.certificate, "private_key": mbus.private_key}

    async def add(
        self,
        agent_id: str,
        networks: dict[str, Any],
        *,
        volumes: Mapping[str, Path] = MappingProxyType({}),
        bosh: Mapping[str, Any] = MappingProxyType({}),
        **members: Any,
    ) -> Machine:
        """Add a machine and wait until its agent answers.

        ``volumes`` are passed to ``machine``, ``bosh`` is added to ``env.bosh``, and ``members`` are added to the
        settings.
        """
        self.blobs(agent_id).mkdir(parents=True)
        await self.server.add_agent(agent_id)
        stack = self.stack.enter_context(ExitStack())
        made = stack.enter_context(machine(self.scratch / agent_id, volumes))
        cert = self.credentials(agent_id, bootstrap=True)
        settings = {
            "agent_id": agent_id,
            "vm": {"name": f"vm-{agent_id}"},
            "networks": networks,
            "disks": {"system": "", "ephemeral": "", "persistent": {}},
            "env": {
                "bosh": {
                    "mbus": {"urls": [self.server.url], "cert": cert},
                    "blobstores": [{"provider": "local", "options": {"blobstore_path": str(BLOBS)}}],
                    **bosh,
                }
            },
        }
        shim = {"http": "off", "ssh": {"port": self.ssh_port}}
        made.write("/var/vcap/bosh/agent.json", CONFIG | {"AgentShim": shim})
        made.write("/var/vcap/bosh/warden-cpi-agent-env.json", settings | members)
        log = stack.enter_context((self.scratch / agent_id / "agent.log").open("wb"))
        argv = [sys.executable, "-m", "agent_shim.cli", "run", "-C", "/var/vcap/bosh/agent.json"]
        agent = made.popen(argv, stdout=log, stderr=subprocess.STDOUT)
        stack.callback(agent.wait)
        stack.callback(agent.terminate)
        self.machines[agent_id] = made
        self.ends[agent_id] = stack
        await self.director.wait_until_ready(agent_id, timeout=30, patience=0.3)
        return made

    def remove(self, agent_id: str) -> None:
        """Delete a machine as a CPI does."""
        del self.machines[agent_id]
        self.ends.pop(agent_id).close()


@asynccontextmanager
async def fleet(scratch: Path) -> AsyncIterator[Fleet]:
    """Run a bus and a Director that polls tasks at short intervals. At first there are no machines."""
    director = Director(poll=0.01)
    async with AsyncExitStack() as stack:
        server = await stack.enter_async_context(NatsServer(scratch / "bus"))
        await stack.enter_async_context(director.on(server.peer()))
        yield Fleet(scratch, server, director, stack.enter_context(ExitStack()))
