"""Implements the three ways in which an agent stops its jobs before it exits or becomes idle.

| ending | cause | effect on the bus |
|---|---|---|
| graceful shutdown | the container is being stopped | the agent answers the Director until it exits |
| ``shutdown`` request | the Director deletes the instance | the agent disconnects once the jobs are stopped |
| takeover stop | another agent has taken over a volume | the agent disconnects immediately |

After a ``shutdown`` request, the agent stays idle even if it is restarted.
"""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path
from typing import Final

from agent_shim.actions.agent import Agent
from agent_shim.actions.dispatch import Dispatcher
from agent_shim.core.errors import ActionError, HostError
from agent_shim.daemon.orderly_stop import OrderlyStop
from agent_shim.host import files
from agent_shim.supervisor.supervisor import STOP_TIMEOUT_S

logger = logging.getLogger(__name__)

SHUT_DOWN: Final = "shut down by the Director"
STOPPING_IN_ORDER: Final = "the container ends and all jobs are being stopped"
TERMINATION_LOG: Final = Path("/dev/termination-log")
"""The file whose content Kubernetes shows for a terminated container (kubectl describe pod)."""
TAKEOVER_STOP_TIMEOUT_S: Final = 10.0
"""Stop timeout in seconds for jobs whose volume another agent has taken over."""


class Endings:
    """Begins and carries out the three endings: graceful shutdown, ``shutdown`` request and takeover stop. ``phase``
    describes the ending that has begun, or is "" before that. ``leaves_bus`` is set when the agent must disconnect from
    the bus.
    """

    def __init__(self, agent: Agent, dispatcher: Dispatcher) -> None:
        self.phase = ""
        self.orderly_stop: OrderlyStop | None = None
        self.leaves_bus = asyncio.Event()
        self._agent = agent
        self._dispatcher = dispatcher
        self._ending: asyncio.Task[None] | None = None
        """The task that carries out the latest ending."""

    def begin_orderly_stop(self, grace: float) -> asyncio.Task[None]:
        """Begin to stop all jobs in order within ``grace`` seconds, and return the task that does it. Repeated calls
        return the same task.

        From then on, requests that change the instance are rejected.
        """
        if self.orderly_stop is None or self._ending is None:  # the second condition is for the type checker
            self.phase = self._dispatcher.refusing = STOPPING_IN_ORDER
            self.orderly_stop = OrderlyStop(grace)
            self._ending = asyncio.create_task(self._stop_in_order(self.orderly_stop), name="orderly stop")
        return self._ending

    async def _stop_in_order(self, stop: OrderlyStop) -> None:
        """Run the graceful shutdown and write its outcome to the termination log."""
        await stop.run(self._agent)
        self.phase = f"the container ends: {stop.summary}"
        if self._agent.paths.is_system:
            await asyncio.to_thread(write_termination_log, f"agent-shim: {stop.summary}\n")

    def begin_shutdown(self) -> None:
        """Begin to stop the jobs. Once they are stopped, the agent leaves the bus.

        A separate task does this work, because nobody waits for it to finish. The Director deletes the container
        without even waiting for a reply.
        """
        self.phase = SHUT_DOWN
        self._ending = asyncio.create_task(self._shut_down(), name="shutdown")

    async def _shut_down(self) -> None:
        """Record the shutdown, so that a restarted agent stays idle. Then stop the jobs and leave the bus."""
        agent = self._agent
        agent_id = agent.settings.current.agent_id.encode()  # an agent with another id does not stay idle
        try:
            await asyncio.to_thread(files.write_atomic, agent.paths.shut_down, agent_id, mode=0o600)
            await agent.state_backup.update()
        except HostError as exc:
            logger.error("cannot record the shutdown, so a restarted agent would not stay idle: %s", exc)
        try:
            await self._stop_jobs()
        finally:
            self.leaves_bus.set()

    def begin_takeover_stop(self, why: str) -> None:
        """Stop saving the supervisor's state, leave the bus and stop the jobs. If this agent stayed on the bus, the
        Director would get two replies to each request, one from each agent. If another ending has already begun, do
        nothing.
        """
        if self._ending is None:
            logger.critical("%s; this agent stops its jobs and then stays idle", why)
            self.phase = self._dispatcher.refusing = f"fenced off: {why}"
            self.leaves_bus.set()
            self._agent.supervisor.disown()
            self._ending = asyncio.create_task(self._stop_jobs(TAKEOVER_STOP_TIMEOUT_S), name="takeover stop")

    async def _stop_jobs(self, timeout: float = STOP_TIMEOUT_S) -> None:
        """Stop the jobs. A failure is only logged, because the ending continues in any case."""
        try:
            await self._agent.supervisor.stop(wait=True, timeout=timeout)
        except (HostError, ActionError) as exc:
            logger.error("cannot stop all jobs: %s", exc)


def write_termination_log(text: str, path: Path = TERMINATION_LOG) -> None:
    """Write the outcome to the termination log, which Kubernetes mounts into the container. If there is no such file,
    it is not created.
    """
    try:
        with path.open("r+") as opened:
            opened.write(text)
            opened.truncate()
    except OSError as exc:
        logger.debug("no termination log: %s", exc)
