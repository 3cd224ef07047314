"""An agent with real services in a scratch directory. Requests go through the real dispatch, but not over a bus."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from agent_shim.actions.agent import Agent, EdgeCallbacks
from agent_shim.actions.dispatch import Dispatcher
from agent_shim.bulk.protocol import Execute
from agent_shim.bulk.workers import Workers
from agent_shim.core.errors import ActionError
from agent_shim.core.paths import Paths
from agent_shim.core.settings import Mbus
from agent_shim.daemon import boot, runtime
from agent_shim.daemon.job_recovery import JobRecovery
from agent_shim.host import reaper
from agent_shim.services.settings_store import SettingsStore
from agent_shim.services.state_backup import StateBackup
from agent_shim.services.volume_lease import VolumeLeases
from agent_shim.supervisor.supervisor import Event, Supervisor, Timing

FIRST_POLL_S: Final = 0.001
LONGEST_POLL_S: Final = 0.02
"""Limits on the pause between two task polls. Polling without pauses would keep a CPU busy."""
NETWORKS = {"default": {"type": "manual", "ip": "10.0.0.5", "netmask": "255.255.255.0", "default": ["dns", "gateway"]}}


@dataclass
class LocalAgent:
    """An agent that runs in this process.

    ``call`` returns the reply that would be sent over the bus. ``asked`` lists the ``EdgeCallbacks`` that were called.
    """

    agent: Agent
    dispatcher: Dispatcher
    asked: list[str]
    events: list[Event] = field(default_factory=list)

    @property
    def paths(self) -> Paths:
        return self.agent.paths

    async def call(self, method: str, *arguments: Any, protocol: int = 3) -> dict[str, Any]:
        """Send one request and return the reply."""
        request = {"method": method, "arguments": arguments, "reply_to": "director.x.y.z", "protocol": protocol}
        return await self.raw(request)

    async def raw(self, request: Any) -> dict[str, Any]:
        """Send any JSON value as a request and return the reply."""
        answer = await self.dispatcher.handle(json.dumps(request).encode())
        assert answer is not None, f"dropped: {request}"
        document: dict[str, Any] = json.loads(answer[1])
        return document

    async def run(self, method: str, *arguments: Any, protocol: int = 3) -> dict[str, Any]:
        """Run an action and return its final reply. If it is a task, poll it until it has finished."""
        reply = await self.call(method, *arguments, protocol=protocol)
        pause = FIRST_POLL_S
        async with asyncio.timeout(60):
            while is_running(reply):
                await asyncio.sleep(pause)
                pause = min(2 * pause, LONGEST_POLL_S)
                reply = await self.call("get_task", reply["value"]["agent_task_id"])
        return reply

    async def value(self, method: str, *arguments: Any, protocol: int = 3) -> Any:
        """Run an action that must succeed, and return its value."""
        reply = await self.run(method, *arguments, protocol=protocol)
        assert "value" in reply, reply
        return reply["value"]

    async def error(self, method: str, *arguments: Any, protocol: int = 3) -> str:
        """Run an action that must fail, and return its error message."""
        reply = await self.run(method, *arguments, protocol=protocol)
        assert "exception" in reply, reply
        text: str = reply["exception"]["message"]
        return text


def is_running(reply: dict[str, Any]) -> bool:
    value = reply.get("value")
    return isinstance(value, dict) and value.get("state") == "running"


def write_settings(base: Path, **members: Any) -> Path:
    """Write the settings file that a CPI would write, with a local blobstore in ``base/blobstore``. Return its path."""
    (base / "blobstore").mkdir(parents=True, exist_ok=True)
    path = base / "settings-source.json"
    document = {
        "agent_id": "agent-1",
        "vm": {"name": "vm-1"},
        "mbus": "nats://127.0.0.1:4222",
        "networks": NETWORKS,
        "blobstore": {"provider": "local", "options": {"blobstore_path": str(base / "blobstore")}},
    }
    path.write_text(json.dumps(document | members))
    return path


@asynccontextmanager
async def world(
    base: Path, *, timing: Timing | None = None, execute: Execute | None = None, **members: Any
) -> AsyncIterator[LocalAgent]:
    """Run a booted agent for the duration of the block. Its jobs are stopped at the end.

    ``execute`` replaces the worker processes.
    """
    paths = Paths(base / "vcap")
    await boot.boot([boot.tree_step(paths)])
    store = SettingsStore(paths, [write_settings(base, **members)])
    await store.refreshed()
    asked: list[str] = []
    events: list[Event] = []

    async def announce() -> None:
        asked.append("announce_shutdown")

    async def reconnect(wanted: Mbus) -> None:
        if wanted.certificate == "refused":
            raise ActionError("cannot use the new bus credentials: refused")
        asked.append("reconnect")

    supervisor = Supervisor(
        paths,
        notify=events.append,
        timing=timing or Timing(),
        settling=lambda: store.current.source.env.bosh.agent.settings.settling_time,
    )
    edges = EdgeCallbacks(announce, reconnect, lambda: asked.append("shut_down"))
    kept, leases = StateBackup(paths), VolumeLeases()
    pool = Workers()
    agent = runtime.assemble(
        paths, store, supervisor, edges, state_backup=kept, leases=leases, execute=execute or pool.execute
    )
    recovery = JobRecovery(agent, events.append)
    with reaper.reaping():
        async with pool, supervisor:
            await agent.state_backup.recover(store.current.agent_id)
            await boot.boot(boot.steps(agent, recovery))
            dispatcher = Dispatcher(agent, agent.tasks, on_done=lambda *_: None)
            lane = asyncio.create_task(agent.tasks.run(dispatcher.failure))
            returning = asyncio.create_task(recovery.run())
            try:
                yield LocalAgent(agent, dispatcher, asked, events)
            finally:
                await supervisor.stop(wait=True, timeout=20)
                returning.cancel()
                lane.cancel()
