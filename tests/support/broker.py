"""Runs the demo's nats-server with additional settings, and can kill, pause or reconfigure it."""

from __future__ import annotations

import signal
import time
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from agent_shim.core.errors import ShimError
from agent_shim.demo import broker
from agent_shim.demo.broker import SERVER_TIMEOUT_S, nats_server
from agent_shim.demo.pki import Authority, Pair
from agent_shim.host import process

__all__ = ["SERVER_TIMEOUT_S", "NatsServer", "knowing", "nats_server"]


class NatsServer(broker.NatsServer):
    """A server that pings its clients every ``ping_interval`` seconds, and drops a client after ``ping_max`` unanswered
    pings.

    The defaults are those of the Director's nats-server.
    """

    def __init__(
        self,
        where: Path,
        authority: Authority | None = None,
        *,
        pair: Pair | None = None,
        ping_interval: float = 5.0,
        ping_max: int = 2,
    ) -> None:
        super().__init__(where, authority)
        self._pair = pair or self._pair
        self._ping = {"ping_interval": f"{ping_interval}s", "ping_max": ping_max}

    @property
    def pid(self) -> int:
        """PID of the running server."""
        return self._running.pid

    async def add_agents(self, agent_ids: Iterable[str], *, bootstrap: bool = True) -> None:
        """Allow many more agents to log in, with a single reload of the server's configuration."""
        self._agents.update(dict.fromkeys(agent_ids, (bootstrap, True)))
        await self.reload()

    async def remove_agent(self, agent_id: str) -> None:
        """Remove an agent's user from the server, which also closes the agent's connection."""
        del self._agents[agent_id]
        await self.reload()

    async def kill(self) -> None:
        if self._process is not None:
            self._process.send(signal.SIGKILL)
            await self._process.wait()
            self._process = None

    def pause(self) -> None:
        """Stop the server with SIGSTOP. Its connections stay open, but requests get no reply."""
        self._signal(signal.SIGSTOP)
        threads = Path(f"/proc/{self.pid}/task")
        while any(stat.read_text().rpartition(")")[2].split()[0] != "T" for stat in threads.glob("*/stat")):
            time.sleep(0.001)  # Each thread stops only when the kernel next schedules it.

    def resume(self) -> None:
        self._signal(signal.SIGCONT)

    async def stop(self) -> None:
        if self._process is not None:
            self._process.send(signal.SIGCONT)
        await super().stop()

    def _signal(self, number: signal.Signals) -> None:
        self._running.send(number)

    @property
    def _running(self) -> process.Process:
        if self._process is None:
            raise ShimError("cannot signal nats-server: it does not run")
        return self._process


@asynccontextmanager
async def knowing(where: Path, authority: Authority | None = None, **options: Any) -> AsyncIterator[NatsServer]:
    """Run a server to which the agent with the id ``agent`` can log in."""
    async with NatsServer(where, authority, **options) as server:
        await server.add_agent("agent")
        yield server
