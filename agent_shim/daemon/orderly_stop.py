"""Stops all jobs in order before a container terminates. A preStop hook, SIGTERM to PID 1, or ``drain`` triggers this
graceful shutdown.

First, all pre-stop scripts run, then all drain scripts. Every process keeps running until the last drain script has
finished. After that, the processes are stopped, and the post-stop scripts run. All of this has to fit into the grace
period, whose last seconds are reserved for SIGKILL. If the Director's ``stop`` has already stopped the jobs, no scripts
run. The jobs are not marked as stopped, because the Director still wants them to run, so they start again with the
container.

``main`` handles SIGTERM and decides between this stop and an exit that leaves the jobs running.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable
from typing import Final

import msgspec

from agent_shim.actions.agent import Agent
from agent_shim.core.errors import ActionError
from agent_shim.core.events import ended_before
from agent_shim.services.scripts import SHUTDOWN_ARGUMENTS

logger = logging.getLogger(__name__)

KILL_RESERVE_S: Final = 3.0
"""Scripts are terminated this many seconds before the grace period ends."""
MIN_STOP_S: Final = 1.0
"""Minimum time for stopping the processes."""
HURRIED_SCRIPT_END_S: Final = 0.2
"""How long scripts may take to exit after SIGTERM once ``hurry`` is set. A kubelet that evicts a pod kills it two
seconds after the signal.
"""
NEXT_STATES: Final = dict.fromkeys(
    ("BOSH_VM_NEXT_STATE", "BOSH_INSTANCE_NEXT_STATE", "BOSH_DEPLOYMENT_NEXT_STATE"), "keep"
)
"""Environment variables for pre-stop scripts. "keep" is the Director's value for a stop that deletes nothing."""


class OrderlyStop(msgspec.Struct):
    """One graceful shutdown. ``reasons`` says why it was not clean.

    ``hurry`` terminates the scripts early. It is set by a signal during the stop. If a preStop hook began the stop,
    such a signal means that the grace period is over or that the pod is being evicted.
    """

    grace: float
    hurry: asyncio.Event = msgspec.field(default_factory=asyncio.Event)
    reasons: list[str] = msgspec.field(default_factory=list)
    ends_at: float = 0.0
    """Monotonic time at which the grace period ends."""

    @property
    def summary(self) -> str:
        """Return one line for the termination log."""
        return "all jobs stopped in order" if not self.reasons else "not clean: " + "; ".join(self.reasons)

    async def run(self, agent: Agent) -> None:
        """Stop the jobs and return before the grace period ends. Even if the scripts have used up the period, the
        processes get ``MIN_STOP_S`` seconds to stop.
        """
        ends_at = self.ends_at = time.monotonic() + self.grace
        reserve = min(KILL_RESERVE_S, self.grace / 2)  # the time for stopping the processes after the scripts
        is_stopped = await asyncio.to_thread(agent.paths.stopped_marker.exists)
        # If the jobs are stopped, the Director has already run their scripts. A drain script that ran again might wait
        # for a database that has been stopped.
        jobs = [] if is_stopped else agent.spec.current.job_names
        scripts_end_at = ends_at - reserve
        await self._run_scripts("pre-stop", agent.scripts.run_all("pre-stop", jobs, NEXT_STATES), scripts_end_at)
        await agent.supervisor.seal()  # otherwise the next agent would leave the jobs stopped
        await agent.supervisor.unmonitor()
        drain = agent.scripts.drain(jobs, SHUTDOWN_ARGUMENTS, agent.spec.current, None, self.hurry)
        await self._run_scripts("drain", drain, scripts_end_at)
        stop_timeout = max(MIN_STOP_S, ends_at - time.monotonic())
        agent.supervisor.forget_killed()  # report only processes that this stop has to kill
        try:
            await agent.supervisor.stop(wait=True, timeout=stop_timeout)
        except ActionError as exc:
            self.reasons.append(f"stop: {exc}")
        if killed := agent.supervisor.killed:
            self.reasons.append(f"killed because the time was up: {', '.join(killed)}")
        if jobs and not self.hurry.is_set():
            await self._run_scripts("post-stop", agent.scripts.run_all("post-stop", jobs, {}), ends_at)
        logger.info("orderly stop: %s", self.summary)

    async def _run_scripts(self, name: str, work: Awaitable[None], until: float) -> None:
        """Run all scripts of one kind, such as the drain scripts. Terminate them at the deadline ``until`` (monotonic
        time), or earlier if ``hurry`` is set.
        """
        working = asyncio.ensure_future(work)
        if not await ended_before(self.hurry, working, until - time.monotonic()):
            self.reasons.append(f"{name} scripts were cut short")
            working.cancel()
            # Terminate the scripts within half of the remaining time. The other half is reserved for stopping the
            # processes.
            half = max(0.0, self.ends_at - time.monotonic()) / 2
            await asyncio.wait({working}, timeout=min(half, HURRIED_SCRIPT_END_S) if self.hurry.is_set() else half)
        elif (error := working.exception()) is not None:
            self.reasons.append(f"{name}: {error}")
